"""A chunk's objects, each kind in a store of its own, and a request's chunks on their way up from all of them.

An object group is stored apart from the others (O1, O2), so that a prefix brings up only what its end can see of layers
with a window: all chunks of a group that sees everything, the last few of one that does not (O3).

    chunks      0   1   2   3   4   5   6            hit of 6 chunks, a window of 2
    full        x   x   x   x   x   x   -
    windowed    .   .   .   .   x   x                . there or not, nobody asks
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cache.offload.chunks import Chunk
from cache.offload.groups import Groups

if TYPE_CHECKING:
    from cache.offload.store import Store


class Lane(NamedTuple):
    """Where one object group is kept."""

    store: Store
    window: int | None
    """How many chunks before its end a prefix needs of it; None needs them all."""
    worth_s: float
    """A tier that takes longer for an object is not asked for it."""


def needed_windows(groups: Groups) -> tuple[int | None, ...]:
    """By object group, the chunks before a prefix's end that it needs; None: all of them.

    Where every layer has a window, the first group's chunks are needed from the first one on.
    """
    windows = tuple(group.window_chunks for group in groups.object_groups)
    return windows if None in windows else (None, *windows[1:])


CHUNKS_AT_ONCE = 256
"""The engine thread looks for no more in host memory at a time: about a millisecond."""


class Prefetch:
    """The chunks of one waiting request on their way into host memory.

    Made by `ObjectStores.prefetch`, closed by its owner: exactly once, in one place. Any thread may read.
    """

    def __init__(self, lanes: Sequence[Lane], chunks: Sequence[Chunk], started: float, until: float) -> None:
        self.chunks = tuple(chunks)
        self._full = [lane for lane in lanes if lane.window is None]
        self._windowed = [(lane, lane.window) for lane in lanes if lane.window is not None]
        self._clock = lanes[0].store.clock
        self._until = until
        # What windows need is known behind the rest, and needs time too.
        self._full_until = started + 0.8 * (until - started) if self._windowed else until
        self._lock = threading.Lock()
        self._held: list[tuple[Store, Chunk]] = []
        self._count = 0
        """Leading chunks of which `begin` has the full groups' objects."""
        self._arrived = 0
        self._is_closed = False
        self._is_done = threading.Event()

    @property
    def arrived(self) -> int:
        """Leading chunks that may be loaded into the pool now: all that they need is held. Only grows until `close`.

        With windows it is 0 until the end is known.
        """
        return self._arrived

    @property
    def is_done(self) -> bool:
        """Nothing more will arrive."""
        return self._is_done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Whether it is done. For threads that may wait; the engine thread reads `is_done`."""
        return self._is_done.wait(timeout_s)

    def close(self) -> None:
        """Let the chunks go; what is still under way lands in host memory for the next one. Idempotent."""
        with self._lock:
            self._is_closed = True
            held, self._held = self._held, []
        for store, chunk in held:
            store.host.release(chunk)

    # -- On the engine thread, before `run`

    def begin(self) -> bool:
        """Take what host memory has, which waits for nobody and no tier; -> whether `run` has anything left to do."""
        count = 0
        for chunk in self.chunks[:CHUNKS_AT_ONCE]:
            if not all(self._take(lane, chunk) for lane in self._full):
                break
            count += 1
        self._count = count
        if not self._windowed:
            self._arrived = count
        if count < len(self.chunks) and self._may_come(self.chunks[count]):
            return True
        needed = [
            (lane, chunk) for lane, window in self._windowed for chunk in self.chunks[max(0, count - window) : count]
        ]
        if not all(self._take(lane, chunk) for lane, chunk in needed):
            return True
        self._arrived = count
        self._is_done.set()
        return False

    def _take(self, lane: Lane, chunk: Chunk) -> bool:
        if lane.store.host.fetch(chunk) is None:
            return False
        self._held.append((lane.store, chunk))
        return True

    def _may_come(self, chunk: Chunk) -> bool:
        return all(lane.store.may_have(chunk, lane.worth_s) for lane in self._full)

    # -- On a loader thread

    def run(self) -> None:
        try:
            count = self._bring_leading()
            if self._windowed:
                self._arrived = self._longest_usable(count)
        finally:
            self._is_done.set()

    def _bring_leading(self) -> int:
        count = self._count
        for chunk in self.chunks[count:]:
            if self._is_closed or self._clock() >= self._full_until:
                break
            if not all(self._bring(lane, chunk) for lane in self._full):
                break
            count += 1
            if not self._windowed:
                self._arrived = count
        return count

    def _longest_usable(self, count: int) -> int:
        """Probe downward from the hit of the full groups: a shorter prefix may be whole where a longer one is not."""
        brought: set[tuple[int, int]] = set()
        while count and not self._is_closed:
            lost = self._lost_before(count, brought)
            if lost is None:
                return count
            count = lost  # whatever ends behind it, within its window, needs it as well
        return 0

    def _lost_before(self, end: int, brought: set[tuple[int, int]]) -> int | None:
        """The last chunk that a prefix of `end` chunks needs and does not get; None when it has what it needs."""
        for number, (lane, window) in enumerate(self._windowed):
            for index in range(end - 1, max(0, end - window) - 1, -1):
                if (number, index) not in brought:
                    if not self._bring(lane, self.chunks[index]):
                        return index
                    brought.add((number, index))
        return None

    def _bring(self, lane: Lane, chunk: Chunk) -> bool:
        """Whether the object is resident and held for us; let it go again when nobody wants it any more."""
        store = lane.store
        if not store.bring(chunk, self._until, lane.worth_s):
            return False
        with self._lock:
            if not self._is_closed:
                self._held.append((store, chunk))
                return True
        store.host.release(chunk)
        return False


class ObjectStores:
    """All object groups of one namespace. At least one is kept whole: it says how long a prefix is."""

    def __init__(self, stores: Sequence[Store], windows: Sequence[int | None] = (None,)) -> None:
        """windows: of each store's object group, in chunks, as `needed_windows` says."""
        assert len(stores) == len(windows)
        assert None in windows, "nothing says how long a prefix is"
        self.stores = tuple(stores)
        self.windows = tuple(windows)
        chunk_bytes = sum(store.host.chunk_bytes for store in stores)
        self._parts = [store.host.chunk_bytes / chunk_bytes for store in stores]

    def may_have(self, chunk: Chunk, *, chunk_s: float = math.inf) -> bool:
        """Whether a prefix that begins with this chunk has a chance. Asks nobody who might make one wait.

        chunk_s: what all of a chunk may take; a tier that is known to be slower does not count.
        """
        return all(lane.store.may_have(chunk, lane.worth_s) for lane in self._lanes(chunk_s) if lane.window is None)

    def are_kept(self, chunk: Chunk) -> bool:
        """Whether host memory has, or is getting, all that a chunk behind this one asks of it."""
        return all(lane.store.host.is_kept(chunk) for lane in self._lanes(math.inf) if lane.window is None)

    def prefetch(self, chunks: Sequence[Chunk], *, deadline_s: float, chunk_s: float = math.inf) -> Prefetch:
        """Begin to bring up as many leading chunks as there are, until the deadline. Returns at once, with what host
        memory has.

        chunk_s: as `may_have` has it.
        """
        first = self.stores[0]
        now = first.clock()
        job = Prefetch(self._lanes(chunk_s), chunks, now, now + deadline_s)
        if job.begin():
            first.load_later(job.run)
        return job

    def _lanes(self, chunk_s: float) -> list[Lane]:
        """Each object may take its part of the chunk's time."""
        kept = zip(self.stores, self.windows, self._parts, strict=True)
        return [Lane(store, window, chunk_s * part) for store, window, part in kept]

    @property
    def write_backs(self) -> int:
        """Objects that wait to be copied down."""
        return sum(store.write_backs for store in self.stores)

    def flush(self, timeout_s: float) -> bool:
        """As `Store.flush`, of each."""
        return all([store.flush(timeout_s) for store in self.stores])

    def close(self) -> None:
        """As `Store.close`, of each. Idempotent."""
        for store in self.stores:
            store.close()
