"""Traces of prompts, and what part of their chunks a tier has: its own order of eviction beside plain LRU.

Knows chunks by name; no bytes, no time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate

from cache.offload.residents import Resident, Residents

Path = tuple[bytes, ...]
"""Keys of a prompt's chunks."""
ROOT = b""


class LeastRecent(Residents):
    """One queue: what a scan pushes out is whatever was used before it."""

    def _is_missed(self, key: bytes) -> bool:
        return False

    def wanted_again(self, entry: Resident) -> None:
        self._place(entry)


def hit_rate(residents: Residents, trace: Sequence[Path], capacity: int) -> float:
    """Chunks that were there when their prompt came, of all; what was not is brought in behind it."""
    hits = 0
    for path in trace:
        found = 0
        while found < len(path) and (entry := residents.get(path[found])) is not None:
            residents.wanted_again(entry)
            found += 1
        hits += found
        for number in range(found, len(path)):
            parent = path[number - 1] if number else ROOT
            if len(residents) >= capacity and residents.evict(keep=parent, owner=ROOT) is None:
                break
            residents.add(Resident(path[number], parent, 0))
    return hits / sum(map(len, trace))


def documents(seed: int, requests: int, *, scanned: float = 0.3, num: int = 400) -> list[Path]:
    """Questions that nobody repeats, about documents drawn by Zipf's law, behind one system prompt; and among them a
    part of prompts that share nothing with any other.
    """
    rng = random.Random(seed)
    weights = list(accumulate(1 / (rank + 1) ** 0.9 for rank in range(num)))
    lengths = [rng.randint(4, 16) for _ in range(num)]
    trace = []
    for number in range(requests):
        if rng.random() < scanned:
            trace.append(_path(f"scan {number}", 8))
        else:
            (name,) = rng.choices(range(num), cum_weights=weights)
            trace.append((*_path("system", 2), *_path(f"document {name}", lengths[name]), *_path(f"ask {number}", 2)))
    return trace


def conversations(seed: int, requests: int, *, users: int = 60) -> list[Path]:
    """So many at once, each two chunks longer at every turn, up to twelve turns; then another one begins."""
    return list(_conversations(random.Random(seed), requests, users))


def _conversations(rng: random.Random, requests: int, users: int) -> Iterator[Path]:
    begun = users
    line = [(rng.random(), name, 1, rng.randint(1, 12)) for name in range(users)]
    heapify(line)
    for _ in range(requests):
        at, name, turn, last = heappop(line)
        yield (*_path("system", 2), *_path(f"conversation {name}", 2 * turn))
        if turn == last:
            name, begun, turn, last = begun, begun + 1, 0, rng.randint(1, 12)
        heappush(line, (at + rng.expovariate(1), name, turn + 1, last))


def _path(name: str, length: int) -> Path:
    return tuple(f"{name}/{number}".encode() for number in range(length))
