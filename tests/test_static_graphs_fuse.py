"""Lowering loaded models: what is recognised, what is left, and that nothing changes but the number of kernels."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="needs triton: pip install triton")
if torch.cuda.is_available():
    pytest.skip("the kernels run compiled here, in tests/gpu/test_gpu_fuse.py", allow_module_level=True)

from static_graphs.fuse import fuse
from static_graphs.model import LoadedModel, model_from_config
from static_graphs.tiny_config import tiny_config
from support.packed_runs import PackedRun
from support.tiny_models import tiny


def logits(model: LoadedModel) -> torch.Tensor:
    run = PackedRun(model, seed=0)
    a, b = run.open(), run.open()
    return torch.cat([run.step([(a, 5), (a, 9), (b, 40), (a, 2)], width=5), run.step([(b, 12), (a, 7)], width=3)])


@pytest.mark.parametrize(
    ("model_type", "layers", "attentions", "mlps", "norms"),
    [
        ("llama", 2, 2, 2, 5),
        ("qwen2", 2, 2, 2, 5),
        ("qwen3", 2, 2, 2, 9),
        pytest.param("mistral", 2, 2, 2, 5, marks=pytest.mark.full),
        ("phi3", 2, 2, 2, 5),
        ("gemma2", 0, 2, 2, 9),  # four norms a layer
        pytest.param("gemma3_text", 0, 2, 2, 13, marks=pytest.mark.full),
        pytest.param("granite", 0, 2, 2, 5, marks=pytest.mark.full),  # scaled residuals
        ("olmo2", 0, 0, 2, 9),  # head norms over all heads at once
        ("qwen3_moe", 2, 2, 0, 9),
        ("gpt_neox", 0, 0, 0, 0),
    ],
)
def test_what_is_recognised_is_fused_and_gives_the_same_logits(
    model_type: str, layers: int, attentions: int, mlps: int, norms: int
) -> None:
    config = tiny(model_type)
    expected = logits(model_from_config(config, seed=3))
    model = model_from_config(config, seed=3)
    report = fuse(model)
    assert (report.layers, report.attentions, report.mlps, report.norms) == (layers, attentions, mlps, norms), report
    torch.testing.assert_close(logits(model), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("model_type", "mixtures", "experts", "left"),
    [
        ("qwen3_moe", 4, 4, {}),
        ("mixtral", 4, 4, {}),
        ("olmoe", 4, 4, {}),  # weights that do not add up to 1
        ("qwen2_moe", 0, 4, {"Qwen2MoeSparseMoeBlock": "it has other parts than a router and experts"}),
        ("gpt_oss", 0, 0, {}),  # biases, and a gate of its own
        ("minimax_m2", 0, 4, {"MiniMaxM2SparseMoeBlock": "it or its router is given something else than rows alone"}),
    ],
)
def test_mixtures_are_fused_or_else_the_experts_in_them(
    model_type: str, mixtures: int, experts: int, left: dict[str, str]
) -> None:
    config = tiny_config(model_type)
    expected = logits(model_from_config(config, seed=3))
    model = model_from_config(config, seed=3)
    report = fuse(model)
    assert (report.mixtures, report.experts) == (mixtures, experts), report
    for part, reason in left.items():
        assert reason in report.left[part]
    torch.testing.assert_close(logits(model), expected, atol=2e-5, rtol=2e-5)


def test_merged_weights_are_one_storage_of_which_the_modules_parameters_are_views() -> None:
    model = model_from_config(tiny("llama"), seed=3)
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    fuse(model)
    after = model.module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    layer = model.body.layers[0]
    for group in (
        [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj],
        [layer.mlp.gate_proj, layer.mlp.up_proj],
    ):
        assert len({linear.weight.untyped_storage().data_ptr() for linear in group}) == 1


def test_a_call_without_a_step_runs_the_modules_own_forward() -> None:
    config = tiny("qwen3")
    own, fused = model_from_config(config, seed=3), model_from_config(config, seed=3)
    fuse(fused)
    for model in (own, fused):
        model.module.set_attn_implementation("eager")
    tokens = torch.tensor([[5, 9, 40, 2]])
    with torch.no_grad():
        torch.testing.assert_close(fused.module(tokens).logits, own.module(tokens).logits)


def break_norm(model: Any) -> None:
    """LayerNorm-like: subtracts the mean."""
    norm = model.body.layers[0].input_layernorm
    own = norm.forward
    norm.forward = lambda x: own(x - x.mean(-1, keepdim=True))


def break_mlp(model: Any) -> None:
    """A clamp that no ordinary activation reaches."""
    mlp = model.body.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda x: own(x.clamp(-20, 20))


def break_attention(model: Any) -> None:
    attention = model.body.layers[0].self_attn
    own = attention.q_proj.forward
    attention.q_proj.forward = lambda x: own(x).clamp(-50, 50)


def break_layer(model: Any) -> None:
    """The second residual is taken before the first sum."""
    layer = model.body.layers[0]
    own = layer.forward
    layer.forward = lambda x, **kwargs: own(x, **kwargs) + 0.01 * x


@pytest.mark.parametrize(
    ("damage", "missing"),
    [
        (break_norm, {"layers": 1, "norms": 1}),
        (break_mlp, {"mlps": 1}),
        (break_attention, {"layers": 1, "attentions": 1}),
        (break_layer, {"layers": 1}),
    ],
)
def test_a_part_that_does_something_else_is_left_as_it_is(damage: Any, missing: dict[str, int]) -> None:
    """One layer of the two is changed in a way that its structure does not show."""
    changed, expected_of = (model_from_config(tiny("llama"), seed=3) for _ in range(2))
    damage(changed)
    damage(expected_of)
    expected = logits(expected_of)
    report = fuse(changed)
    full = {"layers": 2, "attentions": 2, "mlps": 2, "norms": 5}
    assert {key: getattr(report, key) for key in full} == {key: full[key] - missing.get(key, 0) for key in full}
    torch.testing.assert_close(logits(changed), expected, atol=2e-5, rtol=2e-5)


def break_experts(model: Any) -> None:
    """A clamp that no ordinary activation reaches."""
    experts = model.body.layers[0].mlp.experts
    own = experts.forward
    experts.forward = lambda x, index, weights: own(x.clamp(-20, 20), index, weights)


def break_router(model: Any) -> None:
    """The second choice before the first where both are unlikely: told apart by large rows alone."""
    router = model.body.layers[0].mlp.gate
    own = router.forward

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores, weights, index = own(x)
        return scores, weights * torch.where(x.abs().amax(-1, keepdim=True) > 20, 1.1, 1.0), index

    router.forward = forward


def break_block(model: Any) -> None:
    """What is beside the experts."""
    block = model.body.layers[0].mlp
    own = block.forward
    block.forward = lambda x: own(x) + 0.01 * x


def routed_by(model: Any, use: Any) -> None:
    """A block whose experts are used by `use(block, rows, weights, index)`."""
    block = model.body.layers[0].mlp

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, x.shape[-1])
        _, weights, index = block.gate(rows)
        out: torch.Tensor = use(block, rows, weights, index)
        return out.view(x.shape)

    block.forward = forward


def name_experts_arguments(model: Any) -> None:
    experts = model.body.layers[0].mlp.experts
    own = experts.forward
    experts.forward = lambda x, chosen, shares: own(x, chosen, shares)
    routed_by(model, lambda block, x, weights, index: block.experts(x, chosen=index, shares=weights))


def swap_experts_arguments(model: Any) -> None:
    experts = model.body.layers[0].mlp.experts
    own = experts.forward
    experts.forward = lambda x, shares, chosen: own(x, chosen, shares)
    routed_by(model, lambda block, x, weights, index: block.experts(x, weights, index))


def call_experts_twice(model: Any) -> None:
    routed_by(model, lambda block, x, weights, index: block.experts(block.experts(x, index, weights), index, weights))


def add_experts(model: Any) -> None:
    block = model.body.layers[0].mlp
    block.more = deepcopy(block.experts)
    routed_by(
        model, lambda block, x, weights, index: block.experts(x, index, weights) + block.more(x, index, 2 * weights)
    )


def add_router_argument(model: Any) -> None:
    block = model.body.layers[0].mlp
    own = block.gate.forward
    block.gate.forward = lambda x, bias: own(x)

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, x.shape[-1])
        _, weights, index = block.gate(rows, 0.0)
        out: torch.Tensor = block.experts(rows, index, weights)
        return out.view(x.shape)

    block.forward = forward


class Caller(torch.nn.Module):
    """Calls a block in a way of its own."""

    def __init__(self, block: torch.nn.Module, call: Any) -> None:
        super().__init__()
        self.block, self.call = block, call

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(self.block, x)


def name_block_argument(model: Any) -> None:
    layer = model.body.layers[0]
    layer.mlp = Caller(layer.mlp, lambda block, x: block(hidden_states=x))


def add_block_argument(model: Any) -> None:
    layer = model.body.layers[0]
    own = layer.mlp.forward
    layer.mlp.forward = lambda x, by=1.0: own(x) * by
    layer.mlp = Caller(layer.mlp, lambda block, x: block(x, 2.0))


def even_router(model: Any) -> None:
    """All experts are equally likely, and torch does not choose the first ones."""
    model.body.layers[0].mlp.gate.weight.data.zero_()


@pytest.mark.parametrize(
    ("damage", "experts", "reason"),
    [
        (name_experts_arguments, 1, "it is called in another way"),
        (swap_experts_arguments, 1, "it is called in another way"),
        (call_experts_twice, 1, "it is called in another way, or twice"),
        (add_experts, 3, "it has other parts than a router and experts"),
        (add_router_argument, 2, "it or its router is given something else than rows alone"),
        (name_block_argument, 2, "it or its router is given something else than rows alone"),
        (add_block_argument, 2, "it or its router is given something else than rows alone"),
        (even_router, 2, "its router takes others of equal experts than the first"),
        (break_experts, 1, "they are not down(act(gate) * up)"),
        (break_router, 2, "its router weighs in another way than by a softmax"),
        (break_block, 2, "it does something else beside its experts"),
    ],
)
def test_a_mixture_that_does_something_else_is_left_as_it_is(damage: Any, experts: int, reason: str) -> None:
    changed, expected_of = (model_from_config(tiny("qwen3_moe"), seed=3) for _ in range(2))
    damage(changed)
    damage(expected_of)
    expected = logits(expected_of)
    report = fuse(changed)
    assert (report.mixtures, report.experts) == (1, experts)
    assert any(reason in each for each in report.left.values()), report
    torch.testing.assert_close(logits(changed), expected, atol=2e-5, rtol=2e-5)


def test_experts_take_rows_and_weights_that_are_columns_of_something_wider() -> None:
    def use(block: Any, x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        wider = torch.cat([weights, -weights], 1)[:, :2]
        out: torch.Tensor = block.experts(x.T.contiguous().T, index.T.contiguous().T, wider)
        return out + 0.1 * x

    changed, expected_of = (model_from_config(tiny("qwen3_moe"), seed=3) for _ in range(2))
    routed_by(changed, use)
    routed_by(expected_of, use)
    expected = logits(expected_of)
    assert fuse(changed).experts == 2
    torch.testing.assert_close(logits(changed), expected, atol=2e-5, rtol=2e-5)


def test_a_router_that_does_not_round_its_logits_is_left_as_it_is() -> None:
    """In float32 beside a model of 16 bits: it tells experts apart that are equal to the kernel."""
    model = model_from_config(tiny("qwen3_moe", num_experts=32), dtype=torch.float16, seed=3)
    body: Any = model.body
    router = body.layers[0].mlp.gate

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = F.linear(x.float(), router.weight.float())
        weights, index = scores.softmax(-1).topk(router.top_k, -1)
        return scores, (weights / weights.sum(-1, keepdim=True)).to(x.dtype), index

    router.forward = forward
    report = fuse(model)
    assert (report.mixtures, report.experts) == (1, 2)
    assert "another way than by a softmax" in report.left["Qwen3MoeSparseMoeBlock"]
