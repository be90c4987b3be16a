"""The fused layers on a GPU: the compiled kernels, bfloat16, every way a product is cut, and whole models."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from static_graphs.model import model_from_config
from support.packed_runs import PackedRun
from support.tiny_models import tiny

pytestmark = pytest.mark.gpu


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("width", "depth"), [(6144, 4096), (1024, 3072), (2048, 1536), (200, 328), (33000, 512)])
def test_every_product_of_few_rows_equals_float64(width: int, depth: int) -> None:
    from static_graphs.kernels.products import gated_product, product
    from static_graphs.tilings import choose

    for rows in (1, 2, 8, 16, 17, 33, 64):
        x = torch.randn(rows, depth, device="cuda").bfloat16()
        weight = torch.randn(2 * width, depth, device="cuda").bfloat16()
        gate, up = weight[:width], weight[width:]
        tiling, gated = choose(rows, width, depth), choose(rows, width, depth, gated=True)
        assert tiling is not None
        assert gated is not None
        expected = x.double() @ weight.double().T
        assert relative(product(x, up, tiling).double().sum(0), expected[:, width:]) < 4e-3
        expected = F.silu(expected[:, :width]) * expected[:, width:]
        assert relative(gated_product(x, gate, up, "silu", gated), expected) < 4e-3


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen2", "phi3", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fused_model_gives_the_unfused_ones_logits(model_type: str, dtype: torch.dtype) -> None:
    """Decodes of one row and of several, a chunk, padding; against the unfused model in float32."""
    from static_graphs.fuse import fuse

    torch.backends.cuda.matmul.allow_tf32 = False
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05}
    if model_type in ("qwen2", "phi3"):
        del sizes["head_dim"]
    config = tiny(model_type, **sizes)
    steps = [([(0, t) for t in range(40)] + [(1, t) for t in range(7)], 64), ([(0, 9), (1, 3)], 2), ([(1, 5)], 1)]

    def run(fused: bool, of: torch.dtype) -> torch.Tensor:
        model = model_from_config(config, device="cuda", dtype=torch.bfloat16, seed=3)
        if of == torch.float32:
            model = model_from_config(config, device="cuda", dtype=of, seed=3)
        if fused:
            fuse(model)
        run = PackedRun(model, seed=0)
        opened = [run.open(), run.open()]
        return torch.cat([run.step([(opened[s], t) for s, t in rows], width) for rows, width in steps]).double()

    own = run(False, dtype)
    found = run(True, dtype)
    if dtype == torch.float32:
        assert relative(found, own) < 1e-5
        assert torch.equal(found.argmax(1), own.argmax(1))
    else:
        assert relative(found, own) < 3e-2
