"""The sampler's last kernel: the exact cuts of a row among what was set aside, and its race. See `sampling.py`.

Few logits are ranked, each against all others. More are searched: a quarter of what is left each time, first for the
logit at which a cut lies, then, among its ties, for the id.
"""

# Triton is not typed, and a kernel's arguments are pointers and compile-time constants.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from static_graphs.kernels.token_math import (
    LOWEST,
    NO_ID,
    OF_ROWS,
    distance_of,
    exp_minus,
    is_settled,
    mass_of,
    min_p_distance,
    noise_key,
    order_of,
    top_k_of,
    value_of,
    wait_of,
)

FEW = tl.constexpr(512)
"""So few logits set aside are ranked, each against all others, instead of searched."""


@triton.jit(do_not_specialize_on_alignment=OF_ROWS)
def settle(
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
    if is_settled(temperature, peak, row):
        return
    if HAS_CUTS:
        k = top_k_of(top_k, row, vocab_size)
        p = tl.load(top_p + row)
        if (k > 0) | (p < 1.0):
            temp = tl.load(temperature + row).to(tl.float32)
            inverse = tl.div_rn(1.0, temp)
            limit = min_p_distance(min_p, row)
            low, high = noise_key(seeds, positions, row)
            kept = tl.load(num_aside + row)
            floor = tl.load(floors + row)
            if floor == LOWEST:
                k = tl.minimum(k, kept)  # the others have no mass
            aside += row * set_aside
            aside_id += row * set_aside
            split = tl.arange(0, SPLITS)
            whole_mass = tl.full([], 0, tl.int64)
            if k == 0:
                mass = tl.load(part_mass + row * num_splits + split, mask=split < num_splits, other=0)
                whole_mass = tl.sum(mass, 0)
            winner = NO_ID
            if (kept <= FEW) & (kept <= set_aside) & (kept >= k):
                winner = _race_few(
                    aside, aside_id, kept, whole_mass, peak, temp, inverse, k, p, limit, low, high, FEW, 16
                )
            if winner == NO_ID:
                winner = _race_many(
                    logits + row * row_stride, aside, aside_id, kept, set_aside, floor, whole_mass,
                    vocab_size, peak, temp, inverse, k, p, limit, low, high, BLOCK,
                )  # fmt: skip
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
def _mass_wanted(total, p):
    """A token stays while the mass before it is less than this: at least 1, so that the first always stays."""
    wanted = tl.ceil(total.to(tl.float64) * p).to(tl.int64)
    return tl.maximum(tl.minimum(wanted, total), 1)


@triton.jit
def _race_few(
    aside,
    aside_id,
    kept,
    whole_mass,
    peak,
    temp,
    inverse,
    k,
    p,
    limit,
    low,
    high,
    SIZE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """-> the id drawn from `kept` <= SIZE logits by ranking them; NO_ID where top_p wants more than they are."""
    at = tl.arange(0, SIZE)
    is_entry = at < kept
    x = tl.load(aside + at, mask=is_entry, other=-float("inf"))
    token_id = tl.load(aside_id + at, mask=is_entry, other=NO_ID)
    order = order_of(x)
    rank = tl.zeros([SIZE], tl.int32)
    mass_before = tl.zeros([SIZE], tl.int64)
    for start in range(0, kept, AT_ONCE):
        other_at = start + tl.arange(0, AT_ONCE)
        other_x = tl.load(aside + other_at, mask=other_at < kept, other=-float("inf"))
        other_id = tl.load(aside_id + other_at, mask=other_at < kept, other=NO_ID)
        other_order = order_of(other_x)
        is_before = other_order[:, None] > order[None, :]
        is_before |= (other_order[:, None] == order[None, :]) & (other_id[:, None] < token_id[None, :])
        rank += tl.sum(is_before.to(tl.int32), 0)
        if p < 1.0:
            other_mass = mass_of(exp_minus(distance_of(other_x, peak, temp, inverse)))
            mass_before += tl.sum(tl.where(is_before, other_mass[:, None], 0), 0)
    distance = distance_of(x, peak, temp, inverse)
    probability = exp_minus(distance)
    keep = is_entry & (distance <= limit)
    if k > 0:
        keep &= rank < k
    is_enough = k >= 0
    if p < 1.0:
        found = tl.sum(tl.where(is_entry & ((rank < k) | (k == 0)), mass_of(probability), 0), 0)
        total = tl.where(k > 0, found, whole_mass)
        wanted = _mass_wanted(total, p)
        is_enough = found >= wanted
        keep &= mass_before < wanted
    wait = tl.where(keep, wait_of(low, high, token_id, probability), float("inf"))
    winner = tl.min(tl.where(keep & (wait == tl.min(wait, 0)), token_id, NO_ID), 0)
    return tl.where(is_enough, winner, NO_ID)


@triton.jit
def _race_many(
    logits,
    aside,
    aside_id,
    kept,
    set_aside,
    floor,
    whole_mass,
    vocab_size,
    peak,
    temp,
    inverse,
    k,
    p,
    limit,
    low,
    high,
    BLOCK: tl.constexpr,
):
    """-> the id drawn from what was set aside, or from the whole row. Both cuts are searched for."""
    lowest = tl.full([], -(2**31), tl.int32)
    bottom = order_of(floor).to(tl.int64)
    whole = 0
    if (kept > set_aside) | (kept < k):
        kept, whole = 0, vocab_size
        bottom = lowest.to(tl.int64)
    k_order = lowest
    k_id = vocab_size
    p_order = lowest
    p_id = vocab_size
    if k > 0:
        k_order, k_id = _cut(
            logits, aside, aside_id, kept, whole, peak, temp, inverse, k_order, k_id,
            k, (kept + whole).to(tl.int64), bottom, vocab_size, BLOCK, False,
        )  # fmt: skip
        bottom = k_order.to(tl.int64)
    if p < 1.0:
        found = _weigh(logits, aside, aside_id, kept, whole, peak, temp, inverse, k_order, k_id, BLOCK)
        total = tl.where(k > 0, found, whole_mass)
        wanted = _mass_wanted(total, p)
        if found < wanted:
            kept, whole = 0, vocab_size
            bottom, found = lowest.to(tl.int64), total
        p_order, p_id = _cut(
            logits, aside, aside_id, kept, whole, peak, temp, inverse, k_order, k_id,
            wanted, found, bottom, vocab_size, BLOCK, True,
        )  # fmt: skip
    waits = tl.full([BLOCK], float("inf"), tl.float32)
    winners = tl.full([BLOCK], NO_ID, tl.int32)
    for start in range(0, kept + whole, BLOCK):
        x, token_id, is_entry = _entries(logits, aside, aside_id, kept, whole, start, BLOCK)
        distance = distance_of(x, peak, temp, inverse)
        order = order_of(x)
        keep = is_entry & (distance <= limit)
        keep &= (order > k_order) | ((order == k_order) & (token_id <= k_id))
        keep &= (order > p_order) | ((order == p_order) & (token_id <= p_id))
        wait = tl.where(keep, wait_of(low, high, token_id, exp_minus(distance)), float("inf"))
        is_better = (wait < waits) | ((wait == waits) & (token_id < winners) & keep)
        winners = tl.where(is_better, token_id, winners)
        waits = tl.where(is_better, wait, waits)
    return tl.min(tl.where(waits == tl.min(waits, 0), winners, NO_ID), 0)


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
def _weights(x, token_id, is_entry, peak, temp, inverse, k_order, k_id, MASS: tl.constexpr):
    """i64: 1, or the mass of a token that top_k keeps; 0 where there is none."""
    if MASS:
        order = order_of(x)
        is_kept = (order > k_order) | ((order == k_order) & (token_id <= k_id))
        mass = mass_of(exp_minus(distance_of(x, peak, temp, inverse)))
        weight = tl.where(is_entry & is_kept, mass, 0)
    else:
        weight = is_entry.to(tl.int32)
    return weight


@triton.jit
def _weigh(logits, aside, aside_id, kept, whole, peak, temp, inverse, k_order, k_id, BLOCK: tl.constexpr):
    """The mass of everything that top_k keeps: i64."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, kept + whole, BLOCK):
        x, token_id, is_entry = _entries(logits, aside, aside_id, kept, whole, start, BLOCK)
        total += _weights(x, token_id, is_entry, peak, temp, inverse, k_order, k_id, True)
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
    inverse,
    k_order,
    k_id,
    wanted,
    total,
    bottom,
    vocab_size,
    BLOCK: tl.constexpr,
    MASS: tl.constexpr,
):
    """Where the shortest prefix of the order whose weight reaches `wanted` ends: its last token's order and id.

    wanted: i64, 1 <= wanted <= total. total: i64, the weight of everything. bottom: i64, no logit's order is lower.
    """
    weight_type: tl.constexpr = tl.int64 if MASS else tl.int32
    # The weight from `bottom` on reaches `wanted`, that from `top` on does not: a quarter of the way each time.
    top = order_of(peak).to(tl.int64) + 1
    at_bottom = total
    at_top = tl.full([], 0, tl.int64)
    while top - bottom > 1:
        step = (top - bottom + 3) // 4
        first = bottom + step
        second = tl.minimum(first + step, top)
        third = tl.minimum(second + step, top)
        from_first = tl.zeros([BLOCK], weight_type)
        from_second = tl.zeros([BLOCK], weight_type)
        from_third = tl.zeros([BLOCK], weight_type)
        for start in range(0, kept + whole, BLOCK):
            x, token_id, is_entry = _entries(logits, aside, aside_id, kept, whole, start, BLOCK)
            weight = _weights(x, token_id, is_entry, peak, temp, inverse, k_order, k_id, MASS)
            order = order_of(x)
            from_first += tl.where(order >= first.to(tl.int32), weight, 0)
            from_second += tl.where(order >= second.to(tl.int32), weight, 0)
            from_third += tl.where(order >= third.to(tl.int32), weight, 0)
        first_weight = tl.sum(from_first, 0).to(tl.int64)
        second_weight = tl.sum(from_second, 0).to(tl.int64)
        third_weight = tl.sum(from_third, 0).to(tl.int64)
        if third_weight >= wanted:
            bottom, at_bottom = third, third_weight
        elif second_weight >= wanted:
            bottom, at_bottom, top, at_top = second, second_weight, third, third_weight
        elif first_weight >= wanted:
            bottom, at_bottom, top, at_top = first, first_weight, second, second_weight
        else:
            top, at_top = first, first_weight
    order_cut = bottom.to(tl.int32)
    each = tl.full([], 1, tl.int64)
    if MASS:
        each = tl.maximum(mass_of(exp_minus(distance_of(value_of(order_cut), peak, temp, inverse))), 1)
    ties = (wanted - at_top + each - 1) // each
    # The id of the last tie that stays; any id where all of them do.
    last = vocab_size - 1
    if ties * each < at_bottom - at_top:
        below = -1
        while last - below > 1:
            middle = below + (last - below) // 2
            found = tl.zeros([BLOCK], tl.int32)
            for start in range(0, kept + whole, BLOCK):
                x, token_id, is_entry = _entries(logits, aside, aside_id, kept, whole, start, BLOCK)
                is_tie = is_entry & (order_of(x) == order_cut) & (token_id <= middle)
                if MASS:
                    is_tie &= (order_cut > k_order) | (token_id <= k_id)
                found += is_tie.to(tl.int32)
            if tl.sum(found, 0) >= ties:
                last = middle
            else:
                below = middle
    return order_cut, last
