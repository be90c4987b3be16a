"""The served draw and the argmax as kernels: no sort over the vocabulary, any mix of greedy, plain and cut rows.

    survey   [splits, R]   the largest logit of each part of a row; where a row is cut, how its logits lie below it
    bound    [R]           the row's largest logit; a bound below which top_k and top_p keep nothing, from those counts
    sift     [splits, R]   a plain row races here; a cut row's logits above the bound are set aside, in any order
    settle   [R]           the exact cuts among what was set aside, its race; or the best of a plain row's parts

Equal to `sampler.sample`: the same filters in the same order, mass counted in the same integers, the same noise. The
bound is a guess that is checked: where it was too tight, or too much lies above it, `settle` looks at the whole row.
The number of reads of the logits is two, whatever they hold.

The interpreter (TRITON_INTERPRET=1, no GPU) runs the same kernels except for bfloat16, which it gets wrong.
"""

# Triton is not typed, and a kernel's arguments are pointers and compile-time constants.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# ruff: noqa: N803

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from cache.attend.launch import next_power

if TYPE_CHECKING:
    from static_graphs.sampler import SampleInputs

BINS = tl.constexpr(128)
"""Counts kept of each part of a row; the last holds all that lies further below."""
BINS_A_NAT = tl.constexpr(8)
FAR = tl.constexpr(math.exp((2 - BINS.value) / BINS_A_NAT.value))
"""No logit that is in no bin of its row has more of the peak's mass."""
GROUP = tl.constexpr(16)
"""Parts whose counts are added at once."""
NOTHING = tl.constexpr(-(2**31))
"""Comes after every logit's order."""
NO_ID = tl.constexpr(2**31 - 1)


@dataclass(frozen=True, slots=True)
class SamplerTiling:
    """How the kernels are cut. block, settle_block: logits that a program holds at once, powers of two."""

    block: int = 4096
    warps: int = 8
    settle_block: int = 2048
    settle_warps: int = 8
    set_aside: int = 16384
    """Logits of a cut row kept for `settle`; a row with more of them is read again as a whole."""


def argmax_rows(logits: torch.Tensor, tiling: SamplerTiling = SamplerTiling()) -> torch.Tensor:
    """logits [R, V] f32, bf16 or f16, any row stride -> i64[R]: the largest, ties to the lowest id; NaN is largest."""
    parts = _Parts(logits, tiling)
    ids = torch.empty(parts.rows, dtype=torch.int64, device=logits.device)
    if parts.rows:
        parts.survey(None, has_cuts=False)
        parts.bound(None, ids, has_cuts=False)
    return ids


def draw(
    logits: torch.Tensor, inputs: SampleInputs, *, has_cuts: bool, tiling: SamplerTiling = SamplerTiling()
) -> torch.Tensor:
    """logits [R, V] f32, bf16 or f16, any row stride -> i64[R]. has_cuts: some random row has a top_k or a top_p."""
    parts = _Parts(logits, tiling)
    ids = torch.empty(parts.rows, dtype=torch.int64, device=logits.device)
    if parts.rows:
        parts.survey(inputs, has_cuts)
        parts.bound(inputs, ids, has_cuts)
        parts.sift(inputs, has_cuts)
        parts.settle(inputs, ids, has_cuts)
    return ids


class _Parts:
    """One call's buffers and launches."""

    def __init__(self, logits: torch.Tensor, tiling: SamplerTiling) -> None:
        self.logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        self.tiling = tiling
        self.rows, self.vocab_size = logits.shape
        self.block = min(tiling.block, max(16, next_power(self.vocab_size)))
        self.splits = triton.cdiv(self.vocab_size, self.block)
        device = logits.device
        # Of each part: the order of its largest logit and its id; later a plain row's shortest wait and its id.
        self.part_best = torch.empty(self.rows, self.splits, dtype=torch.int32, device=device)
        self.part_id = torch.empty_like(self.part_best)
        self.peak = torch.empty(self.rows, dtype=torch.float32, device=device)
        self.top_id = torch.empty(self.rows, dtype=torch.int32, device=device)
        self.counts = self.floor = self.num_aside = self.part_mass = self.aside = self.aside_id = self.part_best

    def survey(self, inputs: SampleInputs | None, has_cuts: bool) -> None:
        if has_cuts:
            self.counts = torch.empty(self.rows, self.splits, BINS.value, dtype=torch.int32, device=self.logits.device)
        _survey[(self.splits, self.rows)](
            self.logits,
            *_params(inputs, self.peak),
            self.part_best,
            self.part_id,
            self.counts,
            self.vocab_size,
            self.logits.stride(0),
            BLOCK=self.block,
            HAS_CUTS=has_cuts,
            num_warps=self.tiling.warps,
        )

    def bound(self, inputs: SampleInputs | None, ids: torch.Tensor, has_cuts: bool) -> None:
        if has_cuts:
            self.floor = torch.empty_like(self.peak)
            self.num_aside = torch.empty_like(self.top_id)
        _bound[(self.rows,)](
            *_params(inputs, self.peak),
            self.part_best,
            self.part_id,
            self.counts,
            self.peak,
            self.top_id,
            self.floor,
            self.num_aside,
            ids,
            self.vocab_size,
            self.splits,
            SPLITS=next_power(self.splits),
            HAS_RANDOM=inputs is not None,
            HAS_CUTS=has_cuts,
            num_warps=4,
        )

    def sift(self, inputs: SampleInputs, has_cuts: bool) -> None:
        if has_cuts:
            self.part_mass = torch.empty_like(self.part_best, dtype=torch.int64)
            size = (self.rows, min(self.tiling.set_aside, self.vocab_size))
            self.aside = torch.empty(size, dtype=torch.float32, device=self.logits.device)
            self.aside_id = torch.empty(size, dtype=torch.int32, device=self.logits.device)
        _sift[(self.splits, self.rows)](
            self.logits,
            *_params(inputs, self.peak),
            inputs.min_p,
            inputs.seeds,
            inputs.positions,
            self.peak,
            self.floor,
            self.part_best,
            self.part_id,
            self.part_mass,
            self.num_aside,
            self.aside,
            self.aside_id,
            self.vocab_size,
            self.logits.stride(0),
            self.aside.shape[1],
            BLOCK=self.block,
            HAS_CUTS=has_cuts,
            num_warps=self.tiling.warps,
        )

    def settle(self, inputs: SampleInputs, ids: torch.Tensor, has_cuts: bool) -> None:
        _settle[(self.rows,)](
            self.logits,
            *_params(inputs, self.peak),
            inputs.min_p,
            inputs.seeds,
            inputs.positions,
            self.peak,
            self.top_id,
            self.floor,
            self.part_best,
            self.part_id,
            self.part_mass,
            self.num_aside,
            self.aside,
            self.aside_id,
            ids,
            self.vocab_size,
            self.logits.stride(0),
            self.aside.shape[1],
            self.splits,
            SPLITS=next_power(self.splits),
            BLOCK=min(self.tiling.settle_block, max(16, next_power(self.vocab_size))),
            HAS_CUTS=has_cuts,
            num_warps=self.tiling.settle_warps,
        )


def _params(inputs: SampleInputs | None, nothing: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (nothing,) * 3 if inputs is None else (inputs.temperature, inputs.top_k, inputs.top_p)


# --- one value, one row


@triton.jit
def _order(x):
    """f32 -> i32 that compares like the floats do: -0.0 equals 0.0, NaN comes first."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _value(order):
    """The logit of an order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _is_greedy(temperature, row):
    """temperature: [R] f32 or f64."""
    return tl.load(temperature + row).to(tl.float64) < tl.full([], 1e-5, tl.float64)


@triton.jit
def _is_settled(temperature, peak, row):
    """Greedy, or broken: `bound` has written the id of the largest."""
    return _is_greedy(temperature, row) | (tl.abs(peak) == float("inf")) | (peak != peak)


@triton.jit
def _top_k(top_k, row, vocab_size):
    """i64; 0 where it is off."""
    k = tl.load(top_k + row)
    return tl.where(k < vocab_size, k, 0)


@triton.jit
def _exp_minus(x):
    """exp(-x) for x >= 0 to a few units in the last place: what log2(e) rounds off counts at large x."""
    whole = x * -1.4426950408889634
    rest = tl.fma(x, -1.4426950408889634, -whole) + x * -1.9259629911266175e-08
    result = tl.exp2(whole)
    return tl.where(x < 126.0, result + result * (rest * 0.6931471805599453), result)


@triton.jit
def _log(x, minus_one):
    """log(x) of 0 < x < inf to a few units in the last place, also near 1. minus_one: x - 1, not rounded."""
    bits = x.to(tl.int32, bitcast=True)
    # x = 2 ** power * m, m in [sqrt(1 / 2), sqrt(2)); log(m) = 2 atanh((m - 1) / (m + 1)).
    power = (bits - 0x3F3504F3) >> 23
    m = (bits - (power << 23)).to(tl.float32, bitcast=True)
    top = tl.where(power == 0, minus_one, m - 1.0)
    s = tl.div_rn(top, top + 2.0)
    square = s * s
    series = tl.fma(square, 0.22222222, 0.2857142857142857)
    series = tl.fma(square, series, 0.4)
    series = tl.fma(square, series, 0.6666666666666666)
    return tl.fma(power.to(tl.float32), 0.6931471805599453, tl.fma(s * square, series, 2.0 * s))


@triton.jit
def _probability(x, peak, temperature):
    """-> distance below the row's likeliest after temperature, and exp(-distance)."""
    distance = tl.div_rn(peak - x, temperature)
    return distance, _exp_minus(distance)


@triton.jit
def _mass(probability):
    return (probability * 1099511627776.0).to(tl.int64)


@triton.jit
def _mix_64(x):
    x = (x ^ (x >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _row_key(seeds, positions, row):
    """`noise.row_keys` of one row, its halves: u32, u32."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row).to(tl.uint64, bitcast=True)
    key = _mix_64(_mix_64(seed + golden) + position * golden)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def _exponential(low, high, token_id):
    """`noise.exponentials`: token_id i32 -> f32."""
    bits = (token_id.to(tl.uint32) * 0x9E3779B1) ^ low
    bits ^= bits >> 16
    bits *= 0x21F0AAAD
    bits ^= bits >> 15
    bits += high
    bits *= 0xD35A2D97
    bits ^= bits >> 15
    uniform = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    uniform = tl.minimum(uniform, 1.0 - 5.960464477539063e-08)
    return -_log(1.0 - uniform, -uniform)


@triton.jit
def _wait(low, high, token_id, probability):
    return tl.div_rn(_exponential(low, high, token_id), probability)


@triton.jit
def _min_p_distance(min_p, row):
    p = tl.load(min_p + row).to(tl.float32)
    return tl.where(p > 0.0, -_log(tl.where(p > 0.0, p, 1.0), tl.where(p > 0.0, p, 1.0) - 1.0), float("inf"))


# --- the kernels


@triton.jit
def _survey(
    logits,  # [R, V]
    temperature,  # [R]
    top_k,  # [R] i64
    top_p,  # [R] f64
    part_best,  # [R, splits] i32
    part_id,  # [R, splits] i32
    counts,  # [R, splits, BINS] i32
    vocab_size,
    row_stride,
    BLOCK: tl.constexpr,
    HAS_CUTS: tl.constexpr,
):
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token_id = split * BLOCK + tl.arange(0, BLOCK)
    inside = token_id < vocab_size
    x = tl.load(logits + row * row_stride + token_id, mask=inside, other=-float("inf")).to(tl.float32)
    order = tl.where(inside, _order(x), NOTHING)
    best = tl.max(order, 0)
    place = row * tl.num_programs(0) + split
    tl.store(part_best + place, best)
    tl.store(part_id + place, tl.min(tl.where(order == best, token_id, NO_ID), 0))
    if HAS_CUTS:
        is_cut = (tl.load(top_p + row) < 1.0) | (_top_k(top_k, row, vocab_size) > 0)
        if is_cut & (_is_greedy(temperature, row) == 0):
            scale = BINS_A_NAT / tl.load(temperature + row).to(tl.float32)
            below = (_value(best) - x) * scale
            last = BINS - 1.0
            which = tl.where(below < last, below, last).to(tl.int32)
            bins = tl.arange(0, BINS)
            tl.store(counts + place * BINS + bins, tl.histogram(which, BINS))


@triton.jit
def _bound(
    temperature,  # [R]
    top_k,  # [R] i64
    top_p,  # [R] f64
    part_best,  # [R, splits] i32
    part_id,  # [R, splits] i32
    counts,  # [R, splits, BINS] i32
    peaks,  # [R] f32
    top_ids,  # [R] i32
    floors,  # [R] f32
    num_aside,  # [R] i32
    ids,  # [R] i64
    vocab_size,
    num_splits,
    SPLITS: tl.constexpr,
    HAS_RANDOM: tl.constexpr,
    HAS_CUTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    order = tl.load(part_best + row * num_splits + split, mask=split < num_splits, other=NOTHING)
    token_id = tl.load(part_id + row * num_splits + split, mask=split < num_splits, other=NO_ID)
    best = tl.max(order, 0)
    top_id = tl.min(tl.where(order == best, token_id, NO_ID), 0)
    tl.store(ids + row, top_id.to(tl.int64))
    if HAS_RANDOM:
        peak = _value(best)
        tl.store(peaks + row, peak)
        tl.store(top_ids + row, top_id)
        if HAS_CUTS:
            tl.store(num_aside + row, 0)
            k = _top_k(top_k, row, vocab_size)
            p = tl.load(top_p + row)
            if ((p < 1.0) | (k > 0)) & (_is_greedy(temperature, row) == 0):
                temp = tl.load(temperature + row).to(tl.float32)
                # A logit of bin i of a part that lies `shift` bins below the peak is at most i + shift + 2 bins down.
                bins = tl.arange(0, BINS)
                total = tl.zeros([BINS], tl.int32)
                for first in range(0, num_splits, GROUP):
                    part = first + tl.arange(0, GROUP)
                    near = _value(tl.load(part_best + row * num_splits + part, mask=part < num_splits, other=NOTHING))
                    shift = (peak - near) * (BINS_A_NAT / temp)
                    shift = tl.where(shift < BINS, shift, BINS).to(tl.int32)
                    source = bins[None, :] - shift[:, None] - 2
                    is_bin = (source >= 0) & (source < BINS - 1) & (part < num_splits)[:, None]
                    at = (row * num_splits + part)[:, None] * BINS + source
                    total += tl.sum(tl.load(counts + at, mask=is_bin, other=0), 0)
                width = 1.0 / BINS_A_NAT
                far = vocab_size - tl.sum(total, 0)
                least = tl.sum(total * tl.exp(bins * -width), 0)
                most = total * tl.exp((bins - 2) * -width)
                above = tl.cumsum(most, 0)
                tail = tl.sum(most, 0) - above + far * FAR
                # Room for the roundings of these sums.
                is_enough = tail < least * (1.0 - p).to(tl.float32) * 0.999 - 1e-6
                if k > 0:
                    is_enough = tl.cumsum(total, 0) >= k
                last = tl.min(tl.where(is_enough, bins, BINS), 0)
                floor = tl.where(last < BINS, peak - (last * width + 0.02) * temp, -float("inf"))
                tl.store(floors + row, floor)


@triton.jit
def _sift(
    logits,  # [R, V]
    temperature,  # [R]
    top_k,  # [R] i64
    top_p,  # [R] f64
    min_p,  # [R]
    seeds,  # [R] i64
    positions,  # [R] i64
    peaks,  # [R] f32
    floors,  # [R] f32
    part_wait,  # [R, splits] i32, f32 bits
    part_id,  # [R, splits] i32
    part_mass,  # [R, splits] i64
    num_aside,  # [R] i32
    aside,  # [R, set_aside] f32
    aside_id,  # [R, set_aside] i32
    vocab_size,
    row_stride,
    set_aside,
    BLOCK: tl.constexpr,
    HAS_CUTS: tl.constexpr,
):
    split = tl.program_id(0)
    # Last rows first: they are what the L2 cache still holds of the survey.
    row = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    peak = tl.load(peaks + row)
    if _is_settled(temperature, peak, row):
        return
    temp = tl.load(temperature + row).to(tl.float32)
    token_id = split * BLOCK + tl.arange(0, BLOCK)
    inside = token_id < vocab_size
    x = tl.load(logits + row * row_stride + token_id, mask=inside, other=-float("inf")).to(tl.float32)
    place = row * tl.num_programs(0) + split
    if HAS_CUTS:
        k = _top_k(top_k, row, vocab_size)
        if (k > 0) | (tl.load(top_p + row) < 1.0):
            if k == 0:
                _, probability = _probability(x, peak, temp)
                tl.store(part_mass + place, tl.sum(tl.where(inside, _mass(probability), 0), 0))
            is_near = inside & (x >= tl.load(floors + row))
            count = tl.sum(is_near.to(tl.int32), 0)
            if count > 0:
                at = tl.atomic_add(num_aside + row, count) + tl.cumsum(is_near.to(tl.int32), 0) - 1
                keep = is_near & (at < set_aside)
                tl.store(aside + row * set_aside + at, x, mask=keep)
                tl.store(aside_id + row * set_aside + at, token_id, mask=keep)
        else:
            _race_part(x, token_id, vocab_size, peak, temp, min_p, seeds, positions, row, place, part_wait, part_id)
    else:
        _race_part(x, token_id, vocab_size, peak, temp, min_p, seeds, positions, row, place, part_wait, part_id)


@triton.jit
def _race_part(x, token_id, vocab_size, peak, temp, min_p, seeds, positions, row, place, part_wait, part_id):
    """The first of a part of a row that nothing cuts, and how long it waits."""
    distance, probability = _probability(x, peak, temp)
    low, high = _row_key(seeds, positions, row)
    is_out = (distance > _min_p_distance(min_p, row)) | (token_id >= vocab_size)
    wait = tl.where(is_out, float("inf"), _wait(low, high, token_id, probability))
    best = tl.min(wait, 0)
    tl.store(part_wait + place, best.to(tl.int32, bitcast=True))
    tl.store(part_id + place, tl.min(tl.where((wait == best) & (token_id < vocab_size), token_id, NO_ID), 0))


@triton.jit
def _entries(logits, aside, aside_id, kept, whole, start, BLOCK: tl.constexpr):
    """A block of a cut row's logits: x, token id, whether there is one.

    kept, whole: of `kept` set aside, or of all `whole` of the row; the other is 0.
    """
    at = start + tl.arange(0, BLOCK)
    x = tl.load(aside + at, mask=at < kept, other=-float("inf"))
    token_id = tl.load(aside_id + at, mask=at < kept, other=NO_ID)
    all_x = tl.load(logits + at, mask=at < whole, other=-float("inf")).to(tl.float32)
    return tl.where(at < whole, all_x, x), tl.where(at < whole, at, token_id), at < kept + whole


@triton.jit
def _weights(x, token_id, is_entry, peak, temp, k_order, k_id, MASS: tl.constexpr):
    """i64: 1, or the mass of a token that top_k keeps; 0 where there is none."""
    if MASS:
        _, probability = _probability(x, peak, temp)
        order = _order(x)
        is_kept = (order > k_order) | ((order == k_order) & (token_id <= k_id))
        weight = tl.where(is_entry & is_kept, _mass(probability), 0)
    else:
        weight = is_entry.to(tl.int64)
    return weight


@triton.jit
def _weigh(logits, aside, aside_id, kept, whole, peak, temp, k_order, k_id, BLOCK: tl.constexpr):
    """The mass of everything that top_k keeps: i64."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, kept + whole, BLOCK):
        x, token_id, is_entry = _entries(logits, aside, aside_id, kept, whole, start, BLOCK)
        total += _weights(x, token_id, is_entry, peak, temp, k_order, k_id, True)
    return tl.sum(total, 0)


@triton.jit
def _cut(
    logits,
    aside,
    aside_id,
    kept,
    whole,
    peak,
    temp,
    k_order,
    k_id,
    wanted,
    total,
    low,
    vocab_size,
    BLOCK: tl.constexpr,
    MASS: tl.constexpr,
):
    """Where the shortest prefix of the order whose weight reaches `wanted` ends: its last token's order and id.

    wanted: i64, 1 <= wanted <= total. total: i64, the weight of everything. low: i64, no logit's order is lower.
    """
    # The weight from `low` on reaches `wanted`, that from `high` on does not: a quarter of the way each time.
    high = _order(peak).to(tl.int64) + 1
    at_low = total
    at_high = tl.full([], 0, tl.int64)
    while high - low > 1:
        step = (high - low + 3) // 4
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        from_first = tl.zeros([BLOCK], tl.int64)
        from_second = tl.zeros([BLOCK], tl.int64)
        from_third = tl.zeros([BLOCK], tl.int64)
        for start in range(0, kept + whole, BLOCK):
            x, token_id, is_entry = _entries(logits, aside, aside_id, kept, whole, start, BLOCK)
            weight = _weights(x, token_id, is_entry, peak, temp, k_order, k_id, MASS)
            order = _order(x)
            from_first += tl.where(order >= first, weight, 0)
            from_second += tl.where(order >= second, weight, 0)
            from_third += tl.where(order >= third, weight, 0)
        first_weight = tl.sum(from_first, 0)
        second_weight = tl.sum(from_second, 0)
        third_weight = tl.sum(from_third, 0)
        if third_weight >= wanted:
            low, at_low = third, third_weight
        elif second_weight >= wanted:
            low, at_low, high, at_high = second, second_weight, third, third_weight
        elif first_weight >= wanted:
            low, at_low, high, at_high = first, first_weight, second, second_weight
        else:
            high, at_high = first, first_weight
    order_cut = low.to(tl.int32)
    each = tl.full([], 1, tl.int64)
    if MASS:
        _, probability = _probability(_value(order_cut), peak, temp)
        each = tl.maximum(_mass(probability), 1)
    ties = (wanted - at_high + each - 1) // each
    # The id of the last tie that stays; any id where all of them do.
    last = vocab_size - 1
    if ties * each < at_low - at_high:
        below = -1
        while last - below > 1:
            middle = below + (last - below) // 2
            found = tl.zeros([BLOCK], tl.int32)
            for start in range(0, kept + whole, BLOCK):
                x, token_id, is_entry = _entries(logits, aside, aside_id, kept, whole, start, BLOCK)
                is_tie = is_entry & (_order(x) == order_cut) & (token_id <= middle)
                if MASS:
                    is_tie &= (order_cut > k_order) | (token_id <= k_id)
                found += is_tie.to(tl.int32)
            if tl.sum(found, 0) >= ties:
                last = middle
            else:
                below = middle
    return order_cut, last


@triton.jit
def _settle(
    logits,  # [R, V]
    temperature,  # [R]
    top_k,  # [R] i64
    top_p,  # [R] f64
    min_p,  # [R]
    seeds,  # [R] i64
    positions,  # [R] i64
    peaks,  # [R] f32
    top_ids,  # [R] i32
    floors,  # [R] f32
    part_wait,  # [R, splits] i32, f32 bits
    part_id,  # [R, splits] i32
    part_mass,  # [R, splits] i64
    num_aside,  # [R] i32
    aside,  # [R, set_aside] f32
    aside_id,  # [R, set_aside] i32
    ids,  # [R] i64
    vocab_size,
    row_stride,
    set_aside,
    num_splits,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CUTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    peak = tl.load(peaks + row)
    if _is_settled(temperature, peak, row):
        return
    temp = tl.load(temperature + row).to(tl.float32)
    if HAS_CUTS:
        k = _top_k(top_k, row, vocab_size)
        p = tl.load(top_p + row)
        if (k > 0) | (p < 1.0):
            winner = _race_cut(
                logits + row * row_stride,
                aside + row * set_aside,
                aside_id + row * set_aside,
                tl.load(num_aside + row),
                set_aside,
                tl.load(floors + row),
                part_mass + row * num_splits,
                num_splits,
                vocab_size,
                peak,
                temp,
                k,
                p,
                _min_p_distance(min_p, row),
                seeds,
                positions,
                row,
                SPLITS,
                BLOCK,
            )
        else:
            winner = _best_part(part_wait + row * num_splits, part_id + row * num_splits, num_splits, SPLITS)
    else:
        winner = _best_part(part_wait + row * num_splits, part_id + row * num_splits, num_splits, SPLITS)
    tl.store(ids + row, winner.to(tl.int64))


@triton.jit
def _best_part(part_wait, part_id, num_splits, SPLITS: tl.constexpr):
    split = tl.arange(0, SPLITS)
    wait = tl.load(part_wait + split, mask=split < num_splits, other=0x7F800000).to(tl.float32, bitcast=True)
    token_id = tl.load(part_id + split, mask=split < num_splits, other=NO_ID)
    return tl.min(tl.where(wait == tl.min(wait, 0), token_id, NO_ID), 0)


@triton.jit
def _race_cut(
    logits,
    aside,
    aside_id,
    kept,
    set_aside,
    floor,
    part_mass,
    num_splits,
    vocab_size,
    peak,
    temp,
    k,
    p,
    min_p_distance,
    seeds,
    positions,
    row,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """-> the id that a row with a top_k or a top_p draws. Pointers are to the row, but for seeds and positions."""
    lowest = tl.full([], -(2**31), tl.int32)
    low = _order(floor).to(tl.int64)
    whole = 0
    if (kept > set_aside) | (kept < k):
        kept, whole = 0, vocab_size
        low = lowest.to(tl.int64)
    k_order = lowest
    k_id = vocab_size
    p_order = lowest
    p_id = vocab_size
    if k > 0:
        k_order, k_id = _cut(
            logits, aside, aside_id, kept, whole, peak, temp, k_order, k_id,
            k, (kept + whole).to(tl.int64), low, vocab_size, BLOCK, False,
        )  # fmt: skip
        low = k_order.to(tl.int64)
    if p < 1.0:
        found = _weigh(logits, aside, aside_id, kept, whole, peak, temp, k_order, k_id, BLOCK)
        total = found
        if k == 0:
            split = tl.arange(0, SPLITS)
            total = tl.sum(tl.load(part_mass + split, mask=split < num_splits, other=0), 0)
        wanted = tl.ceil(total.to(tl.float64) * p).to(tl.int64)
        wanted = tl.maximum(tl.minimum(wanted, total), 1)
        if found < wanted:
            kept, whole = 0, vocab_size
            low, found = lowest.to(tl.int64), total
        p_order, p_id = _cut(
            logits, aside, aside_id, kept, whole, peak, temp, k_order, k_id,
            wanted, found, low, vocab_size, BLOCK, True,
        )  # fmt: skip
    seed_low, seed_high = _row_key(seeds, positions, row)
    waits = tl.full([BLOCK], float("inf"), tl.float32)
    winners = tl.full([BLOCK], NO_ID, tl.int32)
    for start in range(0, kept + whole, BLOCK):
        x, token_id, is_entry = _entries(logits, aside, aside_id, kept, whole, start, BLOCK)
        distance, probability = _probability(x, peak, temp)
        order = _order(x)
        keep = is_entry & (distance <= min_p_distance)
        keep &= (order > k_order) | ((order == k_order) & (token_id <= k_id))
        keep &= (order > p_order) | ((order == p_order) & (token_id <= p_id))
        wait = tl.where(keep, _wait(seed_low, seed_high, token_id, probability), float("inf"))
        is_better = (wait < waits) | ((wait == waits) & (token_id < winners) & keep)
        winners = tl.where(is_better, token_id, winners)
        waits = tl.where(is_better, wait, waits)
    return tl.min(tl.where(waits == tl.min(waits, 0), winners, NO_ID), 0)
