"""Many clients at once on a real server: nothing is lost, neighbours change no answer, everything is given back.

The pool is smaller than what is asked of it, so that sequences are preempted and requeued on the way. Prompts are ids:
the model has random weights and no tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from server import bench
from support.served import serving_tiny_model

MAX_NUM_SEQS = 48
MAX_WAITING = 208
CAPACITY = MAX_NUM_SEQS + MAX_WAITING
KV_CELLS = 1200
SETTLED_WITHIN_S = 20.0
NUM_KINDS = 24


@dataclass(frozen=True)
class Answer:
    """What one client got to the end of, by choice."""

    token_ids: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[str, ...]
    completion_tokens: int


@dataclass(frozen=True)
class Refused:
    status: int
    retry_after: str | None


CANCELLED = "cancelled"
Ending = Answer | Refused | str


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = {"--max-num-seqs": MAX_NUM_SEQS, "--max-waiting": MAX_WAITING, "--kv-cells": KV_CELLS}
    words = [str(word) for pair in flags.items() for word in pair]
    with serving_tiny_model(tmp_path_factory.mktemp("load"), *words) as url:
        yield url


def kinds_of_request() -> list[dict[str, Any]]:
    """Greedy and seeded ones, short and long, a few with two choices."""
    rng = random.Random(7)
    kinds = []
    for number in range(NUM_KINDS):
        sampling = {"temperature": 0} if number % 2 else {"temperature": 1.0, "top_p": 0.9, "seed": number}
        kinds.append(
            sampling
            | {
                "prompt": [rng.randrange(64) for _ in range(rng.randint(1, 60))],
                "max_tokens": rng.randint(4, 120),
                "n": 2 if number % 8 == 0 else 1,
                "ignore_eos": True,
                "return_token_ids": True,
            }
        )
    return kinds


def client_of(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=60.0)


async def ask_streaming(client: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None) -> Ending:
    """leave_after: frames after which the client closes the connection; None reads to the end."""
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    ids: list[list[int]] = [[] for _ in range(body["n"])]
    reasons: list[list[str]] = [[] for _ in range(body["n"])]
    usage: dict[str, int] = {}
    frames = 0
    async with client.stream("POST", "/v1/completions", json=streamed) as response:
        if response.status_code != httpx.codes.OK:
            await response.aread()
            return Refused(response.status_code, response.headers.get("retry-after"))
        async for line in response.aiter_lines():
            if leave_after is not None and frames >= leave_after:
                return CANCELLED
            if line == "data: [DONE]":
                assert all(len(ends) == 1 for ends in reasons), f"each choice ends once, not {reasons}"
                return Answer(tuple(map(tuple, ids)), tuple(ends[0] for ends in reasons), usage["completion_tokens"])
            if not line.startswith("data: "):
                continue
            frame = json.loads(line.removeprefix("data: "))
            assert "error" not in frame, frame
            frames += 1
            usage = frame.get("usage") or usage
            for choice in frame["choices"]:
                ids[choice["index"]] += choice.get("token_ids") or []
                reasons[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    raise AssertionError("the stream ended without [DONE]")


async def ask_whole(client: httpx.AsyncClient, body: dict[str, Any], patience_s: float | None) -> Ending:
    """patience_s: seconds after which the client closes the connection."""
    try:
        async with asyncio.timeout(patience_s):
            response = await client.post("/v1/completions", json=body)
    except TimeoutError:
        return CANCELLED
    if response.status_code != httpx.codes.OK:
        return Refused(response.status_code, response.headers.get("retry-after"))
    answer = response.json()
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return Answer(
        tuple(tuple(choice["token_ids"]) for choice in choices),
        tuple(choice["finish_reason"] for choice in choices),
        answer["usage"]["completion_tokens"],
    )


async def answers_alone(client: httpx.AsyncClient, kinds: list[dict[str, Any]]) -> list[Ending]:
    """Each kind's answer with nothing beside it."""
    return [await ask_whole(client, kind, None) for kind in kinds]


async def storm(client: httpx.AsyncClient, kinds: list[dict[str, Any]], num_clients: int, seed: int) -> list[Ending]:
    """Everybody at once; client i asks kinds[i % len(kinds)], and about a third leave at a random moment."""
    rng = random.Random(seed)
    asks = []
    for number in range(num_clients):
        kind = kinds[number % len(kinds)]
        leaves = rng.random() < 0.35
        if rng.random() < 0.75:
            asks.append(ask_streaming(client, kind, rng.randrange(kind["max_tokens"]) if leaves else None))
        else:
            asks.append(ask_whole(client, kind, rng.uniform(0.0, 0.5) if leaves else None))
    return await asyncio.gather(*asks)


async def scrape(client: httpx.AsyncClient) -> Counter[str]:
    """Sums of each family's samples over its labels, and the finished choices of each reason under that reason."""
    sums: Counter[str] = Counter()
    text = (await client.get("/metrics")).text
    for name, labels, value in re.findall(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE):
        sums[name] += float(value)
        if reason := re.search(r'finished_reason="(\w+)"', labels):
            sums[reason[1]] += float(value)
    return sums


async def settled(client: httpx.AsyncClient) -> Counter[str]:
    """The books once everything that was asked has ended; fails when that does not happen."""
    async with asyncio.timeout(SETTLED_WITHIN_S):
        while True:
            books = await scrape(client)
            open_choices = books["cellserve:choices_started_total"] - books["vllm:request_success_total"]
            if not (open_choices or books["cellserve:cells_used"] or books["vllm:num_requests_running"]):
                return books
            await asyncio.sleep(0.05)


def check_whole(answer: Answer, kind: dict[str, Any]) -> None:
    assert answer.finish_reasons == ("length",) * kind["n"]
    assert [len(ids) for ids in answer.token_ids] == [kind["max_tokens"]] * kind["n"]
    assert answer.completion_tokens == kind["max_tokens"] * kind["n"]


async def run_storm(url: str, num_clients: int, seed: int) -> None:
    kinds = kinds_of_request()
    async with client_of(url) as client:
        alone = await answers_alone(client, kinds)
        before = await settled(client)
        endings = await storm(client, kinds, num_clients, seed)
        for number, ending in enumerate(endings):
            kind, expected = kinds[number % NUM_KINDS], alone[number % NUM_KINDS]
            if ending != CANCELLED:
                assert isinstance(ending, Answer), f"client {number} was refused: {ending}"
                check_whole(ending, kind)
                assert ending == expected, f"client {number} got other tokens than the same request alone"
        after = await settled(client)
    left = endings.count(CANCELLED)
    assert left >= num_clients // 10, "hardly anybody left: this tests no cancelling"
    # Who leaves behind the last token has cancelled nothing.
    assert after["abort"] - before["abort"] >= left // 4, "the engine went on for clients that had left"
    assert after["length"] - before["length"] >= num_clients - left
    assert after["vllm:num_preemptions_total"] > before["vllm:num_preemptions_total"], "the pool was never short"
    assert after["cellserve:steps_failed_total"] == 0


def test_200_clients_of_whom_many_leave_lose_nothing_and_give_all_back(url: str) -> None:
    asyncio.run(run_storm(url, 200, seed=0))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 11))
def test_storm_after_storm_lose_nothing_and_give_all_back(url: str, seed: int) -> None:
    asyncio.run(run_storm(url, 200, seed))


def test_more_clients_than_the_server_holds_are_refused_at_once_or_served_whole(url: str) -> None:
    async def overload() -> None:
        kind = {**kinds_of_request()[1], "max_tokens": 32}
        async with client_of(url) as client:
            expected = await ask_whole(client, kind, None)
            endings = await asyncio.gather(*(ask_streaming(client, kind, None) for _ in range(CAPACITY + 150)))
            served = [ending for ending in endings if isinstance(ending, Answer)]
            refused = [ending for ending in endings if isinstance(ending, Refused)]
            assert len(served) + len(refused) == len(endings)
            assert len(served) >= CAPACITY
            assert all(ending == expected for ending in served)
            assert all(ending.status == 429 and float(ending.retry_after or 0) >= 1 for ending in refused)
            await settled(client)

    asyncio.run(overload())


def test_the_bench_command_measures_this_server(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    flags = "--num-requests 24 --streams 8 --input-tokens 8-32 --output-tokens 8 --vocab-size 64"
    assert bench.run(parser.parse_args(["--url", url, *flags.split()])) == 0
    assert re.search(r"total_output_tokens +192\b", capsys.readouterr().out)
