"""Slots: how many sequences may be inside this server at once. Reserved before a prompt is tokenised.

Owns one number, the slots in use. Event-loop thread only, so that reserving needs no lock and a refusal costs
microseconds. The engine's client has the last word (`QueueFull`); this is the cheap first one.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from server import errors
from server.key_limits import Account

_LONGEST_RETRY_S = 30.0
_RELEASES_REMEMBERED = 64


class Reservation:
    """Slots held by one request, whatever its number of prompts and choices.

    A context manager, and `release()` may also be called early or twice. A handler that returns a streaming response
    must give the reservation to what sends it, and release there in a `finally` around the whole sending: a generator
    that was never started runs no `finally` of its own.
    """

    def __init__(self, admission: Admission, slots: int, account: Account | None) -> None:
        self._admission = admission
        self._account = account
        self.slots = slots

    def spend(self, tokens: int) -> None:
        """Charge them to the key that asked; after `release` nothing."""
        if self.slots and self._account is not None:
            self._account.spend(tokens)

    def release(self) -> None:
        slots, self.slots = self.slots, 0
        if slots:
            self._admission._give_back(slots)
            if self._account is not None:
                self._account.leave()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class Admission:
    """Grants slots at once or refuses at once; nothing waits here."""

    def __init__(
        self,
        capacity: int,
        *,
        overload_status: int = 429,
        on_refused: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = lambda: random.uniform(0.9, 1.1),
    ) -> None:
        """capacity: sequences running plus waiting. on_refused: told the reason of each refusal, for the counters."""
        self.capacity = capacity
        self.in_use = 0
        self._overload_status = overload_status
        self._on_refused = on_refused
        self._clock = clock
        self._jitter = jitter
        self._releases: deque[tuple[float, int]] = deque(maxlen=_RELEASES_REMEMBERED)

    def reserve(self, slots: int, account: Account | None = None) -> Reservation:
        """Take n x prompts slots, all or none. account: of the key that asks, where keys are limited.

        Raises ApiError: 400 request_too_large when they could never be free, 429 queue_full when they are not now,
        429 rate_limit_exceeded when the key has had its share.
        """
        if slots > self.capacity:
            self._on_refused("request_too_large")
            raise errors.request_too_large(
                f"the request asks for {slots} sequences (prompts x n), but this server holds at most {self.capacity}"
            )
        if self.in_use + slots > self.capacity:
            self._on_refused("queue_full")
            raise errors.queue_full(
                f"the server is full: {self.in_use} of {self.capacity} sequences are taken, {slots} more asked for",
                self.retry_after_s(slots),
                status=self._overload_status,
            )
        if account is not None:
            try:
                account.enter()
            except errors.ApiError as error:
                self._on_refused(error.code)
                raise
        self.in_use += slots
        return Reservation(self, slots, account)

    def retry_after_s(self, slots: int = 1) -> float:
        """Seconds until `slots` should be free at the rate of the latest releases, in [1, 30], with jitter.

        The jitter keeps refused clients from coming back all in the same moment.
        """
        if not self._releases:
            return 1.0
        elapsed_s = max(self._clock() - self._releases[0][0], 1e-3)
        rate = sum(released for _, released in self._releases) / elapsed_s
        return min(max(slots / rate * self._jitter(), 1.0), _LONGEST_RETRY_S)

    def _give_back(self, slots: int) -> None:
        self.in_use -= slots
        self._releases.append((self._clock(), slots))
