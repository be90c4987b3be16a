"""A device's virtual memory without a device: `cache.pool.Driver` over a budget of bytes, with faults on demand."""

import threading
from collections.abc import Callable

import torch

from cache.pool import OutOfDeviceMemory


class FakeDriver:
    """Tensors are host memory; what is mapped is bookkeeping, checked as strictly as a driver would.

    budget: bytes that may be mapped at once. cached: bytes of it that another allocator holds until asked.
    """

    def __init__(self, budget: int = 1 << 40, *, granule: int = 64, cached: int = 0):
        self.granule = granule
        self.budget = budget
        self.cached = cached
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.mapping_threads: list[int] = []
        self.released_caches = 0
        self.synchronized = 0
        self.fault: Exception | None = None
        self.on_next_map: Callable[[], None] | None = None
        self._next_address = 1 << 20

    @property
    def mapped_bytes(self) -> int:
        return sum(self.mapped.values())

    def reserve(self, size: int) -> int:
        assert size % self.granule == 0
        address = self._next_address
        self._next_address += size + (1 << 20)
        self.reserved[address] = size
        return address

    def unreserve(self, address: int, size: int) -> None:
        assert self.reserved.pop(address) == size
        assert not any(address <= start < address + size for start in self.mapped)

    def map(self, address: int, size: int) -> None:
        self.mapping_threads.append(threading.get_ident())
        hook, self.on_next_map = self.on_next_map, None
        if hook is not None:
            hook()
        if self.fault is not None:
            raise self.fault
        assert size > 0
        assert size % self.granule == 0
        assert any(base <= address and address + size <= base + room for base, room in self.reserved.items())
        assert not any(start < address + size and address < start + other for start, other in self.mapped.items())
        if self.mapped_bytes + self.cached + size > self.budget:
            raise OutOfDeviceMemory("the budget is spent")
        self.mapped[address] = size

    def unmap(self, address: int, size: int) -> None:
        assert self.mapped.pop(address) == size

    def as_tensor(self, address: int, size: int) -> torch.Tensor:
        assert address in self.mapped
        return torch.empty(size, dtype=torch.uint8)

    def attach_thread(self) -> None:
        pass

    def synchronize(self) -> None:
        self.synchronized += 1

    def release_cached(self) -> None:
        self.released_caches += 1
        self.cached = 0
