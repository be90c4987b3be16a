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
from server import answers, logprobs, schemas, structured
from server.fields import RawPrompt
from server.generation import Choice, Generation, News
from server.schemas import DEFAULT_MAX_TOKENS, CompletionBody
from server.serving import Serving
from server.streams import HOLE, OPEN, EventStream, FrameTemplate, quoted
from server.text import Text

router = APIRouter(tags=["completions"], route_class=answers.PlaceRoute)


@router.post("/v1/completions", operation_id="create_completion")
async def create_completion(request: Request, body: CompletionBody) -> Response:
    serving: Serving = request.app.state.serving
    headers = serving.headers_of(body)
    body = serving.with_usage(body)
    answer_id = f"cmpl-{request.state.request_hex}"
    head = {
        "id": answer_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": schemas.check_model(body, serving.served_names),
        "system_fingerprint": serving.fingerprint,
    }
    prompts: list[Prompt] = []

    async def prepare() -> Generation:
        await structured.check(body.form, serving.client)
        prompts.extend(await encode(body.prompt, body, serving.text, serving.client.info))
        policy = answers.Policy.of(serving.settings)
        return generation_of(body, serving.client, serving.text, prompts, request.state.request_hex, policy)

    tokens = schemas.estimated_tokens(body.prompt, serving.client.info, body.truncate_prompt_tokens)
    generation = await answers.admit(request, len(body.prompt) * body.draws, tokens, answer_id, prepare)
    writer = _Writer(body, head, serving.text, prompts, generation)
    if body.stream:
        frames = answers.Told(generation, writer.begin, writer.chunk, answers.usage_frame(body, head), writer.delta(0))
        return EventStream(frames, generation.aclose, headers, stalled_s=serving.settings.slow_reader_timeout)
    return await answers.whole(request, generation, writer.whole, headers)


@dataclass(frozen=True)
class Prompt:
    """What the model sees, and how it reads when it is echoed."""

    token_ids: tuple[int, ...]
    own_text: str | None
    """The caller's, unchanged; None for a prompt of ids or one that was cut."""
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


async def encode(prompts: Sequence[RawPrompt], body: CompletionBody, text: Text, info: EngineInfo) -> list[Prompt]:
    """Raises ApiError 400 for text that cannot be a prompt of this model."""
    encoded = await text.encode_prompts(
        prompts,
        max_model_len=info.max_model_len if body.truncate_prompt_tokens is None else None,
        add_special_tokens=body.add_special_tokens is not False,
    )
    seen = []
    for prompt, whole in zip(prompts, encoded, strict=True):
        token_ids = schemas.truncated(body, whole, info, DEFAULT_MAX_TOKENS)
        own_text = prompt if isinstance(prompt, str) and len(token_ids) == len(whole) else None
        seen.append(Prompt(tuple(token_ids), own_text, text, body.skip_special_tokens is not False))
    return seen


def generation_of(
    body: CompletionBody,
    client: EngineClient,
    text: Text,
    prompts: Sequence[Prompt],
    request_hex: str,
    policy: answers.Policy = answers.Policy(),  # noqa: B008 - frozen
) -> Generation:
    """All of it checked, nothing submitted. Raises ApiError 400. request_hex: unique for the life of the engine."""
    info = client.info
    of_prompt = [body.prompt_logprobs, body.logprobs if body.echo else None]
    sampling = schemas.sampling_params(
        body,
        info,
        text,
        logprobs=0 if body.logprobs is None and body.is_ranked else body.logprobs,
        prompt_logprobs=max((k for k in of_prompt if k is not None), default=None),
    )
    requests = answers.engine_requests(
        body,
        [prompt.token_ids for prompt in prompts],
        sampling,
        info,
        n=body.draws,
        request_hex=request_hex,
        default_new_tokens=DEFAULT_MAX_TOKENS,
        param="prompt",
        policy=policy,
    )
    prompt_chars = [len(prompt.text) for prompt in prompts] if body.logprobs is not None else []
    options = answers.text_options(body, info)
    return Generation(client, text, requests, options, n=body.draws, prompt_chars=prompt_chars)


def answered(body: CompletionBody, generation: Generation) -> list[Choice]:
    """The choices that are the answer, in order of index, nothing of them taken yet.

    With best_of beyond n: of each prompt the n likeliest, by the mean logprob of their tokens, the likeliest first.
    """
    if not body.is_ranked:
        return generation.choices
    best: list[Choice] = []
    for first in range(0, len(generation.choices), body.draws):
        ranked = sorted(generation.choices[first : first + body.draws], key=_mean_logprob, reverse=True)
        best += ranked[: body.n or 1]
    return best


def _mean_logprob(choice: Choice) -> float:
    values = [entry.logprob for entry in choice.news.logprobs]
    return sum(values) / len(values) if values else 0.0


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
        self._is_plain = body.logprobs is None and not body.return_token_ids and not self._has_usage
        self._deltas: dict[int, FrameTemplate] = {}
        """By choice: nothing but its text is open. What nearly every frame of a plain stream is made from."""

    def begin(self, choice: Choice) -> bytes:
        """The echoed prompt."""
        if not self._body.echo:
            return b""
        entries = None if self._body.logprobs is None else json.dumps(self._prompt_logprobs(choice))
        return self._frame(choice, self._prompt(choice).text, entries or "null", [], ("null", "null"))

    def delta(self, index: int) -> answers.Delta | None:
        if not self._is_plain:
            return None
        if index not in self._deltas:
            self._deltas[index] = self._template.filled(str(index), OPEN, *("null",) * 3)
        return self._deltas[index].render_text

    def chunk(self, choice: Choice, news: News) -> bytes:
        if choice.finish_reason is None and (delta := self.delta(choice.index)) is not None:
            return delta(news.text)
        entries = "null" if self._body.logprobs is None else json.dumps(self._logprobs(news))
        return self._frame(choice, news.text, entries, news.token_ids, answers.ending_json(choice))

    def whole(self) -> dict[str, Any]:
        answer = answered(self._body, self._generation)
        choices = [self._choice(choice) | {"index": index} for index, choice in enumerate(answer)]
        return {**self._head, "choices": choices, "usage": self._generation.usage.as_dict()}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        news, prompt, body = choice.take(), self._prompt(choice), self._body
        entries = None if body.logprobs is None else self._logprobs(news)
        if entries is not None and body.echo:
            entries = logprobs.joined(self._prompt_logprobs(choice), entries)
        wants_ids = bool(body.return_token_ids)
        of_prompt = None
        if body.prompt_logprobs is not None:
            of_prompt = logprobs.of_prompt(choice.prompt_logprobs or (), body.prompt_logprobs, self._text)
        return {
            "index": choice.index,
            "text": prompt.text + news.text if body.echo else news.text,
            "logprobs": entries,
            "finish_reason": answers.reason(choice),
            "stop_reason": choice.stop_reason,
            # vLLM's clients read these as attributes, asked for or not.
            "prompt_logprobs": of_prompt,
            "token_ids": news.token_ids if wants_ids else None,
            "prompt_token_ids": prompt.token_ids if wants_ids else None,
        }

    def _frame(self, choice: Choice, text: str, entries: str, token_ids: list[int], ending: tuple[str, str]) -> bytes:
        values = [str(choice.index), quoted(text), entries, *ending]
        if self._body.return_token_ids:
            is_first = choice.index not in self._with_prompt_ids
            self._with_prompt_ids.add(choice.index)
            values += [json.dumps(token_ids), json.dumps(self._prompt(choice).token_ids if is_first else None)]
        if self._has_usage:
            values.append(answers.usage_json(self._generation.usage, untold=len(choice.news.token_ids)))
        return self._template.render(*values)

    def _prompt(self, choice: Choice) -> Prompt:
        return self._prompts[choice.index // self._body.draws]

    def _logprobs(self, news: News) -> dict[str, Any]:
        return logprobs.legacy(news.logprobs, news.offsets, self._body.logprobs or 0, self._name, news.token_ids)

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        prompt = self._prompt(choice)
        entries: tuple[TokenLogprobs | None, ...] = choice.prompt_logprobs or (None,) * len(prompt.token_ids)
        return logprobs.legacy(entries, prompt.offsets, self._body.logprobs or 0, self._name, prompt.token_ids)
