"""How long a tier takes for an object, as measured, and so whether it is worth asking: K/V that comes slower than it is
computed is of no use. Knows no tier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

MIN_LOADS = 4
"""Fewer tell nothing: the first ones open connections and find caches cold."""
WEIGHT = 0.25
"""Of the last load in the mean."""
PROBE_S = 30.0
"""A tier that is too slow is tried once in so long."""
RETRY_S = 1.0
"""And sooner where it did not have what it was tried with."""


class Pace:
    """Of one tier's loads of objects of one size. Any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._mean_s = 0.0
        self._num_loads = 0
        self._next_probe = clock() + PROBE_S
        self._is_probing = False

    @property
    def load_s(self) -> float | None:
        """Seconds from the question to the verified bytes; None while nobody knows."""
        with self._lock:
            return self._mean_s if self._num_loads >= MIN_LOADS else None

    def is_worth(self, seconds: float) -> bool:
        """Whether a load takes no longer than that, as far as one can tell."""
        load_s = self.load_s
        return load_s is None or load_s <= seconds

    def take_probe(self) -> bool:
        """Whether one load may be tried of a tier that is too slow. Its time stands for all before it."""
        with self._lock:
            if self._clock() < self._next_probe:
                return False
            self._next_probe = self._clock() + PROBE_S
            self._is_probing = True
            return True

    def probe_failed(self) -> None:
        """There was nothing to measure."""
        with self._lock:
            if self._is_probing:
                self._is_probing = False
                self._next_probe = self._clock() + RETRY_S

    def measured(self, seconds: float) -> None:
        """A load took so long."""
        with self._lock:
            self._num_loads += 1
            weight = 1.0 if self._is_probing else max(WEIGHT, 1 / self._num_loads)
            self._is_probing = False
            self._mean_s += weight * (seconds - self._mean_s)
