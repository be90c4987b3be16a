"""The model's chat template: messages in, the prompt's text out. It runs in server/template_sandbox.py.

Follows transformers' conventions, which templates are written against: `raise_exception`, `strftime_now`, a `tojson`
that does not escape HTML, `break` and `continue`, the `generation` block, blocks trimmed of their line.

Text of the conversation must not act as control tokens. Each spelling of one in it is wrapped in two marks before
rendering, so that the template still sees it in one piece; `pieces` takes the marks out again and says where they were.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro

from server import errors
from server.template_sandbox import Sandbox, bounded, check_size, time_limit

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Unicode noncharacters: no text may interchange them, so they are dropped from the conversation."""

_LONGEST_MESSAGE = 200
"""Characters of a template's own error that a client is told."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Python's own errors may name an object by where it lies."""

_RESERVED = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token", "tools", "documents"})
"""What chat_template_kwargs may not replace."""


class ChatTemplate:
    """Compiled once. Rendering is pure and may happen on any thread."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], added_tokens: Mapping[str, bool]) -> None:
        """special_tokens: bos_token, eos_token ... as templates call them. added_tokens: text -> is it special.

        Control tokens are the special ones, and those others that the template itself writes.
        Raises jinja2.TemplateSyntaxError.
        """
        self.source = source
        environment = _environment()
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)
        written = "\0".join(_literals(environment.parse(source)))
        control = [token for token, is_special in added_tokens.items() if is_special or token in written]
        longest_first = sorted((token for token in control if len(token) > 1), key=len, reverse=True)
        spelled = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._control = re.compile(spelled)
        # A marked token in a value that the template wrote down as Python or JSON does, instead of its text.
        self._escaped = re.compile(rf"\\ufdd0({spelled})\\ufdd1")

    def render(
        self,
        messages: Iterable[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        tools: Iterable[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt, with marks. tools: None where there are none, as templates expect.

        Raises ApiError 400 with what the template says against these messages.
        """
        variables = variables or {}
        taken = _RESERVED.intersection(variables)
        if taken:
            raise errors.invalid_value(
                f"chat_template_kwargs cannot set {', '.join(sorted(taken))}", "chat_template_kwargs"
            )
        try:
            rendered = self._rendered(
                **self._special_tokens,
                messages=[
                    {key: value if key == "role" else self._mark(value) for key, value in message.items()}
                    for message in messages
                ],
                add_generation_prompt=add_generation_prompt,
                tools=None if tools is None else [self._mark(tool) for tool in tools],
                documents=None,
                **{name: self._mark(value) for name, value in variables.items()},
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            # Not only template errors: a template that indexes what a message lacks raises Python's own.
            text = _ADDRESS.sub("", " ".join(str(error).split()))[:_LONGEST_MESSAGE] or type(error).__name__
            raise errors.invalid_value(f"the chat template refuses these messages: {text}", "messages") from error
        return self._escaped.sub(rf"{_OPEN}\1{_CLOSE}", rendered)

    def _rendered(self, **variables: Any) -> str:
        written: list[str] = []
        size = 0
        with time_limit():
            for part in self._template.generate(**variables):
                written.append(part)
                size += len(part)
                check_size(size)
        return "".join(written)

    def pieces(self, rendered: str) -> Iterator[str]:
        """The prompt cut so that no control token of the conversation is in one piece; joined, it is the whole text.

        A marked token is cut behind its first character, and at a lone mark (a template may split what it is given)
        the text is cut too, so that its two sides cannot join into a control token.
        """
        for text, is_marked in _cut(rendered):
            while is_marked and self._control.search(text):
                yield text[0]
                text = text[1:]
            if text:
                yield text

    def _mark(self, value: Any) -> Any:
        if isinstance(value, str):
            clean = value.replace(_OPEN, "").replace(_CLOSE, "")
            return self._control.sub(rf"{_OPEN}\g<0>{_CLOSE}", clean)
        if isinstance(value, dict):
            return {self._mark(key): self._mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark(item) for item in value]
        return value


def _cut(rendered: str) -> Iterator[tuple[str, bool]]:
    """(text, it stood behind an opening mark) for each stretch between marks."""
    is_marked = False
    for part in re.split(f"([{_OPEN}{_CLOSE}])", rendered):
        if part in (_OPEN, _CLOSE):
            is_marked = part == _OPEN
        else:
            yield part, is_marked


def _literals(tree: nodes.Template) -> Iterator[str]:
    for data in tree.find_all(nodes.TemplateData):
        yield data.data
    for constant in tree.find_all(nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; serving writes them as they are."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Macro) -> str:
        return str(caller())


def _environment() -> Sandbox:
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = bounded("tojson", _tojson)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
