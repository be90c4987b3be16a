"""Clients that do not read: bounded, left after a while, and felt by nobody else. Real sockets with small buffers."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.client import InProcessClient
from engine.loop import EngineLoop
from engine.scheduler import SchedulerLimits
from server.run import UNSENT_BYTES
from server.settings import Settings
from server.streams import LARGEST_WRITE
from support.bench_engine import FIRST_WORD, IdleExecutor, bench_info, next_token, write_tokenizer
from support.live_server import TIMEOUT_S, LiveServer, live_server, read_to_end, until

STREAMS = 8
ENDLESS = 1 << 20
RECEIVE_BYTES = 64 * 1024
"""Less than the loopback's segments, and each would wait for a timer."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@contextmanager
def serving(tokenizer: Path, **options: float) -> Iterator[LiveServer]:
    """An engine that draws as fast as it can."""

    def engine_loop() -> EngineLoop:
        limits = SchedulerLimits(max_num_seqs=STREAMS, prefill_budget=512, mixed_budget=512, prefill_chunk=64)
        return EngineLoop(IdleExecutor(STREAMS, 0.0005), limits, prefix_cache=False)  # type: ignore[arg-type]

    client = InProcessClient(lambda progress: (engine_loop(), bench_info(str(tokenizer), STREAMS)))
    with live_server(client, Settings(model="words", access_log=False, **options)) as server:  # type: ignore[arg-type]
        yield server


def ask(server: LiveServer, max_tokens: int) -> socket.socket:
    """A stream's connection, of which nothing is read yet and little can be on its way."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    connection.settimeout(TIMEOUT_S)
    connection.connect((server.host, server.port))
    body = json.dumps({"prompt": [FIRST_WORD], "max_tokens": max_tokens, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def text_of(received: bytes) -> str:
    """Of an answer's frames; the framing of HTTP is taken off."""
    _, _, body = received.partition(b"\r\n\r\n")
    frames = re.sub(rb"(?:^|\r\n)[0-9a-f]+\r\n", b"", body)
    chunks = [json.loads(line) for line in re.findall(rb"data: (\{.*\})", frames)]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def words(tokenizer: Path, count: int) -> str:
    vocab = json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
    by_id = {number: token.replace("\u0120", " ") for token, number in vocab.items()}
    return "".join(by_id[next_token(position)] for position in range(count))


def unsent(server: LiveServer) -> list[int]:
    """Bytes that each connection holds in this process."""

    def sizes() -> list[int]:
        return [protocol.transport.get_write_buffer_size() for protocol in server._server.server_state.connections]

    return server.call(sizes)


def backlog(server: LiveServer) -> int:
    """Tokens that wait for a client."""
    client = server.app.state.serving.client
    return server.call(lambda: sum(entry.stream.num_unread for entry in client._open.values()))


def outstanding(server: LiveServer) -> int:
    """Choices inside the engine. Asked on the server's loop: a test that spins would keep it from working."""
    client = server.app.state.serving.client
    return server.call(lambda: client.num_outstanding)


def test_r7_a_client_that_reads_nothing_is_bounded_then_left_and_its_request_cancelled(tokenizer: Path) -> None:
    with serving(tokenizer, slow_reader_timeout=1.0) as server, ask(server, ENDLESS) as stalled:
        until(lambda: backlog(server) > 0)
        assert max(unsent(server)) <= 64 * 1024 + 2 * LARGEST_WRITE
        until(lambda: outstanding(server) == 0)
        assert server.metric("cellserve:slow_readers_left_total") == 1
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 1
        # What the system still held is all that comes, and then the end.
        received = read_to_end(stalled)
        assert b"[DONE]" not in received
        assert len(received) < 16 * UNSENT_BYTES


def test_r8_a_client_that_stops_and_goes_on_gets_all_of_it_without_a_gap(tokenizer: Path) -> None:
    count = 3000
    with serving(tokenizer) as server, ask(server, count) as stopped:
        until(lambda: backlog(server) > 0)
        until(lambda: outstanding(server) == 0)
        assert text_of(read_to_end(stopped)) == words(tokenizer, count)
        assert server.metric("cellserve:slow_readers_left_total") == 0


def test_a_stalled_reader_delays_nobody(tokenizer: Path) -> None:
    count = 500
    with serving(tokenizer) as server, ask(server, ENDLESS):
        until(lambda: backlog(server) > 0)
        answers: dict[int, str] = {}

        def read(number: int) -> None:
            with ask(server, count) as connection:
                answers[number] = text_of(read_to_end(connection))

        readers = [threading.Thread(target=read, args=(number,)) for number in range(STREAMS - 1)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(TIMEOUT_S)
        assert answers == dict.fromkeys(range(STREAMS - 1), words(tokenizer, count))


def test_a_stopping_server_does_not_wait_for_a_client_that_reads_nothing(tokenizer: Path) -> None:
    with serving(tokenizer) as server, ask(server, ENDLESS):
        until(lambda: backlog(server) > 0)
