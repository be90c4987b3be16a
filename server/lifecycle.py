"""The engine's life as the API sees it: loading, open, draining, down, and up again.

Owns the decision whether a request may come in now, the restart of an engine that died, and the measure of a stall.
Event-loop thread only. It knows phases and errors, not routes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from engine.client import EngineClient, EnginePhase
from engine.errors import CellserveError, EngineUnavailable
from engine.types import EngineInfo, EngineStats
from server import errors
from server.errors import ApiError

_TICK_S = 0.25
_FIRST_RESTART_S = 1.0
_LONGEST_RESTART_S = 30.0
_STALL_FLOOR_S = 20.0
_STALL_FACTOR = 10.0
_STEP_TIMES = 240
"""Ticks remembered as "recent": one minute."""

Progress = dict[str, str | int]
"""{"phase", "done", "of"}; done and of only while something is counted."""

_log = logging.getLogger("cellserve.server")


class Lifecycle:
    """One for each app. `run` is its task; everything else may be asked at any time."""

    def __init__(self, client: EngineClient, on_ready: Callable[[EngineInfo], Awaitable[None]]) -> None:
        """on_ready: prepares what needs the loaded model; the API opens when it has returned."""
        self._client = client
        self._on_ready = on_ready
        self._is_open = False
        self._is_draining = False
        self.step_times = StepTimes()
        self._first_load_ended = asyncio.Event()
        self._failure: CellserveError | None = None

    async def run(self) -> None:
        """Start the engine, then keep it running until cancelled. Only a failed *first* load ends this."""
        try:
            await self._load()
        except CellserveError as error:
            self._failure = error
            return
        finally:
            self._first_load_ended.set()
        while True:
            await asyncio.sleep(_TICK_S)
            self.step_times.observe(self._client.stats)
            if self._client.phase.name == "dead" and not self._is_draining:
                await self._restart()

    async def wait_loaded(self) -> EngineInfo:
        """Wait for the end of the first load. Raises the ConfigError, ModelError or EngineUnavailable that ended it."""
        await self._first_load_ended.wait()
        if self._failure is not None:
            raise self._failure
        return self._client.info

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
            return {"phase": "draining"}
        if phase.name == "starting":
            counted: Progress = {"done": phase.done, "of": phase.of} if phase.of else {}
            return {"phase": phase.text or "loading", **counted}
        if phase.name == "ready" and not self._is_open:
            return {"phase": "loading the tokenizer"}
        return {"phase": phase.name}

    def is_stalled(self) -> bool:
        """Work is waiting and the engine has shown no sign of life for max(20 s, 10 x the slowest recent step)."""
        return self._client.stalled_s > max(_STALL_FLOOR_S, _STALL_FACTOR * self.step_times.slowest_s)

    async def drain(self, timeout_s: float) -> None:
        """Refuse what is new from now on, and return when all that runs has finished or was told that time is up.

        A second call with a shorter time cuts the first one short.
        """
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
        self._is_open = False
        delay_s = _FIRST_RESTART_S
        while True:
            _log.error("the engine stopped (%s); it starts again in %.0f s", self._client.phase.reason, delay_s)
            await asyncio.sleep(delay_s)
            if self._is_draining:
                return
            try:
                await self._load()
            except CellserveError as error:
                _log.error("the engine did not start: %s", error)
                delay_s = min(2 * delay_s, _LONGEST_RESTART_S)
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
