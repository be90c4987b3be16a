"""What a client asks its engine beside requests, and the answers on their way. Owned by the client's asyncio thread."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from engine.errors import EngineUnavailable
from engine.types import KvReport, PrefixReset
from engine.view import View
from engine.wire import AskKv, Inject, Look, ResetPrefixes

ANSWER_S = 10.0
"""An engine answers between two steps. One that has not by then is taken to be stuck."""

Question = AskKv | ResetPrefixes | Look | Inject
Answer = KvReport | PrefixReset | View | str


class Questions:
    """Each is answered once, fails with the engine, or is given up after `ANSWER_S`."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._open: dict[int, asyncio.Future[Answer]] = {}

    async def ask(self, question: Callable[[int], Question], send: Callable[[Question], None]) -> Answer:
        """question: made of the id that its answer will carry. Raises EngineUnavailable."""
        ask_id = next(self._ids)
        answer = self._open[ask_id] = asyncio.get_running_loop().create_future()
        try:
            send(question(ask_id))
            async with asyncio.timeout(ANSWER_S):
                told: Answer = await answer
        except TimeoutError as error:
            raise EngineUnavailable(f"the engine has not answered within {ANSWER_S:g} s") from error
        finally:
            del self._open[ask_id]
        return told

    def answered(self, ask_id: int, answer: Answer) -> None:
        """An answer that nobody waits for any more is dropped."""
        waiting = self._open.get(ask_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def fail(self, reason: str) -> None:
        """The engine is gone, and answers nothing that it was asked."""
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(EngineUnavailable(reason))
