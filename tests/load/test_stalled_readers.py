"""R7 in its long form: two hundred clients that read nothing cost little and are left; one that reads feels none."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from server.streams import STALLED_S
from support.bench_engine import FIRST_WORD, STEP_VARIABLE, TOKENIZER_VARIABLE, write_tokenizer

ROOT = Path(__file__).parents[2]
STALLED = 200
TOKENS = 2000
MAX_GROWTH_BYTES = 30 * 1024 * 1024
PATIENCE_S = 120.0


@contextmanager
def serving(folder: Path) -> Iterator[tuple[psutil.Process, int]]:
    """(the server's process, its port), its engine in another process."""
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        TOKENIZER_VARIABLE: str(write_tokenizer(folder)),
        STEP_VARIABLE: "5",
    }
    command = (sys.executable, "-m", "load.bench_http", "--serve", "engine", "--streams", str(STALLED + 8))
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stdout is not None
    try:
        yield psutil.Process(server.pid), int(server.stdout.readline())
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def ask(port: int) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    body = json.dumps({"prompt": [FIRST_WORD], "max_tokens": TOKENS, "stream": True}).encode()
    connection.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    return connection


def left(client: httpx.Client) -> int:
    found = re.search(r"^cellserve:slow_readers_left_total\S* (\S+)$", client.get("/metrics").text, re.MULTILINE)
    assert found
    return int(float(found[1]))


@pytest.mark.full
def test_r7_two_hundred_stalled_readers_are_bounded_left_and_felt_by_nobody(tmp_path: Path) -> None:
    with serving(tmp_path) as (server, port), ExitStack() as connections:
        client = connections.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, trust_env=False)
        )
        asked = {"prompt": [FIRST_WORD], "max_tokens": TOKENS}
        alone = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        before = server.memory_info().rss
        for _ in range(STALLED):
            connections.enter_context(ask(port))
        assert client.post("/v1/completions", json=asked).json()["choices"][0]["text"] == alone
        growth, deadline_s = 0, time.monotonic() + STALLED_S + PATIENCE_S
        while left(client) < STALLED:
            growth = max(growth, server.memory_info().rss - before)
            assert time.monotonic() < deadline_s, f"{left(client)} of {STALLED} were left"
        assert growth <= MAX_GROWTH_BYTES
        assert client.get("/load").json() == {"server_load": 0}
