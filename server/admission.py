"""What may be inside this server at once: places for sequences, and prompt tokens in the queue. Reserved before a
prompt is tokenised. Who is refused is told when to come again, each a moment of its own.

Owns two sums, places taken and tokens queued. A prompt's tokens are queued from its reservation, where they are an
estimate, until the engine has run it. Event-loop thread only, so that reserving needs no lock and a refusal costs
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
from server.shares import Share

BYTES_PER_TOKEN = 3
"""Of text, for the estimate: low, for a refusal later than need be costs more than one that comes too early."""

_QUEUED_POOLS = 4
_QUEUED_TOKENS_PER_PLACE = 512
_SHORTEST_RETRY_S = 0.9
_LONGEST_RETRY_S = 30.0
_LARGEST_JITTER = 1.1
_EVENTS_REMEMBERED = 64


def default_queued_tokens(kv_cells: int, places: int) -> int:
    """The bound of the queue where none is given: four times the K/V cache, and 512 tokens for each place at least."""
    return max(_QUEUED_POOLS * kv_cells, _QUEUED_TOKENS_PER_PLACE * places)


def estimated_tokens(text: str) -> int:
    """Of a text that nobody has tokenised, by its bytes."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return size // BYTES_PER_TOKEN + 1


class Reservation:
    """Places and queued tokens of one request, whatever its number of prompts and choices.

    A context manager, and `release()` may also be called early or twice. A handler that returns a streaming response
    must give the reservation to what sends it, and release there in a `finally` around the whole sending: a generator
    that was never started runs no `finally` of its own.
    """

    def __init__(self, admission: Admission, slots: int, tokens: int, account: Account | None) -> None:
        self._admission = admission
        self._account = account
        self._since_s = admission._clock()
        self.slots = slots
        self.tokens = tokens
        """Of its prompts, those that are queued."""

    def correct(self, tokens: int) -> None:
        """The prompts were tokenised: `tokens` takes the estimate's place.

        Raises ApiError where the queue does not hold them; the reservation is as it was then.
        """
        if self.slots:
            self._admission._correct(self, tokens)

    def computed(self, tokens: int) -> None:
        """The engine has run a prompt of so many tokens: they are not queued any more."""
        self._admission._dequeue(self, min(tokens, self.tokens), is_computed=True)

    def spend(self, tokens: int) -> None:
        """Charge them to the key that asked; after `release` nothing."""
        if self.slots and self._account is not None:
            self._account.spend(tokens)

    def release(self) -> None:
        self._admission._dequeue(self, self.tokens, is_computed=False)
        slots, self.slots = self.slots, 0
        if slots:
            self._admission._give_back(slots, self._since_s)
            if self._account is not None:
                self._account.leave()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class Admission:
    """Grants at once or refuses at once; nothing waits here."""

    def __init__(
        self,
        capacity: int,
        *,
        max_queued_tokens: int | None = None,
        overload_status: int = 429,
        on_refused: Callable[[str], None] = lambda reason: None,
        share: Share | None = None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = lambda: random.uniform(1.0, _LARGEST_JITTER),
    ) -> None:
        """capacity: sequences running plus waiting. max_queued_tokens: prompt tokens that wait to be run; None: any.

        on_refused: told the reason of each refusal, for the counters. share: with other processes that admit to the
        same engine: the bounds are of all together.
        """
        self._share = share
        self.capacity = capacity
        self.max_queued_tokens = max_queued_tokens
        self.in_use = 0
        self.queued_tokens = 0
        self._overload_status = overload_status
        self._on_refused = on_refused
        self._clock = clock
        self._jitter = jitter
        self._releases: deque[tuple[float, int]] = deque(maxlen=_EVENTS_REMEMBERED)
        """(seconds that they were held, places)."""
        self._throughput = _Throughput(clock)
        self._last_turn_s = 0.0
        """The moment at which the last one that was refused may come again."""

    def reserve(self, slots: int, account: Account | None = None, *, tokens: int = 0) -> Reservation:
        """Take n x prompts places and room for `tokens` prompt tokens, all or none.

        tokens: an estimate, which `Reservation.correct` replaces. One beyond the whole queue is taken for all of it, so
        that such a request gets in when the queue is empty. account: of the key that asks, where keys are limited.

        Raises ApiError: 400 request_too_large when the places could never be free, 429 queue_full when they, or the
        queue's room, are not now, 429 rate_limit_exceeded when the key has had its share.
        """
        if slots > self.capacity:
            self._on_refused("request_too_large")
            raise errors.request_too_large(
                f"the request asks for {slots} sequences (prompts x n), but this server holds at most {self.capacity}"
            )
        self._check_places(slots)
        if self.max_queued_tokens is not None:
            tokens = min(tokens, self.max_queued_tokens)
            self._check_queue(tokens)
        if account is not None:
            try:
                account.enter()
            except errors.ApiError as error:
                self._on_refused(error.code)
                raise
        self.in_use += slots
        if self.in_all[0] <= self.capacity // 2:
            self._last_turn_s = 0.0  # of those that were refused nobody came, or all were let in
        self._tell()
        reservation = Reservation(self, slots, 0, account)
        self._enqueue(reservation, tokens)
        return reservation

    def check_any(self) -> None:
        """Raise ApiError 429 while not even the smallest request would get in: nobody need read what is asked for."""
        self._check_places(1)
        self._check_queue(1)

    def retry_after_s(self, slots: int = 1) -> float:
        """Seconds until what is queued should be run, and `slots` places free, in [0.9, 30], with jitter."""
        return self._spread(max(self._throughput.seconds_for(self.queued_tokens), self._seconds_for(slots)))

    def _turn_s(self, slots: int, tokens: int) -> float:
        """`retry_after_s` for one that is refused these now: behind all that were refused before it.

        Clients come back as they are told. Told the same second they come all at once, every second, hold up the event
        loop and get no more by it; told one after another, as places come free, they are no more than can be let in.
        """
        now = self._clock()
        each_s = max(self._seconds_for(slots), self._throughput.seconds_for(tokens))
        least_s = max(self._throughput.seconds_for(self.queued_tokens), self._seconds_for(slots), _SHORTEST_RETRY_S)
        self._last_turn_s = min(max(now + least_s, self._last_turn_s + each_s), now + _LONGEST_RETRY_S)
        return self._spread(self._last_turn_s - now)

    def _seconds_for(self, slots: int) -> float:
        """Until so many places come free: as many do in the time that one is held as are held. 0 while none was."""
        held_s = sum(held_s * slots for held_s, slots in self._releases)
        return slots * held_s / max(1, sum(slots for _, slots in self._releases)) / max(1, self.in_use)

    def _spread(self, wait_s: float) -> float:
        """So that those who are told the same do not come in the same moment."""
        return min(max(wait_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S / _LARGEST_JITTER) * self._jitter()

    def _check_places(self, slots: int) -> None:
        in_use = self.in_use + self._of_others()[0]
        if in_use + slots > self.capacity:
            self._on_refused("queue_full")
            raise errors.queue_full(
                f"the server is full: {in_use} of {self.capacity} sequences are taken, {slots} more asked for",
                self._turn_s(slots, 0),
                status=self._overload_status,
            )

    def _check_queue(self, tokens: int) -> None:
        limit = self.max_queued_tokens
        queued = self.queued_tokens + self._of_others()[1]
        if limit is not None and queued + tokens > limit:
            self._on_refused("queue_full")
            raise errors.queue_full(
                f"the queue is full: {queued} of {limit} prompt tokens wait to be run, {tokens} more asked for",
                self._turn_s(0, tokens),
                status=self._overload_status,
            )

    def _correct(self, reservation: Reservation, tokens: int) -> None:
        estimate, limit = reservation.tokens, self.max_queued_tokens
        if limit is not None and tokens > limit:
            self._on_refused("request_too_large")
            raise errors.request_too_large(
                f"the request's prompts have {tokens} tokens, but this server queues at most {limit} "
                "(--max-queued-tokens): send fewer prompts at once"
            )
        if tokens > estimate:
            self._check_queue(tokens - estimate)
            self._enqueue(reservation, tokens - estimate)
        else:
            self._dequeue(reservation, estimate - tokens, is_computed=False)

    def _enqueue(self, reservation: Reservation, tokens: int) -> None:
        if tokens and not self.queued_tokens:
            self._throughput.begin()
        reservation.tokens += tokens
        self.queued_tokens += tokens
        self._tell()

    def _dequeue(self, reservation: Reservation, tokens: int, *, is_computed: bool) -> None:
        if not tokens:
            return
        reservation.tokens -= tokens
        self.queued_tokens -= tokens
        self._tell()
        self._throughput.left(tokens if is_computed else 0, is_empty=not self.queued_tokens)

    def _give_back(self, slots: int, since_s: float) -> None:
        self.in_use -= slots
        self._tell()
        self._releases.append((self._clock() - since_s, slots))

    @property
    def in_all(self) -> tuple[int, int]:
        """(sequences, prompt tokens that wait) of all processes that admit to the engine."""
        slots, tokens = self._of_others()
        return self.in_use + slots, self.queued_tokens + tokens

    def _of_others(self) -> tuple[int, int]:
        """(sequences, prompt tokens that wait) of the other processes."""
        return (0, 0) if self._share is None else self._share.others()

    def _tell(self) -> None:
        if self._share is not None:
            self._share.tell(self.in_use, self.queued_tokens)


class _Throughput:
    """Tokens a second that are run, over the latest of the time in which some were queued: idleness is no slowness."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._events: deque[tuple[float, int]] = deque(maxlen=_EVENTS_REMEMBERED)
        """(seconds since the event before it, tokens)."""
        self._since_s = clock()

    def begin(self) -> None:
        """The queue was empty, and is not any more."""
        self._since_s = self._clock()

    def left(self, tokens: int, *, is_empty: bool) -> None:
        """tokens: that were run; 0 when others gave up. is_empty: the queue, from here on."""
        if tokens or is_empty:
            now = self._clock()
            self._events.append((now - self._since_s, tokens))
            self._since_s = now

    def seconds_for(self, tokens: int) -> float:
        """0 while nothing is known."""
        done = sum(tokens for _, tokens in self._events)
        return tokens * sum(seconds for seconds, _ in self._events) / done if done else 0.0
