"""The tiers together: chunks go down behind a request, and come up while the next one queues.

    pool ──reserve, publish──> host slab ──write-back──> disk, Redis        one writer thread
    pool <──hold, release────  host slab <──prefetch───  disk, Redis        a few loader threads

The engine thread calls `reserve`, `publish`, `prefetch` and reads what has arrived; none of these waits for a tier.
Whatever goes wrong below (missing, short, another chunk's bytes, a wrong checksum, slow, gone, full) makes a prefix
shorter and is counted; no error leaves this file and no byte that was not verified becomes resident.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from cache.offload.chunks import Chunk
from cache.offload.host import HostSlab, bytes_view
from cache.offload.tiers import Guarded, Tier, TierStatus

logger = logging.getLogger(__name__)

Job = Callable[[], None]


class Store:
    """One object group's chunks, of one namespace, in host memory and below."""

    def __init__(
        self,
        host: HostSlab,
        tiers: Sequence[Tier] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        num_loaders: int = 2,
        max_write_backs: int = 64,
        slow_s: float = 1.0,
    ) -> None:
        """tiers: nearest first; each gets a copy of everything. max_write_backs: chunks waiting to be copied down."""
        self.host = host
        self.clock = clock
        self.tiers = [Guarded(tier, clock, slow_s=slow_s) for tier in tiers]
        self.counts: Counter[str] = Counter()
        self._max_write_backs = max_write_backs
        self._lock = threading.Lock()  # guards the three below
        self._fills: dict[bytes, threading.Event] = {}  # chunks that a loader is bringing up
        self._write_backs = 0
        self._is_closed = False
        self._idle = threading.Condition(self._lock)
        self._loads: SimpleQueue[Job | None] = SimpleQueue()
        self._stores: SimpleQueue[Job | None] = SimpleQueue()
        self._threads = [_started(self._loads, f"cellserve-kv-load-{index}") for index in range(num_loaders)]
        self._threads.append(_started(self._stores, "cellserve-kv-store"))

    # -- Down

    def reserve(self, chunk: Chunk) -> torch.Tensor | None:
        """Host memory for a chunk that the pool has, then `publish` or `abandon`.

        None: it is there already, or cannot be kept.
        """
        with self._lock:
            if self._is_closed:
                return None
        return self.host.reserve(chunk)

    def publish(self, chunk: Chunk) -> None:
        """The chunk's bytes are all there: it may be used, and is copied to the tiers when their turn comes."""
        with self._lock:
            write_back = bool(self.tiers) and not self._is_closed
            if write_back and self._write_backs >= self._max_write_backs:
                self.counts["write-back dropped"] += 1
                write_back = False
            self._write_backs += write_back
        if not self.host.publish(chunk, holds=int(write_back)):
            if write_back:
                self._end_write_back()
        elif write_back:
            self._stores.put(lambda: self._write_back(chunk))

    def abandon(self, chunk: Chunk) -> None:
        """The copy failed: as if never reserved."""
        self.host.abandon(chunk)

    # -- Up

    def may_have(self, chunk: Chunk, worth_s: float = math.inf) -> bool:
        """Whether `bring` has a chance. For the engine thread; asks no tier that would have to ask somebody.

        Where all that may have it are too slow, one of them is tried once in a while, and nobody waits for that.
        """
        if self.host.has(chunk):
            return True
        found = [guarded for guarded in self.tiers if guarded.may_have(chunk)]
        if any([guarded.is_worth(worth_s) for guarded in found]):
            return True
        if any([guarded.pace.take_probe() for guarded in found]):
            self.load_later(lambda: self._probe(chunk))
        else:
            self.host.missed()
        return False

    def load_later(self, job: Job) -> None:
        """Run it on a loader thread, where `bring` may wait."""
        self._loads.put(job)

    def bring(self, chunk: Chunk, until: float, worth_s: float = math.inf) -> bool:
        """Make the chunk resident and hold it. For loader threads: blocks for as long as a tier does.

        worth_s: a tier that is known to take longer is not asked. Two that want one chunk load it once: the second
        waits for the first (I4), until its own deadline.
        """
        if self.host.fetch(chunk) is not None:
            return True
        self.host.missed()
        while True:
            with self._lock:
                filling = self._fills.get(chunk.key)
                if filling is None:
                    self._fills[chunk.key] = threading.Event()
                    break
            if not filling.wait(max(0.0, until - self.clock())):
                self.counts["deadline"] += 1
                return False
            if self.host.hold(chunk) is not None:
                return True
        try:
            return self._fill(chunk, worth_s)
        finally:
            with self._lock:
                self._fills.pop(chunk.key).set()

    # -- What is there

    def leading(self, chunks: Sequence[Chunk]) -> int:
        """How many leading chunks are in host memory; asks no tier."""
        return self.host.leading(list(chunks))

    def status(self) -> dict[str, tuple[TierStatus, str, dict[str, int]]]:
        """By tier: its snapshot, its breaker's state, what was counted."""
        found = {self.host.name: (self.host.status(), "closed", dict(self.host.counts))}
        for guarded in self.tiers:
            found[guarded.tier.name] = (guarded.tier.status(), guarded.breaker.state, dict(guarded.counts))
        return found

    @property
    def write_backs(self) -> int:
        """Chunks that wait to be copied down."""
        with self._lock:
            return self._write_backs

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything published is copied down, or for so long; -> whether it is."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._write_backs, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Take in nothing more, copy down what there is time for, stop the threads. Idempotent.

        A thread that a tier does not let go is left behind; it is a daemon.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        give_up = time.monotonic() + timeout_s
        self.flush(timeout_s)
        self._stores.put(None)
        for _ in self._threads[:-1]:
            self._loads.put(None)
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            for guarded in self.tiers:
                guarded.tier.close()

    # -- On a loader thread

    def _fill(self, chunk: Chunk, worth_s: float) -> bool:
        if self.host.hold(chunk) is not None:  # it came while we looked
            return True
        for guarded in self.tiers:
            started = self.clock()
            if not guarded.is_worth(worth_s) or not guarded.known([chunk]):
                continue
            memory = self.host.reserve(chunk)
            if memory is None:
                return False
            is_filled = False
            try:
                is_filled = guarded.load(chunk, bytes_view(memory))
            finally:
                if not is_filled:
                    self.host.abandon(chunk)
            if is_filled:
                guarded.pace.measured(self.clock() - started)
                return self.host.publish(chunk, holds=1)
        return False

    def _probe(self, chunk: Chunk) -> None:
        """Bring it for the sake of its time."""
        if self.bring(chunk, self.clock()):
            self.host.release(chunk)
        for guarded in self.tiers:
            guarded.pace.probe_failed()

    # -- On the writer thread

    def _write_back(self, chunk: Chunk) -> None:
        memory = self.host.hold(chunk)
        assert memory is not None, "a chunk waiting to be copied down is held"
        self.host.release(chunk)  # `publish` holds it for us
        try:
            for guarded in self.tiers:
                guarded.store(chunk, bytes_view(memory))
        finally:
            self.host.release(chunk)
            self._end_write_back()

    def _end_write_back(self) -> None:
        with self._idle:
            self._write_backs -= 1
            if not self._write_backs:
                self._idle.notify_all()


def _started(jobs: SimpleQueue[Job | None], name: str) -> threading.Thread:
    thread = threading.Thread(target=_work, args=(jobs,), name=name, daemon=True)
    thread.start()
    return thread


def _work(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:  # a fault of ours, not of a tier: this chunk is lost, the thread goes on
            logger.exception("a K/V transfer between tiers failed")
