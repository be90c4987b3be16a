"""POST /v1/completions: every form of prompt, n choices each, whole or streamed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fastapi import APIRouter, Request, Response

from engine.client import EngineClient
from engine.types import EngineInfo, TokenLogprobs
from server import answers, logprobs, schemas
from server.generation import Choice, Generation, News
from server.schemas import DEFAULT_MAX_TOKENS, CompletionBody
from server.serving import Serving
from server.streams import HOLE, EventStream, FrameTemplate, quoted
from server.text import Text

router = APIRouter(tags=["completions"])


@router.post("/v1/completions", operation_id="create_completion")
async def create_completion(request: Request, body: CompletionBody) -> Response:
    serving: Serving = request.app.state.serving
    arrived_s = time.monotonic()
    headers = schemas.check_extra_fields(body)
    head = {
        "id": f"cmpl-{request.state.request_hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": schemas.check_model(body, serving.served_names),
    }
    reservation = serving.admission.reserve(len(body.prompt) * (body.n or 1))
    try:
        prompts = [await encode(prompt, body, serving.text, serving.client.info) for prompt in body.prompt]
        generation = generation_of(body, serving.client, serving.text, prompts, request.state.request_hex)
        generation.submit(serving.metrics, reservation, arrived_s)
    except BaseException:
        reservation.release()
        raise
    writer = _Writer(body, head, serving.text, prompts, generation)
    if body.stream:
        frames = answers.stream(generation, writer.begin, writer.chunk, answers.usage_frame(body, head))
        return EventStream(frames, generation.aclose, headers)
    return await answers.whole(request, generation, writer.whole, headers)


@dataclass(frozen=True)
class Prompt:
    """What the model sees, and how it reads when it is echoed."""

    token_ids: tuple[int, ...]
    own_text: str | None
    """The caller's, unchanged; None for a prompt of ids."""
    decoder: Text
    skip_special_tokens: bool

    @cached_property
    def text(self) -> str:
        return "".join(self._deltas) if self.own_text is None else self.own_text

    @cached_property
    def offsets(self) -> list[int]:
        """Code points before each token, never beyond the text as it is echoed."""
        offsets, length = [], 0
        for delta in self._deltas:
            offsets.append(min(length, len(self.text)))
            length += len(delta)
        return offsets

    @cached_property
    def _deltas(self) -> list[str]:
        # Not finished: half a character at the end is completed, or replaced, by the answer.
        detokenizer = self.decoder.detokenizer((), skip_special_tokens=self.skip_special_tokens)
        return [detokenizer.push(token_id) for token_id in self.token_ids]


async def encode(prompt: schemas.RawPrompt, body: CompletionBody, text: Text, info: EngineInfo) -> Prompt:
    """Raises ApiError 400 for text that cannot be a prompt of this model."""
    skip_special_tokens = body.skip_special_tokens is not False
    if not isinstance(prompt, str):
        return Prompt(prompt, None, text, skip_special_tokens)
    token_ids = await text.encode_prompt(
        prompt, max_model_len=info.max_model_len, add_special_tokens=body.add_special_tokens is not False
    )
    return Prompt(tuple(token_ids), prompt, text, skip_special_tokens)


def generation_of(
    body: CompletionBody, client: EngineClient, text: Text, prompts: Sequence[Prompt], request_hex: str
) -> Generation:
    """All of it checked, nothing submitted. Raises ApiError 400. request_hex: unique for the life of the engine."""
    info = client.info
    of_prompt = [body.prompt_logprobs, body.logprobs if body.echo else None]
    sampling = schemas.sampling_params(
        body,
        info,
        text,
        logprobs=body.logprobs,
        prompt_logprobs=max((k for k in of_prompt if k is not None), default=None),
    )
    requests = answers.engine_requests(
        body,
        [prompt.token_ids for prompt in prompts],
        sampling,
        info,
        request_hex=request_hex,
        default_new_tokens=DEFAULT_MAX_TOKENS,
        param="prompt",
    )
    prompt_chars = [len(prompt.text) for prompt in prompts] if body.logprobs is not None else []
    options = answers.text_options(body, info)
    return Generation(client, text, requests, options, prompt_chars=prompt_chars)


class _Writer:
    """Writes one generation down as completions."""

    def __init__(
        self, body: CompletionBody, head: dict[str, Any], text: Text, prompts: list[Prompt], generation: Generation
    ) -> None:
        self._body = body
        self._head = head
        self._text = text
        self._prompts = prompts
        self._generation = generation
        self._name = logprobs.token_name(text, as_ids=bool(body.return_tokens_as_token_ids))
        self._has_usage = answers.wants_usage(body)[1]
        holes = ["index", "text", "logprobs", "finish_reason", "stop_reason"]
        if body.return_token_ids:
            holes += ["token_ids", "prompt_token_ids"]
        self._template = FrameTemplate(
            {**head, "choices": [dict.fromkeys(holes, HOLE)], **answers.usage_hole(body, HOLE)}
        )
        self._with_prompt_ids: set[int] = set()

    def begin(self, choice: Choice) -> bytes:
        """The echoed prompt."""
        if not self._body.echo:
            return b""
        entries = None if self._body.logprobs is None else json.dumps(self._prompt_logprobs(choice))
        return self._frame(choice, self._prompt(choice).text, entries or "null", [], ("null", "null"))

    def chunk(self, choice: Choice, news: News) -> bytes:
        entries = "null" if self._body.logprobs is None else json.dumps(self._logprobs(news))
        return self._frame(choice, news.text, entries, news.token_ids, answers.ending_json(choice))

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(choice) for choice in self._generation.choices]
        return {**self._head, "choices": choices, "usage": self._generation.usage.as_dict()}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        news, prompt, body = choice.take(), self._prompt(choice), self._body
        entries = None if body.logprobs is None else self._logprobs(news)
        if entries is not None and body.echo:
            entries = logprobs.joined(self._prompt_logprobs(choice), entries)
        written: dict[str, Any] = {
            "index": choice.index,
            "text": prompt.text + news.text if body.echo else news.text,
            "logprobs": entries,
            "finish_reason": answers.reason(choice),
            "stop_reason": choice.stop_reason,
        }
        if body.prompt_logprobs is not None:
            written["prompt_logprobs"] = logprobs.of_prompt(
                choice.prompt_logprobs or (), body.prompt_logprobs, self._text
            )
        if body.return_token_ids:
            written |= {"token_ids": news.token_ids, "prompt_token_ids": prompt.token_ids}
        return written

    def _frame(self, choice: Choice, text: str, entries: str, token_ids: list[int], ending: tuple[str, str]) -> bytes:
        values = [str(choice.index), quoted(text), entries, *ending]
        if self._body.return_token_ids:
            is_first = choice.index not in self._with_prompt_ids
            self._with_prompt_ids.add(choice.index)
            values += [json.dumps(token_ids), json.dumps(self._prompt(choice).token_ids if is_first else None)]
        if self._has_usage:
            values.append(answers.usage_json(self._generation.usage))
        return self._template.render(*values)

    def _prompt(self, choice: Choice) -> Prompt:
        return self._prompts[choice.index // (self._body.n or 1)]

    def _logprobs(self, news: News) -> dict[str, Any]:
        return logprobs.legacy(news.logprobs, news.offsets, self._body.logprobs or 0, self._name, news.token_ids)

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        prompt = self._prompt(choice)
        entries: tuple[TokenLogprobs | None, ...] = choice.prompt_logprobs or (None,) * len(prompt.token_ids)
        return logprobs.legacy(entries, prompt.offsets, self._body.logprobs or 0, self._name, prompt.token_ids)
