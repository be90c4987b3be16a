"""Prefixes below the pool: what ended sessions computed goes down to the tiers, what waiting ones need comes up.

Works on the prefix tree alone. Going down, a lease keeps a path's cells from eviction until they are copied. Coming up,
chunks are fetched into host memory while their session waits, then loaded into cells that nobody else has, which then
enter the tree; so a session finds them there like any other prefix, and knows nothing of tiers.

    queued ──fetch──> in host memory ──load──> in the tree ──> admitted

A tier that has nothing, fails or takes too long costs the session nothing but that wait. Engine thread only.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import numpy as np

from cache.cell_cache import CellCache
from cache.cells import I32
from cache.geometry import CacheFull, CacheMemoryError
from cache.offload.chunks import Chunk, Namespace, chunks_of
from cache.offload.host import HostSlab
from cache.offload.objects import ObjectStores, Prefetch
from cache.offload.store import Store
from cache.offload.tiers import Guarded
from cache.offload.transfers import Moved, Transfers
from cache.radix import Lease, RadixTree, Tokens
from engine.kv_holes import Holes
from engine.types import ObjectGroupReport, TierReport, TiersReport

LONGEST_FETCH_S = 2.0
"""A session waits for its prefix no longer; what has arrived by then is used."""
SHORTEST_FETCH_S = 0.1
"""Nor less, however fast it could compute the prefix itself: that long an answer may take where all is well."""
WORTH_OF_RECOMPUTING = 0.8
"""It waits for no more than this part of the time that computing its prefix would take."""
PRESSURE = 8
"""Copies down are given up when less than this part of the pool is free or may be evicted: 1 / 8."""


@dataclass(eq=False, slots=True)
class _Fetch:
    """A waiting session's prefix on its way up."""

    salt: str | None
    tokens: Tokens
    chunks: list[Chunk]
    job: Prefetch
    since: float
    until: float
    is_loading: bool = False


@dataclass(eq=False, slots=True)
class _Load:
    """Chunks [first, last) of a fetch on their way into adopted cells."""

    fetch: _Fetch
    lease: Lease
    """On what the tree has of the prefix; it ends inside chunk `first` or before it."""
    cells: I32
    first: int
    last: int
    objects: list[tuple[int, int]]
    """(chunk, object group) of all that is brought."""
    next: int = 0
    landed: int = 0


@dataclass(eq=False, slots=True)
class _Keep:
    """A path of the tree on its way down."""

    lease: Lease
    chunks: list[Chunk]
    cells: I32
    """Held until nothing reads them any more: the tree may get others for the same tokens."""
    next: int = 0
    """Of all objects, group by group."""
    refused: set[int] = field(default_factory=set)
    """Object groups whose store has no room, or no use for what follows."""
    gathering: int = 0
    """Copies that still read its cells."""


class KvTiers:
    """One tree's way to the stores of its object groups."""

    def __init__(
        self,
        tree: RadixTree,
        cache: CellCache,
        objects: ObjectStores,
        transfers: Transfers,
        namespace: Namespace,
        chunk_tokens: int,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._tree = tree
        self._cache = cache
        self._objects = objects
        self._holes = Holes(transfers.groups, cache.capacity_cells)
        self._transfers = transfers
        self._namespace = namespace
        self._chunk_tokens = chunk_tokens
        self._clock = clock
        self._lookup_tokens = 0
        self._loaded_tokens = 0
        self._wait_s = 0.0
        self._fetches: dict[Hashable, _Fetch] = {}  # by session
        self._loads: list[_Load] = []
        self._keeps: deque[_Keep] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether `poll` has something to wait for."""
        return bool(self._fetches or self._loads or self._keeps or self._transfers.in_flight)

    @property
    def is_keeping(self) -> bool:
        """Whether a path is on its way down."""
        return bool(self._keeps)

    def poll(self) -> None:
        """Go on with everything that is under way. Never waits."""
        self._transfers.poll()
        for load in list(self._loads):
            self._go_on_loading(load)
        self._go_on_keeping()

    def wait(self, timeout_s: float) -> None:
        """For a turn that has nothing else to do: until a fetch is done, for a moment at most."""
        for fetch in self._fetches.values():
            if not fetch.job.is_done:
                fetch.job.wait(timeout_s)
                return

    def report(self) -> TiersReport:
        """Asks no tier."""
        loaded, stored = self._transfers.traffic()
        return TiersReport(
            namespace=self._namespace.digest.hex(),
            record=self._namespace.record,
            chunk_tokens=self._chunk_tokens,
            chunk_bytes=self._transfers.chunk_bytes,
            object_groups=_object_groups(self._transfers),
            staging_bytes=self._transfers.staging_bytes,
            staging_slots=self._transfers.ring_slots,
            loads_in_flight=loaded.in_flight,
            stores_in_flight=stored.in_flight,
            fetches=len(self._fetches),
            write_backs=self._objects.write_backs,
            lookup_tokens=self._lookup_tokens,
            loaded_tokens=self._loaded_tokens,
            wait_s=self._wait_s,
            tiers=_tier_reports(self._objects, loaded, stored),
        )

    # --- up -----------------------------------------------------------------------------------------------------------

    def expect(self, session: Hashable, salt: str | None, tokens: Tokens, token_s: float) -> None:
        """The session is queued and may begin with `tokens`: fetch what the tree lacks of them.

        token_s: what computing a token takes; infinite where nobody knows.
        """
        chunks = self._chunks(salt, tokens)
        missing = len(chunks) * self._chunk_tokens - self.usable(salt, tokens)
        if missing <= 0:
            return
        worth_s = max(SHORTEST_FETCH_S, WORTH_OF_RECOMPUTING * missing * token_s)
        deadline_s = min(LONGEST_FETCH_S, worth_s)
        self._lookup_tokens += missing
        now = self._clock()
        job = self._objects.prefetch(chunks, deadline_s=deadline_s)
        self._fetches[session] = _Fetch(salt, tokens, chunks, job, now, now + deadline_s)

    def must_wait(self, session: Hashable) -> bool:
        """Whether a prefix of the waiting session is on its way. Begins to load what has been fetched."""
        fetch = self._fetches.get(session)
        if fetch is None:
            return False
        if not fetch.is_loading:
            if not fetch.job.is_done and self._clock() < fetch.until:
                return True
            if not self._begin_loading(fetch):
                self.forget(session)
                return False
            self.poll()
        if any(load.fetch is fetch for load in self._loads):
            return True
        self.forget(session)
        return False

    def forget(self, session: Hashable) -> None:
        """The session waits no longer. A load that is under way still lands in the tree."""
        fetch = self._fetches.pop(session, None)
        if fetch is None:
            return
        self._wait_s += self._clock() - fetch.since
        if not any(load.fetch is fetch for load in self._loads):
            fetch.job.close()

    @property
    def may_have_holes(self) -> bool:
        """Whether a prefix in the tree may have to be cut before a session takes it."""
        return self._holes.has_any

    def usable(self, salt: str | None, tokens: Tokens) -> int:
        """How many leading tokens a session can take from the tree: what is there and whole before its end."""
        if not self._holes.has_any:
            return self._tree.match(salt, tokens).length
        return self._holes.usable(self._tree.found(salt, tokens))

    def has_holes(self, cells: I32) -> bool:
        """Whether some of these cells of the tree lack K/V that a computed one has."""
        return self._holes.are_in(cells)

    def computed(self, cells: I32) -> None:
        """A session brought these cells into the tree."""
        self._holes.computed(cells)

    def _begin_loading(self, fetch: _Fetch) -> bool:
        """False: there is nothing that the tree lacks, or no room for it."""
        last = fetch.job.arrived
        lease = self._tree.acquire(fetch.salt, fetch.tokens[: last * self._chunk_tokens])
        first = lease.length // self._chunk_tokens
        cells = self._adopt((last - first) * self._chunk_tokens) if first < last else None
        if cells is None:
            self._tree.release(lease)
            return False
        fetch.is_loading = True
        begins = self._begins(first, last)
        # Group by group: what moves together is of one group.
        objects = [(chunk, group) for group, begin in enumerate(begins) for chunk in range(begin, last)]
        self._loads.append(_Load(fetch, lease, cells, first, last, objects))
        return True

    def _begins(self, first: int, last: int) -> list[int]:
        """The first chunk that each object group brings: a window needs the last ones alone."""
        return [first if window is None else max(first, last - window) for window in self._objects.windows]

    def _go_on_loading(self, load: _Load) -> None:
        while load.next < len(load.objects):
            index, group = load.objects[load.next]
            host, chunk = self._objects.stores[group].host, load.fetch.chunks[index]
            memory = host.hold(chunk)
            assert memory is not None, "the fetch holds what has arrived"
            start = (index - load.first) * self._chunk_tokens

            def done(host: HostSlab = host, chunk: Chunk = chunk) -> None:
                host.release(chunk)
                load.landed += 1

            cells = load.cells[start : start + self._chunk_tokens]
            if not self._transfers.load(memory, cells, done=done, object_group=group):
                host.release(chunk)
                break
            load.next += 1
        self._transfers.poll()
        if load.landed == len(load.objects):
            self._finish_loading(load)

    def _finish_loading(self, load: _Load) -> None:
        """Give the tree the loaded cells that it still lacks; the others are free again."""
        tokens = load.fetch.tokens[: load.last * self._chunk_tokens]
        known = self._tree.cells_past(load.lease, tokens)
        own = load.cells[load.lease.length - load.first * self._chunk_tokens :]
        self._holes.loaded(load.cells, load.first, self._begins(load.first, load.last))
        self._tree.extend(load.lease, tokens, np.concatenate((known, own[known.size :])))
        self._loaded_tokens += own.size - known.size
        self._cache.release_cells(load.cells)
        self._tree.release(load.lease)
        self._loads.remove(load)
        load.fetch.job.close()

    def _adopt(self, count: int) -> I32 | None:
        """Cells that only we hold, for K/V that no forward computes. None: there is no room beside what is running."""
        missing = count - self._cache.free_cells
        if missing > self._tree.num_evictable:
            return None
        if missing > 0:
            self._tree.evict(missing)
        try:
            return self._cache.claim_cells(count)
        except (CacheFull, CacheMemoryError):
            return None

    # --- down ---------------------------------------------------------------------------------------------------------

    def keep(self, salt: str | None, tokens: Tokens, lease: Lease) -> None:
        """Copy down what the tiers lack of a path of the tree. `tokens` is the lease's path."""
        chunks = self._chunks(salt, tokens)
        if chunks:
            cells = self._tree.cells(lease)
            self._cache.hold_cells(cells)
            self._keeps.append(_Keep(self._tree.share(lease), chunks, cells))
            self._go_on_keeping()

    def _go_on_keeping(self) -> None:
        room = self._cache.free_cells + self._tree.num_evictable
        is_short = room * PRESSURE < self._cache.capacity_cells
        for keep in list(self._keeps):
            if is_short:
                keep.next = self._num_objects(keep)
            self._copy_down(keep)
            if keep.next == self._num_objects(keep) and not keep.gathering:
                self._cache.release_cells(keep.cells)
                self._tree.release(keep.lease)
                self._keeps.remove(keep)

    def _num_objects(self, keep: _Keep) -> int:
        return len(keep.chunks) * len(self._objects.stores)

    def _copy_down(self, keep: _Keep) -> None:
        while keep.next < self._num_objects(keep):
            group, index = divmod(keep.next, len(keep.chunks))
            if not self._transfers.can_store(group):
                break
            keep.next += 1
            store, chunk = self._objects.stores[group], keep.chunks[index]
            if group in keep.refused:
                continue
            cells = keep.cells[index * self._chunk_tokens : (index + 1) * self._chunk_tokens]
            is_whole = self._holes.can_store(cells, group)
            memory = store.reserve(chunk) if is_whole else None
            if memory is None:
                if store.host.hold(chunk) is not None:
                    store.host.release(chunk)  # it was used now
                elif is_whole:  # no room, or another is at it: the rest is of no use
                    keep.refused.add(group)
                continue

            def gathered() -> None:
                keep.gathering -= 1

            def done(store: Store = store, chunk: Chunk = chunk) -> None:
                store.publish(chunk)

            keep.gathering += 1
            self._transfers.store(cells, memory, gathered=gathered, done=done, object_group=group)
        self._transfers.flush()

    def _chunks(self, salt: str | None, tokens: Tokens) -> list[Chunk]:
        name = "" if salt is None else f"salt {salt}"  # no salt is not the empty one
        return chunks_of(replace(self._namespace, salt=name), tokens, self._chunk_tokens)


def _object_groups(transfers: Transfers) -> tuple[ObjectGroupReport, ...]:
    groups = transfers.groups
    return tuple(
        ObjectGroupReport(
            layers=tuple(
                sorted({layer for index in group.kernel_groups for layer in groups.kernel_groups[index].layers})
            ),
            window_chunks=group.window_chunks,
            object_bytes=transfers.object_bytes(group.index),
        )
        for group in groups.object_groups
    )


def _tier_reports(objects: ObjectStores, loaded: Moved, stored: Moved) -> tuple[TierReport, ...]:
    """The object groups' shares of each tier together. Host memory's traffic is the way between it and the pool."""
    shares = [[_host_share(store.host), *map(_tier_share, store.tiers)] for store in objects.stores]
    host, *below = (functools.reduce(_together, of_one_tier) for of_one_tier in zip(*shares, strict=True))
    moved = {"loaded_bytes": loaded.size, "stored_bytes": stored.size}
    return (replace(host, **moved, load_s=loaded.seconds, store_s=stored.seconds), *below)


def _host_share(host: HostSlab) -> TierReport:
    status = host.status()
    return TierReport(
        name=status.name,
        capacity_bytes=status.capacity_bytes,
        used_bytes=status.used_bytes,
        entries=status.objects,
        held=status.holds,
        hits=host.hits,
        misses=host.misses,
        errors=host.counts["tokens"],
        counts=tuple(sorted(host.counts.items())),
    )


def _tier_share(guarded: Guarded) -> TierReport:
    status, traffic = guarded.tier.status(), guarded.traffic()
    return TierReport(
        name=status.name,
        capacity_bytes=status.capacity_bytes,
        used_bytes=status.used_bytes,
        entries=status.objects,
        breaker=guarded.breaker.state,
        hits=traffic.hits,
        misses=traffic.misses,
        errors=traffic.errors,
        loaded_bytes=traffic.loaded_bytes,
        stored_bytes=traffic.stored_bytes,
        load_s=traffic.load_s,
        store_s=traffic.store_s,
        counts=tuple(sorted(guarded.counts.items())),
    )


def _together(one: TierReport, other: TierReport) -> TierReport:
    """Sums; the worse of two breakers."""
    counts = Counter(dict(one.counts)) + Counter(dict(other.counts))
    sums = {
        name: getattr(one, name) + getattr(other, name)
        for name in ("held", "hits", "misses", "errors", "loaded_bytes", "stored_bytes", "load_s", "store_s")
    }
    for name in ("capacity_bytes", "used_bytes", "entries"):
        both = (getattr(one, name), getattr(other, name))
        sums[name] = None if None in both else sum(both)
    worse = max(one.breaker, other.breaker, key=("closed", "half-open", "open").index)
    return TierReport(name=one.name, breaker=worse, counts=tuple(sorted(counts.items())), **sums)
