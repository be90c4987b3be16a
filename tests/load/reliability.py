"""How fast the server notices, refuses, gives back and comes back: `python -m tests.load.reliability` prints G5 to G11.

On the server of letters (support/faulty.py), so that what is measured is this server and not a model. Overload comes
from processes of their own (load/overload.py). Figures are of this machine and of what else runs on it; one JSON object
a line, as benchmarks.jsonl has them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]  # as pytest has them

from support.faulty import Ask, Bench, FaultyServer, ask  # noqa: E402
from tests.load.overload import Mode, Told, beside  # noqa: E402

PLACES = 64
FLAGS = ("--max-num-seqs", "32", "--max-waiting", "32", "--max-restarts", "100", "--step-timeout", "1")
ROUNDS = 3
MOST_BUSY = 0.8
"""Of a core: clients that have more to do are what is measured."""
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


@dataclass
class Overload:
    """Three times what the server holds, or can answer, beside what it does when it is just full."""

    closed_kept: float
    """Part of the tokens a second that is left when three times as many clients as there are places come back when
    they are told to."""
    open_kept: float
    """The same when three times as many requests come as are answered at the most, and nobody waits."""
    refusal_ms: list[float]
    grown_mb: float
    """The API's memory, from the first of those seconds to the last."""
    normal_again_s: float
    """From the last of them, until a request takes no more than twice the time that it takes alone."""


async def overload(bench: Bench, seconds: float, open_seconds: float) -> Overload:
    """G7, G8, R1, R2. Clients run in processes of their own, by turns as many as fit and three times as many."""
    api, url = psutil.Process(bench.server.process.pid), bench.server.url

    async def asked(mode: Mode, number: float, for_s: float) -> Told:
        told = await beside(url, mode, number, for_s)
        assert told.busy < MOST_BUSY, f"clients that used {told.busy:.0%} of a core were measured, not the server"
        assert told.unspecific == len(told.wrong) == 0, told.wrong[:3]
        return told

    async def once() -> float:
        begun_s = time.perf_counter()
        while (await bench.victim(Ask("alone", 3, max_tokens=50))).error is not None:
            pass
        return time.perf_counter() - begun_s

    alone_s = np.median([await once() for _ in range(9)])
    peaks, kept = [], []
    for _ in range(ROUNDS):
        peaks.append(await asked("closed", PLACES, seconds))
        kept.append(await asked("closed", 3 * PLACES, seconds))
    peak = statistics.median(told.tokens / told.seconds for told in peaks)
    answers = statistics.median(told.answers / told.seconds for told in peaks)
    refusals, before = asyncio.create_task(beside(url, "probe", 50, open_seconds)), api.memory_info().rss
    told = await asked("open", 3 * answers, open_seconds)
    ended_s = time.perf_counter()
    while await once() > 2 * alone_s:
        pass
    normal_again_s = time.perf_counter() - ended_s
    return Overload(
        statistics.median(each.tokens / each.seconds for each in kept) / peak,
        told.tokens / told.seconds / peak,
        (await refusals).refusal_ms,
        (api.memory_info().rss - before) / 1e6,
        normal_again_s,
    )


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


async def measure(
    server: FaultyServer,
    seconds: float,
    open_seconds: float,
    tell: Callable[[str, float, str, float | None], None],
) -> None:
    async with server.client() as client:
        bench = Bench(server, client)
        tell("G5 cancel to cells free, p99", 1000 * p99(await cancel_to_free(bench)), "ms", 250)
        tell("G9 /health in full load, p99", 1000 * p99(await health_in_load(bench)), "ms", 50)
        seen = await overload(bench, seconds, open_seconds)
        tell("G7 goodput kept with 3x the clients", 100 * seen.closed_kept, "%", 90)
        tell("R2 goodput kept with 3x the requests", 100 * seen.open_kept, "%", 90)
        tell("G8 refusal in overload, p99", p99(seen.refusal_ms), "ms", 100)
        tell("G8 refusal in overload, median", statistics.median(seen.refusal_ms), "ms", None)
        tell(f"R2 API memory grown in {open_seconds:g} s of 3x the requests", seen.grown_mb, "MB", 50)
        tell("R2 behind the overload: back to normal", seen.normal_again_s, "s", 10)
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
    parser.add_argument("--seconds", type=float, default=8.0, help="of each round with clients that wait")
    parser.add_argument("--open-seconds", type=float, default=20.0, help="of requests that come whatever happens")
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
        asyncio.run(measure(server, args.seconds, args.open_seconds, tell))
    if args.json is not None:
        with args.json.open("a") as out:
            out.write("\n".join([*lines, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
