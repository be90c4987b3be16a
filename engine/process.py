"""The engine's own process: `python -m engine.process FOLDER`, started by engine/spawned.py and by nobody else.

FOLDER holds two Unix sockets, to-engine and from-engine; whoever receives on one binds it, so that the other end may
send before it is there. It is this process's temporary folder, too. Standard input is a pipe that nothing is written
to: its end is the parent's end.

Ends with exit code 0 when told to, 1 when it could not go on.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

import zmq

from engine import logs
from engine.config import EngineConfig
from engine.loop import EngineLoop
from engine.thread import BuildFromConfig, ProgressCallback, build_from_config, import_engine, run_engine
from engine.types import EngineInfo
from engine.wire import FromEngine, Opener, Sealer, Start, Stop, ToEngine, decode_to_engine

LAST_WORD_MS = 1000
"""How long an ending engine waits for its last message to be taken."""

ORPHAN_GRACE_S = 5.0
"""How long an engine without a parent may take to leave: a step may be in code that no signal interrupts."""
ORPHAN_NUDGE_S = 0.05

IDLE_WAKE_MS = 1000
"""An idle engine looks up this often: a signal that came just before it fell asleep is not seen sooner."""


def build_alone(config: EngineConfig, progress: ProgressCallback) -> tuple[EngineLoop, EngineInfo]:
    """`build_from_config` where nothing else lives: the load's collections need not walk through what was imported."""
    import_engine()
    gc.freeze()
    return build_from_config(config, progress)


def main(folder: Path, build: BuildFromConfig = build_alone) -> NoReturn:
    """Live one engine's life on the calling thread, which is the only one that touches the sockets.

    The process ends behind it: with exit code 0 when it was told to, otherwise with 1.
    """
    # What this process writes for the server or for itself goes with its sockets, also where it is killed.
    tempfile.tempdir = str(folder)
    kept: list[object] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; what it means is up to the parent
    _ParentWatch(folder).start()
    with zmq.Context() as context, context.socket(zmq.PULL) as receiver, context.socket(zmq.PUSH) as sender:
        receiver.set_hwm(0)
        sender.set_hwm(0)
        sender.linger = LAST_WORD_MS
        sender.connect(f"ipc://{folder}/from-engine")
        receiver.bind(f"ipc://{folder}/to-engine")
        inbox = _SocketInbox(receiver)
        signal.signal(signal.SIGTERM, inbox.stop_when_idle)
        start = inbox.take_first()
        logs.configure(start.config.log_format, "engine")
        seal = Sealer().seal
        post: Callable[[bytes], object] = sender.send
        if start.config.test_faults:
            from engine.faults import Faults

            faults = Faults()
            build, post, inbox.receive = faults.fitted(build), faults.lossy(post), faults.garbling(inbox.receive)

        def send(message: FromEngine) -> None:
            post(seal(message))

        def load(progress: ProgressCallback) -> tuple[EngineLoop, EngineInfo]:
            engine = build(start.config, progress)
            kept.append(engine)  # past its end, where it is not given back
            # What was loaded stays to the end, and is millions of objects: collections need not walk through them.
            gc.collect()
            gc.freeze()
            return engine

        was_told = run_engine(load, inbox, send)
    _leave(0 if was_told else 1)


def _leave(exit_code: int) -> NoReturn:
    """End, and give back nothing that the process's end gives back.

    Where a device is lost, freeing fails or waits; and libraries complain of what the interpreter has not yet freed.
    """
    try:
        atexit._run_exitfuncs()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


class _SocketInbox:
    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._opened = Opener(decode_to_engine)
        self.receive: Callable[[], bytes] = partial(socket.recv, zmq.NOBLOCK)
        """The next message's bytes. Raises zmq.Again when there is none."""
        self._is_waiting = True
        """Nothing is being run: the load, or an empty loop."""
        self._stops_when_idle = False

    def take_first(self) -> Start:
        message = self._opened.open(self._socket.recv())
        assert isinstance(message, Start)
        return message

    def take(self, *, wait: bool) -> list[ToEngine]:
        messages: list[ToEngine] = []
        self._is_waiting = wait
        if self._stops_when_idle and wait:
            return [Stop()]
        if wait:
            while not self._socket.poll(IDLE_WAKE_MS):
                pass
            self._is_waiting = False
        while True:
            try:
                messages.append(self._opened.open(self.receive()))
            except zmq.Again:
                return messages

    def stop_when_idle(self, signal_number: int, frame: FrameType | None) -> None:
        """SIGTERM. A service manager may send it to every process at once: it must not cut the parent's drain short."""
        self._stops_when_idle = True
        if self._is_waiting:
            sys.exit(0)


class _ParentWatch:
    """Ends the process when standard input ends, for then the parent is gone and nobody is left to hear anything."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_orphan = False
        self._is_leaving = False

    def start(self) -> None:
        # Behind all else, for the engine thread may be about to make its socket there. The parent removes it too.
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        signal.signal(signal.SIGHUP, self._on_hangup)
        engine_thread = threading.get_ident()
        threading.Thread(target=self._watch, args=(engine_thread,), name="parent watch", daemon=True).start()

    def _watch(self, engine_thread: int) -> None:
        # A signal that this thread took would not wake the engine thread, which alone handles it.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while os.read(sys.stdin.fileno(), 1):
            pass
        self._is_orphan = True
        give_up_at_s = time.monotonic() + ORPHAN_GRACE_S
        while time.monotonic() < give_up_at_s:
            # Wakes it from whatever it is waiting for. Again and again: a signal that comes just before it falls asleep
            # is not seen until the next one.
            if not self._is_leaving:
                signal.pthread_kill(engine_thread, signal.SIGHUP)
            time.sleep(ORPHAN_NUDGE_S)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(1)

    def _on_hangup(self, signal_number: int, frame: FrameType | None) -> None:
        """By way of SystemExit, so that exit handlers run. A terminal's own SIGHUP is the parent's to decide about."""
        if self._is_orphan and not self._is_leaving:
            self._is_leaving = True
            sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
