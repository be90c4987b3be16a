"""The caller's half of an engine: what is admitted, whose news is whose, and what phase the engine is in.

Owned by one asyncio thread. A transport (engine/inprocess.py, engine/spawned.py) carries the messages and reports the
engine's end; nothing here knows how.

When an engine dies under a supervisor, requests of which nothing has left for their callers wait for the next engine
and run again with the seeds they had; the others end with an error.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
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
from engine.lives import MAX_RUNS, EngineLives, OpenRequest, added
from engine.questions import Questions
from engine.streams import RequestStream
from engine.types import (
    EngineInfo,
    EngineStats,
    ErrorCode,
    GenerateRequest,
    Grammar,
    KvReport,
    PrefixReset,
    Update,
)
from engine.view import View
from engine.wire import (
    AskKv,
    Cancel,
    Failed,
    FromEngine,
    Inject,
    Injected,
    Kv,
    Look,
    Progress,
    Ready,
    ResetPrefixes,
    Seen,
    Step,
    Submit,
    ToEngine,
    WasReset,
)

STOP_GRACE_S = 5.0
"""How long an engine that was told to stop may take before it is ended from outside."""
GRAMMAR_CHECK_S = 5.0
"""A grammar that is not found good by then is refused."""
_MAX_KNOWN_GRAMMARS = 256
ANSWER_S = 10.0
"""An engine answers between two steps. One that has not by then is taken to be stuck."""

Question = AskKv | ResetPrefixes | Look | Inject
Answer = KvReport | PrefixReset | View | str


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
        self._earlier_stats = EngineStats()
        """Sums over the engines before this one."""
        self.lives = EngineLives()
        self._info: EngineInfo | None = None
        self._refusal: Failed | None = None
        self._open: dict[str, OpenRequest] = {}
        """In order of admission."""
        self._is_supervised = False
        self._num_outstanding = 0
        self._moved_at_s = time.monotonic()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._changing = asyncio.Lock()
        """Held by whoever launches or ends an engine."""
        self._is_closed = False
        self._questions: Questions[Answer] = Questions()
        self._checkers = ThreadPoolExecutor(2, thread_name_prefix="grammar-check")
        self._good_grammars: OrderedDict[Grammar, None] = OrderedDict()

    @property
    def phase(self) -> EnginePhase:
        return self._turn.phase

    @property
    def stats(self) -> EngineStats:
        """As of the last step; all zero before the first. Sums go on over the engines of this client's life."""
        return added(self._earlier_stats, self._stats)

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
        """Seconds of work outstanding without a sign of life from the engine; 0 while there is nothing to do.

        An engine that loads has no work yet, however much waits for it.
        """
        is_up = self.phase.name in ("ready", "draining")
        return time.monotonic() - self._moved_at_s if self._num_outstanding and is_up else 0.0

    @property
    def num_steps(self) -> int:
        """Steps of the engine that lives now."""
        return self._stats.steps

    def supervise(self) -> None:
        """Promise that `start` or `give_up` follows each death of the engine: what can run again waits for that."""
        self._is_supervised = True

    def give_up(self) -> None:
        """No engine follows the dead one: fail what waited for it."""
        self._is_supervised = False
        self._fail_streams("the engine has stopped", "engine_unavailable")

    def end_hung(self, reason: str) -> None:
        """End an engine that does not move, and report its death at once; its process is gone when `start` returns."""
        if self.phase.name != "dead":
            self.lives.hung += 1
            self._kill()
            self._died(reason)

    async def start(self) -> None:
        """Launch the engine and return at once; `phase` and `wait_ready` tell the rest.

        A dead engine starts anew, and takes over what waits for it. Raises EngineUnavailable when it cannot be
        launched, or the client was closed.
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
            checking = asyncio.get_running_loop().run_in_executor(self._checkers, _check_grammar, grammar)
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
        assert request.request_id not in self._open, f"request id {request.request_id} is in use"
        if self._is_supervised and request.sampling.seed is None:
            # A second run must draw what the first one drew.
            request = replace(request, sampling=replace(request.sampling, seed=secrets.randbits(62)))
        self._send(Submit(request))
        now = time.monotonic()
        if not self._num_outstanding:
            self._moved_at_s = now  # before it, silence meant that there was nothing to do
        stream = RequestStream(request.request_id, request.n, self.cancel, may_rerun=self._is_supervised)
        self._open[request.request_id] = OpenRequest(request, stream, now)
        self._num_outstanding += request.n
        self._is_idle.clear()
        return stream

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End one choice of the request, or all that are open, behind the step in flight; the others go on.

        What is unknown, finished or cancelled already is ignored.
        """
        if request_id not in self._open:
            return
        entry = self._open[request_id]
        is_open = entry.stream.open_choices
        ending = (is_open if index is None else is_open & {index}) - entry.cancelled
        entry.cancelled |= ending
        if ending and self.phase.name in ("ready", "draining"):
            self._send(Cancel(request_id, index))
        elif ending:
            self._end_cancelled(entry)  # no engine has it

    async def look(self, *, max_codes: int, behind_step: int) -> View:
        """See what the engine is at, when it is between two steps. Costs it nothing while nobody asks.

        max_codes: cells that are shown at most. behind_step: steps with a higher number are shown.
        Raises EngineUnavailable when it does not run, or ends before it answers.
        """
        view = await self._ask(partial(Look, max_codes=max_codes, behind_step=behind_step))
        assert isinstance(view, View)
        return view

    async def kv_report(self) -> KvReport:
        """Where K/V is, behind the step in flight. Raises EngineUnavailable."""
        report = await self._ask(AskKv)
        assert isinstance(report, KvReport)
        return report

    async def reset_prefix_cache(self) -> PrefixReset:
        """Forget every prefix in the pool that no running session uses. Raises EngineUnavailable.

        What tiers below the pool hold stays, and so does what running sessions use.
        """
        reset = await self._ask(ResetPrefixes)
        assert isinstance(reset, PrefixReset)
        return reset

    async def inject(self, order: str) -> str:
        """Have an engine that was started for tests obey an order: JSON to JSON (engine/faults.py)."""
        answer = await self._ask(partial(Inject, order=order))
        assert isinstance(answer, str)
        return answer

    async def _ask(self, question: Callable[[int], Question]) -> Answer:
        if self.phase.name not in ("ready", "draining"):
            raise EngineUnavailable("the engine is not running")
        try:
            return await self._questions.ask(lambda ask_id: self._send(question(ask_id)), ANSWER_S)
        except TimeoutError as error:
            raise EngineUnavailable(f"the engine has not answered within {ANSWER_S:g} s") from error

    async def close(self, drain_s: float = 0.0) -> None:
        """Take nothing new, let what runs finish for up to `drain_s`, fail the rest, and end the engine.

        Repeating it is harmless; a second call with a shorter time cuts the first one's short.
        """
        self._is_closed = True
        if self.phase.name in ("starting", "dead"):  # nothing runs, and no engine comes for what waits
            self._fail_streams("the server is shutting down", "shutting_down")
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
    def _kill(self) -> None:
        """End an engine that answers nothing, as far as that can be done; never waits."""

    @abstractmethod
    async def _end(self) -> None:
        """End the engine and give everything back, whatever state either is in. Repeating it does nothing."""

    def _begin(self, text: str) -> None:
        """A new engine is about to live: forget the one before it."""
        assert self._is_supervised or not self._open
        self._info, self._refusal = None, None
        self._enter(EnginePhase("starting", text=text))

    def _receive(self, message: FromEngine) -> None:
        if self.phase.name == "dead":
            return  # a last word of one that was given up: its requests are not its own any more
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
                    self.lives.ready += 1
                    self._enter(EnginePhase("ready"))
                    self._rerun()
            case Kv(ask_id, told) | WasReset(ask_id, told) | Seen(ask_id, told) | Injected(ask_id, told):
                self._questions.answered(ask_id, told)
            case Failed():
                self._refusal = message
                self._died(message.reason)

    def _died(self, reason: str) -> None:
        """The engine is gone. Only the first reason counts; every open stream ends here, or waits to run again."""
        if self.phase.name == "dead":
            return
        had_begun = self.phase.name != "starting"
        self._enter(EnginePhase("dead", reason=reason))
        self._questions.fail("the engine has stopped")
        self._earlier_stats, self._stats = self.stats, EngineStats()
        if not self._is_supervised or self._is_closed:
            self._fail_streams("the engine has stopped", "engine_unavailable")
            return
        for entry in list(self._open.values()):
            self._end_cancelled(entry)
            if had_begun and (entry.runs >= MAX_RUNS or not entry.stream.can_rerun):
                self._fail(entry, "the engine has stopped", "engine_unavailable")
            elif had_begun and entry.stream.open_choices:
                entry.runs += 1
                self._expire_later(entry)

    def _rerun(self) -> None:
        """Give a new engine what waits for it."""
        now = time.monotonic()
        for entry in list(self._open.values()):
            if not entry.stream.can_rerun:  # what had come before the death has left for its caller since
                self._fail(entry, "the engine has stopped", "engine_unavailable")
                continue
            request = entry.again(now)
            try:
                check_request(self.info, request)
            except CellserveError:  # the new engine is smaller than the old one
                self._fail(entry, "the engine has stopped", "engine_unavailable")
                continue
            self.lives.requests_rerun += 1
            entry.stream.begin_again()
            self._send(Submit(request))
            for index in sorted(set(range(request.n)) - entry.stream.open_choices):
                self._send(Cancel(request.request_id, index))

    def _expire_later(self, entry: OpenRequest) -> None:
        """A request's deadline holds while no engine is there to keep it."""
        deadline_s = entry.request.deadline_s
        if deadline_s is None:
            return

        def expire() -> None:
            if self.phase.name not in ("ready", "draining"):
                error = f"the request's deadline_s of {deadline_s} s has passed"
                self._fail(entry, error, "deadline_exceeded")

        asyncio.get_running_loop().call_later(entry.since_s + deadline_s - time.monotonic(), expire)

    def _deliver(self, update: Update) -> None:
        entry = self._open.get(update.request_id)
        if entry is None:
            return
        if not entry.stream.push(update):
            return
        if update.finish is None:  # a second run that went another way: the engine does not know that it is over
            self._send(Cancel(update.request_id, update.index))
        self._num_outstanding -= 1
        if not entry.stream.is_over:
            return
        del self._open[update.request_id]
        if not self._open:
            self._is_idle.set()

    def _end_cancelled(self, entry: OpenRequest) -> None:
        for index in sorted(entry.stream.open_choices & entry.cancelled):
            self._deliver(Update(entry.request.request_id, index=index, finish="cancelled"))

    def _fail(self, entry: OpenRequest, error: str, code: ErrorCode) -> None:
        for index in sorted(entry.stream.open_choices):
            name = entry.request.request_id
            self._deliver(Update(name, index=index, finish="failed", error=error, error_code=code))

    def _fail_streams(self, error: str, code: ErrorCode) -> None:
        for entry in list(self._open.values()):
            self._fail(entry, error, code)

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


def _check_grammar(grammar: Grammar) -> None:
    """On a thread of the checkers: the first one imports numpy and llguidance there."""
    from engine.grammar import check_grammar

    check_grammar(grammar)


async def _phases_behind(turn: _Turn) -> AsyncIterator[EnginePhase]:
    while True:
        await turn.is_over.wait()
        assert turn.next is not None
        turn = turn.next
        yield turn.phase
