"""Requests that are wrong below JSON: framing, sizes, slowness, compression (S6)."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from server.http_protocol import Protocol
from server.settings import Settings
from support.live_server import TIMEOUT_S, LiveServer, live_server, read_to_end, until
from support.scripted import scripted_client

BODY = json.dumps({"prompt": [5, 6], "max_tokens": 2}).encode()
PATIENCE_S = 0.3


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(scripted_client(), Settings(access_log=False, max_body_bytes=64 * 1024)) as server:
        yield server


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, server: LiveServer) -> LiveServer:
    """Its connections begin with little patience."""
    monkeypatch.setattr(Protocol, "header_s", PATIENCE_S)
    monkeypatch.setattr(Protocol, "body_s", PATIENCE_S)
    monkeypatch.setattr(Protocol, "unread_s", PATIENCE_S)
    return server


@contextmanager
def connection(server: LiveServer) -> Iterator[socket.socket]:
    with socket.create_connection((server.host, server.port), timeout=TIMEOUT_S) as connected:
        yield connected


def head(*headers: str, line: str = "POST /v1/completions HTTP/1.1") -> bytes:
    return "\r\n".join((line, "Host: x", *headers, "", "")).encode("latin-1")


def statuses(answer: bytes) -> list[int]:
    """Of all answers in what came over one connection."""
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


def is_ours(answer: bytes) -> bool:
    """Whether the one answer has the one shape of all errors."""
    top, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    return set(error) >= {"message", "type", "param", "code"} and b"x-request-id: " in top.lower()


# Framing: one request, one answer.


@pytest.mark.parametrize("headers", [
    ("Content-Length: 5", "Transfer-Encoding: chunked"),
    ("Transfer-Encoding: chunked", "Content-Length: 5"),
    ("Content-Length: 0", "Transfer-Encoding: chunked"),
    ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
    ("Transfer-Encoding: chunked, chunked",),
    ("Transfer-Encoding: gzip, chunked",),
    ("Transfer-Encoding: chunked, identity",),
    ("Transfer-Encoding: identity",),
    ("Transfer-Encoding: xchunked",),
    ("Transfer-Encoding:\x0bchunked",),
    ("Transfer-Encoding : chunked",),
    ("Transfer-Encoding: \"chunked\"",),
    ("Content-Length: 5", "Content-Length: 6"),
    ("Content-Length: 5, 6",),
    ("Content-Length: +5",),
    ("Content-Length: -5",),
    ("Content-Length: 0x5",),
    ("Content-Length: 5 5",),
    ("Content-Length: \xb2",),
    ("Content-Length: 5.0",),
    ("Content-Length:",),
    ("Content-Length: " + "9" * 40,),
    ("Host: y",),
    ("X: a\r\n\x00b",),
    ("X: a\rb",),
    ("X: a\x00b",),
    ("X",),
    (": x",),
    ("X Y: z",),
])  # fmt: skip
def test_a_request_that_two_could_read_in_two_ways_is_refused_and_its_connection_closed(
    server: LiveServer, headers: tuple[str, ...]
) -> None:
    """S6: whatever stands behind it never becomes a request of its own (smuggling)."""
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = server.raw(head(*headers) + b"0\r\n\r\n" + hidden)
    # A length of more digits than any body has is one that is too large.
    assert statuses(answer) in ([400], [413]), answer[:300]
    assert is_ours(answer)
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize("line", [
    *("GET /v1/models", "GET  /v1/models HTTP/1.1", "GET"),
    *("\x00", "GET /a b HTTP/1.1", "G\x00T / HTTP/1.1", "GET /\x7f HTTP/1.1", "GET /\xe9 HTTP/1.1"),
    *("\x16\x03\x01\x02\x00\x01\x00\x01\xfc", "get /v1/models HTTP/1.1\x0b", "GET /v1/models HTTP/1.1x"),
])  # fmt: skip
def test_a_first_line_that_is_none_is_refused(server: LiveServer, line: str) -> None:
    """S6."""
    answer = server.raw(head(line=line))
    assert statuses(answer) == [400]
    assert is_ours(answer)


def test_chunks_of_wrong_sizes_are_refused(server: LiveServer) -> None:
    """S6: and so is what comes behind them."""
    for chunk in (
        b"zz\r\n",
        b"-1\r\nx\r\n",
        b"0x5\r\nabcde\r\n",
        b"5\r\nabcdefg\r\n0\r\n\r\n",
        b" 5\r\nabcde\r\n",
        b"5" * 40,
    ):
        answer = server.raw(head("Transfer-Encoding: chunked") + chunk + b"\r\n0\r\n\r\n")
        assert len(statuses(answer)) <= 1, (chunk, answer)
        assert statuses(answer) == [400], (chunk, answer)


def test_what_stands_behind_a_body_is_the_next_request_and_no_more(server: LiveServer) -> None:
    """S6: pipelined requests are answered in order, one each."""
    one = head(f"Content-Length: {len(BODY)}") + BODY
    last = head("Connection: close", line="GET /v1/models HTTP/1.1")
    assert statuses(server.raw(one + one + last)) == [200, 200, 200]


def test_a_request_of_http_1_0_is_answered_and_closed(server: LiveServer) -> None:
    answer = server.raw(b"GET /v1/models HTTP/1.0\r\n\r\n")
    assert statuses(answer) == [200]


# Sizes.


@pytest.mark.parametrize("headers", [
    ("X: " + "a" * 1_000_000,),
    tuple(f"X{i}: a" for i in range(10_000)),
    ("Authorization: Bearer " + "a" * 200_000,),
    ("Cookie: " + "a=b; " * 50_000,),
])  # fmt: skip
def test_headers_beyond_the_limit_are_refused(server: LiveServer, headers: tuple[str, ...]) -> None:
    """S6: with 431, and before more than a few 10 KB of them are held."""
    with connection(server) as connected:
        with suppress(ConnectionResetError, BrokenPipeError):  # it may close before we have said all of it
            connected.sendall(head(*headers))
        answer = read_to_end(connected)
    # A reset may take the answer with it; what must not come is a success.
    assert statuses(answer) in ([431], []), answer[:200]
    if answer:
        assert is_ours(answer)


def test_a_first_line_beyond_the_limit_is_a_431(server: LiveServer) -> None:
    """S6."""
    with connection(server) as connected:
        connected.sendall(b"GET /" + b"a" * 70_000)
        answer = read_to_end(connected)
    assert statuses(answer) == [431]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"


def test_headers_below_the_limit_pass(server: LiveServer) -> None:
    answer = server.raw(head("X: " + "a" * 12_000, "Connection: close", line="GET /v1/models HTTP/1.1"))
    assert statuses(answer) == [200]


@pytest.mark.parametrize("declared", [64 * 1024 + 1, 1 << 30, 1 << 62, 10**19, 10**19 + 1])
def test_a_body_that_is_declared_too_long_is_refused_unread(server: LiveServer, declared: int) -> None:
    """S6."""
    answer = server.raw(head(f"Content-Length: {declared}"))
    assert statuses(answer) == [413]
    assert is_ours(answer)


# Compression.


@pytest.mark.parametrize(("coding", "body"), [
    ("gzip", gzip.compress(b" " * 50_000_000 + BODY, mtime=0)),
    ("deflate", zlib.compress(BODY)),
    ("br", b"\x0b\x02\x80{}\x03"),
    ("gzip, identity", gzip.compress(BODY, mtime=0)),
    ("x-gzip", gzip.compress(BODY, mtime=0)),
    ("GZIP", gzip.compress(BODY, mtime=0)),
], ids=("bomb", "deflate", "br", "after another", "its old name", "capitals"))  # fmt: skip
def test_a_compressed_body_is_refused_and_never_unpacked(server: LiveServer, coding: str, body: bytes) -> None:
    """S6: a bomb of 50 KB would be 50 MB of JSON."""
    answer = server.http.post("/v1/completions", content=body, headers={"Content-Encoding": coding})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")


def test_a_compressed_body_that_does_not_say_so_is_no_json(server: LiveServer) -> None:
    answer = server.http.post("/v1/completions", content=gzip.compress(BODY, mtime=0))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_a_body_that_says_it_is_as_it_is_passes(server: LiveServer) -> None:
    assert (
        server.http.post("/v1/completions", content=BODY, headers={"Content-Encoding": "identity"}).status_code == 200
    )


# Slowness.


def drip(connected: socket.socket, stop: threading.Event) -> None:
    """A byte now and then, as whoever wants to keep a connection does."""
    while not stop.wait(PATIENCE_S / 10):
        try:
            connected.sendall(b"a")
        except OSError:
            return


@pytest.mark.parametrize("start", [b"", b"P", head()[:-2], head("X: 1")[:-1]])
def test_headers_that_never_end_end_the_connection(impatient: LiveServer, start: bytes) -> None:
    """S6: each connection costs a descriptor, so there must not be one for as long as somebody likes."""
    with connection(impatient) as connected:
        connected.sendall(start)
        answer = read_to_end(connected)
    assert statuses(answer) == ([408] if start else [])
    if start:
        assert is_ours(answer)


@pytest.mark.parametrize("start", [
    b"GET /", head() [:-2] + b"X: ", head("Content-Length: 60000"), head("Transfer-Encoding: chunked") + b"fff\r\n",
])  # fmt: skip
def test_a_byte_now_and_then_does_not_put_the_end_off(impatient: LiveServer, start: bytes) -> None:
    """S6: slowloris, in the first line, the headers, a body and a chunk."""
    stop = threading.Event()
    with connection(impatient) as connected:
        connected.sendall(start)
        dripping = threading.Thread(target=drip, args=(connected, stop))
        dripping.start()
        answer = read_to_end(connected)
        stop.set()
        dripping.join()
    assert statuses(answer) in ([408], [])  # a byte that comes behind the close resets what was said


def test_a_body_that_is_shorter_than_declared_is_a_408(impatient: LiveServer) -> None:
    """S6: and the handler that waited for it is gone."""
    with connection(impatient) as connected:
        connected.sendall(head("Content-Length: 100") + b"{")
        answer = read_to_end(connected)
    assert statuses(answer) == [408]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    assert impatient.http.post("/v1/completions", content=BODY).status_code == 200


def test_a_body_behind_a_refusal_has_the_same_patience(impatient: LiveServer) -> None:
    """S6: whoever was told 413 or 415 may not go on sending for ever."""
    with connection(impatient) as connected:
        connected.sendall(head("Content-Length: 60000", "Content-Type: text/xml") + b"<")
        answer = read_to_end(connected)
    assert statuses(answer) == [415]


def test_a_connection_at_rest_between_two_requests_has_its_own_time(impatient: LiveServer) -> None:
    """Keep-alive is not slowness: the next request may come after more than the patience for its headers."""
    with connection(impatient) as connected:
        connected.sendall(head(line="GET /live HTTP/1.1"))
        answer = b""
        while not answer.endswith(b"}"):
            answer += connected.recv(65536)
        connected.settimeout(PATIENCE_S * 3)
        with pytest.raises(TimeoutError):
            connected.recv(1)
        connected.settimeout(TIMEOUT_S)
        connected.sendall(head("Connection: close", line="GET /live HTTP/1.1"))
        assert statuses(read_to_end(connected)) == [200]


def test_a_request_that_takes_long_to_answer_is_not_a_slow_one(impatient: LiveServer) -> None:
    with connection(impatient) as connected:
        body = json.dumps({"prompt": [5], "max_tokens": 500}).encode()
        connected.sendall(head(f"Content-Length: {len(body)}", "Connection: close") + body)
        assert statuses(read_to_end(connected)) == [200]


def test_an_answer_that_nobody_reads_ends_the_connection(impatient: LiveServer) -> None:
    """S6: its bytes are held for as long as it is open."""
    ids = [token % 1000 for token in range(400)]
    body = json.dumps({"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 20}).encode()
    one = head(f"Content-Length: {len(body)}") + body
    at_rest = impatient.call(lambda: len(impatient.connections))
    with socket.socket() as connected:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connected.connect((impatient.host, impatient.port))
        connected.setblocking(False)
        # Until it takes no more, because it cannot get rid of its answers.
        with suppress(BlockingIOError):
            for _ in range(10_000):
                connected.send(one)
        until(lambda: impatient.call(lambda: len(impatient.connections)) <= at_rest)
