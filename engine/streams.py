"""One request's way back to its caller: an async iterator of `Update`, and the right to cancel.

Owned by the asyncio thread alone. A stream knows nothing of engines; its client pushes and is told when it is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from engine.types import TokenLogprobs, Update


class RequestStream:
    """Yields updates until every choice has finished, then stops.

    Memory is bounded by the request itself: what nobody has read yet is kept as one update a choice, so a reader that
    falls behind gets fewer and longer updates, never a queue of them.

    Leave it with `async with` or `aclose()`: a request that has not finished by then is cancelled.
    """

    def __init__(self, request_id: str, num_choices: int, cancel: Callable[[str, int | None], None]) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._open = set(range(num_choices))
        self._unread: dict[int, Update] = {}
        """By choice, longest unread first."""
        self._reader: asyncio.Future[None] | None = None
        self._is_left = False

    @property
    def open_choices(self) -> frozenset[int]:
        """Choices whose last update has not come, read or unread."""
        return frozenset(self._open)

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
        return self._unread.pop(next(iter(self._unread)))

    def push(self, update: Update) -> bool:
        """The client's side. False: the choice has had its last update and this one was dropped."""
        if update.index not in self._open:
            return False
        if update.finish is not None:
            self._open.remove(update.index)
        if not self._is_left:
            unread = self._unread.get(update.index)
            self._unread[update.index] = update if unread is None else _joined(unread, update)
            self._wake()
        return True

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _joined(first: Update, then: Update) -> Update:
    """Both as one: tokens and logprobs in order, what comes once from where it came."""
    return Update(
        request_id=first.request_id,
        index=first.index,
        token_ids=first.token_ids + then.token_ids,
        logprobs=_added(first.logprobs, then.logprobs),
        prompt_logprobs=first.prompt_logprobs if then.prompt_logprobs is None else then.prompt_logprobs,
        cached_tokens=first.cached_tokens if then.cached_tokens is None else then.cached_tokens,
        finish=then.finish,
        stop_token_id=then.stop_token_id,
        error=then.error,
        error_code=then.error_code,
    )


def _added(
    first: tuple[TokenLogprobs, ...] | None, then: tuple[TokenLogprobs, ...] | None
) -> tuple[TokenLogprobs, ...] | None:
    return then if first is None else first if then is None else first + then
