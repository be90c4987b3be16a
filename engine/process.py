"""The engine's own process: `python -m engine.process FOLDER`, started by engine/spawned.py and by nobody else.

FOLDER holds two Unix sockets, to-engine and from-engine; whoever receives on one binds it, so that the other end may
send before it is there. Standard input is a pipe that nothing is written to: its end is the parent's end.

Ends with exit code 0 when told to, 1 when it could not go on.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import zmq

from engine.thread import BuildFromConfig, build_from_config, run_engine
from engine.wire import FromEngine, Start, Stop, ToEngine, decode_to_engine, encode

LAST_WORD_MS = 1000
"""How long an ending engine waits for its last message to be taken."""

ORPHAN_GRACE_S = 5.0
"""How long an engine without a parent may take to leave: a step may be in code that no signal interrupts."""


def main(folder: Path, build: BuildFromConfig = build_from_config) -> int:
    """Live one engine's life on the calling thread, which is the only one that touches the sockets."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; what it means is up to the parent
    signal.signal(signal.SIGHUP, _leave)
    threading.Thread(target=_leave_with_parent, args=(folder,), name="parent watch", daemon=True).start()
    with zmq.Context() as context, context.socket(zmq.PULL) as receiver, context.socket(zmq.PUSH) as sender:
        receiver.set_hwm(0)
        sender.set_hwm(0)
        sender.linger = LAST_WORD_MS
        sender.connect(f"ipc://{folder}/from-engine")
        receiver.bind(f"ipc://{folder}/to-engine")
        inbox = _SocketInbox(receiver)
        signal.signal(signal.SIGTERM, inbox.stop_when_idle)
        start = inbox.take_first()

        def send(message: FromEngine) -> None:
            sender.send(encode(message))

        return 0 if run_engine(lambda progress: build(start.config, progress), inbox, send) else 1


class _SocketInbox:
    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._is_waiting = True
        """Nothing is being run: the load, or an empty loop."""
        self._stops_when_idle = False

    def take_first(self) -> Start:
        message = decode_to_engine(self._socket.recv())
        assert isinstance(message, Start)
        return message

    def take(self, *, wait: bool) -> list[ToEngine]:
        messages: list[ToEngine] = []
        self._is_waiting = wait
        if self._stops_when_idle and wait:
            return [Stop()]
        if wait:
            messages.append(decode_to_engine(self._socket.recv()))
            self._is_waiting = False
        while True:
            try:
                messages.append(decode_to_engine(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def stop_when_idle(self, signal_number: int, frame: FrameType | None) -> None:
        """SIGTERM. A service manager may send it to every process at once: it must not cut the parent's drain short."""
        self._stops_when_idle = True
        if self._is_waiting:
            sys.exit(0)


def _leave(signal_number: int, frame: FrameType | None) -> None:
    """SIGHUP: nobody is left to hear anything. By way of SystemExit, so that what was set up for the exit is run."""
    sys.exit(1)


def _leave_with_parent(folder: Path) -> None:
    """Wait for the end of standard input, then end the engine thread wherever it is; soon, the process with it."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
