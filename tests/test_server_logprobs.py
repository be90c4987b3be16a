"""The shapes of log probabilities, one rule of api 4.1 a test."""

from __future__ import annotations

import math

from engine.types import TokenLogprobs
from server import logprobs
from server.text import Text

NO_TEXT = Text(None)


def name(token_id: int) -> str:
    """Ids 7 and 8 read the same."""
    return {7: "same", 8: "same"}.get(token_id, str(token_id))


def top_of(entry: TokenLogprobs, num_top: int) -> dict[str, float]:
    (top,) = logprobs.legacy([entry], [0], num_top, name, [entry.token_id])["top_logprobs"]
    assert isinstance(top, dict)
    return top


def test_4_1_k_alternatives_and_one_more_when_the_drawn_token_is_outside_of_them() -> None:
    top = ((1, -0.5), (2, -1.0), (3, -2.0))
    assert top_of(TokenLogprobs(2, -1.0, top), 2) == {"1": -0.5, "2": -1.0}
    assert top_of(TokenLogprobs(9, -7.0, top), 2) == {"1": -0.5, "2": -1.0, "9": -7.0}


def test_4_1_of_two_ids_with_one_text_the_likelier_is_kept() -> None:
    assert top_of(TokenLogprobs(8, -3.0, ((7, -0.5), (8, -3.0))), 2) == {"same": -0.5}


def test_4_1_what_is_impossible_is_at_the_floor_in_every_shape() -> None:
    entry = TokenLogprobs(5, -math.inf, ((1, 0.0), (2, -math.inf)))
    legacy = logprobs.legacy([entry], [0], 2, name, [5])
    assert legacy["token_logprobs"] == [-9999.0]
    assert legacy["top_logprobs"] == [{"1": 0.0, "2": -9999.0, "5": -9999.0}]
    (content,) = logprobs.chat([entry], 2, NO_TEXT, name)["content"]
    assert [content["logprob"], *(top["logprob"] for top in content["top_logprobs"])] == [-9999.0, 0.0, -9999.0]
    (of_prompt,) = logprobs.of_prompt([entry], 1, NO_TEXT)
    assert of_prompt is not None
    assert {value["logprob"] for value in of_prompt.values()} == {0.0, -9999.0}
