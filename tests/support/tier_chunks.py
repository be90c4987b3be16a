"""Small chunks with payloads one can tell apart, and a tier that fails on demand."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cache.offload.chunks import Chunk, Namespace, chunks_of
from cache.offload.records import BadRecord, Layout
from cache.offload.tiers import TierFault, TierStatus

CHUNK_TOKENS = 16
PAYLOAD_BYTES = 512
SPACE = Namespace(weights="sha-1", dtype="float32", geometry="1x4+4/all:0", rope="default")
LAYOUT = Layout(SPACE.digest, CHUNK_TOKENS, PAYLOAD_BYTES)


def path(name: int, length: int, *, salt: str = "") -> list[Chunk]:
    """A path of `length` chunks; other names and other salts share none of them."""
    tokens = np.arange(length * CHUNK_TOKENS) + 1000 * name
    return chunks_of(replace(SPACE, salt=salt), tokens, CHUNK_TOKENS)


def payload(chunk: Chunk) -> bytes:
    """The bytes that belong to the chunk, as its key decides."""
    return np.random.default_rng(list(chunk.key)).bytes(PAYLOAD_BYTES)


class FakeTier:
    """A dict of payloads. Scriptable: `fault`, `corrupt`, `is_full`, and `hold` lets loads wait for `release`."""

    name = "fake"

    def __init__(self, script: FakeTier | None = None) -> None:
        """script: whose faults these are too; None: its own."""
        self._script = script or self
        self.records: dict[bytes, bytes] = {}
        self.loads: list[bytes] = []
        self.fault: str | None = None
        self.is_full = False
        self.is_closed = False
        self._corrupt: set[bytes] = set()
        self._gate = threading.Event()
        self._gate.set()
        self.waiting = threading.Semaphore(0)
        self._lanes: dict[int, FakeTier] = {0: self}

    def lane(self, index: int) -> FakeTier:
        """A tier for another object group of the same chunks, which fails as this one does."""
        return self._lanes.setdefault(index, FakeTier(self))

    def add(self, chunks: Sequence[Chunk]) -> None:
        self.records.update((chunk.key, payload(chunk)) for chunk in chunks)

    def corrupt(self, chunk: Chunk) -> None:
        self._corrupt.add(chunk.key)

    def corrupt_all(self) -> None:
        for lane in self._lanes.values():
            lane._corrupt.update(lane.records)

    def lose_all(self) -> None:
        for lane in self._lanes.values():
            lane.records.clear()

    def hold(self) -> None:
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    @property
    def is_open(self) -> bool:
        """Nobody waits for `release`."""
        return self._gate.is_set()

    def known(self, chunks: Sequence[Chunk]) -> int:
        self._check()
        return next((number for number, chunk in enumerate(chunks) if chunk.key not in self.records), len(chunks))

    def may_have(self, chunk: Chunk) -> bool:
        return True

    def load(self, chunk: Chunk, into: memoryview) -> None:
        self.loads.append(chunk.key)
        self.waiting.release()
        self._script._gate.wait()
        self._check()
        if chunk.key not in self.records:
            raise BadRecord("missing")
        into[:] = self.records[chunk.key]
        if chunk.key in self._corrupt:
            into[:] = b"\xff" * len(into)  # NaN in any float
            del self.records[chunk.key]
            self._corrupt.discard(chunk.key)
            raise BadRecord("checksum")

    def store(self, chunk: Chunk, payload: memoryview) -> bool:
        self._script._gate.wait()
        self._check()
        if not self._script.is_full:
            self.records[chunk.key] = bytes(payload)
        return not self._script.is_full

    def status(self) -> TierStatus:
        return TierStatus(self.name, None, None, len(self.records))

    def close(self) -> None:
        self.is_closed = True

    def _check(self) -> None:
        if self._script.fault is not None:
            raise TierFault(self._script.fault)
