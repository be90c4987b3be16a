"""A whole server of letters that can be broken on order, and eight well-behaved streams beside whatever is done to it.

The server is a real one: its own process, uvicorn, sockets, and an engine in a third process. What each stream must get
is computed (support/letters.py), so there is no run to compare with.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

import httpx

from support.letters import text_of
from support.live_server import TIMEOUT_S
from support.scripted_server import child_environment

SHARED = "the-same-beginning-of-some-prompts-of-many-letters-"
NEW = 120


@dataclass(frozen=True)
class Ask:
    """One streamed completion."""

    prompt: str
    seed: int
    max_tokens: int = NEW
    stop: str | None = None
    n: int = 1
    logprobs: int | None = None

    def body(self, stream: bool = True) -> dict[str, Any]:
        body: dict[str, Any] = {"prompt": self.prompt, "seed": self.seed, "max_tokens": self.max_tokens}
        body |= {"n": self.n, "stream": stream, "temperature": 1.0}
        return body | {name: getattr(self, name) for name in ("stop", "logprobs") if getattr(self, name) is not None}

    def expected(self) -> list[tuple[str, str]]:
        """(text, finish reason) of each choice."""
        return [text_of(self.prompt, self.seed + index, self.max_tokens, self.stop) for index in range(self.n)]


BYSTANDERS = (
    Ask("plain", 1),
    Ask("plain too", 2),
    Ask("stops", 3, stop="qz"),
    Ask("stops too", 4, stop="zzz"),
    Ask(f"{SHARED}one", 5),
    Ask(f"{SHARED}two", 6),
    Ask("choices", 7, n=2),
    Ask("told", 8, logprobs=1),
)


@dataclass
class Told:
    """What one stream got."""

    ask: Ask
    texts: list[str] = field(default_factory=list)
    ends: list[str | None] = field(default_factory=list)
    error: str | None = None
    """Code of an error, whether it was a status or an event."""
    is_cut: bool = False
    """The connection ended without [DONE]."""
    num_events: int = 0

    def __post_init__(self) -> None:
        self.texts, self.ends = [""] * self.ask.n, [None] * self.ask.n

    @property
    def is_whole(self) -> bool:
        return self.error is None and list(zip(self.texts, self.ends, strict=True)) == self.ask.expected()

    @property
    def is_honest(self) -> bool:
        """Whole, or a beginning of the right text and a word about the rest."""
        right = all(text.startswith(told) for told, (text, _) in zip(self.texts, self.ask.expected(), strict=True))
        return self.is_whole or (self.error is not None and not self.is_cut and right)


class FaultyServer:
    """Leaving the block kills it, if it has not ended by then. Methods with a wait belong to one asyncio loop."""

    def __init__(self, folder: Path, *flags: str, model: str = "letters-slow") -> None:
        self.log = folder / "log"
        self._log_file: IO[str] = self.log.open("a")
        options = ("--port", "0", "--no-access-log", "--test-faults", *flags)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.scripted_server", model, *options],
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log_file,
            text=True,
        )
        assert self.process.stdout is not None
        found = re.match(r"ready: (http://([\d.]+):(\d+)) ", self.process.stdout.readline())
        assert found, f"no ready line:\n{self.log.read_text()}"
        self.url, self.host, self.port = found[1], found[2], int(found[3])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self._log_file):
            assert pipe is not None
            pipe.close()

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=TIMEOUT_S, limits=limits)

    # --- raw connections --------------------------------------------------------------------------------------------

    async def raw(self, content: bytes, limit: int = 1 << 16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=limit)
        writer.write(content)
        await writer.drain()
        return reader, writer

    @staticmethod
    def request(body: dict[str, Any], *headers: str, length: int | None = None) -> bytes:
        content = json.dumps(body).encode()
        lines = [
            *("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"),
            *headers,
            f"Content-Length: {len(content) if length is None else length}",
        ]
        return "\r\n".join([*lines, "", ""]).encode() + content


async def ask(client: httpx.AsyncClient, what: Ask, begun: Callable[[], None] = lambda: None) -> Told:
    """Stream it to its end. begun: called with each event."""
    told = Told(what)
    is_done = False
    try:
        async with client.stream("POST", "/v1/completions", json=what.body()) as answer:
            if answer.status_code != httpx.codes.OK:
                told.error = json.loads(await answer.aread())["error"]["code"]
                return told
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    is_done = True
                if line == "data: [DONE]" or not line.startswith("data: "):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    told.error = event["error"]["code"]
                    continue
                told.num_events += 1
                for choice in event["choices"]:
                    assert told.ends[choice["index"]] is None, "news behind the end"
                    told.texts[choice["index"]] += choice["text"]
                    told.ends[choice["index"]] = choice["finish_reason"]
                begun()
    except httpx.TransportError:
        told.is_cut = True
    told.is_cut = told.is_cut or not is_done
    return told


class Bench:
    """One fault's surroundings."""

    def __init__(self, server: FaultyServer, client: httpx.AsyncClient) -> None:
        self.server = server
        self.client = client

    async def arm(self, point: str, *, is_deadly: bool = False, **options: Any) -> None:
        """is_deadly: the engine may be gone before it has said that it has understood."""
        answer = await self.client.post("/test/faults", json={"point": point, **options})
        assert answer.status_code in (httpx.codes.OK, *[httpx.codes.SERVICE_UNAVAILABLE] * is_deadly), answer.text

    async def victim(self, what: Ask = Ask("victim", 99, max_tokens=20)) -> Told:
        return await ask(self.client, what)

    async def metric(self, name: str, **labels: str) -> float:
        """The sum over all series of that name with these labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = (await self.client.get("/metrics")).text.splitlines()
        found = [line.rpartition(" ") for line in lines if line.partition("{")[0].partition(" ")[0] == name]
        return sum(float(value) for series, _, value in found if all(part in series for part in wanted))

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not await condition():
            assert time.monotonic() < deadline_s, f"it never came true:\n{self.server.log.read_text()[-2000:]}"
            await asyncio.sleep(0.02)

    async def settled(self) -> None:
        """Everything was given back, the books balance, and the next request is served right."""

        async def is_idle() -> bool:
            if (await self.client.get("/ready")).status_code != httpx.codes.OK:
                return False
            state = (await self.client.get("/test/check")).json()
            return bool(state["is_idle"] and state["api"]["slots"] == state["api"]["outstanding"] == 0)

        await self.until(is_idle)
        state = (await self.client.get("/test/check")).json()
        assert state["problems"] == []
        started = await self.metric("cellserve:choices_started_total")
        assert await self.metric("vllm:request_success_total") == started
        generated = await self.metric("vllm:generation_tokens_total")
        firsts = await self.metric("vllm:time_to_first_token_seconds_count")
        assert generated == firsts + await self.metric("vllm:inter_token_latency_seconds_count")
        after = await self.victim(Ask("afterwards", 5, max_tokens=30))
        assert after.is_whole, after
        assert (await self.client.get("/health")).status_code == httpx.codes.OK


Act = Callable[[Bench], Awaitable[None]]


async def beside(server: FaultyServer, act: Act, *, after: int = 5, asks: Sequence[Ask] = BYSTANDERS) -> list[Told]:
    """Do it when every bystander has had `after` events, and return what they got in the end."""
    events = [0] * len(asks)
    all_begun = asyncio.Event()

    def count(number: int) -> Callable[[], None]:
        def begun() -> None:
            events[number] += 1
            if min(events) >= after:
                all_begun.set()

        return begun

    async with server.client() as client:
        bench = Bench(server, client)
        streams = [asyncio.create_task(ask(client, each, count(number))) for number, each in enumerate(asks)]
        await all_begun.wait()
        await act(bench)
        told = await asyncio.gather(*streams)
        await bench.settled()
    return list(told)
