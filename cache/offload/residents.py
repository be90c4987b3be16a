"""A tier's chunks by key, and which one is evicted: a leaf, for a chunk is of use only behind its parent.

Of the leaves it is the least recently used one of one of two queues:

    once     brought in, and not wanted since        ─── wanted again ──>     again

What a thousand prompts that nobody repeats bring in goes through `once`, and leaves alone what is asked every minute.
How many chunks `once` may have follows what is missed (adaptive replacement, ARC): what comes again soon after it was
evicted from `once` makes room for more there, as conversations need it whose next turn is late; what was evicted from
`again` makes less. `python -m engine.kv_bench --cases policy` compares hits with those of one queue alone.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from heapq import heapify, heappop, heappush


@dataclass(slots=True)
class Resident:
    """A chunk that a tier has, in one of its slots."""

    key: bytes
    parent: bytes
    slot: int
    holds: int = 0
    """Users that forbid eviction."""
    last_used: int = 0
    is_again: bool = False
    """In which queue it is. `Residents` sets this and the two beside it."""
    owner: bytes = b""
    """What the path begins behind: the root of its namespace, so another one for each salt."""


Leaves = list[tuple[int, bytes]]
"""A heap of (last used, key); stale entries are skipped."""


class Residents:
    """Not locked. A parent outlives its children: what has children here is no leaf.

    Among owners, half of a fair share is safe: who makes room for itself takes nothing of an owner that has no more
    than that. The other half goes to whoever uses it, so that one owner alone has everything.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, Resident] = {}
        self._num_children: Counter[bytes] = Counter()  # parent's key -> children here, whether or not it is here
        self._sizes: Counter[bytes] = Counter()  # chunks by owner
        self._leaves: dict[bytes, tuple[Leaves, Leaves]] = {}  # by owner: once, again
        self._num_again = 0
        self._once_share = 0.0
        """Chunks that `once` may have before it is the one to lose some."""
        self._gone: tuple[OrderedDict[bytes, None], OrderedDict[bytes, None]] = (OrderedDict(), OrderedDict())
        """Keys that were evicted from once, and from again; the first one is forgotten next. Together no more than
        there are chunks."""
        self._num_offers = 0
        self._now = 0

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[Resident]:
        return list(self._entries.values())

    @property
    def total_holds(self) -> int:
        return sum(entry.holds for entry in self._entries.values())

    def get(self, key: bytes) -> Resident | None:
        return self._entries.get(key)

    def add(self, entry: Resident) -> None:
        assert entry.key not in self._entries
        entry.owner = self.owner_behind(entry.parent)
        entry.is_again = self._is_missed(entry.key)
        self._sizes[entry.owner] += 1
        self._num_again += entry.is_again
        self._entries[entry.key] = entry
        self._num_children[entry.parent] += 1
        self._place(entry)

    def owner_behind(self, parent: bytes) -> bytes:
        """Whose a chunk behind this parent is. A parent that is not here counts as the beginning."""
        entry = self._entries.get(parent)
        return parent if entry is None else entry.owner

    def wanted_again(self, entry: Resident) -> None:
        """Just now, by another one than who brought it in."""
        self._num_again += not entry.is_again
        entry.is_again = True
        self._place(entry)

    def remove(self, entry: Resident) -> None:
        del self._entries[entry.key]
        self._num_again -= entry.is_again
        self._sizes[entry.owner] -= 1
        if not self._sizes[entry.owner]:
            del self._sizes[entry.owner]
        self._num_children[entry.parent] -= 1
        if not self._num_children[entry.parent]:
            del self._num_children[entry.parent]
            parent = self._entries.get(entry.parent)
            if parent is not None:
                self._offer(parent)

    def evict(self, *, keep: bytes, owner: bytes) -> Resident | None:
        """Take out a leaf that nobody holds, but not `keep`. None: there is none.

        owner: who makes room for itself. Takes time by the number of owners.
        """
        is_again = len(self._entries) - self._num_again <= self._once_share
        found = self._oldest(is_again, keep, owner) or self._oldest(not is_again, keep, owner)
        if found is not None:
            self.remove(found)
            self._remember(found)
        return found

    # -- What is missed

    def _is_missed(self, key: bytes) -> bool:
        """Whether the key was evicted not long ago; it moves the border between the queues."""
        for is_again in (False, True):
            mine, others = self._gone[is_again], self._gone[not is_again]
            if key in mine:
                step = max(1.0, len(others) / len(mine))
                share = self._once_share + (-step if is_again else step)
                self._once_share = min(max(0.0, share), float(len(self._entries)))
                del mine[key]
                return True
        return False

    def _remember(self, evicted: Resident) -> None:
        once, again = self._gone
        self._gone[evicted.is_again][evicted.key] = None
        num_chunks = len(self._entries) + 1
        while once and len(once) + len(self._entries) - self._num_again > num_chunks:
            once.popitem(last=False)
        while again and len(once) + len(again) > num_chunks:
            again.popitem(last=False)

    # -- Leaves

    def _oldest(self, is_again: bool, keep: bytes, owner: bytes) -> Resident | None:
        """The least recently used leaf of a queue, of those that may go for this owner."""
        num_owners = len(self._sizes) + (owner not in self._sizes)
        safe = len(self._entries) // (2 * num_owners)
        found: Resident | None = None
        for other, queues in list(self._leaves.items()):
            if other != owner and self._sizes[other] <= safe:
                continue
            before = found.last_used if found else self._now + 1
            found = self._first(queues[is_again], keep, before=before) or found
            if not any(queues):
                del self._leaves[other]
        return found

    def _first(self, leaves: Leaves, keep: bytes, *, before: int) -> Resident | None:
        """Of a heap: the first leaf that may go and was used before that. Stale entries are dropped."""
        passed_over: Leaves = []
        found = None
        while leaves and leaves[0][0] < before:
            last_used, key = leaves[0]
            entry = self._entries.get(key)
            if entry is None or entry.last_used != last_used or key in self._num_children:
                heappop(leaves)
                self._num_offers -= 1
            elif entry.holds or key == keep:
                passed_over.append(heappop(leaves))
            else:
                found = entry
                break
        for item in passed_over:
            heappush(leaves, item)
        return found

    def _place(self, entry: Resident) -> None:
        """At its queue's end."""
        self._now += 1
        entry.last_used = self._now
        self._offer(entry)

    def _offer(self, entry: Resident) -> None:
        if entry.key in self._num_children:
            return
        heappush(self._queue(entry), (entry.last_used, entry.key))
        self._num_offers += 1
        if self._num_offers > 2 * len(self._entries) + 64:
            self._leaves.clear()
            for key, other in self._entries.items():
                if key not in self._num_children:
                    self._queue(other).append((other.last_used, key))
            for queues in self._leaves.values():
                for leaves in queues:
                    heapify(leaves)
            self._num_offers = sum(len(leaves) for queues in self._leaves.values() for leaves in queues)

    def _queue(self, entry: Resident) -> Leaves:
        return self._leaves.setdefault(entry.owner, ([], []))[entry.is_again]
