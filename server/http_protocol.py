"""HTTP/1.1 on one connection: uvicorn's protocol, with the patience it lacks and our one shape for its own refusals.

A connection that holds us up costs a descriptor for as long as we let it. So its headers, its body and its taking what
we wrote have a time limit each. How long it may rest between two requests is uvicorn's own `timeout_keep_alive`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from server import errors
from server.errors import ApiError

HEADER_S = 30.0
"""From the connection's first moment, or the first byte of a later request, to the end of its headers."""
BODY_S = 120.0
"""From there to the end of the body; longer bodies than BODY_BYTES get more, in proportion."""
BODY_BYTES = 8 * 1024 * 1024
UNREAD_S = 60.0
"""How long what we wrote may lie unread, once more is written than the system takes."""


class Protocol(H11Protocol):
    """The limits are attributes so that a test need not wait for them."""

    header_s = HEADER_S
    body_s = BODY_S
    unread_s = UNREAD_S

    _deadline: asyncio.TimerHandle | None = None
    _awaited: str | None = None
    """What `_deadline` is for: "headers" or "body"."""
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await("headers", self.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(None)
        self._set_unread(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look(has_bytes=True)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look(has_bytes=bool(self.conn.trailing_data[0]))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_unread(self.loop.call_later(self.unread_s, self.transport.abort))

    def resume_writing(self) -> None:
        super().resume_writing()
        self._set_unread(None)

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to bytes that are no HTTP; called while it handles what h11 said of them."""
        error = sys.exception()
        hint = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(errors.headers_too_large() if hint == 431 else errors.invalid_http())

    def _look(self, *, has_bytes: bool) -> None:
        """Await what the other side owes now. has_bytes: some of a next request are there."""
        if self.conn.their_state is h11.SEND_BODY:
            self._await("body", self.body_s * max(1.0, self._declared_bytes() / BODY_BYTES))
        elif self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE and has_bytes:
            self._await("headers", self.header_s)
        else:
            self._await(None)

    def _declared_bytes(self) -> int:
        """The body's; one in chunks declares none."""
        lengths = [value for name, value in self.headers if name == b"content-length"]
        return int(lengths[0]) if lengths else 0

    def _await(self, what: str | None, limit_s: float = 0.0) -> None:
        """One deadline for the whole of it: a byte now and then does not put it off."""
        if what == self._awaited:
            return
        self._awaited = what
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if what is None else self.loop.call_later(limit_s, self._lose_patience, limit_s)

    def _lose_patience(self, limit_s: float) -> None:
        # To one that never began a request there is nothing to say.
        if self.conn.trailing_data[0] or self._awaited == "body":
            self._refuse(errors.request_timeout(limit_s))
        else:
            self.transport.close()

    def _set_unread(self, timer: asyncio.TimerHandle | None) -> None:
        if self._unread is not None:
            self._unread.cancel()
        self._unread = timer

    def _refuse(self, error: ApiError) -> None:
        """The last thing said here. Behind the first byte of an answer only a closed connection can say it."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body()).encode()
            headers = [
                *error.headers.items(),
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("X-Request-Id", f"req-{uuid.uuid4().hex}"),
            ]
            send: Callable[[Any], bytes | None] = self.conn.send
            reason = error.message.partition(":")[0].encode("ascii", "replace")
            for event in (
                h11.Response(status_code=error.status, headers=headers, reason=reason),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(send(event) or b"")
        self.transport.close()
