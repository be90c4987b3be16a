"""The break-even of a tier: what is slower than computing is not asked, and comes back when it is quick again."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from cache.offload.host import HostSlab
from cache.offload.objects import ObjectStores
from cache.offload.pace import MIN_LOADS, PROBE_S, RETRY_S, Pace
from cache.offload.store import Store
from support.tier_chunks import PAYLOAD_BYTES, FakeTier, path

WAIT_S = 10


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class TimedTier(FakeTier):
    """Each load takes `load_s` of the clock."""

    def __init__(self, clock: Clock, load_s: float) -> None:
        super().__init__()
        self.load_s = load_s
        self._clock = clock

    def load(self, chunk, into) -> None:
        self._clock.now_s += self.load_s
        super().load(chunk, into)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tier(clock: Clock) -> TimedTier:
    return TimedTier(clock, 1 / 8)


@pytest.fixture
def store(clock: Clock, tier: TimedTier) -> Iterator[Store]:
    # One loader: it has done what came before when it has done what comes next.
    store = Store(HostSlab(PAYLOAD_BYTES, 64 * PAYLOAD_BYTES), [tier], clock=clock, num_loaders=1)
    yield store
    store.close()
    assert store.host.holds == 0


def arrived(store: Store, name: int, length: int, chunk_s: float = math.inf) -> int:
    """Of a path that host memory never saw, as the engine asks for it: nothing where the first chunk has no chance."""
    objects, chunks = ObjectStores([store]), path(name, length)
    if not objects.may_have(chunks[0], chunk_s=chunk_s):
        return 0
    job = objects.prefetch(chunks, deadline_s=WAIT_S, chunk_s=chunk_s)
    assert job.wait(WAIT_S)
    job.close()
    return job.arrived


def settle(store: Store) -> None:
    """Return when the loader has done what it had to."""
    arrived(store, 999, 1)


def test_a_pace_is_unknown_until_it_was_measured_often_enough_and_follows_what_changes(clock: Clock) -> None:
    pace = Pace(clock)
    for number in range(MIN_LOADS):
        assert pace.load_s is None
        assert pace.is_worth(0.0)
        pace.measured(number + 1.0)
    assert pace.load_s == pytest.approx(2.5)
    assert (pace.is_worth(2.4), pace.is_worth(2.6)) == (False, True)
    for _ in range(30):
        pace.measured(1.0)
    assert pace.load_s == pytest.approx(1.0, rel=0.01)


def test_a_tier_is_probed_once_in_a_while_and_the_probe_decides(clock: Clock) -> None:
    pace = Pace(clock)
    for _ in range(10):
        pace.measured(8.0)
    assert not pace.take_probe()
    clock.now_s += PROBE_S
    assert [pace.take_probe(), pace.take_probe()] == [True, False]
    pace.measured(1.0)
    assert pace.load_s == pytest.approx(1.0)


def test_a_probe_that_found_nothing_is_repeated_soon(clock: Clock) -> None:
    pace = Pace(clock)
    clock.now_s += PROBE_S
    assert pace.take_probe()
    pace.probe_failed()
    assert not pace.take_probe()
    clock.now_s += RETRY_S
    assert pace.take_probe()
    pace.measured(1.0)
    pace.probe_failed()
    clock.now_s += RETRY_S
    assert not pace.take_probe(), "that one had found something"


def test_a_tier_slower_than_computing_is_not_asked_and_one_as_quick_is(store: Store, tier: TimedTier) -> None:
    tier.add(path(1, 8) + path(2, 8) + path(3, 8))
    assert arrived(store, 1, 8, chunk_s=0.01) == MIN_LOADS, "until one knows better"
    asked = len(tier.loads)
    assert arrived(store, 2, 8, chunk_s=0.01) == 0
    assert len(tier.loads) == asked
    assert store.tiers[0].counts["slower than computing"] == 2
    assert store.tiers[0].breaker.state == "closed", "that is no fault"
    assert arrived(store, 3, 8, chunk_s=0.125) == 8


def test_what_host_memory_has_is_taken_however_slow_the_tiers_are(store: Store, tier: TimedTier) -> None:
    tier.add(path(1, 6))
    assert arrived(store, 1, 6) == 6
    assert arrived(store, 1, 6, chunk_s=0.01) == 6


def test_a_slow_tier_is_asked_again_by_a_probe_that_nobody_waits_for_and_serves_when_it_is_quick(
    store: Store, tier: TimedTier, clock: Clock
) -> None:
    for name in range(1, 6):
        tier.add(path(name, 6))
    assert arrived(store, 1, 6) == 6
    clock.now_s += PROBE_S
    assert arrived(store, 2, 6, chunk_s=0.01) == 0, "the probe is for the next one"
    settle(store)
    assert store.leading(path(2, 6)) == 1
    assert arrived(store, 3, 6, chunk_s=0.01) == 0, "still too slow"
    tier.load_s = 1 / 1024
    assert arrived(store, 3, 6, chunk_s=0.01) == 0, "nobody knows"
    clock.now_s += PROBE_S
    assert arrived(store, 4, 6, chunk_s=0.01) == 0
    settle(store)
    assert arrived(store, 5, 6, chunk_s=0.01) == 6


def test_the_next_tier_is_asked_where_the_nearest_is_too_slow(clock: Clock, tier: TimedTier) -> None:
    quick = TimedTier(clock, 1 / 1024)
    store = Store(HostSlab(PAYLOAD_BYTES, 64 * PAYLOAD_BYTES), [tier, quick], clock=clock)
    for name in (1, 2):
        tier.add(path(name, 6))
        quick.add(path(name, 6))
    assert arrived(store, 1, 6) == 6
    assert quick.loads == [], "the nearest had it"
    assert arrived(store, 2, 6, chunk_s=0.01) == 6
    assert len(quick.loads) == 6
    store.close()


def test_an_object_may_take_its_part_of_a_chunks_time(clock: Clock) -> None:
    """Of 512 and 1,536 bytes a chunk: a quarter, and the rest."""
    tiers = [TimedTier(clock, 0.25), TimedTier(clock, 0.25)]
    sizes = (PAYLOAD_BYTES, 3 * PAYLOAD_BYTES)
    stores = [Store(HostSlab(size, 16 * size), [tier], clock=clock) for size, tier in zip(sizes, tiers, strict=True)]
    for store in stores:
        for _ in range(MIN_LOADS):
            store.tiers[0].pace.measured(0.25)
    objects = ObjectStores(stores, (None, None))
    assert objects.may_have(path(1, 1)[0], chunk_s=1.0)
    assert not objects.may_have(path(1, 1)[0], chunk_s=0.9)
    assert [store.tiers[0].counts["slower than computing"] for store in stores] == [1, 0]
    objects.close()
