"""Brings together what the pieces of a run found, each by its own peak: the last step of attention over cells.

Whichever program of a group finishes last merges it. Other programs wrote what it reads, so that is read past the L1
cache.
"""

# Triton is not typed, and a kernel's arguments are pointers and compile-time constants.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
MERGED = tl.constexpr(16)
"""Pieces whose results a merge of one row holds at once."""
WRITTEN_OUT = tl.constexpr(8)
"""Heads of a group whose merges are written out one behind the other."""


@triton.jit
def leave_part(
    peaks,
    sums,
    outs,
    sinks,
    out,
    counters,
    peak,  # [M]
    total,  # [M]
    weighted,  # [M, PADDED_V]
    group,
    number,
    num_pieces,
    slot,
    first_row,
    row,  # [M]
    head,  # [M]
    is_row,  # [M]
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    V_DIM: tl.constexpr,
    PADDED_V: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Write down what one piece of several found, for one K/V head; the last of them to do so merges all."""
    kv_head = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)
    m = tl.arange(0, M)
    v_lane = tl.arange(0, PADDED_V)
    # A row that sees no cell of the piece has peak -inf and sum 0; its values are neither written nor read.
    mine = (slot.to(tl.int64) * num_kv_heads + kv_head) * (ROWS * GROUP) + m
    tl.store(peaks + mine, peak, mask=is_row)
    tl.store(sums + mine, total, mask=is_row)
    tl.store(
        outs + mine[:, None] * V_DIM + v_lane[None, :],
        weighted,
        mask=(is_row & (peak > -float("inf")))[:, None] & (v_lane < V_DIM)[None, :],
    )
    counter = counters + group * num_kv_heads + kv_head
    tl.debug_barrier()  # every thread's part is written before one of them says so
    if tl.atomic_add(counter, 1) == num_pieces - 1:
        tl.store(counter, 0)
        # The group's pieces have neighbouring slots, and each K/V head its share of every slot.
        stride = num_kv_heads * (ROWS * GROUP)
        whole = ((slot - number).to(tl.int64) * num_kv_heads + kv_head) * (ROWS * GROUP)
        if ROWS == 1:
            # Many heads, as over one K/V head, are merged in a loop: 71 written out compile half a minute.
            AT_ONCE: tl.constexpr = GROUP if GROUP <= WRITTEN_OUT else 1
            for first_member in range(0, GROUP, AT_ONCE):
                for member in tl.static_range(AT_ONCE):
                    head_in = first_member + member
                    head_at = kv_head * GROUP + head_in
                    place_at = first_row.to(tl.int64) * (num_kv_heads * GROUP) + head_at
                    merge_one(
                        peaks,
                        sums,
                        outs,
                        sinks,
                        out,
                        whole + head_in,
                        stride,
                        num_pieces,
                        place_at,
                        head_at,
                        V_DIM,
                        PADDED_V,
                        HAS_SINKS,
                    )
        else:
            merge_tile(
                peaks,
                sums,
                outs,
                sinks,
                out,
                whole + m,
                stride,
                num_pieces,
                row.to(tl.int64) * (num_kv_heads * GROUP) + head,
                head,
                is_row,
                M,
                V_DIM,
                PADDED_V,
                HAS_SINKS,
            )


@triton.jit
def merge_one(
    peaks,
    sums,
    outs,
    sinks,
    out,
    mine,
    stride,
    num_pieces,
    place,
    head,
    V_DIM: tl.constexpr,
    PADDED_V: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One row and head: the pieces' sums brought to one peak and added, MERGED pieces at once.

    mine: place of the first piece's; stride: to the next's.
    """
    v_lane = tl.arange(0, PADDED_V)
    base = -float("inf")
    total = 0.0
    if HAS_SINKS:
        base = tl.load(sinks + head).to(tl.float32) * LOG2E
        total = 1.0
    weighted = tl.zeros([PADDED_V], tl.float32)
    for low in range(0, num_pieces, MERGED):
        number = low + tl.arange(0, MERGED)
        at = mine + number * stride
        peak = tl.load(peaks + at, mask=number < num_pieces, other=-float("inf"), cache_modifier=".cg")
        new_base = tl.maximum(base, tl.max(peak, 0))
        fade = tl.exp2(base - new_base)
        decay = tl.exp2(peak - new_base)
        values = tl.load(
            outs + at[:, None] * V_DIM + v_lane[None, :],
            mask=(peak > -float("inf"))[:, None] & (v_lane < V_DIM)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        some = tl.load(sums + at, mask=number < num_pieces, other=0.0, cache_modifier=".cg")
        total = total * fade + tl.sum(some * decay, 0)
        weighted = weighted * fade + tl.sum(values * decay[:, None], 0)
        base = new_base
    tl.store(out + place * V_DIM + v_lane, (weighted / total).to(out.dtype.element_ty), mask=v_lane < V_DIM)


@triton.jit
def merge_tile(
    peaks,
    sums,
    outs,
    sinks,
    out,
    mine,  # [M] places of the first piece's
    stride,  # to the next piece's
    num_pieces,
    place,  # [M]
    head,  # [M]
    is_row,  # [M]
    M: tl.constexpr,
    V_DIM: tl.constexpr,
    PADDED_V: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """All rows and heads of a tile, piece by piece."""
    v_lane = tl.arange(0, PADDED_V)
    base = tl.full([M], -float("inf"), tl.float32)
    if HAS_SINKS:
        base = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
    sink = base
    for number in range(num_pieces):
        peak = tl.load(peaks + mine + number * stride, mask=is_row, other=0.0, cache_modifier=".cg")
        base = tl.maximum(base, peak)
    total = tl.where(is_row, 0.0, 1.0)
    if HAS_SINKS:
        total += tl.exp2(sink - base)
    weighted = tl.zeros([M, PADDED_V], tl.float32)
    for number in range(num_pieces):
        at = mine + number * stride
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
