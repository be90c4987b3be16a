"""Methods beside the forwards: a model adapter's own fixed-shape work, captured where the forwards are (EXE-8).

Such a method reads and writes tensors at fixed addresses and takes no arguments, so that a graph of it can be
replayed. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from static_graphs.graphs import captured, frozen_garbage

Run = Callable[[], None]


@dataclass(frozen=True, slots=True)
class AdditionalMethod:
    """One fixed-shape piece of work."""

    name: str
    run: Run


class AdditionalMethods:
    """By name, with a count of calls each."""

    def __init__(self, methods: Sequence[AdditionalMethod]) -> None:
        self._runs: dict[str, Run] = {method.name: method.run for method in methods}
        self._calls = dict.fromkeys(self._runs, 0)

    @torch.inference_mode()
    def capture(self) -> None:
        """Replace every method by a CUDA graph of it, captured on the current device."""
        with frozen_garbage():
            for name, run in self._runs.items():
                graph, _ = captured(run)
                self._runs[name] = graph.replay

    @torch.inference_mode()
    def call(self, name: str) -> None:
        """Run it once. Raises KeyError for a name that was not given at creation."""
        self._runs[name]()
        self._calls[name] += 1

    def calls(self) -> tuple[tuple[str, int], ...]:
        return tuple(self._calls.items())
