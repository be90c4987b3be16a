"""What completions and chats do alike with a generation: ask for it, as embeddings do, stream it, or wait for it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response

from engine import logs
from engine.types import EngineInfo, GenerateRequest, SamplingParams
from server import errors, schemas
from server.bodies import JsonRoute
from server.errors import ApiError
from server.generation import Choice, Generation, News, TextOptions, Usage
from server.guards import CLIENT_GONE
from server.running import InEngine
from server.schemas import GenerationBody
from server.serving import Serving
from server.settings import Settings
from server.streams import LARGEST_WRITE, ClientGone, frame, quoted, unless_gone

Render = Callable[[Choice, News], bytes]
"""The frame that tells of a choice's news; empty when there is nothing to tell yet."""
Begin = Callable[[Choice], bytes]
"""What comes before a choice's first news; may be empty."""
Delta = Callable[[str], bytes]
"""The frame of a text, where a frame tells nothing else; what Render makes of the same news."""


class PlaceRoute(JsonRoute):
    """A route whose requests need places. While there is none they are refused before their body is read, so that a
    refusal costs the same whatever was sent; what else is wrong with one is told when there is room again.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_with_room(request: Request) -> Response:
            serving: Serving = request.app.state.serving
            serving.admission.check_any()
            return await handle(request)

        return handle_with_room


@dataclass(frozen=True)
class Policy:
    """What the server's options say about any request."""

    clamps: bool = False
    """A max_tokens beyond the context is cut instead of refused."""
    queue_timeout_s: float | None = None
    request_timeout_s: float | None = None

    @classmethod
    def of(cls, settings: Settings) -> Policy:
        return cls(settings.context_overflow == "clamp", settings.queue_timeout, settings.request_timeout)

    def deadline_s(self, asked_s: float | None) -> float | None:
        """The shorter of the server's and the request's own."""
        return min((limit for limit in (asked_s, self.request_timeout_s) if limit is not None), default=None)


def _client_of(request: Request) -> str:
    """Who takes turns with others in the engine's queue: whoever owns the key, or where there are none the address."""
    key: str | None = request.state.key
    return key or (request.client.host if request.client else "")


_Asked = TypeVar("_Asked", bound=InEngine)


async def admit(
    request: Request, slots: int, tokens: int, answer_id: str, prepare: Callable[[], Awaitable[_Asked]]
) -> _Asked:
    """Reserve, prepare, submit: the one way of a request into the engine. What is returned owns what was reserved.

    tokens: an estimate of the prompts', which `prepare` makes a number.
    """
    serving: Serving = request.app.state.serving
    arrived_s = time.monotonic()
    key: str | None = request.state.key
    reservation = serving.admission.reserve(slots, serving.accounts.of(key), tokens=tokens)
    try:
        async with asyncio.timeout(serving.settings.request_timeout):
            asked = await prepare()
        reservation.correct(asked.usage.prompt_tokens)
        asked.submit(serving.metrics, reservation, arrived_s, _client_of(request))
    except TimeoutError as error:
        reservation.release()
        raise errors.deadline_exceeded() from error
    except BaseException:
        reservation.release()
        raise
    serving.running.enter(asked, (request.state.request_id, answer_id), key)
    if request.state.span is not None:
        asked.when_closed(partial(request.state.span.tell, asked))
    return asked


def engine_requests(
    body: GenerationBody,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    info: EngineInfo,
    *,
    n: int,
    request_hex: str,
    default_new_tokens: int | None,
    param: str,
    policy: Policy,
) -> list[GenerateRequest]:
    """One for each prompt, all checked. request_hex: unique, from which the engine's ids are made.

    n: choices of each. Greedy ones would all be the same: the engine is asked for one.
    """
    for token_ids in prompts:
        schemas.check_prompt(token_ids, info, param)
    return [
        GenerateRequest(
            request_id=f"{request_hex}-{number}",
            prompt_token_ids=token_ids,
            n=1 if sampling.temperature == 0 else n,
            sampling=sampling,
            max_new_tokens=schemas.new_tokens(
                body, len(token_ids), info, default_new_tokens, param, clamps=policy.clamps
            ),
            priority=body.priority or 0,
            deadline_s=policy.deadline_s(body.timeout),
            queue_timeout_s=policy.queue_timeout_s,
            cache_salt=body.cache_salt,
            logged_as=logs.request_id.get(),
        )
        for number, token_ids in enumerate(prompts)
    ]


def text_options(body: GenerationBody, info: EngineInfo, shown_ids: frozenset[int] = frozenset()) -> TextOptions:
    """shown_ids: special tokens that are text."""
    return TextOptions(
        stops=schemas.stop_strings(body),
        min_tokens=body.min_tokens or 0,
        skip_special_tokens=body.skip_special_tokens is not False,
        eos_token_ids=frozenset(() if body.ignore_eos else info.eos_token_ids),
        shown_ids=shown_ids,
    )


class Told:
    """A generation as frames, in the order in which things happen. Implements `streams.Frames`.

    A choice whose token made no text yet waits for one that does. A failure gives out what there is and then raises its
    ApiError.
    """

    def __init__(
        self,
        generation: Generation,
        begin: Begin,
        render: Render,
        usage_frame: Callable[[Usage], bytes] | None,
        delta: Delta | None = None,
    ) -> None:
        """delta: of choice 0; None: its frames tell more than text."""
        self._generation = generation
        self._begin = begin
        self._render = render
        self._usage_frame = usage_frame
        self._delta = delta
        self._begun: set[int] = set()
        self._has_told = False
        self._failure: ApiError | None = None
        self.when_news = generation.when_news
        self.is_over = False

    @property
    def backlog(self) -> int:
        return self._generation.backlog

    def take(self) -> bytes:
        if self._has_told and self._delta is not None and (text := self._generation.take_text()):
            return self._delta(text)  # nearly every token
        if self._failure is not None:
            raise self._failure
        parts: list[bytes] = []
        size = 0
        try:
            while size < LARGEST_WRITE and (choices := self._generation.told_update()) is not None:
                for choice in choices:
                    if choice.index not in self._begun:
                        self._begun.add(choice.index)
                        parts.append(self._begin(choice))
                    if choice.is_worth_telling:
                        parts.append(self._render(choice, choice.take()))
                        size += len(parts[-1])
        except ApiError as error:
            parts += [self._render(choice, choice.take()) for choice in self._generation.choices if choice.news.text]
            if not any(parts):
                raise  # what tells nothing is not asked again: nothing else would bring the failure out
            self._failure = error
            self.is_over = True  # but for the failure: whoever takes once more is told
        if self._generation.is_over and self._failure is None and not self.is_over:
            self.is_over = True
            if self._usage_frame is not None:
                parts.append(self._usage_frame(self._generation.usage))
        telling = parts[0] if len(parts) == 1 else b"".join(parts)
        if telling:
            self._has_told = True
            self._generation.commit()
        return telling

    def give_up(self) -> None:
        self._generation.give_up()


async def whole(
    request: Request, generation: Generation, describe: Callable[[], dict[str, Any]], headers: Mapping[str, str]
) -> Response:
    """Wait for the end and answer with `describe()`. A client that leaves meanwhile takes the generation with it."""
    try:
        await unless_gone(generation.finished(), request.receive)
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    finally:
        await generation.aclose()
    # Straight to bytes: FastAPI would walk through every value of a long answer first.
    content = json.dumps(describe(), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    headers = {**headers, "Server-Timing": generation.timing()}
    return Response(content, headers=headers, media_type="application/json")


def wants_usage(body: GenerationBody) -> tuple[bool, bool]:
    """(a chunk with the usage at the end, the usage so far in every chunk)."""
    options = body.stream_options
    return (False, False) if options is None else (bool(options.include_usage), bool(options.continuous_usage_stats))


def usage_hole(body: GenerationBody, hole: str) -> dict[str, Any]:
    """What a chunk says of usage: nothing, null because it comes at the end, or the count so far."""
    at_end, always = wants_usage(body)
    return {"usage": hole if always else None} if at_end or always else {}


def usage_frame(body: GenerationBody, head: Mapping[str, Any]) -> Callable[[Usage], bytes] | None:
    if not wants_usage(body)[0]:
        return None
    return lambda usage: frame({**head, "choices": [], "usage": usage.as_dict()})


def usage_json(usage: Usage, *, untold: int = 0) -> str:
    """untold: tokens that are counted already, but come in a later frame."""
    prompt, completion = usage.prompt_tokens, usage.completion_tokens - untold
    return f'{{"prompt_tokens": {prompt}, "completion_tokens": {completion}, "total_tokens": {prompt + completion}}}'


def reason(choice: Choice) -> str | None:
    """The two words that clients know; other ends are told as errors."""
    return choice.finish_reason if choice.finish_reason in ("stop", "length") else None


def ending_json(choice: Choice, told: str | None = None) -> tuple[str, str]:
    """finish_reason and stop_reason. told: another word for the first."""
    told = told or reason(choice)
    return ("null", "null") if told is None else (quoted(told), json.dumps(choice.stop_reason))
