"""Questions on their way to whoever answers them, by the ids that the answers carry. Owned by one asyncio thread."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

from engine.errors import EngineUnavailable

_Told = TypeVar("_Told")


class Questions(Generic[_Told]):
    """Each is answered once, fails with the engine, or is given up by whoever asked."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._open: dict[int, asyncio.Future[_Told]] = {}

    async def ask(self, send: Callable[[int], None], patience_s: float) -> _Told:
        """send: puts the question, made of the id that its answer will carry.

        Raises TimeoutError when none comes in time, EngineUnavailable when `fail` does.
        """
        ask_id = next(self._ids)
        answer = self._open[ask_id] = asyncio.get_running_loop().create_future()
        try:
            send(ask_id)
            async with asyncio.timeout(patience_s):
                told: _Told = await answer
        finally:
            del self._open[ask_id]
        return told

    def answered(self, ask_id: int, answer: _Told) -> None:
        """An answer that nobody waits for any more is dropped."""
        waiting = self._open.get(ask_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def fail(self, reason: str) -> None:
        """The engine is gone, and answers nothing that it was asked."""
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(EngineUnavailable(reason))
