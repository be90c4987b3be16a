"""The real server, uvicorn and all, on a free port in a thread of the test. The engine behind it is the test's choice.

with live_server(scripted_client()) as server:
    answer = server.http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 3})
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
import uvicorn
from fastapi import FastAPI

from engine.client import EngineClient
from server.app import create_app
from server.run import bind, uvicorn_config
from server.settings import Settings

TIMEOUT_S = 20.0
"""A test that waits longer for its own server has failed."""

Result = TypeVar("Result")


class LiveServer:
    """A running server. Methods are called from the test's thread."""

    def __init__(self, app: FastAPI, settings: Settings, listener: socket.socket) -> None:
        self.app = app
        self.host, self.port = listener.getsockname()
        self.url = f"http://{self.host}:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S, trust_env=False)
        self._server = _Server(uvicorn_config(app, settings))
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name="server", daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._server.has_started.wait(TIMEOUT_S), "the server did not start"

    def stop(self) -> None:
        """End without draining, and wait for the end."""
        self.http.close()
        self._server.should_exit = True
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the server did not end"

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await something on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._server.loop).result(TIMEOUT_S)

    def call(self, function: Callable[[], Result]) -> Result:
        """Call something on the server's event loop."""

        async def once() -> Result:
            return function()

        return self.run(once())

    def wait_ready(self) -> None:
        """Return when the API is open. Raises what ended the load."""
        self.run(self.app.state.lifecycle.wait_loaded())

    @property
    def connections(self) -> set[Any]:
        """Those that are open. On the server's event loop."""
        return self._server.server_state.connections

    def metric(self, name: str, **labels: str) -> float:
        """The value of the one series of that name which carries all of `labels`; 0 when there is none."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        values = []
        for line in self.http.get("/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(part in series for part in wanted):
                values.append(float(value))
        assert len(values) <= 1, f"{name} {labels} names {len(values)} series"
        return values[0] if values else 0.0

    def raw(self, data: bytes) -> bytes:
        """Send bytes as they are on a connection of their own, and return all that comes until it closes."""
        with socket.create_connection((self.host, self.port), timeout=TIMEOUT_S) as connection:
            connection.sendall(data)
            received = b""
            while part := connection.recv(65536):
                received += part
            return received


def read_to_end(connection: socket.socket) -> bytes:
    """What comes until the other side closes; a reset is a way to close."""
    received = b""
    try:
        while part := connection.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return received


def until(condition: Callable[[], bool]) -> None:
    """Ask again and again until it holds."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"


@contextmanager
def live_server(
    client: EngineClient,
    settings: Settings | None = None,
    *,
    prepare: Callable[[FastAPI], None] = lambda app: None,
    is_ready: bool = True,
) -> Iterator[LiveServer]:
    """Serve `client`, which was not started. prepare: adds routes of the test's own. is_ready: wait until it is."""
    settings = settings or Settings(access_log=False)
    app = create_app(client, settings)
    prepare(app)
    server = LiveServer(app, settings, bind("127.0.0.1", 0))
    server.start()
    try:
        if is_ready:
            server.wait_ready()
        yield server
    finally:
        server.stop()


class _Server(uvicorn.Server):
    """Tells another thread when it listens, and which loop is its own."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_started = threading.Event()
        self.loop: asyncio.AbstractEventLoop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.loop = asyncio.get_running_loop()
        self.has_started.set()
