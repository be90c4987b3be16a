"""Pool -> staging -> pool: the reference against plain indexing, the kernel against the reference, the rings."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
import torch

from cache.geometry import FP8, CacheConfig, Geometry, LayerGeometry, Reach
from cache.offload.gather import Mover, chunk_rows
from cache.offload.groups import Groups
from cache.offload.staging import Staging
from cache.offload.transfers import Mark, Transfers
from cache.pool import CpuPool

CPU = torch.device("cpu")
CHUNK = 16
CELLS = 64
WINDOWED = Geometry(
    (LayerGeometry(2, 8, 8), LayerGeometry(2, 8, 8, Reach("window", 4)), LayerGeometry(1, 9, 5), LayerGeometry(2, 8, 8))
)


def filled_pool(geometry: Geometry, dtype: torch.dtype, seed: int = 0) -> CpuPool:
    """Every byte random; integer views, so that NaN patterns compare too."""
    pool = CpuPool(geometry, CacheConfig(CELLS, 8, dtype))
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*pool.keys, *pool.values):
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))
    return pool


def raw(pool: CpuPool) -> list[torch.Tensor]:
    return [tensor.view(torch.uint8).clone() for tensor in (*pool.keys, *pool.values)]


def shuffled_cells(batch: int, seed: int = 1) -> np.ndarray:
    """Fragmented, with the pool's first and last cells among them."""
    order = np.random.default_rng(seed).permutation(np.arange(1, CELLS - 1))[: batch * CHUNK - 2]
    return np.concatenate(([CELLS - 1], order, [0]))


@pytest.mark.parametrize("use_kernels", [False, True], ids=["reference", "kernel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, FP8])
def test_gathered_slots_are_the_chunks_rows_in_order(dtype: torch.dtype, use_kernels: bool) -> None:
    groups = Groups.of(WINDOWED, dtype, CHUNK)
    pool, staging = filled_pool(WINDOWED, dtype), Staging(groups, CPU, max_batch_size=3)
    rows = chunk_rows(shuffled_cells(2), CHUNK)
    Mover(pool, staging, use_kernels=use_kernels).gather(rows, first=1)
    for slot, group in ((slot, group) for slot in range(2) for group in groups.kernel_groups):
        kept = rows[slot, CHUNK - group.slots_per_chunk :]
        for side, planes in zip(group.sides, staging.kernel_group(1 + slot, group.index), strict=True):
            for layer, plane in zip(group.layers, planes, strict=True):
                expected = getattr(pool, side)[layer][kept].flatten(1)
                assert torch.equal(plane.view(torch.uint8), expected.view(torch.uint8))
    assert int(staging.chunk(0).sum()) == 0, "a slot that was not asked for is left alone"


@pytest.mark.parametrize("use_kernels", [False, True], ids=["reference", "kernel"])
@pytest.mark.parametrize("dtype", [torch.float16, FP8])
def test_scatter_writes_the_chunks_rows_and_nothing_else(dtype: torch.dtype, use_kernels: bool) -> None:
    """Bytes out and in again elsewhere are the same; every other row, scratch included, is as it was (F3)."""
    groups = Groups.of(WINDOWED, dtype, CHUNK)
    pool, staging = filled_pool(WINDOWED, dtype), Staging(groups, CPU)
    other = filled_pool(WINDOWED, dtype, seed=9)
    before = raw(other)
    source, target = chunk_rows(shuffled_cells(2), CHUNK), chunk_rows(shuffled_cells(2, seed=2), CHUNK)
    Mover(pool, staging).gather(source)
    Mover(other, staging, use_kernels=use_kernels).scatter(target)
    for index, (old, new, origin) in enumerate(zip(before, raw(other), raw(pool), strict=True)):
        kept = 4 if WINDOWED.layers[index % 4].reach.kind == "window" else CHUNK
        for chunk in range(2):
            to, come_from = target[chunk, CHUNK - kept :], source[chunk, CHUNK - kept :]
            assert torch.equal(new[to], origin[come_from])
            old[to] = new[to]
        assert torch.equal(new, old)


@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (16, 80), (3, 128), (2, 256), (1, 7)])
def test_the_kernel_equals_the_reference_at_any_width(heads: int, dim: int) -> None:
    geometry = Geometry((LayerGeometry(heads, dim, dim),))
    groups = Groups.of(geometry, torch.bfloat16, CHUNK)
    pool = filled_pool(geometry, torch.bfloat16)
    by_kernel, by_reference = Staging(groups, CPU), Staging(groups, CPU)
    rows = chunk_rows(shuffled_cells(1), CHUNK)
    Mover(pool, by_kernel, use_kernels=True).gather(rows)
    Mover(pool, by_reference, use_kernels=False).gather(rows)
    assert torch.equal(by_kernel.buffer, by_reference.buffer)


@pytest.mark.parametrize(
    ("cells", "message"),
    [([], "0 cells"), (range(15), "15 cells are not whole chunks of 16"), (range(-1, 15), "cell -1 cannot be moved")],
)
def test_only_whole_chunks_of_real_cells_are_moved(cells: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chunk_rows(list(cells), CHUNK)


def test_a_batch_must_fit_the_buffer() -> None:
    mover = Mover(filled_pool(WINDOWED, torch.uint8), Staging(Groups.of(WINDOWED, torch.uint8, CHUNK), CPU))
    with pytest.raises(ValueError, match="batch slots 3 to 4: there are 4"):
        mover.gather(chunk_rows(shuffled_cells(2), CHUNK), first=3)
    with pytest.raises(ValueError, match="8 rows a chunk for kernel group 0 of ratio 1"):
        mover.gather(chunk_rows(range(8), 8))


# --- rings ----------------------------------------------------------------------------------------------------------


class HeldMark:
    """The `number`th mark of its stream; a mark takes a second."""

    def __init__(self, stream: HeldStream, number: int) -> None:
        self._stream = stream
        self.number = number

    def is_passed(self) -> bool:
        return self._stream.finished >= self.number

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, HeldMark)
        return float(self.number - earlier.number)


class HeldStream:
    """Work is done at once but counts as finished mark by mark, when the test says so."""

    def __init__(self) -> None:
        self.marks = 0
        self.finished = 0

    def use(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> Mark:
        self.marks += 1
        return HeldMark(self, self.marks)


def held_transfers(slots: int = 2) -> tuple[Transfers, HeldStream, HeldStream]:
    streams: list[HeldStream] = []

    def make() -> HeldStream:
        streams.append(HeldStream())
        return streams[-1]

    groups = Groups.of(WINDOWED, torch.float16, CHUNK)
    transfers = Transfers(filled_pool(WINDOWED, torch.float16), groups, CPU, ring_slots=slots, make_stream=make)
    return transfers, streams[0], streams[1]


def host_of(transfers: Transfers) -> torch.Tensor:
    return torch.zeros(transfers.chunk_bytes, dtype=torch.uint8)


def test_a_chunk_comes_back_bit_for_bit_through_host_memory() -> None:
    groups = Groups.of(WINDOWED, torch.float16, CHUNK, full_windows=True)
    pool = filled_pool(WINDOWED, torch.float16)
    transfers = Transfers(pool, groups, CPU)
    host, calls = host_of(transfers), []
    source, target = np.arange(0, 32, 2), np.arange(32, 48)
    assert transfers.store(source, host, gathered=lambda: calls.append("gathered"), done=lambda: calls.append("done"))
    assert calls == [], "callbacks come from poll alone"
    transfers.poll()
    assert transfers.load(host, target, done=lambda: calls.append("loaded"))
    transfers.poll()
    assert calls == ["gathered", "done", "loaded"]
    assert all(torch.equal(tensor[source + 1], tensor[target + 1]) for tensor in raw(pool))
    transfers.close()


def test_cells_are_free_when_gathered_before_the_bytes_are_in_host_memory() -> None:
    transfers, stores, _ = held_transfers()
    calls: list[str] = []
    transfers.store(
        range(16), host_of(transfers), gathered=lambda: calls.append("gathered"), done=lambda: calls.append("done")
    )
    transfers.poll()
    assert calls == []
    stores.finished = 2
    transfers.poll()
    assert (calls, transfers.in_flight) == (["gathered"], 1)
    stores.finished = 3
    transfers.poll()
    assert (calls, transfers.in_flight) == (["gathered", "done"], 0)


def test_traffic_is_what_is_finished_and_takes_the_streams_own_time() -> None:
    """Not the time in which work is queued: of a copy, from its first work on the stream to its last."""
    transfers, stores, _ = held_transfers()
    transfers.store(range(16), host_of(transfers), gathered=lambda: None, done=lambda: None)
    transfers.poll()
    loaded, stored = transfers.traffic()
    assert (stored.size, stored.seconds, stored.in_flight) == (0, 0.0, 1)
    stores.finished = 3
    transfers.poll()
    loaded, stored = transfers.traffic()
    assert (stored.size, stored.seconds, stored.in_flight) == (transfers.chunk_bytes, 2.0, 0)
    assert (loaded.size, loaded.in_flight) == (0, 0)


def test_chunks_of_one_object_group_move_in_batches_launched_when_full_or_told() -> None:
    transfers, _, loads = held_transfers(slots=4)
    host, nothing = host_of(transfers), lambda: None
    assert transfers.batch_size == 2
    assert transfers.load(host, range(16), done=nothing)
    assert loads.marks == 0, "it waits for another one"
    assert transfers.load(host, range(16, 32), done=nothing)
    assert loads.marks == 2
    assert transfers.load(host, range(32, 48), done=nothing)
    transfers.flush()
    assert loads.marks == 4
    assert not transfers.load(host, range(48, 64), done=nothing), "both pages are under way"
    loads.finished = 2
    transfers.poll()
    assert transfers.in_flight == 1
    assert transfers.load(host[: transfers.object_bytes(0)], range(48, 64), done=nothing, object_group=0)
    assert not transfers.load(host[: transfers.object_bytes(1)], range(16), done=nothing, object_group=1)
    assert loads.marks == 6, "another group's chunk launches what has gathered"


def test_object_groups_come_back_one_by_one_bit_for_bit_and_a_tail_writes_no_more_than_itself() -> None:
    pool = filled_pool(WINDOWED, torch.float16)
    groups = Groups.of(WINDOWED, torch.float16, CHUNK)
    transfers = Transfers(pool, groups, CPU, ring_slots=4)
    assert len(groups.object_groups) > 1
    before = [tensor.clone() for tensor in raw(pool)]
    source, target = np.arange(0, 32, 2).reshape(1, 16), np.arange(32, 48).reshape(1, 16)
    for group in groups.object_groups:
        host = torch.zeros(transfers.object_bytes(group.index), dtype=torch.uint8)
        sides = {"gathered": lambda: None, "done": lambda: None}
        assert transfers.store(source, host, object_group=group.index, **sides)
        transfers.poll()
        assert transfers.load(host, target, done=lambda: None, object_group=group.index)
        transfers.poll()
        for member in groups.members(group.index):
            kept = member.slots_per_chunk
            for layer in member.layers:
                for tensors, olds in ((pool.keys, before[: len(pool.keys)]), (pool.values, before[len(pool.keys) :])):
                    new, old = tensors[layer].view(torch.uint8).flatten(1), olds[layer].flatten(1)
                    assert torch.equal(new[target[0, -kept:] + 1], old[source[0, -kept:] + 1])
                    assert torch.equal(new[target[0, :-kept] + 1], old[target[0, :-kept] + 1]) or kept == CHUNK
    transfers.close()


def test_a_full_ring_refuses_and_the_other_direction_goes_on() -> None:
    transfers, stores, loads = held_transfers(slots=2)
    host, nothing = host_of(transfers), lambda: None
    assert [transfers.store(range(16), host, gathered=nothing, done=nothing) for _ in range(3)] == [True, True, False]
    assert transfers.load(host, range(16, 32), done=nothing)
    loads.finished, stores.finished = 2, 3
    transfers.poll()
    assert transfers.in_flight == 1
    assert transfers.store(range(16), host, gathered=nothing, done=nothing)


def test_what_is_no_chunk_is_refused_before_anything_begins() -> None:
    transfers, _, _ = held_transfers()
    with pytest.raises(ValueError, match="32 cells are not one chunk of 16"):
        transfers.load(host_of(transfers), range(32), done=lambda: None)
    with pytest.raises(ValueError, match="bytes, not"):
        transfers.load(host_of(transfers)[1:], range(16), done=lambda: None)
    assert transfers.in_flight == 0
