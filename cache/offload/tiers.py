"""What tiers below the pool have in common: their interface, their faults, and a breaker.

Knows no storage. A tier may lose anything at any time; what it may not do is return wrong bytes or keep anybody waiting
past its own deadlines.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

from cache.geometry import CacheError
from cache.offload.chunks import Chunk
from cache.offload.pace import Pace
from cache.offload.records import BadRecord

Answer = TypeVar("Answer")


class TierFault(CacheError):
    """The tier itself failed: gone, broken or too slow. Says nothing about the chunk."""


@dataclass(frozen=True, slots=True)
class TierStatus:
    """A snapshot of one tier; bytes where not said otherwise."""

    name: str
    capacity_bytes: int | None
    """None: somebody else decides."""
    used_bytes: int | None
    objects: int | None
    holds: int = 0
    """Users that forbid an object's eviction, over all objects."""


@dataclass(slots=True)
class Traffic:
    """What was asked of one tier and what it moved. Sums only grow; seconds add up calls side by side.

    Counted under its owner's lock.
    """

    hits: int = 0
    """Objects that were wanted and came from here."""
    misses: int = 0
    """Objects that were wanted and were not here."""
    errors: int = 0
    """Calls that failed or were too slow, and objects that did not verify."""
    loaded_bytes: int = 0
    stored_bytes: int = 0
    load_s: float = 0.0
    store_s: float = 0.0


class Tier(Protocol):
    """Storage below host memory. `load` from any I/O thread, several at once; `store` from one thread."""

    name: str

    def known(self, chunks: Sequence[Chunk]) -> int:
        """How many leading chunks it seems to have. No promise. Raises TierFault."""

    def may_have(self, chunk: Chunk) -> bool:
        """False only where it certainly is not there. Asks nobody, so that the engine thread may ask it."""

    def load(self, chunk: Chunk, into: memoryview) -> None:
        """Read the chunk's payload into host memory and verify it.

        Raises BadRecord, after which the tier has forgotten the chunk, or TierFault. `into` holds garbage then.
        """

    def store(self, chunk: Chunk, payload: memoryview) -> bool:
        """Keep a copy. False: there is no room, or no parent for it. Raises TierFault."""

    def status(self) -> TierStatus:
        """Cheap: asks nobody."""

    def close(self) -> None:
        """Nothing may be under way."""


class Breaker:
    """Stops asking a tier that fails: after 3 faults in a row for 5 s, then for twice as long each time, up to 300 s.

    When the time is up one call is let through as a probe; it decides. Any thread.
    """

    def __init__(
        self, clock: Callable[[], float], *, failures: int = 3, first_s: float = 5.0, longest_s: float = 300.0
    ) -> None:
        self._clock = clock
        self._failures = failures
        self._first_s = first_s
        self._longest_s = longest_s
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._pause_s = 0.0  # 0: closed
        self._closed_until = 0.0  # when the next probe may go
        self._is_probing = False

    @property
    def state(self) -> Literal["closed", "open", "half-open"]:
        with self._lock:
            if not self._pause_s:
                return "closed"
            return "half-open" if self._is_probing or self._clock() >= self._closed_until else "open"

    def allows(self) -> bool:
        """Whether to call now. True must be followed by `succeeded` or `failed`."""
        with self._lock:
            if not self._pause_s:
                return True
            if self._is_probing or self._clock() < self._closed_until:
                return False
            self._is_probing = True
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._in_a_row = 0
            self._pause_s = 0.0
            self._is_probing = False

    def failed(self) -> None:
        with self._lock:
            self._in_a_row += 1
            if self._is_probing or (not self._pause_s and self._in_a_row >= self._failures):
                self._pause_s = min(2 * self._pause_s or self._first_s, self._longest_s)
                self._closed_until = self._clock() + self._pause_s
            self._is_probing = False


class Guarded:
    """A tier behind its breaker: faults are counted and end here, slow answers count as faults. Any thread."""

    def __init__(self, tier: Tier, clock: Callable[[], float], *, slow_s: float = 1.0) -> None:
        """slow_s: a call that takes longer is a fault of the tier, though its answer is used."""
        self.tier = tier
        self.breaker = Breaker(clock)
        self.pace = Pace(clock)
        self.counts: Counter[str] = Counter()
        self._traffic = Traffic()
        self._lock = threading.Lock()  # guards both
        self._clock = clock
        self._slow_s = slow_s

    def traffic(self) -> Traffic:
        """A snapshot."""
        with self._lock:
            return replace(self._traffic)

    def is_worth(self, seconds: float) -> bool:
        """Whether to ask for an object that must not take longer; a no is counted."""
        if self.pace.is_worth(seconds):
            return True
        self._count("slower than computing", errors=0)
        return False

    def known(self, chunks: Sequence[Chunk]) -> int:
        """0 while the breaker is open, or on a fault. What it lacks is counted as missed."""
        found = self._call(lambda: self.tier.known(chunks))
        if found is not None and found < len(chunks):
            with self._lock:
                self._traffic.misses += len(chunks) - found
        return found if found is not None else 0

    def may_have(self, chunk: Chunk) -> bool:
        """As of the tier; a no is counted as missed."""
        found = self.tier.may_have(chunk)
        if not found:
            with self._lock:
                self._traffic.misses += 1
        return found

    def load(self, chunk: Chunk, into: memoryview) -> bool:
        """Whether `into` holds the verified payload."""
        started = self._clock()
        is_loaded = self._call(lambda: self._load(chunk, into)) is True
        if is_loaded:
            with self._lock:
                self.counts["loaded"] += 1
                self._traffic.hits += 1
                self._traffic.loaded_bytes += len(into)
                self._traffic.load_s += self._clock() - started
        return is_loaded

    def store(self, chunk: Chunk, payload: memoryview) -> bool:
        """Whether a copy is kept."""
        started = self._clock()
        kept = self._call(lambda: self.tier.store(chunk, payload))
        with self._lock:
            if kept is not None:
                self.counts["stored" if kept else "no room"] += 1
            if kept:
                self._traffic.stored_bytes += len(payload)
                self._traffic.store_s += self._clock() - started
        return kept is True

    def _load(self, chunk: Chunk, into: memoryview) -> bool:
        try:
            self.tier.load(chunk, into)
        except BadRecord as error:  # an answer, so no fault of the tier
            with self._lock:
                self.counts[error.reason] += 1
                if error.reason == "missing":
                    self._traffic.misses += 1
                else:
                    self._traffic.errors += 1
            return False
        return True

    def _call(self, call: Callable[[], Answer]) -> Answer | None:
        if not self.breaker.allows():
            self._count("breaker open", errors=0)
            return None
        started = self._clock()
        try:
            answer = call()
        except TierFault:
            self._count("fault", errors=1)
            self.breaker.failed()
            return None
        except BaseException:  # a bug, which somebody above logs; what the breaker let through has failed all the same
            self._count("bug", errors=1)
            self.breaker.failed()
            raise
        if self._clock() - started > self._slow_s:
            self._count("slow", errors=1)
            self.breaker.failed()
        else:
            self.breaker.succeeded()
        return answer

    def _count(self, what: str, *, errors: int) -> None:
        with self._lock:
            self.counts[what] += 1
            self._traffic.errors += errors
