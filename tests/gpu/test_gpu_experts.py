"""A mixture of experts on a GPU: the compiled kernels at every number of rows that they are cut anew for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 3, 8, 9, 16, 17, 40, 64, 130, 257, 700)


def mixture(experts: int, hidden: int, inner: int, top_k: int, dtype: torch.dtype) -> Any:
    from static_graphs.mixtures import FusedExperts, FusedMixture

    torch.manual_seed(7)
    gate_up = (torch.randn(experts, 2 * inner, hidden, device="cuda") * hidden**-0.5).to(dtype)
    down = (torch.randn(experts, hidden, inner, device="cuda") * inner**-0.5).to(dtype)
    router = (torch.randn(experts, hidden, device="cuda") * hidden**-0.5).to(dtype)
    return FusedMixture(router, FusedExperts(gate_up, down, "silu"), top_k, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("experts", "hidden", "inner", "top_k"), [(16, 256, 192, 4), (128, 2048, 768, 8), (5, 72, 40, 2), (8, 1024, 512, 1)]
)
def test_a_mixture_of_any_number_of_rows_equals_float64(
    experts: int, hidden: int, inner: int, top_k: int, dtype: torch.dtype
) -> None:
    of = mixture(experts, hidden, inner, top_k, dtype)
    for rows in ROWS:
        x = torch.randn(rows, hidden, device="cuda").to(dtype)
        found = of(x)
        assert found.shape == (top_k, rows, hidden)
        logits = F.linear(x, of.router.weight).float()
        routed = of.experts(x, chosen := choice(of, x)).double()
        torch.testing.assert_close(found.transpose(0, 1).double(), routed, atol=0.0, rtol=0.0)
        index = chosen.experts.long()
        best = logits.topk(top_k).values
        assert (logits.gather(1, index) - best).abs().max() <= 2e-2 * best.abs().max()  # but for rounding
        for row in range(0, rows, max(1, rows // 16)):
            gate, up = of.experts.gate[index[row]].double(), of.experts.up[index[row]].double()
            inner_row = F.silu(gate @ x[row].double()) * (up @ x[row].double())
            expected = (of.experts.down[index[row]].double() @ inner_row[:, :, None])[..., 0]
            expected *= chosen.weights[row, :, None].double()
            error = (found[:, row].double() - expected).norm() / expected.norm()
            assert error < (1e-5 if dtype == torch.float32 else 8e-3)


def choice(of: Any, x: torch.Tensor) -> Any:
    from static_graphs.kernels.experts import choose_experts

    return choose_experts(of.router(x), of.top_k, is_normed=of.is_normed, dtype=x.dtype)


def test_all_rows_to_one_expert_and_the_others_left_out() -> None:
    from static_graphs.kernels.experts import Routed

    of = mixture(32, 256, 128, 1, torch.bfloat16)
    for rows in (1, 100, 700, 3000):
        x = torch.randn(rows, 256, device="cuda").bfloat16()
        ones = torch.ones(rows, 1, device="cuda").bfloat16()
        found = of.experts(x, Routed(torch.full((rows, 1), 31, dtype=torch.int32, device="cuda"), ones))[:, 0]
        inner = F.silu(x.double() @ of.experts.gate[31].double().T) * (x.double() @ of.experts.up[31].double().T)
        expected = inner @ of.experts.down[31].double().T
        assert (found.double() - expected).norm() / expected.norm() < 8e-3


def test_a_mixture_of_true_size_is_recognised_in_every_layer() -> None:
    """Of 128 bfloat16 logits some are equal by chance, and a router may take either."""
    from transformers import AutoConfig

    from static_graphs.fuse import fuse
    from static_graphs.model import model_from_config
    from static_graphs.shapes import SHAPES

    shape = {**SHAPES["30b-a3b"], "num_hidden_layers": 4}
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    report = fuse(model_from_config(config, device="cuda", dtype=torch.bfloat16, max_model_len=64))
    assert (report.mixtures, report.experts, report.left) == (4, 4, {})
