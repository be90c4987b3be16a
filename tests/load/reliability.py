"""How fast the server notices, refuses, gives back and comes back: `python -m tests.load.reliability` prints G5 to G11.

On the server of letters (support/faulty.py), so that what is measured is this server and not a model. Figures are of
this machine and of what else runs on it; one JSON object a line, as benchmarks.jsonl has them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import numpy as np
import psutil

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]  # as pytest has them

from support.faulty import Ask, Bench, FaultyServer, ask  # noqa: E402

FLAGS = ("--max-num-seqs", "32", "--max-waiting", "32", "--max-restarts", "100", "--step-timeout", "1")
LONG = Ask("goes on and on", 1, max_tokens=20_000)


@contextlib.asynccontextmanager
async def load(bench: Bench, streams: int) -> AsyncIterator[None]:
    """That many long streams beside."""

    async def forever(number: int) -> None:
        while True:
            await ask(bench.client, Ask(f"load {number}", number, max_tokens=2000))

    tasks = [asyncio.create_task(forever(number)) for number in range(streams)]

    async def all_run() -> bool:
        return await bench.metric("vllm:num_requests_running") >= min(streams, 32)

    await bench.until(all_run)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def cancel_to_free(bench: Bench) -> list[float]:
    """G5, seconds: a client closes in mid-stream beside eight others, until the engine holds nothing of it."""
    taken = []

    async def held() -> int:
        return int((await bench.client.get("/test/check")).json()["held"]["requests"])

    async with load(bench, 8):
        for _ in range(50):
            reader, writer = await bench.server.raw(bench.server.request(LONG.body()))
            await reader.readexactly(2000)
            writer.close()
            closed = time.perf_counter()
            while await held() > 8:
                pass
            taken.append(time.perf_counter() - closed)
    return taken


async def health_in_load(bench: Bench) -> list[float]:
    """G9, seconds: /health while as many streams run as can."""
    taken = []
    async with load(bench, 32), bench.server.client() as prober:
        for _ in range(300):
            begun = time.perf_counter()
            assert (await prober.get("/health")).status_code == httpx.codes.OK
            taken.append(time.perf_counter() - begun)
    return taken


async def tokens_a_second(bench: Bench, clients: int, refused_s: list[float], run_s: float = 8.0) -> float:
    """A closed loop of clients that come back at once when they are refused, after half the time that they are told."""
    until_s = time.perf_counter() + run_s

    async def client(number: int) -> int:
        tokens = 0
        while time.perf_counter() < until_s:
            begun = time.perf_counter()
            told = await ask(bench.client, Ask(f"goodput {number}", number, max_tokens=50))
            if told.error is None:
                tokens += len(told.texts[0])
            else:
                refused_s.append(time.perf_counter() - begun)
                await asyncio.sleep(0.5)
        return tokens

    begun = time.perf_counter()
    tokens = sum(await asyncio.gather(*(client(number) for number in range(clients))))
    return tokens / (time.perf_counter() - begun)


async def hang_to_noticed(bench: Bench) -> float:
    """G10, seconds beyond --step-timeout until the engine is ended."""
    await bench.victim(Ask("warms up", 1, max_tokens=40))
    before = await bench.metric("cellserve:engine_hung_total")

    async def is_noticed() -> bool:
        return await bench.metric("cellserve:engine_hung_total") > before

    task = asyncio.create_task(bench.victim(Ask("hangs", 1, max_tokens=500)))
    await asyncio.sleep(0.3)
    await bench.arm("step.hang")
    begun = time.perf_counter()
    await bench.until(is_noticed)
    noticed_s = time.perf_counter() - begun
    await task
    await bench.settled()
    return noticed_s - 1.0


async def kill_to_told_and_ready(bench: Bench) -> tuple[float, float]:
    """G11, seconds from an engine's SIGKILL until a stream is told and until /ready says 200."""
    (engine,) = psutil.Process(bench.server.process.pid).children()
    task = asyncio.create_task(ask(bench.client, LONG))
    await asyncio.sleep(0.5)
    engine.kill()
    killed = time.perf_counter()
    assert (await task).error == "engine_unavailable"
    told_s = time.perf_counter() - killed

    async def is_ready() -> bool:
        return (await bench.client.get("/ready")).status_code == httpx.codes.OK

    await bench.until(is_ready)
    return told_s, time.perf_counter() - killed


async def measure(server: FaultyServer, tell: Callable[[str, float, str, float | None], None]) -> None:
    async with server.client() as client:
        bench = Bench(server, client)
        tell("G5 cancel to cells free, p99", 1000 * p99(await cancel_to_free(bench)), "ms", 250)
        tell("G9 /health in full load, p99", 1000 * p99(await health_in_load(bench)), "ms", 50)
        peak = await tokens_a_second(bench, 64, [])
        refused_s: list[float] = []
        overloaded = await tokens_a_second(bench, 192, refused_s)
        tell("G7 goodput kept with 3x the clients", 100 * overloaded / peak, "%", 90)
        tell("G8 refusal in overload, p99", 1000 * p99(refused_s), "ms", 100)
        told_s, ready_s = await kill_to_told_and_ready(bench)
        tell("G11 engine killed: clients told", told_s, "s", 1)
        tell("G11 engine killed: ready again", ready_s, "s", 60)
        tell("G10 hung engine noticed behind the limit", await hang_to_noticed(bench), "s", 1)
        await bench.settled()


def p99(values: list[float]) -> float:
    return float(np.percentile(values or [0.0], 99))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.load.reliability", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    args = parser.parse_args(argv)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=TESTS.parent, capture_output=True, text=True
    ).stdout.strip()
    lines = []

    def tell(case: str, value: float, unit: str, floor: float | None) -> None:
        figure = {"bench": "reliability", "case": case, "value": round(value, 2), "unit": unit, "floor": floor}
        machine = f"{psutil.cpu_count()} cores, {platform.machine()}"
        about = {"machine": machine, "commit": commit, "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
        lines.append(json.dumps(figure | {"peer": None, "peer_value": None} | about))
        print(lines[-1], flush=True)

    with (
        tempfile.TemporaryDirectory() as folder,
        FaultyServer(Path(folder), *FLAGS, model="letters-slow") as server,
    ):
        asyncio.run(measure(server, tell))
    if args.json is not None:
        with args.json.open("a") as out:
            out.write("\n".join([*lines, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
