"""Which cells of the prefix tree lack K/V: those that a tier gave for the sake of what lies behind them.

Layers with a window store the tail of a chunk and bring up the last chunks of a prefix, so the cells before that are
theirs in name only. A prefix may end wherever each layer's window before its end is whole; nothing reads what is not.

    loaded prefix      ├───────────────┬─────┤ a session may begin at the end, and go on from there
    sees everything    │xxxxxxxxxxxxxxxxxxxxx│ or where the windows before it are whole:
    has a window       │...............xxxxxx│ nowhere inside the part without

Owned by the engine thread, like the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cache.cells import I32
from cache.geometry import InvalidConfig
from cache.offload.groups import Groups

MAX_WINDOWED = 32
"""Kernel groups that can have holes: a bit of a word each."""


@dataclass(frozen=True, slots=True)
class _Windowed:
    """A kernel group that can have holes, and its bit."""

    object_group: int
    window: int
    kept: int
    """Tokens of a chunk that are stored: all, or its tail."""
    bit: np.uint32


class Holes:
    """A word a cell; what is said of a cell that is not in the tree means nothing."""

    def __init__(self, groups: Groups, capacity_cells: int) -> None:
        """Raises InvalidConfig for more kinds of windows than there are bits."""
        found = []
        for group in groups.object_groups:
            for member in groups.members(group.index):
                kept = member.slots_per_chunk * member.ratio
                if member.window is not None and (group.window_chunks is not None or kept < groups.chunk_tokens):
                    found.append((group.index, member.window, kept))
        if len(found) > MAX_WINDOWED:
            raise InvalidConfig(
                f"the layers have {len(found)} kinds of windows: tails are kept for up to {MAX_WINDOWED}, "
                "use --kv-full-windows"
            )
        self._windowed = [_Windowed(*each, bit=np.uint32(1 << number)) for number, each in enumerate(found)]
        self._chunk_tokens = groups.chunk_tokens
        self._bits = np.zeros(capacity_cells if found else 0, np.uint32)
        self._has_any = False

    @property
    def has_any(self) -> bool:
        """Whether a cell ever had one; while none has, nothing needs to be asked."""
        return self._has_any

    def loaded(self, cells: I32, first: int, begins: Sequence[int]) -> None:
        """Cells of whole chunks from number `first` on; begins[g]: the first chunk that object group g brought."""
        if not self._windowed:
            return
        lacks = np.zeros((cells.size // self._chunk_tokens, self._chunk_tokens), np.uint32)
        for each in self._windowed:
            lacks |= each.bit
            brought = max(0, begins[each.object_group] - first)
            lacks[brought:, self._chunk_tokens - each.kept :] &= ~each.bit
        self._bits[cells] = lacks.reshape(-1)
        self._has_any |= bool(lacks.any())

    def computed(self, cells: I32) -> None:
        """A forward wrote them, in all layers."""
        if self._has_any:
            self._bits[cells] = 0

    def are_in(self, cells: I32) -> bool:
        return self._has_any and bool(self._bits[cells].any())

    def usable(self, cells: I32) -> int:
        """The longest prefix of a path's cells that a session can go on from."""
        if not self.are_in(cells):
            return int(cells.size)
        ends = np.arange(cells.size + 1)
        is_usable = np.ones(ends.size, bool)
        for each in self._windowed:
            lacks = (self._bits[cells] & each.bit) != 0
            # By end: one more than the last position before it that lacks this group; 0 where none does.
            behind = np.concatenate(([0], np.maximum.accumulate(np.where(lacks, ends[1:], 0))))
            is_usable &= (behind == 0) | (ends - behind >= each.window)
        return int(ends[is_usable].max())

    def can_store(self, cells: I32, object_group: int) -> bool:
        """Whether a chunk's cells have all that the object group stores of it."""
        return not self._has_any or not any(
            (self._bits[cells[cells.size - each.kept :]] & each.bit).any()
            for each in self._windowed
            if each.object_group == object_group
        )
