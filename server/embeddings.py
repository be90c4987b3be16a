"""POST /v1/embeddings: each input's hidden states as one vector of length 1, in the loop that also generates.

An input is pooled at its last token, or over all of them, as `EngineInfo.pooling` says. Many inputs of one request run
as places allow: the request holds no more of them than sequences run at once.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from engine import logs
from engine.client import EngineClient, RequestStream
from engine.types import EngineInfo, FinishReason, GenerateRequest, SamplingParams, Update
from server import answers, errors, schemas
from server.admission import Reservation
from server.fields import Prompts, Truncation
from server.generation import Times, Usage
from server.guards import CLIENT_GONE
from server.metrics import Metrics
from server.serving import Serving
from server.streams import ClientGone, unless_gone
from server.text import Text

router = APIRouter(tags=["embeddings"], route_class=answers.PlaceRoute)

MAX_INPUTS = 2048

_GREEDY = SamplingParams(temperature=0.0)

Write = Callable[[int, bytes], None]
"""Told each vector as it comes: (number of its input, float32 little-endian)."""


class EmbeddingBody(BaseModel):
    """POST /v1/embeddings."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    """base64: of float32, little-endian."""
    dimensions: Annotated[
        Annotated[int, Field(ge=1)] | None,
        WithJsonSchema({"type": "null", "description": "a number for models whose configuration allows to cut them"}),
    ] = None
    """In the OpenAPI document null alone: what holds for every model is what a client may count on."""
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Truncation = None
    """Inputs are cut to this many tokens; -1: to the context."""
    truncation_side: Literal["left", "right"] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None
    """Seconds from admission to the end of the answer."""
    user: str | None = None


@router.post("/v1/embeddings", operation_id="create_embedding")
async def create_embedding(request: Request, body: EmbeddingBody) -> Response:
    serving: Serving = request.app.state.serving
    headers = serving.headers_of(body)
    model = schemas.check_model(body, serving.served_names)
    info = serving.client.info
    size = check_possible(body, info)
    answer_id = f"embd-{request.state.request_hex}"

    async def prepare() -> EmbeddingJob:
        policy = answers.Policy.of(serving.settings)
        requests = await requests_of(body, serving.client, serving.text, request.state.request_hex, policy)
        return EmbeddingJob(serving.client, requests)

    tokens = schemas.estimated_tokens(body.input, info, body.truncate_prompt_tokens)
    job = await answers.admit(request, places(len(body.input), info), tokens, answer_id, prepare)
    data: list[bytes] = [b""] * len(body.input)

    def write(number: int, vector: bytes) -> None:
        # Each as it comes: all of a long answer at once would hold up the event loop.
        data[number] = _entry(number, cut(vector, size), body.encoding_format)

    try:
        await unless_gone(job.run(write), request.receive)
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    finally:
        await job.aclose()
    head = {"id": answer_id, "object": "list", "created": int(time.time()), "model": model, "usage": _usage(job.usage)}
    content = json.dumps(head).encode()[:-1] + b', "data": [' + b", ".join(data) + b"]}"
    timing = f"total;dur={1000 * (time.monotonic() - job.times().arrived_s):.1f}"
    return Response(content, headers={**headers, "Server-Timing": timing}, media_type="application/json")


def check_possible(body: EmbeddingBody, info: EngineInfo) -> int:
    """How many numbers each vector has. Raises ApiError 400 for what this model, or any, cannot do."""
    if info.pooling is None:
        raise errors.no_embeddings(info.no_embeddings)
    if len(body.input) > MAX_INPUTS:
        raise errors.invalid_value(f"input holds {len(body.input)} inputs: at most {MAX_INPUTS} are possible", "input")
    full, asked, sizes = info.embedding_size, body.dimensions, info.matryoshka
    if asked is None or asked == full:
        return full
    if sizes is None:
        raise errors.unsupported_parameter(
            f"dimensions is {asked}, but this model's embeddings have {full} numbers and may not be cut: its "
            "configuration names no matryoshka dimensions",
            "dimensions",
        )
    if asked > full or (sizes and asked not in sizes):
        possible = ", ".join(map(str, sizes)) if sizes else f"1 to {full}"
        raise errors.invalid_value(f"dimensions is {asked}: this model's may be {possible}", "dimensions")
    return asked


def places(num_inputs: int, info: EngineInfo) -> int:
    """How many of a request's inputs are in the engine at once."""
    return min(num_inputs, info.max_num_seqs)


async def requests_of(
    body: EmbeddingBody,
    client: EngineClient,
    text: Text,
    request_hex: str,
    policy: answers.Policy = answers.Policy(),  # noqa: B008 - frozen
) -> list[GenerateRequest]:
    """One an input, all of them checked, none submitted. Raises ApiError 400. request_hex: unique."""
    info = client.info
    prompts = await text.encode_prompts(
        body.input,
        max_model_len=info.max_model_len if body.truncate_prompt_tokens is None else None,
        add_special_tokens=body.add_special_tokens is not False,
        param="input",
    )
    keep = info.max_model_len if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
    prompts = [schemas.cut(token_ids, keep, body.truncation_side) for token_ids in prompts]
    for token_ids in prompts:
        schemas.check_prompt(token_ids, info, "input")
        if len(token_ids) > info.max_model_len:
            raise errors.context_length_exceeded(
                f"this model's context is {info.max_model_len} tokens; an input has {len(token_ids)}",
                prompt_tokens=len(token_ids),
                max_model_len=info.max_model_len,
                param="input",
            )
    return [
        GenerateRequest(
            request_id=f"{request_hex}-{number}",
            prompt_token_ids=tuple(token_ids),
            sampling=_GREEDY,
            max_new_tokens=0,
            priority=body.priority or 0,
            deadline_s=policy.deadline_s(body.timeout),
            queue_timeout_s=policy.queue_timeout_s,
            cache_salt=body.cache_salt,
            logged_as=logs.request_id.get(),
            pooling=info.pooling,
        )
        for number, token_ids in enumerate(prompts)
    ]


class EmbeddingJob:
    """The inputs of one request on their way through the engine, each when there is a place for it.

    Event-loop thread. `submit`, then `run`; `aclose` gives the reservation back and must be called once `submit` was.
    """

    def __init__(self, client: EngineClient, requests: Sequence[GenerateRequest]) -> None:
        self.requests = tuple(requests)
        self.usage = Usage(sum(len(request.prompt_token_ids) for request in requests))
        self._client = client
        self._places = places(len(requests), client.info)
        self._metrics: Metrics | None = None
        self._reservation: Reservation | None = None
        self._whose = ""
        self._arrived_s = self._last_s = time.monotonic()
        self._queued_s: float | None = None
        self._finished: dict[int, FinishReason] = {}
        """By number of the input."""
        self._streams: set[RequestStream] = set()
        self._was_cancelled = False
        self._on_close = ExitStack()

    @property
    def finish_reasons(self) -> list[FinishReason]:
        return [self._finished.get(number, "cancelled") for number in range(len(self.requests))]

    def submit(
        self,
        metrics: Metrics | None = None,
        reservation: Reservation | None = None,
        arrived_s: float | None = None,
        client: str = "",
    ) -> None:
        """Own the reservation from here on. The inputs themselves are submitted one after another, by `run`.

        arrived_s: time.monotonic() that deadlines and latencies count from. client: whose turns in the queue they take.
        """
        self._metrics, self._reservation, self._whose = metrics, reservation, client
        self._arrived_s = self._last_s = time.monotonic() if arrived_s is None else arrived_s
        if reservation is not None:
            reservation.spend(self.usage.prompt_tokens)

    async def run(self, write: Write) -> None:
        """Return when every vector was written. The first failure ends all: ApiError, or the engine's refusal."""
        waiting = iter(enumerate(self.requests))

        async def take_turns() -> None:
            for number, request in waiting:
                write(number, await self._embed(number, request))

        tasks = [asyncio.ensure_future(take_turns()) for _ in range(self._places)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def cancel(self) -> None:
        """End it from outside: `run` raises ApiError 409."""
        self._was_cancelled = True
        for stream in self._streams:
            stream.cancel()

    def when_closed(self, call: Callable[[], None]) -> None:
        """Call this once, when all is over."""
        self._on_close.callback(call)

    def times(self) -> Times:
        return Times(arrived_s=self._arrived_s, queued_s=self._queued_s, first_s=None, last_s=self._last_s)

    async def aclose(self) -> None:
        if self._reservation is not None:
            self._reservation.release()
        self._on_close.close()

    async def _embed(self, number: int, request: GenerateRequest) -> bytes:
        if self._was_cancelled:
            raise errors.request_cancelled()
        if request.deadline_s is not None:
            left_s = self._arrived_s + request.deadline_s - time.monotonic()
            if left_s <= 0:
                raise errors.deadline_exceeded()
            request = replace(request, deadline_s=left_s)
        stream = self._client.submit(replace(request, client=self._whose))
        submitted_s = time.monotonic()
        self._streams.add(stream)
        finish: FinishReason = "cancelled"
        if self._metrics is not None:
            self._metrics.request_started(prompt_tokens=len(request.prompt_token_ids))
        try:
            async with stream:
                async for update in stream:
                    self._look_up(request, stream, update, submitted_s)
                    if update.embedding is not None:
                        finish = "stop"
                        return update.embedding
                    if update.finish == "cancelled":
                        raise errors.request_cancelled()
                    if update.finish is not None:
                        finish = "failed"
                        raise errors.from_failure(update.error_code)
            raise AssertionError("a stream ended without its last update")
        finally:
            self._finished[number], self._last_s = finish, time.monotonic()
            self._streams.discard(stream)
            if self._reservation is not None:
                self._reservation.computed(len(request.prompt_token_ids))
            if self._metrics is not None:
                self._metrics.finished(finish, generated_tokens=0, e2e_s=self._last_s - self._arrived_s)

    def _look_up(self, request: GenerateRequest, stream: RequestStream, update: Update, submitted_s: float) -> None:
        if update.cached_tokens is None:
            return
        self.usage.cached_tokens += update.cached_tokens
        if self._queued_s is None and stream.queued_s is not None:
            self._queued_s = submitted_s + stream.queued_s - self._arrived_s
        if self._metrics is not None:
            self._metrics.prompt_looked_up(
                prompt_tokens=len(request.prompt_token_ids), cached_tokens=update.cached_tokens
            )
            if stream.queued_s is not None:
                since_s = time.monotonic() - submitted_s
                self._metrics.prompt_ran(queued_s=stream.queued_s, prefill_s=max(0.0, since_s - stream.queued_s))


async def embed(
    body: EmbeddingBody, client: EngineClient, text: Text
) -> tuple[list[GenerateRequest], list[tuple[float, ...]]]:
    """All of it without HTTP: the requests as they were run, and the vector of each."""
    size = check_possible(body, client.info)
    requests = await requests_of(body, client, text, uuid.uuid4().hex)
    job = EmbeddingJob(client, requests)
    job.submit()
    vectors: list[tuple[float, ...]] = [()] * len(requests)

    def write(number: int, vector: bytes) -> None:
        vectors[number] = numbers(cut(vector, size))

    try:
        await job.run(write)
    finally:
        await job.aclose()
    return requests, vectors


def cut(vector: bytes, size: int) -> bytes:
    """The first `size` numbers, of length 1 again."""
    if len(vector) == 4 * size:
        return vector
    values = numbers(vector[: 4 * size])
    length = math.sqrt(math.fsum(value * value for value in values)) or 1.0
    return struct.pack(f"<{size}f", *(value / length for value in values))


def numbers(vector: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(vector) // 4}f", vector)


def _entry(number: int, vector: bytes, encoding: str | None) -> bytes:
    written = f'"{base64.b64encode(vector).decode()}"' if encoding == "base64" else json.dumps(numbers(vector))
    return f'{{"object": "embedding", "index": {number}, "embedding": {written}}}'.encode()


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
