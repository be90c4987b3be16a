"""Structured output over HTTP: every way to ask for a form, on a whole engine of the toy decoder."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from server.llm import LLM
from support.live_server import LiveServer, live_server
from support.scripted import scripted_client
from support.sse import joined_choices, post_stream
from support.toy_server import toy_client, write_toy_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": [True, None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TINY = {"disable_any_whitespace": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(toy_client(write_toy_tokenizer(tmp_path_factory.mktemp("toy")))) as live:
        yield live


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "abc", "max_tokens": 50, "seed": 1, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 50, "seed": 1, **fields}


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def answers(server: LiveServer, body: dict[str, Any]) -> list[str]:
    """All of them, finished by themselves; the same request streamed must say the same."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}, choices
    streamed = joined_choices(post_stream(server.http, path, body))
    assert [text_of(choice) for choice in choices] == [streamed[i]["text"] for i in range(len(choices))]
    return [text_of(choice) for choice in choices]


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "schema"),
    ({"structured_outputs": {"json": SCHEMA}}, "schema"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)} | TINY}, "schema"),
    ({"structured_outputs": {"regex": "[0-9]{2,4}"}}, "[0-9]{2,4}"),
    ({"structured_outputs": {"choice": ["true", "false", "b b"]}}, "true|false|b b"),
    ({"structured_outputs": {"grammar": 'start: "[" /[0-9]{1,3}/ "]"'}}, r"\[[0-9]{1,3}\]"),
    ({"structured_outputs": {"grammar": 'root ::= "[" [0-9] "]"'}}, r"\[[0-9]\]"),
]


@pytest.mark.parametrize("body", [completion, chat])
@pytest.mark.parametrize(("fields", "form"), FORMS, ids=lambda value: str(value)[:40])
def test_an_answer_has_the_form_that_was_asked_for(server: LiveServer, body: Any, fields: Any, form: str) -> None:
    for text in answers(server, body(**fields, n=2)):
        if form == "schema":
            value = json.loads(text)
            assert 0 <= value["a"] <= 99
            assert value["b"] in (True, None)
        else:
            assert re.fullmatch(form, text), text


@pytest.mark.parametrize("body", [completion, chat])
def test_json_object_is_an_object_as_far_as_it_comes(server: LiveServer, body: Any) -> None:
    path = "/v1/chat/completions" if body is chat else "/v1/completions"
    for seed in range(4):
        fields = body(response_format={"type": "json_object"}, seed=seed)
        (choice,) = server.http.post(path, json=fields).json()["choices"]
        assert text_of(choice).startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text_of(choice)), dict)


def test_text_asks_for_nothing(server: LiveServer) -> None:
    plain = server.http.post("/v1/completions", json=completion()).json()["choices"]
    for fields in ({"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"response_format": None}):
        assert server.http.post("/v1/completions", json=completion(**fields)).json()["choices"] == plain


def test_stop_strings_seeds_logprobs_and_echo_work_with_a_form(server: LiveServer) -> None:
    body = completion(structured_outputs={"regex": "[0-9]{5}x[0-9]"}, stop="x", logprobs=1, echo=True, temperature=1.5)
    first, again = (server.http.post("/v1/completions", json=body).json()["choices"] for _ in range(2))
    assert first == again
    (choice,) = first
    assert re.fullmatch("abc[0-9]{5}", choice["text"])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "x")
    assert all(-9999 < value < 0 for value in choice["logprobs"]["token_logprobs"][3:])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wurst"}}}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(" * 20_000}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"], "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens"),
        ({"structured_outputs": {"regex": "a"}, "bad_words": ["a"]}, "bad_words"),
        ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [1]}, "allowed_token_ids"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_api_20_a_form_that_cannot_be_followed_is_a_400_by_name_before_any_byte(
    server: LiveServer, fields: dict[str, Any], param: str, stream: bool
) -> None:
    started = time.monotonic()
    answer = server.http.post("/v1/completions", json=completion(**fields, stream=stream))
    assert time.monotonic() - started < 2
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error


@pytest.mark.parametrize("form", ["json", "regex", "choice", "grammar"])
def test_api_1_6_the_removed_guided_fields_name_what_replaced_them(server: LiveServer, form: str) -> None:
    answer = server.http.post("/v1/completions", json=completion(**{f"guided_{form}": "x"}))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == f"guided_{form}"
    assert f"use structured_outputs.{form}" in error["message"]


def test_bystanders_draw_the_same_while_hostile_forms_come_and_go(server: LiveServer) -> None:
    hostile = [{"regex": "(a+)+b"}, {"regex": "((a{1,999}){1,999}){1,999}"}, {"regex": "(("}, {"json": {"$ref": "#"}}]
    hostile += [{"json": {"pattern": "^(a+)+$", "minLength": 10_000, "type": "string"}}, {"grammar": "start: start"}]
    quiet = server.http.post("/v1/completions", json=completion()).json()["choices"]
    with ThreadPoolExecutor(8) as threads:
        bad = [
            threads.submit(server.http.post, "/v1/completions", json=completion(structured_outputs=form, max_tokens=20))
            for form in hostile
        ]
        good = [threads.submit(server.http.post, "/v1/completions", json=completion()) for _ in range(6)]
    assert all(answer.result().json()["choices"] == quiet for answer in good)
    assert {answer.result().status_code for answer in bad} <= {200, 400}
    assert server.http.post("/v1/completions", json=completion()).json()["choices"] == quiet


@pytest.mark.parametrize("form", ["z", "[0-9]{2}z"])
def test_a_form_that_the_model_cannot_spell_is_a_400_and_no_fault_of_the_server(server: LiveServer, form: str) -> None:
    body = completion(structured_outputs={"regex": form})
    answer = server.http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
    quiet = server.http.post("/v1/completions", json=completion())
    assert quiet.status_code == 200


def test_a_model_without_a_tokenizer_refuses_every_form() -> None:
    with live_server(scripted_client()) as server:
        for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "a"}}):
            answer = server.http.post("/v1/completions", json={"prompt": [5], **fields})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, *fields)


def test_llm_takes_the_same_fields_and_refuses_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = write_toy_tokenizer(tmp_path_factory.mktemp("toy"))
    with LLM.from_client(toy_client(folder, overlaps=False)) as llm:
        (answer,) = llm.generate("abc", structured_outputs={"choice": ["true", "false"]}, max_tokens=9)
        assert answer.choices[0].text in ("true", "false")
        with pytest.raises(ValueError, match="structured_outputs cannot be followed"):
            llm.generate("abc", structured_outputs={"regex": "("})
