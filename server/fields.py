"""Values that fields of a body may have, checked strictly: true is no number and 7.0 no integer.

Each type brings its part of the OpenAPI document. Knows no body and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

_MAX_STOPS = 4
_MAX_STOP_CHARS = 4096
"""Preparing one holds up the event loop for a microsecond a character."""
_MAX_BIASED = 1024
MAX_LOGPROBS = 20
_MAX_BAD_WORDS = 128
_MAX_BAD_WORD_CHARS = 256
"""Turning them all into ids holds up the event loop for some 10 ms."""

RawPrompt = str | tuple[int, ...]


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a string")
    if not value.isascii():
        # JSON can spell half of a surrogate pair, which is no text and which no tokenizer takes.
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"{what} holds half of a surrogate pair") from error
    return value


def _check_longest(texts: Sequence[Any], what: str, limit: int) -> None:
    longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
    if longest > limit:
        raise ValueError(f"{what} has {longest} characters: at most {limit} are possible")


def _ids(value: list[Any]) -> tuple[int, ...]:
    for token_id in value:
        if type(token_id) is not int:  # bool is an int to Python
            raise ValueError(f"token ids must be integers, and not mixed with text; one of them is {token_id!r:.32}")
    return tuple(value)


def _prompts(value: Any) -> tuple[RawPrompt, ...]:
    """Text, ids, a list of texts or a list of id lists; as one prompt for each."""
    if isinstance(value, str):
        return (_text(value, "the prompt"),)
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
    if not value:
        raise ValueError("the list is empty: at least one prompt is needed")
    if isinstance(value[0], str):
        return tuple(_text(item, "each prompt of a list of strings") for item in value)
    if not isinstance(value[0], list):
        return (_ids(value),)
    for item in value:
        if not isinstance(item, list):
            raise ValueError("a list of token id lists must hold nothing else")
        if not item:
            raise ValueError("a prompt is an empty list: at least one token id is needed")
    return tuple(_ids(item) for item in value)


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise ValueError("must be a string or a list of strings")
    if len(texts) > _MAX_STOPS:
        raise ValueError(f"{len(texts)} stop strings: at most {_MAX_STOPS} are possible")
    if "" in texts:
        raise ValueError("a stop string is empty")
    _check_longest(texts, "a stop string", _MAX_STOP_CHARS)
    return tuple(_text(text, "each stop string") for text in texts)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    if len(value) > _MAX_BIASED:
        raise ValueError(f"{len(value)} entries: at most {_MAX_BIASED} are possible")
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10):
            raise ValueError(f"the key {key!r:.32} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of {key} must be a number from -100 to 100")
    return tuple((int(key), float(bias)) for key, bias in value.items())


def _bad_words(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ValueError("must be a list of strings")
    if len(value) > _MAX_BAD_WORDS:
        raise ValueError(f"{len(value)} entries: at most {_MAX_BAD_WORDS} are possible")
    if any(isinstance(word, str) and not word.strip() for word in value):
        raise ValueError("a word is empty")
    _check_longest(value, "a word", _MAX_BAD_WORD_CHARS)
    return tuple(_text(word, "each word") for word in value)


def _best_of(value: Any) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError("must be an integer of at least 1")
    return value


def _truncation(value: Any) -> int | None:
    if value is not None and (type(value) is not int or (value < 1 and value != -1)):
        raise ValueError("must be -1, or an integer of at least 1")
    return value


_STRINGS = {"type": "array", "items": {"type": "string"}}
_INTEGERS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

Prompts = Annotated[
    tuple[RawPrompt, ...],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                _INTEGERS,
                {"type": "array", "items": _INTEGERS, "minItems": 1},
            ]
        }
    ),
]
Stops = Annotated[
    tuple[str, ...],
    PlainValidator(_stops),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": _MAX_STOP_CHARS},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": _MAX_STOP_CHARS},
                    "maxItems": _MAX_STOPS,
                },
                {"type": "null"},
            ]
        }
    ),
]
Biases = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_biases),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                    "maxProperties": _MAX_BIASED,
                },
                {"type": "null"},
            ]
        }
    ),
]
BadWords = Annotated[
    tuple[str, ...],
    PlainValidator(_bad_words),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "array",
                    "items": {"type": "string", "maxLength": _MAX_BAD_WORD_CHARS},
                    "maxItems": _MAX_BAD_WORDS,
                },
                {"type": "null"},
            ]
        }
    ),
]
Truncation = Annotated[
    int | None,
    PlainValidator(_truncation),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": -1}, {"type": "null"}]}),
]
BestOf = Annotated[
    int | None,
    PlainValidator(_best_of),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}),
]
Penalty = Annotated[float, Field(ge=-2, le=2)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Count = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[Count], Field(max_length=1024)]
