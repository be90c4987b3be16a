"""Reading a stream of events as a client does, strictly."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx


def _no_constants(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


def strict_json(text: str) -> Any:
    """Refuses NaN and Infinity, which Python would read."""
    return json.loads(text, parse_constant=_no_constants)


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """One object an event up to [DONE], which must come, and nothing behind it."""
    is_done = False
    for line in lines:
        assert not is_done or not line, f"behind the end: {line!r}"
        if line == "data: [DONE]":
            is_done = True
        elif line.startswith("data: "):
            yield strict_json(line.removeprefix("data: "))
        else:
            assert not line or line.startswith(":"), line
    assert is_done, "the stream broke off"


def post_stream(http: httpx.Client, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Send, and read the whole stream."""
    with http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        return list(events(answer.iter_lines()))


def joined_choices(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What each index said in all, in the shape of the whole answer's choices; it must end exactly once."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            text = part["text"] if "text" in part else part["delta"].get("content", "")
            whole = choices.setdefault(part["index"], {"text": "", "finish_reason": None})
            assert whole["finish_reason"] is None, "news after the end"
            whole["text"] += text
            whole |= {key: part[key] for key in ("finish_reason", "stop_reason")}
            for key in ("logprobs", "token_ids"):
                if part.get(key) is not None:
                    whole[key] = _added(whole.get(key), part[key])
    assert all(choice["finish_reason"] in ("stop", "length") for choice in choices.values())
    return choices


def _added(before: Any, more: Any) -> Any:
    if before is None:
        return more
    if isinstance(more, dict):
        return {key: _added(before[key], more[key]) for key in more}
    return before + more


def without_cached(usage: Mapping[str, Any]) -> dict[str, Any]:
    """A usage but for what was computed before: a request that is sent again finds more."""
    return {key: value for key, value in usage.items() if key != "prompt_tokens_details"}
