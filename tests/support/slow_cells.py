"""A cell table of dicts and lists, one cell at a time: slow, and plain enough to be right.

The oracle of `cache.cells`, and what its tests need to compare the two.
"""

from collections.abc import Sequence

import numpy as np

from cache.cells import CellTable, Placement, runs
from cache.geometry import CacheFull, InvalidPosition, InvalidStep, Reach, UnknownSequence


class SlowCells:
    def __init__(self, capacity: int, max_sequences: int):
        self.capacity = capacity
        self.max_sequences = max_sequences
        self.lists: dict[int, list[int]] = {}
        self.loose: list[int] = []
        """Cells held without a sequence, as often as they are."""

    @property
    def holders(self) -> dict[int, list[int]]:
        """Held cell -> the sequences that hold it, -1 for each loose reference."""
        found: dict[int, list[int]] = {}
        for seq, cells in self.lists.items():
            for cell in cells:
                found.setdefault(cell, []).append(seq)
        for cell in self.loose:
            found.setdefault(cell, []).append(-1)
        return found

    @property
    def free_cells(self) -> int:
        return self.capacity - len(self.holders)

    @property
    def used_end(self) -> int:
        return max(self.holders, default=-1) + 1

    def pos(self, seq: int) -> int:
        return len(self.lists.get(seq, []))

    def seq_new(self) -> int:
        for seq in range(self.max_sequences):
            if seq not in self.lists:
                self.lists[seq] = []
                return seq
        raise CacheFull

    def seq_clone(self, src: int, upto: int | None = None) -> int:
        cells = self._list(src)
        if not cells or (upto is not None and upto < 0):
            raise InvalidPosition
        clone = self.seq_new()
        self.lists[clone] = cells[:upto]
        return clone

    def seq_rm(self, seq: int) -> None:
        self._list(seq)
        del self.lists[seq]

    def rewind(self, seq: int, position: int) -> None:
        cells = self._list(seq)
        if not 0 <= position <= len(cells):
            raise InvalidPosition
        del cells[position:]

    def seq_from(self, cells: Sequence[int]) -> int:
        self._check_held(cells)
        seq = self.seq_new()
        self.lists[seq] = list(cells)
        return seq

    def rebase(self, seq: int, cells: Sequence[int]) -> None:
        own = self._list(seq)
        self._check_held(cells)
        length = len(cells)
        if length > len(own):
            raise InvalidPosition
        if own[:length] == list(cells):
            return
        if length < len(own) and len(self.holders[own[length - 1]]) > 1:
            raise InvalidPosition
        own[:length] = cells

    def hold_cells(self, cells: Sequence[int]) -> None:
        self._check_held(cells)
        self.loose += cells

    def release_cells(self, cells: Sequence[int]) -> None:
        self._check_held(cells)
        if not set(cells) <= set(self.loose):
            raise InvalidPosition
        for cell in cells:
            self.loose.remove(cell)

    def _check_held(self, cells: Sequence[int]) -> None:
        if not set(cells) <= self.holders.keys():
            raise InvalidPosition

    def clear(self) -> None:
        self.lists.clear()
        self.loose.clear()

    def place(self, seq_ids: Sequence[int]) -> list[int]:
        """The cells of the tokens, in order."""
        if not seq_ids:
            raise InvalidStep
        for seq in seq_ids:
            self._list(seq)
        held = self.holders
        free = [cell for cell in range(self.capacity) if cell not in held][: len(seq_ids)]
        if len(free) < len(seq_ids):
            raise CacheFull
        for seq, cell in zip(seq_ids, free, strict=True):
            self.lists[seq].append(cell)
        return free

    def _list(self, seq: int) -> list[int]:
        if seq not in self.lists:
            raise UnknownSequence
        return self.lists[seq]


def state_of(table: CellTable) -> tuple[object, ...]:
    """Everything a caller could tell two tables apart by."""
    lists = {seq: table.cells_of(seq).tolist() for seq in range(table.max_sequences) if table.is_live(seq)}
    return lists, table.references().tolist(), table.free_cells, table.used_end


def mask_rows(table: CellTable, placed: Placement, reach: Reach) -> list[str]:
    """What each token of a step sees, a character a cell below used_end: `1` seen, `.` not."""
    starts, counts = runs(reach, placed.positions)
    rows = []
    for seq, start, count in zip(placed.seq_ids.tolist(), starts.tolist(), counts.tolist(), strict=True):
        seen = set(table.cells_of(seq)[start : start + count].tolist())
        rows.append("".join("1" if cell in seen else "." for cell in range(table.used_end)))
    return rows


def slow_mask_rows(slow: SlowCells, seq_ids: Sequence[int], cells: Sequence[int], reach: Reach) -> list[str]:
    """The same from the meaning of a reach: cell by cell, by position, never by cell index (CELL-26)."""
    rows = []
    for seq, own in zip(seq_ids, cells, strict=True):
        held = slow.lists[seq]
        position = held.index(own)
        oldest = {
            "all": 0,
            "window": position - reach.size + 1,
            "chunk": position // max(reach.size, 1) * reach.size,
        }[reach.kind]
        seen = [cell in held and oldest <= held.index(cell) <= position for cell in range(slow.used_end)]
        rows.append("".join("1" if each else "." for each in seen))
    return rows


def random_step(rng: np.random.Generator, live: Sequence[int], max_tokens: int) -> list[int]:
    """Owners of 1 .. max_tokens tokens: runs and singles of a few live sequences, in any interleaving."""
    chosen = rng.choice(live, size=rng.integers(1, min(len(live), 6) + 1), replace=False)
    ids = rng.choice(chosen, size=rng.integers(1, max_tokens + 1))
    if rng.random() < 0.5:
        ids.sort()
    return [int(seq) for seq in ids]
