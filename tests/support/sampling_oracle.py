"""One row at a time in float64, as plainly as the contracts read. Slow on purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def order(logits: Sequence[float]) -> list[int]:
    """Ids by falling logit, ties to the lower id."""
    return sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))


def softmax(logits: Sequence[float], temperature: float) -> NDArray[np.float64]:
    scaled = np.asarray(logits, np.float64) / temperature
    mass = np.exp(scaled - scaled.max())
    return mass / mass.sum()


@dataclass(frozen=True)
class CoinChoice:
    token_id: int
    gap: float
    """From the coin to the nearer end of the interval in which this id is chosen."""


def sample_row(logits: Sequence[float], temperature: float, top_p: float, top_k: float, coin: float) -> CoinChoice:
    """SAM-1..SAM-4."""
    if temperature <= 0:
        return CoinChoice(order(logits)[0], math.inf)
    probs = softmax(logits, temperature)
    if 0 < top_k < len(probs):
        kept = order(logits)[: int(top_k)]
    elif 0 < top_p < 1:
        kept, before = [], 0.0
        for token_id in order(logits):
            if before > top_p:
                break
            kept.append(token_id)
            before += probs[token_id]
    else:
        kept = list(range(len(probs)))
    ends = np.cumsum(probs[kept]) / probs[kept].sum()
    index = min(int(np.searchsorted(ends, coin, side="right")), len(kept) - 1)
    start = ends[index - 1] if index else 0.0
    return CoinChoice(kept[index], min(coin - start, ends[index] - coin))


def distribution(
    logits: Sequence[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> NDArray[np.float64]:
    """What the served sampler draws from: temperature, then top_k, top_p and min_p composed, renormalised."""
    probs = softmax(logits, temperature)
    kept = order(logits)[: top_k or None]
    total = probs[kept].sum()
    nucleus, before = [], 0.0
    for token_id in kept:
        if nucleus and before >= top_p * total:
            break
        nucleus.append(token_id)
        before += probs[token_id]
    answer = np.zeros_like(probs)
    for token_id in nucleus:
        if probs[token_id] >= min_p * probs.max():
            answer[token_id] = probs[token_id]
    return answer / answer.sum()


def chi_square_excess(counts: NDArray[np.int64], probs: NDArray[np.float64]) -> float:
    """Standard deviations by which the counts' chi-square passes its mean; rare tokens are pooled."""
    expected = probs * counts.sum()
    is_rare = expected < 5
    seen = np.append(counts[~is_rare], counts[is_rare].sum())
    due = np.append(expected[~is_rare], expected[is_rare].sum())
    seen, due = seen[due > 0], due[due > 0]
    freedom = max(1, len(due) - 1)
    return float((((seen - due) ** 2 / due).sum() - freedom) / math.sqrt(2 * freedom))
