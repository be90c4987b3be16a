"""One served process, from a bound socket to its exit code: uvicorn, signals, the start's news, the drain.

Main thread. Signals: the first SIGTERM or SIGINT drains, the second ends at once.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import os
import shlex
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import uvicorn
from rich.console import Console
from starlette.types import ASGIApp

from engine import logs
from engine.client import EngineClient
from engine.errors import CellserveError, ConfigError
from engine.types import EngineInfo
from server.body_writer import GivesBodyWriters
from server.http_protocol import Protocol
from server.lifecycle import Lifecycle, Progress
from server.settings import Settings

_log = logging.getLogger("cellserve.server")

EXIT_OK = 0
EXIT_MODEL = 1
"""The model cannot be loaded or the engine cannot start."""
EXIT_USAGE = 2
"""An option, the environment, the YAML file or the address is wrong."""
EXIT_ENGINE = 3
"""The engine has died more often than --max-restarts allows."""

_FLUSH_S = 5
"""How long answers whose tokens are all there may take to reach slow readers, after the drain."""
_FORCED_EXIT_S = 1.0
UNSENT_BYTES = 64 * 1024
"""Of one connection, in the system's buffer and as much again in ours, before its stream waits."""
_BACKLOG = 2048


def serve(client: EngineClient, settings: Settings, listener: socket.socket) -> int:
    """Serve until a signal or a failed start, and return the exit code. `listener` comes from `listening`."""
    logs.configure(settings.log_format, "api")
    warn_if_open(settings)
    # Not with this file: an engine that the caller has spawned loads meanwhile.
    from server.app import create_app

    app = create_app(client, settings)
    server = Server(uvicorn_config(app, settings), app.state.lifecycle, settings, listener)
    asyncio.run(server.serve(sockets=[listener]))
    return server.exit_code


def warn_if_open(settings: Settings) -> None:
    if settings.is_open:
        _log.warning("no API key is asked for: whoever reaches %s may use this server (--api-key)", settings.host)


def uvicorn_config(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    """The same for a real server and for one in a test's thread."""
    return uvicorn.Config(
        GivesBodyWriters(app),
        http=Protocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=settings.keep_alive_timeout,
        timeout_graceful_shutdown=_FLUSH_S,
        backlog=_BACKLOG,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )


@contextmanager
def listening(settings: Settings) -> Iterator[list[socket.socket]]:
    """A listener for each API process, until all is over; then a Unix socket's path is gone too. Raises ConfigError."""
    with ExitStack() as taken:
        listeners = listen_for_workers(settings) if settings.api_workers > 1 else [listen(settings)]
        for listener in listeners:
            taken.enter_context(listener)
        if settings.uds is not None:
            taken.callback(settings.uds.unlink, missing_ok=True)
        yield listeners


def listen(settings: Settings) -> socket.socket:
    """Take the address, or the Unix socket's path, before a model is loaded for it. Raises ConfigError."""
    return bind(settings.host, settings.port) if settings.uds is None else bind_unix(settings.uds)


def listen_for_workers(settings: Settings) -> list[socket.socket]:
    """One listener for each API process. Raises ConfigError as `listen` does.

    The kernel spreads connections evenly over sockets of one address; a Unix socket's wait in the one queue.
    """
    first = listen(settings)
    if settings.uds is not None or not hasattr(socket, "SO_REUSEPORT"):
        return [first, *(first.dup() for _ in range(settings.api_workers - 1))]
    # Bound alone before, so that an address that another server shares with its own processes is found to be in use.
    port = first.getsockname()[1]
    first.close()
    return [bind(settings.host, port, is_shared=True) for _ in range(settings.api_workers)]


def bind_unix(path: Path) -> socket.socket:
    """Take a Unix socket's path; one that a server left behind is taken over. Raises ConfigError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not is_answered(path):
            path.unlink()
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reason = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise ConfigError(f"cannot listen on --uds {path}: {reason}") from error
    return listener


def is_answered(path: Path) -> bool:
    """Whether a server listens at this Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


def bind(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Raises ConfigError when the address cannot be had. is_shared: with other sockets bound in this way."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host {host} is no address of this machine") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        # Its connections have it from here: the system buffers no more of an answer that is not read than we do.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    try:
        listener.bind(address)
        # Listening is what claims it: two sockets may be bound to one address with SO_REUSEADDR.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        reasons = {
            errno.EADDRINUSE: f"port {port} on {host} is in use: choose another with --port, or 0 for a free one",
            errno.EADDRNOTAVAIL: f"--host {host} is no address of this machine",
            errno.EACCES: f"port {port} needs rights that this user has not: choose one above 1023 with --port",
        }
        raise ConfigError(reasons.get(error.errno or 0, f"cannot listen on {host}:{port}: {error.strerror}")) from error
    return listener


class Server(uvicorn.Server):
    """uvicorn, but a signal drains first, while the socket still answers with 503."""

    def __init__(
        self, config: uvicorn.Config, lifecycle: Lifecycle, settings: Settings, listener: socket.socket
    ) -> None:
        super().__init__(config)
        self.exit_code = EXIT_OK
        self._lifecycle = lifecycle
        self._settings = settings
        self._url = url_of(settings, listener)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        # Begun before the engine starts, so that a fast start is told as a slow one is.
        self._announcement = asyncio.create_task(self._say_start())
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Runs between two bytecodes of whatever the main thread was doing: only leave a note for the loop.
        if self._loop is None:
            os._exit(128 + sig)
        self._loop.call_soon_threadsafe(self._on_signal, sig)

    def _on_signal(self, sig: int) -> None:
        if self._drain is None:
            self._drain = asyncio.create_task(self._drain_and_stop(self._settings.drain_timeout))
            return
        self.exit_code = 128 + sig
        self.force_exit = True
        # The app's life is cut off with all the rest, which starlette and uvicorn would tell of as a fault.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        assert self._loop is not None
        # For an engine that hangs in a step, or a client that reads nothing.
        self._loop.call_later(_FORCED_EXIT_S, os._exit, self.exit_code)
        self._impatience = asyncio.create_task(self._drain_and_stop(0))

    async def _drain_and_stop(self, timeout_s: float) -> None:
        if timeout_s:
            self._say_stop(timeout_s)
        await self._lifecycle.drain(timeout_s)
        self.should_exit = True

    def _say_stop(self, timeout_s: float) -> None:
        logs.tell(f"stopping; requests have {timeout_s:g} s to finish")

    async def _say_start(self) -> None:
        """Tell of the way to a start, and its result in one line on stdout, or by an exit code."""
        telling = asyncio.create_task(tell(self._lifecycle.progress_changes()))
        try:
            info = await self._lifecycle.wait_loaded()
        except CellserveError as error:
            if self._drain is None:  # else the load failed because it was told to stop
                logs.tell(str(error), logging.ERROR)
                self.exit_code = EXIT_USAGE if isinstance(error, ConfigError) else EXIT_MODEL
                self.should_exit = True
            return
        finally:
            telling.cancel()
            await asyncio.wait([telling])
        settle()
        print(ready_line(self._url, info, self._settings), flush=True)
        end = await self._lifecycle.wait_given_up()
        logs.tell(str(end), logging.ERROR)
        self.exit_code = EXIT_ENGINE
        self.should_exit = True


def settle() -> None:
    """Walk through what lives as long as the process once, and never again: a full collection would stall every stream.

    100,000 objects of imports, routes and schemas take some 100 ms.
    """
    gc.collect()
    gc.freeze()


def url_of(settings: Settings, listener: socket.socket) -> str:
    """What a client on this machine may paste. A server on all addresses is reached by the loopback one."""
    scheme = "http" if settings.ssl_certfile is None else "https"
    if settings.uds is not None:
        return f"{scheme}://localhost"
    port = listener.getsockname()[1]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    return f"{scheme}://[{reachable}]:{port}" if ":" in reachable else f"{scheme}://{reachable}:{port}"


def ready_line(url: str, info: EngineInfo, settings: Settings) -> str:
    """URL, model, cells, and a command to try it with. Keys are not shown: the command reads $API_KEY."""
    prompt: str | list[int] = "Once upon a time" if info.tokenizer_dir is not None else [1, 2, 3]
    room = info.max_model_len - len(prompt) - 1  # a text is at most a token a letter and one for its beginning
    body = {"prompt": prompt, "max_tokens": max(1, min(16, room))}
    key = ' -H "Authorization: Bearer $API_KEY"' if settings.api_key or settings.api_key_file else ""
    place = "" if settings.uds is None else f" --unix-socket {shlex.quote(str(settings.uds))}"
    command = (
        f"curl{place} {url}/v1/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"
    )
    return f"ready: {url} serves {settings.names()[0]} with {info.kv_cells:,} K/V cells. Try: {command}"


async def tell(progress: AsyncIterator[Progress]) -> None:
    """Each step of a start once on stderr: a line that changes on a terminal, else a line each. Until cancelled."""
    console = Console(stderr=True, force_terminal=False if logs.is_json() else None)
    with console.status("starting", spinner="line") as status:
        said = ""
        async for news in progress:
            if news["phase"] == "dead":
                continue  # the error that ended it says more
            line = _progress_line(news)
            status.update(line)
            if line != said and not console.is_terminal:
                logs.tell(line)
            said = line


def _progress_line(progress: Progress) -> str:
    counted = f" ({progress['done']} of {progress['of']})" if progress.get("of", 1) != 1 else ""
    return f"{progress['phase']}{counted}"
