"""What one token of one row is worth to the sampler's kernels: its order, its distance, its mass and its noise.

Device functions, each equal to its namesake in `sampler.py` or `noise.py`: in integers exactly, in float32 to the last
bit but for exp and log, which may differ from another library's there.
"""

# Triton is not typed, and a kernel's arguments are pointers and compile-time constants.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

NO_ID = tl.constexpr(2**31 - 1)
"""Comes after every token id."""
LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The floor that sets aside all but what is masked."""
OF_ROWS = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
"""Arguments that are lines of one array, so that the number of rows decides how they are aligned. A program reads one
value of each: no kernel is compiled anew for what another alignment would let it do.
"""


@triton.jit
def order_of(x):
    """f32 -> i32 that compares like the floats do: -0.0 equals 0.0, NaN comes first."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def value_of(order):
    """The logit of an order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def is_greedy(temperature, row):
    """temperature: [R] f32 or f64."""
    return tl.load(temperature + row).to(tl.float64) < tl.full([], 1e-5, tl.float64)


@triton.jit
def is_settled(temperature, peak, row):
    """Greedy, or broken: `bound` has written the id of the largest."""
    return is_greedy(temperature, row) | (tl.abs(peak) == float("inf")) | (peak != peak)


@triton.jit
def top_k_of(top_k, row, vocab_size):
    """i64; 0 where it is off."""
    k = tl.load(top_k + row)
    return tl.where(k < vocab_size, k, 0)


@triton.jit
def distance_of(x, peak, temp, inverse):
    """(peak - x) / temp, rounded as a division is; inverse: 1 / temp, so rounded too."""
    below = peak - x
    guess = below * inverse
    exact = tl.fma(tl.fma(-guess, temp, below), inverse, guess)
    return tl.where(guess < float("inf"), exact, guess)


@triton.jit
def exp_minus(x):
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
    s = top / (top + 2.0)
    square = s * s
    series = tl.fma(square, 0.22222222, 0.2857142857142857)
    series = tl.fma(square, series, 0.4)
    series = tl.fma(square, series, 0.6666666666666666)
    return tl.fma(power.to(tl.float32), 0.6931471805599453, tl.fma(s * square, series, 2.0 * s))


@triton.jit
def mass_of(probability):
    return (probability * 1099511627776.0).to(tl.int64)


@triton.jit
def _mix_64(x):
    x = (x ^ (x >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def noise_key(seeds, positions, row):
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
def wait_of(low, high, token_id, probability):
    return _exponential(low, high, token_id) / probability


@triton.jit
def min_p_distance(min_p, row):
    p = tl.load(min_p + row).to(tl.float32)
    return tl.where(p > 0.0, -_log(tl.where(p > 0.0, p, 1.0), tl.where(p > 0.0, p, 1.0) - 1.0), float("inf"))
