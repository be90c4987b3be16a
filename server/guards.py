"""What every request passes before it meets a route, and every answer on its way out. Pure ASGI, nothing is buffered.

From the outside in:

    Trace          X-Request-Id, one access line, http_* metrics, and the last resort for an error nobody handled
    Framing        400 for a body whose end two parties could see in two places, 431 for endless headers
    OriginGuard    pages of other origins stay out
    (CORS)         Starlette's, only when --cors-origin names somebody; answers preflights, which bring no key
    KeyGuard       deny by default
    PhaseGuard     503 while the engine loads, drains or is down
    MediaType      415 for a body that says it is not JSON, or not as it is
    BodyLimit      413 before a long body is read

Knows neither models nor JSON fields. A guard refuses by sending an `ApiError`; it never lets an exception out of here.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine import logs
from server import errors
from server.errors import ApiError
from server.metrics import Metrics
from server.tracing import RequestSpan, Tracer

PROBE_PATHS = frozenset({"/live", "/ready", "/health", "/ping"})
"""Open without a key, in every phase, and silent in the access log."""
ALWAYS_ON_PATHS = PROBE_PATHS | {"/metrics", "/version", "/openapi.json"}
"""Answer whatever the engine does."""
QUIET_PATHS = PROBE_PATHS | {"/metrics"}

MAX_HEADER_BYTES = 64 * 1024
"""Names and values of all headers together, and a little for each, as HTTP/2 counts them."""
_EACH_HEADER = 32

CLIENT_GONE = 499
"""Logged and counted, never sent: nobody was there to read it."""

_SANE_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_HOST = re.compile(r"(?:\[(?P<address>[^\]]+)\]|(?P<name>[^:\[\]]+))(?::\d+)?")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

_access = logging.getLogger("cellserve.access")
_log = logging.getLogger("cellserve.server")


class Trace:
    """Names the request, and writes down how it ended.

    `request.state.request_id` is what the answer's X-Request-Id carries: the caller's own value when that is 1 to 128
    visible ASCII characters. `request.state.request_hex` is 32 hex digits that no caller chooses; ids that must be
    unique are made from it, and the minted X-Request-Id is "req-" and the same digits.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics, has_access_log: bool, tracer: Tracer | None = None) -> None:
        """tracer: begins a span for each POST; `request.state.span` is it, and None for all else."""
        self._app = app
        self._tracer = tracer
        self._metrics = metrics
        self._has_access_log = has_access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        request_hex = os.urandom(16).hex()
        asked = _header(scope, b"x-request-id") or ""
        request_id = asked if _SANE_REQUEST_ID.fullmatch(asked) else f"req-{request_hex}"
        # This task's alone, and that of the tasks it starts.
        logs.request_id.set(request_id)
        span: RequestSpan | None = None
        if self._tracer is not None and scope["method"] == "POST":
            span = self._tracer.begin("POST", request_id, Headers(scope=scope))
        scope.setdefault("state", {}).update(request_id=request_id, request_hex=request_hex, key=None, span=span)
        answer = _Answer()

        async def watched_receive() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not answer.is_complete:
                answer.is_abandoned = True
            return message

        async def traced_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode("ascii"))]
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                answer.is_complete = True
            await send(message)

        try:
            await self._app(scope, watched_receive, traced_send)
        except Exception:
            # The outermost edge of a request. Behind its first byte only a cut connection can say that it failed.
            _log.exception("request %s failed", request_id)
            if answer.status is not None:
                raise
            await errors.internal_error().response()(scope, watched_receive, traced_send)
        finally:
            self._write_down(scope, answer, request_id, time.monotonic() - started_s)

    def _write_down(self, scope: Scope, answer: _Answer, request_id: str, duration_s: float) -> None:
        status = CLIENT_GONE if answer.is_abandoned or answer.status is None else answer.status
        route = getattr(scope.get("route"), "path", "none")
        self._metrics.http_answered(
            method=scope["method"] if scope["method"] in _METHODS else "other",
            handler=route,
            status=status,
            duration_s=duration_s,
        )
        span: RequestSpan | None = scope["state"]["span"]
        if span is not None:
            span.end(route, status)
        if self._has_access_log and scope["path"] not in QUIET_PATHS:
            host = scope["client"][0] if scope.get("client") else "-"
            # The raw path is still percent-encoded: a line break in it cannot forge a line of the log.
            path = scope.get("raw_path", b"").partition(b"?")[0].decode("latin-1")
            line = "%s %s %s %d %.3fs %s"
            fields = {
                "client": host,
                "method": scope["method"],
                "path": path,
                "status": status,
                "duration_s": round(duration_s, 6),
            }
            about = {"request_id": request_id, "fields": fields}
            _access.info(line, host, scope["method"], path, status, duration_s, request_id, extra=about)


@dataclass
class _Answer:
    """What has been seen of one answer so far."""

    status: int | None = None
    is_complete: bool = False
    is_abandoned: bool = False


class Framing:
    """Refuses a request that says twice, in two ways, where its body ends: a length, and chunks.

    A proxy that believes the one before a server that believes the other makes two requests of one, and the second is
    nobody's (request smuggling). Behind such a request the connection cannot be trusted either.

    Nor are headers passed on that are larger than any need be: h11 has a limit only for those that come in pieces.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers: list[tuple[bytes, bytes]] = scope["headers"]
            if sum(len(name) + len(value) + _EACH_HEADER for name, value in headers) > MAX_HEADER_BYTES:
                await errors.headers_too_large().response()(scope, receive, send)
                return
            if {b"transfer-encoding", b"content-length"} <= {name for name, _ in headers}:
                message = "the request has both Content-Length and Transfer-Encoding: send one of them"
                await errors.invalid_http(message).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class OriginGuard:
    """Refuses what a browser sends on behalf of another origin's page.

    A server without keys on a laptop is within reach of every page its owner visits: a plain-text POST needs no
    preflight. Browsers name the page in `Origin`; other clients send none.

    A page may also be made to look like our own: its name is made to point here once it is loaded (DNS rebinding), and
    then its origin and the Host it asks are the same. So without keys our own page is one under a name that nobody else
    can own: an address, localhost, this machine's name, or the one of --host. With keys the name does not matter.
    """

    def __init__(self, app: ASGIApp, *, allowed: Iterable[str], has_keys: bool, host: str) -> None:
        """host: what the server was told to listen on."""
        self._app = app
        self._allowed = frozenset(allowed)
        self._has_keys = has_keys
        self._own_names = frozenset({"localhost", socket.gethostname().lower(), host.lower()})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            origin = _header(scope, b"origin")
            if origin is not None and not self._lets_in(origin, _header(scope, b"host") or ""):
                await errors.origin_not_allowed(origin).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _lets_in(self, origin: str, host: str) -> bool:
        if origin in self._allowed or "*" in self._allowed:
            return True
        return origin.partition("://")[2] == host and (self._has_keys or self._is_own(host))

    def _is_own(self, host: str) -> bool:
        """host: a name or an address, with or without a port."""
        found = _HOST.fullmatch(host.lower())
        if found is None:
            return False
        name = found["address"] or found["name"]
        if name in self._own_names or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class KeyGuard:
    """Lets in who brings one of the keys; everywhere but at the probes.

    `request.state.key` is the key's digest in hex, None where nobody needs one. Holds digests only: comparing them in
    constant time, all of them, tells nothing of how near a guess came.
    """

    def __init__(self, app: ASGIApp, *, keys: Iterable[str], open_paths: Iterable[str] = ()) -> None:
        """open_paths: let in without a key, beside the probes."""
        self._app = app
        self._open_paths = PROBE_PATHS | frozenset(open_paths)
        self._digests = tuple(_digest(key.encode("utf-8")) for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._digests or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        key = _key_of(scope)
        # Header bytes were decoded as latin-1; this gives back what the client sent.
        digest = None if key is None else _digest(key.encode("latin-1"))
        if digest is not None and self._is_known(digest):
            scope["state"]["key"] = digest.hex()
            await self._app(scope, receive, send)
        else:
            await errors.invalid_api_key(is_missing=key is None).response()(scope, receive, send)

    def _is_known(self, digest: bytes) -> bool:
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


def _key_of(scope: Scope) -> str | None:
    scheme, _, credentials = (_header(scope, b"authorization") or "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip()
    return _header(scope, b"x-api-key") or None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class PhaseGuard:
    """Refuses API requests while the engine cannot take them."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        refusal: Callable[[], ApiError | None],
        metrics: Metrics,
        open_paths: Iterable[str] = (),
    ) -> None:
        """refusal: what to answer now; None while the API is open. open_paths: answered always, beside ours."""
        self._app = app
        self._open_paths = ALWAYS_ON_PATHS | frozenset(open_paths)
        self._refusal = refusal
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            refusal = self._refusal()
            if refusal is not None:
                self._metrics.rejected(refusal.code)
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class MediaType:
    """Every body is JSON: what claims to be something else gets 415, what claims nothing is taken at its bytes.

    Nor is anything unpacked: a compressed body of a few KB could be GB of JSON. A form's type counts as no claim:
    `curl -d` sends it unasked. Pages that could abuse that stop at OriginGuard.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            coding = (_header(scope, b"content-encoding") or "identity").strip().lower()
            if coding != "identity":
                await errors.unsupported_encoding(coding).response()(scope, receive, send)
                return
            claimed = (_header(scope, b"content-type") or "").partition(";")[0].strip().lower()
            is_json = claimed == "application/json" or claimed.endswith("+json")
            if not is_json and claimed not in ("", "application/x-www-form-urlencoded"):
                await errors.unsupported_media_type(claimed).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Answers 413 once a body is known to be too long: from its declared length, else when it has come too far."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = _header(scope, b"content-length") or ""
        # Of 4,300 digits and more Python makes no number.
        if declared.isascii() and declared.isdigit() and (len(declared) > 19 or int(declared) > self._max_bytes):
            await self._refuse(scope, receive, send)
            return
        received = 0
        has_begun = False

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise _TooLong
            return message

        async def gated_send(message: Message) -> None:
            nonlocal has_begun
            # Whatever the framework makes of _TooLong, the client is told the truth below.
            if received > self._max_bytes and not has_begun:
                return
            has_begun = True
            await send(message)

        try:
            await self._app(scope, counted_receive, gated_send)
        except _TooLong:
            if has_begun:
                raise
        if received > self._max_bytes and not has_begun:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = errors.body_too_large(self._max_bytes)
        # The rest of the body is still under way: only a new connection is free of it.
        error.headers["Connection"] = "close"
        await error.response()(scope, receive, send)


def _header(scope: Scope, name: bytes) -> str | None:
    """The first of this name, in small letters. Every request passes here several times: no object is made of them."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


class _TooLong(Exception):
    """Raised where the body is read; never leaves BodyLimit unless an answer had begun."""
