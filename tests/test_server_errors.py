"""One shape for every refusal (api 4.7), and what each case of it is called."""

from __future__ import annotations

import json
import re
from typing import Literal

import pytest
from pydantic import BaseModel, Field, ValidationError

from engine import errors as engine_errors
from server import errors
from server.errors import ApiError

CASES = [
    (errors.invalid_json(), 400, "invalid_request_error", "invalid_json"),
    (errors.invalid_http(), 400, "invalid_request_error", "invalid_http"),
    (errors.headers_too_large(), 431, "invalid_request_error", "headers_too_large"),
    (errors.request_timeout(30.0), 408, "invalid_request_error", "request_timeout"),
    (errors.unsupported_encoding("gzip"), 415, "invalid_request_error", "unsupported_encoding"),
    (errors.invalid_value("n is 0", "n"), 400, "invalid_request_error", "invalid_value"),
    (errors.missing_field("prompt"), 400, "invalid_request_error", "missing_field"),
    (errors.unsupported_parameter("no", "best_of"), 400, "invalid_request_error", "unsupported_parameter"),
    (errors.context_length_exceeded("too long"), 400, "invalid_request_error", "context_length_exceeded"),
    (errors.request_too_large("too large"), 400, "invalid_request_error", "request_too_large"),
    (errors.model_not_found("gpt", ["tiny"]), 404, "invalid_request_error", "model_not_found"),
    (errors.not_found("/x"), 404, "invalid_request_error", "not_found"),
    (errors.method_not_allowed("PUT", "/x", "GET"), 405, "invalid_request_error", "method_not_allowed"),
    (errors.invalid_api_key(True), 401, "authentication_error", "invalid_api_key"),
    (errors.origin_not_allowed("https://x.example"), 403, "authentication_error", "origin_not_allowed"),
    (errors.body_too_large(10), 413, "invalid_request_error", "request_too_large"),
    (errors.unsupported_media_type("text/html"), 415, "invalid_request_error", "unsupported_media_type"),
    (errors.queue_full("full", 2), 429, "overloaded_error", "queue_full"),
    (errors.queue_full("full", 2, status=503), 503, "overloaded_error", "queue_full"),
    (errors.rate_limit_exceeded("slow down", 2), 429, "rate_limit_error", "rate_limit_exceeded"),
    (errors.loading(), 503, "service_unavailable", "loading"),
    (errors.draining(), 503, "service_unavailable", "draining"),
    (errors.engine_unavailable(), 503, "service_unavailable", "engine_unavailable"),
    (errors.deadline_exceeded(), 504, "timeout_error", "deadline_exceeded"),
    (errors.internal_error(), 500, "server_error", "internal_error"),
]


@pytest.mark.parametrize(("error", "status", "kind", "code"), CASES, ids=[f"{case[1]}-{case[3]}" for case in CASES])
def test_each_case_has_its_status_type_and_code(error: ApiError, status: int, kind: str, code: str) -> None:
    response = error.response()
    body = json.loads(bytes(response.body))
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert list(body) == ["error"]
    assert {"message", "type", "param", "code"} <= set(body["error"])
    assert (body["error"]["type"], body["error"]["code"]) == (kind, code)
    assert body["error"]["message"]


@pytest.mark.parametrize("error", [case[0] for case in CASES if case[1] in (429, 503)])
def test_what_may_work_later_says_when(error: ApiError) -> None:
    assert int(error.headers["Retry-After"]) >= 1
    assert int(error.headers["retry-after-ms"]) >= 1
    assert error.headers["x-should-retry"] == "true"


@pytest.mark.parametrize(("seconds", "whole", "ms"), [
    (0.0, "1", "1"), (0.2, "1", "200"), (1.0, "1", "1000"), (1.001, "2", "1001"), (30, "30", "30000"),
])  # fmt: skip
def test_retry_after_is_whole_seconds_rounded_up(seconds: float, whole: str, ms: str) -> None:
    headers = errors.retry_headers(seconds)
    assert (headers["Retry-After"], headers["retry-after-ms"]) == (whole, ms)


def test_what_can_never_work_says_not_to_retry() -> None:
    for error in (errors.request_too_large("x"), errors.context_length_exceeded("x"), errors.body_too_large(1)):
        assert error.headers["x-should-retry"] == "false"


def test_a_drained_connection_is_closed() -> None:
    assert errors.draining().headers["Connection"] == "close"


def test_extra_fields_stand_beside_the_four_and_never_replace_one() -> None:
    body = errors.error_body("m", type="t", code="c", param="p", extra={"code": "x", "n_ctx": 8})
    assert body == {"error": {"message": "m", "type": "t", "param": "p", "code": "c", "n_ctx": 8}}


@pytest.mark.parametrize(("raised", "status", "code"), [
    (engine_errors.RequestTooLong(500, 20, 512), 400, "context_length_exceeded"),
    (engine_errors.RequestTooLarge("needs 9 of 8 cells"), 400, "request_too_large"),
    (engine_errors.QueueFull("full"), 429, "queue_full"),
    (engine_errors.Draining("bye"), 503, "draining"),
    (engine_errors.EngineUnavailable("dead"), 503, "engine_unavailable"),
    (engine_errors.StepFailed("at 0x7f"), 500, "internal_error"),
    (engine_errors.CellserveError("odd"), 500, "internal_error"),
])  # fmt: skip
def test_every_refusal_of_the_engine_has_a_name(raised: engine_errors.CellserveError, status: int, code: str) -> None:
    told = errors.from_engine(raised)
    assert (told.status, told.code) == (status, code)


def test_a_prompt_too_long_brings_both_numbers_as_fields() -> None:
    error = errors.from_engine(engine_errors.RequestTooLong(500, 20, 512)).body()["error"]
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (500, 512)
    assert "500" in error["message"]
    assert "512" in error["message"]


def test_the_overload_status_is_the_operators_choice() -> None:
    assert errors.from_engine(engine_errors.QueueFull("full"), overload_status=503).status == 503


def test_failures_after_admission_have_their_own_codes() -> None:
    told = [errors.from_failure(code) for code in ("deadline_exceeded", "shutting_down", "engine_unavailable")]
    assert [(error.status, error.code) for error in told] == [
        (504, "deadline_exceeded"),
        (503, "draining"),
        (503, "engine_unavailable"),
    ]
    assert errors.from_failure("step_failed").code == errors.from_failure(None).code == "internal_error"


class Named(BaseModel):
    name: str


class Inner(BaseModel):
    content: str


class Either(BaseModel):
    parts: str | list[dict[str, int]]
    choice: Literal["none"] | Named = "none"


class Body(BaseModel):
    n: int = Field(1, ge=1)
    messages: list[Inner]
    either: list[Either] = Field(default_factory=list)


@pytest.mark.parametrize(("body", "code", "param", "words"), [
    ({"n": 0, "messages": []}, "invalid_value", "n", "greater than or equal to 1"),
    ({"messages": [{"content": "a"}, {"content": 7}]}, "invalid_value", "messages[1].content", "valid string"),
    ({}, "missing_field", "messages", "required"),
    ({"messages": [], "either": [{"parts": 7}]}, "invalid_value", "either[0].parts", "valid string"),
    ({"messages": [], "either": [{"parts": [7]}]}, "invalid_value", "either[0].parts[0]", "valid dictionary"),
    ({"messages": [], "either": [{"parts": [{"a": "b"}]}]}, "invalid_value", "either[0].parts[0].a", "valid integer"),
    ({"messages": [], "either": [{"parts": "", "choice": {}}]}, "missing_field", "either[0].choice.name", "required"),
    ({"messages": [], "either": [{"parts": "", "choice": 1}]}, "invalid_value", "either[0].choice", "'none'"),
])  # fmt: skip
def test_a_bad_field_is_named(body: dict[str, object], code: str, param: str, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Body.model_validate(body)
    problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in caught.value.errors()]
    told = errors.from_validation(problems, body)
    assert (told.status, told.code, told.param) == (400, code, param)
    assert words in told.message


def test_messages_cut_what_a_caller_sent() -> None:
    for error in (errors.not_found("/" + "x" * 5000), errors.model_not_found("x" * 5000, ["tiny"])):
        assert len(error.message) < 200


def test_unknown_model_lists_what_is_served() -> None:
    assert re.search(
        r"served: tiny, tiny-2\. Did you mean tiny-2\?", errors.model_not_found("tiny2", ["tiny", "tiny-2"]).message
    )


@pytest.mark.parametrize("status", [404, 405, 400, 415, 418, 431, 500, 502])
def test_the_frameworks_own_refusals_lose_their_text_and_keep_their_status(status: int) -> None:
    told = errors.from_status(status, method="GET", path="/x", headers={"Allow": "POST"})
    assert told.status == status
    assert told.headers["Allow"] == "POST"
    assert set(told.body()["error"]) == {"message", "type", "param", "code"}
