"""Answers held to a form: what `response_format` and `structured_outputs` ask for, as one grammar for the engine.

Knows the two fields and nothing of how a grammar works; whether one is any good the engine's client finds out.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.client import EngineClient
from engine.errors import GrammarRefused
from engine.types import Grammar
from server import errors

_ANY_OBJECT = '{"type":"object"}'

Form = Annotated[str, Field(min_length=1)]


class JsonSchema(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """None: any object."""
    strict: bool | None = None
    """Either way the answer follows the schema."""


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema, which needs it")
        return self

    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        schema = None if self.json_schema is None else self.json_schema.schema_
        return Grammar("json", _ANY_OBJECT if schema is None else json.dumps(schema))


class StructuredOutputs(BaseModel):
    """One of the first five, which are vLLM's names."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    """A JSON schema, as an object or as its text."""
    json_object: bool | None = None
    regex: Form | None = None
    choice: Annotated[list[Form], Field(min_length=1)] | None = None
    grammar: Form | None = None
    """Lark or GBNF."""
    disable_any_whitespace: bool | None = None
    """JSON without whitespace between its parts."""

    @model_validator(mode="after")
    def _asks_for_one(self) -> StructuredOutputs:
        forms = (self.json_, self.json_object or None, self.regex, self.choice, self.grammar)
        if sum(form is not None for form in forms) > 1:
            raise ValueError("only one of json, json_object, regex, choice and grammar is possible")
        if isinstance(self.json_, str):
            try:
                schema = json.loads(self.json_)
            except (ValueError, RecursionError) as error:
                raise ValueError("json is no JSON schema: its text is not JSON") from error
            if not isinstance(schema, dict):
                raise ValueError("json is no JSON schema: its text must be an object")
        return self

    def grammar_(self) -> Grammar | None:
        """None: nothing is asked for."""
        is_compact = bool(self.disable_any_whitespace)
        if self.json_ is not None:
            text = self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)
            return Grammar("json", text, is_compact)
        if self.json_object:
            return Grammar("json", _ANY_OBJECT, is_compact)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.choice is not None:
            return Grammar("choice", json.dumps(self.choice))
        return None if self.grammar is None else Grammar("lark", self.grammar)


class Structured(Protocol):
    """A body that may ask for a form."""

    @property
    def response_format(self) -> ResponseFormat | None: ...

    @property
    def structured_outputs(self) -> StructuredOutputs | None: ...


Asked = tuple[Grammar, str]
"""A grammar, and the field that asks for it."""


def grammar_of(body: Structured) -> Asked | None:
    """The grammar that the body asks for, and the field that does. Raises ApiError 400 when both fields do."""
    by_format = None if body.response_format is None else body.response_format.grammar()
    by_name = None if body.structured_outputs is None else body.structured_outputs.grammar_()
    if by_format is not None and by_name is not None:
        raise errors.invalid_value(
            "response_format and structured_outputs both ask for a form: send one of them", "structured_outputs"
        )
    if by_format is not None:
        return by_format, "response_format"
    return None if by_name is None else (by_name, "structured_outputs")


async def check(asked: Asked | None, client: EngineClient) -> None:
    """Raise ApiError 400, naming the field, for a form that no answer can have."""
    if asked is None:
        return
    grammar, field = asked
    if not client.info.has_grammars:
        raise errors.unsupported_parameter(f"{field} is not possible: this model has no tokens to match with it", field)
    try:
        await client.check_grammar(grammar)
    except GrammarRefused as error:
        raise errors.invalid_value(f"{field} cannot be followed: {error}", field) from error
