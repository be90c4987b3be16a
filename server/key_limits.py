"""What one key may ask for: requests a minute, tokens a minute, requests at once. Each key has an account of its own.

Knows neither HTTP nor prompts. Event-loop thread only, as everything that admits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from server import errors


@dataclass(frozen=True)
class KeyLimits:
    """None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None

    @property
    def is_off(self) -> bool:
        return self.requests_per_minute is None and self.tokens_per_minute is None and self.concurrent is None


class Account:
    """One key's. A request enters, spends its prompt's tokens, then its answer's, and leaves."""

    def __init__(self, limits: KeyLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._requests = _Bucket(limits.requests_per_minute, clock)
        self._tokens = _Bucket(limits.tokens_per_minute, clock)
        self._inside = 0

    def enter(self) -> None:
        """Count one request in, or raise ApiError 429 and count nothing.

        Tokens are known when they are spent: a request comes in while any are left, and a debt is waited off.
        """
        limits = self._limits
        if limits.concurrent is not None and self._inside >= limits.concurrent:
            raise errors.rate_limit_exceeded(f"this key has {self._inside} requests at once, its limit", 1.0)
        for bucket, least, unit in ((self._requests, 1.0, "requests"), (self._tokens, 1.0, "tokens")):
            wait_s = bucket.seconds_until(least)
            if wait_s > 0:
                raise errors.rate_limit_exceeded(f"this key's limit is {bucket.per_minute} {unit} a minute", wait_s)
        self._requests.spend(1)
        self._inside += 1

    def spend(self, tokens: int) -> None:
        self._tokens.spend(tokens)

    def leave(self) -> None:
        self._inside -= 1


class Accounts:
    """By key, made when a key first comes. Only keys that were let in get here, so there are few."""

    def __init__(self, limits: KeyLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._by_key: dict[str, Account] = {}

    def of(self, key: str | None) -> Account | None:
        """None where nothing is limited."""
        if key is None or self._limits.is_off:
            return None
        return self._by_key.setdefault(key, Account(self._limits, self._clock))


class _Bucket:
    """Holds a minute's worth at most and fills evenly. May be overdrawn."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute or 0)
        self._at_s = clock()

    def seconds_until(self, least: float) -> float:
        """How long until it holds `least`; 0 when it does."""
        if self.per_minute is None:
            return 0.0
        now = self._clock()
        self._level = min(self._level + (now - self._at_s) * self.per_minute / 60, float(self.per_minute))
        self._at_s = now
        # A hair less than a whole one counts: a client that waited as it was told must not be refused by rounding.
        return max(0.0, least - 1e-6 - self._level) * 60 / self.per_minute

    def spend(self, amount: int) -> None:
        self._level -= amount
