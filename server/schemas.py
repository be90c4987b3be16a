"""Request bodies, and what they ask of the engine. A field is obeyed, or refused by name; none is accepted and dropped.

Types and ranges are checked by pydantic (server/fields.py). null is the same as leaving a field out. What depends on
the model (ids, context, defaults) is checked by the functions below the bodies. Fields that no body has are
server/extra_fields.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from engine.types import EngineInfo, SamplingParams
from server import errors, tools
from server.admission import estimated_tokens as tokens_of_text
from server.fields import (
    BadWords,
    BestOf,
    Biases,
    Count,
    NumLogprobs,
    Penalty,
    Prompts,
    RawPrompt,
    Stops,
    TokenIds,
    Truncation,
)
from server.stops import StopStrings
from server.structured import Asked, ResponseFormat, StructuredOutputs, grammar_of
from server.text import Text
from server.tools import MAX_TOOLS, Tool, ToolChoice

DEFAULT_MAX_TOKENS = 16
"""Of completions; a chat may fill the rest of the context."""

MAX_MESSAGES = 4096
"""Checking more would hold up the event loop: they cost about 10 us each."""
_NEVER = -100
"""A logit_bias this low is a ban."""
_TOKENS_OF_A_TURN = 4
"""What a template writes around a message, about."""
_GREEDY_BELOW = 1e-5
"""Temperatures under this overflow when logits are divided by them, and mean greedy anyway."""


def _either(*alternatives: dict[str, Any]) -> dict[str, Any]:
    """One rule between fields as a schema can say it. A field that must be null may also be absent."""
    return {
        "anyOf": [
            {"properties": fields, "required": [name for name, field in fields.items() if field is not _NULL]}
            for fields in alternatives
        ]
    }


_NULL: dict[str, Any] = {"type": "null"}
_TRUE: dict[str, Any] = {"const": True}

_TOGETHER: list[Any] = [
    _either({"stream_options": _NULL}, {"stream": _TRUE}),
    _either({"prompt_logprobs": _NULL}, {"stream": {"enum": [False, None]}}, {"stream": _NULL}),
    _either({"max_tokens": _NULL}, {"max_completion_tokens": _NULL}),
    _either({"response_format": _NULL}, {"structured_outputs": _NULL}),
]
_TOGETHER_IN_CHAT: list[Any] = [*_TOGETHER, _either({"top_logprobs": _NULL}, {"logprobs": _TRUE})]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    """One more chunk before the end, with the usage and no choices."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every chunk."""


class GenerationBody(BaseModel):
    """What completions and chats have in common."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, json_schema_extra={"allOf": _TOGETHER})

    model: str | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    """Another name of max_tokens."""
    min_tokens: Count | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1000)] | None = None
    logit_bias: Biases = ()
    allowed_token_ids: Annotated[list[Count], Field(min_length=1)] | None = None
    bad_words: BadWords = ()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops = ()
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    """Both values are obeyed: the decoders served here put none."""
    truncate_prompt_tokens: Truncation = None
    """The prompt is cut to this many tokens; -1: to what leaves room for the answer."""
    truncation_side: Literal["left", "right"] | None = None
    """Where it is cut: at its beginning, unless this says right."""
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None
    """Seconds from admission to the end of the answer."""
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> GenerationBody:
        two = (self.max_tokens, self.max_completion_tokens)
        if None not in two and two[0] != two[1]:
            raise errors.invalid_value("max_tokens and max_completion_tokens differ: send one of them", "max_tokens")
        if self.stream_options is not None and not self.stream:
            raise errors.invalid_value("stream_options is only possible with stream", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise errors.unsupported_parameter("prompt_logprobs is not possible with stream", "prompt_logprobs")
        limit = self.token_limit
        if self.min_tokens and limit is not None and self.min_tokens > limit:
            raise errors.invalid_value(
                f"min_tokens is {self.min_tokens}, more than max_tokens, which is {limit}", "min_tokens"
            )
        if asked := self.form:
            # Each could leave nothing of what the grammar allows, or not let it end.
            for name in ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words"):
                if getattr(self, name):
                    raise errors.unsupported_parameter(f"{name} is not possible with {asked[1]}", name)
        return self

    @property
    def form(self) -> Asked | None:
        """What the answer is held to. Raises ApiError 400 for fields that ask for two things."""
        return grammar_of(self)

    @property
    def token_limit(self) -> int | None:
        """max_tokens under either of its names."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    add_special_tokens: bool | None = None
    best_of: BestOf = None

    @model_validator(mode="after")
    def _can_rank(self) -> CompletionBody:
        n = self.n or 1
        if self.best_of is not None and 1 < self.best_of < n:
            raise errors.invalid_value(f"best_of is {self.best_of}, less than n, which is {n}", "best_of")
        if self.is_ranked and self.stream:
            raise errors.invalid_value("best_of beyond n is not possible with stream: nothing is best yet", "best_of")
        return self

    @property
    def draws(self) -> int:
        """Choices that are made for each prompt; the best n of them are the answer."""
        return max(self.n or 1, self.best_of or 1)

    @property
    def is_ranked(self) -> bool:
        return self.draws > (self.n or 1)


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["text"],
}


class Message(BaseModel):
    """Fields beyond these (name, tool_calls ...) reach the template as they are."""

    model_config = ConfigDict(
        strict=True,
        extra="allow",
        json_schema_extra={
            "anyOf": [
                {"properties": {"role": {"const": "assistant"}}},
                {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}},
            ]
        },
    )

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Annotated[dict[str, Any], WithJsonSchema(_TEXT_PART)]] | None = None

    def texts(self) -> list[str]:
        """Of the content, its parts one by one."""
        if isinstance(self.content, list):
            return [part["text"] for part in self.content if isinstance(part.get("text"), str)]
        return [self.content or ""]

    def for_template(self) -> dict[str, Any]:
        """Parts of text become one text, and no content an empty one, which is what templates expect.

        Raises ApiError for other parts.
        """
        parts = self.content if isinstance(self.content, list) else ()
        content = self.content if isinstance(self.content, str) else "".join(map(_part_text, parts))
        return tools.with_parsed_arguments(self.model_dump(exclude_unset=True)) | {"content": content}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    model_config = ConfigDict(json_schema_extra={"allOf": _TOGETHER_IN_CHAT})

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    """auto where there are tools."""
    parallel_tool_calls: bool | None = None
    """false: one call at most."""

    @property
    def form(self) -> Asked | None:
        offered = self.tools or ()
        tools.check(offered, self.tool_choice)
        asked = grammar_of(self)
        if asked is not None and offered and self.tool_choice != "none":
            raise errors.unsupported_parameter(f"{asked[1]} is not possible with tools that may be called", asked[1])
        call = tools.grammar(offered, self.tool_choice, is_single=self.parallel_tool_calls is False)
        return asked if call is None else (call, "tools")

    @model_validator(mode="after")
    def _asks_for_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise errors.invalid_value("top_logprobs is only possible with logprobs: true", "top_logprobs")
        for i, message in enumerate(self.messages):
            if message.content is None and message.role != "assistant":
                raise errors.invalid_value(
                    f"messages[{i}] has no content; only an assistant's may be without", f"messages[{i}].content"
                )
        return self


def _part_text(part: Mapping[str, Any]) -> str:
    if part.get("type", "text") != "text":
        raise errors.unsupported_parameter(f"a content part of type {part['type']!r:.32} is not supported", "messages")
    text = part.get("text")
    if not isinstance(text, str):
        raise errors.invalid_value("a content part of type text has no text", "messages")
    return text


class Named(Protocol):
    """A body that may name its model."""

    @property
    def model(self) -> str | None: ...


def check_model(body: Named, served_names: Sequence[str]) -> str:
    """The name that the answer carries."""
    if body.model is not None and body.model not in served_names:
        raise errors.model_not_found(body.model, served_names)
    return body.model or served_names[0]


def check_prompt(token_ids: Sequence[int], info: EngineInfo, param: str) -> None:
    """Raise ApiError for an empty prompt and for ids outside the vocabulary."""
    if not token_ids:
        raise errors.invalid_value("the prompt has no tokens: at least 1 is needed", param)
    check_ids(token_ids, info, param)


def truncated(body: GenerationBody, token_ids: Sequence[int], info: EngineInfo, default: int | None) -> Sequence[int]:
    """The prompt as far as truncate_prompt_tokens lets it in. `default`: as for `new_tokens`."""
    keep = body.truncate_prompt_tokens
    if keep == -1:
        limit = body.token_limit
        keep = max(1, info.max_model_len - (limit if limit is not None else default or 1))
    return cut(token_ids, keep, body.truncation_side)


def cut(token_ids: Sequence[int], keep: int | None, side: str | None) -> Sequence[int]:
    """The last `keep` tokens, or the first where the right side is cut; None: all."""
    if keep is None or len(token_ids) <= keep:
        return token_ids
    return token_ids[:keep] if side == "right" else token_ids[-keep:]


def estimated_tokens(prompts: Sequence[RawPrompt], info: EngineInfo, keep: int | None = None) -> int:
    """Of all prompts, before any is tokenised: each no longer than the context. keep: truncate_prompt_tokens."""
    longest = min(info.max_model_len, keep) if keep is not None and keep > 0 else info.max_model_len
    sizes = (tokens_of_text(prompt) if isinstance(prompt, str) else len(prompt) for prompt in prompts)
    return sum(min(size, longest) for size in sizes)


def estimated_chat_tokens(body: ChatBody, info: EngineInfo) -> int:
    """As `estimated_tokens`, of a conversation and its tools."""
    texts = [text for message in body.messages for text in message.texts()]
    offered = [tool.model_dump_json() for tool in body.tools or ()]
    size = sum(tokens_of_text(text) + _TOKENS_OF_A_TURN for text in texts) + sum(map(tokens_of_text, offered))
    keep = body.truncate_prompt_tokens
    return min(size, info.max_model_len, keep if keep is not None and keep > 0 else size)


def new_tokens(
    body: GenerationBody,
    prompt_tokens: int,
    info: EngineInfo,
    default: int | None,
    param: str,
    *,
    clamps: bool = False,
) -> int:
    """How many tokens the answer may have: as asked, or `default` (None: no limit) as far as the context reaches.

    clamps: what is asked for is cut to the context too, where it leaves any room at all.
    """
    asked = body.token_limit
    room = info.max_model_len - prompt_tokens
    if clamps and asked and room >= 1:
        return min(asked, room)
    if (asked is not None and asked > room) or (asked is None and room < 1):
        over = f" and {asked} are asked for" if asked is not None else ", which leaves no room for an answer"
        raise errors.context_length_exceeded(
            f"this model's context is {info.max_model_len} tokens; the prompt has {prompt_tokens}{over}",
            prompt_tokens=prompt_tokens,
            max_model_len=info.max_model_len,
            param=param,
        )
    if asked is not None:
        return asked
    return max(room if default is None else min(default, room), body.min_tokens or 0, 1)


def sampling_defaults(info: EngineInfo) -> SamplingParams:
    """What holds where a request names nothing: the model's own values, else the API's."""
    own = {field.name: getattr(info.defaults, field.name) for field in fields(info.defaults)}
    return SamplingParams(**{name: value for name, value in own.items() if value is not None})


def sampling_params(
    body: GenerationBody, info: EngineInfo, text: Text, *, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """The engine's values: the body's, else the model's own, else the API's. Raises ApiError for ids it cannot have."""
    defaults = sampling_defaults(info)
    temperature = _first(body.temperature, defaults.temperature)
    top_k = max(_first(body.top_k, defaults.top_k), 0)
    stop_token_ids = list(body.stop_token_ids or ())
    check_ids(stop_token_ids, info, "stop_token_ids")
    if not body.ignore_eos:
        stop_token_ids += info.eos_token_ids
    if body.allowed_token_ids is not None:
        check_ids(body.allowed_token_ids, info, "allowed_token_ids")
    check_ids([token_id for token_id, _ in body.logit_bias], info, "logit_bias")
    params = SamplingParams(
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_p=_first(body.top_p, defaults.top_p),
        top_k=0 if top_k >= info.vocab_size else top_k,
        min_p=_first(body.min_p, defaults.min_p),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=body.logit_bias,
        bad_words=_bad_word_ids(body.bad_words, text),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(sorted(set(body.allowed_token_ids))),
        seed=body.seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
        min_tokens=body.min_tokens or 0,
        grammar=None if (asked := body.form) is None else asked[0],
    )
    _check_drawable(params)
    return params


def stop_strings(body: GenerationBody) -> StopStrings:
    return StopStrings(body.stop, include_in_output=bool(body.include_stop_str_in_output))


def _check_drawable(params: SamplingParams) -> None:
    """Where every allowed token is ruled out, whatever is drawn is one that was not allowed."""
    if params.allowed_token_ids is None:
        return
    banned = {token_id for token_id, bias in params.logit_bias if bias <= _NEVER}
    banned.update(word[0] for word in params.bad_words if len(word) == 1)
    drawable = set(params.allowed_token_ids) - banned
    if not drawable:
        raise errors.invalid_value(
            "logit_bias and bad_words rule out every one of allowed_token_ids", "allowed_token_ids"
        )
    if params.min_tokens and drawable <= set(params.stop_token_ids):
        raise errors.invalid_value(
            f"min_tokens is {params.min_tokens}, but every one of allowed_token_ids ends the answer", "min_tokens"
        )


_Number = TypeVar("_Number", int, float)


def _first(value: _Number | None, default: _Number) -> _Number:
    """The value if it is there; 0 is."""
    return default if value is None else value


def check_ids(token_ids: Sequence[int], info: EngineInfo, param: str) -> None:
    if token_ids and (max(token_ids) >= info.vocab_size or min(token_ids) < 0):
        outside: Callable[[int], bool] = lambda token_id: not 0 <= token_id < info.vocab_size  # noqa: E731
        raise errors.invalid_value(
            f"{param} holds the token id {next(filter(outside, token_ids))}: "
            f"this model's are 0 to {info.vocab_size - 1}",
            param,
        )


def _bad_word_ids(words: Sequence[str], text: Text) -> tuple[tuple[int, ...], ...]:
    """Each word as it is spelled at a text's beginning and behind a space."""
    if words and not text.has_tokenizer:
        raise errors.invalid_value("this model has no tokenizer: bad_words cannot be turned into ids", "bad_words")
    spellings = [spelling for word in words for spelling in (word.lstrip(), " " + word.lstrip())]
    return tuple(dict.fromkeys(tuple(text.encode(spelling, add_special_tokens=False)) for spelling in spellings))
