"""Several API processes before one engine: `--api-workers K`. The main process, which speaks no HTTP itself.

It holds the listening sockets, the engine and K child processes (server/worker.py), and tells the start as a single
process does. A child that dies is started again on the same socket, where connections wait for it meanwhile. Signals
come to the main process; children ignore them and are told through their standard input:

    one line of JSON    what to be
    "d"                 drain; a second one ends at once
    its end             the main process is gone: leave
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from engine import logs
from engine.client import Relay
from engine.errors import CellserveError, ConfigError
from engine.types import EngineInfo
from server import run, shares
from server.lifecycle import Lifecycle
from server.metric_sums import Sums, added
from server.settings import Settings
from server.siblings import ABOUT_SUMS, of_the_dead, sums_of_asker

DRAIN = b"d"
SLOTS_FILE = "slots"
_FORCED_EXIT_S = 1.0
_FIRST_WAIT_S = 0.5
"""Before a child that never took requests is started again; one that did is at once."""
_LONGEST_WAIT_S = 10.0

MakeRelay = Callable[[Settings, Path], Relay]

log = logging.getLogger("cellserve.server")


def serve(settings: Settings, listeners: Sequence[socket.socket], *, make_relay: MakeRelay | None = None) -> int:
    """Serve until a signal or a failed start, and return the exit code. listeners: one for each API process."""
    logs.configure(settings.log_format, "api")
    run.warn_if_open(settings)
    make_relay = make_relay or (lambda options, folder: Relay(options.to_engine_config(), folder))
    with tempfile.TemporaryDirectory(prefix="cellserve-api-", ignore_cleanup_errors=True) as folder:
        return asyncio.run(_Workers(settings, listeners, Path(folder), make_relay).run())


class _Workers:
    def __init__(
        self, settings: Settings, listeners: Sequence[socket.socket], folder: Path, make_relay: MakeRelay
    ) -> None:
        self._settings = settings
        self._listeners = listeners
        self._folder = folder
        self._relay = make_relay(settings, folder)
        self._relay.on_opened = self._on_opened
        self._relay.on_ask = self._ask_all_but
        self._children: dict[str, asyncio.subprocess.Process] = {}
        """By name of their life."""
        self._opened: set[str] = set()
        self._all_opened = asyncio.Event()
        self._past_sums: Sums = {}
        """What dead children had counted, as far as anybody asked."""
        self._last_sums: dict[str, Sums] = {}
        """The latest of each living one."""
        self._is_stopping = False
        self._exit_code = run.EXIT_OK
        self._stopped = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        shares.make(self._folder / SLOTS_FILE, len(self._listeners))
        await self._relay.open()
        lifecycle = Lifecycle(self._relay, _nothing, self._settings.patience())
        life = asyncio.create_task(lifecycle.run())
        telling = asyncio.create_task(run.tell(lifecycle.progress_changes()))
        keepers = [asyncio.create_task(self._keep(number)) for number in range(len(self._listeners))]
        announcing = asyncio.create_task(self._announce(lifecycle, telling))
        try:
            await self._stopped.wait()
            await asyncio.wait(keepers)
        finally:
            for task in (life, announcing, telling):
                task.cancel()
            await asyncio.gather(life, announcing, telling, return_exceptions=True)
            await self._relay.close(0)
            await self._relay.shut()
        return self._exit_code

    # --- children -----------------------------------------------------------------------------------------------------

    async def _keep(self, number: int) -> None:
        """Keep one child running until all are to stop."""
        lives, wait_s = 0, 0.0
        while not self._stopped.is_set():
            lives += 1
            name = f"api-{number}-{lives}"
            self._relay.expect(name)
            child = self._children[name] = await self._spawn(number, name)
            if self._is_stopping and child.stdin is not None:
                child.stdin.write(DRAIN)  # all others were told while this one was started
            exit_code = await child.wait()
            del self._children[name]
            assert child.stdin is not None
            child.stdin.close()
            self._relay.forget(name)
            had_opened = name in self._opened
            self._opened.discard(name)
            if name in self._last_sums:
                self._past_sums = added([self._past_sums, of_the_dead(self._last_sums.pop(name))])
            # Its places are free, and nobody else may write there.
            shares.Share(self._folder / SLOTS_FILE, number)
            if self._stopped.is_set():
                self._exit_code = self._exit_code or max(exit_code, 0)
                return
            wait_s = 0.0 if had_opened else min(2 * wait_s or _FIRST_WAIT_S, _LONGEST_WAIT_S)
            log.error("API process %d ended with %d; it starts again in %.1f s", number, exit_code, wait_s)
            await asyncio.sleep(wait_s)

    async def _spawn(self, number: int, name: str) -> asyncio.subprocess.Process:
        listener = self._listeners[number]
        search = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "server.worker"),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=(listener.fileno(),),
            env=os.environ | {"PYTHONPATH": search},
        )
        what = {
            "settings": plain(self._settings),
            "listener": listener.fileno(),
            "folder": str(self._folder),
            "number": number,
            "name": name,
        }
        assert child.stdin is not None
        child.stdin.write(json.dumps(what).encode() + b"\n")
        return child

    def _on_opened(self, name: str) -> None:
        self._opened.add(name)
        if len(self._opened) == len(self._listeners):
            self._all_opened.set()

    async def _ask_all_but(self, name: str, question: str) -> tuple[str, ...]:
        """The answers of the other children, and of dead ones what they had counted."""
        others = [other for other in self._children if other != name]
        mine = sums_of_asker(question)
        if mine is not None and name in self._children:
            self._last_sums[name], question = mine, ABOUT_SUMS
        answers = await asyncio.gather(*(self._relay.ask(other, question) for other in others), return_exceptions=True)
        if mine is None:
            return tuple(answer for answer in answers if isinstance(answer, str))
        for other, answer in zip(others, answers, strict=True):
            if isinstance(answer, str) and other in self._children:
                self._last_sums[other] = json.loads(answer)
        known = [self._last_sums[other] for other in others if other in self._last_sums]
        return tuple(json.dumps(sums) for sums in (*known, self._past_sums))

    # --- the start and the end ----------------------------------------------------------------------------------------

    async def _announce(self, lifecycle: Lifecycle, telling: asyncio.Task[None]) -> None:
        try:
            info = await lifecycle.wait_loaded()
            await self._all_opened.wait()
        except CellserveError as error:
            if not self._is_stopping:
                logs.tell(str(error), logging.ERROR)
                self._end(run.EXIT_USAGE if isinstance(error, ConfigError) else run.EXIT_MODEL)
            return
        finally:
            telling.cancel()
            await asyncio.wait([telling])
        url = run.url_of(self._settings, self._listeners[0])
        print(run.ready_line(url, info, self._settings), flush=True)
        end = await lifecycle.wait_given_up()
        logs.tell(str(end), logging.ERROR)
        self._end(run.EXIT_ENGINE)

    def _on_signal(self, number: int) -> None:
        if not self._is_stopping:
            timeout_s = self._settings.drain_timeout
            logs.tell(f"stopping; requests have {timeout_s:g} s to finish")
            self._is_stopping = True
            self._tell_children()
            self._stopped.set()
            return
        self._tell_children()
        self._end(128 + number)
        # For an engine that hangs in a step.
        asyncio.get_running_loop().call_later(2 * _FORCED_EXIT_S, os._exit, self._exit_code)

    def _tell_children(self) -> None:
        for child in self._children.values():
            assert child.stdin is not None
            child.stdin.write(DRAIN)

    def _end(self, exit_code: int) -> None:
        """At once: children get what they need to close connections."""
        self._exit_code = exit_code
        self._is_stopping = True
        self._stopped.set()
        asyncio.get_running_loop().call_later(_FORCED_EXIT_S, self._kill)

    def _kill(self) -> None:
        for child in self._children.values():
            child.kill()


def plain(settings: Settings) -> dict[str, Any]:
    """As JSON has it, secrets too: for the standard input of a child, never for a command line."""

    def value_of(value: Any) -> Any:
        if isinstance(value, SecretStr):
            return value.get_secret_value()
        if isinstance(value, tuple):
            return [value_of(item) for item in value]
        return str(value) if isinstance(value, Path) else value

    return {name: value_of(getattr(settings, name)) for name in Settings.model_fields}


async def _nothing(info: EngineInfo) -> None:
    """The main process needs nothing of a loaded model."""
