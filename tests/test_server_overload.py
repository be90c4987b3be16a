"""More than a server can take: refused before it is read, ended when it never comes. Real sockets."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from server.http_protocol import Protocol
from server.settings import Settings
from support.live_server import TIMEOUT_S, LiveServer, live_server, read_to_end, until
from support.scripted import ScriptedExecutor, scripted_client

ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")
PLACES = 4


@pytest.fixture
def executor() -> Iterator[ScriptedExecutor]:
    executor = ScriptedExecutor()
    yield executor
    executor.release()


@pytest.fixture
def server(executor: ScriptedExecutor) -> Iterator[LiveServer]:
    client = scripted_client(executor, max_num_seqs=PLACES, max_waiting=0)
    with live_server(client, Settings(max_queued_tokens=100, access_log=False)) as server:
        yield server


def hold(server: LiveServer, executor: ScriptedExecutor, prompt: list[int], n: int) -> threading.Thread:
    """A request that keeps its places until the executor is released."""
    executor.hold()
    body = {"prompt": prompt, "n": n, "max_tokens": 2, "temperature": 1.0}
    holder = threading.Thread(target=lambda: server.http.post("/v1/completions", json=body))
    holder.start()
    until(lambda: server.call(lambda: server.app.state.serving.admission.in_use) == n)
    return holder


def answer_of(connection: socket.socket) -> bytes:
    """One answer with a length."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65536)
    head, _, body = received.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


@pytest.mark.parametrize("path", ROUTES)
def test_r2_while_no_place_is_free_a_request_is_refused_before_its_body_comes(
    server: LiveServer, executor: ScriptedExecutor, path: str
) -> None:
    holder = hold(server, executor, [5], PLACES)
    before = server.metric("vllm:admission_rejections_total", reason="queue_full")
    with socket.create_connection((server.host, server.port), timeout=TIMEOUT_S) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{{".encode())
        answer = answer_of(connection)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b'"code": "queue_full"' in answer
        assert b"retry-after: 1\r\n" in answer.lower()
        # The rest of it belongs to nobody, and the connection to the next request.
        connection.sendall(b" " * 999_999 + b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer_of(connection).startswith(b"HTTP/1.1 200 ")
    assert server.metric("vllm:admission_rejections_total", reason="queue_full") == before + 1
    assert server.metric("http_requests_total", handler=path, status="429") == 1
    executor.release()
    holder.join()


def test_r2_while_the_queue_holds_no_token_more_a_request_is_refused_unread(
    server: LiveServer, executor: ScriptedExecutor
) -> None:
    holder = hold(server, executor, [5] * 100, 1)
    answer = server.http.post("/v1/completions", content=b"{ this is no JSON")
    assert answer.status_code == 429
    assert "100 of 100 prompt tokens" in answer.json()["error"]["message"]
    executor.release()
    holder.join()
    answer = server.http.post("/v1/completions", content=b"{ this is no JSON")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_r2_what_asks_for_no_place_is_answered_by_a_full_server(server: LiveServer, executor: ScriptedExecutor) -> None:
    holder = hold(server, executor, [5], PLACES)
    assert server.http.get("/v1/models").status_code == 200
    assert server.http.get("/health").status_code == 200
    assert server.http.post("/detokenize", json={"tokens": []}).status_code != 429
    executor.release()
    holder.join()


def test_r2_with_one_place_free_a_request_that_asks_for_more_is_read_and_told_how_many_are_taken(
    server: LiveServer, executor: ScriptedExecutor
) -> None:
    holder = hold(server, executor, [5], PLACES - 1)
    answer = server.http.post("/v1/completions", content=json.dumps({"prompt": [5], "n": 2, "temperature": 1.0}))
    assert answer.status_code == 429
    assert "3 of 4 sequences are taken, 2 more asked for" in answer.json()["error"]["message"]
    executor.release()
    holder.join()


def test_r9_500_senders_that_never_finish_are_ended_and_hold_up_nobody(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Protocol, "header_s", 0.5)
    monkeypatch.setattr(Protocol, "body_s", 0.5)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    with ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection((server.host, server.port), TIMEOUT_S)) for _ in range(500)
        ]
        for number, connection in enumerate(slow):
            connection.sendall(head if number % 2 else head + b"Content-Length: 100\r\n\r\n{")
        body = {"prompt": [5], "max_tokens": 3}
        assert server.http.post("/v1/completions", json=body).status_code == 200
        for connection in slow:
            assert read_to_end(connection).startswith(b"HTTP/1.1 408 ")
    until(lambda: server.call(lambda: len(server.connections)) <= 1)  # the client's own
