"""POST /v1/chat/completions: a conversation through the model's template, whole or streamed."""

from __future__ import annotations

import json
import time
from typing import Any

from fastapi import APIRouter, Request, Response

from server import answers, logprobs, schemas, structured, tools
from server.generation import Choice, Generation, News
from server.schemas import ChatBody
from server.serving import Serving
from server.streams import HOLE, EventStream, FrameTemplate, quoted
from server.text import Text
from server.tool_parsers import MARKERS
from server.tools import Answer

router = APIRouter(tags=["chat"], route_class=answers.PlaceRoute)


@router.post("/v1/chat/completions", operation_id="create_chat_completion")
async def create_chat_completion(request: Request, body: ChatBody) -> Response:
    serving: Serving = request.app.state.serving
    headers = serving.headers_of(body)
    body = serving.with_usage(body)
    answer_id = f"chatcmpl-{request.state.request_hex}"
    head = {
        "id": answer_id,
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": schemas.check_model(body, serving.served_names),
        "system_fingerprint": serving.fingerprint,
    }

    template = serving.text.chat_template
    form = tools.format_of(template.source if template else None, serving.settings.tool_call_parser)
    is_single = body.parallel_tool_calls is False
    parser = tools.parser_maker(body.tools or (), body.tool_choice, form)

    def answer() -> Answer:
        return Answer(parser() if parser else None, form, is_single=is_single)

    async def prepare() -> Generation:
        await structured.check(body.form, serving.client)
        return _generation(body, serving, await _encoded(body, serving), request.state.request_hex)

    tokens = schemas.estimated_chat_tokens(body, serving.client.info)
    generation = await answers.admit(request, body.n or 1, tokens, answer_id, prepare)
    writer = _Writer(body, head, serving.text, generation, [answer() for _ in generation.choices])
    if body.stream:
        frames = answers.Told(generation, writer.begin, writer.chunk, answers.usage_frame(body, head), writer.delta(0))
        return EventStream(frames, generation.aclose, headers, stalled_s=serving.settings.slow_reader_timeout)
    return await answers.whole(request, generation, writer.whole, headers)


async def _encoded(body: ChatBody, serving: Serving) -> tuple[int, ...]:
    token_ids = await serving.text.encode_chat(
        body.messages,
        max_model_len=serving.client.info.max_model_len if body.truncate_prompt_tokens is None else None,
        add_generation_prompt=body.add_generation_prompt is not False,
        add_special_tokens=bool(body.add_special_tokens),
        variables=body.chat_template_kwargs,
        tools=[tool.model_dump(exclude_unset=True) for tool in body.tools] if body.tools else None,
    )
    return tuple(schemas.truncated(body, token_ids, serving.client.info, None))


def _generation(body: ChatBody, serving: Serving, prompt: tuple[int, ...], request_hex: str) -> Generation:
    info = serving.client.info
    sampling = schemas.sampling_params(
        body,
        info,
        serving.text,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    requests = answers.engine_requests(
        body,
        [prompt],
        sampling,
        info,
        n=body.n or 1,
        request_hex=request_hex,
        default_new_tokens=None,
        param="messages",
        policy=answers.Policy.of(serving.settings),
    )
    has_calls = bool(body.tools) and body.tool_choice != "none"
    options = answers.text_options(body, info, serving.text.ids_of(MARKERS) if has_calls else frozenset())
    return Generation(serving.client, serving.text, requests, options, n=body.n or 1)


class _Writer:
    """Writes one generation down as chat completions."""

    def __init__(
        self, body: ChatBody, head: dict[str, Any], text: Text, generation: Generation, spoken: list[Answer]
    ) -> None:
        """spoken: one a choice."""
        self._body = body
        self._spoken = spoken
        self._head = head
        self._text = text
        self._generation = generation
        self._prompt_ids = generation.requests[0].prompt_token_ids
        self._name = logprobs.token_name(text, as_ids=bool(body.return_tokens_as_token_ids))
        self._has_usage = answers.wants_usage(body)[1]
        holes = ["index", "delta", "logprobs", "finish_reason", "stop_reason"]
        if body.return_token_ids:
            holes.append("token_ids")
        self._template = FrameTemplate(
            {
                **head,
                **({"prompt_token_ids": HOLE} if body.return_token_ids else {}),
                "choices": [dict.fromkeys(holes, HOLE)],
                **answers.usage_hole(body, HOLE),
            }
        )
        self._is_plain = not (body.logprobs or body.return_token_ids or self._has_usage)
        self._deltas: dict[int, FrameTemplate] = {}
        """By choice: nothing but its delta is open. What nearly every frame of a plain stream is made from."""

    def begin(self, choice: Choice) -> bytes:
        """Who speaks."""
        delta = '{"role": "assistant", "content": ""}'
        return self._frame(choice, delta, "null", [], ("null", "null"), is_first=True)

    def delta(self, index: int) -> answers.Delta | None:
        return self._content(index) if self._is_plain and self._spoken[index].is_text else None

    def _content(self, index: int) -> answers.Delta:
        if index not in self._deltas:
            delta = json.dumps({"content": HOLE})
            self._deltas[index] = self._template.filled(str(index), delta, *("null",) * 3)
        return self._deltas[index].render_text

    def chunk(self, choice: Choice, news: News) -> bytes:
        entries = json.dumps(self._logprobs(news)) if self._body.logprobs else "null"
        spoken = self._spoken[choice.index]
        content, calls = spoken.take(news.text, is_last=choice.is_finished)
        if not (content or calls or choice.is_finished or self._body.logprobs or self._body.return_token_ids):
            return b""
        if self._is_plain and choice.finish_reason is None and not calls:
            return self._content(choice.index)(content)
        delta = f'{{"content": {quoted(content)}}}' if content else "{}"
        if calls:
            delta = json.dumps({"content": content, "tool_calls": calls} if content else {"tool_calls": calls})
        return self._frame(choice, delta, entries, news.token_ids, answers.ending_json(choice, _reason(choice, spoken)))

    def whole(self) -> dict[str, Any]:
        body, of_prompt = self._body, None
        if body.prompt_logprobs is not None:
            entries = self._generation.choices[0].prompt_logprobs or ()
            of_prompt = logprobs.of_prompt(entries, body.prompt_logprobs, self._text)
        return {
            **self._head,
            "choices": [self._choice(choice) for choice in self._generation.choices],
            "usage": self._generation.usage.as_dict(),
            # vLLM's clients read these as attributes, asked for or not.
            "prompt_logprobs": of_prompt,
            "prompt_token_ids": self._prompt_ids if body.return_token_ids else None,
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        news, spoken = choice.take(), self._spoken[choice.index]
        content, calls = spoken.take(news.text, is_last=True)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            told = [{name: value for name, value in call.items() if name != "index"} for call in calls]
            message |= {"content": content or None, "tool_calls": told}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(news) if self._body.logprobs else None,
            "finish_reason": _reason(choice, spoken),
            "stop_reason": choice.stop_reason,
            "token_ids": news.token_ids if self._body.return_token_ids else None,
        }

    def _frame(
        self,
        choice: Choice,
        delta: str,
        entries: str,
        token_ids: list[int],
        ending: tuple[str, str],
        *,
        is_first: bool = False,
    ) -> bytes:
        values = [str(choice.index), delta, entries, *ending]
        if self._body.return_token_ids:
            values = [json.dumps(self._prompt_ids if is_first else None), *values, json.dumps(token_ids)]
        if self._has_usage:
            values.append(answers.usage_json(self._generation.usage, untold=len(choice.news.token_ids)))
        return self._template.render(*values)

    def _logprobs(self, news: News) -> dict[str, Any]:
        return logprobs.chat(news.logprobs, self._body.top_logprobs or 0, self._text, self._name)


def _reason(choice: Choice, spoken: Answer) -> str | None:
    """An answer that ended by itself with calls waits for what they return."""
    told = answers.reason(choice)
    return "tool_calls" if told == "stop" and spoken.has_calls else told
