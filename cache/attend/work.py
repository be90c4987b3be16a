"""Divides the runs of a step among the programs of attention, on the device.

    runs       a ############  b ##  c ######
    shares     |  a0  |  a1 b0  |  c0  |          rows that run alone: equal stretches of all runs end to end
    pieces     a0 a1 a2 | b0 | c0 c1              tiles: equal pieces of each run, every one a program's

Rows of one step read runs of any lengths, so a fixed number of parts a row leaves most programs with little to do while
the longest run is read by few. Rows that run alone wait for memory: as many programs as run at once, each with as many
cells as any other, read at full speed to the end. What a program reads of one run is a piece here, too.
A tile's results are many, so it is cut only where there are too few of them; long pieces come first.

The grid holds the most programs that can come of it, which the width alone tells, so that a captured graph serves any
mix; those without a piece end at once.
"""

# Triton is not typed, and a kernel's arguments are pointers and compile-time constants.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from cache.geometry import Reach
from cache.step import CellStep

ROWS_AT_ONCE = 1024
"""Rows that the one program of `_cut` looks at in a turn."""
GAP = tl.constexpr(1)
"""Blocks that the beginning and end of a piece cost as much time as."""
MANY = tl.constexpr(4)
"""Blocks of a share from which on that is counted."""
RANKS = tl.constexpr(4)
"""Pieces of tiles are handed out by length, roughly, so that programs that end last have little left to do."""
SHARED_ROWS = tl.constexpr(4)
"""Rows of a sequence from which on it is worth their while to share a tile."""
SMALL = tl.constexpr(256)
"""Cells below which a piece's beginning and end cost more than its even share of the work gains."""
MOST_ALONE = tl.constexpr(8)
"""Pieces of a run at most, where each is cut by its own length alone."""
FIELDS = tl.constexpr(8)
"""Of a piece: its group (-1: there is no such piece), its number in the group, the group's pieces, its slot of partial
results, the group's sequence, its first position, the position behind its last, and the page of the first. One line of
memory, because each program begins by waiting for it."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """What `_attend_pieces` reads.

    A group is one row, or those rows of a tile that are of one sequence: of its first row's (group 2 * tile) or of its
    last one's (2 * tile + 1). Where prompts meet in a tile, it is both.
    """

    programs: int
    """Of each K/V head."""
    most_slots: int
    """Pieces of groups that have several, at most."""
    table: torch.Tensor  # [pieces, FIELDS] i32
    shares: torch.Tensor | None  # [programs + 1] i32: each program's first piece; None: program p has piece p, if any
    counters: torch.Tensor  # [groups * K/V heads] i32: pieces of each that are done; zero before and after a launch


def pieces_of(
    step: CellStep, reach: Reach, *, wanted: int | None, rows_each: int, tile_rows: int, block: int, num_kv_heads: int
) -> Pieces:
    """The step's pieces, cut by its first layer and kept for the others.

    wanted: programs among which the cells are divided, of each K/V head. Tiles: pieces, up to twice as many where runs
    are uneven; each group adds at most one. None: each row's run is cut by its own length alone, whatever the others.
    rows_each: 1, for rows that are in no group of a tile, or tile_rows, for the groups of tiles. block: cells that a
    piece is a multiple of.
    Made inside a capture, they belong to that graph, which cuts each step anew: a step is captured once.
    """
    device = step.table_row.device
    is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    key = ("pieces", reach, wanted, rows_each, tile_rows, block, num_kv_heads, is_captured)
    made = step.plans.get(key)
    if made is None:
        made = step.plans[key] = _make(step, reach, wanted, rows_each, tile_rows, block, num_kv_heads)
    assert isinstance(made, Pieces)
    return made


def _make(
    step: CellStep, reach: Reach, wanted: int | None, rows_each: int, tile_rows: int, block: int, num_kv_heads: int
) -> Pieces:
    run = step.runs[reach]
    page_cells = step.pages.shape[1]
    runs = (step.table_row, run.start, run.count, step.page_table)
    shape = {
        "TILE": tile_rows,
        "UNIT": block,
        "PAGE_CELLS": page_cells if page_cells % block == 0 else 0,
        "AT_ONCE": ROWS_AT_ONCE,
        "num_warps": 8,
    }
    groups = step.width if rows_each == 1 else 2 * triton.cdiv(step.width, rows_each)
    new = partial(torch.empty, dtype=torch.int32, device=step.table_row.device)
    shares: torch.Tensor | None = None
    if rows_each == 1 and wanted is not None:
        # Between two shares lies the end of one piece and the beginning of another.
        programs, most_slots = wanted, 2 * wanted
        table, shares = new(groups + wanted, FIELDS.value), new(wanted + 1)
        _share[(1,)](*runs, table, shares, step.width, wanted, step.page_table.stride(0), **shape)
    else:
        # A group of `span` cells gets span / size pieces, rounded and at least one, and `size` is at least half of what
        # the spans of all are over `wanted`. Where a group gets two or more, they are at most 4 / 3 of span / size.
        programs, most_slots = (groups + 2 * wanted, 3 * wanted) if wanted else (groups * MOST_ALONE.value,) * 2
        table = new(programs, FIELDS.value)
        _cut[(1,)](
            *runs,
            table,
            step.width,
            programs,
            wanted or 1,
            step.page_table.stride(0),
            ALONE=wanted is None,
            ROWS=rows_each,
            **shape,
        )
    # Behind the cut, whatever this costs: attention reads the table ahead of its wait for the launch before it, which
    # must not be the one that writes it (launch.py).
    counters = torch.zeros(groups * num_kv_heads, dtype=torch.int32, device=table.device)
    return Pieces(programs, most_slots, table, shares, counters)


@triton.jit(do_not_specialize=["width"])
def _share(
    table_row,  # [W] i32
    starts,  # [W] i32
    counts,  # [W] i32
    page_table,  # [sequences, pages] i32
    table,  # [W + programs, FIELDS] i32
    shares,  # [programs + 1] i32
    width,
    programs,
    page_table_stride,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    PAGE_CELLS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One program. Blocks of all runs lie end to end, with a gap behind each; a share is `size` of them.

    i32 is enough: 61,440 rows, which are the most, of 2 M tokens each in blocks of 64 cells, of 500,000 in those of 16.
    """
    ALIGN: tl.constexpr = UNIT if PAGE_CELLS else 1  # noqa: N806
    length = 0
    longest = 0
    runs = 0
    for low in range(0, width, AT_ONCE):
        first, last, _, is_here = _groups(table_row, starts, counts, low, width, 1, TILE, ALIGN, AT_ONCE)
        blocks = tl.where(is_here, tl.cdiv(last - first, UNIT), 0)
        length += tl.sum(blocks, 0)
        longest = tl.maximum(longest, tl.max(blocks, 0))
        runs += tl.sum(is_here.to(tl.int32), 0)
    # Few blocks are all begun at once. A share of more holds one at least beside the gap.
    gap = tl.where(length > programs * MANY, GAP, 0)
    length += gap * runs
    size = tl.maximum(tl.cdiv(length, programs), 1)
    # Nearly even runs that are no more than the programs stay whole, for a merge costs more than the rest of evenness.
    is_whole = (runs > 0) & (runs <= programs) & ((longest + gap) * 3 <= size * 4)
    size = tl.where(is_whole, longest + gap, size)
    length = tl.where(is_whole, size * runs, length)

    offset = 0
    done = 0
    slots = 0
    for low in range(0, width, AT_ONCE):
        first, last, owner, is_here = _groups(table_row, starts, counts, low, width, 1, TILE, ALIGN, AT_ONCE)
        blocks = tl.cdiv(last - first, UNIT)
        taken = tl.where(is_here, tl.where(is_whole, size, blocks + gap), 0)
        begin = offset + tl.cumsum(taken, 0) - taken  # of the run on the line
        offset += tl.sum(taken, 0)
        share = begin // size  # of its first piece
        pieces = tl.where(is_here, (begin + blocks - 1) // size - share + 1, 0)
        parted = tl.where(pieces > 1, pieces, 0)
        slot = slots + tl.cumsum(parted, 0) - parted
        slots += tl.sum(parted, 0)
        place = done + tl.cumsum(pieces, 0) - pieces
        done += tl.sum(pieces, 0)
        group = low + tl.arange(0, AT_ONCE)
        # A run's first piece is its share's first too, where the run before it ends in an earlier share.
        is_first = begin - 1 - gap < share * size
        for number in range(tl.max(pieces, 0)):
            is_piece = number < pieces
            here = share + number
            lowest = tl.maximum(here * size - begin, 0) * UNIT
            highest = tl.minimum((here + 1) * size - begin, blocks) * UNIT
            tl.store(shares + here, place + number, mask=is_piece & (is_first | (number > 0)))
            _store_piece(
                table + (place + number) * FIELDS,
                group,
                number,
                pieces,
                slot + number,
                owner,
                first + lowest,
                tl.minimum(first + highest, last),
                is_piece,
            )
    unused = tl.where(length > 0, (length - 1 - gap) // size + 1, 0)  # the share behind the last that has a piece
    for low in range(0, programs + 1, AT_ONCE):
        rest = low + tl.arange(0, AT_ONCE)
        tl.store(shares + rest, rest * 0 + done, mask=(rest >= unused) & (rest <= programs))
    _look_up_pages(table, done, page_table, page_table_stride, PAGE_CELLS, AT_ONCE)


@triton.jit(do_not_specialize=["width", "most"])
def _cut(
    table_row,  # [W] i32
    starts,  # [W] i32
    counts,  # [W] i32
    page_table,  # [sequences, pages] i32
    table,  # [most, FIELDS] i32
    width,
    most,
    wanted,
    page_table_stride,
    ALONE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    PAGE_CELLS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One program. PAGE_CELLS: 0 where blocks do not lie within pages: then no piece need begin with a block."""
    ALIGN: tl.constexpr = UNIT if PAGE_CELLS else 1  # noqa: N806
    cells = tl.full((), 0, tl.int64)
    longest = tl.full((), 0, tl.int32)
    num_groups = 0
    for low in range(0, width, AT_ONCE):
        first, last, _, is_here = _groups(table_row, starts, counts, low, width, ROWS, TILE, ALIGN, AT_ONCE)
        span = tl.where(is_here, last - first, 0)
        cells += tl.sum(span.to(tl.int64), 0)
        longest = tl.maximum(longest, tl.max(span, 0))
        num_groups += tl.sum(is_here.to(tl.int32), 0)
    size = tl.cdiv(cells, wanted)
    if longest.to(tl.int64) * num_groups * 2 > cells * 3:
        # Uneven: so that the longest do not go on alone, half of that, but no pieces that are mostly beginning and end.
        size = tl.minimum(size, tl.maximum(tl.cdiv(size, 2), SMALL))
    size = tl.maximum(tl.cdiv(size, UNIT), 1).to(tl.int32) * UNIT
    if ALONE:
        size = tl.maximum(longest, UNIT)  # for the ranks; no run's cut knows of it

    done = 0
    for rank in range(RANKS):
        slots = 0
        for low in range(0, width, AT_ONCE):
            first, last, owner, is_here = _groups(table_row, starts, counts, low, width, ROWS, TILE, ALIGN, AT_ONCE)
            span = last - first
            pieces = tl.maximum((span + size // 2) // size, 1)
            if ALONE:
                pieces = tl.minimum(tl.maximum(tl.cdiv(span, SMALL), 1), MOST_ALONE)
            each = tl.maximum(tl.cdiv(tl.cdiv(span, pieces), UNIT), 1) * UNIT  # so long is each but the last
            pieces = tl.where(is_here, tl.maximum(tl.cdiv(span, each), 1), 0)
            shared = tl.where(pieces > 1, pieces, 0)
            slot = slots + tl.cumsum(shared, 0) - shared
            slots += tl.sum(shared, 0)
            length = tl.minimum(each, span)
            is_ranked = tl.maximum(RANKS - 1 - length * (RANKS - 1) // size, 0) == rank
            pieces = tl.where(is_ranked, pieces, 0)
            place = (done + tl.cumsum(pieces, 0) - pieces) * FIELDS
            done += tl.sum(pieces, 0)
            group = low + tl.arange(0, AT_ONCE)
            if ROWS > 1:
                group = low // ROWS * 2 + tl.arange(0, AT_ONCE // ROWS * 2)
            for number in range(tl.max(pieces, 0)):
                is_piece = number < pieces
                begin = first + number * each
                _store_piece(
                    table + place + number * FIELDS,
                    group,
                    number,
                    pieces,
                    slot + number,
                    owner,
                    begin,
                    tl.minimum(begin + each, last),
                    is_piece,
                )
    for low in range(done, most, AT_ONCE):
        rest = low + tl.arange(0, AT_ONCE)
        tl.store(table + rest * FIELDS, rest * 0 - 1, mask=rest < most)
    _look_up_pages(table, done, page_table, page_table_stride, PAGE_CELLS, AT_ONCE)


@triton.jit
def _store_piece(at, group, number, pieces, slot, owner, first, last, is_piece):
    """One piece of each group that has one, but for its page. All [n] except `number`; at: where each goes."""
    tl.store(at, group, mask=is_piece)
    tl.store(at + 1, pieces * 0 + number, mask=is_piece)
    tl.store(at + 2, pieces, mask=is_piece)
    tl.store(at + 3, slot, mask=is_piece)
    tl.store(at + 4, owner, mask=is_piece)
    tl.store(at + 5, first, mask=is_piece)
    tl.store(at + 6, last, mask=is_piece)


@triton.jit
def _look_up_pages(table, done, page_table, page_table_stride, PAGE_CELLS: tl.constexpr, AT_ONCE: tl.constexpr):
    """Of all pieces at once: one by one, a run of many would wait for memory as often."""
    tl.debug_barrier()  # every thread's part of the table is written
    for low in range(0, done if PAGE_CELLS else 0, AT_ONCE):
        index = low + tl.arange(0, AT_ONCE)
        is_piece = index < done
        piece = table + index * FIELDS
        owner = tl.load(piece + 4, mask=is_piece, other=0, cache_modifier=".cg")
        first = tl.load(piece + 5, mask=is_piece, other=0, cache_modifier=".cg")
        page_at = page_table + owner.to(tl.int64) * page_table_stride + first // (PAGE_CELLS if PAGE_CELLS else 1)
        tl.store(piece + 7, tl.load(page_at, mask=is_piece, other=0), mask=is_piece)


@triton.jit
def _groups(
    table_row,
    starts,
    counts,
    low,
    width,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """i32 each, of the groups of AT_ONCE rows from `low` on: the position that they visit first, rounded down to ALIGN,
    the one behind their last, their sequence, and whether there is such a group, of ROWS rows at most."""
    row = low + tl.arange(0, AT_ONCE // TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    is_row = row < width
    start = tl.load(starts + row, mask=is_row, other=2147483647)
    count = tl.load(counts + row, mask=is_row, other=0)
    end = tl.where(is_row, start + count, 0)
    owner = tl.load(table_row + row, mask=is_row, other=-1)
    # The sequences of a tile's first and last row. Past the width there is none, and padding adds no row to share with.
    tile = low + tl.arange(0, AT_ONCE // TILE) * TILE
    head = tl.load(table_row + tile, mask=tile < width, other=-2)
    tail = tl.load(table_row + tl.minimum(tile + TILE, width) - 1, mask=tile < width, other=-2)
    of_head = owner == head[:, None]
    of_tail = (owner == tail[:, None]) & (of_head == 0)
    LEAST: tl.constexpr = SHARED_ROWS if TILE > SHARED_ROWS else TILE  # noqa: N806
    of_head &= (tl.sum((of_head & (count > 1)).to(tl.int32), 1) >= LEAST)[:, None]
    of_tail &= (tl.sum((of_tail & (count > 1)).to(tl.int32), 1) >= LEAST)[:, None]
    if ROWS > 1:
        first = _sides(tl.min(tl.where(of_head, start, 2147483647), 1), tl.min(tl.where(of_tail, start, 2147483647), 1))
        last = _sides(tl.max(tl.where(of_head, end, 0), 1), tl.max(tl.where(of_tail, end, 0), 1))
        is_here = last > 0
        owner = _sides(head, tail)
    else:
        is_here = is_row
        if TILE > 1:
            is_here = is_row & (of_head == 0) & (of_tail == 0)
        is_here = tl.reshape(is_here, [AT_ONCE])
        first = tl.reshape(start, [AT_ONCE])
        last = tl.reshape(end, [AT_ONCE])
        owner = tl.reshape(owner, [AT_ONCE])
    return first // ALIGN * ALIGN, last, owner, is_here


@triton.jit
def _sides(one, other):
    """[n], [n] -> [2 n], in turns."""
    return tl.reshape(tl.join(one, other), [one.shape[0] * 2])
