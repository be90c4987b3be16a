"""The served draw and the argmax as kernels: no sort over the vocabulary, any mix of greedy, plain and cut rows.

    survey   [splits, R]   the largest logit of each part of a row; where a row is cut, how its logits lie below it
    bound    [R]           the row's largest logit; a floor below which top_k and top_p keep nothing, from those counts
    sift     [splits, R]   a plain row races here; a cut row's logits from the floor on are set aside, in any order
    settle   [R]           the exact cuts among what was set aside, its race; or the best of a plain row's parts

Equal to `sampler.sample`: the same filters in the same order, mass counted in the same integers, the same noise. The
floor is a guess that is checked: where it was too high, or too much lies above it, `settle` looks at the whole row.
The logits are read twice, whatever they hold.

The interpreter (TRITON_INTERPRET=1, no GPU) runs the same kernels except for bfloat16, which it gets wrong.
"""

# Triton is not typed, and a kernel's arguments are pointers and compile-time constants.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from cache.attend.launch import next_power
from static_graphs.kernels.settle import settle
from static_graphs.kernels.token_math import (
    LOWEST,
    NO_ID,
    OF_ROWS,
    distance_of,
    exp_minus,
    is_greedy,
    is_settled,
    mass_of,
    min_p_distance,
    noise_key,
    order_of,
    top_k_of,
    value_of,
    wait_of,
)

if TYPE_CHECKING:
    from static_graphs.sampler import SampleInputs

BINS = tl.constexpr(64)
"""Counts kept of each part of a row, by distance below its largest; the last holds all that lies further below."""
STEP = tl.constexpr(20)
"""Bits of 1 + distance, as a float32, that a bin spans: eight bins each time 1 + distance doubles, up to 256."""
FINE = tl.constexpr(2)
"""The floor is sought in steps that are 2 ** FINE times finer than the bins."""
ONE = tl.constexpr(0x3F800000)
NEIGHBOURS = tl.constexpr(4)
"""Of so many logits the largest alone is counted where a top_k asks: as many lie above a floor, or more."""
MIN_BLOCK = 256
"""Logits that a program holds at least, whatever the vocabulary."""
NOTHING = tl.constexpr(-(2**31))
"""Comes after every logit's order."""


@dataclass(frozen=True, slots=True)
class SamplerTiling:
    """How the kernels are cut. block, settle_block: logits that a program holds at once, powers of two."""

    block: int = 2048
    warps: int = 4
    settle_block: int = 1024
    settle_warps: int = 8
    set_aside: int = 32768
    """Logits of a cut row kept for `settle`; a row with more of them is read again as a whole."""


def argmax_rows(logits: torch.Tensor, tiling: SamplerTiling = SamplerTiling()) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [R, V] f32, bf16 or f16, any row stride -> i64[R], f32[R]: the largest and its logit.

    Ties go to the lowest id; NaN is largest.
    """
    parts = Parts(logits, tiling)
    ids = torch.empty(parts.rows, dtype=torch.int64, device=logits.device)
    if parts.rows:
        parts.survey(None)
        parts.bound(None, ids)
    return ids, parts.peak


def draw(
    logits: torch.Tensor, inputs: SampleInputs, *, has_cuts: bool, tiling: SamplerTiling = SamplerTiling()
) -> torch.Tensor:
    """logits [R, V] f32, bf16 or f16, any row stride -> i64[R]. has_cuts: some random row has a top_k or a top_p."""
    parts = Parts(logits, tiling)
    ids = torch.empty(parts.rows, dtype=torch.int64, device=logits.device)
    if parts.rows:
        cuts = inputs if has_cuts else None  # what cuts nothing begins as an argmax does, with the same kernels
        parts.survey(cuts)
        parts.bound(cuts, ids)
        parts.sift(inputs, has_cuts)
        parts.settle(inputs, ids, has_cuts)
    return ids


class Parts:
    """One call's buffers and launches."""

    def __init__(self, logits: torch.Tensor, tiling: SamplerTiling) -> None:
        self.logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        self.tiling = tiling
        self.rows, self.vocab_size = logits.shape
        self.block = min(tiling.block, max(MIN_BLOCK, next_power(self.vocab_size)))
        self.splits = triton.cdiv(self.vocab_size, self.block)
        device = logits.device
        # Of each part: the order of its largest logit and its id; later a plain row's shortest wait and its id.
        self.part_best = torch.empty(self.rows, self.splits, dtype=torch.int32, device=device)
        self.part_id = torch.empty_like(self.part_best)
        self.peak = torch.empty(self.rows, dtype=torch.float32, device=device)
        self.counts = self.part_sum = self.floor = self.num_aside = self.part_mass = self.aside = self.aside_id = (
            self.part_best
        )

    def survey(self, cuts: SampleInputs | None) -> None:
        if cuts is not None:
            self.counts = torch.empty(self.rows, self.splits, BINS.value, dtype=torch.int32, device=self.logits.device)
            self.part_sum = torch.empty_like(self.part_best, dtype=torch.float32)
        _survey[(self.splits, self.rows)](
            self.logits,
            *_params(cuts, self.peak),
            self.part_best,
            self.part_id,
            self.counts,
            self.part_sum,
            self.vocab_size,
            self.logits.stride(0),
            BLOCK=self.block,
            HAS_CUTS=cuts is not None,
            num_warps=self.tiling.warps,
        )

    def bound(self, cuts: SampleInputs | None, ids: torch.Tensor) -> None:
        if cuts is not None:
            self.floor = torch.empty_like(self.peak)
            self.num_aside = torch.empty_like(self.peak, dtype=torch.int32)
        _bound[(self.rows,)](
            *_params(cuts, self.peak),
            self.part_best,
            self.part_id,
            self.counts,
            self.part_sum,
            self.peak,
            self.floor,
            self.num_aside,
            ids,
            self.vocab_size,
            self.splits,
            SPLITS=next_power(self.splits),
            HAS_CUTS=cuts is not None,
            num_warps=8,
        )

    def sift(self, inputs: SampleInputs, has_cuts: bool) -> None:
        if has_cuts:
            self.part_mass = torch.empty_like(self.part_best, dtype=torch.int64)
            size = (self.rows, min(self.tiling.set_aside, self.vocab_size))
            self.aside = torch.empty(size, dtype=torch.float32, device=self.logits.device)
            self.aside_id = torch.empty(size, dtype=torch.int32, device=self.logits.device)
        _sift[(self.splits, self.rows)](
            *self._of_draw(inputs),
            self.vocab_size,
            self.logits.stride(0),
            self.aside.shape[1],
            BLOCK=self.block,
            HAS_CUTS=has_cuts,
            num_warps=self.tiling.warps,
        )

    def _of_draw(self, inputs: SampleInputs) -> tuple[torch.Tensor, ...]:
        """What `_sift` and `settle` begin with."""
        return (
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
        )

    def settle(self, inputs: SampleInputs, ids: torch.Tensor, has_cuts: bool) -> None:
        settle[(self.rows,)](
            *self._of_draw(inputs),
            ids,
            self.vocab_size,
            self.logits.stride(0),
            self.aside.shape[1],
            self.splits,
            SPLITS=next_power(self.splits),
            BLOCK=min(self.tiling.settle_block, max(MIN_BLOCK, next_power(self.vocab_size))),
            HAS_CUTS=has_cuts,
            num_warps=self.tiling.settle_warps,
        )


def _params(inputs: SampleInputs | None, nothing: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (nothing,) * 3 if inputs is None else (inputs.temperature, inputs.top_k, inputs.top_p)


@triton.jit
def _edge(step):
    """The distance at which a step begins, of 2 ** (STEP - FINE) bits each."""
    return ((step << (STEP - FINE)) + ONE).to(tl.float32, bitcast=True) - 1.0


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _survey(
    logits,  # [R, V]
    temperature,  # [R]
    top_k,  # [R] i64
    top_p,  # [R] f64
    part_best,  # [R, splits] i32
    part_id,  # [R, splits] i32
    counts,  # [R, splits, BINS] i32
    part_sum,  # [R, splits] f32
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
    order = tl.where(inside, order_of(x), NOTHING)
    best = tl.max(order, 0)
    place = row * tl.num_programs(0) + split
    tl.store(part_best + place, best)
    tl.store(part_id + place, tl.min(tl.where(order == best, token_id, NO_ID), 0))
    if HAS_CUTS:
        k = top_k_of(top_k, row, vocab_size)
        if ((k > 0) | (tl.load(top_p + row) < 1.0)) & (is_greedy(temperature, row) == 0):
            if k > 0:
                leaders = tl.max(tl.reshape(x, [BLOCK // NEIGHBOURS, NEIGHBOURS]), 1)
                count = tl.histogram(_bin(value_of(best) - leaders), BINS)
            else:
                below = (value_of(best) - x) / tl.load(temperature + row).to(tl.float32)
                count = tl.histogram(_bin(below), BINS)
                tl.store(part_sum + place, tl.sum(tl.exp2(below * -1.4426950408889634), 0))
            tl.store(counts + place * BINS + tl.arange(0, BINS), count)


@triton.jit
def _bin(below):
    """The bin of a distance, the last for infinity and NaN."""
    bits = (1.0 + below).to(tl.int32, bitcast=True) - ONE
    return tl.minimum(bits.to(tl.uint32, bitcast=True) >> STEP, BINS - 1).to(tl.int32)


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def _bound(
    temperature,  # [R]
    top_k,  # [R] i64
    top_p,  # [R] f64
    part_best,  # [R, splits] i32
    part_id,  # [R, splits] i32
    counts,  # [R, splits, BINS] i32
    part_sum,  # [R, splits] f32
    peaks,  # [R] f32
    floors,  # [R] f32
    num_aside,  # [R] i32
    ids,  # [R] i64
    vocab_size,
    num_splits,
    SPLITS: tl.constexpr,
    HAS_CUTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    is_split = split < num_splits
    order = tl.load(part_best + row * num_splits + split, mask=is_split, other=NOTHING)
    token_id = tl.load(part_id + row * num_splits + split, mask=is_split, other=NO_ID)
    best = tl.max(order, 0)
    tl.store(ids + row, tl.min(tl.where(order == best, token_id, NO_ID), 0).to(tl.int64))
    peak = value_of(best)
    tl.store(peaks + row, peak)
    if HAS_CUTS:
        tl.store(num_aside + row, 0)
        k = top_k_of(top_k, row, vocab_size)
        p = tl.load(top_p + row)
        if ((p < 1.0) | (k > 0)) & (is_settled(temperature, peak, row) == 0):
            # Of logits for top_k, of logits over the temperature for top_p.
            unit = 1.0 if k > 0 else tl.load(temperature + row).to(tl.float32)
            each = tl.arange(0, SPLITS * BINS)
            is_part = each // BINS < num_splits
            near = tl.load(part_best + row * num_splits + each // BINS, mask=is_part, other=NOTHING)
            offset = (peak - value_of(near)) / unit
            first = _edge((each % BINS) << FINE) + offset
            last = tl.where(each % BINS < BINS - 1, _edge((each % BINS + 1) << FINE) + offset, float("inf"))
            weight = tl.load(counts + row * num_splits * BINS + each, mask=is_part, other=0).to(tl.float32)
            # What a floor must leave above itself, or may leave below.
            most = tl.full([], 0.0, tl.float32)
            if k == 0:
                weight = tl.where(is_part, weight * tl.exp(-first), 0.0)
                shift = (peak - value_of(order)) / unit
                sums = tl.load(part_sum + row * num_splits + split, mask=is_split, other=0.0)
                # A part without a logit that is not masked has no sum.
                total = tl.sum(tl.where(is_split & (shift < float("inf")), sums * tl.exp(-shift), 0.0), 0)
                most = total * (1.0 - p).to(tl.float32) * 0.999 - 1e-6
            too_near = tl.full([], -1, tl.int32)
            far_enough = tl.full([], BINS << FINE, tl.int32)
            while far_enough - too_near > 1:
                middle = too_near + (far_enough - too_near) // 2
                above = tl.sum(tl.where(last <= _edge(middle), weight, 0.0), 0)
                below = tl.sum(tl.where(last > _edge(middle), weight, 0.0), 0)
                if ((k > 0) & (above >= k)) | ((k == 0) & (below <= most)):
                    far_enough = middle
                else:
                    too_near = middle
            # Somewhat lower, for what these sums and distances were rounded by.
            floor = peak - (_edge(far_enough) * 1.0001 + 0.001) * unit
            tl.store(floors + row, tl.where(far_enough < BINS << FINE, floor, LOWEST))


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
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
    if is_settled(temperature, peak, row):
        return
    temp = tl.load(temperature + row).to(tl.float32)
    inverse = tl.div_rn(1.0, temp)
    token_id = split * BLOCK + tl.arange(0, BLOCK)
    inside = token_id < vocab_size
    x = tl.load(logits + row * row_stride + token_id, mask=inside, other=-float("inf")).to(tl.float32)
    place = row * tl.num_programs(0) + split
    if HAS_CUTS:
        k = top_k_of(top_k, row, vocab_size)
        if (k > 0) | (tl.load(top_p + row) < 1.0):
            if k == 0:
                # What lies outside the row has no mass.
                tl.store(part_mass + place, tl.sum(mass_of(exp_minus(distance_of(x, peak, temp, inverse))), 0))
            is_near = inside & (x >= tl.load(floors + row))
            # One by one: few get here, and a running sum over all would cost more.
            at = tl.atomic_add(num_aside + row + tl.zeros([BLOCK], tl.int32), 1, mask=is_near, sem="relaxed")
            keep = is_near & (at < set_aside)
            tl.store(aside + row * set_aside + at, x, mask=keep)
            tl.store(aside_id + row * set_aside + at, token_id, mask=keep)
        else:
            _race_part(
                x, token_id, vocab_size, peak, temp, inverse, min_p, seeds, positions, row, place, part_wait, part_id
            )
    else:
        _race_part(
            x, token_id, vocab_size, peak, temp, inverse, min_p, seeds, positions, row, place, part_wait, part_id
        )


@triton.jit
def _race_part(x, token_id, vocab_size, peak, temp, inverse, min_p, seeds, positions, row, place, part_wait, part_id):
    """The first of a part of a row that nothing cuts, and how long it waits."""
    distance = distance_of(x, peak, temp, inverse)
    low, high = noise_key(seeds, positions, row)
    is_out = (distance > min_p_distance(min_p, row)) | (token_id >= vocab_size)
    wait = tl.where(is_out, float("inf"), wait_of(low, high, token_id, exp_minus(distance)))
    best = tl.min(wait, 0)
    tl.store(part_wait + place, best.to(tl.int32, bitcast=True))
    tl.store(part_id + place, tl.min(tl.where((wait == best) & (token_id < vocab_size), token_id, NO_ID), 0))
