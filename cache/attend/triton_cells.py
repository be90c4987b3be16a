"""Attention over cells on CUDA, in Triton: split-K/V over paged cell lists, then a merge. Equal to `reference`.

    rows   0 1 2 3 | 4 5 6 7 | 8 9 ..      tiles of neighbouring rows
           a b c c | c c c c | d d ..      a tile of one sequence (a prefill chunk) loads each K/V block once for all
           ^ ^ ^ ^   ^^^^^^^   ^^^^^       its rows and heads of a group; rows of mixed tiles (decodes) run one by one

Which rows take which way, and how long their runs are, is read on the device: the grid depends on the width alone, so
a captured graph serves any mix. A run is cut into `num_splits` equal parts so that a few long rows still fill the GPU;
the parts' partial sums are merged by whichever program finishes last, which `counters` tells it.

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
from cache.geometry import UNSCALED, KvScales, Reach
from cache.step import CellStep

LOG2E = tl.constexpr(1.4426950408889634)
PROGRAMS_PER_MULTIPROCESSOR = 4
MAX_SPLITS = 16
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
    num_splits: int | None = None,
    tile_rows: int | None = None,
    shape: BlockShape | None = None,
) -> torch.Tensor:
    """query [W, H, Dk], keys [rows, KV, Dk], values [rows, KV, Dv], sinks [H] -> [W, H, Dv] in query's dtype.

    scales: what is stored stands for itself times these.
    num_splits, tile_rows: powers of two; chosen, like the shape, from the tensors' shapes alone when None. Launches
    only, no synchronisation.
    """
    width, num_heads, k_dim = query.shape
    num_kv_heads, v_dim = values.shape[1:]
    group = num_heads // num_kv_heads
    run = step.runs[reach]
    query = query if query.stride(-1) == 1 else query.contiguous()
    if num_splits is None:
        num_splits = default_splits(width * num_kv_heads, query.device)
    padded_k, padded_v = _pad(k_dim), _pad(v_dim)
    upcast = query.dtype == torch.float32
    out = query.new_empty(width, num_heads, v_dim)
    # Partial results of each part of each row's run; not touched when there is one part.
    partial = (width, num_heads, num_splits) if num_splits > 1 else (1, 1, 1)
    peaks = torch.empty(*partial, dtype=torch.float32, device=query.device)
    sums = torch.empty(*partial, dtype=torch.float32, device=query.device)
    outs = torch.empty(*partial, v_dim, dtype=torch.float32, device=query.device)
    tiled = shape or block_shape(max(padded_k, padded_v), upcast)
    if tile_rows is None:
        tile_rows = default_tile_rows(width, group, tiled)
    for rows_each in dict.fromkeys((1, tile_rows)):
        launched = tiled if rows_each > 1 else shape or decode_shape(max(padded_k, padded_v), group, upcast)
        # Heads go first: a cell's K/V of all heads lie side by side, and are read at the same time.
        _attend_splits[(num_kv_heads, triton.cdiv(width, rows_each), num_splits)](
            query,
            keys,
            values,
            sinks if sinks is not None else query,
            step.table_row,
            run.start,
            run.count,
            step.page_table,
            step.pages,
            out,
            peaks,
            sums,
            outs,
            _counters(step, width * num_kv_heads, query.device) if num_splits > 1 else step.table_row,
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
            TILE=tile_rows,
            GROUP=group,
            M=_pad(rows_each * group),
            K_DIM=k_dim,
            V_DIM=v_dim,
            PADDED_K=padded_k,
            PADDED_V=padded_v,
            BLOCK=launched.cells,
            SPLITS=num_splits,
            HAS_SOFTCAP=softcap is not None,
            HAS_SINKS=sinks is not None,
            HAS_VALUE_SCALE=scales.value != 1.0,
            UPCAST=upcast,
            num_warps=launched.warps,
            num_stages=launched.stages,
            **overlapped(query.device),
        )
    return out


def _counters(step: CellStep, size: int, device: torch.device) -> torch.Tensor:
    """[size] i32: how many parts of each row and K/V head are done. Zero before and after every launch.

    Made once a step. A captured step makes its own, inside the capture, so that its graph owns and clears them.
    """
    key = ("counters", size, device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    if key not in step.plans:
        step.plans[key] = torch.zeros(size, dtype=torch.int32, device=device)
    counters = step.plans[key]
    assert isinstance(counters, torch.Tensor)
    return counters


def default_splits(programs: int, device: torch.device) -> int:
    """How many parts to cut each run into, so that `programs` = rows * K/V heads fill the GPU. A power of two."""
    if device.type != "cuda":
        return 1
    wanted = torch.cuda.get_device_properties(device).multi_processor_count * PROGRAMS_PER_MULTIPROCESSOR // programs
    return 1 << min(max(wanted, 1), MAX_SPLITS).bit_length() - 1


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
        return BlockShape(64, 64, 4)
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


@triton.jit
def _attend_splits(
    query,  # [W, H, K_DIM]
    keys,  # [rows, KV, K_DIM]
    values,  # [rows, KV, V_DIM]
    sinks,  # [H]
    table_row,  # [W] i32
    starts,  # [W] i32
    counts,  # [W] i32
    page_table,  # [sequences, pages] i32
    pages,  # [num_pages, PAGE_CELLS] i32
    out,  # [W, H, V_DIM]
    peaks,  # [W, H, SPLITS] f32: largest score of the part, in powers of two
    sums,  # [W, H, SPLITS] f32: sum of 2 ** (score - peak)
    outs,  # [W, H, SPLITS, V_DIM] f32: values weighted by the same
    counters,  # [W, KV] i32: parts that are done; zero before and after
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
    TILE: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    M: tl.constexpr,  # noqa: N803
    K_DIM: tl.constexpr,  # noqa: N803
    V_DIM: tl.constexpr,  # noqa: N803
    PADDED_K: tl.constexpr,  # noqa: N803
    PADDED_V: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
    HAS_SOFTCAP: tl.constexpr,  # noqa: N803
    HAS_SINKS: tl.constexpr,  # noqa: N803
    HAS_VALUE_SCALE: tl.constexpr,  # noqa: N803
    UPCAST: tl.constexpr,  # noqa: N803
    PDL: tl.constexpr,  # noqa: N803
):
    """One part of the runs of ROWS rows, for the GROUP query heads of one K/V head: M = ROWS * GROUP, padded."""
    # The step's tables are older than the launch before this one, so they are read ahead of the wait for it.
    first_row = tl.program_id(1) * ROWS
    kv_head = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)
    split = tl.program_id(2)
    owner = tl.load(table_row + first_row)
    if TILE > 1:
        # Both launches ask the same question of the same tile, so each row is served by exactly one of them.
        tile = first_row // TILE * TILE + tl.arange(0, TILE)
        owners = tl.load(table_row + tile, mask=tile < width, other=owner)
        is_shared = tl.min(owners, 0) == tl.max(owners, 0)
        if is_shared != (ROWS > 1):
            if PDL:
                gdc_wait()  # what is launched behind relies on all that came before
            return

    m = tl.arange(0, M)
    row = first_row + m // GROUP
    head = kv_head * GROUP + m % GROUP
    is_row = (m < ROWS * GROUP) & (row < width)
    start = tl.load(starts + row, mask=is_row, other=2147483647)
    end = tl.where(is_row, start + tl.load(counts + row, mask=is_row, other=0), 0)
    first = tl.min(start, 0)
    last = tl.max(end, 0)
    # Where every block lies within a page, its cells are one aligned load and its page is looked up once a page.
    ALIGNED: tl.constexpr = PAGE_CELLS % BLOCK == 0  # noqa: N806
    low = first // BLOCK * BLOCK if ALIGNED else first
    part = tl.cdiv(tl.cdiv(last - low, SPLITS), BLOCK) * BLOCK
    low += split * part
    high = tl.minimum(low + part, last)
    if PDL:
        if ALIGNED and PADDED_K >= LINE and PADDED_V >= LINE:
            near = _first_cells(pages, page_table + owner * page_table_stride, low, high, PAGE_CELLS, BLOCK)
            k_line = near[:, None] * key_row_stride + kv_head * key_head_stride
            v_line = near[:, None] * value_row_stride + kv_head * value_head_stride
            fetch_ahead(keys + k_line + (tl.arange(0, PADDED_K // LINE) * LINE)[None, :])
            fetch_ahead(values + v_line + (tl.arange(0, PADDED_V // LINE) * LINE)[None, :])
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
            cells += (tl.load(page_table + owner * page_table_stride + page).to(tl.int64) - page) * PAGE_CELLS
        # The cells of the next block are looked up while this one's K/V are under way.
        cell = _cells_at(cells, page_table, owner, page_table_stride, page_low, page_high, ALIGNED, PAGE_CELLS, BLOCK)
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
            scores = tl.dot(q, k, input_precision="ieee") * scale
            if HAS_SOFTCAP:
                # tanh(x) from 2 ** -|x|, which never overflows.
                falling = tl.exp2(tl.abs(scores) * (-2.0 * LOG2E / softcap))
                scores = tl.where(scores < 0, -softcap, softcap) * (1.0 - falling) / (1.0 + falling)
            sees = is_cell[None, :] & (position[None, :] >= start[:, None]) & (position[None, :] < end[:, None])
            scores = tl.where(sees, scores * LOG2E, -float("inf"))
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
    num_heads = num_kv_heads * GROUP
    place = row.to(tl.int64) * num_heads + head
    if SPLITS == 1:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
            base = tl.maximum(peak, sink)
            decay = tl.exp2(peak - base)
            total = total * decay + tl.exp2(sink - base)
            weighted = weighted * decay[:, None]
        total = tl.where(is_row, total, 1.0)  # lanes without a row have seen nothing: not 0 / 0
        tl.store(
            out + place[:, None] * V_DIM + v_lane[None, :],
            (weighted / total[:, None]).to(out.dtype.element_ty),
            mask=is_row[:, None] & (v_lane < V_DIM)[None, :],
        )
    else:
        # A part without cells has peak -inf and sum 0; its values are neither written nor read.
        tl.store(peaks + place * SPLITS + split, peak, mask=is_row)
        tl.store(sums + place * SPLITS + split, total, mask=is_row)
        tl.store(
            outs + (place * SPLITS + split)[:, None] * V_DIM + v_lane[None, :],
            weighted,
            mask=(is_row & (peak > -float("inf")))[:, None] & (v_lane < V_DIM)[None, :],
        )
        counter = counters + first_row * num_kv_heads + kv_head
        tl.debug_barrier()  # every thread's part is written before one of them says so
        if tl.atomic_add(counter, 1) == SPLITS - 1:
            tl.store(counter, 0)
            if ROWS == 1:
                for member in tl.static_range(GROUP):
                    _merge_one(
                        peaks,
                        sums,
                        outs,
                        sinks,
                        out,
                        first_row.to(tl.int64) * num_heads + kv_head * GROUP + member,
                        kv_head * GROUP + member,
                        V_DIM,
                        PADDED_V,
                        SPLITS,
                        HAS_SINKS,
                    )
            else:
                _merge_tile(peaks, sums, outs, sinks, out, place, head, is_row, M, V_DIM, PADDED_V, SPLITS, HAS_SINKS)


@triton.jit
def _first_cells(
    pages,
    page_row,
    low,
    high,
    PAGE_CELLS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """[BLOCK] i64: the pool rows of the block at `low`, 0 past `high`."""
    page = tl.load(page_row + low // PAGE_CELLS, mask=low < high, other=0).to(tl.int64)
    position = low + tl.arange(0, BLOCK)
    cell = tl.load(pages + page * PAGE_CELLS + position % PAGE_CELLS, mask=position < high, other=0)
    return cell.to(tl.int64)


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


@triton.jit
def _merge_one(
    peaks,
    sums,
    outs,
    sinks,
    out,
    place,
    head,
    V_DIM: tl.constexpr,  # noqa: N803
    PADDED_V: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
    HAS_SINKS: tl.constexpr,  # noqa: N803
):
    """One row and head: the parts' sums brought to one peak and added, all parts at once.

    Other programs wrote them: they are read past the L1 cache.
    """
    split = tl.arange(0, SPLITS)
    v_lane = tl.arange(0, PADDED_V)
    peak = tl.load(peaks + place * SPLITS + split, cache_modifier=".cg")
    base = tl.max(peak, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        base = tl.maximum(base, sink)
    decay = tl.exp2(peak - base)
    total = tl.sum(tl.load(sums + place * SPLITS + split, cache_modifier=".cg") * decay, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - base)
    weighted = tl.load(
        outs + (place * SPLITS + split)[:, None] * V_DIM + v_lane[None, :],
        mask=(peak > -float("inf"))[:, None] & (v_lane < V_DIM)[None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    result = tl.sum(weighted * decay[:, None], 0) / total
    tl.store(out + place * V_DIM + v_lane, result.to(out.dtype.element_ty), mask=v_lane < V_DIM)


@triton.jit
def _merge_tile(
    peaks,
    sums,
    outs,
    sinks,
    out,
    place,  # [M]
    head,  # [M]
    is_row,  # [M]
    M: tl.constexpr,  # noqa: N803
    V_DIM: tl.constexpr,  # noqa: N803
    PADDED_V: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
    HAS_SINKS: tl.constexpr,  # noqa: N803
):
    """All rows and heads of a tile, part by part."""
    v_lane = tl.arange(0, PADDED_V)
    base = tl.full([M], -float("inf"), tl.float32)
    if HAS_SINKS:
        base = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
    sink = base
    for split in range(SPLITS):
        peak = tl.load(peaks + place * SPLITS + split, mask=is_row, other=0.0, cache_modifier=".cg")
        base = tl.maximum(base, peak)
    total = tl.where(is_row, 0.0, 1.0)
    if HAS_SINKS:
        total += tl.exp2(sink - base)
    weighted = tl.zeros([M, PADDED_V], tl.float32)
    for split in range(SPLITS):
        at = place * SPLITS + split
        peak = tl.load(peaks + at, mask=is_row, other=-float("inf"), cache_modifier=".cg")
        decay = tl.exp2(peak - base)
        total += tl.load(sums + at, mask=is_row, other=0.0, cache_modifier=".cg") * decay
        values = tl.load(
            outs + at[:, None] * V_DIM + v_lane[None, :],
            mask=(peak > -float("inf"))[:, None] & (v_lane < V_DIM)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        weighted += values * decay[:, None]
    tl.store(
        out + place[:, None] * V_DIM + v_lane[None, :],
        (weighted / total[:, None]).to(out.dtype.element_ty),
        mask=is_row[:, None] & (v_lane < V_DIM)[None, :],
    )
