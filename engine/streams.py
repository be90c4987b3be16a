"""One request's way back to its caller: an async iterator of `Update`, and the right to cancel.

Owned by the asyncio thread alone. A stream knows nothing of engines; its client pushes and is told when it is left.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from engine.types import Update

TAKEN_TOKENS = 64
"""The most that `RequestStream.take` gives at once."""


class RequestStream:
    """Yields updates until every choice has finished, then stops.

    Memory is bounded by the request itself: what nobody has read yet is kept as one update a choice, so a reader that
    falls behind gets fewer and longer updates, never a queue of them.

    Until `commit` the request may be run a second time by another engine. The tokens that came already are then
    expected again, compared, and not given twice.

    Leave it with `async with` or `aclose()`: a request that has not finished by then is cancelled.
    """

    def __init__(
        self,
        request_id: str,
        num_choices: int,
        cancel: Callable[[str, int | None], None],
        *,
        may_rerun: bool = False,
    ) -> None:
        self.request_id = request_id
        self.queued_s: float | None = None
        """How long the request waited before it first ran; None until that is known."""
        self._cancel = cancel
        self._open = set(range(num_choices))
        self._unread: dict[int, Update | _Backlog] = {}
        """By choice, longest unread first."""
        self._reader: asyncio.Future[None] | None = None
        self._on_news: Callable[[], None] | None = None
        self._is_left = False
        self._given = [_Given() for _ in range(num_choices)] if may_rerun else None

    @property
    def can_rerun(self) -> bool:
        """Nothing of it has left for its caller."""
        return self._given is not None

    def commit(self) -> None:
        """Something of it leaves for its caller now: from here on a second run could contradict it."""
        self._given = None

    def begin_again(self) -> None:
        """Another engine runs it from its beginning."""
        assert self._given is not None
        for given in self._given:
            given.due = len(given.tokens)

    @property
    def open_choices(self) -> frozenset[int]:
        """Choices whose last update has not come, read or unread."""
        return frozenset(self._open)

    @property
    def is_over(self) -> bool:
        """Every choice has had its last update."""
        return not self._open

    @property
    def has_unread(self) -> bool:
        return bool(self._unread)

    @property
    def num_unread(self) -> int:
        """Tokens that nobody has taken yet, an alternative of a log probability counted as one."""
        return sum(_backlog(unread).size for unread in self._unread.values())

    def when_news(self, call: Callable[[], None]) -> None:
        """Call this at every push from now on, from within it, instead of waking a reader: it must not raise.

        News that has come already is not told.
        """
        self._on_news = call

    def take(self) -> Update | None:
        """What is longest unread, or None; never waits. At most TAKEN_TOKENS tokens, so that no answer is huge."""
        if not self._unread:
            return None
        index, unread = next(iter(self._unread.items()))
        if isinstance(unread, Update) and len(unread.token_ids) <= TAKEN_TOKENS:
            del self._unread[index]
            return unread
        backlog = self._unread[index] = _backlog(unread)
        if backlog.num_tokens <= TAKEN_TOKENS:
            del self._unread[index]
        return backlog.take(TAKEN_TOKENS)

    def take_tokens(self) -> tuple[int, ...]:
        """The tokens of choice 0, where they are all that is unread of it, as nearly always; () takes nothing."""
        unread = self._unread.get(0)
        if (
            not isinstance(unread, Update)
            or unread.finish is not None
            or unread.logprobs is not None
            or unread.cached_tokens is not None
            or unread.prompt_logprobs is not None
            or len(unread.token_ids) > TAKEN_TOKENS
        ):
            return ()
        del self._unread[0]
        return unread.token_ids

    def cancel(self, index: int | None = None) -> None:
        """Ask the engine to end this choice, or all that are open; each still gets its last update, "cancelled"."""
        if self._open:
            self._cancel(self.request_id, index)

    async def aclose(self) -> None:
        """Cancel what is unfinished and yield nothing more. Repeating it does nothing."""
        self._is_left = True
        self._unread.clear()
        self._wake()
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Update:
        """One task at a time. Cancelling the wait loses nothing and cancels nothing, so it may be given a timeout."""
        while not self._unread:
            if self._is_left or not self._open:
                raise StopAsyncIteration
            assert self._reader is None, f"two tasks read the stream of {self.request_id}"
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        unread = self._unread.pop(next(iter(self._unread)))
        return unread if isinstance(unread, Update) else unread.take(unread.num_tokens)

    def push(self, update: Update) -> bool:
        """The client's side; whether this was the choice's last update. What follows a last one is dropped."""
        if update.index not in self._open:
            return False
        if update.queued_s is not None:
            self.queued_s = update.queued_s
        if self._given is not None:
            update = self._given[update.index].take(update)
        if update.finish is not None:
            self._open.remove(update.index)
        if not self._is_left and (update.token_ids or not _is_empty(update)):
            unread = self._unread.get(update.index)
            if unread is None:
                self._unread[update.index] = update
            else:
                backlog = self._unread[update.index] = _backlog(unread)
                backlog.add(update)
            self._wake()
        return update.finish is not None

    def _wake(self) -> None:
        if self._on_news is not None:
            self._on_news()
        elif self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


@dataclass(slots=True)
class _Given:
    """What a choice has been given, so that a second run goes on behind it."""

    tokens: array[int] = field(default_factory=lambda: array("q"))
    due: int = 0
    """How many of the tokens, from the end, the second run has not come to yet."""
    has_cached: bool = False
    has_prompt_logprobs: bool = False

    def take(self, update: Update) -> Update:
        """The part of the update that is new; a failure where a second run differs from the first."""
        if not (self.due or update.cached_tokens is not None or update.prompt_logprobs is not None):
            self.tokens.extend(update.token_ids)  # nearly always
            return update
        known = min(self.due, len(update.token_ids))
        start = len(self.tokens) - self.due
        self.due -= known
        is_other = tuple(self.tokens[start : start + known]) != update.token_ids[:known]
        if is_other or (self.due and update.finish in ("stop", "length")):
            error = "the second run of the request went another way than the first"
            return Update(
                update.request_id, index=update.index, finish="failed", error=error, error_code="engine_unavailable"
            )
        self.tokens.extend(update.token_ids[known:])
        is_second = self.has_cached
        self.has_cached = is_second or update.cached_tokens is not None
        had_prompt, self.has_prompt_logprobs = (
            self.has_prompt_logprobs,
            self.has_prompt_logprobs or update.prompt_logprobs is not None,
        )
        if not known and not is_second and not had_prompt:
            return update
        return replace(
            update,
            token_ids=update.token_ids[known:],
            logprobs=None if update.logprobs is None else update.logprobs[known:] or None,
            prompt_logprobs=None if had_prompt else update.prompt_logprobs,
            cached_tokens=None if is_second else update.cached_tokens,
        )


def _is_empty(update: Update) -> bool:
    """Nothing in it is news."""
    told = (update.token_ids, update.finish, update.prompt_logprobs)
    return not any(told) and update.cached_tokens is None


def _backlog(unread: Update | _Backlog) -> _Backlog:
    return _Backlog(unread) if isinstance(unread, Update) else unread


class _Backlog:
    """What has come for a choice and was not taken, as one update: what comes once from where it came.

    Ids are machine integers here, for a client that reads nothing may leave many.
    """

    __slots__ = ("_ids", "_logprobs", "_rest")

    def __init__(self, update: Update) -> None:
        self._ids = array("i", update.token_ids)
        self._logprobs = None if update.logprobs is None else list(update.logprobs)
        self._rest = replace(update, token_ids=(), logprobs=None)

    @property
    def size(self) -> int:
        return len(self._ids) + sum(len(entry.top) for entry in self._logprobs or ())

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def add(self, then: Update) -> None:
        self._ids.extend(then.token_ids)
        if then.logprobs is not None:
            self._logprobs = [] if self._logprobs is None else self._logprobs
            self._logprobs.extend(then.logprobs)
        if then.finish is None and then.prompt_logprobs is None and then.cached_tokens is None:
            return
        first = self._rest
        self._rest = replace(
            then,
            token_ids=(),
            logprobs=None,
            prompt_logprobs=first.prompt_logprobs if then.prompt_logprobs is None else then.prompt_logprobs,
            cached_tokens=first.cached_tokens if then.cached_tokens is None else then.cached_tokens,
            queued_s=first.queued_s if then.queued_s is None else then.queued_s,
        )

    def take(self, count: int) -> Update:
        """The first `count` tokens with what comes once at the beginning; with the last one goes the end."""
        ids, self._ids = tuple(self._ids[:count]), self._ids[count:]
        entries = None
        if self._logprobs is not None:
            entries, self._logprobs = tuple(self._logprobs[:count]), self._logprobs[count:]
        if not self._ids:
            return replace(self._rest, token_ids=ids, logprobs=entries)
        rest = self._rest
        self._rest = replace(rest, prompt_logprobs=None, cached_tokens=None, queued_s=None)
        return replace(
            rest, token_ids=ids, logprobs=entries, finish=None, stop_token_id=None, error=None, error_code=None
        )
