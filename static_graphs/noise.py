"""Counter-based noise: a pure function of (seed, position, token id), computed where the logits are.

There is no generator state, so a draw cannot depend on batch shape, row order, neighbours, preemption, rewinds or
speculation (X-9, SAM-12). (seed, position) is mixed in 64 bits; the two halves of that key then drive a 32-bit mix of
each token id, because 32-bit lanes halve the memory traffic of the one step that touches rows x vocabulary.
All integer arithmetic wraps.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int, bits: int) -> int:
    """The two's complement reading of an unsigned constant: torch takes signed scalars only."""
    return value - (1 << bits) if value >> (bits - 1) else value


# splitmix64 (Steele, Lea, Flood 2014).
_GOLDEN_64 = _signed(0x9E3779B97F4A7C15, 64)
_MIX_64_A = _signed(0xBF58476D1CE4E5B9, 64)
_MIX_64_B = _signed(0x94D049BB133111EB, 64)
# A 32-bit finaliser with low bias (two multiplies, shifts 16 15 15).
_GOLDEN_32 = _signed(0x9E3779B1, 32)
_MIX_32_A = 0x21F0AAAD
_MIX_32_B = _signed(0xD35A2D97, 32)

_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """seeds, positions: i64[R] (any int64). -> i64[R] keys, each the name of one row's noise."""
    return _mix_64(_mix_64(seeds + _GOLDEN_64) + positions * _GOLDEN_64)


def exponentials(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Unit exponential waiting times, one for each row and token; strictly positive and finite.

    keys: i64[R]. token_ids: i32 [N], or [R, N] where rows differ. -> f32[R, N].
    The smallest tokens of time are what decides a draw, so they are kept in full: the uniform is drawn near 0 with 31
    bits (2**-32 the smallest) and -log1p(-u) keeps its relative precision there.
    """
    halves = keys.unsqueeze(-1).view(torch.int32)  # [R, 2]
    low, high = halves[:, :1], halves[:, 1:]
    bits = (token_ids * _GOLDEN_32) ^ low
    bits ^= (bits >> 16) & 0xFFFF  # the mask makes the arithmetic shift a logical one
    bits *= _MIX_32_A
    bits ^= (bits >> 15) & 0x1FFFF
    bits += high
    bits *= _MIX_32_B
    bits ^= (bits >> 15) & 0x1FFFF
    bits &= 0x7FFFFFFF
    # u in [2**-32, 1 - 2**-24]: float32 rounds the upper end to 1, where log1p(-u) would be infinite.
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST_BELOW_ONE)
    return torch.log1p(uniform.neg_()).neg_()


def _mix_64(x: Tensor) -> Tensor:
    x = (x ^ _logical_shift(x, 30)) * _MIX_64_A
    x = (x ^ _logical_shift(x, 27)) * _MIX_64_B
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)
