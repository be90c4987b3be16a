"""How an executor is made, and every limit that its numbers must keep together (EXE-3, EXE-4, EXE-6..9). Pure.

`derive` turns what was asked for into what is built, or refuses it by name before anything exists. The executor spec's
"max_cells" counts the scratch row; `capacity_cells` does not: max_cells = capacity_cells + 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from cache.geometry import CacheConfig, InvalidConfig
from engine.errors import ConfigError
from static_graphs.additional import AdditionalMethod
from static_graphs.methods import Method, method_table

MIN_SEQUENCES = 64
"""Sequence ids a cache has at least: whoever runs raw steps takes ids beside the sessions'."""


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """Belongs to one executor: nothing here is process-wide, so differently made ones live side by side (EXE-10)."""

    capacity_cells: int
    """Tokens the pool holds, all sessions together."""
    widths: tuple[int, ...]
    """Of the static methods forward_{N}."""
    max_dynamic: int | None = None
    """Widest step of forward_others; None: there is no such method."""
    max_sessions: int = 1
    """Open at once, clones included."""
    max_session_tokens: int = 0
    """Of one session; 0: the pool divided by the sessions, at most the model's context."""
    reserves_cells: bool = True
    """Every session can always reach max_session_tokens, because the pool holds them all. False: sessions are admitted
    optimistically, and whoever schedules them preempts when cells run out (DESIGN D10)."""
    max_sequences: int | None = None
    """Ids of the cache: sessions, and owners of raw steps. None: max_sessions, but at least MIN_SEQUENCES."""
    cache_kind: str = "batched"
    """Of cache/factory.py. "single" holds one sequence."""
    kv_dtype: torch.dtype | None = None
    """None: the model's."""
    initial_capacity: int | None = None
    """Cells backed by memory at the first step, at most all. None: the cache's default."""
    min_selected_rows: int = 1
    """Fewest rows the head runs on behind forward_others."""
    captures_static_methods: bool = True
    """On CUDA. forward_others is not: its width varies."""
    captures_full_step: bool = False
    """Where the static methods are captured, forward_others is too, for steps of exactly `max_dynamic` tokens."""
    overlaps: bool = True
    """On CUDA, a step may be launched before the one ahead of it is collected (DESIGN D7)."""
    batch_invariant: bool = False
    """A row's logits do not depend on the step it is in, nor on its place there: proven at start (invariance.py). On
    CUDA, over cells, with one static method and no other."""
    additional_methods: tuple[AdditionalMethod, ...] = ()
    """Captured where the static methods are."""
    tap_layers: tuple[int, ...] = ()
    """Decoder layers whose hidden states raw steps hand out."""


@dataclass(frozen=True, slots=True)
class ExecutorPlan:
    """What is built."""

    methods: tuple[Method, ...]  # narrowest first, the dynamic one last
    max_session_tokens: int
    cache: CacheConfig


def derive(options: ExecutorOptions, *, context: int, dtype: torch.dtype) -> ExecutorPlan:
    """context: tokens the model has positions for; dtype: its own. Raises ConfigError with the numbers."""
    methods = _methods(options)
    widest = methods[-1].max_tokens
    if options.capacity_cells < widest:  # EXE-6
        raise ConfigError(
            f"capacity_cells is {options.capacity_cells}: the widest step, {methods[-1].name}, takes {widest} cells"
        )
    if not 1 <= options.min_selected_rows <= widest:
        raise ConfigError(f"min_selected_rows is {options.min_selected_rows}: it must be in [1, {widest}]")
    if options.initial_capacity is not None and options.initial_capacity < 1:
        raise ConfigError(f"initial_capacity is {options.initial_capacity}: it must be at least 1")
    _check_additional(options, methods)
    if options.batch_invariant and (len(methods) > 1 or options.cache_kind == "single"):
        raise ConfigError(
            f"a batch-invariant executor has one static method and the batched cache, not "
            f"{', '.join(method.name for method in methods)} and {options.cache_kind!r}"
        )
    max_session_tokens = _max_session_tokens(options, context)
    try:
        cache = CacheConfig(
            capacity_cells=options.capacity_cells,
            max_write=widest,
            kv_dtype=options.kv_dtype or dtype,
            max_sequences=_max_sequences(options),
            batch_invariant=options.batch_invariant,
        )
        if options.initial_capacity is not None:
            cache = replace(cache, initial_cells=options.initial_capacity)
    except InvalidConfig as error:
        raise ConfigError(str(error)) from error
    return ExecutorPlan(methods, max_session_tokens, cache)


def _methods(options: ExecutorOptions) -> tuple[Method, ...]:
    if not options.widths:
        raise ConfigError("widths is empty: an executor needs at least one static method")
    try:
        return method_table(options.widths, options.max_dynamic)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _max_session_tokens(options: ExecutorOptions, context: int) -> int:
    sessions, asked, cells = options.max_sessions, options.max_session_tokens, options.capacity_cells
    if sessions < 1:
        raise ConfigError(f"max_sessions is {sessions}: it must be at least 1")
    if asked < 0:
        raise ConfigError(f"max_session_tokens is {asked}: it must be at least 1, or 0 to divide the pool")
    if asked > context:
        raise ConfigError(f"max_session_tokens is {asked}: the model's context is {context} tokens")
    if asked == 0:
        share = min(context, cells // sessions if options.reserves_cells else cells)
        if share < 1:
            raise ConfigError(f"{sessions} sessions divide {cells} cells: none is left for each")
        return share
    if options.reserves_cells and sessions * asked > cells:
        raise ConfigError(
            f"{sessions} sessions of {asked} tokens reserve {sessions * asked} cells: the pool has {cells}. "
            f"Use at most {cells // sessions} tokens each, or reserves_cells=False"
        )
    return asked


def _max_sequences(options: ExecutorOptions) -> int:
    if options.cache_kind == "single":
        if options.max_sessions > 1:
            raise ConfigError(f"max_sessions is {options.max_sessions}: a single cache holds one sequence")
        return 1
    if options.max_sequences is None:
        return max(options.max_sessions, MIN_SEQUENCES)
    if options.max_sequences < options.max_sessions:
        raise ConfigError(
            f"max_sessions is {options.max_sessions}: the cache has ids for {options.max_sequences} sequences"
        )
    return options.max_sequences


def _check_additional(options: ExecutorOptions, methods: tuple[Method, ...]) -> None:
    taken = {method.name for method in methods}
    for method in options.additional_methods:
        if method.name in taken:
            raise ConfigError(f"there are two methods named {method.name!r}")
        taken.add(method.name)
