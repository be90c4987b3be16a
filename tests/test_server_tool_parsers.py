"""Calls in the text of an answer: each format's spellings, and that it never matters how the text is cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.tool_parsers import Event, ToolCall, ToolFormat, ToolParser, named_parser, parser_of, required_parser

NAMES = ("f", "get_weather")
F = '{"name": "f", "arguments": {"x": 1}}'
G = '{"name": "get_weather", "parameters": {"city": "Zürich </tool_call> \\" [TOOL_CALLS]"}}'
CALL_F = ToolCall("f", '{"x": 1}')
CALL_G = ToolCall("get_weather", '{"city": "Zürich </tool_call> \\" [TOOL_CALLS]"}')


def read(parser: ToolParser, pieces: Sequence[str]) -> list[Event]:
    """Content joined where no call stands between it."""
    events: list[Event] = []
    for news in (*map(parser.push, pieces), parser.finish()):
        for event in news:
            assert event != "", "no empty content"
            if isinstance(event, str) and events and isinstance(events[-1], str):
                events[-1] += event
            else:
                events.append(event)
    return events


def of(form: ToolFormat) -> Callable[[], ToolParser]:
    return lambda: parser_of(form, NAMES)


CASES: list[tuple[Callable[[], ToolParser], str, list[Event]]] = [
    (of("hermes"), "just text < more", ["just text < more"]),
    (of("hermes"), f"<tool_call>\n{F}\n</tool_call>", [CALL_F]),
    (of("hermes"), f"So:\n<tool_call>{F}</tool_call>\n<tool_call>{G}</tool_call>\n", ["So:", CALL_F, CALL_G]),
    (of("hermes"), f"<tool_call>{F}", [CALL_F]),
    (of("hermes"), '<tool_call>{"name": "f", "argum', ['<tool_call>{"name": "f", "argum']),
    (of("hermes"), " <tool_call>nonsense</tool_call> end ", [" <tool_call>nonsense</tool_call> end "]),
    (of("hermes"), '<tool_call>{"name": "no", "arguments": {}}</tool_call>', None),  # type: ignore[list-item]
    (of("hermes"), '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>', None),  # type: ignore[list-item]
    (of("hermes"), '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', None),  # type: ignore[list-item]
    (of("hermes"), '<tool_call>{"name": "f"}</tool_call> and', [ToolCall("f", "{}"), " and"]),
    (of("hermes"), "a <tool", ["a <tool"]),
    (of("llama3_json"), f"{F}", [CALL_F]),
    (of("llama3_json"), f" <|python_tag|>{F}; {G}", [CALL_F, CALL_G]),
    (of("llama3_json"), '{"not": "a call"}', ['{"not": "a call"}']),
    (of("llama3_json"), f"Text {F}", [f"Text {F}"]),
    (of("llama3_json"), "  text", ["  text"]),
    (of("llama3_json"), "<|python", ["<|python"]),
    (of("mistral"), f"[TOOL_CALLS][{F}, {F}]", [CALL_F, CALL_F]),
    (of("mistral"), f"Let me.[TOOL_CALLS] [{F}]", ["Let me.", CALL_F]),
    (of("mistral"), '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]f{}', [CALL_F, ToolCall("f", "{}")]),
    (of("mistral"), "[TOOL_CALLS][{", ["[TOOL_CALLS][{"]),
    (of("mistral"), "[TOOL", ["[TOOL"]),
    (lambda: named_parser("f"), ' {"x": 1} ', [CALL_F]),
    (lambda: named_parser("f"), '{"x": ', ['{"x": ']),
    (lambda: required_parser(NAMES), f"[{F}, {G}]", [CALL_F, CALL_G]),
    (lambda: required_parser(NAMES), f"[{F}, ", [f"[{F}, "]),
]


@pytest.mark.parametrize(
    ("make", "text", "expected"), CASES, ids=lambda value: value[:40] if type(value) is str else ""
)
def test_api_34_calls_are_read_whole_and_letter_by_letter(
    make: Callable[[], ToolParser], text: str, expected: list[Event] | None
) -> None:
    expected = [text] if expected is None else expected
    assert read(make(), [text]) == expected
    assert read(make(), list(text)) == expected


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<tool",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    F,
    G,
    f"[{F}]",
    "f",
    "{",
    '"',
]
PIECES += [";", " ", "\n", "text", "é", "\\", "[", "]"]


@settings(max_examples=150, deadline=None)
@given(
    form=st.sampled_from(["hermes", "llama3_json", "mistral", "named", "required"]),
    parts=st.lists(st.sampled_from(PIECES), max_size=9),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
def test_api_34_how_an_answer_is_cut_changes_nothing(form: str, parts: list[str], cuts: list[int]) -> None:
    def make() -> ToolParser:
        if form == "named":
            return named_parser("f")
        return required_parser(NAMES) if form == "required" else parser_of(form, NAMES)  # type: ignore[arg-type]

    text = "".join(parts)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(edges)]
    whole = read(make(), [text])
    assert read(make(), pieces) == whole == read(make(), list(text))
    for event in whole:
        if isinstance(event, ToolCall):
            assert event.name in NAMES
            assert isinstance(json.loads(event.arguments), dict)
    if not any(isinstance(event, ToolCall) for event in whole):
        assert "".join(map(str, whole)) == text, "what is no call is text, to the letter"
