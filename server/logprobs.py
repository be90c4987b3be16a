"""The three shapes in which answers carry log probabilities: legacy completions, chats, and prompt_logprobs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from engine.types import TokenLogprobs
from server.text import Text, token_id_name

Name = Callable[[int], str]
"""Token id -> what an answer calls it."""

_FLOOR = -9999.0
"""JSON has no infinity: where a token is impossible."""


def token_name(text: Text, *, as_ids: bool) -> Name:
    return token_id_name if as_ids else text.token_text


def legacy(
    entries: Sequence[TokenLogprobs | None], offsets: Sequence[int], num_top: int, name: Name, token_ids: Sequence[int]
) -> dict[str, Any]:
    """Parallel lists. entries: None for a prompt's first token, whose id `token_ids` knows.

    num_top 0 leaves the drawn token itself in top_logprobs; so does a drawn token outside the top.
    """
    return {
        "tokens": [name(token_id) for token_id in token_ids],
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": [None if entry is None else _top(entry, num_top, name) for entry in entries],
        "text_offset": list(offsets),
    }


def joined(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Two legacy objects as one."""
    return {key: first[key] + then[key] for key in first}


def chat(entries: Sequence[TokenLogprobs], num_top: int, text: Text, name: Name) -> dict[str, Any]:
    def one(token_id: int, logprob: float) -> dict[str, Any]:
        # The token's own bytes: those of its text would be U+FFFD's where it is a part of a character.
        return {"token": name(token_id), "logprob": _finite(logprob), "bytes": list(text.token_bytes(token_id))}

    content = [
        {**one(entry.token_id, entry.logprob), "top_logprobs": [one(*top) for top in entry.top[:num_top]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def of_prompt(entries: Sequence[TokenLogprobs | None], num_top: int, text: Text) -> list[dict[str, Any] | None]:
    """For each prompt token a map of ids, its own among them; rank is null where it is beyond what was asked."""

    def one(entry: TokenLogprobs) -> dict[str, Any]:
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, start=1)}
        values = {**dict(entry.top[:num_top]), entry.token_id: entry.logprob}
        return {
            str(token_id): {
                "logprob": _finite(logprob),
                "rank": ranks.get(token_id),
                "decoded_token": text.token_text(token_id),
            }
            for token_id, logprob in values.items()
        }

    return [None if entry is None else one(entry) for entry in entries]


def _top(entry: TokenLogprobs, num_top: int, name: Name) -> dict[str, float]:
    """Largest first, so that of two tokens with one text the likelier stays."""
    top: dict[str, float] = {}
    for token_id, logprob in (*entry.top[:num_top], (entry.token_id, entry.logprob)):
        top.setdefault(name(token_id), _finite(logprob))
    return top


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _FLOOR
