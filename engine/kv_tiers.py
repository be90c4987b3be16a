"""Prefixes below the pool: what ended sessions computed goes down to the tiers, what waiting ones need comes up.

Works on the prefix tree alone. Going down, a lease keeps a path's cells from eviction until they are copied. Coming up,
chunks are fetched into host memory while their session waits, then loaded into cells that nobody else has, which then
enter the tree; so a session finds them there like any other prefix, and knows nothing of tiers.

    queued ──fetch──> in host memory ──load──> in the tree ──> admitted

A tier that has nothing, fails or takes too long costs the session nothing but that wait. Engine thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import numpy as np

from cache.cell_cache import CellCache
from cache.cells import I32
from cache.geometry import CacheFull, CacheMemoryError
from cache.offload.chunks import Chunk, Namespace, chunks_of
from cache.offload.host import HostSlab
from cache.offload.store import Prefetch, Store
from cache.offload.tiers import Guarded
from cache.offload.transfers import Moved, Transfers
from cache.radix import Lease, RadixTree, Tokens
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
    next: int
    landed: int = 0


@dataclass(eq=False, slots=True)
class _Keep:
    """A path of the tree on its way down."""

    lease: Lease
    chunks: list[Chunk]
    cells: I32
    next: int = 0
    gathering: int = 0
    """Copies that still read its cells."""


class KvTiers:
    """One tree's way to one store."""

    def __init__(
        self,
        tree: RadixTree,
        cache: CellCache,
        store: Store,
        transfers: Transfers,
        namespace: Namespace,
        chunk_tokens: int,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._tree = tree
        self._cache = cache
        self._store = store
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
            write_backs=self._store.write_backs,
            lookup_tokens=self._lookup_tokens,
            loaded_tokens=self._loaded_tokens,
            wait_s=self._wait_s,
            tiers=(_host_report(self._store.host, loaded, stored), *map(_tier_report, self._store.tiers)),
        )

    # --- up -----------------------------------------------------------------------------------------------------------

    def expect(self, session: Hashable, salt: str | None, tokens: Tokens, token_s: float) -> None:
        """The session is queued and may begin with `tokens`: fetch what the tree lacks of them.

        token_s: what computing a token takes; infinite where nobody knows.
        """
        chunks = self._chunks(salt, tokens)
        missing = len(chunks) * self._chunk_tokens - self._tree.match(salt, tokens).length
        if missing <= 0:
            return
        worth_s = max(SHORTEST_FETCH_S, WORTH_OF_RECOMPUTING * missing * token_s)
        deadline_s = min(LONGEST_FETCH_S, worth_s)
        self._lookup_tokens += missing
        now = self._clock()
        job = self._store.prefetch(chunks, deadline_s=deadline_s)
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
        self._loads.append(_Load(fetch, lease, cells, first, last, first))
        return True

    def _go_on_loading(self, load: _Load) -> None:
        while load.next < load.last:
            chunk = load.fetch.chunks[load.next]
            memory = self._store.host.hold(chunk)
            assert memory is not None, "the fetch holds what has arrived"
            start = (load.next - load.first) * self._chunk_tokens

            def done(chunk: Chunk = chunk) -> None:
                self._store.host.release(chunk)
                load.landed += 1

            if not self._transfers.load(memory, load.cells[start : start + self._chunk_tokens], done=done):
                self._store.host.release(chunk)
                break
            load.next += 1
            self._transfers.poll()
        if load.landed == load.last - load.first:
            self._finish_loading(load)

    def _finish_loading(self, load: _Load) -> None:
        """Give the tree the loaded cells that it still lacks; the others are free again."""
        tokens = load.fetch.tokens[: load.last * self._chunk_tokens]
        known = self._tree.cells_past(load.lease, tokens)
        own = load.cells[load.lease.length - load.first * self._chunk_tokens :]
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
            self._keeps.append(_Keep(self._tree.share(lease), chunks, cells))
            self._go_on_keeping()

    def _go_on_keeping(self) -> None:
        room = self._cache.free_cells + self._tree.num_evictable
        is_short = room * PRESSURE < self._cache.capacity_cells
        for keep in list(self._keeps):
            if is_short:
                keep.next = len(keep.chunks)
            self._copy_down(keep)
            if keep.next == len(keep.chunks) and not keep.gathering:
                self._tree.release(keep.lease)
                self._keeps.remove(keep)

    def _copy_down(self, keep: _Keep) -> None:
        while keep.next < len(keep.chunks) and self._transfers.can_store:
            chunk = keep.chunks[keep.next]
            if self._store.host.hold(chunk) is not None:
                self._store.host.release(chunk)  # it was used now
                keep.next += 1
                continue
            memory = self._store.reserve(chunk)
            if memory is None:  # no room, or another is at it: what follows would be of no use
                keep.next = len(keep.chunks)
                return
            start = keep.next * self._chunk_tokens

            def gathered() -> None:
                keep.gathering -= 1

            keep.gathering += 1
            keep.next += 1
            self._transfers.store(
                keep.cells[start : start + self._chunk_tokens],
                memory,
                gathered=gathered,
                done=lambda chunk=chunk: self._store.publish(chunk),  # type: ignore[misc]
            )
            self._transfers.poll()

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


def _host_report(host: HostSlab, loaded: Moved, stored: Moved) -> TierReport:
    """Its bytes and seconds are those of the way between it and the pool."""
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
        loaded_bytes=loaded.size,
        stored_bytes=stored.size,
        load_s=loaded.seconds,
        store_s=stored.seconds,
        counts=tuple(sorted(host.counts.items())),
    )


def _tier_report(guarded: Guarded) -> TierReport:
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
