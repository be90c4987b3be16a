"""`cellserve batch IN OUT`: answer a file of requests, in the form of OpenAI's batch files.

    IN    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "..."}}        a line each
    OUT   {"id": ..., "custom_id": "a", "response": {"status_code", "request_id", "body"}, "error": null}  as they end

Without --url the model is loaded for the file alone: the whole server runs in this process, without a socket, so a line
means what it means over HTTP. A line that cannot be answered says so in its own place; the others go on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from engine.client import EngineClient
from engine.errors import ConfigError
from server import bodies
from server.app import create_app
from server.settings import Settings

ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")

_NOT_NOW = (429, 503)
_LONGEST_WAIT_S = 30.0
_MAX_TRIES = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", type=Path, metavar="IN", help="JSONL file of requests")
    parser.add_argument("output", type=Path, metavar="OUT", help="JSONL file of answers, in the order of their ends")
    parser.add_argument("--url", help="send them to this server instead of loading a model")
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="requests open at once (default: 64)")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT when it is there")


@dataclass(frozen=True)
class Line:
    """One request of the file, or why it is none."""

    custom_id: str | None
    path: str = ""
    body: Any = None
    fault: str | None = None


def read_lines(lines: Iterable[str]) -> Iterator[Line]:
    """Empty lines are nothing; every other one is one `Line`."""
    seen: set[str] = set()
    for text in lines:
        if not text.strip():
            continue
        line = _line(text)
        if line.fault is None and line.custom_id in seen:
            line = Line(line.custom_id, fault=f"custom_id {line.custom_id!r:.64} stands on an earlier line too")
        seen.add(line.custom_id or "")
        yield line


def _line(text: str) -> Line:
    try:
        entry = bodies.parse(text.encode())
    except ValueError as error:
        return Line(None, fault=f"the line is not JSON: {error}")
    if not isinstance(entry, dict) or not isinstance(entry.get("custom_id"), str):
        return Line(None, fault="the line must be an object with a custom_id that is text")
    custom_id, path, body = entry["custom_id"], entry.get("url"), entry.get("body")
    if entry.get("method", "POST") != "POST" or path not in ROUTES:
        return Line(custom_id, fault=f"only POST to {' or '.join(ROUTES)} can be asked for")
    if not isinstance(body, dict):
        return Line(custom_id, fault="the body must be an object")
    if body.get("stream"):
        return Line(custom_id, fault="a stream has no place in a file: leave stream out")
    return Line(custom_id, path, body)


def run(args: argparse.Namespace, settings: Settings, client: EngineClient | None) -> int:
    """0: every line was answered with 200. 1: some were not. client: an engine that was not started; None with --url.

    Raises ConfigError for files that cannot be used, ModelError when the model cannot be loaded.
    """
    if args.streams < 1:
        raise ConfigError(f"--streams is {args.streams}: it must be at least 1")
    try:
        with args.input.open(encoding="utf-8") as file:
            lines = list(read_lines(file))
        output = args.output.open("w" if args.overwrite else "x", encoding="utf-8")
    except FileExistsError as error:
        raise ConfigError(f"{args.output} is there: name another file, or give --overwrite") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the files cannot be used: {error}") from error
    with output:
        failures = asyncio.run(_run(args, settings, client, lines, output))
    if failures:
        Console(stderr=True).print(f"batch: {failures} of {len(lines)} lines failed", style="red", highlight=False)
    return 1 if failures else 0


async def _run(
    args: argparse.Namespace, settings: Settings, client: EngineClient | None, lines: list[Line], output: TextIO
) -> int:
    columns = (TextColumn("batch"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("batch", total=len(lines))
        async with _http(args.url, settings, client) as http:
            return await _answer_all(http, lines, args.streams, output, lambda: progress.advance(task))


async def _answer_all(http: httpx.AsyncClient, lines: list[Line], streams: int, output: TextIO, tick: Any) -> int:
    """How many were not answered with 200."""
    waiting = iter(lines)
    failures = 0

    async def stream() -> None:
        nonlocal failures
        for line in waiting:
            record = await _answer(http, line)
            failures += record["error"] is not None or record["response"]["status_code"] != 200
            print(json.dumps(record, ensure_ascii=False), file=output, flush=True)
            tick()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(streams, len(lines))):
            group.create_task(stream())
    return failures


@contextlib.asynccontextmanager
async def _http(url: str | None, settings: Settings, client: EngineClient | None) -> AsyncIterator[httpx.AsyncClient]:
    """A way to the server: over the network, or to one that lives as long as this block."""
    keys = settings.keys()
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    if client is None:
        assert url is not None
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=None, limits=limits) as http:
            yield http
        return
    app = create_app(client, settings.model_copy(update={"access_log": False}))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(base_url="http://batch", transport=transport, headers=headers, timeout=None) as http,
    ):
        await app.state.lifecycle.wait_loaded()
        yield http


async def _answer(http: httpx.AsyncClient, line: Line) -> dict[str, Any]:
    record: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id}
    if line.fault is not None:
        return record | {"response": None, "error": {"code": "invalid_line", "message": line.fault}}
    try:
        answer = await _post(http, line)
        response = {
            "status_code": answer.status_code,
            "request_id": answer.headers.get("x-request-id"),
            "body": answer.json(),
        }
    except (httpx.HTTPError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        return record | {"response": None, "error": {"code": "no_answer", "message": reason}}
    return record | {"response": response, "error": None}


async def _post(http: httpx.AsyncClient, line: Line) -> httpx.Response:
    """A server that is full, or comes up, is asked again when it says so."""
    for _ in range(_MAX_TRIES):
        answer = await http.post(line.path, json=line.body)
        wait = answer.headers.get("retry-after", "")
        if answer.status_code not in _NOT_NOW or not wait.isdigit():
            break
        await asyncio.sleep(min(float(wait), _LONGEST_WAIT_S))
    return answer
