"""The order of the sampler's steps (4.3), each pair told apart by what can be drawn at all and how often."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.sampling import Sampler
from engine.types import SamplingParams

DRAWS = 4000


def drawn(
    logits: list[float], params: SamplingParams, *, prompt: tuple[int, ...] = (), seed: int = 1
) -> dict[int, float]:
    """Token -> how often, of as many choices of one row."""
    sampler = Sampler(len(logits), torch.device("cpu"), 1)
    sampler.open(0, params, seed=seed, prompt=prompt)
    rows = torch.tensor([logits]).expand(DRAWS, -1)
    zeros = np.zeros(DRAWS, np.int64)
    ids = [token for token, _ in sampler.sample(rows, zeros, zeros + len(prompt), np.arange(DRAWS)).collect()]
    return {token: ids.count(token) / DRAWS for token in sorted(set(ids))}


def logs(*probabilities: float) -> list[float]:
    return [math.log(probability) for probability in probabilities]


@pytest.mark.parametrize(
    ("logits", "params", "support"),
    [
        # Temperature comes before top_p: at 0.5 the first token has 0.87 of it all, at 1 it has 0.67.
        ([2.0, 1.0, 0.0], {"temperature": 0.5, "top_p": 0.8}, {0}),
        ([2.0, 1.0, 0.0], {"temperature": 1.0, "top_p": 0.8}, {0, 1}),
        # top_k before top_p: of the two that are left the first has 0.57, of all it has 0.4.
        (logs(0.4, 0.3, 0.2, 0.1), {"top_k": 2, "top_p": 0.55}, {0}),
        (logs(0.4, 0.3, 0.2, 0.1), {"top_p": 0.55}, {0, 1}),
        # Temperature before min_p: at 2 the second has 0.61 of the first, at 1 it has 0.37.
        ([2.0, 1.0], {"temperature": 2.0, "min_p": 0.5}, {0, 1}),
        ([2.0, 1.0], {"temperature": 1.0, "min_p": 0.5}, {0}),
        # Bias before top_k, and penalties before it too.
        ([3.0, 2.0, 1.0], {"logit_bias": ((2, 5.0),), "top_k": 1}, {2}),
        ([3.0, 2.0, 1.0], {"repetition_penalty": 4.0, "top_k": 1}, {1}),
        # Masks before the filters: what is ruled out takes no place among the k.
        ([3.0, 2.0, 1.0], {"allowed_token_ids": (1, 2), "top_k": 1}, {1}),
        ([3.0, 2.0, 1.0], {"stop_token_ids": (0,), "min_tokens": 2, "top_k": 1}, {1}),
        ([3.0, 2.0, 1.0], {"bad_words": ((0,),), "top_k": 1}, {1}),
        # Bias before the repetition penalty: (1 + 1) / 2 = 1 stays behind 1.2, 1 / 2 + 1 would not.
        ([1.0, 1.2], {"logit_bias": ((0, 1.0),), "repetition_penalty": 2.0, "top_k": 1}, {1}),
    ],
)
def test_4_3_steps_come_in_their_order(logits: list[float], params: dict[str, object], support: set[int]) -> None:
    """bias, penalties, masks, temperature, top_k, top_p, min_p."""
    assert set(drawn(logits, SamplingParams(**params), prompt=(0,))) == support


def test_4_3_what_is_left_is_drawn_as_often_as_its_share_says() -> None:
    logits = logs(0.4, 0.3, 0.2, 0.06, 0.04)
    params = SamplingParams(temperature=0.7, top_k=4, top_p=0.97, min_p=0.1)
    weights = [math.exp(value / 0.7) for value in logits[:3]]  # the fourth is cut by min_p
    found = drawn(logits, params)
    assert set(found) == {0, 1, 2}
    for token, weight in enumerate(weights):
        share = weight / sum(weights)
        assert found[token] == pytest.approx(share, abs=4 * math.sqrt(share / DRAWS))


@pytest.mark.parametrize(
    ("params", "token"),
    [
        ({}, 1),  # the lower id of two that are equal
        ({"logit_bias": ((3, 3.0),)}, 3),
        ({"frequency_penalty": 2.0}, 1),  # the prompt is not counted
        ({"repetition_penalty": 2.0}, 2),  # the prompt is
        ({"allowed_token_ids": (0, 3)}, 0),
        ({"bad_words": ((1,),)}, 2),
        ({"stop_token_ids": (1,), "min_tokens": 1}, 2),
        ({"stop_token_ids": (1,), "min_tokens": 0}, 1),
        # Filters say nothing where nothing is drawn by chance.
        ({"top_k": 1}, 1),
        ({"top_p": 0.0}, 1),
        ({"min_p": 1.0}, 1),
    ],
)
def test_4_3_greedy_obeys_bias_penalties_and_masks_and_takes_the_lowest_id(
    params: dict[str, object], token: int
) -> None:
    logits = [2.0, 4.0, 4.0, 1.5]
    assert drawn(logits, SamplingParams(temperature=0.0, **params), prompt=(1,)) == {token: 1.0}


def test_4_3_a_top_k_of_none_or_of_all_is_off() -> None:
    whole = drawn([1.0, 0.5, 0.0], SamplingParams())
    assert set(whole) == {0, 1, 2}
    for top_k in (3, 4):
        assert drawn([1.0, 0.5, 0.0], SamplingParams(top_k=top_k)) == whole
