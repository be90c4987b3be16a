"""One client's engines, one after another: what they leave to each other, and the sums over them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.streams import RequestStream
from engine.types import EngineStats, GenerateRequest

MAX_RUNS = 2
"""Engines that may die under one request: it may be what kills them."""


@dataclass(slots=True)
class EngineLives:
    """What became of the engines of one client so far."""

    ready: int = 0
    """Engines that were loaded."""
    hung: int = 0
    """Engines that were ended because nothing moved."""
    requests_rerun: int = 0
    """Requests that an engine took over from a dead one."""

    @property
    def restarts(self) -> int:
        return max(0, self.ready - 1)


@dataclass(slots=True)
class OpenRequest:
    """A request that was admitted and has not ended."""

    request: GenerateRequest
    stream: RequestStream
    since_s: float
    """When it was admitted, by time.monotonic()."""
    runs: int = 1
    """Engines that it was given to."""
    cancelled: frozenset[int] = frozenset()
    """Choices that the engine was told to end."""

    def again(self, now_s: float) -> GenerateRequest:
        """The request for the next engine: its deadline goes on, its time in the queue begins anew."""
        if self.request.deadline_s is None:
            return self.request
        return replace(self.request, deadline_s=max(0.0, self.request.deadline_s - (now_s - self.since_s)))


def added(earlier: EngineStats, stats: EngineStats) -> EngineStats:
    """`stats` with the sums of `earlier` in its own; what is true of one moment only is as `stats` has it."""
    if not earlier.steps:
        return stats
    calls = dict(earlier.method_calls)
    for name, count in stats.method_calls:
        calls[name] = calls.get(name, 0) + count
    return replace(
        stats,
        steps=earlier.steps + stats.steps,
        steps_failed=earlier.steps_failed + stats.steps_failed,
        prompt_tokens=earlier.prompt_tokens + stats.prompt_tokens,
        generated_tokens=earlier.generated_tokens + stats.generated_tokens,
        preemptions=earlier.preemptions + stats.preemptions,
        padding_rows=earlier.padding_rows + stats.padding_rows,
        method_calls=tuple(calls.items()),
        step_time_s=earlier.step_time_s + stats.step_time_s,
        rows_failed=earlier.rows_failed + stats.rows_failed,
    )
