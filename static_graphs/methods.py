"""The table of forward methods and how a packed axis is cut into them. Pure; no torch.

forward_{N} runs exactly N rows and pads what is narrower; forward_others runs exactly what it is given (EXE-1, PLAN-*).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Method:
    """One forward. Static methods run `max_tokens` rows always; the dynamic one runs up to that many."""

    name: str
    max_tokens: int
    is_static: bool


@dataclass(frozen=True, slots=True)
class StepSlice:
    """Tokens [offset, offset + length) of the packed axis, run by `methods[method]` as `width` rows."""

    offset: int
    length: int
    method: int
    width: int


def method_table(widths: Sequence[int], max_dynamic: int | None) -> tuple[Method, ...]:
    """The ladder, narrowest first, the dynamic method last. `max_dynamic` must pass every width (EXE-3)."""
    if not widths and max_dynamic is None:
        raise ValueError("a method table needs at least one width or a dynamic method")
    ladder = sorted(set(widths))
    if ladder and ladder[0] < 1:
        raise ValueError(f"forward_{ladder[0]} is no method: a width is at least 1")
    if ladder and max_dynamic is not None and max_dynamic <= ladder[-1]:
        raise ValueError(f"forward_others takes {max_dynamic} tokens: it must be wider than forward_{ladder[-1]}")
    methods = [Method(f"forward_{width}", width, True) for width in ladder]
    if max_dynamic is not None:
        methods.append(Method("forward_others", max_dynamic, False))
    return tuple(methods)


def plan_slices(num_tokens: int, methods: Sequence[Method]) -> list[StepSlice]:
    """Cut `num_tokens` packed tokens into consecutive slices of at most the widest method (PLAN-1..4).

    Each slice runs in the narrowest method that holds it; static ones pad to their width.
    """
    slices: list[StepSlice] = []
    if not methods:
        return slices
    widest = methods[-1].max_tokens
    for offset in range(0, num_tokens, widest):
        length = min(widest, num_tokens - offset)
        index = next(i for i, method in enumerate(methods) if method.max_tokens >= length)
        chosen = methods[index]
        slices.append(StepSlice(offset, length, index, chosen.max_tokens if chosen.is_static else length))
    return slices
