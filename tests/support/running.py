"""Running async tests, and the requests and answers that engine tests pass around."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from msgspec.structs import replace

from engine.client import RequestStream
from engine.types import GenerateRequest, Update

TIMEOUT_S = 20.0


def asyncio_test(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run the test in an asyncio loop of its own; one that hangs fails."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), TIMEOUT_S))

    return run


def request(name: str = "r", prompt: tuple[int, ...] = (5,), **changes: Any) -> GenerateRequest:
    """Four new tokens, unless `changes` say otherwise."""
    return GenerateRequest(name, prompt, **({"max_new_tokens": 4} | changes))


async def read(stream: RequestStream) -> dict[int, Update]:
    """All of a stream, joined to one update a choice; each choice must end exactly once."""
    choices: dict[int, Update] = {}
    async for update in stream:
        before = choices.get(update.index)
        assert before is None or before.finish is None, "news after the last update"
        tokens = update.token_ids if before is None else before.token_ids + update.token_ids
        choices[update.index] = replace(update, token_ids=tokens)
    assert all(update.finish is not None for update in choices.values())
    return choices
