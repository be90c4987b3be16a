"""The cell table: which sequence holds which cells, in which order. Numpy on the host; knows nothing of K/V bytes.

A cell is one token's slot in every layer's pool. A sequence is an ordered list of cells: entry p is position p. Cells
are shared by reference counts, so a clone costs no cell, and because writes go to fresh cells nothing is ever copied.

    sequence 3 (length 6, page of 4)   page_table[3] = [7, 2, ...]      pages[7] = [r0 r1 r2 r3]
    positions 0 1 2 3 | 4 5                                             pages[2] = [r4 r5  .  .]    r = cell + 1

Lists are paged, and pages are shared by clones until one of the sharers appends to one. A list built from loose cells
shares the full pages that are there already, and every cell has one predecessor in all lists. So two sequences can
differ in a full page only where they branched: capacity / page_cells + 2 * max_sequences pages hold every possible
table, and no verb is ever refused for want of a page.

Cells may be held without a sequence, by reference too: a prefix tree keeps what finished sequences computed.

Free cells are found lowest first in two levels: how many are free in each block of 512, then the counts of the few
blocks that are needed. No verb loops over cells in Python, and placing a step does not look at the rest of the pool.

Not thread-safe: `CellCache` holds the lock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache.geometry import CacheFull, InvalidPosition, InvalidStep, Reach, UnknownSequence

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

BLOCK_BITS = 9
BLOCK_CELLS = 1 << BLOCK_BITS
MAX_PAGE_CELLS = 4096


@dataclass(frozen=True, slots=True)
class Declaration:
    """The owners of a step's tokens, admitted as a whole. Says which incarnation of each id was meant."""

    seq_ids: I32  # [T]
    births: I64  # [T]


@dataclass(frozen=True, slots=True)
class Placement:
    """What one step claimed: enough to write it, and to take it back."""

    seq_ids: I32  # [T]
    positions: I64  # [T] of each token in its sequence
    cells: I64  # [T] ascending
    owners: I32  # [S] distinct ids, ascending
    births: I64  # [S]
    lengths: I64  # [S] what each owner held before the step


class WriteLog:
    """Flat indices of `pages` and `page_table` written since the log was last emptied, repeats included."""

    def __init__(self) -> None:
        self.pages: list[I64] = []
        self.page_table: list[I64] = []

    def clear(self) -> None:
        self.pages.clear()
        self.page_table.clear()


class CellTable:
    """Reference count per cell, ordered cell list per sequence.

    A refused verb raises before anything changed. Ids are 0 .. max_sequences - 1, the lowest first.
    `pages` and `page_table` are written in place, so tensors over their memory stay true.
    """

    def __init__(self, capacity: int, max_sequences: int, *, page_cells: int | None = None, log_writes: bool = False):
        page_cells = page_cells or page_cells_for(capacity)
        if page_cells & (page_cells - 1):
            raise ValueError(f"page_cells is {page_cells}: it must be a power of two")
        self.capacity = capacity
        self.max_sequences = max_sequences
        self.page_cells = page_cells
        self._page_bits = page_cells.bit_length() - 1
        self._page_mask = page_cells - 1

        pages_a_sequence = -(-capacity // page_cells)
        num_pages = pages_a_sequence + 2 * max_sequences
        self.pages: I32 = np.zeros((num_pages, page_cells), np.int32)
        self.page_table: I32 = np.zeros((max_sequences, pages_a_sequence), np.int32)
        self.log: WriteLog | None = WriteLog() if log_writes else None
        self._flat_pages = self.pages.reshape(-1)
        self._page_refs: I32 = np.zeros(num_pages, np.int32)
        self._free_pages: I32 = np.arange(num_pages, dtype=np.int32)  # a stack; its top is at _num_free_pages
        self._num_free_pages = num_pages
        self._page_ending: I32 = np.zeros(capacity, np.int32)  # cell -> the page it last filled; says where to look

        num_blocks = -(-capacity // BLOCK_CELLS)
        # Slots past the capacity fill the last block and count as held for ever.
        self._refs: I32 = np.ones(num_blocks * BLOCK_CELLS, np.int32)
        self._block_refs = self._refs.reshape(num_blocks, BLOCK_CELLS)
        self._loose: I32 = np.zeros(capacity, np.int32)  # references that no sequence has
        self._block_size: I64 = np.full(num_blocks, BLOCK_CELLS, np.int64)
        self._block_size[-1] = capacity - (num_blocks - 1) * BLOCK_CELLS
        self._block_free: I64 = np.zeros(num_blocks, np.int64)

        self._live: npt.NDArray[np.bool_] = np.zeros(max_sequences, np.bool_)
        self._lengths: I64 = np.zeros(max_sequences, np.int64)
        self._births: I64 = np.zeros(max_sequences, np.int64)
        self._free_cells = 0
        self._used_end = 0
        self.clear()

    # -- What is held

    @property
    def free_cells(self) -> int:
        return self._free_cells

    @property
    def used_end(self) -> int:
        """The smallest n such that every held cell is below n."""
        return self._used_end

    @property
    def num_sequences(self) -> int:
        return int(np.count_nonzero(self._live))

    def is_live(self, seq: int) -> bool:
        return 0 <= seq < self.max_sequences and bool(self._live[seq])

    def pos(self, seq: int) -> int:
        """The next position `seq` would write, which is its length; 0 for an id that is not live (CELL-11)."""
        return int(self._lengths[seq]) if self.is_live(seq) else 0

    def lengths(self) -> list[int]:
        """By sequence id: its length, 0 where none is live."""
        lengths: list[int] = np.where(self._live, self._lengths, 0).tolist()
        return lengths

    def cells_of(self, seq: int, start: int = 0, stop: int | None = None) -> I32:
        """A copy of the cells of the sequence's positions [start, stop), in order; by default all."""
        self._check_live(seq)
        held = int(self._lengths[seq])
        stop = held if stop is None else stop
        if not 0 <= start <= stop <= held:
            raise InvalidPosition(f"sequence {seq} holds {held} positions, not [{start}, {stop})")
        return self._list(seq, start, stop)

    def references(self) -> I32:
        """A copy of every cell's reference count, [capacity]."""
        return self._refs[: self.capacity].copy()

    def check_integrity(self) -> None:
        """AssertionError if two accounts of the same thing differ. Looks at everything: for idle moments and tests."""
        refs = self._loose.astype(np.int64)
        assert (refs >= 0).all(), "a cell was let go more often than it was held"
        page_refs = np.zeros(len(self._page_refs), np.int64)
        predecessors = np.full(self.capacity, -2)  # -2: not seen, -1: none
        for seq in np.flatnonzero(self._live).tolist():
            length = int(self._lengths[seq])
            cells = self._list(seq, 0, length)
            assert len(set(cells.tolist())) == length, f"sequence {seq} holds a cell twice"
            refs[cells] += 1
            before = np.concatenate(([-1], cells[:-1]))[:length]
            seen = predecessors[cells]
            assert ((seen == -2) | (seen == before)).all(), f"sequence {seq} has a cell behind another than elsewhere"
            predecessors[cells] = before
            page_refs[self.page_table[seq, : self._pages_for(length)]] += 1
        held = np.flatnonzero(refs)
        assert np.array_equal(refs, self._refs[: self.capacity]), "reference counts are not what the lists say"
        assert self._free_cells == self.capacity - held.size
        assert self._used_end == (held[-1] + 1 if held.size else 0)
        free = self._block_refs == 0
        assert np.array_equal(self._block_free, np.count_nonzero(free, axis=1)), "a block's count of free cells is off"
        assert np.array_equal(page_refs, self._page_refs), "page counts are not what the page table says"
        free_pages = self._free_pages[: self._num_free_pages]
        assert np.array_equal(np.sort(free_pages), np.flatnonzero(page_refs == 0)), "a page is lost or free twice"
        assert not self._lengths[~self._live].any()

    # -- Verbs

    def seq_new(self) -> int:
        """Issue the lowest free id; it is taken at once although it holds nothing (CELL-6)."""
        seq = int(np.argmin(self._live))
        if self._live[seq]:
            raise CacheFull(f"all {self.max_sequences} sequence ids are in use")
        self._live[seq] = True
        return seq

    def seq_clone(self, src: int, upto: int | None = None) -> int:
        """A new sequence that shares the first min(upto, length) cells of `src` (CELL-7). Takes no free cell.

        `upto` = 0 gives a live, empty sequence; a source that holds nothing is refused.
        """
        self._check_live(src)
        held = int(self._lengths[src])
        if held == 0:
            raise InvalidPosition(f"sequence {src} holds nothing to clone")
        if upto is not None and upto < 0:
            raise InvalidPosition(f"cannot clone the first {upto} positions of sequence {src}")
        length = held if upto is None else min(upto, held)
        clone = self.seq_new()
        if length:
            self._refs[self._list(src, 0, length)] += 1
            num_pages = self._pages_for(length)
            shared = self.page_table[src, :num_pages]
            self._page_refs[shared] += 1
            self._set_pages(np.full(num_pages, clone), np.arange(num_pages), shared)
            self._lengths[clone] = length
        return clone

    def seq_from(self, cells: npt.ArrayLike) -> int:
        """A new sequence of held cells in position order, as a sequence began with them. Takes no free cell."""
        cells = self._check_held(cells)
        seq = self.seq_new()
        self._refs[cells] += 1
        self._write_list(seq, 0, cells)
        self._lengths[seq] = cells.size
        return seq

    def rebase(self, seq: int, cells: npt.ArrayLike) -> None:
        """Make `cells`, all held, the first cells of the sequence; what follows stays, its own first cells are let go.

        For a sequence that computed what another one had computed already. Refused while cells that stay behind a
        replaced one have another holder: they would follow one cell here and another one there.
        """
        self._check_live(seq)
        cells = self._check_held(cells)
        held, length = int(self._lengths[seq]), cells.size
        if length > held:
            raise InvalidPosition(f"cannot replace {length} cells of sequence {seq}: it holds {held}")
        own = self._list(seq, 0, length)
        differs = own != cells
        if not differs.any():
            return
        if length < held and self._refs[own[-1]] > 1:
            raise InvalidPosition(f"the first {length} cells of sequence {seq} have another holder: they must stay")
        first = int(differs.argmax())
        page = first >> self._page_bits
        behind = np.concatenate((cells[page << self._page_bits :], self._list(seq, length, held)))
        self._refs[cells[first:]] += 1
        self._release(own[first:])
        self._drop_pages(self.page_table[seq, page : self._pages_for(held)])
        self._write_list(seq, page, behind)

    def claim_cells(self, num: int) -> I32:
        """Take the lowest `num` free cells, ascending, with one loose reference each. CacheFull claims none."""
        self._check_room(num)
        cells = self._claim_lowest(num).astype(np.int32)
        self._loose[cells] += 1
        return cells

    def hold_cells(self, cells: npt.ArrayLike) -> None:
        """Take a reference of each cell (no repeats), all of which have one already. It outlives their sequences."""
        cells = self._check_held(cells)
        self._refs[cells] += 1
        self._loose[cells] += 1

    def release_cells(self, cells: npt.ArrayLike) -> None:
        """Give back what `hold_cells` took (no repeats): cells that nobody else holds become free."""
        cells = self._check_held(cells)
        if not (self._loose[cells] > 0).all():
            raise InvalidPosition(f"cell {cells[self._loose[cells] == 0][0]} is held by sequences only")
        self._loose[cells] -= 1
        self._release(cells)

    def seq_rm(self, seq: int) -> None:
        """Drop the sequence: cells nobody else holds become free, the id is issued again."""
        self._check_live(seq)
        self._truncate(seq, 0)
        self._live[seq] = False
        self._births[seq] += 1

    def rewind(self, seq: int, position: int) -> None:
        """Drop the positions >= `position`; a sharer of the tail keeps it (CELL-9, CELL-10)."""
        self._check_live(seq)
        held = int(self._lengths[seq])
        if not 0 <= position <= held:
            raise InvalidPosition(f"cannot rewind sequence {seq} to {position}: it holds {held} positions")
        self._truncate(seq, position)

    def clear(self) -> None:
        """Free every cell, held by a sequence or loosely, and release every id."""
        self._live[:] = False
        self._lengths[:] = 0
        self._births += 1
        self._refs[: self.capacity] = 0
        self._loose[:] = 0
        self._block_free[:] = self._block_size
        self._free_cells = self.capacity
        self._used_end = 0
        self._page_refs[:] = 0
        self._num_free_pages = len(self._free_pages)
        self._free_pages[:] = np.arange(self._num_free_pages)[::-1]
        if self.log is not None:
            self.log.clear()

    # -- A step

    def admit(self, seq_ids: npt.ArrayLike) -> Declaration:
        """Check that one cell a token can be claimed for these owners, all together (CELL-15, CELL-16)."""
        ids: I32 = np.array(seq_ids, np.int32)
        if ids.ndim != 1 or ids.size == 0:
            raise InvalidStep(f"a step needs at least one token on one axis, not shape {list(ids.shape)}")
        in_range = (ids >= 0) & (ids < self.max_sequences)
        if not in_range.all():
            raise UnknownSequence(f"sequence {ids[~in_range][0]} is not in [0, {self.max_sequences})")
        live = self._live[ids]
        if not live.all():
            raise UnknownSequence(f"sequence {ids[~live][0]} is not live")
        self._check_room(ids.size)
        return Declaration(ids, self._births[ids])

    def check(self, declared: Declaration) -> None:
        """Raise what keeps an admitted step from being placed now: a verb since then took its owner or its room.

        An owner that was removed is refused also when its id has been issued anew (CELL-25).
        """
        seq_ids = declared.seq_ids
        dead = ~self._live[seq_ids] | (self._births[seq_ids] != declared.births)
        if dead.any():
            raise UnknownSequence(f"sequence {seq_ids[dead][0]} was removed after the step was declared")
        self._check_room(seq_ids.size)

    def place(self, declared: Declaration) -> Placement:
        """Claim the lowest free cells, ascending in token order, and append each to its owner's list (CELL-18).

        Tokens of several sequences may interleave in any way (CELL-17).
        """
        self.check(declared)
        seq_ids = declared.seq_ids
        order = np.argsort(seq_ids, kind="stable")
        by_owner = seq_ids[order]
        is_first = np.empty(by_owner.size, np.bool_)
        is_first[0] = True
        np.not_equal(by_owner[1:], by_owner[:-1], out=is_first[1:])
        first = np.flatnonzero(is_first)
        owners = by_owner[first]
        counts = np.diff(first, append=by_owner.size)
        lengths = self._lengths[owners]
        positions: I64 = np.empty(by_owner.size, np.int64)
        positions[order] = np.arange(by_owner.size) + np.repeat(lengths - first, counts)

        cells = self._claim_lowest(seq_ids.size)
        self._append(seq_ids, positions, cells, owners, lengths)
        self._lengths[owners] = lengths + counts
        return Placement(seq_ids, positions, cells, owners, self._births[owners], lengths)

    def undo(self, placed: Placement) -> None:
        """Release what `placed` claimed and its owners still hold; owners removed since hold nothing."""
        for seq, birth, length in zip(
            placed.owners.tolist(), placed.births.tolist(), placed.lengths.tolist(), strict=True
        ):
            if self._births[seq] == birth and self._lengths[seq] > length:
                self._truncate(seq, length)

    # -- Cells

    def _check_live(self, seq: int) -> None:
        if not self.is_live(seq):
            raise UnknownSequence(f"sequence {seq} is not live")

    def _check_held(self, cells: npt.ArrayLike) -> I32:
        """`cells` as an array; InvalidPosition for one that is free or not in the pool."""
        checked: I32 = np.asarray(cells, np.int32)
        in_range = (checked >= 0) & (checked < self.capacity)
        if not in_range.all():
            raise InvalidPosition(f"cell {checked[~in_range][0]} is not in [0, {self.capacity})")
        is_free = self._refs[checked] == 0
        if is_free.any():
            raise InvalidPosition(f"cell {checked[is_free][0]} is free: nobody can share it")
        return checked

    def _check_room(self, tokens: int) -> None:
        if tokens > self._free_cells:
            raise CacheFull(f"a {tokens}-token step does not fit: {self._free_cells} cells free of {self.capacity}")

    def _claim_lowest(self, num: int) -> I64:
        """The `num` lowest free cells, ascending. The caller checked that there are as many."""
        last = int(np.searchsorted(np.cumsum(self._block_free), num))
        blocks = np.flatnonzero(self._block_free[: last + 1])
        found = np.flatnonzero(self._block_refs[blocks] == 0)[:num]
        cells: I64 = (blocks[found >> BLOCK_BITS] << BLOCK_BITS) | (found & (BLOCK_CELLS - 1))
        self._refs[cells] = 1
        self._block_free[: last + 1] -= np.bincount(cells >> BLOCK_BITS, minlength=last + 1)
        self._free_cells -= num
        self._used_end = max(self._used_end, int(cells[-1]) + 1)
        return cells

    def _release(self, cells: I32) -> None:
        """Drop one reference of each cell (no repeats)."""
        refs = self._refs[cells] - 1
        self._refs[cells] = refs
        freed = cells[refs == 0]
        if freed.size == 0:
            return
        self._block_free += np.bincount(freed >> BLOCK_BITS, minlength=len(self._block_free))
        self._free_cells += freed.size
        if int(freed.max()) == self._used_end - 1:
            self._used_end = self._find_used_end()

    def _find_used_end(self) -> int:
        held = np.flatnonzero(self._block_free < self._block_size)
        if held.size == 0:
            return 0
        block = int(held[-1])
        top = np.flatnonzero(self._block_refs[block, : self._block_size[block]])[-1]
        return (block << BLOCK_BITS) + int(top) + 1

    # -- Lists and their pages

    def _pages_for(self, length: int) -> int:
        return -(-length // self.page_cells)

    def _list(self, seq: int, start: int, stop: int) -> I32:
        """Cells of positions [start, stop)."""
        first = start >> self._page_bits
        pages = self.page_table[seq, first : self._pages_for(stop)]
        base = first << self._page_bits
        rows: I32 = self.pages[pages].reshape(-1)[start - base : stop - base]
        return rows - np.int32(1)

    def _truncate(self, seq: int, length: int) -> None:
        held = int(self._lengths[seq])
        if length == held:
            return
        self._release(self._list(seq, length, held))
        self._drop_pages(self.page_table[seq, self._pages_for(length) : self._pages_for(held)])
        self._lengths[seq] = length

    def _append(self, seq_ids: I32, positions: I64, cells: I64, owners: I32, lengths: I64) -> None:
        self._own_tails(owners, lengths)
        opens = np.flatnonzero((positions & self._page_mask) == 0)
        if opens.size:
            self._set_pages(seq_ids[opens], positions[opens] >> self._page_bits, self._take_pages(opens.size))
        pages = self.page_table[seq_ids, positions >> self._page_bits].astype(np.int64)
        slots: I64 = (pages << self._page_bits) | (positions & self._page_mask)
        self._flat_pages[slots] = cells + 1
        fills = np.flatnonzero((positions & self._page_mask) == self._page_mask)
        if fills.size:
            self._page_ending[cells[fills]] = pages[fills]
        if self.log is not None:
            self.log.pages.append(slots)

    def _write_list(self, seq: int, first_page: int, cells: I32) -> None:
        """Write `cells` into the list from its page `first_page` on, sharing full pages that say just that already."""
        rows = cells + np.int32(1)
        num_full = cells.size >> self._page_bits
        full = rows[: num_full << self._page_bits].reshape(num_full, self.page_cells)
        pages = self._page_ending[full[:, -1] - 1]
        is_there = (self._page_refs[pages] > 0) & (self.pages[pages] == full).all(axis=1)
        self._page_refs[pages[is_there]] += 1
        missing = np.flatnonzero(~is_there)
        fresh = self._take_pages(missing.size + (rows.size > full.size))
        pages[missing] = fresh[: missing.size]
        self.pages[pages[missing]] = full[missing]
        self._page_ending[full[missing, -1] - 1] = pages[missing]
        slots = (pages[missing].astype(np.int64)[:, None] << self._page_bits) + np.arange(self.page_cells)
        written = [slots.reshape(-1)]
        if rows.size > full.size:
            tail = rows[full.size :]
            self.pages[fresh[-1], : tail.size] = tail
            written.append((int(fresh[-1]) << self._page_bits) + np.arange(tail.size))
            pages = np.append(pages, fresh[-1])
        if self.log is not None:
            self.log.pages.extend(written)
        self._set_pages(np.full(pages.size, seq), first_page + np.arange(pages.size), pages)

    def _own_tails(self, owners: I32, lengths: I64) -> None:
        """Give each owner that is about to write into a page it shares a page of its own."""
        used = lengths & self._page_mask
        # A full last page is not written to, and its successor may lie past the table's edge.
        indices = np.where(used > 0, lengths >> self._page_bits, 0)
        tails = self.page_table[owners, indices]
        for i in np.flatnonzero((used > 0) & (self._page_refs[tails] > 1)).tolist():
            tail = int(tails[i])
            if self._page_refs[tail] == 1:  # the sharers before it in this loop have left
                continue
            own = self._take_pages(1)
            self._page_refs[tail] -= 1
            kept = int(used[i])
            self.pages[own[0], :kept] = self.pages[tail, :kept]
            if self.log is not None:
                start = int(own[0]) << self._page_bits
                self.log.pages.append(np.arange(start, start + kept))
            self._set_pages(owners[i : i + 1], indices[i : i + 1], own)

    def _set_pages(self, seq_ids: npt.NDArray[np.integer], indices: npt.NDArray[np.integer], pages: I32) -> None:
        self.page_table[seq_ids, indices] = pages
        if self.log is not None:
            self.log.page_table.append(seq_ids.astype(np.int64) * self.page_table.shape[1] + indices)

    def _take_pages(self, num: int) -> I32:
        assert num <= self._num_free_pages, "the page pool holds every possible table"
        self._num_free_pages -= num
        pages = self._free_pages[self._num_free_pages : self._num_free_pages + num].copy()
        self._page_refs[pages] = 1
        return pages

    def _drop_pages(self, pages: I32) -> None:
        refs = self._page_refs[pages] - 1
        self._page_refs[pages] = refs
        freed = pages[refs == 0]
        self._free_pages[self._num_free_pages : self._num_free_pages + freed.size] = freed
        self._num_free_pages += freed.size


def page_cells_for(capacity: int) -> int:
    """Entries a page: 4096, less in a small pool, so that half-empty pages never outweigh the lists."""
    wanted = max(16, min(MAX_PAGE_CELLS, capacity // 16))
    return 1 << (wanted.bit_length() - 1)


def runs(reach: Reach, positions: I64) -> tuple[I64, I64]:
    """Where the run of the row at each position begins in its sequence's list, and how long it is (CELL-26..28).

    A row sees its own sequence only, nothing later than itself, itself always: the end of a run is its own position.
    """
    if reach.kind == "window":
        start = np.maximum(positions - (reach.size - 1), 0)
    elif reach.kind == "chunk":
        start = positions - positions % reach.size
    else:
        start = np.zeros_like(positions)
    return start, positions - start + 1
