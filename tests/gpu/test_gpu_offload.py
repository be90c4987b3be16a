"""On a device: chunks out of the pool and back are the same bytes, and an engine with tiers draws the same tokens."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch

from cache.geometry import CacheConfig, Geometry, LayerGeometry, Reach
from cache.offload.chunks import Namespace, geometry_record
from cache.offload.gather import Mover, chunk_rows
from cache.offload.groups import Groups
from cache.offload.host import HostSlab
from cache.offload.objects import ObjectStores
from cache.offload.staging import Staging
from cache.offload.store import Store
from cache.offload.transfers import CudaStream, Transfers
from cache.pool import CudaPool
from engine.kv_tiers import KvTiers
from support.looped import Engine
from support.toy_decoder import VOCAB, ToyDecoder
from support.toy_executor import toy_executor

CHUNK = 16
CELLS = 64
GEOMETRY = Geometry(
    (
        LayerGeometry(2, 8, 8),
        LayerGeometry(2, 8, 8, Reach("window", 4)),
        LayerGeometry(1, 9, 5),
        LayerGeometry(8, 128, 128),
    )
)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


def filled_pool(dtype: torch.dtype, device: torch.device) -> CudaPool:
    pool = CudaPool(GEOMETRY, CacheConfig(CELLS, 8, dtype, initial_cells=CELLS), device)
    pool.ensure_cells(CELLS)
    for tensor in (*pool.keys, *pool.values):
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, device=device))
    return pool


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8])
def test_the_kernel_equals_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    pool = filled_pool(dtype, device)
    groups = Groups.of(GEOMETRY, dtype, CHUNK)
    by_kernel, by_reference = Staging(groups, device), Staging(groups, device)
    rows = chunk_rows(np.random.default_rng(0).permutation(CELLS)[: 2 * CHUNK], CHUNK).to(device)
    Mover(pool, by_kernel).gather(rows, 1)
    Mover(pool, by_reference, use_kernels=False).gather(rows, 1)
    assert torch.equal(by_kernel.buffer, by_reference.buffer)
    pool.close()


def test_bytes_are_the_same_through_pinned_memory_though_cells_change_behind_the_gather(device: torch.device) -> None:
    pool = filled_pool(torch.bfloat16, device)
    groups = Groups.of(GEOMETRY, torch.bfloat16, CHUNK, full_windows=True)
    transfers = Transfers(pool, groups, device)
    host = torch.zeros(transfers.chunk_bytes, dtype=torch.uint8, pin_memory=True)
    source, target = np.arange(0, 32, 2), np.arange(32, 48)
    expected = [tensor[source + 1].clone() for tensor in (*pool.keys, *pool.values)]
    happened: list[str] = []
    assert transfers.store(
        source, host, gathered=lambda: happened.append("gathered"), done=lambda: happened.append("done")
    )
    while "gathered" not in happened:
        transfers.poll()
    for tensor in (*pool.keys, *pool.values):
        tensor[source + 1] = 0
    while "done" not in happened:
        transfers.poll()
    assert transfers.load(host, target, done=lambda: happened.append("loaded"))
    while "loaded" not in happened:
        transfers.poll()
    for tensor, before in zip((*pool.keys, *pool.values), expected, strict=True):
        assert torch.equal(tensor[target + 1].view(torch.uint8), before.view(torch.uint8))
    transfers.close()
    pool.close()


class SlowStream(CudaStream):
    """Whatever is queued on it begins some milliseconds late."""

    def use(self) -> AbstractContextManager[object]:
        context = super().use()
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(20_000_000)  # clock ticks
        return context


def test_cells_that_are_freed_and_written_while_a_slow_copy_is_under_way_do_not_change_what_it_stores(
    device: torch.device,
) -> None:
    """The race of a store with whoever gets its cells next: they are let go at `gathered`, no sooner and no later."""
    pool = filled_pool(torch.bfloat16, device)
    groups = Groups.of(GEOMETRY, torch.bfloat16, CHUNK, full_windows=True)
    transfers = Transfers(pool, groups, device, ring_slots=4, make_stream=lambda: SlowStream(device))
    hosts = [torch.zeros(transfers.chunk_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(4)]
    before = [tensor.clone() for tensor in (*pool.keys, *pool.values)]
    gathered: list[int] = []
    for number, host in enumerate(hosts):
        cells = np.arange(number * CHUNK, (number + 1) * CHUNK)
        assert transfers.store(cells, host, gathered=lambda n=number: gathered.append(n), done=lambda: None)
    assert gathered == [], "a slow stream has not come so far"
    while transfers.in_flight:
        transfers.poll()
        for number in gathered:
            for tensor in (*pool.keys, *pool.values):
                tensor[1 + number * CHUNK : 1 + (number + 1) * CHUNK] = 0
        gathered.clear()
    for tensor in (*pool.keys, *pool.values):
        tensor[1:] = 0
    for number, host in enumerate(hosts):
        cells = np.arange(number * CHUNK, (number + 1) * CHUNK)
        assert transfers.load(host, cells, done=lambda: None)
    while transfers.in_flight:
        transfers.poll()
    for tensor, old in zip((*pool.keys, *pool.values), before, strict=True):
        assert torch.equal(tensor[1:].view(torch.uint8), old[1:].view(torch.uint8))
    transfers.close()
    pool.close()


def test_a_pool_that_grows_while_a_load_is_under_way_gets_its_bytes_where_they_belong(device: torch.device) -> None:
    """Growth moves nothing: the addresses that the copy was given stay those of the cells (D4)."""
    cells = 1 << 16
    geometry = Geometry((LayerGeometry(8, 128, 128),))
    pool = CudaPool(geometry, CacheConfig(cells, 8, torch.bfloat16, initial_cells=CELLS), device)
    pool.ensure_cells(CELLS)
    groups = Groups.of(geometry, torch.bfloat16, CHUNK)
    transfers = Transfers(pool, groups, device, ring_slots=2, make_stream=lambda: SlowStream(device))
    host = torch.randint(0, 256, (transfers.chunk_bytes,), dtype=torch.uint8).pin_memory()
    assert transfers.load(host, range(CHUNK), done=lambda: None)
    pool.ensure_cells(cells)
    while transfers.in_flight:
        transfers.poll()
    loaded = torch.cat([pool.keys[0][1 : 1 + CHUNK], pool.values[0][1 : 1 + CHUNK]]).view(torch.uint8).flatten().cpu()
    assert torch.equal(loaded, host)
    transfers.close()
    pool.close()


def test_a_window_layers_tail_is_all_that_a_load_writes(device: torch.device) -> None:
    pool = filled_pool(torch.float16, device)
    groups = Groups.of(GEOMETRY, torch.float16, CHUNK)
    transfers = Transfers(pool, groups, device)
    (windowed,) = [group for group in groups.object_groups if group.window_chunks is not None]
    before = [tensor.clone() for tensor in (*pool.keys, *pool.values)]
    host = torch.zeros(transfers.object_bytes(windowed.index), dtype=torch.uint8).pin_memory()
    assert transfers.load(host, range(CHUNK), done=lambda: None, object_group=windowed.index)
    while transfers.in_flight:
        transfers.poll()
    for layer in range(len(GEOMETRY.layers)):
        for new, old in ((pool.keys[layer], before[layer]), (pool.values[layer], before[len(pool.keys) + layer])):
            changed = (new.view(torch.uint8) != old.view(torch.uint8)).flatten(1).any(1).nonzero().flatten().tolist()
            assert set(changed) <= ({13, 14, 15, 16} if layer == 1 else set())
            assert layer != 1 or not new[13:17].view(torch.uint8).any()
    transfers.close()
    pool.close()


def test_an_engine_finds_in_host_memory_what_left_the_device_and_draws_the_same(device: torch.device) -> None:
    model, prompt = ToyDecoder("cuda"), [int(token) for token in np.random.default_rng(1).integers(0, VOCAB, 50)]
    executor = toy_executor(model)
    cache = executor.cache_control
    groups = Groups.of(model.geometry, torch.float32, CHUNK, separate=False, full_windows=True)
    transfers = Transfers(cache.pool, groups, device)
    space = Namespace("toy", "float32", geometry_record(model.geometry), "table")
    store = Store(HostSlab(transfers.chunk_bytes, 64 * transfers.chunk_bytes, pinned=True))
    engine = Engine(
        executor,
        clock=time.monotonic,
        make_tiers=lambda tree: KvTiers(
            tree, cache, ObjectStores([store]), transfers, space, CHUNK, clock=time.monotonic
        ),
    )
    for name in ("cold", "again"):
        engine.submit(name, prompt, max_new_tokens=3, sampling={"temperature": 0.0})
        engine.run()
        assert engine.tokens(name) == model.continuation(prompt, 3)
        engine.loop.reset_prefix_cache()
    assert (engine.cached("cold"), engine.cached("again")) == (0, 48)
    store.close()
