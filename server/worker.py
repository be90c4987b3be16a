"""One of several API processes: `python -m server.worker`, started by server/workers.py and by nobody else.

A whole server but for the engine, which the main process holds, and for signals, which it gets there.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from engine import logs
from engine.client import RelayedClient
from engine.errors import CellserveError
from server import run
from server.app import create_app
from server.lifecycle import Patience
from server.settings import Settings
from server.shares import Share
from server.workers import DRAIN, SLOTS_FILE

FOR_EVER = Patience(math.inf, math.inf, 1_000_000)
"""The main process ends an engine that hangs and counts how often one dies; this one waits for the next."""


def main() -> int:
    # Before anything else: a service manager may send them to every process at once, Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    what: dict[str, Any] = json.loads(_read_line())
    settings = Settings(**what["settings"])
    logs.configure(settings.log_format, "api")
    folder = Path(what["folder"])
    client = RelayedClient(folder, what["name"])
    app = create_app(
        client,
        settings,
        share=Share(folder / SLOTS_FILE, what["number"]),
        patience=FOR_EVER,
        ask_siblings=client.ask_siblings,
    )
    client.answer = app.state.siblings.answer
    with socket.socket(fileno=what["listener"]) as listener:
        server = _Server(client, folder, run.uvicorn_config(app, settings), app.state.lifecycle, settings, listener)
        asyncio.run(server.serve(sockets=[listener]))
    return server.exit_code


def _read_line() -> bytes:
    """Byte by byte: what follows belongs to the event loop."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1)
        if not part:
            sys.exit(1)
        line += part
    return line


class _Server(run.Server):
    """Told by its standard input what others are told by signals, and telling the main process that it is open."""

    def __init__(self, client: RelayedClient, folder: Path, *rest: Any) -> None:
        """folder: the main process's, which outlives that one only when it was killed."""
        super().__init__(*rest)
        self._client = client
        self._folder = folder

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        asyncio.get_running_loop().add_reader(0, self._on_command)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        pass  # uvicorn puts this in the place of what ignored the signal

    async def _say_start(self) -> None:
        try:
            await self._lifecycle.wait_loaded()
        except CellserveError:  # the main process says why
            if self._drain is None:  # else the load failed because it was told to stop
                # That one ends all when this was the first engine; else others follow, of the engine and of this one.
                self.exit_code = run.EXIT_ENGINE
                self.should_exit = True
            return
        run.settle()
        self._client.opened()

    def _say_stop(self, timeout_s: float) -> None:
        pass

    def _on_command(self) -> None:
        command = os.read(0, 1)
        if not command:
            shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(1)
        assert command == DRAIN
        self._on_signal(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
