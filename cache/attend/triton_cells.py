"""Attention over cells on CUDA, in Triton: split-K/V over paged cell lists, then a merge. Equal to `reference`.

    rows   0 1 2 3 | 4 5 6 7 | 8 9 ..      tiles of neighbouring rows
           a b c c | c c c c | d d ..      a tile of one sequence (a prefill chunk) loads each K/V block once for all
           ^ ^ ^ ^   ^^^^^^^   ^^^^^       its rows and heads of a group; rows of mixed tiles (decodes) run one by one

Which rows take which way, and how long their runs are, is read on the device: the grid depends on the width alone, so
a captured graph serves any mix. A run is cut into `num_splits` equal parts so that a few long rows still fill the GPU;
the parts' partial sums are merged by `_merge_splits`, or written out at once where there is one part.

The interpreter (TRITON_INTERPRET=1, no GPU) runs the same kernels except for bfloat16, which it gets wrong.
"""

# Triton is not typed, and a kernel's arguments are pointers and compile-time constants.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from cache.geometry import Reach
from cache.step import CellStep

LOG2E = tl.constexpr(1.4426950408889634)
PROGRAMS_PER_MULTIPROCESSOR = 4
MAX_SPLITS = 32


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
    num_splits: int | None = None,
    tile_rows: int | None = None,
) -> torch.Tensor:
    """query [W, H, Dk], keys [rows, KV, Dk], values [rows, KV, Dv], sinks [H] -> [W, H, Dv] in query's dtype.

    num_splits, tile_rows: powers of two; chosen from the shapes alone when None. Launches only, no synchronisation.
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
    shape = block_shape(max(padded_k, padded_v), upcast)
    if tile_rows is None:
        tile_rows = default_tile_rows(width, group, shape)
    out = query.new_empty(width, num_heads, v_dim)
    # Partial results of each part of each row's run; not touched when there is one part.
    partial = (width, num_heads, num_splits) if num_splits > 1 else (1, 1, 1)
    peaks = torch.empty(*partial, dtype=torch.float32, device=query.device)
    sums = torch.empty(*partial, dtype=torch.float32, device=query.device)
    outs = torch.empty(*partial, v_dim, dtype=torch.float32, device=query.device)
    for rows_each in dict.fromkeys((1, tile_rows)):
        _attend_splits[(triton.cdiv(width, rows_each), num_kv_heads, num_splits)](
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
            width,
            scale,
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
            BLOCK=shape.cells,
            SPLITS=num_splits,
            HAS_SOFTCAP=softcap is not None,
            HAS_SINKS=sinks is not None,
            UPCAST=upcast,
            num_warps=shape.warps,
            num_stages=2,
        )
    if num_splits > 1:
        _merge_splits[(width, num_heads)](
            peaks,
            sums,
            outs,
            sinks if sinks is not None else query,
            out,
            V_DIM=v_dim,
            PADDED_V=padded_v,
            SPLITS=num_splits,
            HAS_SINKS=sinks is not None,
            num_warps=2,
        )
    return out


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


def block_shape(head_width: int, upcast: bool) -> BlockShape:
    """head_width: the wider of K and V, padded. float32 has no exact tensor-core product: small tiles of plain sums."""
    if upcast:
        return BlockShape(16, 32 if head_width <= 128 else 16, 8)
    if head_width <= 128:
        return BlockShape(64, 64, 4)
    return BlockShape(64, 32, 8) if head_width <= 256 else BlockShape(32, 16, 8)


def default_tile_rows(width: int, group: int, shape: BlockShape) -> int:
    """Rows that share their K/V loads when they are of one sequence. A power of two; 1 turns tiles off."""
    rows = 1 << max(1, shape.product_rows // group).bit_length() - 1
    return rows if rows <= width else 1


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
    width,
    scale,
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
    UPCAST: tl.constexpr,  # noqa: N803
):
    """One part of the runs of ROWS rows, for the GROUP query heads of one K/V head: M = ROWS * GROUP, padded."""
    first_row = tl.program_id(0) * ROWS
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    owner = tl.load(table_row + first_row)
    if TILE > 1:
        # Both launches ask the same question of the same tile, so each row is served by exactly one of them.
        tile = first_row // TILE * TILE + tl.arange(0, TILE)
        owners = tl.load(table_row + tile, mask=tile < width, other=owner)
        is_shared = tl.min(owners, 0) == tl.max(owners, 0)
        if is_shared != (ROWS > 1):
            return

    m = tl.arange(0, M)
    row = first_row + m // GROUP
    head = kv_head * GROUP + m % GROUP
    is_row = (m < ROWS * GROUP) & (row < width)
    start = tl.load(starts + row, mask=is_row, other=2147483647)
    end = tl.where(is_row, start + tl.load(counts + row, mask=is_row, other=0), 0)
    low = tl.min(start, 0)
    high = tl.max(end, 0)
    part = tl.cdiv(tl.cdiv(high - low, SPLITS), BLOCK) * BLOCK
    low += split * part
    high = tl.minimum(low + part, high)

    operand: tl.constexpr = tl.float32 if UPCAST else query.dtype.element_ty
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
    for block in range(low, high, BLOCK):
        position = block + tl.arange(0, BLOCK)
        is_cell = position < high
        page = tl.load(page_table + owner * page_table_stride + position // PAGE_CELLS, mask=is_cell, other=0)
        cell = tl.load(pages + page.to(tl.int64) * PAGE_CELLS + position % PAGE_CELLS, mask=is_cell, other=0)
        cell = cell.to(tl.int64)
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

    num_heads = tl.num_programs(1) * GROUP
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
        place = place * SPLITS + split
        tl.store(peaks + place, peak, mask=is_row)
        tl.store(sums + place, total, mask=is_row)
        tl.store(
            outs + place[:, None] * V_DIM + v_lane[None, :],
            weighted,
            mask=is_row[:, None] & (v_lane < V_DIM)[None, :],
        )


@triton.jit
def _merge_splits(
    peaks,
    sums,
    outs,
    sinks,
    out,
    V_DIM: tl.constexpr,  # noqa: N803
    PADDED_V: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
    HAS_SINKS: tl.constexpr,  # noqa: N803
):
    """One row and head: the parts' sums brought to one peak and added. A part without cells has peak -inf, sum 0."""
    head = tl.program_id(1)
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head
    split = tl.arange(0, SPLITS)
    v_lane = tl.arange(0, PADDED_V)
    peak = tl.load(peaks + place * SPLITS + split)
    base = tl.max(peak, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        base = tl.maximum(base, sink)
    decay = tl.exp2(peak - base)
    total = tl.sum(tl.load(sums + place * SPLITS + split) * decay, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - base)
    weighted = tl.load(
        outs + (place * SPLITS + split)[:, None] * V_DIM + v_lane[None, :],
        mask=(v_lane < V_DIM)[None, :] & (split >= 0)[:, None],
        other=0.0,
    )
    result = tl.sum(weighted * decay[:, None], 0) / total
    tl.store(out + place * V_DIM + v_lane, result.to(out.dtype.element_ty), mask=v_lane < V_DIM)
