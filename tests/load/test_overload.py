"""Clients that overload a server count what is whole and right, and no burst of them loses an answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support.faulty import Bench, FaultyServer
from support.letters import text_of
from tests.load.overload import Answer, Asked, Clients, Connection, Told


def answer(*texts: str, end: str | None = "length", tail: str = "data: [DONE]\n\n") -> Answer:
    ends = [None] * (len(texts) - 1) + [end]
    chunks = [{"choices": [{"text": text, "finish_reason": reason}]} for text, reason in zip(texts, ends, strict=True)]
    return Answer(200, {}, ("".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + tail).encode())


def test_only_an_answer_that_is_whole_and_right_counts() -> None:
    asked = Asked("a prompt", 7, max_tokens=6)
    text, _ = text_of(asked.prompt, asked.seed, asked.max_tokens)
    assert asked.is_answered_by(answer(text[:2], text[2:]))
    assert not asked.is_answered_by(answer(text[:2], text[3:]))
    assert not asked.is_answered_by(answer(text, end=None))
    assert not asked.is_answered_by(answer(text, tail=""))
    assert not asked.is_answered_by(answer(text, tail='data: {"error": {"code": "x"}}\n\ndata: [DONE]\n\n'))


async def bounded(server: FaultyServer, clients: Clients) -> Told:
    """Three times as many as the places, while nothing ever counts more than those."""
    asking = asyncio.ensure_future(clients.run("closed", 24))
    async with server.client() as client:
        bench = Bench(server, client)
        while not asking.done():
            assert await bench.metric("vllm:num_requests_running") <= 4
            assert await bench.metric("vllm:num_requests_waiting") <= 4
            assert (await client.get("/test/check")).json()["api"]["slots"] <= 8
    return await asking


def test_r1_r2_r3_three_times_the_clients_get_whole_answers_or_are_told_when_to_come(tmp_path: Path) -> None:
    with FaultyServer(tmp_path, "--max-num-seqs", "4", "--max-waiting", "4") as server:
        told = asyncio.run(bounded(server, Clients(server.url, 0.5, warm_up_s=0.0)))
    assert told.wrong == []
    assert told.unspecific == 0
    assert told.answers > 0


async def burst(server: FaultyServer, clients: int) -> list[int]:
    """All of them at once, each on a connection of its own: the statuses."""
    address = urlsplit(server.url)
    assert address.hostname is not None
    assert address.port is not None
    host, port = address.hostname, address.port

    async def once(number: int) -> int:
        asked = Asked("burst", number, max_tokens=1)
        connection = await Connection.open(host, port)
        answer = await connection.post(asked.content())
        connection.close()
        assert answer.status == 429 or asked.is_answered_by(answer)
        return answer.status

    return await asyncio.gather(*(once(number) for number in range(clients)))


@pytest.mark.parametrize("clients", [300, pytest.param(2000, marks=pytest.mark.full)])
def test_r4_a_burst_of_connections_gets_an_answer_each(tmp_path: Path, clients: int) -> None:
    with FaultyServer(tmp_path, "--max-num-seqs", "32", "--max-waiting", "32") as server:
        statuses = asyncio.run(burst(server, clients))
    assert len(statuses) == clients
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) >= 64
