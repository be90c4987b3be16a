"""What tiers have in common: the breaker, who is evicted first; and the host slab."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cache.geometry import InvalidConfig
from cache.offload.chunks import Chunk
from cache.offload.host import HostSlab, bytes_view
from cache.offload.tiers import Breaker, Guarded
from support.tier_chunks import PAYLOAD_BYTES, FakeTier, path, payload


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


# --- breaker ------------------------------------------------------------------------------------------------------


def test_three_faults_in_a_row_open_the_breaker_and_a_success_between_does_not() -> None:
    breaker = Breaker(Clock())
    for outcome in (breaker.failed, breaker.failed, breaker.succeeded, breaker.failed, breaker.failed):
        outcome()
    assert breaker.allows()
    breaker.failed()
    assert not breaker.allows()
    assert breaker.state == "open"


def test_an_open_breaker_lets_one_probe_through_and_pauses_twice_as_long_after_each() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(3):
        breaker.failed()
    for pause_s in (5, 10, 20, 40, 80, 160, 300, 300):
        clock.now_s += pause_s - 0.001
        assert not breaker.allows()
        clock.now_s += 0.001
        assert breaker.state == "half-open"
        assert [breaker.allows(), breaker.allows()] == [True, False]
        breaker.failed()
    clock.now_s += 300
    assert breaker.allows()
    breaker.succeeded()
    assert breaker.state == "closed"
    for _ in range(2):
        breaker.failed()
    assert breaker.allows(), "it counts from the beginning again"


def test_faults_end_in_the_guard_and_a_tier_behind_an_open_breaker_is_not_asked() -> None:
    clock, tier = Clock(), FakeTier()
    guarded, chunk = Guarded(tier, clock), path(1, 1)[0]
    memory = memoryview(bytearray(PAYLOAD_BYTES))
    tier.add([chunk])
    assert guarded.load(chunk, memory)
    tier.fault = "gone"
    assert [guarded.known([chunk]), guarded.load(chunk, memory), guarded.store(chunk, memory)] == [0, False, False]
    asked = len(tier.loads)
    assert not guarded.load(chunk, memory)
    assert len(tier.loads) == asked
    assert guarded.counts == {"loaded": 1, "fault": 3, "breaker open": 1}
    tier.fault, clock.now_s = None, clock.now_s + 5
    assert guarded.load(chunk, memory)


def test_a_bad_record_is_an_answer_and_a_slow_answer_is_a_fault() -> None:
    clock, tier = Clock(), FakeTier()
    guarded = Guarded(tier, clock, slow_s=1.0)
    memory = memoryview(bytearray(PAYLOAD_BYTES))
    for _ in range(4):
        assert not guarded.load(path(1, 1)[0], memory)
    assert (guarded.breaker.state, guarded.counts["missing"]) == ("closed", 4)

    class Slow(FakeTier):
        def known(self, chunks: object) -> int:
            clock.now_s += 2
            return 1

    slow = Guarded(Slow(), clock, slow_s=1.0)
    assert [slow.known(path(1, 1)) for _ in range(4)] == [1, 1, 1, 0]


class Broken(FakeTier):
    """Raises what no tier should."""

    def load(self, chunk, into) -> None:
        raise RuntimeError("a bug")


def test_a_tier_with_a_bug_is_broken_and_may_be_tried_again_like_any_other() -> None:
    clock = Clock()
    guarded, chunk = Guarded(Broken(), clock), path(1, 1)[0]
    memory = memoryview(bytearray(PAYLOAD_BYTES))
    for pause in (0, 0, 0, 5, 10):  # the last two are probes
        clock.now_s += pause
        with pytest.raises(RuntimeError, match="a bug"):
            guarded.load(chunk, memory)
    assert (guarded.breaker.state, guarded.traffic().errors) == ("open", 5)
    clock.now_s += 20
    assert guarded.breaker.allows()


# --- the host slab ------------------------------------------------------------------------------------------------


def slab(num_slots: int) -> HostSlab:
    return HostSlab(PAYLOAD_BYTES, num_slots * PAYLOAD_BYTES, piece_bytes=2 * PAYLOAD_BYTES)


def put(host: HostSlab, *chunks: Chunk) -> list[bool]:
    """Fill and publish each; -> which were taken in."""
    taken = []
    for chunk in chunks:
        memory = host.reserve(chunk)
        if memory is not None:
            bytes_view(memory)[:] = payload(chunk)
        taken.append(memory is not None and host.publish(chunk))
    return taken


def test_only_a_published_chunk_is_seen_and_it_holds_its_bytes() -> None:
    host, (first, second) = slab(2), path(1, 2)
    memory = host.reserve(first)
    assert memory is not None
    assert [host.has(first), host.hold(first), host.reserve(first)] == [False, None, None]
    bytes_view(memory)[:] = payload(first)
    assert host.publish(first)
    held = host.hold(first)
    assert held is not None
    assert bytes(bytes_view(held)) == payload(first)
    host.release(first)
    assert (host.reserve(first), host.leading([first, second])) == (None, 1)
    assert host.reserve(second) is not None
    host.abandon(second)
    assert (host.holds, host.status().objects, host.status().used_bytes) == (0, 1, PAYLOAD_BYTES)


def test_a_full_slab_evicts_a_leaf_on_demand_and_drops_what_finds_none() -> None:
    host, old, new = slab(3), path(1, 3), path(2, 4)
    assert put(host, *old) == [True] * 3
    assert put(host, *new) == [True, True, True, False]
    assert (host.leading(old), host.leading(new), host.counts["evicted"]) == (0, 3, 3)
    assert host.counts["dropped: no room"] == 1, "its parent was the only leaf"


def test_a_held_chunk_and_its_parents_are_never_evicted() -> None:
    host, old = slab(3), path(1, 2)
    put(host, *old)
    assert host.hold(old[1]) is not None
    assert put(host, *path(2, 3)) == [True, False, False]
    assert host.leading(old) == 2
    host.release(old[1])
    assert put(host, *path(3, 3)) == [True, True, True]


def test_a_chunk_whose_parent_is_not_there_is_not_taken_in() -> None:
    host, chunks = slab(3), path(1, 3)
    assert put(host, chunks[1]) == [False]
    first, second = host.reserve(chunks[0]), host.reserve(chunks[1])
    assert first is not None, "both may be on their way at once"
    assert second is not None
    host.abandon(chunks[0])
    assert not host.publish(chunks[1])
    assert (host.status().used_bytes, host.counts["dropped: no parent"]) == (0, 2)


def test_a_tenant_that_floods_the_slab_leaves_the_others_half_of_a_fair_share() -> None:
    """One alone may have it all; a second one comes in at once, and neither can be pushed below a quarter."""
    host = slab(16)
    quiet, loud = path(1, 16, salt="quiet"), [path(name, 4, salt="loud") for name in range(8)]
    assert put(host, *quiet) == [True] * 16
    for chunks in loud:
        put(host, *chunks)
    assert host.leading(quiet) == 4
    assert sum(host.leading(chunks) for chunks in loud) == 12
    late = path(9, 4, salt="late")
    assert put(host, *late) == [True] * 4
    assert host.leading(quiet) >= 2


def test_another_text_under_the_same_key_is_a_miss() -> None:
    host, chunk = slab(1), path(1, 1)[0]
    put(host, chunk)
    impostor = replace(chunk, tokens=chunk.tokens + 1)
    assert (host.hold(impostor), host.has(impostor), host.holds) == (None, False, 0)
    assert host.counts["tokens"] == 2


def test_a_slab_for_less_than_one_chunk_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="511 bytes of host memory do not hold one chunk of 512"):
        HostSlab(PAYLOAD_BYTES, PAYLOAD_BYTES - 1)
