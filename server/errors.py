"""Every refusal and failure a client can see, as one exception and one JSON shape (api 4.7).

The body of every answer that is not 2xx is `{"error": {"message", "type", "param", "code", ...}}`. This file owns the
texts, the statuses and the headers that go with them; it knows neither routes nor models. Messages speak of the
request: no path, object, library name or key of ours goes into one.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from engine import errors as engine_errors
from engine.types import ErrorCode

Headers = Mapping[str, str]

_LONGEST_ECHO = 64
"""Code points of a caller's own value that a message repeats."""


class ApiError(Exception):
    """What the client is told instead of an answer. Raised by handlers, sent by server/app.py and server/guards.py."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str,
        code: str,
        param: str | None = None,
        headers: Headers | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})

    def body(self) -> dict[str, Any]:
        return error_body(self.message, type=self.type, code=self.code, param=self.param, extra=self.extra)

    def response(self) -> Response:
        # ASCII only: a lone surrogate in a caller's text has no UTF-8, and must not turn its 400 into a 500.
        return Response(json.dumps(self.body()), self.status, self.headers, "application/json")


class ErrorFields(BaseModel):
    model_config = ConfigDict(extra="allow")

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(BaseModel):
    """`error_body` as the OpenAPI document has it."""

    error: ErrorFields


def error_body(
    message: str,
    *,
    type: str,
    code: str,
    param: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The one shape. `extra` adds fields beside the four, never replaces one; also the body of an SSE error event."""
    return {"error": {**(extra or {}), "message": message, "type": type, "param": param, "code": code}}


# What a client can get wrong: 4xx, and retrying the same request cannot help.


def _refused(
    message: str,
    code: str,
    *,
    status: int = 400,
    param: str | None = None,
    headers: Headers | None = None,
    extra: Mapping[str, Any] | None = None,
) -> ApiError:
    return ApiError(status, message, type="invalid_request_error", code=code, param=param, headers=headers, extra=extra)


def invalid_json(message: str = "the body is not valid JSON") -> ApiError:
    return _refused(message, "invalid_json")


def invalid_http(message: str = "the request is not valid HTTP") -> ApiError:
    return _refused(message, "invalid_http", headers={"Connection": "close"})


def headers_too_large() -> ApiError:
    return _refused(
        "the request's line and headers are too long", "headers_too_large", status=431, headers={"Connection": "close"}
    )


def request_timeout(timeout_s: float) -> ApiError:
    return _refused(
        f"the rest of the request did not come within {timeout_s:g} s",
        "request_timeout",
        status=408,
        headers={"Connection": "close"},
    )


def unsupported_encoding(coding: str) -> ApiError:
    return _refused(f"the body is encoded as {_echo(coding)}: send it as it is", "unsupported_encoding", status=415)


def invalid_value(message: str, param: str | None = None) -> ApiError:
    return _refused(message, "invalid_value", param=param)


def missing_field(param: str) -> ApiError:
    return _refused(f"{param} is required", "missing_field", param=param)


def unsupported_parameter(message: str, param: str) -> ApiError:
    """A field we know, with a value that this server cannot obey."""
    return _refused(message, "unsupported_parameter", param=param)


def no_embeddings(reason: str) -> ApiError:
    """The model, or how it is served here, cannot; another server may. 400: the route is there, and a retry is vain."""
    return _refused(
        f"this model makes no embeddings: {reason}",
        "embeddings_not_supported",
        param="model",
        headers={"x-should-retry": "false"},
    )


def unknown_parameter(param: str) -> ApiError:
    return _refused(f"{_echo(param)} is no field of this request", "unknown_parameter", param=param)


def context_length_exceeded(
    message: str, *, prompt_tokens: int | None = None, max_model_len: int | None = None, param: str | None = None
) -> ApiError:
    """Both numbers also travel as fields, under the names llama.cpp's clients read."""
    extra = {"n_prompt_tokens": prompt_tokens, "n_ctx": max_model_len}
    return _refused(
        message,
        "context_length_exceeded",
        param=param,
        headers={"x-should-retry": "false"},
        extra={name: value for name, value in extra.items() if value is not None},
    )


def request_too_large(message: str, param: str | None = None) -> ApiError:
    """Larger than the whole server: it could never run, however long it waited."""
    return _refused(message, "request_too_large", param=param, headers={"x-should-retry": "false"})


def body_too_large(limit_bytes: int) -> ApiError:
    message = f"the body is larger than {limit_bytes} bytes"
    return _refused(message, "request_too_large", status=413, headers={"x-should-retry": "false"})


def unsupported_media_type(content_type: str) -> ApiError:
    return _refused(
        f"the content type is {_echo(content_type)}: send application/json", "unsupported_media_type", status=415
    )


def model_not_found(model: str, served_names: Sequence[str]) -> ApiError:
    served = ", ".join(served_names)
    near = difflib.get_close_matches(model, served_names, n=1)
    hint = f" Did you mean {near[0]}?" if near and len(served_names) > 1 else ""
    message = f"the model {_echo(model)} is not served here; served: {served}.{hint}"
    return _refused(message, "model_not_found", status=404, param="model")


def not_found(path: str) -> ApiError:
    return _refused(f"there is nothing at {_echo(path)}", "not_found", status=404)


def request_not_found(request_id: str) -> ApiError:
    message = f"nothing runs here under the id {_echo(request_id)}: it has ended, or it never was"
    return _refused(message, "request_not_found", status=404)


def request_cancelled() -> ApiError:
    """Told to whoever waits for an answer that another call ended. Sent again, it would only be unwanted again."""
    message = "the request was cancelled by its id"
    return _refused(message, "request_cancelled", status=409, headers={"x-should-retry": "false"})


def method_not_allowed(method: str, path: str, allow: str | None = None) -> ApiError:
    return _refused(
        f"{_echo(path)} does not take {_echo(method)}" + (f"; it takes {allow}" if allow else ""),
        "method_not_allowed",
        status=405,
        headers={"Allow": allow} if allow else None,
    )


def invalid_api_key(is_missing: bool) -> ApiError:
    message = (
        "no API key was sent: use the header Authorization: Bearer KEY" if is_missing else "the API key is not valid"
    )
    return ApiError(
        401, message, type="authentication_error", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
    )


def origin_not_allowed(origin: str) -> ApiError:
    message = f"pages of {_echo(origin)} may not call this server; --cors-origin lets one in"
    return ApiError(403, message, type="authentication_error", code="origin_not_allowed")


# Not now: the same request may succeed later.


def queue_full(message: str, retry_after_s: float, *, status: int = 429) -> ApiError:
    """status: 429, or 503 where --overload-status says so."""
    return ApiError(status, message, type="overloaded_error", code="queue_full", headers=retry_headers(retry_after_s))


def rate_limit_exceeded(message: str, retry_after_s: float) -> ApiError:
    return ApiError(
        429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=retry_headers(retry_after_s)
    )


def loading(message: str = "the model is loading", retry_after_s: float = 2.0) -> ApiError:
    return _unavailable(message, "loading", retry_headers(retry_after_s))


def draining(message: str = "the server is shutting down and takes no new requests") -> ApiError:
    """Connection: close, so that a client's pool reconnects to whoever stands behind the address next."""
    return _unavailable(message, "draining", {**retry_headers(1.0), "Connection": "close"})


def engine_unavailable(message: str = "the engine is not running", retry_after_s: float = 5.0) -> ApiError:
    return _unavailable(message, "engine_unavailable", retry_headers(retry_after_s))


def deadline_exceeded(message: str = "the request's deadline passed before it finished") -> ApiError:
    return ApiError(504, message, type="timeout_error", code="deadline_exceeded")


def queue_timeout(retry_after_s: float = 5.0) -> ApiError:
    """Nothing was begun: another server, or this one later, may have a place."""
    message = "the request waited longer for a place than this server lets it (--queue-timeout)"
    return _unavailable(message, "queue_timeout", retry_headers(retry_after_s))


def internal_error(message: str = "the server failed to answer this request") -> ApiError:
    return ApiError(500, message, type="server_error", code="internal_error")


def retry_headers(retry_after_s: float) -> dict[str, str]:
    """Whole seconds, at least 1, rounded up; the openai client reads the milliseconds first."""
    retry_after_ms = max(1, round(retry_after_s * 1000))
    return {
        "Retry-After": str(max(1, -(-retry_after_ms // 1000))),
        "retry-after-ms": str(retry_after_ms),
        "x-should-retry": "true",
    }


# From errors of others.


def from_engine(
    error: engine_errors.CellserveError, *, retry_after_s: float = 1.0, overload_status: int = 429
) -> ApiError:
    """What a client is told of an error the engine client raised. The two numbers are those of a full queue."""
    match error:
        case engine_errors.RequestTooLong():
            return context_length_exceeded(
                str(error), prompt_tokens=error.prompt_tokens, max_model_len=error.max_model_len
            )
        case engine_errors.RequestTooLarge():
            return request_too_large(str(error))
        case engine_errors.GrammarRefused():
            return invalid_value(str(error))
        case engine_errors.QueueFull():
            return queue_full(str(error), retry_after_s, status=overload_status)
        case engine_errors.Draining():
            return draining()
        case engine_errors.EngineUnavailable():
            return engine_unavailable()
        case _:
            return internal_error()


def from_failure(code: ErrorCode | None) -> ApiError:
    """What a client is told of an admitted request whose `Update` says "failed"."""
    match code:
        case "deadline_exceeded":
            return deadline_exceeded()
        case "queue_timeout":
            return queue_timeout()
        case "shutting_down":
            return draining("the server shut down before the request finished")
        case "grammar_refused":
            return invalid_value(
                "the answer cannot have the form that is asked for: it is too complex, or this model cannot spell it"
            )
        case "not_finite":
            return ApiError(
                500, "the model gave no numbers for the next token", type="server_error", code="model_not_finite"
            )
        case "engine_unavailable":
            return engine_unavailable("the engine stopped before the request finished")
        case _:
            return internal_error()


def from_status(status: int, *, method: str, path: str, headers: Headers | None = None) -> ApiError:
    """The framework's own refusals; its text is dropped, its headers stay."""
    if status == HTTPStatus.NOT_FOUND:
        error = not_found(path)
    elif status == HTTPStatus.METHOD_NOT_ALLOWED:
        error = method_not_allowed(method, path, (headers or {}).get("Allow"))
    elif status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
        error = unsupported_media_type("not JSON")
    elif status == HTTPStatus.BAD_REQUEST:
        # What Python's own parser gives up on: the only 400 that the framework comes to by itself.
        error = invalid_json("the body cannot be read: it is nested too deeply or holds a number with too many digits")
    elif status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        error = ApiError(status, "the server failed to answer this request", type="server_error", code="internal_error")
    else:
        phrase = HTTPStatus(status).phrase.lower() if status in HTTPStatus._value2member_map_ else f"status {status}"
        error = _refused(phrase, "invalid_request", status=status)
    error.headers = {**(headers or {}), **error.headers}
    return error


def from_validation(problems: Sequence[Mapping[str, Any]], sent: Any) -> ApiError:
    """One error for the first of pydantic's `errors()`: 400, naming the field, without its input value.

    sent: what was validated. A field of several types brings a problem for each: the one that is deepest in it is told.
    """
    if str(problems[0]["type"]).startswith("json_"):
        return invalid_json()
    places = [_place(problem, sent) for problem in problems]
    within = [i for i, place in enumerate(places) if place[: len(places[0])] == places[0]]
    deepest = max(within, key=lambda i: len(places[i]))
    problem, param = problems[deepest], _dotted(places[deepest]) or None
    if problem["type"] == "missing":
        return missing_field(param) if param else invalid_value("the body is missing: send a JSON object")
    text = str(problem["msg"]).removeprefix("Value error, ")
    text = text[:1].lower() + text[1:]
    return invalid_value(f"{param}: {text}" if param else text, param)


def _place(problem: Mapping[str, Any], sent: Any) -> list[Any]:
    """Of a problem in what was sent. pydantic's own place also names the type that it tried of several."""
    *parts, last = [part for part in problem["loc"] if part not in ("body", "query", "path", "header")] or [None]
    place = []
    for part in (*parts, last):
        is_there = part in sent if isinstance(sent, dict) else isinstance(sent, list) and isinstance(part, int)
        if is_there:
            sent = sent[part]
        if is_there or (part is last and problem["type"] == "missing" and part is not None):
            place.append(part)
    return place


def _unavailable(message: str, code: str, headers: Headers) -> ApiError:
    return ApiError(503, message, type="service_unavailable", code=code, headers=headers)


def _dotted(path: Sequence[Any]) -> str:
    """("messages", 0, "content") -> "messages[0].content"."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _echo(value: str) -> str:
    """A caller's value, quoted and cut, so that a message stays one short line."""
    return repr(value if len(value) <= _LONGEST_ECHO else value[:_LONGEST_ECHO] + "…")
