"""What a server answers to a Case, as a recording keeps it, and as far as two servers can be compared.

answer = ask(client, case)         {"status": 200, "body": {...}}, or "frames" in place of "body" for a stream
comparable(answer, is_drawn)       the same with a stream's frames joined, and words that nobody agrees on taken out
differences(theirs, ours)          where the two differ
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from differential.corpus import Case

VOLATILE = ("id", "created", "system_fingerprint", "started", "max_model_len")
"""Of an answer and of each of its frames. The length is a setting of the servers, not their doing."""

OF_ONE_MACHINE = ("name_or_path", "root", "permission")
"""Paths, and what holds ids: only their types are kept."""

LOGPROB_TOLERANCE = 2e-3
"""Two programs add float32 in different orders."""

ABSENT = "(absent)"


def ask(client: httpx.Client, case: Case) -> dict[str, Any]:
    sent: dict[str, Any] = {"content": case.body} if isinstance(case.body, bytes) else {"json": case.body}
    response = client.request(case.method, case.path, headers=case.headers, **({} if case.body is None else sent))
    answer: dict[str, Any] = {"status": response.status_code}
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        return answer | {"frames": [_steady(event) for event in _events(response.text)]}
    try:
        body = response.json()
    except ValueError:
        body = response.text
    return answer | {"body": _steady(body)}


def comparable(answer: dict[str, Any], *, is_drawn: bool) -> dict[str, Any]:
    """`answer` from `ask`. Messages of errors become their type; so does every leaf of a drawn choice."""
    answer = copy.deepcopy(answer)
    told: dict[str, Any] = {"status": answer["status"]}
    if "frames" in answer:
        told["stream"] = _joined(answer["frames"])
    else:
        told["body"] = answer["body"]
    for body in (told.get("body"), *told.get("stream", {}).get("errors", ())):
        if isinstance(body, dict) and isinstance(body.get("error"), dict):
            body["error"] = {**body["error"], "message": type(body["error"].get("message")).__name__}
    if is_drawn:
        place = told["stream"] if "stream" in told else told["body"]
        if isinstance(place, dict):
            place.update(_shape({"choices": place["choices"]} if "choices" in place else place))
    return told


@dataclass(frozen=True)
class Difference:
    """path: dotted, a list's places as numbers. theirs, ours: JSON, ABSENT where one side has nothing there."""

    case: str
    path: str
    theirs: Any
    ours: Any

    def __str__(self) -> str:
        return f"{self.case} | {self.path} | theirs {_brief(self.theirs)} | ours {_brief(self.ours)}"


def differences(case: str, theirs: Any, ours: Any, path: str = "") -> Iterator[Difference]:
    """theirs, ours: from `comparable`. Answers of two statuses differ in that alone."""
    if not path and theirs["status"] != ours["status"]:
        yield Difference(case, "status", theirs["status"], ours["status"])
    elif isinstance(theirs, dict) and isinstance(ours, dict):
        for key in {**theirs, **ours}:
            below = f"{path}.{key}" if path else key
            yield from differences(case, theirs.get(key, ABSENT), ours.get(key, ABSENT), below)
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for number, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            yield from differences(case, one, other, f"{path}.{number}")
    elif not _same(theirs, ours):
        yield Difference(case, path, theirs, ours)


def _same(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, float) and isinstance(ours, float):
        return math.isclose(theirs, ours, abs_tol=LOGPROB_TOLERANCE, rel_tol=LOGPROB_TOLERANCE)
    return type(theirs) is type(ours) and theirs == ours


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:157]}..."


def _events(text: str) -> list[Any]:
    """The data of each event: JSON, or the word it is."""
    datas = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


def _steady(body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    steady = {key: value for key, value in body.items() if key not in VOLATILE}
    steady |= {key: type(steady[key]).__name__ for key in OF_ONE_MACHINE if key in steady}
    if isinstance(steady.get("data"), list):
        steady["data"] = [_steady(entry) for entry in steady["data"]]
    for choice in steady.get("choices", ()):
        calls = (choice.get("message") or choice.get("delta") or {}).get("tool_calls") or ()
        for call in calls:
            if call.get("id") is not None:
                call["id"] = "an id"
    return steady


def _joined(frames: list[Any]) -> dict[str, Any]:
    """A stream as one answer: how it is cut into frames is each server's own affair, what they say together is not."""
    chunks = [frame for frame in frames if isinstance(frame, dict) and "choices" in frame]
    told: dict[str, Any] = {
        "is_ended": bool(frames) and frames[-1] == "[DONE]",
        "errors": [frame for frame in frames if isinstance(frame, dict) and "error" in frame],
        "objects": sorted({str(chunk.get("object")) for chunk in chunks}),
        "keys": sorted({key for chunk in chunks for key in chunk}),
        "choices": {},
        "usage_frames": [chunk["usage"] for chunk in chunks if not chunk["choices"]],
        "usages": sorted({type(chunk.get("usage")).__name__ for chunk in chunks if chunk["choices"]}),
    }
    for chunk in chunks:
        for choice in chunk["choices"]:
            joined = told["choices"].setdefault(str(choice["index"]), {"frames_without_news": 0, "finish_reasons": []})
            _join_choice(joined, choice)
            for key in ("prompt_token_ids",):  # a chat's are beside its choices
                if chunk.get(key):
                    joined[key] = chunk[key]
    return told


def _join_choice(joined: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice.get("delta", {"text": choice.get("text")})
    has_news = any(delta.get(key) for key in ("text", "content", "tool_calls", "role")) or choice["finish_reason"]
    joined["frames_without_news"] += not has_news
    joined["keys"] = sorted({*joined.get("keys", ()), *choice})
    for key in ("text", "content", "reasoning"):
        if delta.get(key) is not None:
            joined[key] = joined.get(key, "") + delta[key]
    if delta.get("role"):
        joined["role"] = [*joined.get("role", ()), delta["role"]]
    for call in delta.get("tool_calls") or ():
        calls = joined.setdefault("tool_calls", {})
        known = calls.setdefault(str(call["index"]), {"arguments": ""})
        known.update({key: call[key] for key in ("id", "type") if call.get(key)})
        function = call.get("function") or {}
        known.update({"name": function["name"]} if function.get("name") else {})
        known["arguments"] += function.get("arguments") or ""
    for key, value in (choice.get("logprobs") or {}).items():
        if isinstance(value, list):
            joined.setdefault("logprobs", {}).setdefault(key, []).extend(value)
    for key in ("token_ids", "prompt_token_ids"):
        if choice.get(key):
            joined[key] = joined.get(key, []) + choice[key]
    if choice["finish_reason"] is not None:
        joined["finish_reasons"].append(choice["finish_reason"])
        joined["stop_reason"] = choice.get("stop_reason")


def _shape(value: Any) -> Any:
    """Keys and types. A list is the shapes that are in it, and so is a map of tokens."""
    if isinstance(value, dict):
        return {
            key: [_shape(list(entry.values())) for entry in below] if _are_token_maps(key, below) else _shape(below)
            for key, below in value.items()
        }
    if isinstance(value, list):
        shapes = {json.dumps(_shape(entry), sort_keys=True) for entry in value}
        return [json.loads(shape) for shape in sorted(shapes)]
    return type(value).__name__


def _are_token_maps(key: str, value: Any) -> bool:
    return key == "top_logprobs" and isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
