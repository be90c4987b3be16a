"""Where a chat template runs: jinja2's sandbox, and no more than so much time and memory. Knows nothing of chats.

A template comes with a model, and so from whoever made that. It sees its arguments and nothing of this program, and may
change none of them. Every turn of a loop and every call looks at the clock; whatever makes a value much larger than
what it is made of says first how large. What is left takes time in proportion to the text.
"""

from __future__ import annotations

import functools
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from string import Formatter
from types import GeneratorType
from typing import Any

from jinja2 import TemplateRuntimeError, nodes, runtime
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CPU_S = 2.0
"""Of the rendering thread. A conversation that fills a context takes a tenth of it."""
MAX_CHARACTERS = 32 * 1024 * 1024
"""Of what is rendered, and of each value on the way there; items of a list count as some."""
_ITEM_CHARACTERS = 64
MAX_NUMBER = 1_000_000
"""Widths, repetitions, counts."""

_clock = threading.local()


class TemplateLimit(TemplateRuntimeError):
    """The template wants more than it is given."""


@contextmanager
def time_limit() -> Iterator[None]:
    """A rendering within it ends with TemplateLimit when it has had its share of the processor."""
    _clock.end_s = time.thread_time() + MAX_CPU_S
    try:
        yield
    finally:
        del _clock.end_s


def check_size(characters: int) -> None:
    if characters > MAX_CHARACTERS:
        raise TemplateLimit(f"it makes {characters} characters: at most {MAX_CHARACTERS} are possible")


def _check_time() -> None:
    if time.thread_time() > getattr(_clock, "end_s", math.inf):
        raise TemplateLimit("it takes too long")


def _check_number(value: Any) -> None:
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        raise TemplateLimit(f"it uses the number {value:.3g}: at most {MAX_NUMBER} is possible")


def _check_weight(value: Any) -> None:
    """Of a value that is about to become text. Lists that hold one another over and over are small until then."""
    waiting, weight = [value], 0
    while waiting:
        item = waiting.pop()
        weight += len(item) if isinstance(item, str) else _ITEM_CHARACTERS
        check_size(weight)
        if isinstance(item, Mapping):
            waiting += item
            waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item


_WIDE = re.compile(r"\d{6}")
_PERCENT = re.compile(r"%(?:\([^)]*\))?([^a-zA-Z%]*)")


def _check_percent(form: str) -> None:
    """Before `form % arguments`."""
    for flags in _PERCENT.findall(form):
        if _WIDE.search(flags) or "*" in flags:
            raise TemplateLimit("it formats with a width that is too large, or not known before")


def _check_braces(form: str) -> None:
    """Before `form.format(...)`. What is wrong in it that call will say."""
    with suppress(ValueError):
        for _, _, spec, _ in Formatter().parse(form):
            if spec and (_WIDE.search(spec) or "{" in spec):
                raise TemplateLimit("it formats with a width that is too large, or not known before")


def _check_growth(name: str, text: str, arguments: Sequence[Any]) -> None:
    """Before `text | name(*arguments)` or `text.name(*arguments)`."""
    for argument in arguments:
        _check_number(argument)
    match name, arguments:
        case "replace", [str(old), str(new), *_]:
            check_size(len(text) + text.count(old) * len(new))
        case "join", [list(parts) | tuple(parts), *_]:
            for part in parts:
                _check_weight(part)
            check_size(sum(len(part) + len(text) if isinstance(part, str) else len(text) + 8 for part in parts))
        case "expandtabs", [int(width)]:
            check_size(len(text) + text.count("\t") * width)
        case "indent", [int(width), *_]:
            check_size(len(text) + (text.count("\n") + 1) * width)
        case ("indent", [str(prefix), *_]) | ("wordwrap", [_, _, str(prefix), *_]):
            check_size(len(text) * (1 + len(prefix)))
        case "format", _:
            _check_percent(text)


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's, which keeps a template from what is not its own, with the limits above."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_finalized, **options)
        self.globals.pop("lipsum")
        for name, function in list(self.filters.items()):
            self.filters[name] = bounded(name, function)

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        turns: Iterator[Any] = source.find_all((nodes.For, nodes.Macro, nodes.CallBlock))
        for node in turns:
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        for concat in list(source.find_all(nodes.Concat)):  # `~`
            concat.nodes = [nodes.Call(nodes.EnvironmentAttribute("concatenated"), concat.nodes, [], None, None)]
        return super()._generate(source, *args, **options)

    def tick(self) -> None:
        _check_time()

    def concatenated(self, *parts: Any) -> str:
        _check_weight(parts)
        return runtime.str_join(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_time()
        match operator, left, right:
            case "+", (str() | list() | tuple()), (str() | list() | tuple()):
                check_size(len(left) + len(right))
            case "*", (str() | list() | tuple()), int():
                check_size(len(left) * right)
            case "*", int(), (str() | list() | tuple()):
                check_size(left * len(right))
            case "%", str(), _:
                _check_percent(left)
            case "**", _, _:
                if isinstance(left, int) and isinstance(right, int):
                    _check_number(left)
                    _check_number(2**right if right < 64 else MAX_NUMBER + 1)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and result.bit_length() > 64:
            raise TemplateLimit("it computes a number of more than 64 bits")
        return result

    def call(self, context: Context, function: Any, *args: Any, **options: Any) -> Any:
        _check_time()
        owner = getattr(function, "__self__", None)
        arguments = [*map(_listed, args), *options.values()]
        _check_growth(getattr(function, "__name__", ""), owner if isinstance(owner, str) else "", arguments)
        return super().call(context, function, *arguments[: len(args)], **options)

    def getattr(self, obj: Any, attribute: str) -> Any:
        _check_method(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _check_method(obj, argument)
        return super().getitem(obj, argument)


def _check_method(obj: Any, name: Any) -> None:
    """`format` of a text is the sandbox's own function, which does not say whose it is when it is called."""
    if isinstance(obj, str) and name in ("format", "format_map"):
        _check_braces(obj)


def _finalized(value: Any) -> Any:
    """What stands in {{ }}, before it becomes text."""
    if not isinstance(value, str):
        _check_weight(value)
    return value


def bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that says first how large its result may be."""

    @functools.wraps(function)  # with what tells jinja2 to pass a context first
    def call(*args: Any, **options: Any) -> Any:
        _check_time()
        first = 1 if hasattr(function, "jinja_pass_arg") else 0
        arguments = [*map(_listed, args[first + 1 :]), *options.values()]
        subject = _listed(args[first])
        if name == "join":
            separator = next((argument for argument in arguments if isinstance(argument, str)), "")
            subject = list(subject) if isinstance(subject, Iterable) else []
            _check_growth(name, separator, [subject])
        else:
            _check_growth(name, subject if isinstance(subject, str) else "", arguments)
        if name in ("string", "tojson", "pprint", "xmlattr", "escape", "e", "forceescape", "list", "urlencode"):
            _check_weight(subject)
        return function(*args[:first], subject, *args[first + 1 :], **options)

    return call


def _listed(value: Any) -> Any:
    """A generator has no size before it has run. Not a loop of the template's, which goes on behind the call."""
    return list(value) if isinstance(value, GeneratorType | map | filter | zip | reversed) else value
