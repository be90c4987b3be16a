"""A mixture of experts over R rows: which experts a row goes to, and the products of each expert with its rows alone.

    logits -> choose: TOP_K experts a row, weighed -> sort: pairs of row and expert, by expert
           -> gated product of each expert with its pairs' rows -> down product, weighed -> [R, TOP_K, H], not yet added

A pair is numbered row * TOP_K + place. With few pairs an expert is read by each of its pairs and nothing is sorted;
with more it is read once for a block of its pairs. No expert's load is known on the host: the grid has every expert in
it, and one without pairs ends at once.
"""

# Triton is not typed, and a kernel's arguments are pointers and compile-time constants.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cache.attend.launch import next_power, overlapped
from static_graphs.kernels.products import ACTIVATIONS, activate
from static_graphs.kernels.shared_memory import room_of

SORT_BLOCK = 2048
"""Pairs that a program of the sort compares at a time: one number, so one kernel."""


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """How an expert's product is cut. block_r: pairs of one expert at a time; None: each pair for itself, unsorted."""

    block_n: int
    block_k: int
    block_r: int | None = None
    warps: int = 4
    stages: int = 4
    programs: int = 1
    """For an expert's blocks of pairs, in turn."""

    def stage_bytes(self, itemsize: int, *, is_gated: bool) -> int:
        """Shared memory of a stage: a block of each weight and one of the pairs' rows."""
        return itemsize * self.block_k * (self.block_n * (2 if is_gated else 1) + (self.block_r or 0))


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """Where rows go, and the pairs by expert."""

    experts: torch.Tensor  # [R, TOP_K] i32
    weights: torch.Tensor  # [R, TOP_K]
    order: torch.Tensor | None = None  # [R * TOP_K] i32: pairs of expert 0, of expert 1, ..., each by number
    starts: torch.Tensor | None = None  # [E + 1] i32: where each expert's begin

    @property
    def pairs(self) -> int:
        return self.experts.numel()


def choose_experts(parts: torch.Tensor, top_k: int, *, is_normed: bool, dtype: torch.dtype) -> Routed:
    """parts [P, R, E] of router logits to be added -> each row's `top_k` likeliest of a softmax, likeliest first.

    Logits are rounded to `dtype`, as a model's own are, and its weights are of it; is_normed: they add up to 1.
    Of equal logits the first expert wins. A row with a NaN goes to some experts, by NaN weights.
    """
    num_parts, rows, experts = parts.shape
    routed = Routed(
        torch.empty(rows, top_k, dtype=torch.int32, device=parts.device),
        torch.empty(rows, top_k, dtype=dtype, device=parts.device),
    )
    _choose[(rows,)](
        parts,
        routed.experts,
        routed.weights,
        experts,
        parts.stride(0),
        PARTS=num_parts,
        BLOCK=next_power(experts),
        TOP_K=top_k,
        PLACES=next_power(top_k),
        NORMED=is_normed,
        num_warps=1 if experts <= 256 else 4,
        **overlapped(parts.device),
    )
    return routed


def sort_pairs(routed: Routed, num_experts: int) -> Routed:
    """The same with order and starts."""
    device = routed.experts.device
    order = torch.empty(routed.pairs, dtype=torch.int32, device=device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    _sort[(num_experts,)](
        routed.experts, order, starts, routed.pairs, BLOCK=SORT_BLOCK, num_warps=4, **overlapped(device)
    )
    return Routed(routed.experts, routed.weights, order, starts)


def gated_experts(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, routed: Routed, activation: str, tiling: ExpertTiling
) -> torch.Tensor:
    """x [R, K]; gate and up [E, N, K] of equal strides -> activation(x gate) * (x up), [R * TOP_K, N].

    In the order of `routed.order`, or of the pairs where the tiling has them unsorted.
    """
    out = torch.empty(routed.pairs, gate.shape[1], dtype=x.dtype, device=x.device)
    _launch(x, gate, up, out, routed, tiling, ACTIVATIONS[activation])
    return out


def down_experts(inner: torch.Tensor, down: torch.Tensor, routed: Routed, tiling: ExpertTiling) -> torch.Tensor:
    """inner [R * TOP_K, K] as `gated_experts` leaves it by a tiling of the same order, down [E, N, K]
    -> [R, TOP_K, N], each by its pair's weight."""
    out = torch.empty(*routed.experts.shape, down.shape[1], dtype=inner.dtype, device=inner.device)
    _launch(inner, down, down, out, routed, tiling, 0)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor,
    out: torch.Tensor,
    routed: Routed,
    tiling: ExpertTiling,
    gate: int,
) -> None:
    experts, width, depth = weight.shape
    columns = triton.cdiv(width, tiling.block_n)
    shape = {
        "TOP_K": routed.experts.shape[1],
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "GATE": gate,
        "EVEN": width % tiling.block_n == 0 and depth % tiling.block_k == 0,
        "num_warps": tiling.warps,
        **overlapped(x.device),
    }
    strides = (x.stride(0), weight.stride(0), weight.stride(1))
    if tiling.block_r is None:
        _multiply_pair[(columns, routed.pairs)](
            x, weight, up, out, routed.experts, routed.weights, width, depth, *strides, **shape
        )
        return
    assert routed.order is not None
    assert routed.starts is not None
    is_exact = x.dtype == torch.float32
    stage_bytes = tiling.stage_bytes(x.element_size(), is_gated=gate > 0)
    _multiply_pairs[(columns, experts, tiling.programs)](
        x,
        weight,
        up,
        out,
        routed.order,
        routed.starts,
        routed.weights,
        width,
        depth,
        *strides,
        BLOCK_R=tiling.block_r,
        UPCAST=is_exact,
        num_stages=room_of(x.device).stages(tiling.stages, stage_bytes, is_exact=is_exact),
        **shape,
    )


@triton.jit
def _choose(
    parts,  # [PARTS, R, E]
    experts,  # [R, TOP_K] i32
    weights,  # [R, TOP_K]
    num_experts,
    part_stride,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    NORMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < num_experts
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    logits = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        at = parts + part * part_stride + row * num_experts + expert
        logits += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    logits = logits.to(weights.dtype.element_ty).to(tl.float32)
    logits = tl.where(inside, logits, float("-inf"))
    odds = tl.exp(logits - tl.max(logits, 0))
    odds = odds / tl.sum(odds, 0)
    # Keys in the order of the logits: integers, so that a NaN is an expert too and none is chosen twice.
    bits = tl.where(logits == logits, logits, float("inf")).to(tl.int32, bitcast=True)
    bits = tl.where(logits == 0.0, 0, bits)  # -0.0, which a small negative is rounded to, is 0.0
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    none = -2147483648
    key = tl.where(inside, key, none)
    place = tl.arange(0, PLACES)
    chosen = tl.zeros([PLACES], tl.int32)
    weight = tl.zeros([PLACES], tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.argmax(key, 0)
        chosen = tl.where(place == k, best, chosen)
        weight = tl.where(place == k, tl.sum(tl.where(expert == best, odds, 0.0), 0), weight)
        key = tl.where(expert == best, none, key)
    if NORMED:
        weight = weight / tl.sum(weight, 0)
    tl.store(experts + row * TOP_K + place, chosen, mask=place < TOP_K)
    tl.store(weights + row * TOP_K + place, weight.to(weights.dtype.element_ty), mask=place < TOP_K)


@triton.jit(do_not_specialize=["pairs"])
def _sort(
    experts,  # [S] i32
    order,  # [S] i32
    starts,  # [E + 1] i32
    pairs,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One expert: its start is the number of pairs of those before it. No program waits for another."""
    expert = tl.program_id(0)
    slot = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    before = tl.zeros([BLOCK], tl.int32)
    for low in range(0, pairs, BLOCK):
        found = tl.load(experts + low + slot, mask=low + slot < pairs, other=0x7FFFFFFF)
        before += (found < expert).to(tl.int32)
    at = tl.sum(before, 0)
    tl.store(starts + expert, at)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts + expert + 1, pairs)
    for low in range(0, pairs, BLOCK):
        found = tl.load(experts + low + slot, mask=low + slot < pairs, other=0x7FFFFFFF)
        mine = (found == expert).to(tl.int32)
        tl.store(order + at + tl.cumsum(mine, 0) - mine, low + slot, mask=mine != 0)
        at += tl.sum(mine, 0)


@triton.jit
def _multiply_pair(
    x,  # [R, K], or [S, K] by pair
    weight,  # [E, N, K]
    up,  # [E, N, K], read where GATE
    out,  # [S, N]
    experts,  # [S] i32
    weights,  # [S]
    width,
    depth,
    x_stride,
    expert_stride,
    weight_stride,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATE: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N columns of one pair: each thread adds up its own share of K."""
    pair = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    column = n if EVEN else n % width
    if PDL:
        gdc_wait()
    expert = tl.load(experts + pair).to(tl.int64)
    weight_at = expert * expert_stride + column[:, None].to(tl.int64) * weight_stride + k[None, :]
    source = x + (pair // TOP_K if GATE else pair) * x_stride + k
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    total_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for low in range(0, depth, BLOCK_K):
        inside = k + low < depth
        if EVEN:
            a = tl.load(weight + weight_at + low)
            b = tl.load(source + low)
        else:
            a = tl.load(weight + weight_at + low, mask=inside[None, :], other=0.0)
            b = tl.load(source + low, mask=inside, other=0.0)
        total += a.to(tl.float32) * b.to(tl.float32)[None, :]
        if GATE:
            c = (
                tl.load(up + weight_at + low)
                if EVEN
                else tl.load(up + weight_at + low, mask=inside[None, :], other=0.0)
            )
            total_up += c.to(tl.float32) * b.to(tl.float32)[None, :]
    if PDL:
        gdc_launch_dependents()
    result = tl.sum(total, 1)
    if GATE:
        result = activate(result, tl.sum(total_up, 1), GATE)
    else:
        result *= tl.load(weights + pair).to(tl.float32)
    tl.store(out + pair * width + n, result.to(out.dtype.element_ty), mask=n < width)


@triton.jit
def _multiply_pairs(
    x,  # [R, K], or [S, K] in order
    weight,  # [E, N, K]
    up,  # [E, N, K], read where GATE
    out,  # [S, N]: in order where GATE, else by pair
    order,  # [S] i32
    starts,  # [E + 1] i32
    weights,  # [S] by pair
    width,
    depth,
    x_stride,
    expert_stride,
    weight_stride,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GATE: tl.constexpr,
    EVEN: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N columns of one expert for its pairs, BLOCK_R of them at a time, or every so many such blocks."""
    expert = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    slot = tl.arange(0, BLOCK_R)
    column = n if EVEN else n % width
    weight_at = expert.to(tl.int64) * expert_stride + column[:, None].to(tl.int64) * weight_stride + k[None, :]
    if PDL:
        gdc_wait()
    begin = tl.load(starts + expert)
    end = tl.load(starts + expert + 1)
    for first in range(begin + tl.program_id(2) * BLOCK_R, end, tl.num_programs(2) * BLOCK_R):
        # A pair too many repeats the first one and is not stored: no mask on the way in.
        place = tl.where(first + slot < end, first + slot, first)
        pair = tl.load(order + place).to(tl.int64)
        source = pair // TOP_K if GATE else place.to(tl.int64)
        x_at = source[None, :] * x_stride + k[:, None]
        total = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
        total_up = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
        for low in range(0, depth, BLOCK_K):
            inside = k + low < depth
            if EVEN:
                a = tl.load(weight + weight_at + low)
                b = tl.load(x + x_at + low)
            else:
                a = tl.load(weight + weight_at + low, mask=inside[None, :], other=0.0)
                b = tl.load(x + x_at + low, mask=inside[:, None], other=0.0)
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            total = tl.dot(a, b, total, input_precision="ieee")
            if GATE:
                if EVEN:
                    c = tl.load(up + weight_at + low)
                else:
                    c = tl.load(up + weight_at + low, mask=inside[None, :], other=0.0)
                if UPCAST:
                    c = c.to(tl.float32)
                total_up = tl.dot(c, b, total_up, input_precision="ieee")
        if GATE:
            total = activate(total, total_up, GATE)
            target = place.to(tl.int64)
        else:
            total *= tl.load(weights + pair).to(tl.float32)[None, :]
            target = pair
        is_real = (first + slot < end)[None, :] & (n < width)[:, None]
        tl.store(out + target[None, :] * width + n[:, None], total.to(out.dtype.element_ty), mask=is_real)
    if PDL:
        gdc_launch_dependents()
