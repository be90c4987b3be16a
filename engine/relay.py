"""One engine for several API processes: the main process holds the engine, and passes messages.

    engine <-> Relay (main process, no HTTP) <-> RelayedClient (an API process), k of them

    FOLDER/            0700, the main process's
        to-main        every API process sends, each message behind its name
        NAME           what the API process of that name receives; it binds it
        slots          what each process has admitted (server/shares.py)

To an API process the relay *is* the engine: the same messages, one `Step` a step with its own updates. The engine's
death goes on as `Failed`, and an API process runs its requests again on the next engine as it would alone. Request ids
are minted from 128 random bits, so no two processes ever use one. A name stands for one life of an API process: what a
dead one had asked for is cancelled, and what it still says is not heard.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from engine.config import EngineConfig
from engine.dispatch import EngineClient
from engine.errors import EngineUnavailable
from engine.questions import Questions
from engine.spawned import ProcessClient
from engine.types import EngineStats, Update
from engine.wire import (
    AskKv,
    Cancel,
    Failed,
    FromEngine,
    Inject,
    Injected,
    Kv,
    Look,
    Progress,
    Ready,
    ResetPrefixes,
    Seen,
    Step,
    Submit,
    ToEngine,
    WasReset,
)

ANSWER_S = 5.0
"""How long whoever asks its siblings waits for all of them."""
RECONNECT_MS = 10
TO_MAIN = "to-main"


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """The sender has heard of no engine since the last one died, or ever. What it said before is void."""


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """The sender takes requests."""


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """A question of an API process to all others, or to one of them."""

    ask_id: int
    question: str


class Told(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    """One answer; from the main process all of them."""

    ask_id: int
    answers: tuple[str, ...]


class Lives(msgspec.Struct, frozen=True, array_like=True, tag="lives"):
    """What became of the engines so far."""

    ready: int
    hung: int


ToMain = Submit | Cancel | AskKv | ResetPrefixes | Look | Inject | Hello | Opened | Ask | Told
FromMain = Progress | Ready | Step | Kv | WasReset | Seen | Injected | Failed | Ask | Told | Lives

_encode = msgspec.msgpack.Encoder().encode
_to_main: msgspec.msgpack.Decoder[ToMain] = msgspec.msgpack.Decoder(ToMain)
_from_main: msgspec.msgpack.Decoder[FromMain] = msgspec.msgpack.Decoder(FromMain)


@dataclass(eq=False, slots=True)
class _Peer:
    """One life of an API process."""

    name: str
    sender: zmq.Socket[bytes]
    is_synced: bool = False
    """It knows which engine there is, and may ask it."""
    choices: dict[str, int] = field(default_factory=dict)
    """Open ones of each of its requests."""
    updates: list[Update] = field(default_factory=list)
    """Of the step that is being passed on."""


class Relay(ProcessClient):
    """The main process's client: it admits nothing itself. Event-loop thread."""

    def __init__(self, config: EngineConfig, folder: Path, *, module: str = "engine.process") -> None:
        """folder: private, and the caller's to remove."""
        super().__init__(config, module=module)
        self.folder = folder
        self.on_opened: Callable[[str], None] = _ignore
        """Told the name of an API process that takes requests."""
        self.on_ask: Callable[[str, str], Awaitable[tuple[str, ...]]] = _nothing
        """Answers a question that the API process of that name has for its siblings."""
        self._peers: dict[str, _Peer] = {}
        self._owners: dict[str, _Peer] = {}
        """By request id."""
        self._of_peers: Questions[str] = Questions()
        self._ours = ExitStack()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Hear what API processes say from now on. Before any of them is started."""
        self._context = self._ours.enter_context(zmq.Context())
        receiver = self._ours.enter_context(zmq.asyncio.Socket(self._context, zmq.PULL))
        receiver.set_hwm(0)
        receiver.linger = 0
        receiver.bind(f"ipc://{self.folder / TO_MAIN}")
        self._hearing = asyncio.create_task(self._hear_peers(receiver))

    async def shut(self) -> None:
        """Hear and say nothing more. Behind the engine's end and theirs."""
        for task in (self._hearing, *self._tasks):
            task.cancel()
        await asyncio.gather(self._hearing, *self._tasks, return_exceptions=True)
        for name in list(self._peers):
            self.forget(name)
        self._ours.close()

    def expect(self, name: str) -> None:
        """An API process of this name is about to be started."""
        sender = zmq.Socket(self._context, zmq.PUSH)
        sender.set_hwm(0)
        sender.linger = 0
        sender.reconnect_ivl = RECONNECT_MS
        sender.connect(f"ipc://{self.folder / name}")
        self._peers[name] = _Peer(name, sender)

    def forget(self, name: str) -> None:
        """It is gone: end what it had asked for."""
        peer = self._peers.pop(name)
        for request_id, num_open in peer.choices.items():
            del self._owners[request_id]
            self._num_outstanding -= num_open
            self._send(Cancel(request_id))
        peer.sender.close()
        (self.folder / name).unlink(missing_ok=True)

    async def ask(self, name: str, question: str) -> str:
        """One API process's answer. Raises TimeoutError when it gives none."""
        peer = self._peers[name]
        return await self._of_peers.ask(lambda ask_id: self._say(peer, Ask(ask_id, question)), ANSWER_S)

    # --- from the engine ----------------------------------------------------------------------------------------------

    def _receive(self, message: FromEngine) -> None:
        if self.phase.name == "dead":
            return
        super()._receive(message)
        match message:
            case Step():
                stats = self.stats
                for peer in self._peers.values():
                    updates, peer.updates = tuple(peer.updates), []
                    self._say(peer, Step(updates, stats))
            case Ready():
                self._tell_all(Lives(self.lives.ready, self.lives.hung))
                self._tell_all(message)
            case Progress():
                self._tell_all(message)
            case _:
                pass  # answers to this process's own questions; an end comes to `_died`

    def _deliver(self, update: Update) -> None:
        peer = self._owners.get(update.request_id)
        if peer is None:
            return  # whose it was is gone
        peer.updates.append(update)
        if update.finish is None:
            return
        self._num_outstanding -= 1
        peer.choices[update.request_id] -= 1
        if not peer.choices[update.request_id]:
            del peer.choices[update.request_id], self._owners[update.request_id]

    def _died(self, reason: str) -> None:
        if self.phase.name == "dead":
            return
        super()._died(reason)
        failed = self._refusal or Failed("engine", reason)
        self._tell_all(Lives(self.lives.ready, self.lives.hung))
        self._tell_all(failed)
        self._owners.clear()
        self._num_outstanding = 0
        for peer in self._peers.values():
            peer.is_synced = False
            peer.choices.clear()
            peer.updates.clear()

    # --- from API processes -------------------------------------------------------------------------------------------

    async def _hear_peers(self, receiver: zmq.asyncio.Socket) -> None:
        while True:
            name, data = await receiver.recv_multipart()
            peer = self._peers.get(name.decode())
            if peer is not None:
                self._heard(peer, _to_main.decode(data))
            await asyncio.sleep(0)

    def _heard(self, peer: _Peer, message: ToMain) -> None:
        match message:
            case Hello():
                peer.is_synced = True
                self._say(peer, Lives(self.lives.ready, self.lives.hung))
                if self.phase.name == "ready":
                    self._say(peer, Ready(self.info))
            case Opened():
                self.on_opened(peer.name)
            case Told(ask_id, answers):
                self._of_peers.answered(ask_id, answers[0])
            case Ask():
                self._later(self._ask_siblings(peer, message))
            case Submit(request) if peer.is_synced:
                peer.choices[request.request_id] = request.n
                self._owners[request.request_id] = peer
                if not self._num_outstanding:
                    self._moved_at_s = time.monotonic()
                self._num_outstanding += request.n
                self._send(message)
            case Cancel() if peer.is_synced:
                self._send(message)
            case AskKv() | ResetPrefixes() | Look() | Inject() if peer.is_synced:
                self._later(self._ask_engine(peer, message))
            case _:
                pass  # meant for an engine that has died since

    async def _ask_engine(self, peer: _Peer, message: AskKv | ResetPrefixes | Look | Inject) -> None:
        try:
            match message:
                case AskKv(ask_id):
                    self._say(peer, Kv(ask_id, await self.kv_report()))
                case ResetPrefixes(ask_id):
                    self._say(peer, WasReset(ask_id, await self.reset_prefix_cache()))
                case Look(ask_id, max_codes, behind_step):
                    self._say(peer, Seen(ask_id, await self.look(max_codes=max_codes, behind_step=behind_step)))
                case Inject(ask_id, order):
                    self._say(peer, Injected(ask_id, await self.inject(order)))
        except EngineUnavailable:
            pass  # the asker's own patience ends too, or it is told that the engine has died

    async def _ask_siblings(self, peer: _Peer, message: Ask) -> None:
        self._say(peer, Told(message.ask_id, await self.on_ask(peer.name, message.question)))

    def _later(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tell_all(self, message: FromMain) -> None:
        for peer in self._peers.values():
            if peer.is_synced:
                self._say(peer, message)

    def _say(self, peer: _Peer, message: FromMain) -> None:
        if not peer.sender.closed:
            peer.sender.send(_encode(message), zmq.NOBLOCK)  # never full: what is under way is bounded by admission


class RelayedClient(EngineClient):
    """An API process's client of the engine that the main process holds."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__()
        self.answer: Callable[[str], str] = _no_answer
        """What this process tells a sibling that asks. Must not raise."""
        self._folder = folder
        self._name = name
        self._ours = ExitStack()
        self._sender: zmq.Socket[bytes] | None = None
        self._hearing: asyncio.Task[None] | None = None
        self._told_stats = EngineStats()
        self._of_siblings: Questions[tuple[str, ...]] = Questions()

    @property
    def stats(self) -> EngineStats:
        """As the main process tells them: sums over all engines of its life, the same in every API process."""
        return self._told_stats

    def opened(self) -> None:
        """Tell the main process that this one takes requests."""
        self._say(Opened())

    async def ask_siblings(self, question: str) -> tuple[str, ...]:
        """What the other API processes answer; those that do not in time are left out."""
        try:
            return await self._of_siblings.ask(lambda ask_id: self._say(Ask(ask_id, question)), 2 * ANSWER_S)
        except TimeoutError:
            return ()

    async def _launch(self) -> None:
        self._begin("waiting for the engine")
        if self._sender is None:
            context = self._ours.enter_context(zmq.Context())
            receiver = self._ours.enter_context(zmq.asyncio.Socket(context, zmq.PULL))
            self._sender = self._ours.enter_context(zmq.Socket(context, zmq.PUSH))
            for socket in (receiver, self._sender):
                socket.set_hwm(0)
                socket.linger = 0
            receiver.bind(f"ipc://{self._folder / self._name}")
            self._sender.connect(f"ipc://{self._folder / TO_MAIN}")
            self._hearing = asyncio.create_task(self._hear(receiver))
        self._say(Hello())

    def _send(self, message: ToEngine) -> None:
        assert isinstance(message, Submit | Cancel | AskKv | ResetPrefixes | Look | Inject), message
        self._say(message)

    def _kill(self) -> None:
        pass  # the main process ends an engine that hangs

    async def _end(self) -> None:
        if not self._is_closed or self._hearing is None:
            return
        self._hearing.cancel()
        await asyncio.wait([self._hearing])
        self._hearing = None
        assert self._sender is not None
        self._sender.linger = 1000  # ms, for the cancels of what was left
        self._ours.close()

    def _say(self, message: ToMain) -> None:
        if self._sender is not None and not self._sender.closed:
            self._sender.send_multipart([self._name.encode(), _encode(message)], zmq.NOBLOCK)

    async def _hear(self, receiver: zmq.asyncio.Socket) -> None:
        while True:
            message = _from_main.decode(await receiver.recv())
            match message:
                case Ask(ask_id, question):
                    self._say(Told(ask_id, (self.answer(question),)))
                case Told(ask_id, answers):
                    self._of_siblings.answered(ask_id, answers)
                case Lives(ready, hung):
                    self.lives.ready, self.lives.hung = ready, hung
                case _:
                    if isinstance(message, Step):
                        self._told_stats = message.stats
                    told = self.lives.ready
                    self._receive(message)
                    self.lives.ready = told  # `_receive` counts what this process has seen itself
            await asyncio.sleep(0)


def _ignore(name: str) -> None:
    pass


async def _nothing(name: str, question: str) -> tuple[str, ...]:
    return ()


def _no_answer(question: str) -> str:
    return ""
