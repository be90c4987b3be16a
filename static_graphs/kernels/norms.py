"""RMSNorm with the residual sum before it, and the activation of a gate, in one pass over a row each."""

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


@dataclass(frozen=True, slots=True, eq=False)
class RmsNorm:
    """x / sqrt(mean(x ** 2) + eps) * (weight + offset), the mean over the last dimension in float32."""

    weight: torch.Tensor  # [N]
    eps: float
    offset: float
    """0, or 1 where the model stores what its weight differs from 1 by."""


def rms_norm(x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    """x [R, N] -> [R, N]."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x[None], None, None, norm, x, normed)
    return normed


def add_norm(
    parts: torch.Tensor, residual: torch.Tensor, norm: RmsNorm | None, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """parts [P, R, N], residual [R, N], bias [N] -> (sum of all [R, N], the same normed; None without a norm)."""
    total = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    normed = torch.empty_like(total) if norm is not None else None
    _launch(parts, residual, bias, norm, total, normed)
    return total, normed


def gate_by(merged: torch.Tensor, activation: str) -> torch.Tensor:
    """merged [R, 2 * N], gate beside up -> activation(gate) * up, [R, N]."""
    rows, width = merged.shape[0], merged.shape[1] // 2
    out = torch.empty(rows, width, dtype=merged.dtype, device=merged.device)
    block = min(1024, next_power(width))
    _gate[(rows, triton.cdiv(width, block))](
        merged, out, width, BLOCK=block, GATE=ACTIVATIONS[activation], num_warps=4, **overlapped(merged.device)
    )
    return out


def _launch(
    parts: torch.Tensor,
    residual: torch.Tensor | None,
    bias: torch.Tensor | None,
    norm: RmsNorm | None,
    total: torch.Tensor,
    normed: torch.Tensor | None,
) -> None:
    num_parts, rows, width = parts.shape
    block = next_power(width)
    _add_norm[(rows,)](
        parts,
        residual if residual is not None else parts,
        bias if bias is not None else parts,
        norm.weight if norm is not None else parts,
        total,
        normed if normed is not None else total,
        width,
        parts.stride(0),
        parts.stride(1),
        residual.stride(0) if residual is not None else 0,
        norm.eps if norm is not None else 0.0,
        norm.offset if norm is not None else 0.0,
        BLOCK=block,
        PARTS=num_parts,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        num_warps=min(16, max(1, block // 256)),
        **overlapped(parts.device),
    )


@triton.jit
def _add_norm(
    parts,  # [PARTS, R, N]
    residual,  # [R, N]
    bias,  # [N]
    weight,  # [N]
    total,  # [R, N]
    normed,  # [R, N]
    width,
    part_stride,
    row_stride,
    residual_stride,
    eps,
    offset,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = n < width
    scale = tl.zeros([BLOCK], tl.float32)
    if PDL:
        gdc_launch_dependents()
    if HAS_NORM:
        scale = tl.load(weight + n, mask=inside, other=0.0).to(tl.float32) + offset
    if PDL:
        gdc_wait()
    value = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        value += tl.load(parts + part * part_stride + row * row_stride + n, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + row * residual_stride + n, mask=inside, other=0.0).to(tl.float32)
        # What is normed is what is stored: the sum as the model's dtype holds it.
        kept = value.to(total.dtype.element_ty)
        tl.store(total + row * width + n, kept, mask=inside)
        value = kept.to(tl.float32)
    if HAS_NORM:
        value *= tl.rsqrt(tl.sum(value * value, 0) / width + eps)
        tl.store(normed + row * width + n, (value * scale).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _gate(merged, out, width, BLOCK: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(merged + row * 2 * width + n, mask=n < width, other=0.0).to(tl.float32)
    up = tl.load(merged + row * 2 * width + width + n, mask=n < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + n, activate(gate, up, GATE).to(out.dtype.element_ty), mask=n < width)
