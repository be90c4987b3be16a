"""The kernels of the fused layers under Triton's interpreter, against plain torch. `conftest.py` switches it on."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="needs triton: pip install triton")
if torch.cuda.is_available():
    pytest.skip("the kernels run compiled here, in tests/gpu/test_gpu_fuse.py", allow_module_level=True)

from cache.geometry import FP8, KvScales
from static_graphs.kernels.norms import RmsNorm, add_norm, gate_by, rms_norm
from static_graphs.kernels.products import gated_product, product
from static_graphs.kernels.rotary import rotate_and_store
from static_graphs.tilings import Tiling, choose


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(("width", "depth", "parts"), [(64, 128, 1), (64, 128, 2), (40, 100, 1), (40, 100, 3)])
def test_a_product_of_few_rows_is_the_sum_of_its_parts(rows: int, width: int, depth: int, parts: int) -> None:
    x, weight = torch.randn(rows, depth), torch.randn(width, depth)
    close(product(x, weight, Tiling(32, 32, parts)).sum(0), x @ weight.T, 1e-4)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("width", "depth"), [(64, 128), (40, 100)])
def test_one_row_by_multiplying_and_adding(width: int, depth: int, parts: int) -> None:
    x, weight = torch.randn(1, depth), torch.randn(width, depth)
    close(product(x, weight, Tiling(16, 64, parts, is_dot=False)).sum(0), x @ weight.T, 1e-4)


@pytest.mark.parametrize(("rows", "is_dot"), [(1, False), (5, True)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gated_product_reads_two_weights_of_one_storage(rows: int, is_dot: bool, activation: str) -> None:
    merged = torch.randn(96, 40)
    gate, up = merged[:48], merged[48:]
    x = torch.randn(rows, 40)
    expected = act(activation, x @ gate.T) * (x @ up.T)
    close(gated_product(x, gate, up, activation, Tiling(16, 32, is_dot=is_dot)), expected, 1e-4)
    close(gate_by(x @ merged.T, activation), expected, 1e-4)


def test_gelu_of_large_values_does_not_overflow() -> None:
    merged = torch.tensor([[1e4, -1e4, 3.0, 1.0, 1.0, 1.0]])
    close(gate_by(merged, "gelu_tanh"), act("gelu_tanh", merged[:, :3]) * merged[:, 3:])


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_norm_is_over_the_sum_of_parts_bias_and_residual(offset: float) -> None:
    norm = RmsNorm(torch.randn(48), 1e-3, offset)
    parts, residual, bias = torch.randn(3, 5, 48), torch.randn(5, 48), torch.randn(48)
    expected = parts.sum(0) + residual + bias
    total, normed = add_norm(parts, residual, norm, bias)
    close(total, expected)
    assert normed is not None
    close(normed, F.rms_norm(expected, (48,), eps=1e-3) * (norm.weight + offset))
    close(rms_norm(residual, norm), F.rms_norm(residual, (48,), eps=1e-3) * (norm.weight + offset))
    alone, nothing = add_norm(parts, residual, None)
    close(alone, parts.sum(0) + residual)
    assert nothing is None


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotated"), [(4, 2, 16, 16), (3, 1, 12, 12), (16, 8, 8, 4), (2, 2, 20, 10)]
)
def test_queries_and_keys_turn_and_all_rows_reach_their_cells(
    heads: int, kv_heads: int, dim: int, rotated: int, has_norm: bool
) -> None:
    width, columns = 3, (heads + 2 * kv_heads) * dim
    parts, bias = torch.randn(2, width, columns), torch.randn(columns)
    angles = torch.randn(width, rotated // 2).repeat(1, 2)
    norms = [RmsNorm(torch.randn(dim), 1e-3, 0.0) for _ in range(2)] if has_norm else [None, None]
    keys, values = (torch.full((9, kv_heads, dim), float("nan")) for _ in range(2))
    rows = torch.tensor([7, 0, 3])
    query = rotate_and_store(
        parts, angles.cos(), angles.sin(), keys, values, rows, bias=bias, query_norm=norms[0], key_norm=norms[1]
    )
    q, k, v = (parts.sum(0) + bias).view(width, -1, dim).split([heads, kv_heads, kv_heads], 1)
    if norms[0] is not None and norms[1] is not None:
        q = F.rms_norm(q, (dim,), norms[0].weight, 1e-3)
        k = F.rms_norm(k, (dim,), norms[1].weight, 1e-3)
    close(query, turned(q, angles))
    close(keys[rows], turned(k, angles))
    close(values[rows], v)
    assert keys[[1, 2, 4, 5, 6, 8]].isnan().all()


def test_rows_reach_fp8_cells_over_their_scales_and_cut_to_its_range() -> None:
    """Of numbers that FP8 has: how others are rounded the interpreter gets wrong, tests/gpu/test_gpu_fp8.py has it."""
    every = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    key = every[~every.isnan()][torch.randint(0, 254, (3, 16))]
    value = key.flip(0).clone()
    value[0, :3] = torch.tensor([460.0, -1e9, torch.inf])
    parts = torch.cat([torch.randn(3, 32), key * 0.5, value * 0.25], 1)[None]
    keys, values = (torch.zeros(9, 1, 16).to(FP8) for _ in range(2))
    rows = torch.tensor([7, 0, 3])
    still = torch.ones(3, 16), torch.zeros(3, 16)
    query = rotate_and_store(parts, *still, keys, values, rows, scales=KvScales(0.5, 0.25))
    assert torch.equal(query.flatten(1), parts[0, :, :32])
    assert torch.equal(keys.float()[rows, 0], key)
    assert torch.equal(values.float()[rows, 0], value.clamp(-448, 448))
    assert not keys.float()[[1, 2, 4, 5, 6, 8]].any()


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    rotated = angles.shape[-1]
    turning, rest = x[..., :rotated], x[..., rotated:]
    low, high = turning.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([turning * cos + torch.cat([-high, low], -1) * sin, rest], -1)


def act(name: str, gate: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) if name == "silu" else F.gelu(gate, approximate="tanh")


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 64])
@pytest.mark.parametrize(("width", "depth"), [(6144, 4096), (1024, 3072), (128256, 4096), (200, 328), (64, 64)])
def test_every_tiling_covers_its_product_without_an_empty_part(rows: int, width: int, depth: int) -> None:
    for gated in (False, True):
        tiling = choose(rows, width, depth, gated=gated)
        assert tiling is not None
        part = -(-depth // tiling.parts // tiling.block_k) * tiling.block_k
        assert (tiling.parts - 1) * part < depth
        assert tiling.is_dot or rows == 1
        assert tiling.parts == 1 or not gated


def test_many_rows_are_left_to_cublas() -> None:
    assert choose(65, 4096, 4096) is None
    assert choose(65, 1024, 4096) is not None
    assert choose(65, 1024, 4096, bits=32) is None
    assert choose(8, 32, 4096) is None
