"""What triton compiles, told while it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The kernels that triton compiles meanwhile: those that it does not find in its cache on disk."""
    from triton import knobs  # there wherever torch has CUDA

    names: list[str] = []
    listener = knobs.compilation.listener

    def note(*, cache_hit: bool, **facts: Any) -> None:
        if not cache_hit:
            names.append(facts["src"].name)
        if listener is not None:
            listener(cache_hit=cache_hit, **facts)

    knobs.compilation.listener = note
    try:
        yield names
    finally:
        knobs.compilation.listener = listener
