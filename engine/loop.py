"""The engine's turn: admit, schedule, launch, collect, report. Owns every session; one thread, no locks.

A step is launched before the one ahead of it is collected where the executor overlaps (D7), so what a launch needs of a
token the host has not seen is its place, never its value. Knows no text, no HTTP, no torch.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any, Protocol

from cache.radix import RadixTree
from engine.errors import DeviceLost, GrammarRefused, SessionsExhausted, StepFailed
from engine.executor import Executor, InFlight
from engine.prefix import PrefixCache
from engine.recent import RecentSteps
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sessions import Session, choice_seed
from engine.types import (
    Batch,
    Chunk,
    ChunkOutput,
    EngineStats,
    ErrorCode,
    FinishReason,
    GenerateRequest,
    Grammar,
    KvReport,
    PrefixReset,
    StepOutput,
    TokenLogprobs,
    Update,
)
from engine.view import MAX_WAITING_SHOWN, View

if TYPE_CHECKING:
    from engine.kv_tiers import KvTiers

MAX_FAILED_STEPS = 3
"""A session that was in so many failed steps ends with the next one."""
GRAMMAR_COMPILE_S = 10.0
"""A request whose grammar is not compiled by then fails."""
_GRAMMAR_WAIT_S = 0.02
"""How long an idle turn waits for one, deaf to new requests."""
_MEASURED_TOKENS = 4096
"""From that many prompt tokens on, their part of the time of all steps tells what one takes, decodes included."""
_TIER_WAIT_S = 0.002
"""How long a turn that can run nothing waits for a prefix from a tier."""

_log = logging.getLogger(__name__)


class Preparing(Protocol):
    """Whoever compiles grammars: engine.grammar.Grammars."""

    def prepare(self, grammar: Grammar) -> Future[Any]:
        """Begin to compile, elsewhere. The future fails with GrammarRefused."""
        ...


class EngineLoop:
    """Drives one executor. Every choice of a submitted request gets exactly one update with `finish`."""

    def __init__(
        self,
        executor: Executor[Any],
        limits: SchedulerLimits,
        *,
        prefix_cache: bool = True,
        make_tiers: Callable[[RadixTree], KvTiers] | None = None,
        grammars: Preparing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """make_tiers: where prefixes go that the pool has no room for; None: nowhere.
        grammars: None where requests with a grammar need no preparation, or never come."""
        self._executor = executor
        self._grammars = grammars
        self._preparing: list[tuple[Session, Future[Any], float]] = []  # not yet queued; until when they may take
        self._prefixes = PrefixCache(executor, is_on=prefix_cache, make_tiers=make_tiers)
        self._scheduler = Scheduler(limits)
        self._clock = clock
        self._requests: dict[str, list[Session]] = {}  # open choices of each request
        self._deadlines: dict[str, float] = {}
        self._queue_deadlines: dict[str, float] = {}  # of requests that have never run
        self._launched: dict[int, list[Session | None]] = {}
        """id(InFlight) -> sessions in chunk order; None: what it brings for that one is void."""
        self._in_flight: InFlight | None = None
        self._updates: list[Update] = []
        self._num_arrived = 0
        self._recent = RecentSteps()
        self._steps = 0
        self._steps_failed = 0
        self._rows_failed = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._preemptions = 0
        self._step_time_s = 0.0

    # --- what callers ask -------------------------------------------------------------------------------------------

    @property
    def executor(self) -> Executor[Any]:
        """For a bench that times its launches."""
        return self._executor

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request that passed `engine.config.check_request`."""
        assert request.request_id not in self._requests
        seed = secrets.randbits(62) if request.sampling.seed is None else request.sampling.seed
        stem = Session(
            request=request,
            index=0,
            arrival=self._num_arrived,
            seed=choice_seed(seed, 0),
            draws=request.n,
            tokens=list(request.prompt_token_ids),
            submitted_s=self._clock(),
        )
        self._num_arrived += 1
        self._requests[request.request_id] = [stem]
        if request.deadline_s is not None:
            self._deadlines[request.request_id] = self._clock() + request.deadline_s
        if request.queue_timeout_s is not None:
            self._queue_deadlines[request.request_id] = self._clock() + request.queue_timeout_s
        if request.max_new_tokens == 0 and request.sampling.prompt_logprobs is None and request.pooling is None:
            self._finish(stem, "length")
        elif request.sampling.grammar is not None and self._grammars is not None:
            future = self._grammars.prepare(request.sampling.grammar)
            self._preparing.append((stem, future, self._clock() + GRAMMAR_COMPILE_S))
        else:
            self._queue(stem)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End every open choice of the request, or one. Unknown and finished ones are ignored.

        One that shares a stem's first draw with others ends behind that draw; all of them together end now.
        """
        for session in list(self._requests.get(request_id, ())):
            choices = range(session.index, session.index + session.draws)
            if index is not None and index in choices:
                session.cancelled_draws.add(index)
            if index is None or session.cancelled_draws.issuperset(choices):
                self._finish(session, "cancelled")

    def reset_prefix_cache(self) -> PrefixReset:
        """Forget every prefix in the pool that no running session uses. What tiers hold stays."""
        return self._prefixes.reset()

    def kv_report(self) -> KvReport:
        """Where K/V is now. Cheap, but not for every step."""
        return self._prefixes.report()

    def obey(self, order: str) -> str:
        """An order of a test. engine/faults.py puts its own in this place; an engine of users refuses by name."""
        return '{"error": "this engine was started without --test-faults"}'

    def has_work(self) -> bool:
        """Whether another `step` would do anything."""
        is_waiting = self._preparing or self._prefixes.is_busy
        return bool(self._updates or is_waiting) or not self._scheduler.is_empty or self._in_flight is not None

    def stats(self) -> EngineStats:
        """A snapshot; sums only grow."""
        return EngineStats(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting + sum(session.draws for session, _, _ in self._preparing),
            cells_used=self._executor.total_cells - self._prefixes.available_cells,
            cells_cached=self._prefixes.cached_cells,
            cells_shared=self._prefixes.shared_cells,
            cells_total=self._executor.total_cells,
            steps=self._steps,
            steps_failed=self._steps_failed,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._preemptions,
            padding_rows=self._executor.padding_rows,
            method_calls=self._executor.method_calls(),
            step_time_s=self._step_time_s,
            rows_failed=self._rows_failed,
        )

    def view(self, max_codes: int, behind_step: int) -> View:
        """What the pool holds, who runs and waits, and the last steps, for someone who looks."""
        started = self._clock()
        cells, running = self._prefixes.draw(max_codes)
        below = self._prefixes.report().tiers
        waiting = [len(session.tokens) for session in self._scheduler.sessions() if session.executor_id is None]
        return View(
            cells=cells,
            sessions=tuple(session.viewed() for session in running),
            waiting=tuple(waiting[:MAX_WAITING_SHOWN]),
            steps=self._recent.behind(behind_step, started),
            tiers=() if below is None else below.tiers,
            stats=self.stats(),
            cost_s=self._clock() - started,
        )

    def without_prefixes(self) -> EngineLoop:
        """Another loop over the same executor, which reuses nothing: what a bench compares this one with.

        Only one of the two may have work at a time.
        """
        return EngineLoop(self._executor, self._scheduler.limits, prefix_cache=False, clock=self._clock)

    def without_tiers(self) -> EngineLoop:
        """As `without_prefixes`, but it reuses what the pool holds."""
        return EngineLoop(self._executor, self._scheduler.limits, clock=self._clock)

    # --- one turn ---------------------------------------------------------------------------------------------------

    def step(self) -> list[Update]:
        """Launch what can run, collect what is due, and return the news since the last call."""
        started = self._clock()
        self._expire()
        self._queue_prepared()
        self._prefixes.poll()
        ahead, self._in_flight = self._in_flight, None
        num_failed = self._steps_failed
        preempted = self._make_room()
        launched = self._launch_next()
        if launched is not None and self._executor.overlaps:
            self._in_flight = launched
        else:
            assert ahead is None or launched is None, "an executor that does not overlap left a step behind"
            ahead = launched or ahead
        if ahead is not None:
            self._collect(ahead)
            self._steps += 1
            ended = self._clock()
            self._step_time_s += ended - started
            self._recent.add(self._steps, ahead, ended, ended - started)
        elif launched is None and self._prefixes.is_busy:
            if not self._updates:
                self._prefixes.wait(_TIER_WAIT_S)
        elif self._steps_failed > num_failed:
            pass  # its sessions wait again
        elif launched is None and not (self._scheduler.is_empty or self._updates or preempted):
            raise RuntimeError(
                f"nothing can run: {self._scheduler.num_waiting} waiting and {self._scheduler.num_running} running "
                f"choices, {self._prefixes.available_cells} of {self._executor.total_cells} cells free"
            )
        updates, self._updates = self._updates, []
        return updates

    def _queue(self, session: Session) -> None:
        self._scheduler.add_waiting(session)
        is_measured = self._prompt_tokens >= _MEASURED_TOKENS
        self._prefixes.expect(session, self._step_time_s / self._prompt_tokens if is_measured else math.inf)

    def _queue_prepared(self) -> None:
        """Queue those whose grammar is compiled. Waits for one, for a moment, only when there is nothing else to do."""
        if not self._preparing:
            return
        if self._scheduler.is_empty and self._in_flight is None and not self._updates:
            wait([future for _, future, _ in self._preparing], _GRAMMAR_WAIT_S, FIRST_COMPLETED)
        pending, self._preparing = self._preparing, []
        for session, future, deadline in pending:
            if session.finished is not None:
                continue
            if not future.done() and self._clock() < deadline:
                self._preparing.append((session, future, deadline))
                continue
            error = future.exception() if future.done() else GrammarRefused("compiling it takes too long")
            if error is None:
                self._queue(session)
            else:
                self._finish(session, "failed", error=str(error), code="grammar_refused")

    def _expire(self) -> None:
        codes: dict[str, ErrorCode] = {"deadline_s": "deadline_exceeded", "queue_timeout_s": "queue_timeout"}
        for deadlines, field in ((self._deadlines, "deadline_s"), (self._queue_deadlines, "queue_timeout_s")):
            if not deadlines:
                continue
            now = self._clock()
            for request_id in [r for r, deadline in deadlines.items() if deadline <= now]:
                sessions = self._requests[request_id]
                error = f"the request's {field} of {getattr(sessions[0].request, field)} s has passed"
                for session in list(sessions):
                    self._finish(session, "failed", error=error, code=codes[field])

    def _launch_next(self) -> InFlight | None:
        takes = self._scheduler.next_takes(self._prefixes.available_cells)
        if not takes:
            return None
        self._prefixes.make_room(sum(take.count for take in takes))
        sessions: list[Session | None] = [take.session for take in takes]
        batch = Batch(tuple(take.session.take(take.count) for take in takes))
        try:
            in_flight: InFlight = self._executor.launch(batch)
        except StepFailed as error:
            self._fail_step(sessions, error)
            return None
        self._launched[id(in_flight)] = sessions
        return in_flight

    def _make_room(self) -> bool:
        """Preempt while running sessions lack cells, otherwise admit while waiting ones fit; whether it preempted."""
        preempted = False
        while self._scheduler.must_preempt(self._prefixes.available_cells):
            victim = self._scheduler.preempt()
            self._prefixes.close(victim, keep=True)
            victim.requeue()
            self._preemptions += 1
            preempted = True
        if not preempted:
            self._admit()
        return preempted

    def _admit(self) -> None:
        for session in self._scheduler.admissible(
            lambda: self._prefixes.available_cells,
            must_wait=self._prefixes.must_wait,
            shared_tokens=self._prefixes.shared_tokens,
        ):
            try:
                self._prefixes.open(session)
            except DeviceLost:
                raise
            except Exception as error:  # whatever is wrong with this request must not end the others
                self._fail_alone(session, error)
                continue
            self._scheduler.admit(session)
            if session.queued_s is None:
                session.queued_s = self._clock() - session.submitted_s
            self._queue_deadlines.pop(session.request.request_id, None)

    # --- what a step brought ----------------------------------------------------------------------------------------

    def _collect(self, in_flight: InFlight) -> None:
        sessions = self._launched.pop(id(in_flight))
        try:
            output: StepOutput = self._executor.collect(in_flight)
        except StepFailed as error:
            self._fail_step(sessions, error)
            return
        for session, chunk, result in zip(sessions, in_flight.batch.chunks, output.chunks, strict=True):
            if not chunk.is_decode:
                self._prompt_tokens += len(chunk.tokens)
            if session is None or session.finished is not None:
                continue  # it ended while this step was in flight: the row was wasted
            if result.error is not None:
                self._refuse(session, chunk, result)
                continue
            session.settle(chunk)
            if result.prompt_logprobs is not None:
                session.record_prompt_logprobs(chunk.position, result.prompt_logprobs)
            if result.pooled is not None:
                session.record_pooled(chunk, result.pooled)
            if result.token_ids:
                self._accept(session, result)
            elif session.request.max_new_tokens == 0 and session.num_settled == session.prompt_len:
                self._finish_prompt(session)

    def _refuse(self, session: Session, chunk: Chunk, result: ChunkOutput) -> None:
        """End one session of a step whose others stand. An answer that fills its context is long, not broken (X-10)."""
        is_full = chunk.position + len(chunk.tokens) > self._executor.max_session_tokens
        if is_full and len(session.tokens) > session.prompt_len:
            self._finish(session, "length")
        else:
            self._rows_failed += session.draws
            self._finish(session, "failed", error=result.error, code=result.error_code)

    def _finish_prompt(self, session: Session) -> None:
        """All of the prompt was run, and nothing is drawn."""
        if session.request.pooling is not None and session.embedding() is None:
            error = "the model's hidden states are not finite: there is no embedding"
            self._finish(session, "failed", error=error, code="step_failed")
        else:
            self._finish(session, "length")

    def _accept(self, session: Session, result: ChunkOutput) -> None:
        """Give each draw to its choice. A stem's draws beyond the first become sessions of their own here."""
        session.is_suspect = False
        if session.draws == 1 and not session.cancelled_draws:
            self._advance(session, 0, result)
            return
        forks = session.draws - 1
        session.draws = 1
        for index in range(1, forks + 1):
            self._fork(session, index, result)
        self._advance(session, 0, result)
        for index in session.cancelled_draws:
            self.cancel(session.request.request_id, index)

    def _fork(self, stem: Session, index: int, result: ChunkOutput) -> None:
        """Choice `index` shares the stem's prompt cells and goes on from its own first token."""
        request = stem.request
        fork = Session(
            request=request,
            index=index,
            arrival=stem.arrival,
            seed=choice_seed(stem.seed, index),
            draws=1,
            tokens=list(request.prompt_token_ids),
            num_in_flight=1,
            cached_tokens=stem.cached_tokens,
        )
        self._requests[request.request_id].append(fork)
        if not self._advance(fork, index, result):
            return
        try:
            if stem.executor_id is None:
                raise SessionsExhausted("the stem was preempted while its first tokens were in flight")
            self._prefixes.fork(stem, fork)
        except SessionsExhausted:
            self._scheduler.add_waiting(fork)  # it computes the prompt again when a session is free
            return
        except DeviceLost:
            raise
        except Exception as error:
            self._fail_alone(fork, error)
            return
        self._scheduler.add_running(fork)

    def _advance(self, session: Session, draw: int, result: ChunkOutput) -> bool:
        """Append draw `draw` of the chunk to the session and report it; whether the session goes on."""
        token_id = result.token_ids[draw]
        self._generated_tokens += 1
        finish = session.accept(token_id)
        logprobs = None if result.logprobs is None else (result.logprobs[draw],)
        if finish is None:
            self._report(session, (token_id,), logprobs)
            return True
        self._finish(session, finish, token_ids=(token_id,), logprobs=logprobs)
        return False

    # --- ends -------------------------------------------------------------------------------------------------------

    def _fail_step(self, sessions: list[Session | None], error: StepFailed) -> None:
        """What the step made of its sessions is in doubt, and so is what was launched behind it for them (D8).

        Each begins anew with the tokens it had, alone until it has got through a draw: the one that a step fails of
        ends by itself, and the others go on as if nothing had been.
        """
        self._steps_failed += 1
        for session in sessions:
            if session is None or session.finished is not None:
                continue
            for launched in self._launched.values():
                launched[:] = [None if other is session else other for other in launched]
            if session.is_suspect or session.failed_steps == MAX_FAILED_STEPS:
                self._finish(session, "failed", error=str(error), code="step_failed")
            else:
                self._prefixes.close(session, keep=False)
                session.suspect()
                self._scheduler.send_back(session)

    def _fail_alone(self, session: Session, error: Exception) -> None:
        self._rows_failed += session.draws
        text = f"the request could not be run: {type(error).__name__}: {error}"
        self._finish(session, "failed", error=text, code="step_failed")

    def _finish(
        self,
        session: Session,
        finish: FinishReason,
        *,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        error: str | None = None,
        code: ErrorCode | None = None,
    ) -> None:
        """Release the session and report its end, for each choice that it still stands for."""
        if finish == "failed":
            name = session.request.logged_as or session.request.request_id
            _log.warning("choice %d failed (%s): %s", session.index, code, error, extra={"request_id": name})
        session.finished = finish
        self._prefixes.close(session, keep=code not in ("step_failed", "not_finite"))
        self._prefixes.forget(session)
        self._scheduler.remove(session)
        open_choices = self._requests[session.request.request_id]
        open_choices.remove(session)
        if not open_choices:
            del self._requests[session.request.request_id]
            self._deadlines.pop(session.request.request_id, None)
            self._queue_deadlines.pop(session.request.request_id, None)
        for index in range(session.index, session.index + session.draws):
            self._report(session, token_ids, logprobs, index=index, finish=finish, error=error, code=code)

    def _report(
        self,
        session: Session,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] | None,
        *,
        index: int | None = None,
        finish: FinishReason | None = None,
        error: str | None = None,
        code: ErrorCode | None = None,
    ) -> None:
        index = session.index if index is None else index
        is_embedded = session.request.pooling is not None and finish == "length"
        first, session.reported = not session.reported, True
        self._updates.append(
            Update(
                request_id=session.request.request_id,
                index=index,
                token_ids=token_ids,
                logprobs=logprobs,
                prompt_logprobs=tuple(session.prompt_logprobs) if first and session.prompt_logprobs else None,
                cached_tokens=(session.cached_tokens or 0) if first else None,
                queued_s=session.queued_s if first else None,
                finish=finish,
                stop_token_id=token_ids[-1] if finish == "stop" else None,
                error=error,
                error_code=code,
                embedding=session.embedding() if is_embedded else None,
            )
        )
