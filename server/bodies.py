"""Bytes of a body to what JSON says they are, and that to what a route's model makes of it. One way for every route.

Stricter than Python's parser where that one is generous: UTF-8 alone, and text that is text.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from server import errors
from server.guards import CLIENT_GONE

MAX_DEPTH = 200
"""Lists and objects within each other. Every library that sees a body has a limit of its own, the lowest near 250."""

_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
"""How JSON spells one half of a surrogate pair. Most that match are halves of a whole pair."""


class JsonRoute(APIRoute):
    """A route `endpoint(request, body)` whose body is read by `parse` and checked by its model, and by nothing else.

    Every route that takes a body is one (tests/test_security_bodies.py). FastAPI documents it. Its own way to a handler
    leads through dependencies, forms and files that no route here has, and takes as long as all of ours.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if self.body_field is None:
            return super().get_route_handler()
        model = cast(type[BaseModel], self.body_field.field_info.annotation)
        endpoint: Callable[[Request, BaseModel], Coroutine[Any, Any, Response]] = self.endpoint

        async def handle_json(request: Request) -> Response:
            try:
                body = await request.body()
            except ClientDisconnect:
                return Response(status_code=CLIENT_GONE)
            return await endpoint(request, checked(model, body))

        return handle_json


_Model = TypeVar("_Model", bound=BaseModel)


def checked(model: type[_Model], body: bytes) -> _Model:
    """Raises ApiError 400 for what is no JSON, and for what the model refuses."""
    if not body:
        raise errors.invalid_value("the body is missing: send a JSON object")
    try:
        value = parse(body)
    except json.JSONDecodeError as error:
        raise errors.invalid_json() from error
    except ValueError as error:
        raise errors.invalid_json("the body cannot be read: it holds a number with too many digits") from error
    try:
        # From attributes: so a body that is no object is refused in words that name no class of ours.
        return model.model_validate(value, from_attributes=True)
    except ValidationError as error:
        raise errors.from_validation(error.errors(include_url=False), value) from error


def parse(body: bytes) -> Any:
    """The value that `body` spells. The last of several fields with one name counts; a byte order mark is skipped.

    Raises json.JSONDecodeError, and ValueError for an integer of more digits than Python reads.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError("it is not UTF-8", "", error.start) from error
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _depth(body) > MAX_DEPTH:
        raise json.JSONDecodeError(f"it is nested more than {MAX_DEPTH} levels deep", "", 0)
    with _no_collection():
        value = json.loads(text)
    # A lone half is no text: no tokenizer takes it and no answer can carry it.
    half = _HALF_PAIR.search(text)
    if half and not all(map(_is_text, _texts(value))):
        raise json.JSONDecodeError("a text in it holds half of a surrogate pair", "", half.start())
    return value


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is looked for meanwhile.

    A parser makes a million lists and no garbage. Looking for some again and again among all objects of the process
    made 8 MB of "[],[],[]" hold up the event loop for 3 s instead of 0.2.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _depth(body: bytes) -> int:
    """Of lists and objects within each other. By the characters alone: walking through the values takes seconds."""
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    characters = np.frombuffer(unescaped, np.uint8)
    outside = characters[~np.logical_xor.accumulate(characters == ord('"'))]
    opens = (outside == ord("[")) | (outside == ord("{"))
    closes = (outside == ord("]")) | (outside == ord("}"))
    steps = opens.astype(np.int8) - closes.astype(np.int8)
    return int(steps[steps != 0].cumsum(dtype=np.int32).max(initial=0))


def _texts(value: Any) -> Iterator[str]:
    """Every text in it, keys included. Not recursive: nesting that the parser could read must not be too deep here."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, dict):
            waiting += item
            waiting += item.values()


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
