"""What a request passes before it meets a route. Real sockets; the routes are the test's own."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterator

import pytest
from fastapi import FastAPI, Request
from pydantic import SecretStr

from server.settings import Settings
from support.live_server import LiveServer, live_server, until
from support.scripted import scripted_client

LIMIT = 4096
PROBES = ("/live", "/ready", "/health", "/ping")


def add_routes(app: FastAPI) -> None:
    @app.post("/echo")
    async def echo(request: Request) -> dict[str, int]:
        return {"length": len(await request.body())}

    @app.post("/parsed")
    async def parsed(body: dict[str, int]) -> dict[str, int]:
        return body

    @app.get("/fault")
    async def fault() -> None:
        raise ZeroDivisionError("a secret of ours at 0x7f00")

    @app.get("/patient")
    async def patient(request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    @app.get("/names")
    async def names(request: Request) -> dict[str, str]:
        return {"id": request.state.request_id, "hex": request.state.request_hex}


@pytest.fixture(scope="module")
def open_server() -> Iterator[LiveServer]:
    settings = Settings(max_body_bytes=LIMIT)
    with live_server(scripted_client(), settings, prepare=add_routes) as server:
        yield server


@pytest.fixture(scope="module")
def locked_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# one a line\nthird\n\n  clé  \n", encoding="utf-8")
    settings = Settings(
        api_key=(SecretStr("first"), SecretStr("second")),
        api_key_file=keys,
        cors_origin=("https://page.example",),
        access_log=False,
        page=False,
    )
    with live_server(scripted_client(), settings, prepare=add_routes) as server:
        yield server


# Request ids.


@pytest.mark.parametrize("path", ["/live", "/v1/models", "/nowhere", "/fault"])
def test_every_answer_carries_a_request_id(open_server: LiveServer, path: str) -> None:
    assert re.fullmatch(r"req-[0-9a-f]{32}", open_server.http.get(path).headers["X-Request-Id"])


def test_a_sane_request_id_of_the_caller_comes_back(open_server: LiveServer) -> None:
    answer = open_server.http.get("/names", headers={"X-Request-Id": "job-7/α".encode("ascii", "ignore").decode()})
    assert answer.headers["X-Request-Id"] == answer.json()["id"] == "job-7/"


@pytest.mark.parametrize("asked", ["x" * 129, "two words", "caf\xe9", ""])
def test_an_odd_request_id_is_replaced(open_server: LiveServer, asked: str) -> None:
    answer = open_server.http.get("/live", headers={"X-Request-Id": asked.encode("latin-1")})
    assert answer.headers["X-Request-Id"].startswith("req-")


def test_two_requests_with_one_id_stay_apart_inside(open_server: LiveServer) -> None:
    first, second = (open_server.http.get("/names", headers={"X-Request-Id": "same"}).json() for _ in range(2))
    assert first["id"] == second["id"] == "same"
    assert first["hex"] != second["hex"]


# The last resort.


def test_an_unexpected_error_is_a_500_without_internals_and_the_server_goes_on(
    open_server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    answer = open_server.http.get("/fault", headers={"X-Request-Id": "find-me"})
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "the server failed to answer this request",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert "find-me" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert open_server.http.get("/live").status_code == 200


def test_bytes_that_are_no_http_get_the_usual_error(open_server: LiveServer) -> None:
    answer = open_server.raw(b"GARBAGE\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"x-request-id: req-" in head.lower()
    assert b'"code": "invalid_http"' in body


# Bodies.


@pytest.mark.parametrize(
    "claimed", [None, "application/json; charset=utf-8", "application/vnd.x+json", "application/x-www-form-urlencoded"]
)
def test_a_body_is_json_whatever_curl_says_of_it(open_server: LiveServer, claimed: str | None) -> None:
    headers = {} if claimed is None else {"Content-Type": claimed}
    answer = open_server.http.post("/v1/completions", content=b'{"prompt": [5], "max_tokens": 1}', headers=headers)
    assert answer.status_code == 200


def test_a_body_that_says_it_is_no_json_is_refused(open_server: LiveServer) -> None:
    answer = open_server.http.post("/parsed", content=b"<a/>", headers={"Content-Type": "text/xml"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert "text/xml" in answer.json()["error"]["message"]


def test_a_body_at_the_limit_passes(open_server: LiveServer) -> None:
    assert open_server.http.post("/echo", content=b"x" * LIMIT).json() == {"length": LIMIT}


def test_a_body_declared_too_long_is_refused_before_it_is_sent(open_server: LiveServer) -> None:
    head = f"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 30}\r\n\r\n"
    answer = open_server.raw(head.encode())
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()
    assert b'"code": "request_too_large"' in answer


@pytest.mark.parametrize("path", ["/echo", "/parsed"])
def test_a_body_of_unknown_length_is_refused_when_it_has_come_too_far(open_server: LiveServer, path: str) -> None:
    with socket.create_connection((open_server.host, open_server.port), timeout=10) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        # Never ends: the answer must come without the last chunk.
        connection.sendall(b"1000\r\n" + b"x" * 0x1000 + b"\r\n1\r\nx\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_a_413_has_the_usual_shape(open_server: LiveServer) -> None:
    error = open_server.http.post("/echo", content=b"x" * (LIMIT + 1)).json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "request_too_large")
    assert str(LIMIT) in error["message"]


# Keys.


@pytest.mark.parametrize("headers", [
    {"Authorization": "Bearer first"},
    {"Authorization": "bearer second"},
    {"X-Api-Key": "third"},
    {"Authorization": "Bearer clé".encode()},
])  # fmt: skip
def test_any_of_the_keys_opens_by_either_header(locked_server: LiveServer, headers: dict[str, str]) -> None:
    assert locked_server.http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("headers", [
    {},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer firs"},
    {"Authorization": "Bearer FIRST"},
    {"Authorization": "Bearer first second"},
    {"Authorization": "Basic first"},
    {"X-Api-Key": "# one a line"},
])  # fmt: skip
def test_anything_else_is_a_401(locked_server: LiveServer, headers: dict[str, str]) -> None:
    answer = locked_server.http.get("/v1/models", headers=headers)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert answer.json()["error"]["type"] == "authentication_error"
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_only_the_probes_are_open_without_a_key(locked_server: LiveServer) -> None:
    assert [locked_server.http.get(path).status_code for path in PROBES] == [200] * 4
    paths = {*locked_server.app.openapi()["paths"], "/openapi.json", "/docs", "/nowhere", "/"}
    assert "/v1/models" in paths
    odd = {"//health", "/health/", "/health/../v1/models", "/HEALTH", "/health%2f"}
    for path in sorted((paths | odd) - set(PROBES)):
        for method in ("GET", "POST", "DELETE", "OPTIONS"):
            target = path.replace("{model}", "x")
            answer = locked_server.raw(f"{method} {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 401 "), (method, path, answer[:80])


# Browsers.


def test_pages_of_other_origins_stay_out(open_server: LiveServer) -> None:
    answer = open_server.http.post("/echo", content=b"{}", headers={"Origin": "https://evil.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize("origin", ["null", "https://127.0.0.1.evil.example", ""])
def test_an_origin_that_only_looks_right_stays_out(open_server: LiveServer, origin: str) -> None:
    assert open_server.http.get("/v1/models", headers={"Origin": origin}).status_code == 403


def test_our_own_page_may_call(open_server: LiveServer) -> None:
    assert open_server.http.get("/v1/models", headers={"Origin": open_server.url}).status_code == 200


def test_an_origin_that_was_let_in_gets_its_preflight_without_a_key(locked_server: LiveServer) -> None:
    asked = {
        "Origin": "https://page.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    preflight = locked_server.http.options("/v1/completions", headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["Access-Control-Allow-Origin"] == "https://page.example"
    refused = locked_server.http.get("/v1/models", headers={"Origin": "https://page.example"})
    assert refused.status_code == 401
    assert refused.headers["Access-Control-Allow-Origin"] == "https://page.example"


# The access log and the HTTP books.


def test_the_access_log_names_the_request_and_leaves_probes_out(
    open_server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cellserve.access")
    for path in (*PROBES, "/metrics"):
        open_server.http.get(path)
    open_server.http.get("/v1/models?secret=1", headers={"X-Request-Id": "mine"})
    open_server.raw(b"GET /a%0ab HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    first, second = [record.getMessage() for record in caplog.records if record.name == "cellserve.access"]
    assert re.fullmatch(r"127\.0\.0\.1 GET /v1/models 200 0\.\d{3}s mine", first)
    assert "/a%0ab 404" in second


def test_http_answers_are_counted_by_route_never_by_path(open_server: LiveServer) -> None:
    before = open_server.metric("http_requests_total", handler="/v1/models/{model:path}", status="404")
    for name in ("a", "b/c"):
        open_server.http.get(f"/v1/models/{name}")
    assert open_server.metric("http_requests_total", handler="/v1/models/{model:path}", status="404") == before + 2
    open_server.http.get("/nowhere-at-all")
    text = open_server.http.get("/metrics").text
    assert "nowhere-at-all" not in text
    assert 'handler="none"' in text


def test_a_client_that_left_is_counted_as_499(open_server: LiveServer) -> None:
    with socket.create_connection((open_server.host, open_server.port)) as connection:
        connection.sendall(b"GET /patient HTTP/1.1\r\nHost: x\r\n\r\n")
    until(lambda: open_server.metric("http_requests_total", handler="/patient", status="499") == 1)


def test_a_client_that_left_in_the_middle_of_its_body_is_no_fault_of_ours(
    open_server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection((open_server.host, open_server.port)) as connection:
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 30\r\n\r\n{"prompt"')
    until(lambda: open_server.metric("http_requests_total", handler="/v1/completions", status="499") == 1)
    assert "failed" not in caplog.text
