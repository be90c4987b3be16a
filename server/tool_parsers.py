"""Calls of functions in the text a model writes, whatever pieces the text comes in.

A parser takes text and gives back content and finished calls, in order. It holds back only what may still turn out to
be a call, and what looked like one and is none comes out as the text it was: nothing is lost and nothing made up.
One parser reads one answer. What it yields for a text does not depend on how the text was cut.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

ToolFormat = Literal["hermes", "llama3_json", "mistral"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """A JSON object, as text."""


MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
"""Tokens that parsers must see, special or not."""

Event = str | ToolCall
"""Content, never empty, or a whole call."""


class ToolParser(Protocol):
    def push(self, text: str) -> list[Event]:
        """More of the answer."""
        ...

    def finish(self) -> list[Event]:
        """The answer has ended."""
        ...


def parser_of(form: ToolFormat, names: Collection[str]) -> ToolParser:
    """For an answer that may hold calls of these functions, and text beside them."""
    match form:
        case "hermes":
            return HermesParser(names)
        case "llama3_json":
            return WholeParser(lambda text: _llama_calls(text, names), opens_with=("{", "<|python_tag|>"))
        case "mistral":
            return WholeParser(lambda text: _mistral_calls(text, names), marker=_MISTRAL)


def named_parser(name: str) -> ToolParser:
    """For an answer that is the arguments of this function, held to them by a grammar."""
    return WholeParser(lambda text: [_call(name, json.loads(text, **_STRICT), [name])])


def required_parser(names: Collection[str]) -> ToolParser:
    """For an answer that is a list of calls, held to it by a grammar: [{"name": ..., "parameters": {...}}]."""
    return WholeParser(lambda text: [_call_of(item, names) for item in json.loads(text, **_STRICT)])


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MISTRAL = "[TOOL_CALLS]"


class HermesParser:
    """As Hermes and Qwen write them: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, any number, in text.

    Spaces before a call, and behind the last one, are dropped.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._is_inside = False
        self._before = ""  # spaces before the call that is being read
        self._looked = 0  # of what is held inside, characters already searched for the end
        self._had_call = False

    def push(self, text: str) -> list[Event]:
        self._held += text
        return _joined(self._events())

    def finish(self) -> list[Event]:
        text, self._held = self._held, ""
        if self._is_inside:  # a call may be the answer's last word, its end cut off as a stop string is
            calls = self._calls(text)
            return [self._before + _OPEN + text] if calls is None else list(calls)
        return [text] if text and not (self._had_call and text.isspace()) else []

    def _events(self) -> Iterator[Event]:
        while True:
            if not self._is_inside:
                at = self._held.find(_OPEN)
                sure = self._held[:at] if at >= 0 else self._held[: len(self._held) - _overlap(self._held, _OPEN)]
                content = sure.rstrip()
                if content:
                    yield content
                if at < 0:
                    self._held = self._held[len(content) :]
                    return
                self._before = sure[len(content) :]
                self._held = self._held[at + len(_OPEN) :]
                self._is_inside, self._looked = True, 0
            at = self._held.find(_CLOSE, self._looked)
            if at < 0:
                self._looked = max(0, len(self._held) - len(_CLOSE) + 1)
                return
            body = self._held[:at]
            calls = self._calls(body)
            if calls is None and _is_open_text(body):
                self._looked = at + 1  # the end's spelling stands in a string of the call
                continue
            if calls is None:
                yield self._before + _OPEN + body + _CLOSE
            else:
                self._had_call = True
                yield from calls
            self._held, self._is_inside = self._held[at + len(_CLOSE) :], False

    def _calls(self, body: str) -> list[ToolCall] | None:
        return _tried(lambda: [_call_of(json.loads(body, **_STRICT), self._names)])


class WholeParser:
    """For formats in which calls end with the answer: all of it is held from where they may begin."""

    def __init__(
        self,
        read: Callable[[str], list[ToolCall]],
        *,
        marker: str | None = None,
        opens_with: tuple[str, ...] = ("",),
    ) -> None:
        """read: raises ValueError for what is no call. marker: text before it is content; without one, an answer that
        begins with none of `opens_with`, behind spaces, is content as a whole.
        """
        self._read = read
        self._marker = marker
        self._opens_with = opens_with
        self._held: list[str] = []
        self._state: Literal["open", "content", "calls"] = "open"

    def push(self, text: str) -> list[Event]:
        if self._state == "content":
            return [text] if text else []
        self._held.append(text)
        if self._state == "calls":
            return []
        whole = "".join(self._held)
        content = self._content(whole)
        self._held = [whole[len(content) :]]
        return [content] if content else []

    def finish(self) -> list[Event]:
        text, self._held = "".join(self._held), []
        calls = _tried(lambda: self._read(text)) if self._state == "calls" else None
        return list(calls) if calls else [text] if text else []

    def _content(self, whole: str) -> str:
        """What of it is content for certain; decides the state where it can be known."""
        if self._marker is not None:
            at = whole.find(self._marker)
            if at >= 0:
                self._state = "calls"
                return whole[:at]
            return whole[: len(whole) - _overlap(whole, self._marker)]
        begun = whole.lstrip()
        if any(begun.startswith(opening) for opening in self._opens_with):
            self._state = "calls"
            return ""
        if any(opening.startswith(begun) for opening in self._opens_with):
            return ""
        self._state = "content"
        return whole


# --- what a call is


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number that JSON cannot carry on")
    return value


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_STRICT: dict[str, Any] = {"parse_float": _finite, "parse_constant": _no_constant}


def _call_of(value: Any, names: Collection[str]) -> ToolCall:
    """{"name": ..., "arguments" or "parameters": {...}}. Raises ValueError for anything else."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("no call")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments, **_STRICT)
    return _call(value["name"], arguments, names)


def _call(name: str, arguments: Any, names: Collection[str]) -> ToolCall:
    if name not in names:
        raise ValueError(f"there is no function {name}")
    if not isinstance(arguments, dict):
        raise ValueError("arguments are an object")
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _llama_calls(text: str, names: Collection[str]) -> list[ToolCall]:
    """One object, or several with semicolons or spaces between them."""
    return [_call_of(value, names) for value in _values(text.strip().removeprefix("<|python_tag|>"), ";")]


_MISTRAL_CALL = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[ARGS\])?\s*(?=\{)")


def _mistral_calls(text: str, names: Collection[str]) -> list[ToolCall]:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""
    calls: list[ToolCall] = []
    for part in text.split(_MISTRAL):
        named = _MISTRAL_CALL.match(part)
        if named:
            (arguments,) = _values(part[named.end() :])
            calls.append(_call(named[1], arguments, names))
        elif part.strip():
            (values,) = _values(part)
            calls += [_call_of(value, names) for value in (values if isinstance(values, list) else [values])]
    return calls


_decoder = json.JSONDecoder(**_STRICT)


def _values(text: str, separator: str = "") -> list[Any]:
    """The JSON values that follow one another in `text`."""
    values: list[Any] = []
    at = 0
    while True:
        while at < len(text) and (text[at].isspace() or text[at] in separator):
            at += 1
        if at == len(text):
            return values
        value, at = _decoder.raw_decode(text, at)
        values.append(value)


def _tried(read: Callable[[], list[ToolCall]]) -> list[ToolCall] | None:
    """None for what is no call."""
    try:
        return read()
    except (ValueError, RecursionError):
        return None


def _is_open_text(body: str) -> bool:
    """Whether `body` ends inside a JSON string."""
    return len(re.findall(r'"', re.sub(r"\\.", "", body, flags=re.DOTALL))) % 2 == 1


def _overlap(text: str, marker: str) -> int:
    """Characters at the end of `text` that may be the beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


def _joined(events: Iterator[Event]) -> list[Event]:
    """Neighbouring pieces of content as one."""
    joined: list[Event] = []
    for event in events:
        if isinstance(event, str) and joined and isinstance(joined[-1], str):
            joined[-1] += event
        else:
            joined.append(event)
    return joined
