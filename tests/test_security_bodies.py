"""Bodies that are made to break a parser, to hold up the event loop, or to mean two things (S1, S4, S6)."""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server import batch, bodies
from server.bodies import JsonRoute
from server.settings import Settings
from support.live_server import LiveServer, live_server
from support.scripted import scripted_client
from support.toy_server import toy_client, write_toy_tokenizer

TELLS_ALL = (
    "{% for m in messages %}{{ m.content }}{{ m.name }}{{ m.tool_calls }}{% endfor %}{{ tools | tojson }}{{ extra }}"
    "<tool_call>"
)
"""A template that writes everything that a caller can send."""

HALF = '"\\ud800"'
USER = '{"role": "user", "content": "a"}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = write_toy_tokenizer(tmp_path_factory.mktemp("toy"))
    (folder / "chat_template.jinja").write_text(TELLS_ALL)
    with live_server(toy_client(folder), Settings(model="toy", access_log=False)) as server:
        yield server


def error_of(server: LiveServer, path: str, body: str | bytes) -> tuple[int, dict[str, Any]]:
    answer = server.http.post(path, content=body)
    assert answer.status_code != 200, answer.text
    return answer.status_code, answer.json()["error"]


def refused(server: LiveServer, path: str, body: str | bytes) -> dict[str, Any]:
    status, error = error_of(server, path, body)
    assert status == 400, error
    assert set(error) >= {"message", "type", "param", "code"}
    return error


# Text that is no text.


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", f'{{"prompt": {HALF}}}'),
    ("/v1/completions", f'{{"prompt": "a", "max_tokens": 1, {HALF}: 1}}'),
    ("/v1/completions", f'{{"prompt": "a", "cache_salt": {HALF}}}'),
    ("/v1/completions", f'{{"prompt": "a", "structured_outputs": {{"choice": [{HALF}]}}}}'),
    ("/v1/completions", f'{{"prompt": "a", "structured_outputs": {{"json": {{"const": {HALF}}}}}}}'),
    ("/v1/completions", '{"prompt": "\\udc00\\ud800"}'),
    ("/v1/completions", b'{"prompt": "\xed\xa0\x80"}'),
    ("/v1/chat/completions", f'{{"messages": [{{"role": "user", "content": {HALF}}}]}}'),
    ("/v1/chat/completions", f'{{"messages": [{{"role": "user", "content": "a", "name": {HALF}}}]}}'),
    ("/v1/chat/completions", f'{{"messages": [{USER}], "chat_template_kwargs": {{"extra": {HALF}}}}}'),
    ("/v1/chat/completions", f'{{"messages": [{USER}], "tools": [{{"type": "function", "function": {{"name": "f", '
                             f'"parameters": {{"a": {HALF}}}}}}}]}}'),
    ("/tokenize", f'{{"prompt": {HALF}}}'),
    ("/tokenize", f'{{"content": {HALF}}}'),
])  # fmt: skip
def test_half_of_a_surrogate_pair_is_refused_wherever_it_stands(
    server: LiveServer, path: str, body: str | bytes
) -> None:
    """S6: Python's parser lets it through, and no tokenizer and no answer can carry it."""
    assert refused(server, path, body)["code"] == "invalid_json"


def test_a_whole_surrogate_pair_and_one_that_is_only_spelled_out_are_text() -> None:
    assert bodies.parse(rb'["\ud83d\ude00", "\\ud800"]') == ["\U0001f600", r"\ud800"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "cp1252"])
def test_a_body_that_is_not_utf_8_is_refused(server: LiveServer, encoding: str) -> None:
    """S6: Python's parser guesses at UTF-16 and UTF-32, and whoever filters before us does not."""
    assert refused(server, "/v1/completions", '{"prompt": "é¤"}'.encode(encoding, "replace"))["code"] == "invalid_json"


def test_a_byte_order_mark_is_no_part_of_the_body(server: LiveServer) -> None:
    """S6."""
    answer = server.http.post("/v1/completions", content=b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 1}')
    assert answer.status_code == 200


def test_of_two_fields_with_one_name_the_last_counts(server: LiveServer) -> None:
    """S6: one reading for the whole server, for there is one parser."""
    answer = server.http.post("/tokenize", content=b'{"content": "a", "content": "abc"}')
    assert answer.json()["count"] == 3


@pytest.mark.parametrize("text", ["\\u0000", "a\\u0000b", "\\u0001\\u001f\\u007f", "\\ufffe\\uffff\\ufdd0", "\\u202e"])
def test_odd_characters_that_are_text_are_taken_or_refused_but_never_break_anything(
    server: LiveServer, text: str
) -> None:
    """S6."""
    for path, body in [
        ("/v1/completions", f'{{"prompt": "{text}", "max_tokens": 1}}'),
        ("/v1/completions", f'{{"prompt": "a", "max_tokens": 1, "cache_salt": "{text}"}}'),
        ("/v1/completions", f'{{"prompt": "a", "max_tokens": 1, "structured_outputs": {{"choice": ["{text}"]}}}}'),
        ("/v1/chat/completions", f'{{"messages": [{{"role": "user", "content": "{text}"}}], "max_tokens": 1}}'),
        ("/v1/completions", f'{{"prompt": "a", "max_tokens": 1, "stop": "{text}"}}'),
    ]:
        assert server.http.post(path, content=body).status_code in (200, 400), (path, body)


# Depth.


@pytest.mark.parametrize("depth", [100, 200, 300, 500, 900, 1_000, 3_000, 100_000])
@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", '{"prompt": "a", "max_tokens": 1, "zzz": LIST}'),
    ("/v1/completions", '{"prompt": LIST}'),
    ("/v1/completions", '{"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": OBJECT}}'),
    ("/v1/completions", '{"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": "TEXT"}}'),
    ("/v1/completions", '{"prompt": "a", "max_tokens": 1, "structured_outputs": {"regex": "GROUPS"}}'),
    ("/v1/completions", '{"prompt": "a", "max_tokens": 1, "structured_outputs": {"grammar": "start: GROUPS"}}'),
    ("/v1/chat/completions", '{"max_tokens": 1, "messages": [{"role": "user", "content": "a", "name": LIST}]}'),
    ("/v1/chat/completions", '{"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": LIST}]}]}'),
    ("/v1/chat/completions", '{"max_tokens": 1, "messages": [USER], "chat_template_kwargs": {"extra": LIST}}'),
    ("/v1/chat/completions", '{"max_tokens": 1, "messages": [{"role": "assistant", "tool_calls": [{"function": '
                             '{"name": "f", "arguments": "TEXT"}}]}]}'),
    ("/v1/chat/completions", '{"max_tokens": 1, "messages": [USER], "tool_choice": "required", "tools": '
                             '[{"type": "function", "function": {"name": "f", "parameters": OBJECT}}]}'),
])  # fmt: skip
def test_nesting_is_taken_or_refused_at_every_depth(server: LiveServer, path: str, body: str, depth: int) -> None:
    """S4: each part of the program has its own limit, and the deepest that one lets through must not break the next."""
    for name, opening, closing in [
        ("LIST", "[" * depth, "]" * depth),
        ("OBJECT", '{"a":' * depth + "1", "}" * depth),
        ("TEXT", '{\\"a\\":' * depth + "1", "}" * depth),
        ("GROUPS", "(" * depth, "x" + ")" * depth),
        ("USER", USER, ""),
    ]:
        body = body.replace(name, opening + closing)
    answer = server.http.post(path, content=body)
    assert answer.status_code in (200, 400), answer.text[:200]


def test_the_deepest_body_that_is_taken_is_no_trouble_to_anybody() -> None:
    """S4."""
    assert bodies.parse(b"[" * 200 + b"]" * 200)
    with pytest.raises(json.JSONDecodeError, match="more than 200 levels"):
        bodies.parse(b"[" * 201 + b"]" * 201)
    with pytest.raises(json.JSONDecodeError, match="more than 200 levels"):
        bodies.parse(b'{"a":' * 201 + b"1" + b"}" * 201)
    for text in ("[" * 1000, '\\"[' * 1000, "\\\\" + "{[" * 500, '"]' + "[" * 1000 + "\\"):
        assert bodies.parse(json.dumps([text, text]).encode()) == [text, text]


# What holds up the event loop.


def test_every_route_that_takes_a_body_reads_it_in_the_one_way(server: LiveServer) -> None:
    """S6: a check that one route lacks is no check."""
    parts = [*server.app.routes]
    found = []
    while parts:
        route = parts.pop()
        parts += getattr(getattr(route, "original_router", None), "routes", [])
        if getattr(route, "body_field", None) is not None:
            found.append(route)
    assert {route.path for route in found} >= {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"}
    assert [route.path for route in found if not isinstance(route, JsonRoute)] == []


def test_parsing_looks_for_no_garbage(server: LiveServer) -> None:
    """S4: otherwise 8 MB of empty lists are seconds in which nobody is answered."""
    collections = []
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        assert len(bodies.parse(b"[" + b"[]," * 100_000 + b"1]")) == 100_001
    finally:
        gc.callbacks.pop()
    assert len(collections) <= 2, "one, begun and ended, may come behind it"
    assert gc.isenabled()


@pytest.mark.parametrize(("path", "fields", "param"), [
    ("/v1/completions", {"prompt": "a", "stop": ["ab" * 2049]}, "stop"),
    ("/v1/completions", {"prompt": "a", "stop": "a" * 4_000_000}, "stop"),
    ("/v1/completions", {"prompt": "a", "bad_words": ["a" * 257]}, "bad_words"),
    ("/v1/completions", {"prompt": "1" * 2_097_153, "truncate_prompt_tokens": 5}, "prompt"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1" * 2_097_153}], "truncate_prompt_tokens": 5},
     "messages"),
    ("/tokenize", {"content": "1" * 2_097_153}, "prompt"),
    ("/detokenize", {"tokens": [1] * 1_048_577}, "tokens"),
])  # fmt: skip
def test_what_would_cost_seconds_before_it_is_refused_is_refused_at_once(
    server: LiveServer, path: str, fields: dict[str, Any], param: str
) -> None:
    """S2, S4: each of these once held up the event loop, or a core, for 5 to 50 s."""
    error = refused(server, path, json.dumps(fields))
    assert error["param"] == param
    assert "at most" in error["message"]


def test_the_longest_stop_strings_and_words_are_taken(server: LiveServer) -> None:
    """S2: the limit itself is accepted."""
    body = {"prompt": "a", "max_tokens": 1, "stop": ["ab" * 2048] * 4, "bad_words": ["1" * 256] * 128}
    assert server.http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("key", ["$defs", "definitions"])
@pytest.mark.parametrize("value", [[1], 7, "ab", True])
def test_definitions_of_a_tool_that_are_no_object_are_refused(server: LiveServer, key: str, value: Any) -> None:
    """S3."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {key: value}}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "tool_choice": "required"}
    error = refused(server, "/v1/chat/completions", json.dumps(body))
    assert (error["param"], key in error["message"]) == ("tools", True)


# Empty and null corners.


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], None, [None], [[None]], {}, True, 0, 1.5, [1.0], [[1], "a"]])
def test_an_empty_or_odd_prompt_is_a_400(server: LiveServer, prompt: Any) -> None:
    """S1."""
    refused(server, "/v1/completions", json.dumps({"prompt": prompt}))


@pytest.mark.parametrize("messages", [
    *([], None, {}, "a", [None], [[]], [{}], [{"role": "user"}], [{"content": "a"}]),
    *([{"role": "user", "content": None}], [{"role": "", "content": ""}]),
    *([{"role": "user", "content": [{}]}], [{"role": "user", "content": [None]}]),
])  # fmt: skip
def test_empty_or_odd_messages_are_a_400(server: LiveServer, messages: Any) -> None:
    """S1."""
    refused(server, "/v1/chat/completions", json.dumps({"messages": messages}))


def every_field(server: LiveServer, path: str) -> list[str]:
    document = server.http.get("/openapi.json").json()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return list(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"])


EMPTY = [None, "", [], {}, [None], [[]], [{}], {"": None}, 0, -1, False, True, "a", 0.5]


@pytest.mark.parametrize(("path", "valid"), [
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/tokenize", {"content": "a"}),
    ("/detokenize", {"tokens": [1]}),
])  # fmt: skip
def test_every_field_takes_every_empty_value_or_says_no(server: LiveServer, path: str, valid: dict[str, Any]) -> None:
    """S1: no field of any route answers an empty or odd value with a 500."""
    for field in every_field(server, path):
        for value in EMPTY:
            answer = server.http.post(path, json={**valid, field: value})
            assert answer.status_code in (200, 400, 404, 504), (field, value, answer.text[:200])
    assert server.http.get("/health").status_code == 200


def test_names_in_a_request_are_no_paths(server: LiveServer) -> None:
    """S18: names in a body are names, not paths."""
    for name in ("../../etc/passwd", "/etc/passwd", "..\\..\\x", "a\u0000b", "C:\\x", "file:///etc/passwd", "%2e%2e/x"):
        assert error_of(server, "/v1/completions", json.dumps({"prompt": "a", "model": name}))[0] == 404
    for path in ("/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/v1/models//etc/passwd"):
        answer = server.raw(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 404 "), (path, answer[:100])
        assert b"root:" not in answer


HOSTILE_LINES = [
    "[" * 100_000,
    '{"custom_id": "a", "url": "/v1/completions", "body": ' + '{"a":' * 900 + "1" + "}" * 901,
    '{"custom_id": "\\ud800", "url": "/v1/completions", "body": {"prompt": [5]}}',
    '{"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "\\ud800"}}',
    '{"custom_id": "c", "url": "/v1/completions", "body": {"prompt": [5], "temperature": NaN}}',
    '{"custom_id": "d", "url": "/v1/completions", "body": {"n": ' + "9" * 5000 + "}}",
    '{"custom_id": "e", "url": "/v1/../../etc/passwd", "body": {}}',
    '{"custom_id": "f", "url": ["/v1/completions"], "body": {}}',
    '{"custom_id": "g", "url": "http://127.0.0.1:1/v1/completions", "body": {}}',
    '{"custom_id": "h", "url": "/v1/completions", "method": {"a": 1}, "body": {}}',
    "\0",
    "null",
]


def test_a_hostile_line_of_a_batch_file_fails_alone(tmp_path: Path) -> None:
    """S1, S4, S18: the others are answered, and the command comes to its end."""
    good = '{"custom_id": "good", "url": "/v1/completions", "body": {"prompt": [5], "max_tokens": 2}}'
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([*HOSTILE_LINES, good]))
    args = argparse.Namespace(input=source, output=target, url=None, streams=4, overwrite=False)
    assert batch.run(args, Settings(), scripted_client()) == 1
    records = [json.loads(line) for line in target.read_text().splitlines()]
    answered = {record["custom_id"] for record in records if record["error"] is None}
    assert len(records) == len(HOSTILE_LINES) + 1
    assert answered == {"good"}
