"""What someone who looks at a running engine sees: the pool's cells, who holds them, what waits, what ran lately.

Values only, torch-free: the server hands them on to its page. Made by `EngineLoop.view` when it is asked for, never
else. Numbers and lengths; no token, no text, no caller's name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.types import EngineStats, TierReport

FREE = 0
KEPT = 1
"""Of the prefix tree, and of no running session."""
CLAIMED = 2
"""Held, but by no session as far as the host knows: by the step in flight, or by a prefix that comes from a tier."""
FIRST_SESSION = 3
"""Code of the first of `View.sessions`; the next one's is one more."""
SHARED = 0x8000
"""Added to a session's code: several sessions hold the cell."""

MAX_WAITING_SHOWN = 128


@dataclass(frozen=True, slots=True)
class CellMap:
    """The pool, cell by cell or every `stride`-th cell of a large one."""

    total: int = 0
    stride: int = 1
    codes: bytes = b""
    """u16, little-endian, of the cells 0, stride, 2 * stride ...; what lies behind the last held cell is left out."""
    kept: int = 0
    claimed: int = 0
    private: int = 0
    shared: int = 0
    """Cells of each kind, all counted; the rest is free."""


@dataclass(frozen=True, slots=True)
class ViewedSession:
    """A running choice."""

    id: int
    """The executor's; never that of another session."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that somebody had computed before."""
    computed_tokens: int
    generated_tokens: int
    is_decoding: bool


@dataclass(frozen=True, slots=True)
class ViewedStep:
    """One step's packed axis and the forwards that ran it."""

    number: int
    age_s: float
    """Since its end."""
    duration_s: float
    sessions: tuple[int, ...]
    """Ids of the sessions in packed order, and below how many tokens each had there."""
    counts: tuple[int, ...]
    num_decodes: int
    """The first so many are decodes, the others prefill."""
    forwards: tuple[tuple[str, int, int], ...]
    """(method, tokens, rows run), in the order in which they ran."""


@dataclass(frozen=True, slots=True)
class View:
    """One look."""

    cells: CellMap = field(default_factory=CellMap)
    sessions: tuple[ViewedSession, ...] = ()
    waiting: tuple[int, ...] = ()
    """Tokens of the first `MAX_WAITING_SHOWN` that wait, in their order."""
    steps: tuple[ViewedStep, ...] = ()
    """Oldest first."""
    tiers: tuple[TierReport, ...] = ()
    """Below the pool, fastest first."""
    stats: EngineStats = field(default_factory=EngineStats)
    cost_s: float = 0.0
    """Engine time that this look took."""
