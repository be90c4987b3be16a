"""Prefixes below the pool: what ended sessions computed goes down to the tiers, what waiting ones need comes up.

Works on the prefix tree alone. Going down, a lease keeps a path's cells from eviction until they are copied. Coming up,
chunks are fetched into host memory while their session waits, then loaded into cells that nobody else has, which then
enter the tree; so a session finds them there like any other prefix, and knows nothing of tiers.

    queued ──fetch──> in host memory ──load──> in the tree ──> admitted

A tier that has nothing, fails or takes too long costs the session nothing but that wait. Engine thread only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import numpy as np

from cache.cell_cache import CellCache
from cache.cells import I32
from cache.geometry import CacheFull, CacheMemoryError
from cache.offload.chunks import Chunk, ChunkChain, Namespace
from cache.offload.host import HostSlab
from cache.offload.objects import ObjectStores, Prefetch
from cache.offload.store import Store
from cache.offload.transfers import Transfers
from cache.radix import Lease, RadixTree, Tokens
from engine.kv_holes import Holes
from engine.kv_reports import object_groups, tier_reports
from engine.types import TiersReport

LONGEST_FETCH_S = 2.0
"""A session waits for its prefix no longer; what has arrived by then is used."""
SHORTEST_FETCH_S = 0.1
"""Nor less, however fast it could compute the prefix itself: that long an answer may take where all is well."""
WORTH_OF_RECOMPUTING = 0.8
"""It waits for no more than this part of the time that computing its prefix would take, and asks no tier that is known
to need more."""
PRESSURE = 8
"""Copies down are given up when less than this part of the pool is free or may be evicted: 1 / 8."""


@dataclass(eq=False, slots=True)
class _Path:
    """A session's tokens as chunks."""

    chain: ChunkChain
    """Of what was asked for so far; each is hashed once."""
    num_kept: int = 0
    """Leading chunks that were sent down; whether they are there is for host memory to say."""


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
    """What the tiers may lack of a path of the tree, on its way down."""

    lease: Lease
    chunks: list[Chunk]
    """Those behind what was kept before."""
    cells: I32
    """Of these chunks. Held until nothing reads them any more: the tree may get others for the same tokens."""
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
        self._worth_s = math.inf
        """What a chunk may take to come up, as of the last look."""
        self._paths: dict[Hashable, _Path] = {}  # by session
        self._fetches: dict[Hashable, _Fetch] = {}  # by session
        self._loads: list[_Load] = []
        self._keeps: deque[_Keep] = deque()

    @property
    def chunk_tokens(self) -> int:
        """What is shorter is not kept."""
        return self._chunk_tokens

    @property
    def is_busy(self) -> bool:
        """Whether `poll` has something to wait for."""
        return bool(self._fetches or self._loads or self._keeps or self._transfers.in_flight)

    @property
    def wants_more(self) -> bool:
        """Whether what is to go down leaves room in the next batch. Few chunks cost the host as much as a batch."""
        waiting = sum(self._num_objects(keep) - keep.next for keep in self._keeps)
        return waiting < self._transfers.batch_size and self._transfers.can_store()

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
            object_groups=object_groups(self._transfers),
            staging_bytes=self._transfers.staging_bytes,
            staging_slots=self._transfers.ring_slots,
            loads_in_flight=loaded.in_flight,
            stores_in_flight=stored.in_flight,
            fetches=len(self._fetches),
            write_backs=self._objects.write_backs,
            lookup_tokens=self._lookup_tokens,
            loaded_tokens=self._loaded_tokens,
            wait_s=self._wait_s,
            worth_chunk_s=None if math.isinf(self._worth_s) else self._worth_s,
            tiers=tier_reports(self._objects, loaded, stored),
        )

    # --- up -----------------------------------------------------------------------------------------------------------

    def expect(self, session: Hashable, salt: str | None, tokens: Tokens, token_s: float) -> None:
        """The session is queued and may begin with `tokens`: fetch what the tree lacks of them.

        token_s: what computing a token takes; infinite where nobody knows.
        """
        whole = tokens.size // self._chunk_tokens
        missing = whole * self._chunk_tokens - self.usable(salt, tokens)
        if missing <= 0:
            return
        self._lookup_tokens += missing
        path = self._path(session, salt)
        self._worth_s = WORTH_OF_RECOMPUTING * self._chunk_tokens * token_s
        if not self._objects.may_have(path.chain.reach(tokens, 1)[0], chunk_s=self._worth_s):
            return
        chunks = path.chain.reach(tokens, whole)
        worth_s = max(SHORTEST_FETCH_S, WORTH_OF_RECOMPUTING * missing * token_s)
        deadline_s = min(LONGEST_FETCH_S, worth_s)
        now = self._clock()
        job = self._objects.prefetch(chunks, deadline_s=deadline_s, chunk_s=self._worth_s)
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

    def ended(self, session: Hashable) -> None:
        """The session will not come back."""
        self._paths.pop(session, None)

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

    def keep(self, session: Hashable, salt: str | None, tokens: Tokens, lease: Lease) -> None:
        """Copy down what the tiers lack of a session's path, when `poll` comes. `tokens` is the lease's path."""
        path, whole = self._path(session, salt), tokens.size // self._chunk_tokens
        if path.num_kept and not self._objects.are_kept(path.chain.chunks[path.num_kept - 1]):
            path.num_kept = 0  # it was dropped or evicted: nothing behind it would be taken in
        if path.num_kept >= whole or self._is_short:
            return
        chunks = path.chain.reach(tokens, whole)[path.num_kept :]
        cells = self._tree.cells(lease)[path.num_kept * self._chunk_tokens : whole * self._chunk_tokens]
        path.num_kept = whole
        self._cache.hold_cells(cells)
        self._keeps.append(_Keep(self._tree.share(lease), chunks, cells))

    @property
    def _is_short(self) -> bool:
        room = self._cache.free_cells + self._tree.num_evictable
        return room * PRESSURE < self._cache.capacity_cells

    def _go_on_keeping(self) -> None:
        if not self._keeps:
            return
        is_short = self._is_short
        for keep in list(self._keeps):
            if is_short:
                keep.next = self._num_objects(keep)
            self._copy_down(keep)
            if keep.next == self._num_objects(keep) and not keep.gathering:
                self._cache.release_cells(keep.cells)
                self._tree.release(keep.lease)
                self._keeps.remove(keep)
        self._transfers.flush()

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
                if not store.host.is_kept(chunk, is_wanted_again=True) and is_whole:  # there is no room behind it
                    keep.refused.add(group)
                continue

            def gathered() -> None:
                keep.gathering -= 1

            def done(store: Store = store, chunk: Chunk = chunk) -> None:
                store.publish(chunk)

            keep.gathering += 1
            self._transfers.store(cells, memory, gathered=gathered, done=done, object_group=group)

    def _path(self, session: Hashable, salt: str | None) -> _Path:
        path = self._paths.get(session)
        if path is None:
            name = "" if salt is None else f"salt {salt}"  # no salt is not the empty one
            path = _Path(ChunkChain(replace(self._namespace, salt=name), self._chunk_tokens))
            self._paths[session] = path
        return path
