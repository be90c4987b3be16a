"""Who is let in: deny by default once there is a key, and no page of a browser without being named (S8, S9)."""

from __future__ import annotations

import hmac
import itertools
import json
import socket
from collections.abc import Iterator

import pytest
from pydantic import SecretStr

from engine.errors import ConfigError
from server import guards, settings
from server.guards import KeyGuard
from server.settings import Settings
from server.web_page import Page
from support.live_server import LiveServer, live_server
from support.scripted import scripted_client
from support.scripted_server import ServerProcess

KEY = "sk-the-one"
OPEN = {"/live", "/ready", "/health", "/ping"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "FOO")


@pytest.fixture(scope="module")
def locked() -> Iterator[LiveServer]:
    with live_server(scripted_client(), Settings(api_key=(SecretStr(KEY),), access_log=False, page=False)) as server:
        yield server


@pytest.fixture(scope="module")
def keyless() -> Iterator[LiveServer]:
    with live_server(scripted_client(), Settings(access_log=False)) as server:
        yield server


def ask(server: LiveServer, target: str, method: str = "GET", *headers: str, host: str = "x") -> int:
    """The status of one request whose first line and headers are exactly these."""
    lines = (f"{method} {target} HTTP/1.1", f"Host: {host}", *headers, "Connection: close", "", "")
    answer = server.raw("\r\n".join(lines).encode("latin-1"))
    return int(answer.split(b" ", 2)[1])


def routes_of(server: LiveServer) -> list[str]:
    """Every path that anything answers at, those outside the OpenAPI document too."""
    parts, found = [*server.app.routes], set()
    while parts:
        route = parts.pop()
        parts += getattr(getattr(route, "original_router", None), "routes", [])
        if path := getattr(route, "path", None):
            found.add(path.replace("{model:path}", "x").replace("{request_id}", "x"))
    assert {"/v1/completions", "/v1/models/x", "/v1/requests/x", "/metrics", "/openapi.json", "/live"} <= found
    return sorted(found)


# Keys.


def test_every_route_is_closed_to_every_method_without_a_key(locked: LiveServer) -> None:
    """S8: a list of what is open, never of what is closed; so a route that is added tomorrow is closed too."""
    unknown = ["/", "/docs", "/redoc", "/nowhere", "/admin", "/v2/x", "/.env", "/invocations", "/*", "/static/x"]
    for path in sorted({*routes_of(locked), *unknown} - OPEN):
        for method in METHODS:
            assert ask(locked, path, method) == 401, (method, path)


@pytest.mark.parametrize("path", sorted(OPEN))
def test_what_is_open_is_open_to_read_and_nothing_else(locked: LiveServer, path: str) -> None:
    """S8."""
    assert ask(locked, path) == ask(locked, path, "HEAD") == 200
    assert {ask(locked, path, method) for method in METHODS if method not in ("GET", "HEAD")} == {405}


def test_the_page_is_open_and_all_that_it_asks_for_is_not() -> None:
    """S8: its files are the same for everybody; what it shows of the engine needs the key, which a person types in."""
    with live_server(scripted_client(), Settings(api_key=(SecretStr(KEY),), access_log=False)) as server:
        files = Page().paths
        assert {ask(server, path) for path in files} == {200}
        assert {ask(server, path, method) for path in files for method in METHODS if method not in ("GET", "HEAD")} == {
            405
        }
        assert {ask(server, path) for path in {*routes_of(server)} - OPEN - files} == {401}
        for path in ("/page/../metrics", "/page/", "/page/x.js", "/page/..%2f..%2fapp.py", "/page/%2e%2e/app.py", "//"):
            assert ask(server, path) in (400, 401), path


@pytest.mark.parametrize("target", [
    *("//v1/models", "/v1//models", "/v1/models/", "/v1/models//", "/V1/MODELS", "/v1/models?", "/v1/models;x=/live"),
    *("/live/../v1/models", "/live/..%2fv1/models", "/%2e%2e/v1/models", "/./v1/models", "/health/%2e%2e/v1/models"),
    *("/v1%2fmodels", "/v1/%6dodels", "/%76%31/models", "/live%00/v1/models", "/live%0d%0a/v1/models", "/live%20"),
    *("/v1/models?path=/live", "/v1/models%3f/live", "/live%3f", "/live%23", "/LIVE", "/live.", "/live/", "//live"),
    *("http://x/live", "http://x/v1/models", "http://x:1@y/v1/models", "//x/live", "*", "live", "v1/models"),
    *("/metrics", "/metrics?x=/health", "/version", "/load", "/server_info", "/tokenizer_info", "/openapi.json"),
])  # fmt: skip
def test_no_spelling_of_a_path_gets_around_the_key(locked: LiveServer, target: str) -> None:
    """S8: the path that is let in is the very one that is routed; neither is made from a URL."""
    assert ask(locked, target) in (400, 401)
    assert ask(locked, target, "POST") in (400, 401)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "x/live", "x/live?", "x?y=/live", "localhost/health#", "", "/live", "a b"]
)
def test_no_host_header_gets_around_the_key(locked: LiveServer, host: str) -> None:
    """S8: Starlette makes request.url of it; the guard never looks there."""
    assert ask(locked, "/v1/models", host=host) in (400, 401)
    assert ask(locked, "/v1/models", "GET", "X-Forwarded-Host: x/live", "X-Original-URL: /live", host=host) in (
        400,
        401,
    )


@pytest.mark.parametrize("headers", [
    [],
    ["Authorization: Bearer"],
    ["Authorization: Bearer "],
    ["Authorization: Bearer sk-the-on"],
    ["Authorization: Bearer sk-the-onee"],
    ["Authorization: Bearer SK-THE-ONE"],
    ["Authorization: Bearer sk-the-one sk-the-one"],
    ["Authorization: Bearer sk-the-one\t,"],
    ["Authorization: Bearer \"sk-the-one\""],
    ["Authorization: Basic c2stdGhlLW9uZQ=="],
    ["Authorization: sk-the-one"],
    ["Authorization: BearerX sk-the-one"],
    ["Authorization: Bearer *"],
    ["X-Api-Key: sk-the-on"],
    ["X-Api-Key:"],
    ["X-API-Key: null", "Authorization: Bearer undefined"],
    ["Cookie: api_key=sk-the-one"],
    ["Proxy-Authorization: Bearer sk-the-one"],
    ["X-Forwarded-For: 127.0.0.1", "X-Real-IP: 127.0.0.1"],
    ["Authorization: Bearer \xff\xfe"],
    ["Authorization: Bearer wrong", "Authorization: Bearer sk-the-one"],
])  # fmt: skip
def test_nothing_but_the_key_is_the_key(locked: LiveServer, headers: list[str]) -> None:
    """S8."""
    assert ask(locked, "/v1/models", "GET", *headers) == 401
    assert ask(locked, f"/v1/models?api_key={KEY}&key={KEY}&token={KEY}", "GET", *headers) == 401


def test_the_key_opens_by_either_header(locked: LiveServer) -> None:
    assert ask(locked, "/v1/models", "GET", f"Authorization: Bearer {KEY}") == 200
    assert ask(locked, "/v1/models", "GET", f"x-api-key: {KEY}") == 200


def test_a_refusal_reads_no_body(locked: LiveServer) -> None:
    """S6, S8: somebody without a key cannot make us hold 8 MB."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {8 * 1024 * 1024}\r\n\r\n"
    with socket.create_connection((locked.host, locked.port), timeout=10) as connection:
        connection.sendall(head.encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")


def test_keys_are_compared_by_digest_all_of_them_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """S8: neither the length of a guess, nor how many of its letters are right, nor which key it is near shows."""
    compared: list[tuple[int, int]] = []

    def watched(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return compare(a, b)

    compare = hmac.compare_digest
    monkeypatch.setattr(guards.hmac, "compare_digest", watched)
    guard = KeyGuard(lambda *_: None, keys=["a", "b" * 1000, "c"])  # type: ignore[arg-type, return-value]
    for guess in ("a", "x", "b" * 999, ""):
        guard._is_known(guards._digest(guess.encode()))
    assert compared == [(32, 32)] * 12
    assert "b" * 100 not in repr(vars(guard)), "the guard holds digests, not keys"


@pytest.mark.parametrize("value", ["", ",", " , ", "  "])
def test_a_key_option_without_a_key_is_refused_rather_than_taken_for_none(value: str) -> None:
    """S8: `--api-key "$KEY"` in a script whose KEY is not set must not open the server to everybody."""
    with pytest.raises(ConfigError, match="--api-key holds no key"):
        settings.load({"api_key": [value]})


def test_an_empty_variable_is_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As everywhere; compose.yaml passes each of them on, empty or not."""
    monkeypatch.setenv("CELLSERVE_API_KEY", "")
    assert settings.load().settings.keys() == ()


def test_an_empty_key_in_the_yaml_file_is_refused(tmp_path: object) -> None:
    """S8."""
    file = str(tmp_path) + "/c.yaml"
    with open(file, "w") as out:
        out.write("api_key: ['']\n")
    with pytest.raises(ConfigError, match="holds no key"):
        settings.load({}, file)


@pytest.mark.parametrize(("options", "is_open"), [
    ({}, False),
    ({"host": "localhost"}, False),
    ({"host": "::1"}, False),
    ({"host": "127.0.0.53"}, False),
    ({"host": "0.0.0.0"}, True),
    ({"host": "::"}, True),
    ({"host": "192.168.1.2"}, True),
    ({"host": "gpu.lan"}, True),
    ({"host": "0.0.0.0", "api_key": ("k",)}, False),
    ({"host": "0.0.0.0", "uds": "/run/x"}, False),
])  # fmt: skip
def test_a_server_that_is_open_to_others_knows_it(options: dict[str, object], is_open: bool) -> None:
    """S9."""
    assert Settings(**options).is_open is is_open  # type: ignore[arg-type]


@pytest.mark.parametrize(("module", "options"), [
    ("support.scripted_server", ()),
    ("support.workers_server", ("--api-workers", "2")),
])  # fmt: skip
def test_a_server_that_is_open_to_others_says_so(module: str, options: tuple[str, ...]) -> None:
    """S8, S9: at the start. The default is an address that nobody else reaches."""
    assert settings.load().settings.host == "127.0.0.1"
    with ServerProcess("--host", "0.0.0.0", *options, module=module) as server:
        server.wait_for_stderr("no API key is asked for: whoever reaches 0.0.0.0 may use this server")


# Browsers.


REBOUND = ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example:8000", "1.2.3.4.nip.io",
           "xn--lcalhost-5xa", "localhostx", "127.0.0.1x", "[::1].evil.example", "null", ""]  # fmt: skip


@pytest.mark.parametrize("host", REBOUND)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "GET", "FOO"])
def test_a_page_whose_name_was_made_to_point_here_may_not_call(keyless: LiveServer, method: str, host: str) -> None:
    """S8: DNS rebinding makes origin and Host the same; only a name that nobody else can own tells our own page."""
    assert ask(keyless, "/v1/completions", method, f"Origin: http://{host}", host=host) in (400, 403)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8000", "localhost", "localhost:8000", "LOCALHOST", "[::1]:80",
                                  "[::1]", "192.168.0.9:8000", "app.localhost:8000", socket.gethostname()])  # fmt: skip
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_our_own_page_under_a_name_of_our_own_may_call(keyless: LiveServer, host: str, scheme: str) -> None:
    assert ask(keyless, "/v1/models", "GET", f"Origin: {scheme}://{host}", host=host) == 200


def test_with_a_key_our_own_page_may_have_any_name(locked: LiveServer) -> None:
    """A page that was made to point here does not know the key, and no browser adds it."""
    key = f"Authorization: Bearer {KEY}"
    assert ask(locked, "/v1/models", "GET", "Origin: https://llm.example", key, host="llm.example") == 200
    assert ask(locked, "/v1/models", "GET", "Origin: https://other.example", key, host="llm.example") == 403
    assert ask(locked, "/v1/models", "GET", "Origin: https://llm.example", host="llm.example") == 401


def test_the_name_that_was_asked_to_listen_on_is_our_own() -> None:
    with live_server(scripted_client(), Settings(access_log=False, host="gpu.lan")) as server:
        assert ask(server, "/v1/models", "GET", "Origin: http://gpu.lan", host="gpu.lan") == 200
        assert ask(server, "/v1/models", "GET", "Origin: http://gpu.lan.evil", host="gpu.lan.evil") == 403


def test_no_answer_names_an_origin_by_default(keyless: LiveServer) -> None:
    """S8: CORS is closed."""
    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, method in itertools.product(("https://evil.example", "null", keyless.url), ("GET", "POST", "OPTIONS")):
        answer = keyless.http.request(method, "/v1/models", headers={"Origin": origin, **preflight})
        assert not [name for name in answer.headers if name.startswith("access-control")], (origin, method)


def test_an_origin_that_was_let_in_is_named_alone_and_brings_no_credentials() -> None:
    """S8."""
    named = Settings(access_log=False, cors_origin=("https://page.example",))
    with live_server(scripted_client(), named) as server:
        headers = server.http.get("/v1/models", headers={"Origin": "https://page.example"}).headers
        assert headers["Access-Control-Allow-Origin"] == "https://page.example"
        assert "Access-Control-Allow-Credentials" not in headers
        assert server.http.get("/v1/models", headers={"Origin": "https://page.example.evil"}).status_code == 403
        assert server.http.get("/v1/models", headers={"Origin": "https://PAGE.example"}).status_code == 403


# Websockets.


def test_an_upgrade_is_no_way_in(locked: LiveServer, keyless: LiveServer) -> None:
    """S8: nothing here is a websocket, and a request to become one is an ordinary request."""
    upgrade = ("Upgrade: websocket", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13")
    lines = ("GET /v1/models HTTP/1.1", "Host: x", "Connection: Upgrade, close", *upgrade, "", "")
    assert locked.raw("\r\n".join(lines).encode()).startswith(b"HTTP/1.1 401 ")
    assert keyless.raw("\r\n".join(lines).encode()).startswith(b"HTTP/1.1 200 ")


def test_one_key_cannot_end_what_another_runs() -> None:
    """S8, S15."""
    keys = Settings(api_key=(SecretStr("a"), SecretStr("b")), access_log=False)
    with live_server(scripted_client(), keys) as server:
        body = json.dumps({"prompt": [5], "max_tokens": 400, "stream": True})
        headers = {"Authorization": "Bearer a", "X-Request-Id": "mine"}
        with server.http.stream("POST", "/v1/completions", content=body, headers=headers) as answer:
            lines = answer.iter_lines()
            next(lines)
            other = server.http.delete("/v1/requests/mine", headers={"Authorization": "Bearer b"})
            assert other.status_code == 404
            assert [line for line in lines if line.startswith("data: ")][-1] == "data: [DONE]"
