"""The engine's life as the API sees it: loading, open, draining, down, and up again.

Owns the decision whether a request may come in now, the end of an engine that hangs, the restart of one that died and
the end of restarting, and the measure of a stall.
Event-loop thread only. It knows phases and errors, not routes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from engine.client import EngineClient, EnginePhase
from engine.errors import CellserveError, EngineUnavailable
from engine.types import EngineInfo, EngineStats
from server import errors
from server.errors import ApiError

_TICK_S = 0.25
_LONGEST_RESTART_S = 30.0
_WARM_UP_STEPS = 16
"""Steps of a new engine that may each meet something to compile."""
_STALL_FLOOR_S = 20.0
_STALL_FACTOR = 10.0
_STEP_TIMES = 240
"""Ticks remembered as "recent": one minute."""

Progress = dict[str, str | int]
"""{"phase", "done", "of"}; done and of only while something is counted."""

_log = logging.getLogger("cellserve.server")


@dataclass(frozen=True)
class Patience:
    """How long an engine may be silent over its work, and how often one may follow another."""

    step_s: float = 120.0
    warm_up_s: float = 600.0
    """For each of an engine's first steps, which may compile."""
    max_restarts: int = 3
    restart_window_s: float = 600.0


class Lifecycle:
    """One for each app. `run` is its task; everything else may be asked at any time."""

    def __init__(
        self,
        client: EngineClient,
        on_ready: Callable[[EngineInfo], Awaitable[None]],
        patience: Patience = Patience(),
    ) -> None:
        """on_ready: prepares what needs the loaded model; the API opens when it has returned."""
        self._client = client
        self._on_ready = on_ready
        self._patience = patience
        self._deaths_s: deque[float] = deque(maxlen=patience.max_restarts + 1)
        self._has_given_up = asyncio.Event()
        self._num_to_drain = 0
        self._is_open = False
        self._is_draining = False
        self.step_times = StepTimes()
        self._first_load_ended = asyncio.Event()
        self._failure: CellserveError | None = None

    async def run(self) -> None:
        """Start the engine, then keep it running until cancelled. A failed *first* load ends this, and giving up."""
        self._client.supervise()
        try:
            await self._load()
        except CellserveError as error:
            self._failure = error
            return
        finally:
            self._first_load_ended.set()
        while not self._has_given_up.is_set():
            await asyncio.sleep(_TICK_S)
            self.step_times.observe(self._client.stats)
            self._end_hung()
            if self._client.phase.name == "dead" and not self._is_draining:
                await self._restart()

    async def wait_loaded(self) -> EngineInfo:
        """Wait for the end of the first load. Raises the ConfigError, ModelError or EngineUnavailable that ended it."""
        await self._first_load_ended.wait()
        if self._failure is not None:
            raise self._failure
        return self._client.info

    async def wait_given_up(self) -> EngineUnavailable:
        """Return, when engines have died too often for another one, what there is to say about it."""
        await self._has_given_up.wait()
        limit, window_s = self._patience.max_restarts, self._patience.restart_window_s
        return EngineUnavailable(
            f"the engine stopped {limit + 1} times within {window_s:g} s, and --max-restarts is {limit}: "
            f"no other one is started. The last reason: {self._client.phase.reason}"
        )

    def refusal(self) -> ApiError | None:
        """What an API request is told now; None while it may come in."""
        if self._is_draining:
            return errors.draining()
        match self._client.phase.name:
            case "ready" if self._is_open:
                return None
            case "starting" | "ready":
                return errors.loading()
            case "draining":
                return errors.draining()
            case "dead":
                return errors.engine_unavailable()

    def progress(self) -> Progress:
        """For whoever watches a start."""
        return self._told(self._client.phase)

    def progress_changes(self) -> AsyncIterator[Progress]:
        """`progress` at every change from this call on, none left out. Never ends by itself."""
        phases = self._client.phases()

        async def told() -> AsyncIterator[Progress]:
            async for phase in phases:
                yield self._told(phase)

        return told()

    def _told(self, phase: EnginePhase) -> Progress:
        if self._is_draining:
            left = min(self._client.num_outstanding, self._num_to_drain)
            return {"phase": "draining", "done": self._num_to_drain - left, "of": self._num_to_drain}
        if phase.name == "starting":
            counted: Progress = {"done": phase.done, "of": phase.of} if phase.of else {}
            return {"phase": phase.text or "loading", **counted}
        if phase.name == "ready" and not self._is_open:
            return {"phase": "loading the tokenizer"}
        return {"phase": phase.name}

    def is_stalled(self) -> bool:
        """Work is waiting and the engine has shown no sign of life for max(20 s, 10 x the slowest recent step).

        Sooner where --step-timeout is shorter; while an engine may still compile, only when that takes too long.
        """
        silence_s = max(_STALL_FLOOR_S, _STALL_FACTOR * self.step_times.slowest_s)
        limit_s = self._silence_limit_s()
        return self._client.stalled_s > (limit_s if self._is_warming_up() else min(silence_s, limit_s))

    def _is_warming_up(self) -> bool:
        return self._client.num_steps < _WARM_UP_STEPS

    def _silence_limit_s(self) -> float:
        """What no step takes: neither the options nor this machine's own steps allow for it."""
        limit_s = max(self._patience.step_s, _STALL_FACTOR * self.step_times.slowest_s)
        return max(self._patience.warm_up_s, limit_s) if self._is_warming_up() else limit_s

    def is_hung(self) -> bool:
        """The silence over its work has lasted longer than any step may take."""
        return self._client.stalled_s > self._silence_limit_s()

    def _end_hung(self) -> None:
        silence_s = self._client.stalled_s
        if self.is_hung():
            name = "--warm-up-timeout" if self._is_warming_up() else "--step-timeout"
            self._client.end_hung(f"no step has finished for {silence_s:.1f} s, which {name} does not allow")

    async def drain(self, timeout_s: float) -> None:
        """Refuse what is new from now on, and return when all that runs has finished or was told that time is up.

        A second call with a shorter time cuts the first one short.
        """
        if not self._is_draining:
            self._num_to_drain = self._client.num_outstanding
        self._is_draining = True
        await self._client.close(timeout_s)

    async def _load(self) -> None:
        try:
            await self._client.start()
            await self._on_ready(await self._client.wait_ready())
        except (CellserveError, asyncio.CancelledError):
            raise
        except Exception as error:  # the edge of a start: whatever it was, the start failed
            _log.exception("the engine could not be started")
            raise EngineUnavailable(f"the engine could not be started: {error}") from error
        self._is_open = True

    async def _restart(self) -> None:
        """Another engine, and another when that one cannot be loaded, until one runs or the restarts are used up."""
        self._is_open = False
        while True:
            now = time.monotonic()
            self._deaths_s.append(now)
            recent = [at for at in self._deaths_s if now - at <= self._patience.restart_window_s]
            if len(recent) > self._patience.max_restarts:
                self._client.give_up()
                self._has_given_up.set()
                return
            # At once behind a first death, for clients wait; then ever later, for the reason may take a while to pass.
            delay_s = 0.0 if len(recent) == 1 else min(2.0 ** (len(recent) - 2), _LONGEST_RESTART_S)
            _log.error("the engine stopped (%s); it starts again in %.0f s", self._client.phase.reason, delay_s)
            await asyncio.sleep(delay_s)
            if self._is_draining:
                return
            try:
                await self._load()
            except CellserveError as error:
                _log.error("the engine did not start: %s", error)
            else:
                _log.warning("the engine runs again")
                return


class StepTimes:
    """How slow steps have lately been, from snapshots of the engine's counters."""

    def __init__(self) -> None:
        self._last = EngineStats()
        self._means_s: deque[float] = deque([0.0], maxlen=_STEP_TIMES)

    @property
    def slowest_s(self) -> float:
        """Of the means between two snapshots, the largest of the last minute."""
        return max(self._means_s)

    def observe(self, stats: EngineStats) -> None:
        steps = stats.steps - self._last.steps
        time_s = stats.step_time_s - self._last.step_time_s
        self._last = stats
        # A restarted engine counts from zero; a minute without a step keeps what was last known.
        if steps > 0 and time_s >= 0:
            self._means_s.append(time_s / steps)
