"""Malformed requests: by hand where a bug was or could be, and made from valid ones by mutations, from a seed (G2).

A `Malformed` is the bytes of one request as they go over a connection of its own. `ask` sends it and judges the answer:
whatever came in, what goes out has one of few statuses and, unless it is a success, the one shape of errors.
"""

from __future__ import annotations

import copy
import json
import random
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any

from support.sse import events, strict_json

EXPECTED = {200, 400, 401, 404, 405, 408, 413, 415, 422, 429, 431}
LONGEST_S = 20.0
"""A request that is not answered by then hangs."""

POSTS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize")
GETS = (
    "/v1/models",
    "/v1/models/toy",
    "/metrics",
    "/version",
    "/load",
    "/server_info",
    "/tokenizer_info",
    "/health",
    "/openapi.json",
    "/v1/kv/status",
    "/",
    "/live",
    "/ready",
)

_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
_GENERATION: dict[str, list[Any]] = {
    # Fields of both generating routes -> values that are valid, so that a mutation meets more than the bare minimum.
    **{"max_tokens": [0, 1, 3], "min_tokens": [0, 1], "n": [1, 2], "temperature": [0, 0.7, 2], "top_p": [0.5, 1]},
    **{"top_k": [-1, 0, 5], "min_p": [0, 0.1], "presence_penalty": [0.5], "frequency_penalty": [-1]},
    **{"repetition_penalty": [1.1], "logit_bias": [{"3": 5}], "allowed_token_ids": [[1, 2, 3]], "bad_words": [["a"]]},
    **{"seed": [0, 7], "stop": ["b", ["a", "bc"]], "stop_token_ids": [[4]], "include_stop_str_in_output": [True]},
    **{
        "ignore_eos": [True],
        "skip_special_tokens": [False],
        "truncate_prompt_tokens": [3, -1],
        "stream": [True, False],
    },
    **{"prompt_logprobs": [1], "return_token_ids": [True], "return_tokens_as_token_ids": [True], "priority": [1]},
    **{"cache_salt": ["s"], "user": ["u"], "response_format": [{"type": "json_object"}], "model": ["toy"]},
    **{"structured_outputs": [{"regex": "[ab]{1,3}"}, {"choice": ["a", "b"]}, {"json": {"type": "null"}}]},
    **{"stream_options": [{"include_usage": True}], "timeout": [30], "max_completion_tokens": [2]},
}
_OWN: dict[str, dict[str, list[Any]]] = {
    "/v1/completions": {"logprobs": [0, 2], "echo": [True], "best_of": [1, 2], "add_special_tokens": [False]},
    "/v1/chat/completions": {
        **{"logprobs": [True], "top_logprobs": [1], "tools": [[_TOOL]], "tool_choice": ["auto", "none", "required"]},
        **{"chat_template_kwargs": [{"x": 1}], "add_generation_prompt": [False], "parallel_tool_calls": [False]},
    },
    "/v1/embeddings": {"encoding_format": ["float", "base64"], "model": ["toy"], "truncate_prompt_tokens": [3]},
    "/tokenize": {"add_special_tokens": [True], "with_pieces": [True], "return_token_strs": [True], "model": ["toy"]},
    "/detokenize": {"model": ["toy"]},
}
_BASES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [{"prompt": "abc"}, {"prompt": [1, 2, 3]}, {"prompt": ["a", "b"]}, {"prompt": [[1], [2, 3]]}],
    "/v1/chat/completions": [
        {"messages": [{"role": "user", "content": "abc"}]},
        {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [{"text": "b"}]}]},
        {
            "messages": [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "b"},
            ]
        },
    ],
    "/v1/embeddings": [{"input": "abc"}, {"input": [1, 2]}, {"input": ["a", "b"]}],
    "/tokenize": [{"prompt": "abc"}, {"content": "abc"}, {"messages": [{"role": "user", "content": "a"}]}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
}

NUMBERS: list[Any] = [
    *(0, -1, 1, 2, 3, 20, 21, 32, 64, 65, 255, 256, 1023, 1024, 1025, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, -(2**31)),
    *(2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**40, -0.0, 0.5, 7.0, 7.5, 1e-320, 1e-30, 1e308),
    *(-1e308, float("nan"), float("inf"), -float("inf"), 2.000001, -100.5, True, False),
]
TEXTS: list[Any] = [
    *("", " ", "a", "7", "-1", "null", "true", "NaN", "\0", "a\0b", "\ud800", "\udfff\ud800", "\ufeff", "\ufffe\uffff"),
    *(
        "\ufdd0\ufdd1",
        "\u202e",
        "e\u0301" * 50,
        "\U0001f468\u200d\U0001f469",
        "\u0000\u001f\x7f\x85",
        "\r\nX: y",
        "%s%n%x",
    ),
    *("</s>", "<|im_start|>system", "{{ 7 * 7 }}", "{% raw %}", "../../etc/passwd", "file:///etc/passwd", "a" * 300),
    *(
        "a" * 5000,
        "(a+)+b",
        "(" * 300,
        "[" * 300,
        "$" * 300,
        "'; DROP TABLE x; --",
        "${jndi:ldap://x}",
        "http://127.0.0.1:1/",
    ),
]
OTHERS: list[Any] = [
    *(None, [], {}, [None], [[]], [[[]]], [{}], {"": None}, {"a": {"a": {"a": 1}}}, [1, "a"], ["a", None], [True]),
    *(
        [0] * 300,
        ["a"] * 300,
        {str(i): i for i in range(300)},
        [-1],
        [2**31],
        [2**63],
        [1.0],
        ["\ud800"],
        {"\ud800": 1},
    ),
]


@dataclass(frozen=True)
class Malformed:
    """`name` says how it was made, `data` is all of it. is_cut: it ends before it is whole, and so does the sending."""

    name: str
    data: bytes
    method: str = "POST"
    is_cut: bool = False


def http_request(
    path: str, body: bytes = b"", *, method: str = "POST", headers: tuple[tuple[str, str], ...] = (), host: str = "x"
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers]
    if body and not any(name.lower() in ("content-length", "transfer-encoding") for name, _ in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body


def made_by_mutation(count: int, seed: int = 0) -> Iterator[Malformed]:
    """`count` requests, the same for the same seed: a valid one, 1 to 3 mutations, and now and then one of transport.

    The first ones are the same for every count.
    """
    for number in range(count):
        random_ = random.Random(f"{seed}/{number}")
        path = random_.choices(POSTS, weights=(5, 5, 2, 2, 1))[0]
        body = _valid(random_, path)
        names = []
        for _ in range(random_.randint(1, 3)):
            mutate = random_.choice(_MUTATIONS)
            body = mutate(random_, path, body)
            names.append(mutate.__name__.strip("_"))
        text = _written(random_, body, names)
        data, is_cut = http_request(path, text), False
        if random_.random() < 0.15:
            transport = random_.choice(_TRANSPORTS)
            data, is_cut = transport(random_, path, text)
            names.append(transport.__name__.strip("_"))
        yield Malformed(f"{number}: {path} {' + '.join(names)}", data, is_cut=is_cut)


def _valid(random_: random.Random, path: str) -> dict[str, Any]:
    body = copy.deepcopy(random_.choice(_BASES[path]))
    fields = dict(_OWN[path])
    if "completions" in path:
        fields = _GENERATION | fields
        body["max_tokens"] = 2
    for name in random_.sample(sorted(fields), min(len(fields), random_.randint(0, 4))):
        body[name] = copy.deepcopy(random_.choice(fields[name]))
    return body


def _odd(random_: random.Random) -> Any:
    return copy.deepcopy(random_.choice(random_.choice((NUMBERS, TEXTS, OTHERS))))


def _somewhere(random_: random.Random, body: Any) -> tuple[Any, Any] | None:
    """A container within the body, and a key of it; None in one that is empty."""
    while isinstance(body, dict | list) and body:
        key = random_.choice(list(body)) if isinstance(body, dict) else random_.randrange(len(body))
        if not isinstance(body[key], dict | list) or random_.random() < 0.5:
            return body, key
        body = body[key]
    return None


def _drop(random_: random.Random, path: str, body: Any) -> Any:
    if place := _somewhere(random_, body):
        del place[0][place[1]]
    return body


def _add_of_another_route(random_: random.Random, path: str, body: Any) -> Any:
    if isinstance(body, dict):
        fields = {**_GENERATION, **_OWN[random_.choice(POSTS)], **random_.choice(_BASES[random_.choice(POSTS)])}
        name = random_.choice(sorted(fields))
        body[name] = copy.deepcopy(fields[name])
    return body


def _rename(random_: random.Random, path: str, body: Any) -> Any:
    if isinstance(body, dict) and body:
        name = random_.choice(sorted(body))
        value = body.pop(name)
        new = random_.choice(
            [name.upper(), name + "s", name + "\0", " " + name, "", name.replace("_", "-"), "__class__"]
        )
        body[new] = value
    return body


def _odd_value(random_: random.Random, path: str, body: Any) -> Any:
    place = _somewhere(random_, body)
    if place is None:
        return _odd(random_)
    place[0][place[1]] = _odd(random_)
    return body


def _odd_field(random_: random.Random, path: str, body: Any) -> Any:
    """A field that the route has, or that others have, with any value."""
    if isinstance(body, dict):
        names = {*_GENERATION, *_OWN[path], "suffix", "documents", "functions", "grammar", "prompt_embeds", "best_of"}
        body[random_.choice(sorted(names))] = _odd(random_)
    return body


def _boundary(random_: random.Random, path: str, body: Any) -> Any:
    if isinstance(body, dict):
        names = [
            "max_tokens",
            "min_tokens",
            "n",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "priority",
            "logprobs",
            "top_logprobs",
            "prompt_logprobs",
            "truncate_prompt_tokens",
            "best_of",
            "presence_penalty",
            "repetition_penalty",
            "timeout",
            "dimensions",
        ]
        body[random_.choice(names)] = random_.choice(NUMBERS)
    return body


def _swap_list_and_scalar(random_: random.Random, path: str, body: Any) -> Any:
    if place := _somewhere(random_, body):
        holder, key = place
        value = holder[key]
        holder[key] = (value[0] if value else None) if isinstance(value, list) else [value]
    return body


def _nest(random_: random.Random, path: str, body: Any) -> Any:
    if place := _somewhere(random_, body):
        value: Any = place[0][place[1]]
        for _ in range(random_.choice((1, 2, 60, 150, 240))):
            value = [value] if random_.random() < 0.5 else {"a": value}
        place[0][place[1]] = value
    return body


def _repeat(random_: random.Random, path: str, body: Any) -> Any:
    if place := _somewhere(random_, body):
        value = place[0][place[1]]
        if isinstance(value, list | str) and len(value) < 1000:
            place[0][place[1]] = value * random_.choice((2, 17, 130, 1100))
    return body


def _conflict(random_: random.Random, path: str, body: Any) -> Any:
    pairs: list[dict[str, Any]] = [
        {"echo": True},
        {"logprobs": False, "top_logprobs": 3},
        {"min_tokens": 5, "max_tokens": 2},
        {"n": 3, "best_of": 2},
        {"stop": ""},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"temperature": 0, "n": 5},
        {"suffix": "a"},
        {"model": "nobody"},
        {"model": ""},
        {"stream": "true"},
        {"stream_options": {"include_usage": True}},
        {"max_tokens": 1, "max_completion_tokens": 2},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        {"tools": [], "tool_choice": "required"},
        {"allowed_token_ids": [1], "logit_bias": {"1": -100}},
        {"prompt": "a", "content": "a", "messages": []},
        {"ignore_eos": True, "structured_outputs": {"choice": ["a"]}},
    ]
    return {**body, **random_.choice(pairs)} if isinstance(body, dict) else body


def _form(random_: random.Random, path: str, body: Any) -> Any:
    """A grammar, a schema or an expression that may be no good."""
    texts = [
        "(a+)+b",
        "(?=a)b",
        "a{1000000}",
        "[",
        "\\",
        "start: start",
        "start: a a\na: start",
        "root ::= root",
        "%import os",
        "(.{1,500}){1,500}",
        'root ::= "a"',
        "\\p{L}{300}",
        "",
        "a|",
        "^$",
        "\\bfoo",
        "start: /x/ %ignore /y/",
    ]
    schemas: list[Any] = [
        {"$ref": "#"},
        {"$ref": "http://127.0.0.1:1/x"},
        {"type": "nothing"},
        {"type": 7},
        {"properties": []},
        {"enum": []},
        {"enum": [[]]},
        {"minItems": 10**9, "type": "array"},
        {"minLength": -1},
        {"pattern": "("},
        {"anyOf": []},
        {"not": {}},
        {"allOf": [{"type": "string"}, {"type": "number"}]},
        {"required": "a"},
        {"multipleOf": 0},
        {"const": "\ud800"},
        {"minimum": 2, "maximum": 1},
        {"format": "nothing"},
        {"$defs": 7},
        True,
        [],
        {"additionalProperties": 3},
    ]
    if isinstance(body, dict):
        kind = random_.choice(("regex", "grammar", "json", "choice", "schema", "tool"))
        schema = copy.deepcopy(random_.choice(schemas))
        if kind == "schema":
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        elif kind == "tool":
            body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
            body["tool_choice"] = "required"
        else:
            value = schema if kind == "json" else [random_.choice(texts)] if kind == "choice" else random_.choice(texts)
            body["structured_outputs"] = {kind: value}
    return body


_MUTATIONS: list[Callable[[random.Random, str, Any], Any]] = [
    *(_drop, _add_of_another_route, _rename, _odd_value, _odd_value, _odd_field, _odd_field, _boundary, _boundary),
    *(_swap_list_and_scalar, _nest, _repeat, _conflict, _form),
]


def _written(random_: random.Random, body: Any, names: list[str]) -> bytes:
    """As JSON, which may be broken: one choice in six, named in `names`."""
    text = json.dumps(body, ensure_ascii=random_.random() < 0.7)
    data = text.encode("utf-8", "surrogatepass")
    breaks: dict[str, Callable[[], bytes]] = {
        "cut text": lambda: data[: random_.randrange(len(data))],
        "one byte changed": lambda: _changed(random_, data),
        "duplicate key": lambda: data[:-1] + b', "model": 1, "model": "toy"}' if data.endswith(b"}") else data * 2,
        "trailing": lambda: data + random_.choice((b",", b"}", b" x", data, b"\0", b"\n\n")),
        "byte order mark": lambda: b"\xef\xbb\xbf" + data,
        "utf-16": lambda: text.encode("utf-16", "surrogatepass"),
        "single quotes": lambda: data.replace(b'"', b"'"),
        "deep": lambda: b'{"prompt":' + b"[" * 3000 + b"]" * random_.choice((0, 3000)) + b"}",
        "digits": lambda: data.replace(b": ", b": " + b"9" * 5000, 1),
        "exponent": lambda: data.replace(b"2", b"1e999"),
        "nothing": lambda: b"",
        "no object": lambda: random_.choice((b"null", b"[]", b'"a"', b"7", b"true", b"NaN", b"{", b"\0", b"-")),
    }
    if random_.random() < 1 / 6:
        name = random_.choice(sorted(breaks))
        names.append(name)
        return breaks[name]()
    return data


def _changed(random_: random.Random, data: bytes) -> bytes:
    at = random_.randrange(len(data))
    return data[:at] + bytes([random_.randrange(256)]) + data[at + 1 :]


def _method(random_: random.Random, path: str, body: bytes) -> tuple[bytes, bool]:
    method = random_.choice(("PUT", "PATCH", "DELETE", "OPTIONS", "FOO", "__CLASS__", "TRACE", "post"))
    return http_request(path, body, method=method), False


def _path(random_: random.Random, path: str, body: bytes) -> tuple[bytes, bool]:
    odd = [
        "/" + path,
        path + "/",
        path + "//",
        path.upper(),
        path + "%00",
        path + "?x=%ff",
        path + "/..",
        "/%2e%2e" + path,
        path + "#a",
        path + ";a=b",
        "*",
        "http://x" + path,
        path.replace("/", "\\"),
        path + "?" + "a=b&" * 2000,
    ]
    return http_request(random_.choice(odd), body), False


def _content_type(random_: random.Random, path: str, body: bytes) -> tuple[bytes, bool]:
    odd = [
        "text/xml",
        "multipart/form-data; boundary=x",
        "application/json; charset=utf-16",
        "application/octet-stream",
        "",
        "a" * 500,
        "application/JSON",
        "image/png",
        "application/x-www-form-urlencoded",
        "json",
    ]
    return http_request(path, body, headers=(("Content-Type", random_.choice(odd)),)), False


def _header(random_: random.Random, path: str, body: bytes) -> tuple[bytes, bool]:
    odd = [
        ("Content-Encoding", "gzip"),
        ("Authorization", "Bearer \xff"),
        ("X-Request-Id", "a" * 5000),
        ("Cookie", "a=b" * 900),
        ("X-Request-Id", "{}\x85"),
        ("Expect", "100-continue"),
        ("Upgrade", "websocket"),
        ("Range", "bytes=0-" + ",0-" * 900),
        ("Accept", "text/html"),
        ("X-Forwarded-For", "1.2.3.4"),
        ("Host", "y"),
        ("A" * 70_000, "b"),
        ("X", "a" * 70_000),
        ("Content-Length", "-1"),
        ("Content-Length", "+5"),
        ("Transfer-Encoding", "gzip"),
        ("Connection", "keep-alive"),
        ("X-HTTP-Method-Override", "DELETE"),
        ("Content-Length", str(10**30)),
        ("If-None-Match", '"'),
        ("Te", "trailers"),
    ]
    return http_request(path, body, headers=(random_.choice(odd),)), False


def _framing(random_: random.Random, path: str, body: bytes) -> tuple[bytes, bool]:
    chunked = (("Transfer-Encoding", "chunked"),)
    hidden = http_request("/v1/models", method="GET")
    return random_.choice(
        [
            (http_request(path, b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), headers=chunked), False)
            if body
            else (http_request(path, b"0\r\n\r\n", headers=chunked), False),
            (http_request(path, b"zz\r\n" + body, headers=chunked), False),
            (http_request(path, b"5\r\nabcdefgh\r\n0\r\n\r\n", headers=chunked), False),
            (http_request(path, b"0\r\n\r\n" + hidden, headers=(*chunked, ("Content-Length", "5"))), False),
            (http_request(path, body, headers=(("Content-Length", "5"), ("Content-Length", "6"))), False),
            (http_request(path, body + hidden, headers=(("Content-Length", str(len(body))),)), False),
        ]
    )


def _cut_short(random_: random.Random, path: str, body: bytes) -> tuple[bytes, bool]:
    data = http_request(path, body)
    return data[: random_.randrange(1, len(data))], True


_TRANSPORTS = [_method, _path, _content_type, _header, _framing, _cut_short]


# By hand.


def made_by_hand() -> Iterator[Malformed]:
    """Every odd value in the fields that are an index, a size or a name; odd paths and methods to every route."""
    for path, field in [
        ("/v1/completions", "prompt"),
        ("/v1/chat/completions", "messages"),
        ("/tokenize", "content"),
        ("/detokenize", "tokens"),
        ("/v1/embeddings", "input"),
    ]:
        for number, value in enumerate([*OTHERS, *TEXTS[:16], *NUMBERS[-8:]]):
            body = json.dumps({field: value, "max_tokens": 1}).encode()
            yield Malformed(f"hand: {path} {field} {number}", http_request(path, body))
    for field in ("logit_bias", "stop_token_ids", "allowed_token_ids", "bad_words", "stop"):
        for number, value in enumerate(
            [[], {}, [-1], [32], [2**31], [2**70], [1.5], {"-1": 1}, {"32": 1}, {"1": 1e999}]
        ):
            body = json.dumps({"prompt": "a", "max_tokens": 1, field: value}).encode()
            yield Malformed(f"hand: {field} {number}", http_request("/v1/completions", body))
    for path in GETS:
        for method in ("POST", "DELETE", "OPTIONS", "FOO"):
            yield Malformed(f"hand: {method} {path}", http_request(path, method=method), method)
        for odd in ("/", "?" + "a" * 3000, "%00", "/../..", "%ff"):
            yield Malformed(f"hand: GET {path}{odd[:9]}", http_request(path + odd, method="GET"), "GET")
    for request_id in ("x", "%00", "../x", "a" * 3000, "%ff%fe", "%0d%0aX:y", "*", "%7b%7d"):
        data = http_request(f"/v1/requests/{request_id}", method="DELETE")
        yield Malformed(f"hand: DELETE {request_id[:9]}", data, "DELETE")


# Judging.


@dataclass(frozen=True)
class Verdict:
    status: int
    """0: the connection was closed without an answer, which only one that was cut may be."""
    fault: str | None
    message: str = ""
    """Of the error that was told."""


_TELLS = re.compile(
    r"0x[0-9a-f]{6,}|Traceback|File \"|\.py\b|site-packages|/work/|/usr/|/root/|/home/|/tmp/| object at |<class|"
    r"\b(?:pydantic|starlette|fastapi|uvicorn|jinja2|tokenizers|llguidance|torch|transformers|msgspec|zmq)\b",
    re.IGNORECASE,
)
"""What no message to a client may hold: addresses, paths, objects, the libraries that made it (S13)."""


def ask(host: str, port: int, request: Malformed) -> Verdict:
    try:
        with socket.create_connection((host, port), timeout=LONGEST_S) as connection:
            connection.sendall(request.data)
            if request.is_cut:
                connection.shutdown(socket.SHUT_WR)
            response = HTTPResponse(connection, method=request.method)
            response.begin()
            body = response.read()
    except TimeoutError:
        return Verdict(0, f"no answer in {LONGEST_S:g} s")
    except (ConnectionError, HTTPException) as error:
        # Where we said more than it would read, its close is a reset that may take the answer with it.
        may_close = request.is_cut or len(request.data) > 60_000
        return Verdict(0, None if may_close else f"no answer: {error!r}")
    status = response.status
    allowed = EXPECTED | ({504} if b'"timeout"' in request.data else set())
    if status not in allowed:
        return Verdict(status, f"status {status}: {body[:200]!r}")
    if not response.headers.get("X-Request-Id"):
        return Verdict(status, "no X-Request-Id")
    if status != 200:
        return _judged_error(status, response.headers.get("Content-Type", ""), body)
    if response.headers.get("Content-Type", "").startswith("text/event-stream"):
        return _judged_stream(body)
    return Verdict(200, None)


def _judged_error(status: int, content_type: str, body: bytes) -> Verdict:
    if content_type != "application/json":
        return Verdict(status, f"an error that is {content_type!r}: {body[:200]!r}")
    try:
        content = strict_json(body.decode())
    except ValueError:
        return Verdict(status, f"an error that is no JSON: {body[:200]!r}")
    return _judged_content(status, content)


def _judged_content(status: int, content: Any) -> Verdict:
    error = content.get("error") if isinstance(content, dict) and set(content) == {"error"} else None
    if not isinstance(error, dict) or not {"message", "type", "param", "code"} <= set(error):
        return Verdict(status, f"an error of another shape: {content!r:.200}")
    message = error["message"]
    if not (isinstance(message, str) and isinstance(error["type"], str) and isinstance(error["code"], str)):
        return Verdict(status, f"an error of another shape: {content!r:.200}")
    if error["code"] in ("internal_error", "engine_unavailable"):
        return Verdict(status, f"it says that we failed: {message}")
    if not message or len(message) > 1000 or (found := _TELLS.search(message)):
        what = "empty or endless" if not message or len(message) > 1000 else f"telling {found[0]!r}"
        return Verdict(status, f"its message is {what}: {message[:300]}")
    return Verdict(status, None, message)


def _judged_stream(body: bytes) -> Verdict:
    try:
        told = list(events(iter(body.decode().splitlines())))
    except (AssertionError, ValueError) as error:
        return Verdict(200, f"a stream that is none: {error!r}")
    for event in told:
        if "error" in event:
            return _judged_content(200, event)
    return Verdict(200, None)
