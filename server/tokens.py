"""Text to ids and back: /tokenize, /detokenize, /tokenizer_info, in vLLM's words and in llama.cpp's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from server import errors, schemas
from server.bodies import JsonRoute
from server.fields import Count
from server.schemas import Message
from server.serving import Serving
from server.text import Text
from server.tools import MAX_TOOLS, Tool

router = APIRouter(tags=["tokens"], route_class=JsonRoute)

_MAX_TOKENS = 1 << 20
"""Turned into text at once; a second of work."""
_MOST_ON_LOOP = 1024
"""Tokens; an answer about more is written on another thread, for it takes longer than a millisecond."""

_INPUTS = ("prompt", "messages", "content")
_ONE_OF: dict[str, Any] = {
    "anyOf": [
        {
            "required": [name],
            "properties": {
                other: {"not": {"type": "null"}} if other == name else {"type": "null"} for other in _INPUTS
            },
        }
        for name in _INPUTS
    ]
}


class TokenizeBody(BaseModel):
    """A prompt or a conversation (vLLM), or a content (llama.cpp): exactly one of them."""

    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra=_ONE_OF)

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=schemas.MAX_MESSAGES)] | None = None
    content: str | None = None
    add_special_tokens: bool | None = None
    """Left out: true for a prompt, false for messages, whose template writes its own."""
    add_special: bool | None = None
    """llama.cpp's name of it, for content: false when left out."""
    with_pieces: bool | None = None
    """Each token with its text, or with its bytes where they are no text by themselves."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_one_thing(self) -> TokenizeBody:
        given = [name for name in _INPUTS if getattr(self, name) is not None]
        if not given:
            raise errors.missing_field("prompt")
        if len(given) > 1:
            raise errors.invalid_value(f"{' and '.join(given)} are given: send one of them", given[1])
        return self


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    tokens: Annotated[list[Count], Field(max_length=_MAX_TOKENS)]


@router.post("/tokenize", operation_id="tokenize")
async def tokenize(request: Request, body: TokenizeBody) -> Response:
    serving: Serving = request.app.state.serving
    schemas.check_model(body, serving.served_names)
    text = _text(serving, "prompt")
    token_ids = await _ids(body, text)

    def answer() -> dict[str, Any]:
        told: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": serving.client.info.max_model_len,
            "tokens": [_piece(text, token_id) for token_id in token_ids] if body.with_pieces else token_ids,
        }
        if body.return_token_strs:
            told["token_strs"] = [text.token_text(token_id) for token_id in token_ids]
        return told

    return await _answered(answer, len(token_ids))


@router.post("/detokenize", operation_id="detokenize")
async def detokenize(request: Request, body: DetokenizeBody) -> Response:
    """The text of the ids, control tokens as they are spelled: as `prompt` (vLLM) and as `content` (llama.cpp)."""
    serving: Serving = request.app.state.serving
    schemas.check_model(body, serving.served_names)
    text = _text(serving, "tokens")
    schemas.check_ids(body.tokens, serving.client.info, "tokens")

    def answer() -> dict[str, str]:
        decoded = text.decode(body.tokens, skip_special_tokens=False)
        return {"prompt": decoded, "content": decoded}

    return await _answered(answer, len(body.tokens))


@router.get("/tokenizer_info", operation_id="tokenizer_info")
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """What a client needs to work without a tokenizer of its own: special tokens, the chat template, the lengths."""
    serving: Serving = request.app.state.serving
    text = _text(serving, None)
    info = serving.client.info
    return {**text.description, "vocab_size": info.vocab_size, "model_max_length": info.max_model_len}


async def _ids(body: TokenizeBody, text: Text) -> list[int]:
    if body.messages is not None:
        return await text.encode_chat(
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            add_special_tokens=bool(body.add_special_tokens),
            variables=body.chat_template_kwargs,
            tools=[tool.model_dump(exclude_unset=True) for tool in body.tools] if body.tools else None,
        )
    asked = body.add_special_tokens if body.add_special_tokens is not None else body.add_special
    if body.prompt is not None:
        return await text.encode_prompt(body.prompt, add_special_tokens=asked is not False)
    assert body.content is not None
    return await text.encode_prompt(body.content, add_special_tokens=bool(asked))


async def _answered(answer: Callable[[], dict[str, Any]], num_tokens: int) -> Response:
    """`answer()` as JSON."""

    def write() -> bytes:
        return json.dumps(answer(), ensure_ascii=False, separators=(",", ":")).encode()

    content = write() if num_tokens <= _MOST_ON_LOOP else await asyncio.to_thread(write)
    return Response(content, media_type="application/json")


def _piece(text: Text, token_id: int) -> dict[str, Any]:
    piece = text.token_bytes(token_id)
    try:
        return {"id": token_id, "piece": piece.decode("utf-8")}
    except UnicodeDecodeError:
        return {"id": token_id, "piece": list(piece)}


def _text(serving: Serving, param: str | None) -> Text:
    if not serving.text.has_tokenizer:
        raise errors.invalid_value("this model has no tokenizer: its prompts and answers are ids", param)
    return serving.text
