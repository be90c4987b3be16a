"""The last steps, for someone who looks. One append a step while nobody does; the rest is worked out when asked."""

from __future__ import annotations

from collections import deque

from engine.executor import InFlight
from engine.types import Batch
from engine.view import ViewedStep

KEPT_STEPS = 32


class RecentSteps:
    """Engine thread only. Keeps the batches of `KEPT_STEPS` steps, no results and nothing of the device's."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, Batch, tuple[tuple[str, int, int], ...], float, float]] = deque(maxlen=KEPT_STEPS)

    def add(self, number: int, ran: InFlight, ended_s: float, duration_s: float) -> None:
        """A step was collected, or failed. ended_s: by the loop's clock."""
        self._steps.append((number, ran.batch, ran.forwards, ended_s, duration_s))

    def behind(self, number: int, now_s: float) -> tuple[ViewedStep, ...]:
        """Those with a higher number, oldest first."""
        return tuple(
            ViewedStep(
                number=of,
                age_s=now_s - ended_s,
                duration_s=duration_s,
                sessions=tuple(chunk.session_id for chunk in batch.chunks),
                counts=tuple(len(chunk.tokens) for chunk in batch.chunks),
                num_decodes=sum(chunk.is_decode for chunk in batch.chunks),
                forwards=forwards,
            )
            for of, batch, forwards, ended_s, duration_s in self._steps
            if of > number
        )
