"""The messages between a client and its engine, and their bytes. Typed at both ends; nothing is ever unpickled.

to the engine:    Start, then Submit / Cancel in any number, then Stop
                  AskKv and ResetPrefixes between them, each answered once
from the engine:  Progress in any number, then Ready, then a Step a step; Failed ends one that cannot go on

Between processes each end numbers what it sends, so that the other finds out a message that never came.
An in-process engine gets the same objects without the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Literal, TypeVar

import msgspec

from engine.config import EngineConfig
from engine.types import EngineInfo, EngineStats, GenerateRequest, KvReport, PrefixReset, Update
from engine.view import View


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """Load this. The first message, once."""

    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Run this request; the client has admitted it."""

    request: GenerateRequest


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """End this request's open choices, or one. What is not known is ignored: it may have just finished."""

    request_id: str
    index: int | None = None
    """Of the choice; None: all."""


class AskKv(msgspec.Struct, frozen=True, array_like=True, tag="ask_kv"):
    """Answer with a `Kv` of this id."""

    ask_id: int


class ResetPrefixes(msgspec.Struct, frozen=True, array_like=True, tag="reset_prefixes"):
    """Forget the prefixes that nobody uses, and answer with a `WasReset` of this id."""

    ask_id: int


class Look(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """Show what is going on: answered by a `Seen` of this id between two steps."""

    ask_id: int
    max_codes: int
    """Cells that are shown at most."""
    behind_step: int
    """Steps with a higher number are shown."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """End now. What still runs is dropped without a word: the client has told its callers."""


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """How far the load is: `done` of `of` things named by `text`."""

    text: str
    done: int
    of: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Requests may come."""

    info: EngineInfo


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """All news of one step. Sent without updates too, so that a long prefill is seen to move."""

    updates: tuple[Update, ...]
    stats: EngineStats


class Kv(msgspec.Struct, frozen=True, array_like=True, tag="kv"):
    """The answer to AskKv."""

    ask_id: int
    report: KvReport


class WasReset(msgspec.Struct, frozen=True, array_like=True, tag="was_reset"):
    """The answer to ResetPrefixes."""

    ask_id: int
    reset: PrefixReset


class Seen(msgspec.Struct, frozen=True, array_like=True, tag="seen"):
    """The answer to Look."""

    ask_id: int
    view: View


class Inject(msgspec.Struct, frozen=True, array_like=True, tag="inject"):
    """Obey an order of a test (engine/faults.py): answered by an `Injected` of this id."""

    ask_id: int
    order: str
    """JSON."""


class Injected(msgspec.Struct, frozen=True, array_like=True, tag="injected"):
    """The answer to Inject."""

    ask_id: int
    answer: str
    """JSON."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The engine ends. config and model: the load was refused and `reason` is the error's own message."""

    kind: Literal["config", "model", "engine"]
    reason: str


ToEngine = Start | Submit | Cancel | AskKv | ResetPrefixes | Look | Inject | Stop
FromEngine = Progress | Ready | Step | Kv | WasReset | Seen | Injected | Failed

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


class Garbled(Exception):
    """The bytes are no message of this version: the other end is broken or another program."""


def encode(message: ToEngine | FromEngine) -> bytes:
    """OverflowError for an integer beyond 64 bits; a request is checked against that before it gets here."""
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    try:
        return _to_engine.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Garbled(str(error)) from error


def decode_from_engine(data: bytes) -> FromEngine:
    try:
        return _from_engine.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Garbled(str(error)) from error


_Message = TypeVar("_Message")
_NUMBER_BYTES = 8


class Sealer:
    """One end's messages as bytes, numbered from 0."""

    def __init__(self) -> None:
        self._next = 0

    def seal(self, message: ToEngine | FromEngine) -> bytes:
        number, self._next = self._next, self._next + 1
        return number.to_bytes(_NUMBER_BYTES, "little") + encode(message)


class Opener(Generic[_Message]):
    """The other end's: every message, in order, or Garbled."""

    def __init__(self, decode: Callable[[bytes], _Message]) -> None:
        self._decode = decode
        self._next = 0

    def open(self, data: bytes) -> _Message:
        number = int.from_bytes(data[:_NUMBER_BYTES], "little")
        if number != self._next:
            raise Garbled(f"message {number} came where {self._next} was due")
        self._next += 1
        return self._decode(data[_NUMBER_BYTES:])
