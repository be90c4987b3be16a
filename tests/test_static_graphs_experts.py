"""The kernels of a mixture of experts under Triton's interpreter, against one expert at a time by plain torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="needs triton: pip install triton")
if torch.cuda.is_available():
    pytest.skip("the kernels run compiled here, in tests/gpu/test_gpu_experts.py", allow_module_level=True)

from static_graphs.kernels.experts import ExpertTiling, Routed, choose_experts, down_experts, gated_experts, sort_pairs
from static_graphs.mixtures import tilings_of
from support.experts import expected_choice, expected_experts


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (7, 3), (128, 8), (5, 5), (3, 1)])
def test_a_row_goes_to_the_likeliest_experts_by_their_share_of_the_softmax(
    experts: int, top_k: int, is_normed: bool
) -> None:
    parts = torch.randn(3, 11, experts)
    routed = choose_experts(parts, top_k, is_normed=is_normed, dtype=torch.float32)
    chosen, weights = expected_choice(parts.sum(0), top_k, is_normed)
    assert torch.equal(routed.experts.long(), chosen)
    torch.testing.assert_close(routed.weights, weights, atol=1e-6, rtol=1e-5)


def test_of_equal_logits_the_first_expert_wins_and_none_is_chosen_twice() -> None:
    parts = torch.tensor([[[1.0, 3.0, 1.0, 3.0, 1.0], [float("-inf")] * 5, [0.0] * 5]])
    parts[0, 1, 4] = 0.0
    routed = choose_experts(parts, 3, is_normed=True, dtype=torch.float32)
    assert routed.experts.tolist() == [[1, 3, 0], [4, 0, 1], [0, 1, 2]]


def test_a_logit_that_is_rounded_to_minus_zero_equals_zero() -> None:
    parts = torch.tensor([[[-1e-9, 0.0, -1e-9, -1.0]]])
    routed = choose_experts(parts, 2, is_normed=True, dtype=torch.float16)
    assert routed.experts.tolist() == [[0, 1]]


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of the interpreter's numpy, in inf - inf
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), float("-inf")])
def test_a_row_of_no_numbers_goes_to_experts_that_are_there(bad: float) -> None:
    parts = torch.full((1, 2, 6), bad)
    parts[0, 1, :3] = 1.0
    routed = choose_experts(parts, 4, is_normed=True, dtype=torch.float32)
    for row in routed.experts.tolist():
        assert len(set(row)) == 4
        assert set(row) <= set(range(6))


@pytest.mark.parametrize(("rows", "experts", "top_k"), [(1, 4, 2), (5, 3, 3), (40, 16, 4), (700, 5, 4)])
def test_pairs_are_sorted_by_expert_and_then_by_number(rows: int, experts: int, top_k: int) -> None:
    """2,800 pairs are more than a program compares at a time."""
    logits = torch.randn(rows, experts) + torch.linspace(0, 3, experts)  # some experts get few or none
    chosen = logits.topk(top_k)
    routed = sort_pairs(Routed(chosen.indices.int(), chosen.values), experts)
    flat = routed.experts.flatten()
    assert routed.order is not None
    assert routed.starts is not None
    assert torch.equal(routed.order.long(), torch.sort(flat, stable=True).indices)
    assert torch.equal(routed.starts[1:].long(), torch.bincount(flat, minlength=experts).cumsum(0))
    assert routed.starts[0] == 0


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("block_r", [None, 16])
@pytest.mark.parametrize(("rows", "hidden", "inner"), [(1, 64, 32), (3, 40, 24), (21, 32, 48)])
def test_rows_pass_their_own_experts_alone(
    rows: int, hidden: int, inner: int, block_r: int | None, activation: str
) -> None:
    """21 rows of 2 among 5 give one expert more pairs than a block has, and one none at all."""
    experts, top_k = 5, 2
    x = torch.randn(rows, hidden)
    gate_up, down = torch.randn(experts, 2 * inner, hidden), torch.randn(experts, hidden, inner)
    logits = torch.randn(1, rows, experts) + torch.tensor([9.0, 0.0, 1.0, 2.0, -99.0])
    routed = choose_experts(logits, top_k, is_normed=True, dtype=torch.float32)
    if block_r is not None:
        routed = sort_pairs(routed, experts)
    tiling = ExpertTiling(16, 32, block_r)
    between = gated_experts(x, gate_up[:, :inner], gate_up[:, inner:], routed, activation, tiling)
    found = down_experts(between, down, routed, tiling)
    expected = expected_experts(x, gate_up, down, routed.experts, routed.weights, activation)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


def test_an_experts_blocks_are_shared_out_among_its_programs() -> None:
    x, gate_up, down = torch.randn(70, 32), torch.randn(2, 32, 32), torch.randn(2, 32, 16)
    routed = sort_pairs(choose_experts(torch.randn(1, 70, 2), 2, is_normed=True, dtype=torch.float32), 2)
    found = []
    for programs in (1, 3, 7):
        tiling = ExpertTiling(16, 16, 16, programs=programs)
        between = gated_experts(x, gate_up[:, :16], gate_up[:, 16:], routed, "silu", tiling)
        found.append(down_experts(between, down, routed, tiling))
    expected = expected_experts(x, gate_up, down, routed.experts, routed.weights, "silu")
    for each in found:
        torch.testing.assert_close(each, expected, atol=1e-3, rtol=1e-4)


def test_what_a_weight_is_rounded_to_is_the_models_dtype() -> None:
    logits = torch.randn(1, 9, 16)
    routed = choose_experts(logits, 4, is_normed=True, dtype=torch.float16)
    chosen, weights = expected_choice(logits[0].half().float(), 4, True)
    assert torch.equal(routed.experts.long(), chosen)
    assert torch.equal(routed.weights, weights.half())
    assert F.softmax(logits, -1).isfinite().all()


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (128, 8), (512, 10), (4, 4)])
def test_a_block_holds_most_experts_pairs_and_fits_the_device(experts: int, top_k: int, itemsize: int) -> None:
    for rows in (*range(1, 70), 255, 256, 257, 1000, 1024, 8192):
        pairs = rows * top_k
        both = tilings_of(pairs, rows, experts, itemsize=itemsize)
        assert both[0].block_r == both[1].block_r  # the one reads what the other wrote, in its order
        if both[0].block_r is None:
            assert rows == 1 or pairs <= experts / 8
            continue
        if itemsize == 2:
            assert both[0].block_r == 128 or both[0].block_r >= 1.4 * pairs / experts
        for tiling, weights in zip(both, (2, 1), strict=True):
            stage = itemsize * tiling.block_k * (weights * tiling.block_n + (tiling.block_r or 0))
            assert tiling.stages * stage <= 220 << 10
