"""A mixture of experts by plain torch, one pair of row and expert at a time."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def expected_choice(logits: torch.Tensor, top_k: int, is_normed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [R, E] f32 -> (experts [R, top_k], weights), of equal logits the first expert before the others."""
    chosen = torch.sort(logits, descending=True, stable=True).indices[:, :top_k]
    weights = torch.softmax(logits, -1).gather(1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True) if is_normed else weights


def expected_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """x [R, H], gate_up [E, 2 * I, H], down [E, H, I], experts and weights [R, K] -> [R, K, H], in x's dtype."""
    rows = []
    for row, chosen, by in zip(x, experts.tolist(), weights, strict=True):
        pairs = []
        for expert, weight in zip(chosen, by, strict=True):
            gate, up = (gate_up[expert] @ row).chunk(2)
            act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
            pairs.append(down[expert] @ (act * up) * weight)
        rows.append(torch.stack(pairs))
    return torch.stack(rows)
