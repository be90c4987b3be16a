"""The sending half of `cellserve bench`: one request to one Outcome, and many of them by a schedule.

Clocks are time.perf_counter() seconds. A request's clock starts at its first try, so that a refusal and the wait it
asks for count as what a user would feel. Knows nothing of options or reports.
"""

from __future__ import annotations

import asyncio
import enum
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

REFUSALS = (429, 503)
"""Statuses that say "not now": counted apart from failures, and tried again."""
LONGEST_WAIT_S = 60.0


class BenchError(Exception):
    """There is nothing to measure, and why."""


class Status(enum.Enum):
    COMPLETED = enum.auto()
    FAILED = enum.auto()
    REFUSED = enum.auto()
    """Given up after the last retry."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request asks."""

    content: Mapping[str, Any]
    """Either `prompt` (text or ids) or `messages`."""
    output_tokens: int

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if "messages" in self.content else "/v1/completions"


@dataclass(slots=True)
class Outcome:
    """How one request went."""

    sent_s: float
    status: Status = Status.FAILED
    frames_s: list[float] = field(default_factory=list)
    """When each frame that brought text or tokens arrived."""
    ended_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    refusals: list[int] = field(default_factory=list)
    error: str | None = None


class LoadClient:
    """One connection pool without limits: httpx's default of 100 connections would throttle the load unseen."""

    def __init__(self, url: str, api_key: str, temperature: float, max_retries: int) -> None:
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/"),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=httpx.Timeout(None, connect=30.0),
        )
        self._url = url
        self._temperature = temperature
        self._max_retries = max_retries
        self._model = ""

    async def __aenter__(self) -> LoadClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def choose_model(self, model: str | None) -> str:
        """The served name requests are sent with: `model`, or the first the server lists. Raises BenchError."""
        if model is None:
            try:
                listed = await self._http.get("/v1/models")
                listed.raise_for_status()
                model = str(listed.json()["data"][0]["id"])
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
                raise BenchError(f"no model is listed at {self._url}/v1/models: {error}") from error
        self._model = model
        return model

    async def send(self, prompt: Prompt) -> Outcome:
        """Never raises for what the server or the network did: the outcome says it."""
        outcome = Outcome(sent_s=time.perf_counter())
        body = {
            "model": self._model,
            **prompt.content,
            "max_tokens": prompt.output_tokens,
            "temperature": self._temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            while (wait_s := await self._try(prompt.path, body, outcome)) is not None:
                await asyncio.sleep(wait_s)
        except (httpx.HTTPError, ValueError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.ended_s = time.perf_counter()
        return outcome

    async def _try(self, path: str, body: Mapping[str, Any], outcome: Outcome) -> float | None:
        """One attempt. Seconds to wait before the next one, or None when the outcome stands."""
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code == httpx.codes.OK:
                await self._read_stream(response, outcome)
                return None
            # Read to the end, so that the connection can be used again.
            text = (await response.aread()).decode(errors="replace")
        if response.status_code in REFUSALS:
            outcome.refusals.append(response.status_code)
            if len(outcome.refusals) <= self._max_retries:
                return retry_after_s(response.headers)
            outcome.status = Status.REFUSED
        outcome.error = f"{response.status_code}: {_error_message(text)}"
        return None

    async def _read_stream(self, response: httpx.Response, outcome: Outcome) -> None:
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            now_s = time.perf_counter()
            data = line[len("data:") :].strip()
            if data == "[DONE]":
                outcome.status = Status.COMPLETED
                return
            frame = json.loads(data)
            if "error" in frame:
                outcome.error = f"in the stream: {_error_message(data)}"
                return
            if usage := frame.get("usage"):
                outcome.input_tokens = usage["prompt_tokens"]
                outcome.output_tokens = usage["completion_tokens"]
            if any(_brings_news(choice) for choice in frame.get("choices", ())):
                outcome.frames_s.append(now_s)
        outcome.error = "the stream ended without [DONE]"


async def run_load(
    client: LoadClient,
    prompts: Sequence[Prompt],
    streams: int,
    arrivals_s: Sequence[float] | None,
    on_outcome: Callable[[Outcome, float], None],
) -> tuple[list[Outcome], float]:
    """Send all prompts, at most `streams` at once; their outcomes in order, and the seconds it took.

    arrivals_s: seconds from the start before which each prompt is not sent; None sends as soon as a stream is free.
    on_outcome: called with each outcome as it ends and the seconds since the start.
    """
    outcomes: dict[int, Outcome] = {}
    queue = iter(enumerate(prompts))
    started_s = time.perf_counter()

    async def stream() -> None:
        for index, prompt in queue:
            if arrivals_s is not None:
                await asyncio.sleep(started_s + arrivals_s[index] - time.perf_counter())
            outcomes[index] = await client.send(prompt)
            on_outcome(outcomes[index], time.perf_counter() - started_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(streams, len(prompts))):
            group.create_task(stream())
    return [outcomes[index] for index in range(len(prompts))], time.perf_counter() - started_s


def retry_after_s(headers: Mapping[str, str]) -> float:
    """What the server asks for, in [0.01, 60] seconds; 1 where it asks for nothing readable."""
    try:
        wait_s = float(headers.get("retry-after", "1"))
    except ValueError:
        wait_s = 1.0
    return min(max(wait_s, 0.01), LONGEST_WAIT_S)


def _brings_news(choice: Mapping[str, Any]) -> bool:
    """Text or tokens; a chat stream's opening role and a frame that only tells the end are neither."""
    if "delta" in choice:
        return any(value for key, value in choice["delta"].items() if key != "role")
    # A model without a tokenizer answers in frames without text.
    return bool(choice.get("text") or choice.get("token_ids") or choice.get("finish_reason") is None)


def _error_message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text[:200]
