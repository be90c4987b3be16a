"""The tiers together: faults shorten a prefix and nothing else, one load a chunk, holds end at zero."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from cache.geometry import Geometry, LayerGeometry, Reach
from cache.offload.chunks import Chunk
from cache.offload.groups import Groups
from cache.offload.host import HostSlab, bytes_view
from cache.offload.objects import ObjectStores, Prefetch, needed_windows
from cache.offload.store import Store
from cache.offload.tiers import Tier
from support.tier_chunks import PAYLOAD_BYTES, FakeTier, path, payload

WAIT_S = 10
MakeStore = Callable[..., Store]


@pytest.fixture
def make_store() -> Iterator[MakeStore]:
    made: list[Store] = []

    def make(*tiers: Tier, slots: int = 16, **options: int) -> Store:
        made.append(Store(HostSlab(PAYLOAD_BYTES, slots * PAYLOAD_BYTES), tiers, **options))
        return made[-1]

    yield make
    for store in made:
        store.close()
        assert store.host.holds == 0, "holds outlived their owners"


def put(store: Store, chunks: list[Chunk]) -> None:
    for chunk in chunks:
        memory = store.reserve(chunk)
        assert memory is not None
        bytes_view(memory)[:] = payload(chunk)
        store.publish(chunk)


def arrived(store: Store, chunks: list[Chunk], deadline_s: float = WAIT_S) -> int:
    """How many leading chunks a prefetch brings; checks the bytes of each."""
    job = ObjectStores([store]).prefetch(chunks, deadline_s=deadline_s)
    assert job.wait(WAIT_S)
    count = job.arrived
    for chunk in chunks[:count]:
        held = store.host.hold(chunk)
        assert held is not None
        assert bytes(bytes_view(held)) == payload(chunk)
        store.host.release(chunk)
    job.close()
    return count


def test_what_is_published_is_copied_down_and_comes_up_again(make_store: MakeStore) -> None:
    tier, chunks = FakeTier(), path(1, 4)
    store = make_store(tier, slots=4)
    put(store, chunks)
    assert store.flush(WAIT_S)
    assert set(tier.records) == {chunk.key for chunk in chunks}
    assert (store.leading(chunks), arrived(store, chunks), tier.loads) == (4, 4, [])
    put(store, path(2, 4))
    assert store.flush(WAIT_S)
    assert store.leading(chunks) == 0
    assert (arrived(store, chunks), tier.loads) == (4, [chunk.key for chunk in chunks])


def test_without_tiers_host_memory_alone_serves(make_store: MakeStore) -> None:
    store, chunks = make_store(), path(1, 3)
    put(store, chunks[:2])
    assert arrived(store, chunks) == 2


@pytest.mark.parametrize("fault", ["missing", "corrupt", "gone", "orphan"])
def test_a_fault_ends_the_prefix_where_it_is(make_store: MakeStore, fault: str) -> None:
    tier, chunks = FakeTier(), path(1, 5)
    tier.add(chunks)
    store = make_store(tier)
    if fault == "missing":
        del tier.records[chunks[2].key]
    elif fault == "corrupt":
        tier.corrupt(chunks[2])
    elif fault == "orphan":
        chunks = chunks[:2] + path(2, 5)[2:]
        tier.add(chunks)
    else:
        assert arrived(store, chunks[:2]) == 2
        tier.fault = "gone"
    assert arrived(store, chunks) == 2
    assert not store.host.has(chunks[2])


def test_the_next_tier_is_asked_when_the_nearest_has_decayed(make_store: MakeStore) -> None:
    near, far, chunks = FakeTier(), FakeTier(), path(1, 3)
    near.add(chunks)
    far.add(chunks)
    near.corrupt(chunks[1])
    assert arrived(make_store(near, far), chunks) == 3
    assert far.loads == [chunks[1].key]


def test_two_that_want_the_same_chunks_load_each_once(make_store: MakeStore) -> None:
    tier, chunks = FakeTier(), path(1, 3)
    tier.add(chunks)
    tier.hold()
    store = make_store(tier, num_loaders=4)
    jobs = [ObjectStores([store]).prefetch(chunks, deadline_s=WAIT_S) for _ in range(20)]
    assert tier.waiting.acquire(timeout=WAIT_S)
    tier.release()
    assert all(job.wait(WAIT_S) for job in jobs)
    assert [job.arrived for job in jobs] == [3] * 20
    assert tier.loads == [chunk.key for chunk in chunks]
    assert store.host.holds == 60
    for job in jobs:
        job.close()


def test_a_tier_that_hangs_keeps_nobody_waiting_and_late_bytes_serve_the_next(make_store: MakeStore) -> None:
    tier, chunks = FakeTier(), path(1, 2)
    tier.add(chunks)
    tier.hold()
    store = make_store(tier)
    job = ObjectStores([store]).prefetch(chunks, deadline_s=WAIT_S)
    assert tier.waiting.acquire(timeout=WAIT_S)
    assert (job.arrived, job.is_done) == (0, False)
    job.close()
    job.close()
    tier.release()
    assert job.wait(WAIT_S)
    assert (store.leading(chunks), store.host.holds) == (1, 0)


def test_nothing_is_fetched_past_the_deadline(make_store: MakeStore) -> None:
    tier, chunks = FakeTier(), path(1, 2)
    tier.add(chunks)
    assert arrived(make_store(tier), chunks, deadline_s=0) == 0
    assert tier.loads == []


def test_what_host_memory_has_is_there_at_once_though_every_loader_hangs(make_store: MakeStore) -> None:
    tier, chunks, others = FakeTier(), path(1, 4), (path(2, 1), path(3, 1))
    store = make_store(tier)
    put(store, chunks[:3])
    assert store.flush(WAIT_S)
    del tier.records[chunks[2].key]
    tier.add([*others[0], *others[1], chunks[3]])
    tier.hold()
    hung = [ObjectStores([store]).prefetch(other, deadline_s=WAIT_S) for other in others]
    assert all(tier.waiting.acquire(timeout=WAIT_S) for _ in hung)
    whole = ObjectStores([store]).prefetch(chunks[:3], deadline_s=WAIT_S)
    part = ObjectStores([store]).prefetch(chunks, deadline_s=WAIT_S)
    assert (whole.arrived, whole.is_done, part.arrived, part.is_done) == (3, True, 3, False)
    tier.release()
    assert part.wait(WAIT_S)
    assert part.arrived == 4
    for job in (*hung, whole, part):
        assert job.wait(WAIT_S)
        job.close()


def test_a_prefix_in_host_memory_that_is_longer_than_a_look_is_found_to_its_end(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cache.offload.objects.CHUNKS_AT_ONCE", 2)
    store, chunks = make_store(), path(1, 5)
    put(store, chunks)
    assert arrived(store, chunks) == 5
    assert (store.host.hits, store.host.misses) == (5, 0)


def test_a_store_closed_while_a_tier_hangs_leaves_that_alone_and_what_comes_late_hurts_nobody() -> None:
    tier, chunks = FakeTier(), path(1, 2)
    tier.add(chunks)
    tier.hold()
    store = Store(HostSlab(PAYLOAD_BYTES, 4 * PAYLOAD_BYTES), [tier], num_loaders=1)
    job = ObjectStores([store]).prefetch(chunks, deadline_s=WAIT_S)
    assert tier.waiting.acquire(timeout=WAIT_S)
    store.close(timeout_s=0.01)
    assert (tier.is_closed, job.is_done, store.reserve(chunks[0])) == (False, False, None)
    tier.release()
    assert job.wait(WAIT_S)
    assert job.arrived == 2
    job.close()
    assert store.host.holds == 0


def test_a_second_reader_waits_for_the_first_no_longer_than_its_own_deadline(make_store: MakeStore) -> None:
    tier, chunks = FakeTier(), path(1, 1)
    tier.add(chunks)
    tier.hold()
    store = make_store(tier)
    first = ObjectStores([store]).prefetch(chunks, deadline_s=WAIT_S)
    assert tier.waiting.acquire(timeout=WAIT_S)
    assert arrived(store, chunks, deadline_s=0.01) == 0
    tier.release()
    assert first.wait(WAIT_S)
    assert first.arrived == 1
    first.close()


def test_a_full_tier_or_a_long_queue_drops_copies_and_never_blocks(make_store: MakeStore) -> None:
    tier, chunks = FakeTier(), path(1, 4)
    tier.is_full = True
    tier.hold()
    store = make_store(tier, max_write_backs=2)
    put(store, chunks)
    assert store.counts == {"write-back dropped": 2}
    tier.release()
    assert store.flush(WAIT_S)
    assert store.status()["fake"][2] == {"no room": 2}
    assert (store.leading(chunks), tier.records) == (4, {})


def test_a_bug_in_a_tier_leaves_nothing_held(make_store: MakeStore, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeTier):
        def store(self, chunk, payload) -> bool:
            raise RuntimeError("a bug")

    store = make_store(Broken())
    put(store, path(1, 2))
    store.close()
    assert (store.write_backs, store.host.holds) == (0, 0)
    assert caplog.text.count("RuntimeError: a bug") == 2


def test_a_closed_store_takes_nothing_in_and_has_copied_down_what_it_had(make_store: MakeStore) -> None:
    tier, chunks = FakeTier(), path(1, 3)
    store = make_store(tier)
    put(store, chunks[:2])
    store.close()
    assert (len(tier.records), tier.is_closed, store.reserve(chunks[2])) == (2, True, None)


def test_random_traffic_over_faulty_tiers_never_yields_wrong_bytes(make_store: MakeStore) -> None:
    """Stores, prefetches, cancels and faults in too little memory: what arrives is right, holds end at zero."""
    rng, tier = random.Random(0), FakeTier()
    store = make_store(tier, slots=6, num_loaders=3)
    open_jobs: list[Prefetch] = []
    for _ in range(400):
        chunks = path(rng.randrange(5), rng.randrange(1, 6))
        action = rng.random()
        if action < 0.4:
            for chunk in chunks:
                memory = store.reserve(chunk)
                if memory is not None and rng.random() < 0.1:
                    store.abandon(chunk)
                elif memory is not None:
                    bytes_view(memory)[:] = payload(chunk)
                    store.publish(chunk)
        elif action < 0.5:
            tier.corrupt(rng.choice(chunks))
        elif action < 0.55:
            tier.fault = None if tier.fault else "gone"
        elif action < 0.75:
            open_jobs.append(ObjectStores([store]).prefetch(chunks, deadline_s=WAIT_S))
        elif open_jobs:
            open_jobs.pop(rng.randrange(len(open_jobs))).close()
        else:
            arrived(store, chunks)
    for job in open_jobs:
        job.close()
        assert job.wait(WAIT_S)
    assert store.flush(WAIT_S)
    tier.fault = None
    fresh = path(9, 2)
    for chunk in fresh:
        memory = store.reserve(chunk)
        assert memory is not None, "everything was given back"
        bytes_view(memory)[:] = payload(chunk)
        store.publish(chunk)
    assert arrived(store, fresh) == 2


# --- object groups ----------------------------------------------------------------------------------------------------


@pytest.fixture
def make_objects(make_store: MakeStore) -> Callable[..., ObjectStores]:
    def make(tier: FakeTier, *windows: int | None) -> ObjectStores:
        stores = [make_store(tier.lane(index), slots=32) for index in range(len(windows))]
        for store, window in zip(stores, windows, strict=True):
            store.host._needs_parents = window is None
        return ObjectStores(stores, windows)

    return make


def test_of_a_window_only_the_chunks_before_the_end_are_brought(make_objects: Callable[..., ObjectStores]) -> None:
    tier, chunks = FakeTier(), path(1, 8)
    objects = make_objects(tier, None, 2)
    tier.add(chunks)
    tier.lane(1).add(chunks)
    job = objects.prefetch(chunks, deadline_s=WAIT_S)
    assert job.wait(WAIT_S)
    assert job.arrived == 8
    assert tier.lane(1).loads == [chunks[7].key, chunks[6].key]
    job.close()


def test_what_windows_need_is_there_at_once_too_where_host_memory_has_it(
    make_objects: Callable[..., ObjectStores],
) -> None:
    tier, chunks = FakeTier(), path(1, 6)
    objects = make_objects(tier, None, 2)
    put(objects.stores[0], chunks)
    put(objects.stores[1], chunks[4:])
    assert objects.flush(WAIT_S)
    tier.hold()
    hung = [objects.prefetch(path(name, 1), deadline_s=WAIT_S) for name in (2, 3)]
    tier.add(path(2, 1) + path(3, 1))
    job = objects.prefetch(chunks, deadline_s=WAIT_S)
    assert (job.arrived, job.is_done) == (6, True)
    tier.release()
    for each in (*hung, job):
        assert each.wait(WAIT_S)
        each.close()


def test_a_shorter_prefix_is_taken_where_a_window_before_the_longer_ones_end_is_lost(
    make_objects: Callable[..., ObjectStores],
) -> None:
    """Probed downward from the end: neither chunk 6 nor 3 is there, so of windows of 2 the last whole one ends at 6."""
    tier, chunks = FakeTier(), path(1, 8)
    objects = make_objects(tier, None, 2)
    tier.add(chunks)
    tier.lane(1).add([chunk for chunk in chunks if chunk.index not in (3, 6)])
    for length, usable in ((8, 6), (5, 3), (4, 3), (3, 3)):
        job = objects.prefetch(chunks[:length], deadline_s=WAIT_S)
        assert job.wait(WAIT_S)
        assert job.arrived == usable
        job.close()


def test_a_prefix_of_layers_with_windows_alone_is_counted_by_the_first_group() -> None:
    reaches = (Reach("window", 20), Reach("window", 4))
    layers = tuple(LayerGeometry(1, 4, 4, reach) for reach in reaches)
    assert needed_windows(Groups.of(Geometry(layers), torch.float32, 16)) == (None, 1)
    assert needed_windows(Groups.of(Geometry((LayerGeometry(1, 4, 4), *layers)), torch.float32, 16)) == (None, 2, 1)
