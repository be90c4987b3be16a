"""Tool calling: the functions that a chat offers, whether the model must call them, and how its calls are told.

`auto` reads the model's own format out of its text (server/tool_parsers.py). `required` and a named function do not
rely on that: a grammar holds the answer to the functions' schemas.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.types import Grammar
from server import errors
from server.tool_parsers import ToolCall, ToolFormat, ToolParser, named_parser, parser_of, required_parser

MAX_TOOLS = 128

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class Function(BaseModel):
    """Fields beyond these reach the template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object; None takes any."""
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    name: Name


class NamedChoice(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


def check(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raise ApiError 400 for names that do not fit together."""
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise errors.invalid_value("two tools have the same name", "tools")
    if not tools and choice not in (None, "none", "auto"):
        raise errors.invalid_value("tool_choice asks for a call, but there are no tools", "tool_choice")
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        raise errors.invalid_value(
            f"tool_choice names {choice.function.name}, which is none of the tools", "tool_choice"
        )


def grammar(tools: Sequence[Tool], choice: ToolChoice | None, *, is_single: bool) -> Grammar | None:
    """What an answer that must be a call is held to; None where it may be text. is_single: one call at most."""
    if isinstance(choice, NamedChoice):
        (function,) = (tool.function for tool in tools if tool.function.name == choice.function.name)
        return Grammar("json", json.dumps(_arguments(function)))
    if choice != "required":
        return None
    definitions: dict[str, Any] = {}
    calls = [_call_schema(tool.function, definitions) for tool in tools]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if is_single:
        schema["maxItems"] = 1
    return Grammar("json", json.dumps(schema | definitions))


def format_of(template: str | None, asked: ToolFormat | None) -> ToolFormat | None:
    """How the model writes calls: as the operator says, else by what its template writes. None: nobody knows."""
    if template is None or "tools" not in template:
        return None  # it would never learn of them
    if asked is not None:
        return asked
    if "<tool_call>" in template:
        return "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    return "llama3_json" if "<|python_tag|>" in template or '"parameters"' in template else None


def parser_maker(
    tools: Sequence[Tool], choice: ToolChoice | None, form: ToolFormat | None
) -> Callable[[], ToolParser] | None:
    """A fresh parser for each answer; None where answers are text. Raises ApiError 400 where nobody could read them."""
    if not tools or choice == "none":
        return None
    if form is None:
        raise errors.unsupported_parameter(
            "tools are not supported by this model: its chat template has no place for them, or no known format",
            "tools",
        )
    names = [tool.function.name for tool in tools]
    if isinstance(choice, NamedChoice):
        name = choice.function.name
        return lambda: named_parser(name)
    if choice == "required":
        return lambda: required_parser(names)
    return lambda: parser_of(form, names)


class Answer:
    """One choice's text as content and calls, as it comes. Where one call is the limit, those beyond it are dropped."""

    def __init__(self, parser: ToolParser | None, form: ToolFormat | None, *, is_single: bool) -> None:
        self._parser = parser
        self._form = form
        self._is_single = is_single
        self._num_calls = 0

    @property
    def is_text(self) -> bool:
        """All of it is content, as it comes."""
        return self._parser is None

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def take(self, text: str, *, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """-> what can be told now: content, and calls as OpenAI writes them, each with its index."""
        if self._parser is None:
            return text, []
        events = self._parser.push(text) + (self._parser.finish() if is_last else [])
        content = "".join(event for event in events if isinstance(event, str))
        return content, [call for event in events if isinstance(event, ToolCall) for call in self._written(event)]

    def _written(self, call: ToolCall) -> list[dict[str, Any]]:
        if self._is_single and self._num_calls:
            return []
        self._num_calls += 1
        # Mistral's templates take ids of nine letters and digits, and no others.
        call_id = secrets.token_hex(5)[:9] if self._form == "mistral" else f"call_{secrets.token_hex(12)}"
        function = {"name": call.name, "arguments": call.arguments}
        return [{"index": self._num_calls - 1, "id": call_id, "type": "function", "function": function}]


def with_parsed_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """An assistant's message as templates read it: arguments as objects, as they were before they became text.

    Raises ApiError 400 for arguments that are no JSON object.
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    parsed = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise errors.invalid_value(f"tool_calls[{i}] of a message is no call of a function", "messages")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, dict):
            raise errors.invalid_value(
                f"arguments of a message's tool_calls[{i}] must be JSON of an object", "messages"
            )
        parsed.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": parsed}


def _arguments(function: Function) -> dict[str, Any]:
    return {"type": "object"} if not function.parameters else {"type": "object", **function.parameters}


def _call_schema(function: Function, definitions: dict[str, Any]) -> dict[str, Any]:
    """definitions: what references in the schema point to; it moves to the root, where they look for it."""
    arguments = _arguments(function)
    for key in ("$defs", "definitions"):
        named = arguments.pop(key, None) or {}
        if not isinstance(named, dict):
            raise errors.invalid_value(f"{key} in the parameters of {function.name} must be an object", "tools")
        for name, schema in named.items():
            if definitions.setdefault(key, {}).setdefault(name, schema) != schema:
                raise errors.invalid_value(f"two tools define {name} in {key} differently", "tools")
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "parameters": arguments},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
