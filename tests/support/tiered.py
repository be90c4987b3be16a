"""The toy decoder's engine over tiers, turned by hand: whoever reads a cell that is not its own draws other tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch

from cache.offload.chunks import Namespace, geometry_record
from cache.offload.disk import DiskTier
from cache.offload.groups import Groups
from cache.offload.host import HostSlab
from cache.offload.objects import ObjectStores, needed_windows
from cache.offload.records import Layout
from cache.offload.redis_tier import RedisTier
from cache.offload.store import Store
from cache.offload.tiers import Tier
from cache.offload.transfers import CopyStream, HostMark, InlineStream, Mark, Transfers
from engine.kv_tiers import KvTiers
from engine.tier_setup import object_namespace
from support.looped import Engine
from support.poison import poison_free_cells
from support.tier_chunks import FakeTier
from support.toy_decoder import VOCAB, ToyDecoder
from support.toy_executor import toy_executor
from support.toy_server import Overlapping

GREEDY = {"temperature": 0.0}
CHUNK = 16
CPU = torch.device("cpu")
WAIT_S = 10


class LaggingMark(HostMark):
    LAG = 3

    def __init__(self) -> None:
        super().__init__()
        self._asked = 0

    def is_passed(self) -> bool:
        self._asked += 1
        return self._asked > self.LAG


class LaggingStream:
    """Copies count as finished some questions later, as on a device."""

    def use(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> Mark:
        return LaggingMark()


class Tiered(Engine):
    """The toy decoder's engine over tiers, with NaN in every free cell before each step."""

    def __init__(
        self,
        model: ToyDecoder,
        *tiers: Tier,
        slots: int = 64,
        cells: int = 255,
        seqs: int = 8,
        stream: Callable[[], CopyStream] = InlineStream,
        folder: Path | None = None,
        url: str | None = None,
        overlaps: bool = False,
        tails: bool = False,
        ring: int = 2,
    ) -> None:
        """tails: layers with a window keep theirs, as a server does unless told otherwise. ring: staging slots of each
        direction, two batches. A FakeTier is shared by all object groups."""
        executor = toy_executor(model, capacity_cells=cells)
        cache = executor.cache_control
        groups = Groups.of(model.geometry, torch.float32, CHUNK, separate=tails, full_windows=not tails)
        transfers = Transfers(cache.pool, groups, CPU, ring_slots=ring, make_stream=stream)
        space = Namespace("toy", "float32", geometry_record(model.geometry), "table")
        windows = needed_windows(groups)
        stores = []
        for index, window in enumerate(windows):
            size, own = transfers.object_bytes(index), object_namespace(space, groups, index)
            layout = Layout(own.digest, CHUNK, size)
            below: list[Tier] = [tier.lane(index) if isinstance(tier, FakeTier) else tier for tier in tiers]
            if url is not None:
                below.append(RedisTier(url, layout))
            if folder is not None:
                below.append(DiskTier(folder / str(index), own, layout, 8 << 20, needs_parents=window is None))
            stores.append(Store(HostSlab(size, slots * size, needs_parents=window is None), below))
        self.transfers = transfers
        self.cache = cache
        self.objects = ObjectStores(stores, windows)
        self.store = stores[0]
        super().__init__(
            Overlapping(executor) if overlaps else executor,
            seqs=seqs,
            budget=24,
            chunk=8,
            clock=time.monotonic,
            make_tiers=lambda tree: KvTiers(tree, cache, self.objects, transfers, space, CHUNK, clock=time.monotonic),
        )

    def step(self):
        poison_free_cells(self.executor.cache_control)
        return super().step()

    def ask(self, name: str, prompt: list[int], new: int = 3, **fields: object) -> int:
        """-> the prompt tokens that were there already."""
        self.submit(name, prompt, max_new_tokens=new, sampling=GREEDY, **fields)
        self.run()
        return self.cached(name)

    def forget_pool(self) -> None:
        self.loop.reset_prefix_cache()

    def check(self) -> None:
        """What holds between any two steps. Looks at everything that is under way."""
        prefixes = self.loop._prefixes
        prefixes._tree.check_integrity()
        tiers, references = prefixes._tiers, self.cache.references()
        assert (references == 0).sum() == self.cache.free_cells
        in_tree = {int(cell) for node in prefixes._tree.nodes() for cell in node.cells}
        for load in tiers._loads:
            assert (references[load.cells] == 1).all(), "cells that are loaded belong to the load alone"
            assert in_tree.isdisjoint(load.cells.tolist()), "a cell was seen before its bytes were there"
        for keep in tiers._keeps:
            assert (references[keep.cells] >= 1).all(), "cells were let go while they are copied"
        for store, window in zip(self.objects.stores, self.objects.windows, strict=True):
            _check_host(store.host, is_closed=window is None)

    def close(self) -> None:
        """Everything that was taken has been given back."""
        self.forget_pool()
        metrics = self.executor.kv_metrics()
        assert (metrics.free_cells, metrics.num_sequences) == (self.executor.total_cells, 0)
        assert self.objects.flush(WAIT_S)
        assert ([store.host.holds for store in self.objects.stores], self.transfers.in_flight) == (
            [0] * len(self.objects.stores),
            0,
        )
        self.objects.close()


def _check_host(host: HostSlab, *, is_closed: bool) -> None:
    """is_closed: no chunk is there without the one before it."""
    with host._lock:
        entries = {entry.key: (entry.parent, entry.owner, entry.holds) for entry in host._residents.entries()}
        filling = {key: each.parent for key, each in host._filling.items()}
    assert filling.keys().isdisjoint(entries), "a chunk was seen before its bytes were there"
    assert sum(holds for _, _, holds in entries.values()) >= sum(parent is not None for parent in filling.values())
    if is_closed:
        assert all(parent in entries or parent == owner for parent, owner, _ in entries.values()), "an orphan"


def tokens(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, length)]
