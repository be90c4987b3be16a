"""From the merged q/k/v product to attention: add the parts, norm the heads, rotate, store K/V in the cells."""

# Triton is not typed, and a kernel's arguments are pointers and compile-time constants.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# ruff: noqa: N803

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cache.attend.launch import next_power, overlapped
from cache.geometry import FP8, FP8_MAX, UNSCALED, KvScales
from static_graphs.kernels.norms import RmsNorm

MAX_HEADS = 8
"""Heads one program handles, at most."""
_FP8_MAX = tl.constexpr(FP8_MAX)


def rotate_and_store(
    parts: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    write_rows: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    query_norm: RmsNorm | None = None,
    key_norm: RmsNorm | None = None,
    scales: KvScales = UNSCALED,
) -> torch.Tensor:
    """parts [P, W, (H + 2 * KV) * D], cos and sin [W, rotated], keys and values [rows, KV, D] -> query [W, H, D].

    The first `rotated` lanes of each head turn in halves (lane i with lane i + rotated / 2), the others stay.
    Row w's K/V go to row write_rows[w] of the pool, in its dtype; FP8 holds them over their scales, cut to its range.
    Both norms are there or neither.
    """
    num_parts, width, columns = parts.shape
    num_kv_heads, head_dim = keys.shape[1:]
    num_heads = columns // head_dim - 2 * num_kv_heads
    common = math.gcd(num_heads, num_kv_heads)
    heads_each = min(MAX_HEADS, common & -common)
    query = torch.empty(width, num_heads, head_dim, dtype=cos.dtype, device=parts.device)
    _rotate_and_store[(width, (num_heads + 2 * num_kv_heads) // heads_each)](
        parts,
        bias if bias is not None else parts,
        cos,
        sin,
        query_norm.weight if query_norm is not None else cos,
        key_norm.weight if key_norm is not None else cos,
        query,
        keys,
        values,
        write_rows,
        num_heads,
        num_kv_heads,
        parts.stride(0),
        parts.stride(1),
        cos.stride(0),
        sin.stride(0),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        query_norm.eps if query_norm is not None else 0.0,
        query_norm.offset if query_norm is not None else 0.0,
        1.0 / scales.key,
        1.0 / scales.value,
        PARTS=num_parts,
        HEADS=heads_each,
        D=head_dim,
        PADDED=next_power(head_dim),
        ROTATED=cos.shape[-1],
        HAS_BIAS=bias is not None,
        HAS_NORM=query_norm is not None,
        IS_FP8=keys.dtype == FP8,
        num_warps=max(1, min(4, heads_each * next_power(head_dim) // 256)),
        **overlapped(parts.device),
    )
    return query


@triton.jit
def _rotate_and_store(
    parts,  # [PARTS, W, (H + 2 * KV) * D]
    bias,  # [(H + 2 * KV) * D]
    cos,  # [W, ROTATED]
    sin,  # [W, ROTATED]
    query_weight,  # [D]
    key_weight,  # [D]
    query,  # [W, H, D]
    keys,  # [rows, KV, D]
    values,  # [rows, KV, D]
    write_rows,  # [W] i64
    num_heads,
    num_kv_heads,
    part_stride,
    row_stride,
    cos_stride,
    sin_stride,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    eps,
    offset,
    over_key_scale,
    over_value_scale,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    ROTATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """HEADS neighbouring heads of one row, all of them queries, keys or values."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * HEADS
    is_query = first < num_heads
    is_value = first >= num_heads + num_kv_heads
    head = first + tl.arange(0, HEADS)
    lane = tl.arange(0, PADDED)
    inside = lane < D
    # The lane that a lane turns with; lanes past ROTATED turn with none.
    turns = lane < ROTATED
    partner = tl.where(turns, tl.where(lane < ROTATED // 2, lane + ROTATED // 2, lane - ROTATED // 2), lane)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    own_at = head[:, None] * D + lane[None, :]
    partner_at = head[:, None] * D + partner[None, :]
    tile = inside[None, :] & (head >= 0)[:, None]
    own = tl.zeros([HEADS, PADDED], tl.float32)
    other = tl.zeros([HEADS, PADDED], tl.float32)
    for part in tl.static_range(PARTS):
        source = parts + part * part_stride + row * row_stride
        own += tl.load(source + own_at, mask=tile, other=0.0).to(tl.float32)
        other += tl.load(source + partner_at, mask=tile, other=0.0).to(tl.float32)
    if HAS_BIAS:
        own += tl.load(bias + own_at, mask=tile, other=0.0).to(tl.float32)
        other += tl.load(bias + partner_at, mask=tile, other=0.0).to(tl.float32)
    if is_value:
        if IS_FP8:
            own = _cut(own * over_value_scale)
        place = tl.load(write_rows + row) * value_row_stride + (head - num_heads - num_kv_heads) * value_head_stride
        tl.store(values + place[:, None] + lane[None, :], own.to(values.dtype.element_ty), mask=tile)
    else:
        if HAS_NORM:
            weight = query_weight if is_query else key_weight
            spread = tl.rsqrt(tl.sum(own * own, 1) / D + eps)[:, None]
            own *= spread * (tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32) + offset)[None, :]
            other *= spread * (tl.load(weight + partner, mask=inside, other=0.0).to(tl.float32) + offset)[None, :]
        c = tl.load(cos + row * cos_stride + lane, mask=turns, other=1.0).to(tl.float32)
        s = tl.load(sin + row * sin_stride + lane, mask=turns, other=0.0).to(tl.float32)
        s = tl.where(lane < ROTATED // 2, -s, s)
        turned = own * c[None, :] + other * s[None, :]
        if is_query:
            place = (row * num_heads + head) * D
            tl.store(query + place[:, None] + lane[None, :], turned.to(query.dtype.element_ty), mask=tile)
        else:
            if IS_FP8:
                turned = _cut(turned * over_key_scale)
            place = tl.load(write_rows + row) * key_row_stride + (head - num_heads) * key_head_stride
            tl.store(keys + place[:, None] + lane[None, :], turned.to(keys.dtype.element_ty), mask=tile)


@triton.jit
def _cut(x):
    """To what FP8 holds: the nearest end of its range for what lies beyond, and NaN for NaN."""
    return tl.clamp(x, -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
