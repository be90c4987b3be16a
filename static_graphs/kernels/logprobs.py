"""The sum below a row's log probabilities, in an order that the vocabulary alone decides: not the rows beside it."""

# Triton is not typed, and a kernel's arguments are pointers and compile-time constants.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cache.attend.launch import next_power
from static_graphs.kernels.token_math import exp_minus

BLOCK = 2048
"""Logits that a program adds up."""


def sum_of_exp(logits: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    """logits f32[R, V] with rows side by side, peak f32[R, 1], their largest -> f32[R, 1]: sums of exp(logit - peak).

    A row without a finite peak gives NaN.
    """
    rows, vocab_size = logits.shape
    splits = triton.cdiv(vocab_size, BLOCK)
    parts = torch.empty(rows, splits, dtype=torch.float32, device=logits.device)
    sums = torch.empty(rows, 1, dtype=torch.float32, device=logits.device)
    if rows:
        _sum_part[(splits, rows)](logits, peak, parts, vocab_size, logits.stride(0), BLOCK=BLOCK, num_warps=4)
        _sum_parts[(rows,)](parts, sums, splits, SPLITS=next_power(splits), num_warps=1)
    return sums


@triton.jit
def _sum_part(
    logits,  # [R, V]
    peaks,  # [R]
    parts,  # [R, splits] f32
    vocab_size,
    row_stride,
    BLOCK: tl.constexpr,
):
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token_id = split * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + token_id, mask=token_id < vocab_size, other=-float("inf"))
    tl.store(parts + row * tl.num_programs(0) + split, tl.sum(exp_minus(tl.load(peaks + row) - x), 0))


@triton.jit
def _sum_parts(parts, sums, num_splits, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    tl.store(sums + row, tl.sum(tl.load(parts + row * num_splits + split, mask=split < num_splits, other=0.0), 0))
