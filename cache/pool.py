"""The pool: every byte of K/V, one tensor per layer and side, at addresses that never change.

    row 0    scratch: padding rows write here, nobody reads it
    row c+1  cell c

Because no address changes, growth copies nothing and a captured CUDA graph stays valid (DESIGN D4). The CPU pool asks
for everything once and lets the operating system commit pages as they are touched. The CUDA pool reserves an address
range per layer and side and maps physical memory behind it, ahead of need and off the step path.

The only file that knows cuda-bindings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from cache.geometry import FP8, CacheConfig, CacheMemoryError, Geometry, InvalidConfig, KvScales

STORAGE_DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.bool,
    torch.bfloat16,
    FP8,
)
SEGMENT_BYTES = 64 << 20
"""Most bytes of one mapping of one range: what growth maps and trimming gives back at a time."""


class Pool(Protocol):
    """K/V storage that grows in place. `keys[layer]` is [max_rows, num_kv_heads, k_dim], `values[layer]` likewise."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    scales: tuple[KvScales, ...]
    """Of each layer: what is stored stands for itself times these. 1 unless K/V is FP8."""

    @property
    def rows(self) -> int:
        """Rows backed by memory, scratch included; rows past it must not be touched."""

    @property
    def growth_count(self) -> int:
        """How often the pool grew after its first allocation."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes of K/V backed by memory."""

    def ensure_cells(self, cells: int) -> None:
        """Back cells [0, cells) by memory. CacheMemoryError leaves everything as it was."""

    def trim(self, cells: int) -> None:
        """Give back memory that cells [0, cells) do not need."""

    def close(self) -> None:
        """Release the memory. The tensors must not be used afterwards."""


def grown_cells(needed: int, current: int, config: CacheConfig) -> int:
    """Cells to back when `needed` are and `current` (0: none yet) are backed: double, from `initial_cells` (POOL-7)."""
    wanted = max(needed, 2 * current if current else config.initial_cells)
    return min(config.capacity_cells, wanted)


def check_storage(config: CacheConfig) -> None:
    """Refuse a storage dtype that is no dense scalar type (BLD-2)."""
    if config.kv_dtype not in STORAGE_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in STORAGE_DTYPES)
        raise InvalidConfig(f"K/V cannot be stored as {config.kv_dtype}: choose one of {names}")


class CpuPool:
    """Host K/V. Growth moves the accounting alone, so that it means the same as on a device."""

    def __init__(self, geometry: Geometry, config: CacheConfig):
        check_storage(config)
        self._config = config
        self._bytes_per_cell = geometry.bytes_per_cell(config.kv_dtype)
        self.scales = geometry.scales_in(config.kv_dtype)
        self._cells = 0
        self.growth_count = 0
        rows = config.capacity_cells + 1
        try:
            self.keys = [
                torch.empty(rows, layer.num_kv_heads, layer.k_dim, dtype=config.kv_dtype) for layer in geometry.layers
            ]
            self.values = [
                torch.empty(rows, layer.num_kv_heads, layer.v_dim, dtype=config.kv_dtype) for layer in geometry.layers
            ]
        except RuntimeError as error:
            raise CacheMemoryError(f"cannot reserve {rows * self._bytes_per_cell} bytes of K/V: {error}") from error

    @property
    def rows(self) -> int:
        return self._cells + 1 if self._cells else 0

    @property
    def allocated_bytes(self) -> int:
        return self.rows * self._bytes_per_cell

    def ensure_cells(self, cells: int) -> None:
        if cells <= self._cells:
            return
        is_growth = self._cells > 0
        self._cells = grown_cells(cells, self._cells, self._config)
        self.growth_count += is_growth

    def trim(self, cells: int) -> None:
        self._cells = min(self._cells, max(cells, min(self._config.initial_cells, self._config.capacity_cells)))

    def close(self) -> None:
        self.keys.clear()
        self.values.clear()


class OutOfDeviceMemory(Exception):
    """A driver could not create physical memory. Never leaves this file."""


class Driver(Protocol):
    """What the CUDA pool asks of the device; a fake one tests the transactions without a device. Any thread."""

    granule: int
    """Bytes: sizes and offsets of mappings are multiples of it."""

    def reserve(self, size: int) -> int:
        """Reserve `size` bytes of addresses, backed by nothing."""

    def unreserve(self, address: int, size: int) -> None:
        """Give back a whole reservation with nothing mapped in it."""

    def map(self, address: int, size: int) -> None:
        """Back [address, address + size) by new physical memory, or raise OutOfDeviceMemory and change nothing."""

    def unmap(self, address: int, size: int) -> None:
        """Give back the physical memory of exactly one earlier `map`."""

    def as_tensor(self, address: int, size: int) -> torch.Tensor:
        """uint8[size] over the range. Its first granule is mapped; the tensor does not own the memory."""

    def attach_thread(self) -> None:
        """Prepare the calling thread to use this driver, also while another thread captures a graph."""

    def synchronize(self) -> None:
        """Wait for every kernel on the device."""

    def release_cached(self) -> None:
        """Give back physical memory that other allocators hold without using it."""


@dataclass(slots=True)
class _Range:
    """One layer's K or V: an address range, mapped from its start in segments."""

    address: int
    size: int  # bytes reserved, a multiple of the granule
    row_bytes: int
    segments: list[int] = field(default_factory=list)  # bytes of each, lowest address first
    mapped: int = 0  # sum of the segments

    def bytes_for(self, cells: int, granule: int) -> int:
        return -(-(cells + 1) * self.row_bytes // granule) * granule


class CudaPool:
    """Device K/V in reserved address ranges, mapped in place as it grows.

    The engine thread calls `ensure_cells` before a step places its cells. When less than `low_water_cells` stay mapped
    past what the step needs, a background thread maps the next doubling a stride at a time, so that a step finds its
    memory mapped; a step that outruns the thread maps for itself, after waiting for at most one stride. The thread
    keeps the pool alive until `close`.
    """

    def __init__(
        self,
        geometry: Geometry,
        config: CacheConfig,
        device: torch.device,
        *,
        driver: Driver | None = None,
        low_water_cells: int | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ):
        check_storage(config)
        self._config = config
        self._driver = driver if driver is not None else CudaDriver(device)
        self._segment_bytes = max(segment_bytes // self._driver.granule, 1) * self._driver.granule
        self._low_water_cells = (
            low_water_cells if low_water_cells is not None else max(2 * config.max_write, config.capacity_cells // 64)
        )
        self._lock = threading.Lock()  # guards the ranges; every write of _cells and growth_count
        self._cells = 0  # cells that every range maps
        self.growth_count = 0
        self._ranges: list[_Range] = []

        self._wake = threading.Condition()  # guards the four below
        self._target = 0  # cells the background thread should reach; 0: nothing to do
        self._refused_target = 0  # one the device had no memory for, not worth trying ahead again
        self._failure: Exception | None = None  # what ended the background thread
        self._is_closed = False

        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.scales = geometry.scales_in(config.kv_dtype)
        rows = config.capacity_cells + 1
        try:
            for layer in geometry.layers:
                for tensors, dim in ((self.keys, layer.k_dim), (self.values, layer.v_dim)):
                    memory = self._reserve(rows, layer.num_kv_heads * dim * config.kv_dtype.itemsize)
                    tensors.append(memory.view(config.kv_dtype).view(rows, layer.num_kv_heads, dim))
        except OutOfDeviceMemory as error:
            self._release_ranges()
            raise CacheMemoryError(f"cannot back the first rows of the K/V pool: {error}") from error
        except BaseException:
            self._release_ranges()
            raise
        self._stride_cells = max(1, self._segment_bytes // max(each.row_bytes for each in self._ranges))
        self._mapper = threading.Thread(target=self._map_ahead, name="cellserve-pool-mapper", daemon=True)
        self._mapper.start()

    @property
    def rows(self) -> int:
        return self._cells + 1 if self._cells else 0

    @property
    def allocated_bytes(self) -> int:
        with self._lock:
            return sum(each.mapped for each in self._ranges)

    def ensure_cells(self, cells: int) -> None:
        if cells > self._config.capacity_cells:
            raise CacheMemoryError(f"{cells} cells do not fit a pool of {self._config.capacity_cells}")
        if self._failure is not None:
            raise self._failure
        # The lock is taken only by a step that needs it: the background thread may be holding it.
        if cells > self._cells:
            with self._lock:
                if cells > self._cells:
                    self._grow_now(cells)
        wanted = min(self._config.capacity_cells, cells + self._low_water_cells)
        if wanted > self._cells:
            self._ask_ahead(grown_cells(wanted, self._cells, self._config))

    def trim(self, cells: int) -> None:
        """Unmap the segments that cells [0, cells) do not reach. Waits for the device: never on the step path."""
        with self._wake:
            self._target = self._refused_target = 0
            self._wake.notify_all()
        with self._lock:
            if cells >= self._cells:
                return
            self._driver.synchronize()
            for each in self._ranges:
                needed = each.bytes_for(cells, self._driver.granule)
                # The first segment stays: it holds the scratch row, and the tensor was made over it.
                while len(each.segments) > 1 and each.mapped - each.segments[-1] >= needed:
                    self._unmap_last(each)
            # Ranges differ in what a segment holds, so some may still map more than this.
            mapped_rows = min(each.mapped // each.row_bytes for each in self._ranges)
            self._cells = min(self._cells, mapped_rows - 1)

    def wait_idle(self) -> None:
        """Return once the background thread has nothing left to map."""
        with self._wake:
            self._wake.wait_for(lambda: self._target == 0)

    def close(self) -> None:
        """Wait for the device, then give everything back. Idempotent."""
        with self._wake:
            if self._is_closed:
                return
            self._is_closed = True
            self._wake.notify_all()
        self._mapper.join()
        self._driver.synchronize()
        self.keys.clear()
        self.values.clear()
        with self._lock:
            self._cells = 0
            self._release_ranges()

    # -- Under the lock

    def _grow_now(self, cells: int) -> None:
        """Map the next doubling, or at least `cells`; the step waits for it."""
        is_growth = self._cells > 0
        try:
            self._grow(grown_cells(cells, self._cells, self._config))
        except OutOfDeviceMemory:
            # Memory that torch caches but does not use is the likeliest to be had back.
            self._driver.release_cached()
            try:
                self._grow(cells)
            except OutOfDeviceMemory as error:
                raise CacheMemoryError(
                    f"cannot grow the K/V pool from {self._cells} to {cells} cells: {error}"
                ) from error
        self.growth_count += is_growth

    def _grow(self, cells: int) -> None:
        """Map every range up to `cells` cells, all or nothing."""
        marks = [len(each.segments) for each in self._ranges]
        try:
            for each in self._ranges:
                missing = each.bytes_for(cells, self._driver.granule) - each.mapped
                while missing > 0:
                    size = min(missing, self._segment_bytes)
                    self._map_next(each, size)
                    missing -= size
        except BaseException:
            for each, mark in zip(self._ranges, marks, strict=True):
                while len(each.segments) > mark:
                    self._unmap_last(each)
            raise
        self._cells = cells

    def _map_next(self, each: _Range, size: int) -> None:
        self._driver.map(each.address + each.mapped, size)
        each.segments.append(size)
        each.mapped += size

    def _unmap_last(self, each: _Range) -> None:
        size = each.segments.pop()
        each.mapped -= size
        self._driver.unmap(each.address + each.mapped, size)

    # -- Ranges

    def _reserve(self, rows: int, row_bytes: int) -> torch.Tensor:
        """Reserve one range and map its first granules; uint8[rows * row_bytes] over it."""
        granule = self._driver.granule
        size = -(-rows * row_bytes // granule) * granule
        each = _Range(self._driver.reserve(size), size, row_bytes)
        self._ranges.append(each)
        self._map_next(each, each.bytes_for(0, granule))
        # Read by nobody, but a NaN left by the memory's last owner should not be one addition away from a result.
        memory = self._driver.as_tensor(each.address, rows * row_bytes)
        memory[:row_bytes].zero_()
        return memory

    def _release_ranges(self) -> None:
        for each in self._ranges:
            while each.segments:
                self._unmap_last(each)
            self._driver.unreserve(each.address, each.size)
        self._ranges.clear()

    # -- Ahead of need

    def _ask_ahead(self, target: int) -> None:
        with self._wake:
            if self._target == 0 and target != self._refused_target:
                self._target = target
                self._wake.notify_all()

    def _map_ahead(self) -> None:
        """The background thread."""
        try:
            self._driver.attach_thread()
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._target or self._is_closed)
                    if self._is_closed:
                        return
                    target = self._target
                is_refused = not self._map_towards(target)
                with self._wake:
                    if is_refused:
                        self._refused_target = target
                    self._target = 0
                    self._wake.notify_all()
        except Exception as error:
            # A driver fault, not a shortage. The engine thread meets it at its next step.
            with self._wake:
                self._failure = error
                self._target = 0
                self._wake.notify_all()

    def _map_towards(self, target: int) -> bool:
        """Map up to `target` cells in strides; False when memory ran short.

        A shortage is nobody's failure yet: the step that needs the memory tries again, and may refuse.
        """
        has_grown = False
        while True:
            with self._lock:
                # A target withdrawn by trim or close ends the climb between two strides.
                if self._cells >= target or self._target != target or self._is_closed:
                    return True
                try:
                    self._grow(min(target, self._cells + self._stride_cells))
                except OutOfDeviceMemory:
                    return False
                self.growth_count += not has_grown
                has_grown = True


class CudaDriver:
    """CUDA virtual memory management of one device, through cuda-bindings."""

    def __init__(self, device: torch.device):
        # Here and not above: a machine without CUDA has no use for the bindings, and may not have them.
        from cuda.bindings import driver

        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._cuda: Any = driver
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        with torch.cuda.device(self._device):
            torch.empty(1, device=self._device)  # makes the device's primary context, which the calls below need
            self._context = self._call(driver.cuCtxGetCurrent)
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = self._device.index
        self._access = driver.CUmemAccessDesc()
        self._access.location = self._properties.location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.granule: int = self._call(
            driver.cuMemGetAllocationGranularity,
            self._properties,
            driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
        )

    def reserve(self, size: int) -> int:
        return int(self._call(self._cuda.cuMemAddressReserve, size, 0, 0, 0))

    def unreserve(self, address: int, size: int) -> None:
        self._call(self._cuda.cuMemAddressFree, address, size)

    def map(self, address: int, size: int) -> None:
        handle = self._call(self._cuda.cuMemCreate, size, self._properties, 0)
        try:
            self._call(self._cuda.cuMemMap, address, size, 0, handle, 0)
            try:
                self._call(self._cuda.cuMemSetAccess, address, size, [self._access], 1)
            except BaseException:
                self._call(self._cuda.cuMemUnmap, address, size)
                raise
        finally:
            # A mapping keeps its memory alive; without one this gives it back at once.
            self._call(self._cuda.cuMemRelease, handle)

    def unmap(self, address: int, size: int) -> None:
        self._call(self._cuda.cuMemUnmap, address, size)

    def as_tensor(self, address: int, size: int) -> torch.Tensor:
        return torch.as_tensor(_DeviceBytes(address, size), device=self._device)

    def attach_thread(self) -> None:
        self._call(self._cuda.cuCtxSetCurrent, self._context)
        # A capture on another thread forbids allocation-like calls to every thread that has not asked for this.
        self._call(
            self._cuda.cuThreadExchangeStreamCaptureMode,
            self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED,
        )

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def _call(self, function: Callable[..., Sequence[Any]], *arguments: Any) -> Any:
        status, *results = function(*arguments)
        if status == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfDeviceMemory(f"the device has no memory left ({function.__name__})")
        if status != self._cuda.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{function.__name__} failed: {status.name}")
        return results[0] if results else None


class _DeviceBytes:
    """Device memory as the array interface that torch wraps without copying."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
