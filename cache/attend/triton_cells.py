"""Attention over cells on CUDA, in Triton: runs of paged cells in pieces, then a merge. Equal to `reference`.

    rows   0 1 2 3 4 5 6 7 | 8 9 10 ..      tiles of neighbouring rows
           a b c c c c c c | c c c  ..      four or more of one sequence at a tile's beginning or end (a prefill chunk)
           ^ ^ ^^^^^^^^^^^   ^^^^^          load each K/V block once for all, and for all heads of a group; the others
                                            (decodes) run one by one

Which rows take which way, and how long their runs are, is read on the device (work.py): the grid depends on the width
alone, so a captured graph serves any mix. What the pieces of a run found is merged by whichever program finishes last,
which `counters` tells it.

The interpreter (TRITON_INTERPRET=1, no GPU) runs the same kernels except for bfloat16, which it gets wrong.
"""

# Triton is not typed, and a kernel's arguments are pointers and compile-time constants.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cache.attend.launch import LINE, fetch_ahead, overlapped
from cache.attend.merge import LOG2E, leave_part
from cache.attend.work import FIELDS, pieces_of
from cache.geometry import UNSCALED, KvScales, Reach
from cache.step import CellStep

PIECES_PER_MULTIPROCESSOR = 4
TILE_PIECES_PER_MULTIPROCESSOR = 1
"""Of all K/V heads together. A tile's results are many, so it is cut only where there are too few of them."""
MIN_TILES = 4


def attend_cells(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: CellStep,
    *,
    reach: Reach,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: KvScales = UNSCALED,
    num_pieces: int | None = None,
    tile_rows: int | None = None,
    shape: BlockShape | None = None,
) -> torch.Tensor:
    """query [W, H, Dk], keys [rows, KV, Dk], values [rows, KV, Dv], sinks [H] -> [W, H, Dv] in query's dtype.

    scales: what is stored stands for itself times these.
    num_pieces: that the cells of all rows are divided into; tile_rows: a power of two. Chosen, like the shape, from the
    tensors' shapes alone when None. Launches only, no synchronisation.
    """
    width, num_heads, k_dim = query.shape
    num_kv_heads, v_dim = values.shape[1:]
    group = num_heads // num_kv_heads
    run = step.runs[reach]
    query = query if query.stride(-1) == 1 else query.contiguous()
    padded_k, padded_v = _pad(k_dim), _pad(v_dim)
    upcast = query.dtype == torch.float32
    out = query.new_empty(width, num_heads, v_dim)
    tiled = shape or block_shape(max(padded_k, padded_v), upcast)
    if tile_rows is None:
        tile_rows = 1 if step.batch_invariant else default_tile_rows(width, group, tiled)
    for rows_each in dict.fromkeys((1, tile_rows)):
        wanted = num_pieces or default_pieces(rows_each, num_kv_heads, query.device)
        launched = tiled if rows_each > 1 else shape or decode_shape(max(padded_k, padded_v), group, upcast)
        pieces = pieces_of(
            step,
            reach,
            wanted=None if step.batch_invariant else wanted,
            rows_each=rows_each,
            tile_rows=tile_rows,
            block=launched.cells,
            num_kv_heads=num_kv_heads,
        )
        # What the pieces of runs that are cut found, until they are merged.
        partial = (pieces.most_slots, num_kv_heads, rows_each * group)
        peaks = torch.empty(*partial, dtype=torch.float32, device=query.device)
        sums = torch.empty(*partial, dtype=torch.float32, device=query.device)
        outs = torch.empty(*partial, v_dim, dtype=torch.float32, device=query.device)
        # Heads go first: a cell's K/V of all heads lie side by side, and are read at the same time.
        _attend_pieces[(num_kv_heads, pieces.programs)](
            query,
            keys,
            values,
            sinks if sinks is not None else query,
            step.table_row,
            run.start,
            run.count,
            step.page_table,
            step.pages,
            pieces.table,
            pieces.shares if pieces.shares is not None else pieces.table,
            pieces.counters,
            out,
            peaks,
            sums,
            outs,
            width,
            scale * scales.key,
            scales.value,
            1.0 if softcap is None else softcap,
            query.stride(0),
            query.stride(1),
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            step.page_table.stride(0),
            PAGE_CELLS=step.pages.shape[1],
            ROWS=rows_each,
            GROUP=group,
            M=_pad(rows_each * group),
            K_DIM=k_dim,
            V_DIM=v_dim,
            PADDED_K=padded_k,
            PADDED_V=padded_v,
            BLOCK=launched.cells,
            HAS_SOFTCAP=softcap is not None,
            HAS_SINKS=sinks is not None,
            HAS_VALUE_SCALE=scales.value != 1.0,
            UPCAST=upcast,
            IN_SHARES=pieces.shares is not None,
            num_warps=launched.warps,
            num_stages=launched.stages,
            **overlapped(query.device),
        )
    return out


def default_pieces(rows_each: int, num_kv_heads: int, device: torch.device) -> int:
    """So many that those of all heads fill the GPU."""
    if device.type != "cuda":
        return 1
    each = PIECES_PER_MULTIPROCESSOR if rows_each == 1 else TILE_PIECES_PER_MULTIPROCESSOR
    return max(1, torch.cuda.get_device_properties(device).multi_processor_count * each // num_kv_heads)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What one program's matrix products hold at once, so that registers do not spill (compiled for sm_90)."""

    product_rows: int  # rows of a tile times query heads of a group, at most
    cells: int  # cells an inner block visits
    warps: int
    stages: int = 2  # blocks whose K/V are under way at once


def block_shape(head_width: int, upcast: bool) -> BlockShape:
    """head_width: the wider of K and V, padded. float32 has no exact tensor-core product: small tiles of plain sums."""
    if upcast:
        return BlockShape(16, 32 if head_width <= 128 else 16, 8)
    if head_width <= 128:
        return BlockShape(64, 64, 4, stages=3)  # long runs gain a tenth by the third, short ones lose a hundredth
    return BlockShape(64, 32, 8) if head_width <= 256 else BlockShape(32, 16, 8)


def decode_shape(head_width: int, group: int, upcast: bool) -> BlockShape:
    """For rows that run alone, which wait for memory: many small programs."""
    if upcast or head_width > 128 or group > 32:
        return block_shape(head_width, upcast)
    return BlockShape(32, 64, 2)


def default_tile_rows(width: int, group: int, shape: BlockShape) -> int:
    """Rows that share their K/V loads when they are of one sequence. A power of two; 1 turns tiles off.

    Off in narrow steps too: there the second launch costs every decode more than a short chunk gains by it.
    """
    rows = 1 << max(1, shape.product_rows // group).bit_length() - 1
    return rows if width >= MIN_TILES * rows else 1


def _pad(size: int) -> int:
    """The next power of two that a matrix product takes."""
    return max(16, 1 << (size - 1).bit_length())


@triton.jit(do_not_specialize=["width"])
def _attend_pieces(
    query,  # [W, H, K_DIM]
    keys,  # [rows, KV, K_DIM]
    values,  # [rows, KV, V_DIM]
    sinks,  # [H]
    table_row,  # [W] i32
    starts,  # [W] i32
    counts,  # [W] i32
    page_table,  # [sequences, pages] i32
    pages,  # [num_pages, PAGE_CELLS] i32
    table,  # [pieces, FIELDS] i32: Pieces.table
    shares,  # [programs + 1] i32: Pieces.shares
    counters,  # [groups, KV] i32: pieces that are done; zero before and after
    out,  # [W, H, V_DIM]
    peaks,  # [slots, KV, ROWS * GROUP] f32: largest score of the piece, in powers of two
    sums,  # [slots, KV, ROWS * GROUP] f32: sum of 2 ** (score - peak)
    outs,  # [slots, KV, ROWS * GROUP, V_DIM] f32: values weighted by the same
    width,
    scale,
    value_scale,
    softcap,
    query_row_stride,
    query_head_stride,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    page_table_stride,
    PAGE_CELLS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    M: tl.constexpr,  # noqa: N803
    K_DIM: tl.constexpr,  # noqa: N803
    V_DIM: tl.constexpr,  # noqa: N803
    PADDED_K: tl.constexpr,  # noqa: N803
    PADDED_V: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    HAS_SOFTCAP: tl.constexpr,  # noqa: N803
    HAS_SINKS: tl.constexpr,  # noqa: N803
    HAS_VALUE_SCALE: tl.constexpr,  # noqa: N803
    UPCAST: tl.constexpr,  # noqa: N803
    IN_SHARES: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    """Pieces of the runs of ROWS rows, for the GROUP query heads of one K/V head: M = ROWS * GROUP, padded.

    A program has one of them at most, or IN_SHARES as many as lie in its share.
    """
    # The step's tables are older than the launch before this one, so they are read ahead of the wait for it.
    kv_head = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)
    at = tl.program_id(1)
    if IN_SHARES:
        behind = tl.load(shares + at + 1)
        at = tl.load(shares + at)
    else:
        behind = at + (tl.load(table + at * FIELDS) >= 0).to(tl.int32)
    if PDL and at == behind:
        gdc_wait()  # what is launched behind relies on all that came before
    for index in range(at, behind):
        piece = table + index * FIELDS
        group = tl.load(piece)
        number = tl.load(piece + 1)
        num_pieces = tl.load(piece + 2)
        slot = tl.load(piece + 3)
        owner = tl.load(piece + 4)
        low = tl.load(piece + 5)
        high = tl.load(piece + 6)
        page_number = tl.load(piece + 7).to(tl.int64)
        first_row = group if ROWS == 1 else group // 2 * ROWS

        m = tl.arange(0, M)
        row = first_row + m // GROUP
        head = kv_head * GROUP + m % GROUP
        is_row = (m < ROWS * GROUP) & (row < width)
        if ROWS > 1:
            is_row &= tl.load(table_row + row, mask=is_row, other=-1) == owner
        start = tl.load(starts + row, mask=is_row, other=2147483647)
        end = tl.where(is_row, start + tl.load(counts + row, mask=is_row, other=0), 0)
        first = tl.min(start, 0)
        # What every row sees: most blocks of a tile lie within, and need no look at who sees which cell.
        common = tl.max(tl.where(is_row, start, 0), 0)
        common_end = tl.min(tl.where(is_row, end, 2147483647), 0)
        # Where every block lies within a page, its cells are one aligned load and its page is looked up once a page.
        ALIGNED: tl.constexpr = PAGE_CELLS % BLOCK == 0  # noqa: N806
        if ALIGNED:
            low = low // BLOCK * BLOCK  # as it is; so that the compiler knows
        if PDL:
            if ALIGNED and PADDED_K >= LINE and PADDED_V >= LINE:
                position = low + tl.arange(0, BLOCK)
                near_at = pages + page_number * PAGE_CELLS + position % PAGE_CELLS
                near = tl.load(near_at, mask=position < high, other=0).to(tl.int64)
                _fetch_rows(keys + kv_head * key_head_stride, near, key_row_stride, PADDED_K)
                _fetch_rows(values + kv_head * value_head_stride, near, value_row_stride, PADDED_V)
            gdc_wait()

        # FP8 becomes float16 in one instruction and bfloat16 in four, and both hold all of it. A query beyond float16's
        # range, which is none that was meant, turns its row NaN.
        own: tl.constexpr = tl.float16 if keys.dtype.element_ty.is_fp8() else query.dtype.element_ty
        operand: tl.constexpr = tl.float32 if UPCAST else own
        k_lane = tl.arange(0, PADDED_K)
        v_lane = tl.arange(0, PADDED_V)
        q = tl.load(
            query + row[:, None].to(tl.int64) * query_row_stride + head[:, None] * query_head_stride + k_lane[None, :],
            mask=is_row[:, None] & (k_lane < K_DIM)[None, :],
            other=0.0,
        ).to(operand)
        peak = tl.full([M], -float("inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        weighted = tl.zeros([M, PADDED_V], tl.float32)
        for page in range(low // PAGE_CELLS if ALIGNED else 0, tl.cdiv(high, PAGE_CELLS) if ALIGNED else 1):
            page_low = low
            page_high = high
            cells = pages
            if ALIGNED:
                page_low = tl.maximum(low, page * PAGE_CELLS)
                page_high = tl.minimum(high, (page + 1) * PAGE_CELLS)
                cells += (page_number - page) * PAGE_CELLS
                is_more = (page + 1) * PAGE_CELLS < high
                page_at = page_table + owner * page_table_stride + page + 1
                page_number = tl.load(page_at, mask=is_more, other=0).to(tl.int64)
            # The cells of the next block are looked up while this one's K/V are under way.
            cell = _cells_at(
                cells, page_table, owner, page_table_stride, page_low, page_high, ALIGNED, PAGE_CELLS, BLOCK
            )
            for block in range(page_low, page_high, BLOCK):
                position = block + tl.arange(0, BLOCK)
                is_cell = (position >= first) & (position < high)
                following = _cells_at(
                    cells, page_table, owner, page_table_stride, block + BLOCK, page_high, ALIGNED, PAGE_CELLS, BLOCK
                )
                k = tl.load(
                    keys + cell[None, :] * key_row_stride + kv_head * key_head_stride + k_lane[:, None],
                    mask=is_cell[None, :] & (k_lane < K_DIM)[:, None],
                    other=0.0,
                ).to(operand)
                scores = tl.dot(q, k, input_precision="ieee")
                if HAS_SOFTCAP:
                    # tanh(x) from 2 ** -|x|, which never overflows.
                    scores *= scale
                    falling = tl.exp2(tl.abs(scores) * (-2.0 * LOG2E / softcap))
                    scores = tl.where(scores < 0, -softcap, softcap) * (1.0 - falling) / (1.0 + falling) * LOG2E
                else:
                    scores *= scale * LOG2E
                if ROWS == 1 or block < common or block + BLOCK > common_end:
                    sees = (position[None, :] >= start[:, None]) & (position[None, :] < end[:, None])
                    scores = tl.where(is_cell[None, :] & sees, scores, -float("inf"))
                new_peak = tl.maximum(peak, tl.max(scores, 1))
                # A row that has seen nothing yet has no peak: subtract 0 instead of -inf - -inf.
                base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
                weights = tl.exp2(scores - base[:, None])
                decay = tl.exp2(peak - base)
                v = tl.load(
                    values + cell[:, None] * value_row_stride + kv_head * value_head_stride + v_lane[None, :],
                    mask=is_cell[:, None] & (v_lane < V_DIM)[None, :],
                    other=0.0,
                ).to(operand)
                weighted = weighted * decay[:, None] + tl.dot(weights.to(operand), v, input_precision="ieee")
                total = total * decay + tl.sum(weights, 1)
                peak = new_peak
                cell = following

        if PDL:
            gdc_launch_dependents()
        if HAS_VALUE_SCALE:
            weighted *= value_scale
        if num_pieces == 1:
            if HAS_SINKS:
                sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
                base = tl.maximum(peak, sink)
                decay = tl.exp2(peak - base)
                total = total * decay + tl.exp2(sink - base)
                weighted = weighted * decay[:, None]
            total = tl.where(is_row, total, 1.0)  # lanes without a row have seen nothing: not 0 / 0
            place = row.to(tl.int64) * (num_kv_heads * GROUP) + head
            tl.store(
                out + place[:, None] * V_DIM + v_lane[None, :],
                (weighted / total[:, None]).to(out.dtype.element_ty),
                mask=is_row[:, None] & (v_lane < V_DIM)[None, :],
            )
        else:
            leave_part(
                peaks,
                sums,
                outs,
                sinks,
                out,
                counters,
                peak,
                total,
                weighted,
                group,
                number,
                num_pieces,
                slot,
                first_row,
                row,
                head,
                is_row,
                ROWS,
                GROUP,
                M,
                V_DIM,
                PADDED_V,
                HAS_SINKS,
            )


@triton.jit
def _fetch_rows(
    base,
    rows,  # [n] i64
    row_stride,
    SIZE: tl.constexpr,  # noqa: N803
):
    """Have the first SIZE values of these rows brought near."""
    fetch_ahead(base + rows[:, None] * row_stride + (tl.arange(0, SIZE // LINE) * LINE)[None, :])


@triton.jit
def _cells_at(
    cells,
    page_table,
    owner,
    page_table_stride,
    low,
    high,
    ALIGNED: tl.constexpr,  # noqa: N803
    PAGE_CELLS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """[BLOCK] i64: the pool rows of positions low .. low + BLOCK - 1 of a sequence, 0 from `high` on.

    ALIGNED: cells + position is an entry of the page; otherwise cells is the first page.
    """
    position = low + tl.arange(0, BLOCK)
    is_cell = position < high
    if ALIGNED:
        cell = tl.load(cells + position, mask=is_cell, other=0)
    else:
        page = tl.load(page_table + owner * page_table_stride + position // PAGE_CELLS, mask=is_cell, other=0)
        cell = tl.load(cells + page.to(tl.int64) * PAGE_CELLS + position % PAGE_CELLS, mask=is_cell, other=0)
    return cell.to(tl.int64)
