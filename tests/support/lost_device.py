"""A real server whose device fails under eight streams and four whole answers, again and again.

The engine's death is ordered ahead of the requests, at a forward in the middle of their answers. Times are noted, not
judged.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from engine.build import build_engine
from engine.config import EngineConfig
from engine.types import GenerateRequest, SamplingParams
from support.model_folder import write_folder
from support.served import serving

NEW = 300
DIES_AT = 100
"""Forwards behind the order."""
STREAMS = tuple(f"stream {number} " * (1 + number % 3) for number in range(8))
WHOLE = tuple(f"whole {number}" for number in range(4))
FLAGS = (
    *("--load-format", "auto", "--dtype", "float32", "--kv-cells", "8192", "--max-num-seqs", "16", "--test-faults"),
    *("--max-restarts", "100", "--restart-window", "0.001", "--widths", "1,2,4,8,16,32"),
)
READY_WITHIN_S = 300.0
"""The limit of a test that hangs, and no promise."""


def expected_tokens(model: str) -> dict[str, list[int]]:
    """What a CPU engine, undisturbed, draws for every prompt."""
    config = EngineConfig(model, device="cpu", dtype="float32", kv_cells=8192, max_num_seqs=16)
    loop, _ = build_engine(config, lambda *_: None)
    greedy = SamplingParams(temperature=0.0)
    for prompt in (*STREAMS, *WHOLE):
        loop.submit(GenerateRequest(prompt, tuple(prompt.encode()), sampling=greedy, max_new_tokens=NEW))
    tokens: dict[str, list[int]] = {prompt: [] for prompt in (*STREAMS, *WHOLE)}
    while loop.has_work():
        for update in loop.step():
            assert update.error is None, update.error
            tokens[update.request_id].extend(update.token_ids)
    return tokens


@dataclass
class Told:
    """What a client got, and when (time.monotonic)."""

    prompt: str
    tokens: list[int] = field(default_factory=list)
    error: str | None = None
    """Code of a status or of an event."""
    is_ended: bool = False
    """By an end of the answer, or an error: not by a cut connection."""
    last_news_s: float = 0.0
    ended_s: float = 0.0


@dataclass
class Death:
    """One of them, as clients saw it."""

    wrong: list[str] = field(default_factory=list)
    num_told: int = 0
    num_rerun: int = 0
    told_s: float = 0.0
    """From the last token to the error event, of the slowest client."""
    ready_s: float = 0.0
    """From the first error event to /ready."""


async def deaths(url: str, point: str, times: int, expected: Mapping[str, list[int]]) -> list[Death]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=READY_WITHIN_S, limits=limits) as client:
        quiet = Death()
        await _all_right(client, expected, quiet, "before the first death")
        return [quiet, *[await _death(client, point, expected) for _ in range(times)]]


async def _death(client: httpx.AsyncClient, point: str, expected: Mapping[str, list[int]]) -> Death:
    death = Death()
    reruns = await _metric(client, "cellserve:requests_rerun_total")
    restarts = await _metric(client, "cellserve:engine_restarts_total")
    answer = await client.post("/test/faults", json={"point": point, "after": DIES_AT})
    assert answer.status_code == httpx.codes.OK, answer.text
    tasks = [asyncio.create_task(_ask(client, prompt, stream=True)) for prompt in STREAMS]
    whole = [asyncio.create_task(_ask(client, prompt, stream=False)) for prompt in WHOLE]
    streams = await asyncio.gather(*tasks)
    told = [each for each in streams if each.error is not None]
    if told:
        while (await client.get("/ready")).status_code != httpx.codes.OK:
            await asyncio.sleep(0.02)
        death.ready_s = time.monotonic() - min(each.ended_s for each in told)
    reran = await asyncio.gather(*whole)
    death.num_told = len(told)
    death.num_rerun = int(await _metric(client, "cellserve:requests_rerun_total") - reruns)
    death.told_s = max((each.ended_s - each.last_news_s for each in told), default=0.0)
    for each in streams:
        right = expected[each.prompt]
        is_honest = each.error == "engine_unavailable" and each.tokens == right[: len(each.tokens)]
        if not each.is_ended or not (is_honest or (each.error is None and each.tokens == right)):
            death.wrong.append(_said(each, right))
    for each in reran:
        if each.error is not None or each.tokens != expected[each.prompt]:
            death.wrong.append(_said(each, expected[each.prompt]))
        if any(each.ended_s < other.ended_s for other in told):
            death.wrong.append(f"{each.prompt!r} had a whole answer before a stream was told that the engine had died")
    if await _metric(client, "cellserve:engine_restarts_total") != restarts + 1:
        death.wrong.append("the engine was not restarted exactly once")
    if not told:
        death.wrong.append("no stream was told of anything: the engine died too late, or not at all")
    if death.num_rerun < len(WHOLE):
        death.wrong.append(f"{death.num_rerun} requests ran again: there were {len(WHOLE)} that nobody had seen of")
    await _all_right(client, expected, death, "behind it")
    state = (await client.get("/test/check")).json()
    death.wrong += [f"behind it: {problem}" for problem in state["problems"]]
    return death


async def _all_right(client: httpx.AsyncClient, expected: Mapping[str, list[int]], death: Death, when: str) -> None:
    """Every prompt once more, all at once."""
    asked = [_ask(client, prompt, stream=prompt in STREAMS) for prompt in expected]
    for each in await asyncio.gather(*asked):
        if each.error is not None or each.tokens != expected[each.prompt]:
            death.wrong.append(f"{when}: {_said(each, expected[each.prompt])}")


async def _ask(client: httpx.AsyncClient, prompt: str, *, stream: bool) -> Told:
    told = Told(prompt)
    body = {"prompt": list(prompt.encode()), "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "stream": stream}
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if not stream or answer.status_code != httpx.codes.OK:
                _take(told, json.loads(await answer.aread()))
                told.is_ended = True
            else:
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        told.is_ended = True
                    elif line.startswith("data: "):
                        _take(told, json.loads(line.removeprefix("data: ")))
    except httpx.TransportError as error:
        told.error = f"the connection was cut: {type(error).__name__}"
    return told


def _take(told: Told, news: dict[str, Any]) -> None:
    told.ended_s = time.monotonic()
    if "error" in news:
        told.error = news["error"]["code"]
        return
    told.last_news_s = told.ended_s
    for choice in news["choices"]:
        told.tokens += choice["token_ids"] or []


def _said(told: Told, right: list[int]) -> str:
    at = next((at for at, pair in enumerate(zip(told.tokens, right, strict=False)) if pair[0] != pair[1]), None)
    where = "a beginning of the right ones" if at is None else f"wrong from token {at} on"
    return (
        f"{told.prompt!r}: {len(told.tokens)} of {len(right)} tokens, {where}; error {told.error}, "
        f"ended {told.is_ended}\n  expected {right}\n  got      {told.tokens}"
    )


async def _metric(client: httpx.AsyncClient, name: str) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == name)


def run(folder: Path, device: str, point: str, times: int) -> list[Death]:
    """The first one is of a run before any death. Raises AssertionError where the server does not start, or not end."""
    model = write_folder(folder / "model")
    expected = expected_tokens(model)
    with serving(folder, model, *FLAGS, device=device) as url:
        return asyncio.run(deaths(url, point, times, expected))
