"""Mixtures of experts in few kernels: what takes the place of a block of router and experts, or of experts alone.

A block is four kernels, five where pairs are sorted: router product, choice, (sort,) gated product, down product. The
experts of a row are left unadded, as parts for the kernel that reads them (fused_layers.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from cache.attend.launch import next_power
from static_graphs.fused_layers import FusedLinear
from static_graphs.kernels.experts import (
    ExpertTiling,
    Routed,
    choose_experts,
    down_experts,
    gated_experts,
    sort_pairs,
)
from static_graphs.likeness import ACTIVATIONS, ROWS, SCALES, close, random_rows
from static_graphs.tilings import RULE, Product, Tilings

if TYPE_CHECKING:
    from static_graphs.model import LoadedModel

_ROUNDINGS = 0.4
"""What a router's weights may differ by in 16 bits, in eps: once or twice rounded, but not of logits that were not."""


class FusedExperts:
    """x [R, H] and where its rows go -> [R, TOP_K, H], to be added by the reader."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, activation: str) -> None:
        self.gate, self.up = gate_up.chunk(2, 1)  # [E, N, H] each
        self.down = down  # [E, H, N]
        self.activation = activation

    def __call__(self, x: torch.Tensor, routed: Routed) -> torch.Tensor:
        experts = self.down.shape[0]
        gated, down = tilings_of(routed.pairs, len(x), experts, itemsize=x.element_size())
        if gated.block_r is not None:
            routed = sort_pairs(routed, experts)
        inner = gated_experts(x, self.gate, self.up, routed, self.activation, gated)
        return down_experts(inner, self.down, routed, down)

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Any:
        """As transformers calls a module of experts: -> [R, H]."""
        routed = Routed(top_k_index.int().contiguous(), top_k_weights.contiguous())  # may be columns of a sort
        return self(hidden_states.contiguous(), routed).sum(1)


class FusedMixture:
    """x [R, H] -> [TOP_K, R, H], to be added by the reader."""

    def __init__(
        self, router: torch.Tensor, experts: FusedExperts, top_k: int, is_normed: bool, tilings: Tilings = RULE
    ) -> None:
        self.router = FusedLinear(router, tilings)  # [E, H]
        self.experts = experts
        self.top_k = top_k
        self.is_normed = is_normed

    @property
    def products(self) -> tuple[Product, ...]:
        return (self.router.product,)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        routed = choose_experts(self.router(x), self.top_k, is_normed=self.is_normed, dtype=x.dtype)
        return self.experts(x, routed).transpose(0, 1)


def tilings_of(pairs: int, rows: int, experts: int, *, itemsize: int = 2) -> tuple[ExpertTiling, ExpertTiling]:
    """How the gated and the down product of `rows` rows, so many pairs of row and expert, are cut.

    Measured on an H200 over the shapes of Qwen3-30B-A3B and Mixtral-8x7B from 1 to 8,192 rows, best of some 50 tilings.
    Few pairs rarely share an expert. Else a block holds half as many pairs again as an expert gets on average, so that
    most experts are read once; very long experts are shared out among programs.
    """
    if rows == 1 or pairs * 8 <= experts:
        return ExpertTiling(2, 1024), ExpertTiling(8, 256)
    each = pairs / experts
    block_r = min(128, max(16, next_power(int(1.5 * each))))
    if itemsize > 2:  # no matrix unit is exact: arithmetic is what it waits for
        return ExpertTiling(32, 32, min(block_r, 32), stages=2), ExpertTiling(32, 32, min(block_r, 32), stages=2)
    programs = min(4, max(1, int(each) // 128))
    return {
        16: (ExpertTiling(64, 128, 16, stages=3), ExpertTiling(128, 64, 16, stages=3)),
        32: (ExpertTiling(64, 64, 32, stages=3), ExpertTiling(128, 64, 32, stages=3)),
        64: (ExpertTiling(128, 64, 64, warps=8), ExpertTiling(128, 64, 64, warps=8)),
        128: (
            ExpertTiling(128, 64, 128, warps=8, programs=programs),
            ExpertTiling(128, 64, 128, stages=3, programs=programs),
        ),
    }[block_r]


def find_experts(
    model: LoadedModel, calls: dict[nn.Module, Any], left: dict[str, str]
) -> dict[nn.Module, FusedExperts]:
    """Every module of stacked experts that is, for each row and each of its experts, down(act(gate) * up)."""
    found: dict[nn.Module, FusedExperts] = {}
    for name, part in model.body.named_modules():
        parameters = dict(part.named_parameters())
        if parameters.keys() != {"gate_up_proj", "down_proj"} or any(
            weight.dim() != 3 for weight in parameters.values()
        ):
            continue
        gate_up, down = parameters["gate_up_proj"].data, parameters["down_proj"].data
        experts, hidden, inner = down.shape
        is_plain = gate_up.shape == (experts, 2 * inner, hidden) and gate_up.is_contiguous() and down.is_contiguous()
        if not is_plain or {gate_up.dtype, down.dtype} != {model.dtype}:
            left.setdefault(type(part).__name__, f"{name}: its weights are laid out in another way")
            continue
        if part not in calls or not _takes_pairs(calls[part]):
            left.setdefault(type(part).__name__, f"{name}: it is called in another way, or twice")
            continue
        for activation, act in ACTIVATIONS.items():
            if _computes(part, gate_up, down, act):
                found[part] = FusedExperts(gate_up, down, activation)
                break
        else:
            left.setdefault(type(part).__name__, f"{name}: they are not down(act(gate) * up)")
    return found


def find_mixtures(
    model: LoadedModel,
    calls: dict[nn.Module, Any],
    experts: dict[nn.Module, FusedExperts],
    left: dict[str, str],
    tilings: Tilings,
) -> dict[nn.Module, FusedMixture]:
    """Every block of a router and fused experts that is nothing else: the likeliest of a softmax over one product."""
    found: dict[nn.Module, FusedMixture] = {}
    for name, part in model.body.named_modules():
        children = [child for child in part.children() if any(True for _ in child.parameters())]
        inner = [child for child in children if child in experts]
        if not inner:
            continue
        router = next((child for child in children if child not in experts), None)
        if len(children) != 2 or router is None or part not in calls:
            left.setdefault(type(part).__name__, f"{name}: it has other parts than a router and experts, or runs twice")
            continue
        if not _takes_rows(calls[part], 3) or router not in calls or not _takes_rows(calls[router], 2):
            left.setdefault(type(part).__name__, f"{name}: it or its router is given something else than rows alone")
            continue
        (fused,) = inner
        reason, mixture = _mixture_of(model, part, router, experts[fused], calls[fused], tilings)
        if mixture is None:
            left.setdefault(type(part).__name__, f"{name}: {reason}")
        else:
            found[part] = mixture
    return found


def _mixture_of(
    model: LoadedModel, part: nn.Module, router: nn.Module, experts: FusedExperts, call: Any, tilings: Tilings
) -> tuple[str, FusedMixture | None]:
    """(why not, None), or the fused block."""
    parameters = dict(router.named_parameters())
    count, hidden, _ = experts.down.shape
    weight = parameters.get("weight")
    if len(parameters) != 1 or weight is None or weight.shape != (count, hidden) or weight.dtype != model.dtype:
        return "its router is not one product", None
    top_k = next(each for each in (*call.args, *call.kwargs.values()) if not each.is_floating_point()).shape[-1]
    normed: bool | None = None
    turned = 0  # rows whose experts the kernel would not take: of equal ones it takes the first
    rounding = _ROUNDINGS * torch.finfo(model.dtype).eps
    for scale in SCALES:
        x = random_rows((ROWS, hidden), scale, model.dtype, model.device)
        chosen = _chosen(router(x), top_k)
        if chosen is None:
            return "its router does not tell its choice", None
        logits = functional.linear(x, weight).float()
        index, weights = chosen
        every = logits.softmax(-1)
        shares = every.gather(1, index)
        # By value: of equal ones, and of those that are nothing beside the first, a router may choose any.
        if not torch.allclose(shares, every.topk(top_k).values, rtol=1e-5, atol=1e-7):
            return "its router does not choose the likeliest", None
        turned += int((_among(index, every) != _among(_first(logits, top_k), every)).any(-1).sum())
        fitting = [
            is_normed
            for is_normed, expected in ((False, shares), (True, shares / shares.sum(-1, keepdim=True)))
            if close(weights.to(model.dtype), expected.to(model.dtype), rounding)
        ]
        if normed not in (None, *fitting) or not fitting:
            return "its router weighs in another way than by a softmax", None
        normed = fitting[0] if normed is None else normed
        act = ACTIVATIONS[experts.activation]
        expected = _plain_experts(x, experts.gate, experts.up, experts.down, act, index, weights.to(model.dtype))
        output = part(x[None])
        if not isinstance(output, torch.Tensor) or not close(output.view(x.shape), expected):
            return "it does something else beside its experts", None
    # Rounding to 16 bits makes a few experts equal by chance; where most rows differ, the whole model would.
    if turned > (0 if model.dtype == torch.float32 else ROWS * len(SCALES) // 2):
        return "its router takes others of equal experts than the first", None
    assert normed is not None
    return "", FusedMixture(weight.data, experts, top_k, normed, tilings)


def _takes_pairs(call: Any) -> bool:
    """Whether experts were given rows [R, H], and experts and weights [R, TOP_K], as `FusedExperts.forward` is."""
    names = ("hidden_states", "top_k_index", "top_k_weights")
    given = [*call.args, *(call.kwargs.get(name) for name in names[len(call.args) :])]
    if len(call.args) + len(call.kwargs) != 3 or not all(isinstance(t, torch.Tensor) and t.dim() == 2 for t in given):
        return False
    x, index, weights = given
    is_typed = [t.is_floating_point() for t in given] == [True, False, True]
    return is_typed and index.shape == weights.shape and len(index) == len(x)


def _takes_rows(call: Any, dims: int) -> bool:
    """Whether a part was given one tensor of so many dimensions, by position."""
    return (
        len(call.args) == 1
        and not call.kwargs
        and isinstance(call.args[0], torch.Tensor)
        and call.args[0].dim() == dims
    )


def _first(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """[R, top_k]: the choice of `choose_experts`."""
    return logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


def _among(index: torch.Tensor, every: torch.Tensor) -> torch.Tensor:
    """[R, E]: whether each expert is chosen, if it has a share that is something beside the first's."""
    return torch.zeros_like(every, dtype=torch.bool).scatter(1, index, value=True) & (every > 1e-6)


def _chosen(output: object, top_k: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Of what a router returns, experts and weights [R, top_k]: the integers, and the last of their shape beside."""
    tensors = [each for each in output if isinstance(each, torch.Tensor)] if isinstance(output, tuple) else []
    indices = [each for each in tensors if not each.is_floating_point() and each.shape == (ROWS, top_k)]
    weights = [each for each in tensors if each.is_floating_point() and each.shape == (ROWS, top_k)]
    return (indices[0].long(), weights[-1]) if len(indices) == 1 and weights else None


def _computes(
    part: nn.Module, gate_up: torch.Tensor, down: torch.Tensor, act: Callable[[torch.Tensor], torch.Tensor]
) -> bool:
    """Whether a module of experts is down(act(gate) * up) of each, weighed and added."""
    experts, hidden, _ = down.shape
    gate, up = gate_up.chunk(2, 1)
    top_k = min(2, experts)
    index = torch.arange(ROWS * top_k, device=down.device).view(ROWS, top_k) * max(1, experts // (ROWS * top_k))
    index = index % experts
    weights = torch.linspace(0.1, 0.9, ROWS * top_k, device=down.device).view(ROWS, top_k).to(down.dtype)
    for scale in SCALES:
        x = random_rows((ROWS, hidden), scale, down.dtype, down.device)
        try:
            found = part(x, index, weights)
        except (TypeError, RuntimeError):
            return False
        if not isinstance(found, torch.Tensor) or not close(
            found, _plain_experts(x, gate, up, down, act, index, weights)
        ):
            return False
    return True


def _plain_experts(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    act: Callable[[torch.Tensor], torch.Tensor],
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """x [R, H], index and weights [R, top_k] -> [R, H], a pair at a time."""
    rows = []
    for row, experts, by in zip(torch.split(x, 1), index.tolist(), weights.float(), strict=True):
        inner = [
            act(functional.linear(row, gate[expert]).float()) * functional.linear(row, up[expert]).float()
            for expert in experts
        ]
        pairs = [functional.linear(i.to(x.dtype), down[expert]) for i, expert in zip(inner, experts, strict=True)]
        rows.append((torch.cat(pairs).float() * by[:, None]).sum(0))
    return torch.stack(rows)
