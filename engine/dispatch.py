"""The caller's half of an engine: what is admitted, whose news is whose, and what phase the engine is in.

Owned by one asyncio thread. A transport (engine/inprocess.py, engine/spawned.py) carries the messages and reports the
engine's end; nothing here knows how.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from engine.config import check_request
from engine.errors import (
    CellserveError,
    ConfigError,
    Draining,
    EngineUnavailable,
    GrammarRefused,
    ModelError,
    QueueFull,
)
from engine.grammar import check_grammar
from engine.streams import RequestStream
from engine.types import EngineInfo, EngineStats, ErrorCode, GenerateRequest, Grammar, Update
from engine.wire import Cancel, Failed, FromEngine, Progress, Ready, Step, Submit, ToEngine

STOP_GRACE_S = 5.0
"""How long an engine that was told to stop may take before it is ended from outside."""
GRAMMAR_CHECK_S = 5.0
"""A grammar that is not found good by then is refused."""
_MAX_KNOWN_GRAMMARS = 256


@dataclass(frozen=True, slots=True)
class EnginePhase:
    """starting -> ready -> draining -> dead; dead may follow any of them, and `start` leads from dead to starting."""

    name: Literal["starting", "ready", "draining", "dead"]
    text: str = ""
    """While starting: what is being done."""
    done: int = 0
    of: int = 0
    """While starting: `done` of `of` pieces of it; 0 of 0 when it cannot be counted."""
    reason: str = ""
    """When dead: why. For operators; callers are told no more than that the engine has stopped."""


class EngineClient(ABC):
    """One engine as the server sees it. All methods belong to the asyncio thread that called `start`."""

    def __init__(self) -> None:
        self._turn = _Turn(EnginePhase("starting", text="not started"))
        self._stats = EngineStats()
        self._info: EngineInfo | None = None
        self._refusal: Failed | None = None
        self._streams: dict[str, RequestStream] = {}
        self._cancelled: dict[str, frozenset[int]] = {}
        self._num_outstanding = 0
        self._moved_at_s = time.monotonic()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._changing = asyncio.Lock()
        """Held by whoever launches or ends an engine."""
        self._is_closed = False
        self._checkers = ThreadPoolExecutor(2, thread_name_prefix="grammar-check")
        self._good_grammars: OrderedDict[Grammar, None] = OrderedDict()

    @property
    def phase(self) -> EnginePhase:
        return self._turn.phase

    @property
    def stats(self) -> EngineStats:
        """As of the last step; all zero before the first."""
        return self._stats

    @property
    def info(self) -> EngineInfo:
        """Constant once the engine has been ready. Raises EngineUnavailable before."""
        if self._info is None:
            raise EngineUnavailable("the engine is not loaded")
        return self._info

    @property
    def num_outstanding(self) -> int:
        """Choices that were admitted and have not had their last update."""
        return self._num_outstanding

    @property
    def stalled_s(self) -> float:
        """Seconds of work outstanding without a sign of life from the engine; 0 while there is nothing to do."""
        return time.monotonic() - self._moved_at_s if self._num_outstanding else 0.0

    async def start(self) -> None:
        """Launch the engine and return at once; `phase` and `wait_ready` tell the rest.

        A dead engine starts anew. Raises EngineUnavailable when it cannot be launched, or the client was closed.
        """
        async with self._changing:
            if self._is_closed:
                raise EngineUnavailable("the server has shut down")
            await self._end()
            try:
                await self._launch()
            except CellserveError as error:
                self._died(str(error))
                raise

    async def wait_ready(self) -> EngineInfo:
        """Raises ConfigError or ModelError as the load did, EngineUnavailable when the engine ended otherwise."""
        while self.phase.name == "starting":
            await self.next_phase()
        if self._refusal is not None and self._refusal.kind != "engine":
            kinds: dict[str, type[CellserveError]] = {"config": ConfigError, "model": ModelError}
            raise kinds[self._refusal.kind](self._refusal.reason)
        if self.phase.name == "dead":
            raise EngineUnavailable(f"the engine has stopped: {self.phase.reason}")
        return self.info

    async def next_phase(self) -> EnginePhase:
        """Wait for the phase, or how far a start is, to change. Changes in quick succession may be seen as one."""
        await self._turn.is_over.wait()
        return self.phase

    def phases(self) -> AsyncIterator[EnginePhase]:
        """Every change from this call on, none left out however late it is read. Never ends by itself."""
        return _phases_behind(self._turn)

    async def check_grammar(self, grammar: Grammar) -> None:
        """Find out on another thread whether requests may bring this grammar. Raises GrammarRefused or Draining."""
        if self._is_closed:
            raise Draining("the server is shutting down and takes nothing new")
        if grammar not in self._good_grammars:
            checking = asyncio.get_running_loop().run_in_executor(self._checkers, check_grammar, grammar)
            try:
                async with asyncio.timeout(GRAMMAR_CHECK_S):
                    await checking
            except TimeoutError as error:
                raise GrammarRefused(f"checking it takes longer than {GRAMMAR_CHECK_S:g} s") from error
        self._good_grammars[grammar] = None
        self._good_grammars.move_to_end(grammar)
        while len(self._good_grammars) > _MAX_KNOWN_GRAMMARS:
            self._good_grammars.popitem(last=False)

    def submit(self, request: GenerateRequest) -> RequestStream:
        """Admit the request and return its stream. A refusal comes here, before anything was sent, or never.

        Raises RequestTooLong, RequestTooLarge, QueueFull, Draining or EngineUnavailable.
        """
        match self.phase.name:
            case "starting":
                raise EngineUnavailable("the engine is still loading")
            case "draining":
                raise Draining("the server is shutting down and takes nothing new")
            case "dead":
                raise EngineUnavailable("the engine has stopped")
        check_request(self.info, request)
        capacity = self.info.max_num_seqs + self.info.max_waiting
        if self._num_outstanding + request.n > capacity:
            raise QueueFull(
                f"{self._num_outstanding} of {capacity} sequences are running or queued: {request.n} more do not fit"
            )
        assert request.request_id not in self._streams, f"request id {request.request_id} is in use"
        self._send(Submit(request))
        if not self._num_outstanding:
            self._moved_at_s = time.monotonic()  # before it, silence meant that there was nothing to do
        stream = RequestStream(request.request_id, request.n, self.cancel)
        self._streams[request.request_id] = stream
        self._num_outstanding += request.n
        self._is_idle.clear()
        return stream

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End one choice of the request, or all that are open, behind the step in flight; the others go on.

        What is unknown, finished or cancelled already is ignored.
        """
        if request_id not in self._streams:
            return
        is_open, cancelled = self._streams[request_id].open_choices, self._cancelled.get(request_id, frozenset())
        ending = (is_open if index is None else is_open & {index}) - cancelled
        if ending:
            self._cancelled[request_id] = cancelled | ending
            self._send(Cancel(request_id, index))

    async def close(self, drain_s: float = 0.0) -> None:
        """Take nothing new, let what runs finish for up to `drain_s`, fail the rest, and end the engine.

        Repeating it is harmless; a second call with a shorter time cuts the first one's short.
        """
        self._is_closed = True
        if self.phase.name in ("starting", "ready"):
            self._enter(EnginePhase("draining"))
        try:
            async with asyncio.timeout(drain_s):
                await self._is_idle.wait()
        except TimeoutError:
            self._fail_streams("the server is shutting down", "shutting_down")
        self._died("shut down")
        self._checkers.shutdown(wait=False, cancel_futures=True)
        async with self._changing:
            await self._end()

    # --- the transport's side ---------------------------------------------------------------------------------------

    @abstractmethod
    async def _launch(self) -> None:
        """Bring an engine to life. Its messages go to `_receive` and its end to `_died`, on the asyncio thread.

        Raises ConfigError or EngineUnavailable and leaves nothing behind.
        """

    @abstractmethod
    def _send(self, message: ToEngine) -> None:
        """Queue a message; never waits. To an engine that is gone, it does nothing."""

    @abstractmethod
    async def _end(self) -> None:
        """End the engine and give everything back, whatever state either is in. Repeating it does nothing."""

    def _begin(self, text: str) -> None:
        """A new engine is about to live: forget the one before it."""
        assert not self._streams
        self._stats, self._info, self._refusal = EngineStats(), None, None
        self._enter(EnginePhase("starting", text=text))

    def _receive(self, message: FromEngine) -> None:
        self._moved_at_s = time.monotonic()
        match message:
            case Step(updates, stats):
                self._stats = stats
                for update in updates:
                    self._deliver(update)
            case Progress(text, done, of):
                if self.phase.name == "starting":
                    self._enter(EnginePhase("starting", text=text, done=done, of=of))
            case Ready(info):
                if self.phase.name == "starting":
                    self._info = info
                    self._enter(EnginePhase("ready"))
            case Failed():
                self._refusal = message
                self._died(message.reason)

    def _died(self, reason: str) -> None:
        """The engine is gone. Only the first reason counts; every open stream ends here."""
        if self.phase.name == "dead":
            return
        self._enter(EnginePhase("dead", reason=reason))
        self._fail_streams("the engine has stopped", "engine_unavailable")

    def _deliver(self, update: Update) -> None:
        stream = self._streams.get(update.request_id)
        if stream is None or not stream.push(update) or update.finish is None:
            return
        self._num_outstanding -= 1
        if stream.open_choices:
            return
        del self._streams[update.request_id]
        self._cancelled.pop(update.request_id, None)
        if not self._streams:
            self._is_idle.set()

    def _fail_streams(self, error: str, code: ErrorCode) -> None:
        for stream in list(self._streams.values()):
            for index in sorted(stream.open_choices):
                self._deliver(Update(stream.request_id, index=index, finish="failed", error=error, error_code=code))

    def _enter(self, phase: EnginePhase) -> None:
        over, self._turn = self._turn, _Turn(phase)
        over.next = self._turn
        over.is_over.set()


class _Turn:
    """A phase and the way to the one that followed it: whoever holds a turn can read all that came since."""

    def __init__(self, phase: EnginePhase) -> None:
        self.phase = phase
        self.next: _Turn | None = None
        self.is_over = asyncio.Event()


async def _phases_behind(turn: _Turn) -> AsyncIterator[EnginePhase]:
    while True:
        await turn.is_over.wait()
        assert turn.next is not None
        turn = turn.next
        yield turn.phase
