"""Matrix products of few rows, [R, K] x [N, K] -> [R, N], which wait for the weights: every byte of them read once.

The weights stand where a matrix unit wants its tall operand (BLOCK_N of them against all rows), so few rows waste
nothing. K may be cut into parts to fill the device: the parts' float32 sums are left [parts, R, N] for the kernel that
reads them next (norms.py, rotary.py), which adds them as it loads. A gated product multiplies by two weights and
writes activation(gate) * up.

The interpreter (TRITON_INTERPRET=1, no GPU) runs the same kernels except for bfloat16, which it gets wrong.
"""

# Triton is not typed, and a kernel's arguments are pointers and compile-time constants.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cache.attend.launch import LINE, fetch_ahead, next_power, overlapped
from static_graphs.kernels.shared_memory import room_of
from static_graphs.tilings import MIN_ROWS, Tiling

ACTIVATIONS = {"silu": 1, "gelu_tanh": 2}


def product(x: torch.Tensor, weight: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    """x [R, K], weight [N, K] -> [1, R, N] in x's dtype, or [parts, R, N] f32 to be added by the reader."""
    return _launch(x, weight, weight, tiling, 0)


def gated_product(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str, tiling: Tiling
) -> torch.Tensor:
    """x [R, K], gate and up [N, K] of equal strides -> activation(x gate) * (x up), [R, N]. One part only."""
    return _launch(x, gate, up, tiling, ACTIVATIONS[activation])[0]


def _launch(x: torch.Tensor, weight: torch.Tensor, up: torch.Tensor, tiling: Tiling, gate: int) -> torch.Tensor:
    rows, depth = x.shape
    width = weight.shape[0]
    parts = tiling.parts
    out = torch.empty(parts, rows, width, dtype=torch.float32 if parts > 1 else x.dtype, device=x.device)
    part = triton.cdiv(triton.cdiv(depth, parts), tiling.block_k) * tiling.block_k
    grid = (triton.cdiv(width, tiling.block_n), parts)
    is_even = width % tiling.block_n == 0 and depth == part * parts
    shape = {
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "GATE": gate,
        "EVEN": is_even,
        "FETCH": min(tiling.fetch, 1 << part.bit_length() - 1) if is_even else 0,
        "num_warps": tiling.warps,
        **overlapped(x.device),
    }
    if not tiling.is_dot:
        _multiply_row[grid](x, weight, up, out, width, depth, part, weight.stride(0), **shape)
        return out
    block_r = max(MIN_ROWS, next_power(rows))
    is_exact = x.dtype == torch.float32
    stage_bytes = tiling.stage_bytes(block_r, x.element_size(), is_gated=gate > 0)
    _multiply_rows[grid](
        x,
        weight,
        up,
        out,
        rows,
        width,
        depth,
        part,
        x.stride(0),
        weight.stride(0),
        BLOCK_R=block_r,
        EVEN_R=rows == block_r,
        UPCAST=is_exact,
        num_stages=room_of(x.device).stages(tiling.stages, stage_bytes, is_exact=is_exact),
        **shape,
    )
    return out


@triton.jit
def activate(gate, up, GATE: tl.constexpr):
    """activation(gate) * up in float32; GATE is one of ACTIVATIONS."""
    if GATE == 1:
        result = gate / (1.0 + tl.exp(-gate)) * up
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # tanh by an exponential that cannot overflow
        falling = tl.exp(-2.0 * tl.abs(inner))
        tanh = tl.where(inner < 0, -1.0, 1.0) * (1.0 - falling) / (1.0 + falling)
        result = 0.5 * gate * (1.0 + tanh) * up
    return result


@triton.jit
def _await_input(weight, up, n, weight_stride, part, GATE: tl.constexpr, FETCH: tl.constexpr, PDL: tl.constexpr):
    """Wait for what the kernel before this one writes; the first FETCH of each weight row are fetched meanwhile."""
    if PDL:
        if FETCH >= LINE:
            lines = n[:, None].to(tl.int64) * weight_stride + tl.program_id(1) * part
            lines += (tl.arange(0, FETCH // LINE) * LINE)[None, :]
            fetch_ahead(weight + lines)
            if GATE:
                fetch_ahead(up + lines)
        gdc_wait()


@triton.jit
def _weights(at, inside, EVEN: tl.constexpr, EVICT: tl.constexpr):
    """A block of weights, 0 where not inside; without a mask where every block is whole."""
    if EVEN:
        block = tl.load(at, eviction_policy=EVICT)
    else:
        block = tl.load(at, mask=inside[None, :], other=0.0, eviction_policy=EVICT)
    return block


@triton.jit(do_not_specialize=["rows"])
def _multiply_rows(
    x,  # [R, K]
    weight,  # [N, K]
    up,  # [N, K], read where GATE
    out,  # [parts, R, N]
    rows,
    width,
    depth,
    part,
    x_stride,
    weight_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GATE: tl.constexpr,
    EVEN: tl.constexpr,
    FETCH: tl.constexpr,
    EVEN_R: tl.constexpr,
    UPCAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N columns of one part of K, for all rows."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * part + tl.arange(0, BLOCK_K)
    r = tl.arange(0, BLOCK_R)
    end = tl.minimum(tl.program_id(1) * part + part, depth)
    # A row or column too many repeats a real one and is not stored: no mask on the way in.
    source = r if EVEN_R else r % rows
    column = n if EVEN else n % width
    weight_at = column[:, None].to(tl.int64) * weight_stride + k[None, :]
    x_at = source[None, :] * x_stride + k[:, None]
    _await_input(weight, up, n, weight_stride, part, GATE, FETCH, PDL)
    total = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    total_up = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    for low in range(tl.program_id(1) * part, end, BLOCK_K):
        step = low - tl.program_id(1) * part
        inside = k + step < end
        a = _weights(weight + weight_at + step, inside, EVEN, "")
        b = tl.load(x + x_at + step) if EVEN else tl.load(x + x_at + step, mask=inside[:, None], other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
        if GATE:
            c = _weights(up + weight_at + step, inside, EVEN, "")
            if UPCAST:
                c = c.to(tl.float32)
            total_up = tl.dot(c, b, total_up, input_precision="ieee")
    if PDL:
        gdc_launch_dependents()
    if GATE:
        total = activate(total, total_up, GATE)
    place = (tl.program_id(1) * rows + r[None, :]).to(tl.int64) * width + n[:, None]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(r < rows)[None, :] & (n < width)[:, None])


@triton.jit
def _multiply_row(
    x,  # [1, K]
    weight,  # [N, K]
    up,  # [N, K], read where GATE
    out,  # [parts, 1, N]
    width,
    depth,
    part,
    weight_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATE: tl.constexpr,
    EVEN: tl.constexpr,
    FETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N columns of one part of K, for the one row there is: each thread adds up its own share of K."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * part + tl.arange(0, BLOCK_K)
    end = tl.minimum(tl.program_id(1) * part + part, depth)
    column = n if EVEN else n % width
    weight_at = column[:, None].to(tl.int64) * weight_stride + k[None, :]
    _await_input(weight, up, n, weight_stride, part, GATE, FETCH, PDL)
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    total_up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for low in range(tl.program_id(1) * part, end, BLOCK_K):
        step = low - tl.program_id(1) * part
        inside = k + step < end
        a = _weights(weight + weight_at + step, inside, EVEN, "evict_first").to(tl.float32)
        b = tl.load(x + k + step) if EVEN else tl.load(x + k + step, mask=inside, other=0.0)
        b = b.to(tl.float32)
        total += a * b[None, :]
        if GATE:
            c = _weights(up + weight_at + step, inside, EVEN, "evict_first").to(tl.float32)
            total_up += c * b[None, :]
    if PDL:
        gdc_launch_dependents()
    result = tl.sum(total, 1)
    if GATE:
        result = activate(result, tl.sum(total_up, 1), GATE)
    tl.store(out + tl.program_id(1) * width + n, result.to(out.dtype.element_ty), mask=n < width)
