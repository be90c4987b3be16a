"""A day's requests in minutes: `python -m tests.load.soak`, from the root of the repository.

A real server of letters (support/letters.py) in its own process, an engine in a third, a small pool so that sequences
are preempted, and clients that stream, wait, leave, read slowly, and ask nonsense. Every answer is compared with what
it must be. Every `--sample` requests everybody pauses, and what is held then is written down:

    memory of both processes    fitted slope at most 1 MB per 10,000 requests
    cells, sessions, slots      all given back, exactly; the tables' own checks hold
    descriptors, tasks, threads as they were at the first sample
    the books                   started = finished; tokens = first tokens + gaps

Ends with 1 when one of these does not hold. `--json FILE` appends the figures as benchmarks.jsonl has them, `--picture
FILE.svg` draws the memory.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]  # as pytest has them

from support.faulty import SHARED, FaultyServer  # noqa: E402
from support.letters import text_of  # noqa: E402
from support.tiny_tokenizer import END, START, TinyTokenizer, write_byte_level  # noqa: E402

LONGEST_S = 60.0
"""A request that takes longer is lost."""
SLOPE_LIMIT_MB = 1.0
"""Per 10,000 requests."""
MIX = {
    "chat": 40,
    "shared prefix": 20,
    "leaves": 10,
    "whole": 10,
    "malformed": 5,
    "choices": 5,
    "logprobs": 5,
    "slow reader": 5,
}
"""Kind of request -> how many of 100."""
NONSENSE = (
    b"{",
    b'{"prompt": "x", "max_tokens": -1}',
    b'{"prompt": 7.5}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": [99999]}',
    b'{"prompt": "x", "n": 100000}',
    b'{"prompt": ""}',
)
FLAGS = (
    *("--max-num-seqs", "32", "--max-waiting", "2000", "--kv-cells", "1500", "--step-timeout", "60"),
    *("--keep-alive-timeout", "600"),
)


@dataclass
class Sample:
    """What was held at one pause."""

    requests: int
    api_mb: float
    engine_mb: float
    descriptors: int
    threads: int
    tasks: int
    cells_leaked: int
    """Neither free nor in the prefix tree, while nothing runs."""
    p50_ms: float
    p99_ms: float
    """Of whole requests since the pause before, those that leave or read slowly aside."""


@dataclass
class Run:
    """One soak, as far as it has come."""

    server: FaultyServer
    tiny: TinyTokenizer
    draw: random.Random
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


class Client:
    """One keep-alive connection, opened when it is needed."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def post(self, path: str, content: bytes) -> tuple[int, asyncio.StreamReader, bool, int]:
        """-> status, the reader behind the headers, whether the body is chunked, else its length."""
        if self._reader is None:
            self._reader, self._writer = await asyncio.open_connection(self._run.server.host, self._run.server.port)
        assert self._writer is not None
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
        self._writer.write(head.encode() + b"\r\n\r\n" + content)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), -1)
        return int(lines[0].split()[1]), self._reader, b"transfer-encoding: chunked" in lines, length


async def body_of(reader: asyncio.StreamReader, is_chunked: bool, length: int, pause_s: float = 0.0) -> bytes:
    if not is_chunked:
        return await reader.readexactly(length)
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
        if pause_s:
            await asyncio.sleep(pause_s)
    await reader.readline()
    return body


async def one(run: Run, client: Client, kind: str) -> None:
    """One request of its kind, from sending it to judging it."""
    draw = run.draw
    seed, new = draw.randrange(1 << 40), draw.randint(1, 24)
    word = "".join(draw.choices("abcdefgh ", k=draw.randint(1, 40)))
    body: dict[str, Any] = {"seed": seed, "max_tokens": new, "stream": kind not in ("whole", "choices")}
    path = "/v1/completions"
    ids: str | list[int] = word
    n = 1
    match kind:
        case "chat":
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": word}]
            specials = run.tiny.specials
            ids = [specials[START], *b"user\n", *word.encode(), specials[END], *b"\n", specials[START], *b"assistant\n"]
        case "shared prefix":
            ids = body["prompt"] = SHARED + word
        case "choices":
            n = body["n"] = draw.randint(2, 4)
            body["prompt"] = word
        case "logprobs":
            body |= {"prompt": word, "logprobs": 2}
        case "leaves":
            body |= {"prompt": word, "max_tokens": 400}
        case _:
            body["prompt"] = word
    content = draw.choice(NONSENSE) if kind == "malformed" else json.dumps(body).encode()
    begun = time.perf_counter()
    status, reader, is_chunked, length = await client.post(path, content)
    if kind == "leaves" and status == 200:
        for _ in range(draw.randrange(3)):
            await reader.readline()
        client.close()
        return
    received = await body_of(reader, is_chunked, length, 0.003 if kind == "slow reader" else 0.0)
    if kind == "malformed":
        if status != 400 or b'"error"' not in received:
            run.wrong.append(f"{content!r} got {status} {received[:200]!r}")
        return
    if kind != "slow reader":
        run.latencies_s.append(time.perf_counter() - begun)
    told = texts_of(received, n, is_stream=bool(body["stream"])) if status == 200 else [(received[:200].decode(), "")]
    expected = [text_of(ids, seed + index, new) for index in range(n)]
    if told != expected:
        run.wrong.append(f"{kind} {body} got {status} {told}, not {expected}")


def texts_of(received: bytes, n: int, *, is_stream: bool) -> list[tuple[str, str]]:
    """(text, finish reason) of each choice."""
    texts, ends = [""] * n, [""] * n
    if is_stream:
        if not received.endswith(b"data: [DONE]\n\n"):
            return [("cut: " + received[-100:].decode(), "")]
        parts = [json.loads(line[6:]) for line in received.split(b"\n\n")[:-2] if line.startswith(b"data: ")]
    else:
        parts = [json.loads(received)]
    for part in parts:
        if "error" in part:
            return [(str(part), "")]
        for choice in part["choices"]:
            texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            ends[choice["index"]] += choice["finish_reason"] or ""
    return list(zip(texts, ends, strict=True))


async def held(run: Run) -> dict[str, Any]:
    """What the server holds once nothing runs, over a connection that is closed again."""
    deadline_s = time.monotonic() + LONGEST_S
    while True:
        state = await get_json(run, "/test/check")
        is_idle = state["is_idle"] and state["api"]["slots"] == state["api"]["outstanding"] == 0
        if is_idle or time.monotonic() > deadline_s:
            if not is_idle:
                run.wrong.append(f"it does not come to rest: {state}")
            return state
        await asyncio.sleep(0.02)


async def get(run: Run, path: str) -> bytes:
    reader, writer = await asyncio.open_connection(run.server.host, run.server.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    received = await reader.read()
    writer.close()
    return received.partition(b"\r\n\r\n")[2]


async def get_json(run: Run, path: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(await get(run, path))
    return told


async def check_books(run: Run) -> None:
    sums: Counter[str] = Counter()
    for line in (await get(run, "/metrics")).decode().splitlines():
        if not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            sums[series.partition("{")[0]] += float(value)
    started, finished = sums["cellserve:choices_started_total"], sums["vllm:request_success_total"]
    firsts, gaps = sums["vllm:time_to_first_token_seconds_count"], sums["vllm:inter_token_latency_seconds_count"]
    if started != finished or sums["vllm:generation_tokens_total"] != firsts + gaps:
        run.wrong.append(f"the books do not balance: {started} started, {finished} finished, {firsts} + {gaps} tokens")
    run.counts["preemptions"] = int(sums["vllm:num_preemptions_total"])
    run.counts["tokens"] = int(sums["vllm:generation_tokens_total"])


async def sample(run: Run, requests: int, processes: list[psutil.Process]) -> None:
    state = await held(run)
    # A connection of ours that was closed a moment ago may still be one of theirs.
    for _ in range(100):
        if not run.samples or state["api"]["descriptors"] <= run.samples[0].descriptors:
            break
        await asyncio.sleep(0.02)
        state = await held(run)
    run.wrong += state["problems"]
    await check_books(run)
    api, engine = (process.memory_info().rss / 1e6 for process in processes)
    latencies, run.latencies_s = np.array(run.latencies_s or [0.0]) * 1000, []
    run.samples.append(
        Sample(
            requests=requests,
            api_mb=api,
            engine_mb=engine,
            descriptors=state["api"]["descriptors"],
            threads=sum(process.num_threads() for process in processes),
            tasks=state["api"]["tasks"],
            cells_leaked=state["total_cells"] - state["free_cells"] - state["cached_cells"],
            p50_ms=float(np.percentile(latencies, 50)),
            p99_ms=float(np.percentile(latencies, 99)),
        )
    )


async def work(run: Run, client: Client, kinds: Iterator[str], told: Callable[[], None]) -> None:
    """One client, as long as there are requests. told: called behind each."""
    for kind in kinds:
        run.counts[kind] += 1
        try:
            async with asyncio.timeout(LONGEST_S):
                await one(run, client, kind)
        except (TimeoutError, OSError, EOFError) as error:
            run.wrong.append(f"{kind}: {type(error).__name__}: {error}")
            client.close()
        told()


async def soak(run: Run, args: argparse.Namespace, progress: Progress) -> None:
    bar = progress.add_task("requests", total=args.requests)
    kinds, weights = list(MIX), list(MIX.values())
    clients = [Client(run) for _ in range(args.clients)]
    api = psutil.Process(run.server.process.pid)
    processes = [api, *api.children()]
    done = 0
    while done < args.requests and not run.wrong:
        block = iter(run.draw.choices(kinds, weights, k=min(args.sample, args.requests - done)))

        await asyncio.gather(*(work(run, client, block, lambda: progress.advance(bar)) for client in clients))
        for client in clients:
            client.close()
        done += min(args.sample, args.requests - done)
        if done >= args.warm_up:
            await sample(run, done, processes)


def slope_mb(samples: list[Sample], values: list[float]) -> float:
    """MB per 10,000 requests, fitted."""
    if len(samples) < 3:
        return 0.0
    return float(np.polyfit([each.requests for each in samples], values, 1)[0]) * 10_000


def verdict(run: Run) -> tuple[dict[str, float], list[str]]:
    """The figures, and what does not hold."""
    samples = run.samples
    figures = {
        "API memory slope": slope_mb(samples, [each.api_mb for each in samples]),
        "engine memory slope": slope_mb(samples, [each.engine_mb for each in samples]),
    }
    wrong = list(run.wrong[:20])
    # A short run's slope is its first allocations.
    if samples and samples[-1].requests - samples[0].requests >= 10_000:
        wrong += [f"{name}: {mb:.2f} MB per 10,000 requests" for name, mb in figures.items() if mb > SLOPE_LIMIT_MB]
    leaked = max(each.cells_leaked for each in samples)
    figures["cells leaked"] = leaked
    if leaked:
        wrong.append(f"{leaked} cells leaked")
    for name in ("descriptors", "threads", "tasks"):
        first, last = (getattr(samples[index], name) for index in (0, -1))
        if last > first:
            wrong.append(f"{last} {name} at the end, {first} at the first sample")
    return figures, wrong


def picture(samples: list[Sample]) -> str:
    """Memory over requests as SVG."""
    most = max(max(each.api_mb, each.engine_mb) for each in samples) * 1.1
    span = max(samples[-1].requests, 1)

    def line(name: str, colour: str) -> str:
        points = " ".join(
            f"{40 + 740 * s.requests / span:.1f},{280 - 260 * getattr(s, name) / most:.1f}" for s in samples
        )
        return f'<polyline fill="none" stroke="{colour}" points="{points}"/>'

    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 300" font-family="sans-serif" font-size="11">'
        f'<text x="40" y="14">memory of the API (blue) and of the engine (red), 0 to {most:.0f} MB, '
        f"over {span:,} requests</text>{line('api_mb', 'steelblue')}{line('engine_mb', 'firebrick')}</svg>"
    )


def lines_of(run: Run, figures: dict[str, float], requests: int, wall_s: float) -> list[str]:
    """In the form of benchmarks.jsonl."""
    root = TESTS.parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
    common = {
        "machine": f"{psutil.cpu_count()} cores, {platform.machine()}",
        "commit": commit.stdout.strip(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    rows: list[tuple[str, float, str, float | None]] = [
        (name, round(value, 3), "MB/10k requests", SLOPE_LIMIT_MB) for name, value in figures.items() if "slope" in name
    ]
    rows += [
        ("cells leaked", figures["cells leaked"], "cells", 0),
        ("wrong answers", len(run.wrong), "answers", 0),
        ("requests", round(requests / wall_s, 1), "requests/s", None),
    ]
    return [
        json.dumps(
            {"bench": "soak", "case": f"{requests} requests, {name}", "value": value, "unit": unit, "floor": floor}
            | {"peer": None, "peer_value": None}
            | common
        )
        for name, value, unit, floor in rows
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.load.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--warm-up", type=int, help="requests before the first sample (default: a twentieth)")
    parser.add_argument("--sample", type=int, default=1000, help="requests between two samples")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    parser.add_argument("--picture", type=Path, help="draw the memory into this SVG file")
    args = parser.parse_args(argv)
    args.warm_up = args.requests // 20 if args.warm_up is None else args.warm_up
    console = Console(stderr=True)
    columns = (TextColumn("soak"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with tempfile.TemporaryDirectory() as folder:
        tiny = write_byte_level(Path(folder) / "tokenizer")
        with FaultyServer(Path(folder), *FLAGS, model="letters") as server:
            run = Run(server, tiny, random.Random(args.seed))
            begun = time.monotonic()
            with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
                asyncio.run(soak(run, args, progress))
            wall_s = time.monotonic() - begun
            server.process.send_signal(signal.SIGTERM)
            if server.process.wait(30) != 0:
                run.wrong.append(f"it ended with {server.process.returncode}")
            if run.wrong:
                run.wrong.append(server.log.read_text()[-2000:])
    if not run.samples:
        print("\n".join(run.wrong) or "no sample was taken: --warm-up is longer than the run")
        return 1
    figures, wrong = verdict(run)
    first, last = run.samples[0], run.samples[-1]
    print(f"{last.requests} requests in {wall_s:.0f} s: {dict(run.counts)}")
    print(f"API {first.api_mb:.1f} -> {last.api_mb:.1f} MB, engine {first.engine_mb:.1f} -> {last.engine_mb:.1f} MB")
    print(f"descriptors {first.descriptors} -> {last.descriptors}, tasks {first.tasks} -> {last.tasks}, ", end="")
    print(f"p50 {first.p50_ms:.1f} -> {last.p50_ms:.1f} ms, p99 {first.p99_ms:.1f} -> {last.p99_ms:.1f} ms")
    lines = lines_of(run, figures, last.requests, wall_s)
    print("\n".join(lines))
    if args.json is not None:
        with args.json.open("a") as out:
            out.write("\n".join([*lines, ""]))
    if args.picture is not None:
        args.picture.write_text(picture(run.samples))
    for problem in wrong:
        print(f"WRONG: {problem}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
