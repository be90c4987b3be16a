"""The staging buffer: where scattered cells become one run of bytes that a copy engine moves at full speed, and back.

One flat tensor of `max_batch_size` chunks, laid out once. Every region begins at a multiple of 256 bytes, so that a
typed view of it is always legal and a vector load always aligned; the gaps are zero and stay zero.

    batch slot 0                                    batch slot 1
    ├─ object group 0 ──────────────┼─ object 1 ─┤  ├─ ...
    │ kernel group 0 │ kernel group 2│ kernel 1   │
    [kv, layers, slots, hidden]      ...

A kernel reads and writes kernel-group views; a transfer moves object-group views. Both are the same memory.
Owned by one thread: nothing here is locked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch

from cache.geometry import InvalidConfig, Unsupported
from cache.offload.groups import Groups, InvalidGroups

ALIGNMENT = 256
"""Bytes."""
MAX_BLOCK_IDS = 1 << 20


class GpuDirect(Protocol):
    """What GPUDirect Storage (cuFile) asks to know of device memory it may read and write."""

    def register(self, buffer: torch.Tensor) -> None:
        """Pin uint8[bytes] for direct storage."""

    def deregister(self, buffer: torch.Tensor) -> None:
        """The reverse, before the buffer goes away."""


def gpu_direct(name: str) -> GpuDirect:
    """The GPUDirect Storage binding of that name.

    None is built in, so every name is refused: disk tiers go through host memory. A deployment that has a cuFile
    binding hands its own `GpuDirect` to `Staging`.
    """
    raise Unsupported(f"GPUDirect Storage by {name!r} is not available: no cuFile binding is built into this server")


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes [offset, offset + size) of the staging buffer."""

    offset: int
    size: int


class Staging:
    """One flat buffer on `device` for `max_batch_size` chunks of `groups`."""

    def __init__(
        self,
        groups: Groups,
        device: torch.device,
        *,
        max_batch_size: int = 4,
        pinned: bool = False,
        direct: GpuDirect | None = None,
    ) -> None:
        if max_batch_size < 1:
            raise InvalidConfig(f"max_batch_size is {max_batch_size}: it must be at least 1")
        self.groups = groups
        self.max_batch_size = max_batch_size
        self._object_regions: dict[tuple[int, int], Region] = {}  # (batch slot, object group)
        self._kernel_regions: dict[tuple[int, int], Region] = {}  # (batch slot, kernel group)
        offset = 0
        for slot in range(max_batch_size):
            for group in groups.object_groups:
                first = offset
                for index in group.kernel_groups:
                    size = groups.kernel_groups[index].chunk_bytes
                    self._kernel_regions[slot, index] = Region(offset, size)
                    offset += aligned(size)
                self._object_regions[slot, group.index] = Region(first, offset - first)
        self.chunk_bytes = offset // max_batch_size
        """Bytes of one batch slot, padding included; a multiple of 256."""
        memory = torch.zeros(offset + ALIGNMENT, dtype=torch.uint8, device=device, pin_memory=pinned)
        start = -memory.data_ptr() % ALIGNMENT
        self.buffer = memory[start : start + offset]
        """[max_batch_size * chunk_bytes] u8, its address a multiple of 256."""
        self._direct = direct
        if direct is not None:
            direct.register(self.buffer)

    def kernel_group(self, slot: int, kernel_group: int) -> torch.Tensor:
        """[kv, layers, slots a chunk, hidden] in the group's dtype, contiguous; the same memory at every call.

        InvalidGroups for a batch slot or kernel group that there is not.
        """
        region = self._kernel_regions.get((slot, kernel_group))
        if region is None:
            raise InvalidGroups(f"Invalid batch slot {slot} or kernel group {kernel_group}")
        shape, dtype = self.groups.shape_dtype(self.groups.chunk_tokens, kernel_group)
        return self.buffer[region.offset : region.offset + region.size].view(dtype).view(shape)

    def object_group(self, slot: int, object_group: int) -> torch.Tensor:
        """Flat u8 over all kernel groups of the object, in their order, gaps included. Raises as `kernel_group`."""
        region = self._object_regions.get((slot, object_group))
        if region is None:
            raise InvalidGroups(f"Invalid batch slot {slot} or object group {object_group}")
        return self.buffer[region.offset : region.offset + region.size]

    def chunk(self, slot: int) -> torch.Tensor:
        """Flat u8 over all object groups of one batch slot, which lie back to back."""
        if not 0 <= slot < self.max_batch_size:
            raise InvalidGroups(f"Invalid batch slot {slot}: there are {self.max_batch_size}")
        return self.buffer[slot * self.chunk_bytes : (slot + 1) * self.chunk_bytes]

    def object_bytes(self, object_group: int) -> int:
        """Bytes of one stored object of the group."""
        return self.object_group(0, object_group).numel()

    def kernel_region(self, slot: int, kernel_group: int) -> Region:
        """Where `kernel_group` lies; regions of neighbouring slots are `chunk_bytes` apart."""
        return self._kernel_regions[slot, kernel_group]

    def close(self) -> None:
        """Take the buffer back from GPUDirect Storage. Idempotent; the memory goes with its last view."""
        if self._direct is not None:
            self._direct.deregister(self.buffer)
            self._direct = None


class BlockIds:
    """A device buffer for the row numbers of one transfer; allocated once, one upload a transfer.

    The next `stage` overwrites it: launches that read it must be on the stream of the upload.
    """

    def __init__(self, device: torch.device, capacity: int = MAX_BLOCK_IDS) -> None:
        self._buffer = torch.empty(capacity, dtype=torch.int64, device=device)

    def stage(self, lists: Sequence[Sequence[int] | torch.Tensor]) -> list[torch.Tensor]:
        """Upload the lists, back to back; -> a view of each, i64 on the device, empty for an empty one.

        InvalidGroups when they are more than the buffer holds; nothing is uploaded then.
        """
        host = [torch.as_tensor(ids, dtype=torch.int64).reshape(-1) for ids in lists]
        total = sum(ids.numel() for ids in host)
        if total > self._buffer.numel():
            raise InvalidGroups(f"{total} block ids do not fit the buffer of {self._buffer.numel()}")
        if total:
            joined = host[0] if len(host) == 1 else torch.cat(host)
            if self._buffer.is_cuda:
                # A fresh pinned source each time: the caching allocator reuses it only behind this copy.
                joined = joined.pin_memory()
            self._buffer[:total].copy_(joined, non_blocking=True)
        ends = list(accumulate((ids.numel() for ids in host), initial=0))
        return [self._buffer[start:end] for start, end in pairwise(ends)]


class PlainStaging:
    """The simple twin: one K/V tensor [2, layers, tokens, hidden], one typed buffer of a chunk, no groups."""

    def __init__(self, kv_cache: torch.Tensor, chunk_tokens: int = 256) -> None:
        if kv_cache.dim() != 4 or kv_cache.shape[0] != 2:
            raise InvalidGroups(f"expected K/V of shape [2, layers, tokens, hidden], got {list(kv_cache.shape)}")
        self.kv_cache = kv_cache
        self.chunk_tokens = chunk_tokens
        self._buffer = torch.empty(self.shape(chunk_tokens), dtype=kv_cache.dtype, device=kv_cache.device)

    def shape(self, num_tokens: int) -> torch.Size:
        """Of the K/V of that many tokens."""
        _, layers, _, hidden = self.kv_cache.shape
        return torch.Size((2, layers, num_tokens, hidden))

    def buffer(self, num_tokens: int) -> torch.Tensor:
        """The first `num_tokens` of the buffer; not contiguous when they are fewer than a chunk."""
        if not 0 <= num_tokens <= self.chunk_tokens:
            raise InvalidGroups(f"{num_tokens} tokens do not fit the buffer of {self.chunk_tokens}")
        return self._buffer[:, :, :num_tokens]

    def slice_tokens(self, start: int, end: int) -> torch.Tensor:
        """K/V of the tokens [start, end); the cache's own memory."""
        return self.kv_cache[:, :, start:end]


def aligned(size: int) -> int:
    """`size` bytes, rounded up to a whole number of alignment units."""
    return -(-size // ALIGNMENT) * ALIGNMENT
