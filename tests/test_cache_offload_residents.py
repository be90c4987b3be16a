"""Who is evicted first: leaves, of two queues whose sizes follow what is missed; half of a tenant's share is safe."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from cache.offload.chunks import Chunk
from cache.offload.policy import LeastRecent, conversations, documents, hit_rate
from cache.offload.residents import Resident, Residents
from support.tier_chunks import SPACE, path


class Oracle:
    """The same rules with nothing but lists, the oldest first."""

    def __init__(self, owners: dict[bytes, bytes]) -> None:
        self.queues: tuple[list[bytes], list[bytes]] = ([], [])
        self.gone: tuple[list[bytes], list[bytes]] = ([], [])
        self.share = 0.0
        self.moved = 0
        self.protected = 0
        self._owners = owners

    def __len__(self) -> int:
        return sum(map(len, self.queues))

    def add(self, key: bytes) -> None:
        is_again = any(key in keys for keys in self.gone)
        if is_again:
            mine, others = self.gone if key in self.gone[0] else self.gone[::-1]
            step = max(1, len(others) / len(mine))
            before, self.share = self.share, self.share + (step if mine is self.gone[0] else -step)
            self.share = min(max(self.share, 0), len(self))
            self.moved += self.share != before
            mine.remove(key)
        self.queues[is_again].append(key)

    def want(self, key: bytes) -> None:
        for keys in self.queues:
            if key in keys:
                keys.remove(key)
        self.queues[True].append(key)

    def evict(self, residents: Residents, keep: bytes) -> bytes | None:
        entries = residents.entries()
        parents = {entry.parent for entry in entries}
        leaves = {e.key for e in entries if e.key not in parents and not e.holds and e.key != keep}
        owner, sizes = self._owners[keep], Counter(self._owners[entry.key] for entry in entries)
        safe = len(self) // (2 * len({*sizes, owner}))
        fair = {key for key in leaves if self._owners[key] == owner or sizes[self._owners[key]] > safe}
        self.protected += len(fair) < len(leaves)
        first = len(self.queues[False]) <= self.share
        for is_again in (first, not first):
            for key in self.queues[is_again]:
                if key in fair:
                    self._let_go(key, is_again)
                    return key
        return None

    def _let_go(self, key: bytes, is_again: bool) -> None:
        num = len(self)
        self.queues[is_again].remove(key)
        self.gone[is_again].append(key)
        while self.gone[0] and len(self.gone[0]) + len(self.queues[0]) > num:
            self.gone[0].pop(0)
        while self.gone[1] and len(self.gone[0]) + len(self.gone[1]) > num:
            self.gone[1].pop(0)


def test_eviction_takes_the_oldest_leaf_of_a_queue_against_a_slow_oracle() -> None:
    """Random adds, wants, holds, evictions of three tenants' paths in a tier that is nearly full."""
    rng, names = random.Random(0), range(12)
    chunks = [chunk for name in names for chunk in path(name, 6, salt=f"tenant {name % 3}")]
    roots = {name: replace(SPACE, salt=f"tenant {name % 3}").root for name in names}
    owners = {chunk.key: roots[number // 6] for number, chunk in enumerate(chunks)}
    residents, oracle = Residents(), Oracle(owners)
    for _ in range(8000):
        chunk = rng.choice(chunks)
        entry, action = residents.get(chunk.key), rng.random()
        if entry is None and action < 0.6 and len(residents) < 40:
            if chunk.index == 0 or residents.get(chunk.parent) is not None:
                residents.add(Resident(chunk.key, chunk.parent, 0))
                oracle.add(chunk.key)
        elif entry is not None and action < 0.5:
            residents.wanted_again(entry)
            oracle.want(chunk.key)
        elif entry is not None and action < 0.65:
            entry.holds = 1 - entry.holds
        elif action > 0.7 and len(residents) > 20:
            expected = oracle.evict(residents, chunk.key)
            found = residents.evict(keep=chunk.key, owner=owners[chunk.key])
            assert (found and found.key) == expected
    assert len(residents) == len(oracle)
    assert min(oracle.moved, oracle.protected, *map(len, oracle.queues)) > 0, "the traffic is too tame"


def ask(residents: Residents, chunks: list[Chunk], capacity: int = 16) -> int:
    return round(len(chunks) * hit_rate(residents, [tuple(chunk.key for chunk in chunks)], capacity))


def test_a_scan_pushes_out_nothing_that_was_wanted_again() -> None:
    for kind, kept in ((Residents, 8), (LeastRecent, 0)):
        residents = kind()
        for _ in range(2):
            for name in (1, 2):
                ask(residents, path(name, 4))
        for name in range(100, 200):
            assert ask(residents, path(name, 3)) == 0
        assert sum(ask(residents, path(name, 4)) for name in (1, 2)) == kept


def test_what_comes_back_soon_after_it_was_evicted_makes_room_for_what_is_new() -> None:
    """Eight prompts again and again while 8 chunks of old favourites lie there: those give way in time."""
    residents = Residents()
    for _ in range(3):
        for name in (1, 2):
            ask(residents, path(name, 4))
    for _ in range(40):
        for name in range(10, 18):
            ask(residents, path(name, 1))
    assert all(ask(residents, path(name, 1)) == 1 for name in range(10, 18))


def test_more_is_found_than_by_age_alone_in_a_trace_with_scans_and_as_much_in_conversations() -> None:
    found = {
        (kind, name): hit_rate(kind(), trace, 300)
        for name, trace in (("documents", documents(0, 1500)), ("conversations", conversations(0, 1500, users=20)))
        for kind in (Residents, LeastRecent)
    }
    assert found[Residents, "documents"] > found[LeastRecent, "documents"] + 0.05
    assert found[Residents, "conversations"] > found[LeastRecent, "conversations"] - 0.02


def test_a_key_that_was_removed_for_decay_is_forgotten() -> None:
    residents, (chunk,) = Residents(), path(1, 1)
    residents.add(Resident(chunk.key, chunk.parent, 0))
    entry = residents.get(chunk.key)
    assert entry is not None
    residents.remove(entry)
    residents.add(Resident(chunk.key, chunk.parent, 0))
    again = residents.get(chunk.key)
    assert again is not None
    assert not again.is_again
