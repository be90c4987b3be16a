"""`python -m load.bench_http`: what the HTTP layer costs, beside a raw ASGI app that sends the same bytes.

Each case is a server process of its own on real uvicorn; this process opens the streams over plain sockets and counts.
The engine draws one token a stream and step and computes nothing (support/bench_engine.py):

    raw      an ASGI app without a framework: a future a stream and step, a frame rendered long before, `send`
    stack    the whole server, in step with its engine: each token is decoded, detokenised, rendered, sent as a frame
    engine   the whole server with the engine in a process of its own, that runs ahead: tokens share frames

Rounds alternate between the cases, and the figure of a case is its median: the machine's other work hits all alike. A
figure per second of the server process's CPU time stands beside the one per second of time. Prints one JSON object a
line on standard output, in the form that benchmarks.jsonl collects. Run it in the repository's root with tests/ on the
path: PYTHONPATH=tests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import uvicorn
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engine.client import ProcessClient
from engine.config import EngineConfig
from server.app import create_app
from server.run import bind, settle, uvicorn_config
from server.settings import Settings
from server.streams import frame
from support.bench_engine import (
    FIRST_WORD,
    MARK,
    NUM_WORDS,
    STEP_VARIABLE,
    TOKENIZER_VARIABLE,
    LockStepClient,
    bench_info,
    write_tokenizer,
)

CASES = ("raw", "stack", "engine")
WARM_UP_S = 0.5
READ_EVERY_S = 0.01
"""The reader sleeps between two looks at its sockets: waking for every frame would cost more than reading it."""
PATIENCE_S = 60.0
MODEL = "bench"


@dataclass(frozen=True, slots=True)
class Round:
    """One case measured once, all per second."""

    tokens: float
    frames: float
    tokens_per_cpu_s: float
    """Of the server process alone."""
    frames_per_cpu_s: float
    server_cpu: float
    """Cores."""
    reader_cpu: float
    frame_bytes: float


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.serve is not None:
        return _serve(args.serve, args.streams, args.loop)
    console = Console(stderr=True)
    rounds: dict[str, list[Round]] = {case: [] for case in args.cases}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rounds"))
    with (
        tempfile.TemporaryDirectory(prefix="bench-http-") as folder,
        Progress(*columns, TimeElapsedColumn(), console=console) as progress,
    ):
        environment = os.environ | {
            TOKENIZER_VARIABLE: str(write_tokenizer(Path(folder))),
            STEP_VARIABLE: str(args.step_ms),
        }
        task = progress.add_task("starting", total=args.repeat * len(args.cases))
        for _ in range(args.repeat):
            for case in args.cases:
                progress.update(task, description=f"{case}, {args.streams} streams")
                command = (sys.executable, "-m", "load.bench_http", "--serve", case, "--streams", str(args.streams))
                measured = measure((*command, "--loop", args.loop), environment, args.streams, args.seconds)
                rounds[case].append(measured)
                progress.advance(task)
    for record in _records(rounds, args.streams, args.loop):
        print(json.dumps(record))
    return 0


# --- the reader -------------------------------------------------------------------------------------------------------


def measure(command: Sequence[str], environment: dict[str, str], streams: int, seconds: float) -> Round:
    """Start the server, open all streams, and count what comes for `seconds` once every stream has begun."""
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            raise RuntimeError(f"the server did not start: {' '.join(command)}")
        with Reader(int(line), streams) as reader:
            reader.read_until(lambda: reader.num_begun == streams, PATIENCE_S)
            reader.read_for(WARM_UP_S)
            process = psutil.Process(server.pid)
            before, started_s = process.cpu_times(), time.perf_counter()
            mine_before_s, counted = time.process_time(), (reader.tokens, reader.frames, reader.bytes)
            reader.read_for(seconds)
            elapsed_s = time.perf_counter() - started_s
            after, mine_s = process.cpu_times(), time.process_time() - mine_before_s
    finally:
        server.send_signal(signal.SIGKILL if server.poll() is None else 0)
        server.wait()
        server.stdout.close()
    cpu_s = after.user + after.system - before.user - before.system
    tokens, frames, size = reader.tokens - counted[0], reader.frames - counted[1], reader.bytes - counted[2]
    return Round(
        tokens / elapsed_s,
        frames / elapsed_s,
        tokens / cpu_s,
        frames / cpu_s,
        cpu_s / elapsed_s,
        mine_s / elapsed_s,
        size / frames,
    )


class Reader:
    """Every stream a plain socket, none of it parsed: tokens carry a mark, and a frame opens one bracket."""

    def __init__(self, port: int, streams: int) -> None:
        self.tokens = self.frames = self.bytes = 0
        self._begun: set[int] = set()
        self._poll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        body = json.dumps({"prompt": [FIRST_WORD], "max_tokens": 1 << 21, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        for _ in range(streams):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(head + body)
            connection.setblocking(False)
            self._sockets[connection.fileno()] = connection
            self._poll.register(connection, select.EPOLLIN)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._poll.close()
        for connection in self._sockets.values():
            connection.close()

    @property
    def num_begun(self) -> int:
        """Streams that have sent a token."""
        return len(self._begun)

    def read_for(self, seconds: float) -> None:
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            self._read()

    def read_until(self, condition: Callable[[], bool], patience_s: float) -> None:
        end_s = time.perf_counter() + patience_s
        while not condition():
            if time.perf_counter() > end_s:
                raise RuntimeError(f"{self.num_begun} of {len(self._sockets)} streams have begun")
            self._read()

    def _read(self) -> None:
        time.sleep(READ_EVERY_S)
        for number, _ in self._poll.poll(0):
            data = self._sockets[number].recv(1 << 18)
            tokens = data.count(MARK.encode())
            if not data or (not tokens and b"error" in data):
                raise RuntimeError(f"a stream ended: {data.decode(errors='replace')[:500]}")
            if tokens:
                self._begun.add(number)
            self.tokens += tokens
            self.frames += data.count(b"[")
            self.bytes += len(data)


# --- the servers ------------------------------------------------------------------------------------------------------


def _serve(case: str, streams: int, loop: str) -> int:
    """Serve one case until killed; the port is the only line on standard output."""
    settings = Settings(model=MODEL, access_log=False, max_waiting=streams)
    listener = bind("127.0.0.1", 0)
    if case == "raw":
        app: Any = RawApp()
    elif case == "stack":
        app = create_app(LockStepClient(bench_info(os.environ[TOKENIZER_VARIABLE], streams)), settings)
    else:
        config = EngineConfig(MODEL, max_num_seqs=streams, max_waiting=streams)
        app = create_app(ProcessClient(config, module="support.bench_engine"), settings)
        watch = LoopWatch()
        app.get("/worst_turn")(watch.worst_turn)
    server = uvicorn.Server(uvicorn_config(app, settings))

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[listener]))
            if case == "engine":
                group.create_task(watch.run())
            if case != "raw":
                await app.state.lifecycle.wait_loaded()
            settle()  # as a served process does
            print(listener.getsockname()[1], flush=True)

    if loop == "uvloop":
        import uvloop  # type: ignore[import-not-found]

        uvloop.run(run())
    else:
        asyncio.run(run())
    return 0


class LoopWatch:
    """How long the event loop kept a task waiting that only wants its turn."""

    def __init__(self) -> None:
        self._worst_s = 0.0

    async def run(self) -> None:
        while True:
            started_s = time.perf_counter()
            await asyncio.sleep(0.001)
            self._worst_s = max(self._worst_s, time.perf_counter() - started_s - 0.001)

    async def worst_turn(self) -> dict[str, float]:
        """In ms, since it was asked last."""
        worst_s, self._worst_s = self._worst_s, 0.0
        return {"worst_ms": 1000 * worst_s}


class RawApp:
    """What the bytes cost without us: each stream waits for the step, then sends a frame that was rendered before."""

    def __init__(self) -> None:
        head = {"id": f"cmpl-{'0' * 32}", "object": "text_completion", "created": int(time.time()), "model": MODEL}
        holes = {"index": 0, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
        self._frames = [
            frame(
                {
                    **head,
                    "system_fingerprint": f"fp_{'0' * 12}",
                    "choices": [{**holes, "text": f" w{'o' * (i % 5)}rd{i}{MARK}"}],
                }
            )
            for i in range(NUM_WORDS)
        ]
        self._waiting: list[asyncio.Future[None]] = []
        self._unsent = 0
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        while (await receive()).get("more_body"):
            pass
        self._task = self._task or asyncio.create_task(self._step())
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        loop, count = asyncio.get_running_loop(), 0
        while True:
            turn = loop.create_future()
            self._waiting.append(turn)
            await turn
            await send({"type": "http.response.body", "body": self._frames[count % NUM_WORDS], "more_body": True})
            self._unsent -= 1
            count += 1

    async def _step(self) -> None:
        while True:
            waiting, self._waiting = self._waiting, []
            self._unsent += len(waiting)
            for turn in waiting:
                turn.set_result(None)
            await asyncio.sleep(0)
            while self._unsent:
                await asyncio.sleep(0)


# --- the report -------------------------------------------------------------------------------------------------------


def _records(rounds: dict[str, list[Round]], streams: int, loop: str) -> list[dict[str, Any]]:
    common = {"machine": machine(), "commit": commit(), "date": datetime.now(UTC).date().isoformat()}

    def median(case: str, name: str) -> float:
        return statistics.median(getattr(one, name) for one in rounds[case])

    def record(case: str, value: float, unit: str, floor: float | None = None) -> dict[str, Any]:
        named = {"bench": "http", "case": f"{case}, {streams} streams, {loop}"}
        figures = {"value": float(f"{value:.4g}"), "unit": unit, "floor": floor and float(f"{floor:.4g}")}
        return named | figures | {"peer": None, "peer_value": None} | common

    records = []
    for case in rounds:
        for name, unit in (
            ("tokens", "tok/s"),
            ("frames", "frames/s"),
            ("tokens_per_cpu_s", "tok/s of server CPU"),
            ("server_cpu", "cores of the server process"),
            ("reader_cpu", "cores of the reader"),
            ("frame_bytes", "bytes a frame"),
        ):
            bound = median("raw", name) if "raw" in rounds and case != "raw" and name in _RATES else None
            records.append(record(case, median(case, name), unit, bound))
    if "raw" in rounds and "stack" in rounds:
        for name, unit in (("frames", "of raw, by time"), ("frames_per_cpu_s", "of raw, by CPU time")):
            pairs = zip(rounds["stack"], rounds["raw"], strict=True)
            ratio = statistics.median(getattr(ours, name) / getattr(raw, name) for ours, raw in pairs)
            records.append(record("stack", ratio, unit))
    return records


_RATES = ("tokens", "tokens_per_cpu_s")
"""What the raw app bounds."""


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return f"{name}, {os.cpu_count()} cores"


def commit() -> str | None:
    described = subprocess.run(
        ("git", "describe", "--always", "--dirty=+", "--exclude=*"), capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m load.bench_http", description="time the HTTP layer")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each round (default: 4)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds of each case, of which the median counts")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio", help="event loop of the servers")
    parser.add_argument("--step-ms", type=float, default=0.0, help="least time of a step of the engine's process")
    parser.add_argument("--serve", choices=CASES, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
