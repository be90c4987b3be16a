"""`python -m load.bench_stalls`: what one request costs the others: how long large bodies hold up the event loop, and
how much of it a refusal takes.

A server with its engine in a process of its own (load/bench_http.py, case engine) carries a few paced streams. Stalls:
a task in the server asks for a turn every millisecond; the figure is the longest it waited during one request, the
least of several tries, because other work on the machine only adds to it. "nothing" is the same without a request.
Refusals: CPU time of the server process for each of many refused requests, less what the streams take in the same
time; on a connection that stays open and on new ones, one behind the other and each after a rest, in which caches grow
cold. Prints one JSON object a line. Run it in the repository's root: PYTHONPATH=tests.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
from load.bench_http import PATIENCE_S, Reader, commit, machine
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from support.bench_engine import FIRST_WORD, STEP_VARIABLE, TOKENIZER_VARIABLE, write_tokenizer

STREAMS = 16
STEP_MS = 10
REFUSALS = 300
REST_S = 0.005

BODIES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a short prompt": {"prompt": [FIRST_WORD], "max_tokens": 1},
    "100,000 ids": {"prompt": [FIRST_WORD] * 100_000, "max_tokens": 1},
    "a text of 100,000 tokens": {"prompt": "a" * 100_000, "max_tokens": 1},
    "a body of 1 MB": {"prompt": "a" * 1_000_000, "max_tokens": 1},
}
"""The tokenizer has a token a character, so that a text has as many tokens as no text of its length would elsewhere."""


REFUSED: dict[str, tuple[int, dict[str, Any], int]] = {
    "queue_full": (429, {"prompt": "a" * 2000, "max_tokens": 1}, 2 * STREAMS),
    "invalid_value": (400, {"prompt": "a" * 2000, "max_tokens": "one"}, STREAMS),
}
"""Status, body, and the streams beside it: as many as are let in, or as many as run."""

WAYS: dict[str, tuple[dict[str, str], float]] = {
    "open connection": ({}, 0.0),
    "new connections": ({"Connection": "close"}, 0.0),
    "open connection, each alone": ({}, REST_S),
    "new connections, each alone": ({"Connection": "close"}, REST_S),
}
"""Headers, and how long the client rests between two."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m load.bench_stalls", description="what one request costs others")
    parser.add_argument("--tries", type=int, default=7)
    args = parser.parse_args(argv)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    records = []
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("stalls and refusals", total=len(BODIES) * args.tries + len(REFUSED) * len(WAYS))
        with serving(STREAMS) as (_, port), streaming(port, STREAMS - 1):
            for name, body in BODIES.items():
                waits = []
                for _ in range(args.tries):
                    waits.append(stall_ms(port, body))
                    progress.advance(task)
                records.append(record("stall", name, min(waits), "ms"))
        for code, (status, body, streams) in REFUSED.items():
            with serving(STREAMS) as (server, port), streaming(port, streams):
                for way, (headers, rest_s) in WAYS.items():
                    value = refusal_ms(server, port, body, status, headers, rest_s)
                    records.append(record("refusal", f"{status} {code}, {way}", value, "ms of server CPU"))
                    progress.advance(task)
    for line in records:
        print(json.dumps(line))
    return 0


def stall_ms(port: int, body: dict[str, Any]) -> float:
    """The longest turn of the server's loop while it answers this."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, trust_env=False) as client:
        client.get("/worst_turn")
        if body:
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text[:300]
        else:
            time.sleep(0.5)
        return float(client.get("/worst_turn").json()["worst_ms"])


def refusal_ms(
    server: psutil.Process, port: int, body: dict[str, Any], status: int, headers: dict[str, str], rest_s: float
) -> float:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, trust_env=False) as client:

        def refuse() -> None:
            answer = client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == status, answer.text[:300]
            time.sleep(rest_s)

        refuse()
        started_s, before_s = time.perf_counter(), cpu_s(server)
        for _ in range(REFUSALS):
            refuse()
        elapsed_s, busy_s = time.perf_counter() - started_s, cpu_s(server) - before_s
    before_s = cpu_s(server)
    time.sleep(elapsed_s)
    return 1000 * (busy_s - (cpu_s(server) - before_s)) / REFUSALS


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def serving(streams: int) -> Iterator[tuple[psutil.Process, int]]:
    """(the server's process, its port); half as many run as are let in."""
    with tempfile.TemporaryDirectory(prefix="bench-stalls-") as folder:
        environment = os.environ | {
            TOKENIZER_VARIABLE: str(write_tokenizer(Path(folder))),
            STEP_VARIABLE: str(STEP_MS),
        }
        command = (sys.executable, "-m", "load.bench_http", "--serve", "engine", "--streams", str(streams))
        server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            yield psutil.Process(server.pid), int(server.stdout.readline())
        finally:
            server.kill()
            server.wait()
            assert server.stdout is not None
            server.stdout.close()


@contextmanager
def streaming(port: int, streams: int) -> Iterator[None]:
    """Streams that are read on a thread of this process; as many as run have begun."""
    is_over = threading.Event()
    with Reader(port, streams) as reader:
        reader.read_until(lambda: reader.num_begun == min(streams, STREAMS), PATIENCE_S)

        def read() -> None:
            while not is_over.is_set():
                reader.read_for(0.05)

        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def record(bench: str, case: str, value: float, unit: str) -> dict[str, Any]:
    figures = {"value": float(f"{value:.3g}"), "unit": unit, "floor": None, "peer": None, "peer_value": None}
    told = {"machine": machine(), "commit": commit(), "date": datetime.now(UTC).date().isoformat()}
    return {"bench": f"http {bench}", "case": case, **figures, **told}


if __name__ == "__main__":
    sys.exit(main())
