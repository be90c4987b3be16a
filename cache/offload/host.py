"""The first tier below the pool: one slab of host memory, pinned where a GPU copies from it, cut into chunk slots.

    absent ──reserve──> filling ──publish──> resident ──evicted for another, or removed──> absent
                           └──────abandon──────────────────────────────────────────────────┘

Only a resident chunk can be seen, and only a held one read. There is no thread that evicts ahead of need: a chunk that
finds no free slot takes that of a leaf nobody holds (`residents` says of which), and is dropped where there is none. A
parent stays as long as a child does, and a child without its parent is not taken in. Any thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

import torch

from cache.geometry import CacheMemoryError, InvalidConfig
from cache.offload.chunks import Chunk, TokenIds
from cache.offload.residents import Resident, Residents
from cache.offload.staging import aligned
from cache.offload.tiers import TierStatus

PIECE_BYTES = 1 << 30
"""Most bytes of one allocation: pinned ones are rounded up to a power of two."""


@dataclass(frozen=True, slots=True)
class _Filling:
    """A chunk that is not there yet."""

    slot: int
    parent: Resident | None
    """Kept here until the chunk is."""
    owner: bytes


class HostSlab:
    """`capacity_bytes` of host memory for chunks of `chunk_bytes` each."""

    name = "host"

    def __init__(
        self,
        chunk_bytes: int,
        capacity_bytes: int,
        *,
        pinned: bool = False,
        needs_parents: bool = True,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """needs_parents: False where a chunk is of use without those before it, as behind a window.

        Raises InvalidConfig when not one chunk fits, CacheMemoryError when there is no such memory."""
        self.chunk_bytes = chunk_bytes
        self._slot_bytes = aligned(chunk_bytes)
        self._needs_parents = needs_parents
        self.num_slots = capacity_bytes // self._slot_bytes
        if self.num_slots < 1:
            raise InvalidConfig(f"{capacity_bytes} bytes of host memory do not hold one chunk of {self._slot_bytes}")
        self._piece_slots = max(1, min(self.num_slots, piece_bytes // self._slot_bytes))
        self._pieces: list[torch.Tensor] = []  # [slots, slot_bytes] u8
        try:
            for first in range(0, self.num_slots, self._piece_slots):
                slots = min(self._piece_slots, self.num_slots - first)
                memory = torch.empty(slots * self._slot_bytes, dtype=torch.uint8, pin_memory=pinned)
                self._pieces.append(memory.view(slots, self._slot_bytes))
        except RuntimeError as error:
            size = self.num_slots * self._slot_bytes
            raise CacheMemoryError(f"cannot have {size} bytes of host memory: {error}") from error
        self._lock = threading.Lock()
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._residents = Residents()
        self._tokens: dict[bytes, TokenIds] = {}  # of resident chunks
        self._filling: dict[bytes, _Filling] = {}  # by key
        self.counts: Counter[str] = Counter()
        self.hits = 0
        """Chunks that a fetch found here."""
        self.misses = 0

    def has(self, chunk: Chunk) -> bool:
        """Whether it is resident, token for token."""
        with self._lock:
            return self._find(chunk) is not None

    def is_kept(self, chunk: Chunk, *, is_wanted_again: bool = False) -> bool:
        """Whether it is resident or being filled.

        is_wanted_again: another one than who brought it in has it in the pool.
        """
        with self._lock:
            entry = self._find(chunk)
            if entry is not None and is_wanted_again:
                self._residents.wanted_again(entry)
            return entry is not None or chunk.key in self._filling

    def leading(self, chunks: list[Chunk]) -> int:
        """How many leading chunks are resident. Holds nothing."""
        with self._lock:
            for number, chunk in enumerate(chunks):
                if self._find(chunk) is None:
                    return number
            return len(chunks)

    def reserve(self, chunk: Chunk) -> torch.Tensor | None:
        """Memory [chunk_bytes] u8 to fill, then `publish` or `abandon`.

        None: it is there or being filled already, its parent is neither, or nothing can be evicted.
        """
        with self._lock:
            if chunk.key in self._filling or self._residents.get(chunk.key) is not None:
                return None
            parent = self._residents.get(chunk.parent)
            if self._needs_parents and chunk.index and parent is None and chunk.parent not in self._filling:
                self.counts["dropped: no parent"] += 1
                return None
            owner = self._owner_behind(chunk.parent)
            slot = self._take_slot(chunk, owner)
            if slot is None:
                self.counts["dropped: no room"] += 1
                return None
            self._filling[chunk.key] = _Filling(slot, parent, owner)
            if parent is not None:
                parent.holds += 1
            return self._memory(slot)

    def publish(self, chunk: Chunk, *, holds: int = 0) -> bool:
        """The chunk's memory is filled and verified: it is resident, and held `holds` times.

        False: its parent was being filled too and was lost, so it is absent.
        """
        with self._lock:
            slot = self._end_filling(chunk)
            if self._needs_parents and chunk.index and self._residents.get(chunk.parent) is None:
                self._free.append(slot)
                self.counts["dropped: no parent"] += 1
                return False
            self._residents.add(Resident(chunk.key, chunk.parent, slot, holds))
            self._tokens[chunk.key] = chunk.tokens
            return True

    def abandon(self, chunk: Chunk) -> None:
        """It could not be filled: it is absent, its slot free."""
        with self._lock:
            self._free.append(self._end_filling(chunk))

    def hold(self, chunk: Chunk) -> torch.Tensor | None:
        """The bytes [chunk_bytes] u8 of a resident chunk, not evicted until `release`. None: it is not resident."""
        with self._lock:
            entry = self._find(chunk)
            if entry is None:
                return None
            entry.holds += 1
            return self._memory(entry.slot)

    def fetch(self, chunk: Chunk) -> torch.Tensor | None:
        """`hold`, counted as a hit: for whoever wants the chunk in the pool. A miss it counts when it looks below."""
        with self._lock:
            entry = self._find(chunk)
            if entry is None:
                return None
            self.hits += 1
            self._residents.wanted_again(entry)
            entry.holds += 1
            return self._memory(entry.slot)

    def missed(self) -> None:
        """Count a chunk that somebody wanted in the pool and that is not here."""
        with self._lock:
            self.misses += 1

    def release(self, chunk: Chunk) -> None:
        """The reverse of one `hold`."""
        with self._lock:
            entry = self._residents.get(chunk.key)
            assert entry is not None, "a chunk was released that was not held"
            assert entry.holds > 0, "a chunk was released more often than held"
            entry.holds -= 1

    @property
    def holds(self) -> int:
        """Of all chunks together; 0 when nothing is going on."""
        with self._lock:
            return self._residents.total_holds

    def status(self) -> TierStatus:
        with self._lock:
            used = (len(self._residents) + len(self._filling)) * self._slot_bytes
            capacity, held = self.num_slots * self._slot_bytes, self._residents.total_holds
            return TierStatus(self.name, capacity, used, len(self._residents), held)

    # -- Under the lock

    def _find(self, chunk: Chunk) -> Resident | None:
        entry = self._residents.get(chunk.key)
        if entry is not None and not (self._tokens[chunk.key] == chunk.tokens).all():
            self.counts["tokens"] += 1  # two texts with one key: a miss, never the other's K/V
            return None
        return entry

    def _owner_behind(self, parent: bytes) -> bytes:
        filling = self._filling.get(parent)
        return self._residents.owner_behind(parent) if filling is None else filling.owner

    def _take_slot(self, chunk: Chunk, owner: bytes) -> int | None:
        if self._free:
            return self._free.pop()
        evicted = self._residents.evict(keep=chunk.parent, owner=owner)
        if evicted is None:
            return None
        del self._tokens[evicted.key]
        self.counts["evicted"] += 1
        return evicted.slot

    def _end_filling(self, chunk: Chunk) -> int:
        filling = self._filling.pop(chunk.key)
        if filling.parent is not None:
            filling.parent.holds -= 1
        return filling.slot

    def _memory(self, slot: int) -> torch.Tensor:
        piece, index = divmod(slot, self._piece_slots)
        return self._pieces[piece][index, : self.chunk_bytes]


def bytes_view(memory: torch.Tensor) -> memoryview:
    """Host memory [n] u8 as a writable buffer; the same memory."""
    return memory.numpy().data
