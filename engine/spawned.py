"""An engine in a process of its own, reached over Unix sockets in a private folder. What a server runs.

    FOLDER/          0700, removed with the engine
        to-engine    the child receives
        from-engine  this process receives
        cellserve-*  what the child writes down, as its tokenizer for this process

The child's death is seen by its exit, never by a timeout; its standard input is how it sees ours (engine/process.py).
It may be spawned before there is an event loop, so that its imports and this process's take the same time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from engine.config import EngineConfig
from engine.dispatch import STOP_GRACE_S, EngineClient
from engine.errors import ConfigError, EngineUnavailable
from engine.wire import Failed, FromEngine, Garbled, Opener, Sealer, Start, Stop, ToEngine, decode_from_engine

LAST_WORD_S = 0.5
"""How long the last message of a child that ended by itself may be under way."""
KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""oneDNN, and torch's layer above it, keep what they have made for each shape, 1,024 of both by themselves. Steps of a
CPU have any number of rows, so that hundreds of MB came together over hours and were hardly ever used again."""


class ProcessClient(EngineClient):
    """Spawns `python -m MODULE FOLDER`, tells it its config, and passes messages until either end is gone."""

    def __init__(
        self, config: EngineConfig, *, module: str = "engine.process", stop_grace_s: float = STOP_GRACE_S
    ) -> None:
        """module: what runs in the child; it calls `engine.process.main`."""
        super().__init__()
        self._config = config
        self._module = module
        self._stop_grace_s = stop_grace_s
        self._early: _Child | None = None
        """Spawned, and not taken by `start` yet."""
        self._child: _Child | None = None
        self._life: asyncio.Task[None] | None = None
        """Ends when the child is gone and everything of it is given back."""

    @property
    def pid(self) -> int | None:
        """Of the engine process; None when there is none."""
        child = self._child or self._early
        return None if child is None else child.process.pid

    def spawn(self) -> None:
        """Begin the first engine's load now; `start`, which has to follow, takes it over. Any thread.

        Raises EngineUnavailable or ConfigError as `start` does. When this process ends before that, so does the child.
        """
        self._early = self._spawned()

    def _spawned(self) -> _Child:
        try:
            child = _spawn(self._module)
        except (OSError, zmq.ZMQError) as error:
            raise EngineUnavailable(f"the engine process could not be started: {error}") from error
        child.send(Start(self._config))
        return child

    async def _launch(self) -> None:
        self._begin("starting the engine process")
        early, self._early = self._early, None
        self._child = early or self._spawned()
        self._life = asyncio.create_task(self._live(self._child))

    def _send(self, message: ToEngine) -> None:
        if self._child is not None:
            self._child.send(message)

    def _kill(self) -> None:
        if self._child is not None:
            self._child.signal(signal.SIGKILL)

    async def _end(self) -> None:
        if self._life is None:
            return
        if self._child is not None:
            self._send(Stop())
            if self._info is None:  # it reads no messages while it loads
                self._child.signal(signal.SIGTERM)
        done, _ = await asyncio.wait((self._life,), timeout=self._stop_grace_s)
        if not done and self._child is not None:
            self._child.signal(signal.SIGKILL)
        await self._life

    async def _live(self, child: _Child) -> None:
        hearing = asyncio.create_task(self._hear(child))
        exiting = child.exit_code()
        await asyncio.wait((hearing, exiting), return_when=asyncio.FIRST_COMPLETED)
        if not exiting.done():
            await asyncio.wait((exiting,), timeout=self._stop_grace_s)
            child.signal(signal.SIGKILL)
        elif exiting.result() > 0:
            await asyncio.wait((hearing,), timeout=LAST_WORD_S)
        hearing.cancel()
        self._child = None
        self._died(_how_it_ended(await exiting))
        child.close()

    async def _hear(self, child: _Child) -> None:
        """Until the engine has said that it ends, or says what cannot be understood."""
        opener: Opener[FromEngine] = Opener(decode_from_engine)
        while True:
            try:
                message = opener.open(await child.receiver.recv())
            except Garbled as error:
                message = Failed("engine", f"a message from the engine could not be read: {error}")
            self._receive(message)
            if isinstance(message, Failed):
                return
            # While messages are there recv never waits: without this an engine that is faster would shut out all else.
            await asyncio.sleep(0)


@dataclass(frozen=True, slots=True)
class _Child:
    """A running child and what of ours goes with it."""

    process: subprocess.Popen[bytes]
    sender: zmq.Socket[bytes]
    receiver: zmq.asyncio.Socket
    ours: ExitStack
    """The folder and the sockets."""
    sealer: Sealer = field(default_factory=Sealer)

    def send(self, message: ToEngine) -> None:
        # Never full: it is unbounded, admission is not.
        self.sender.send(self.sealer.seal(message), zmq.NOBLOCK)

    def exit_code(self) -> asyncio.Future[int]:
        """Done when the process has ended. Asked for once."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()

        def tell(code: int) -> None:
            if not ended.cancelled():
                ended.set_result(code)

        def wait() -> None:
            code = self.process.wait()
            with suppress(RuntimeError):  # the loop was closed over it: nobody is left to tell
                loop.call_soon_threadsafe(tell, code)

        threading.Thread(target=wait, name="engine's exit", daemon=True).start()
        return ended

    def signal(self, number: signal.Signals) -> None:
        # Not by send_signal: it looks for the exit status first, and takes it from the thread that waits for it.
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def close(self) -> None:
        """Behind its exit."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.ours.close()


def _spawn(module: str) -> _Child:
    with ExitStack() as ours:
        folder = ours.enter_context(tempfile.TemporaryDirectory(prefix="cellserve-", ignore_cleanup_errors=True))
        path = f"{folder}/from-engine"
        if len(path) > zmq.IPC_PATH_MAX_LEN:
            raise ConfigError(f"{path} is too long for a socket's name: set TMPDIR to a shorter folder")
        context = ours.enter_context(zmq.Context())
        receiver = ours.enter_context(zmq.asyncio.Socket(context, zmq.PULL))
        sender = ours.enter_context(zmq.Socket(context, zmq.PUSH))
        for socket in (receiver, sender):
            socket.set_hwm(0)
            socket.linger = 0
        sender.reconnect_ivl = 10  # ms; the child binds its end when it has come up
        receiver.bind(f"ipc://{path}")
        sender.connect(f"ipc://{folder}/to-engine")
        # The child finds modules exactly where this process does; -P keeps the working folder from standing in front.
        search = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, folder],
            stdin=subprocess.PIPE,
            env=KERNEL_CACHES | os.environ | {"PYTHONPATH": search},
        )
        return _Child(process, sender, receiver, ours.pop_all())


def _how_it_ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"the engine process ended with exit code {exit_code}"
    return f"the engine process was ended by {signal.Signals(-exit_code).name}"
