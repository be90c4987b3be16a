"""Server-sent events: frames from a template made once a stream, and the response that sends them.

A token costs one string formatting and one send: no pydantic model and no dictionary is made for it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from copy import copy
from json.encoder import encode_basestring_ascii
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server import errors
from server.errors import ApiError

log = logging.getLogger("cellserve.server")

KEEP_ALIVE_S = 15.0
"""Silence after which a comment is sent: proxies cut streams that say nothing."""
STALLED_S = 30.0
"""A client that takes nothing for this long is left."""

DONE = b"data: [DONE]\n\n"
_COMMENT = b": keep-alive\n\n"

HOLE = "\ufdd0hole"
"""Marks, in the object a template is made from, where each frame has its own JSON. A noncharacter: no text holds it."""
OPEN = json.dumps(HOLE)


class FrameTemplate:
    """An event of which only the holes change, in their order in the object."""

    def __init__(self, chunk: Mapping[str, Any]) -> None:
        text = json.dumps(chunk).replace("%", "%%").replace(OPEN, "%s")
        self._format = f"data: {text}\n\n"

    def render(self, *values: str) -> bytes:
        """values: JSON of each hole, ASCII only."""
        return (self._format % values).encode("ascii")

    def render_text(self, text: str) -> bytes:
        """With one hole, and a text to go into it."""
        return (self._format % encode_basestring_ascii(text)).encode("ascii")

    def filled(self, *values: str) -> FrameTemplate:
        """The template with these holes filled for good; OPEN in a value is a hole again."""
        template = copy(self)
        # One round of formatting takes one layer of escapes away.
        parts = (value.replace("%", "%%").replace(OPEN, "%s") for value in values)
        template._format = self._format.replace("%%", "%%%%") % tuple(parts)
        return template


quoted: Callable[[str], str] = encode_basestring_ascii
"""Text as JSON. ASCII: clients split lines at U+2028 and U+0085 too, inside a frame as well."""


def frame(content: Mapping[str, Any]) -> bytes:
    """One event, for those that come once a stream."""
    return f"data: {json.dumps(content, allow_nan=False)}\n\n".encode("ascii")


async def until_disconnect(receive: Receive) -> None:
    """Return when the client has gone. The body must have been read."""
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()


class ClientGone(Exception):
    """The client left before its answer was ready."""


_Result = TypeVar("_Result")


async def unless_gone(answer: Awaitable[_Result], receive: Receive) -> _Result:
    """Await `answer`; when the client leaves before it is there, cancel it and raise ClientGone."""
    task = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(until_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancelled(task, gone)


class Frames(Protocol):
    """What a stream sends, as far as it has come. Event-loop thread."""

    @property
    def is_over(self) -> bool:
        """Everything was taken."""
        ...

    @property
    def backlog(self) -> int:
        """Tokens that have come and were not taken."""
        ...

    def when_news(self, call: Callable[[], None]) -> None:
        """Call this whenever `take` may have something new, once for all of a step; it never raises."""
        ...

    def take(self) -> bytes:
        """Frames of what has come, about LARGEST_WRITE of them at most; empty when that makes none. Never waits.

        Raises what ended the stream, once everything before it was taken.
        """
        ...

    def give_up(self) -> None:
        """The client does not read: note it, and let nothing more come."""
        ...


class BodyWriter(Protocol):
    """The server's own way into a response's body that has begun: scope extension BODY_WRITER."""

    @property
    def is_ready(self) -> bool:
        """Whether the connection takes more now. When it does not, `send` waits until it does."""
        ...

    def write(self, content: bytes) -> bool:
        """One part of the body; whether the connection takes more now. Never waits."""
        ...

    def abort(self) -> None:
        """Close the connection and forget what it has not sent."""
        ...


BODY_WRITER = "cellserve.body_writer"
LARGEST_WRITE = 16 * 1024
"""Bytes, about. A connection holds at most 64 KiB and one write that it was not rid of yet."""
LARGEST_BACKLOG = 16 * 1024
"""Tokens that may wait for a client that is behind."""


class EventStream(Response):
    """Sends frames as they come, and ends them whatever happens.

    The status is decided by the first frame: an ApiError before it is raised for the app's handlers and becomes a true
    status; one after it becomes an error event. A client that waits longer than KEEP_ALIVE_S for its first frame gets
    the headers and a comment instead, and then every refusal is an event. The client's leaving and its not reading both
    end the stream.

    On a server that gives a BodyWriter, frames are written by whoever brings their news, all of a step at once, for as
    long as the connection takes them; no task is woken for a token.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: Frames,
        on_end: Callable[[], Awaitable[None]],
        headers: Mapping[str, str] | None = None,
        *,
        keep_alive_s: float = KEEP_ALIVE_S,
        stalled_s: float = STALLED_S,
    ) -> None:
        """on_end: awaited once when all is over, also when nothing was ever taken."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        # Response counts its empty body; a stream has no length.
        del self.headers["content-length"]
        self._frames = frames
        self._on_end = on_end
        self._keep_alive_s = keep_alive_s
        self._stalled_s = stalled_s
        self._has_begun = False
        self._turn = asyncio.Lock()
        """The headers, frames and comments leave one after another."""
        self._sending_since_s: float | None = None
        self._sent_at_s = 0.0
        self._was_written = False
        """A frame was written through since `_watch` looked last."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._sent_at_s = time.monotonic()
        writer: BodyWriter | None = (scope.get("extensions") or {}).get(BODY_WRITER)
        sending = asyncio.ensure_future(self._run(send, writer))
        watching = asyncio.ensure_future(self._watch(send))
        tasks = (sending, watching, asyncio.ensure_future(until_disconnect(receive)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            elif watching.done():
                watching.result()
                self._frames.give_up()
                if writer is not None:
                    # Closing it politely would wait for the client to read what is left.
                    writer.abort()
        finally:
            await _cancelled(*tasks)
            await self._on_end()

    async def _run(self, send: Send, writer: BodyWriter | None) -> None:
        try:
            await self._send_frames(send, writer)
        except Exception as error:
            if not self._has_begun:
                raise
            # The outermost edge of an answer whose status is out: only an event can still say that it failed.
            if not isinstance(error, ApiError):
                log.exception("a stream failed")
                error = errors.internal_error()
            await self._send(send, frame(error.body()))
        await self._send(send, DONE, is_last=True)

    async def _send_frames(self, send: Send, writer: BodyWriter | None) -> None:
        news = asyncio.Event()
        self._frames.when_news(news.set)
        while True:
            content = self._frames.take()
            if content:
                await self._send(send, content)
            elif self._frames.is_over:
                return
            else:
                await news.wait()
                news.clear()
            if writer is not None and self._has_begun and writer.is_ready:
                await self._write_through(writer)
                self._frames.when_news(news.set)

    async def _write_through(self, writer: BodyWriter) -> None:
        """Write frames as they come, until they are over, one fails, or the connection takes no more."""
        stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        frames, take, write = self._frames, self._frames.take, writer.write

        def advance() -> None:
            if stopped.done():
                return  # what has come since is taken by whoever waits for that
            try:
                is_ready = True
                while is_ready and (content := take()):
                    is_ready = write(content)
                    self._was_written = True
                    if len(content) < LARGEST_WRITE:
                        break  # that was all
                if frames.is_over or not is_ready:
                    stopped.set_result(None)
            except Exception as error:
                stopped.set_exception(error)

        frames.when_news(advance)
        try:
            advance()
            await stopped
        finally:
            frames.when_news(_ignore)

    async def _watch(self, send: Send) -> None:
        """Keep a silent stream alive; return when the client has stopped reading."""
        comment: asyncio.Future[None] | None = None
        try:
            while True:
                await asyncio.sleep(min(self._keep_alive_s, self._stalled_s) / 4)
                now = time.monotonic()
                if self._was_written:
                    self._was_written, self._sent_at_s = False, now
                if self._sending_since_s is not None:
                    if now - self._sending_since_s > self._stalled_s or self._frames.backlog > LARGEST_BACKLOG:
                        return
                elif now - self._sent_at_s > self._keep_alive_s:
                    # A task, for a client may stop reading in the middle of a comment as well.
                    comment = asyncio.ensure_future(self._send(send, _COMMENT))
        finally:
            if comment is not None:
                await _cancelled(comment)

    async def _send(self, send: Send, content: bytes, *, is_last: bool = False) -> None:
        async with self._turn:
            self._sending_since_s = time.monotonic()
            if not self._has_begun:
                self._has_begun = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": content, "more_body": not is_last})
            self._sending_since_s = None
            self._sent_at_s = time.monotonic()


def _ignore() -> None:
    pass


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel and wait, so that nothing outlives its request."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
