"""An engine on a thread of this process: for tests, for the Python `LLM`, for small machines."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable

from engine.config import EngineConfig
from engine.dispatch import STOP_GRACE_S, EngineClient
from engine.errors import EngineUnavailable
from engine.thread import Build, breakable, build_from_config, run_engine
from engine.wire import FromEngine, Stop, ToEngine


class InProcessClient(EngineClient):
    """The engine gets a thread and a queue; its news come back in one call to the asyncio thread a step."""

    def __init__(self, build: Build) -> None:
        """build runs on the engine thread, once a start."""
        super().__init__()
        self._build = build
        self._inbox = _QueueInbox()
        self._ended: asyncio.Event | None = None
        """Set when the engine thread has left its loop; None before the first start."""

    @classmethod
    def from_config(cls, config: EngineConfig) -> InProcessClient:
        return cls(lambda progress: breakable(build_from_config, config)(config, progress))

    async def _launch(self) -> None:
        if self._ended is not None and not self._ended.is_set():
            raise EngineUnavailable(
                "the engine before this one still hangs in its step, and a thread cannot be ended: the server must be "
                "started anew, or its engine run in a process of its own"
            )
        self._begin("loading")
        asyncio_loop = asyncio.get_running_loop()
        inbox, ended = self._inbox, self._ended = _QueueInbox(), asyncio.Event()

        def post(call: Callable[..., None], *arguments: object) -> None:
            try:
                asyncio_loop.call_soon_threadsafe(call, *arguments)
            except RuntimeError:  # the asyncio loop was closed over a running engine: nobody is left to tell
                inbox.put(Stop())

        def send(message: FromEngine) -> None:
            post(self._receive, message)

        def live() -> None:
            run_engine(self._build, inbox, send)
            post(ended.set)

        # A daemon: an engine that hangs in a step must not keep the interpreter from leaving.
        threading.Thread(target=live, name="engine", daemon=True).start()

    def _send(self, message: ToEngine) -> None:
        self._inbox.put(message)

    def _kill(self) -> None:
        self._inbox.put(Stop())  # for when it comes back from its step: a thread cannot be ended from outside

    async def _end(self) -> None:
        if self._ended is None:
            return
        self._inbox.put(Stop())
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                await self._ended.wait()
        except TimeoutError:
            pass  # a thread cannot be ended from outside; it will find the message behind its step


class _QueueInbox:
    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()

    def put(self, message: ToEngine) -> None:
        self._queue.put(message)

    def take(self, *, wait: bool) -> list[ToEngine]:
        messages = [self._queue.get()] if wait else []
        while True:
            try:
                messages.append(self._queue.get_nowait())
            except queue.Empty:
                return messages
