"""Clients that ask for more than a server has, in a process of their own: `python -m load.overload URL MODE N`.

    closed   N clients, each with one connection, that ask again as soon as they are answered; refused, they wait as
             long as they were told
    open     N requests a second that come whether others were answered or not, and are not asked again
    probe    the same, each for one token and on a connection of its own: how long a refusal takes

Prints one JSON object (`Told`). Plain sockets and little else, for clients that are slower than the server would be
what is measured; `busy` says how near they came. What is asked has its answer in support/letters.py, and only an answer
that is whole and right counts. Run with tests/ on the path.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import re
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from support.letters import text_of
from support.scripted_server import child_environment

Mode = Literal["closed", "open", "probe"]

MAX_TOKENS = 50
WARM_UP_S = 2.0
"""In which nothing is counted: the first answers come all at once."""
_PATIENCE_S = 60.0


@dataclass
class Told:
    """What happened between the warm-up and the end; an answer belongs to the moment of its last byte."""

    seconds: float = 0.0
    tokens: int = 0
    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    """What came that was neither whole and right nor a refusal."""
    refused: int = 0
    unspecific: int = 0
    """Refusals that did not say when to come again."""
    refusal_ms: list[float] = field(default_factory=list)
    """From before the connection to the last byte; of probes alone."""
    told_s: list[float] = field(default_factory=list)
    busy: float = 0.0
    """Part of one core that this process used."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class Connection(asyncio.Protocol):
    """One connection, one request at a time. Answers have a length or come in chunks."""

    def __init__(self) -> None:
        self._content = bytearray()
        self._head_bytes = 0
        self._headers: dict[str, str] = {}
        self._end: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self.is_open = False

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        return connection

    def close(self) -> None:
        assert self._transport is not None
        self._transport.abort()

    async def post(self, content: bytes) -> Answer:
        """Raises ConnectionError where it ends before the answer does."""
        assert self._transport is not None
        self._content.clear()
        self._head_bytes = 0
        self._end = asyncio.get_running_loop().create_future()
        self._transport.write(content)
        async with asyncio.timeout(_PATIENCE_S):
            await self._end
        status = int(self._content.split(b" ", 2)[1])
        return Answer(status, self._headers, bytes(self._content[self._head_bytes :]))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._end is not None and not self._end.done():
            self._end.set_exception(ConnectionResetError("it ended before the answer did"))

    def data_received(self, data: bytes) -> None:
        self._content += data
        if not self._head_bytes:
            head, end, _ = bytes(self._content).partition(b"\r\n\r\n")
            if not end:
                return
            self._head_bytes = len(head) + len(end)
            lines = head.decode("latin-1").split("\r\n")[1:]
            self._headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if self._is_whole() and self._end is not None and not self._end.done():
            self._end.set_result(None)

    def _is_whole(self) -> bool:
        if "content-length" in self._headers:
            return len(self._content) - self._head_bytes >= int(self._headers["content-length"])
        return self._content.endswith(b"\r\n0\r\n\r\n")


@dataclass(frozen=True)
class Asked:
    """One streamed completion of letters."""

    prompt: str
    seed: int
    max_tokens: int = MAX_TOKENS

    def content(self) -> bytes:
        asked = {"prompt": self.prompt, "seed": self.seed, "max_tokens": self.max_tokens, "stream": True}
        body = json.dumps(asked | {"temperature": 1.0}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json"
        return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    def is_answered_by(self, answer: Answer) -> bool:
        text, end = text_of(self.prompt, self.seed, self.max_tokens)
        events = [json.loads(line) for line in re.findall(rb"^data: (\{.*\})\r?$", answer.body, re.MULTILINE)]
        if any("choices" not in event for event in events):
            return False
        choices = [event["choices"][0] for event in events]
        told, ends = "".join(choice["text"] for choice in choices), [choice["finish_reason"] for choice in choices]
        return (told, ends[-1:]) == (text, [end]) and b"data: [DONE]" in answer.body


class Clients:
    """All of one process, and what they are told."""

    def __init__(self, url: str, seconds: float, warm_up_s: float = WARM_UP_S) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        assert address.port is not None
        self._host, self._port = address.hostname, address.port
        self._open_ones: list[Connection] = []
        self.told = Told()
        self._warm_up_s = warm_up_s
        self._counts_from_s = time.perf_counter() + warm_up_s
        self._until_s = self._counts_from_s + seconds

    async def run(self, mode: Mode, number: float) -> Told:
        modes: dict[Mode, Callable[[float], Awaitable[None]]] = {
            "closed": self._closed,
            "open": self._open,
            "probe": self._probe,
        }
        working = asyncio.ensure_future(modes[mode](number))
        await asyncio.sleep(self._warm_up_s)
        cpu_s, begun_s = time.process_time(), time.perf_counter()
        await asyncio.sleep(self._until_s - begun_s)
        self.told.seconds = time.perf_counter() - begun_s
        self.told.busy = (time.process_time() - cpu_s) / self.told.seconds
        told = self.told
        self.told = Told()  # of what ends later nothing is counted
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        for connection in self._open_ones:
            connection.close()
        await asyncio.sleep(0)  # where they are closed
        return told

    async def _closed(self, number: float) -> None:
        async def client(number: int) -> None:
            connection = await self._connect()
            for turn in range(1_000_000):
                answer = await self._ask(connection, Asked(f"client {number}", turn))
                if answer is not None and answer.status != 200:
                    await asyncio.sleep(_told_s(answer))

        await asyncio.gather(*(client(each) for each in range(int(number))))

    async def _open(self, number: float) -> None:
        # The one at rest the longest goes first, so that none is closed for it by the server in the same moment.
        idle: deque[Connection] = deque()

        async def once(turn: int) -> None:
            connection = idle.popleft() if idle else await self._connect()
            await self._ask(connection, Asked("open", turn))
            if connection.is_open:
                idle.append(connection)

        await self._at_random(number, once)

    async def _probe(self, number: float) -> None:
        async def once(turn: int) -> None:
            begun_s = time.perf_counter()
            connection = await self._connect()
            answer = await self._ask(connection, Asked("probe", turn, max_tokens=1))
            if answer is not None and answer.status != 200:
                self.told.refusal_ms.append(1000 * (time.perf_counter() - begun_s))
            connection.close()
            self._open_ones.remove(connection)

        await self._at_random(number, once)

    async def _at_random(self, number: float, once: Callable[[int], Awaitable[None]]) -> None:
        """So many a second, whatever became of those before."""
        draw = random.Random(7)
        due_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for turn in range(1_000_000):
                due_s += draw.expovariate(number)
                await asyncio.sleep(due_s - time.perf_counter())
                group.create_task(_one(once(turn)))

    async def _connect(self) -> Connection:
        connection = await Connection.open(self._host, self._port)
        self._open_ones.append(connection)
        return connection

    async def _ask(self, connection: Connection, asked: Asked) -> Answer | None:
        """None where there was no answer. Counts it."""
        try:
            answer = await connection.post(asked.content())
        except (ConnectionError, TimeoutError) as error:
            self.told.wrong.append(repr(error))
            return None
        if time.perf_counter() < self._counts_from_s:
            return answer
        told = self.told
        if answer.status == 200:
            if asked.is_answered_by(answer):
                told.answers += 1
                told.tokens += asked.max_tokens
            else:
                told.wrong.append(f"{asked}: {answer.body[-500:]!r}")
        elif b'"queue_full"' in answer.body:
            told.refused += 1
            told.unspecific += "retry-after" not in answer.headers
            told.told_s.append(_told_s(answer))
        else:
            told.wrong.append(f"{answer.status}: {answer.body[:500]!r}")
        return answer


async def _one(asking: Awaitable[None]) -> None:
    await asking


def _told_s(answer: Answer) -> float:
    """As the openai client reads it: the milliseconds first."""
    if "retry-after-ms" in answer.headers:
        return float(answer.headers["retry-after-ms"]) / 1000
    return float(answer.headers.get("retry-after", 1))


async def beside(url: str, mode: Mode, number: float, seconds: float) -> Told:
    """Run such a process to its end. Raises RuntimeError with what it complains of."""
    words = [sys.executable, "-m", "load.overload", url, mode, str(number), "--seconds", str(seconds)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, env=child_environment(), stdout=pipe, stderr=pipe)
    out, complaint = await process.communicate()
    if process.returncode:
        raise RuntimeError(complaint.decode())
    return Told(**json.loads(out))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m load.overload", description=__doc__.partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("mode", choices=("closed", "open", "probe"))
    parser.add_argument("number", type=float)
    parser.add_argument("--seconds", type=float, default=8.0)
    args = parser.parse_args()
    gc.freeze()

    async def run() -> Told:
        return await Clients(args.url, args.seconds).run(args.mode, args.number)

    print(json.dumps(asdict(asyncio.run(run()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
