"""The way of a stream's frames to their connection without a task and without h11, on uvicorn.

Everything else of an answer, its headers and its end too, goes through `send`, as ASGI has it.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from server.streams import BODY_WRITER


class GivesBodyWriters:
    """Hands each request's `BodyWriter` to the app, as a scope extension: outside of everything that wraps `send`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle = getattr(send, "__self__", None)
        # An HTTP/1.0 body has no chunks, and an answer to HEAD has no body.
        if isinstance(cycle, RequestResponseCycle) and scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            scope["extensions"] = {**(scope.get("extensions") or {}), BODY_WRITER: _ChunkWriter(cycle)}
        await self._app(scope, receive, send)


class _ChunkWriter:
    """A `BodyWriter`: what `send` does with a part of a body without a length, less a task, wrappers and h11's copy.

    h11 knows only that a body is under way; parts in chunks leave no trace in it, and it writes the end.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    @property
    def is_ready(self) -> bool:
        return not (self._flow.write_paused or self._cycle.disconnected)

    def write(self, content: bytes) -> bool:
        if self._cycle.disconnected:
            return False
        self._write(b"%x\r\n%b\r\n" % (len(content), content))
        return not self._flow.write_paused

    def abort(self) -> None:
        self._cycle.transport.abort()
