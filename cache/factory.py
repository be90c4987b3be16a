"""Kind of cache and device -> the cache (FAC-*).

    single         one sequence; window and chunk layers store a ring
    batched-cell   many sequences over one pool of cells
    batched        whichever batched layout serves the device best

A factory is a value that is passed on: there is no registry of the process. The draft cache is not among the kinds:
it has a protocol of its own and belongs to whoever drafts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cache.cell_cache import CellCache, check_config
from cache.geometry import CacheConfig, Geometry, InvalidBuilder, UnknownKind
from cache.sequence_cache import SequenceCache

Builder = Callable[[Geometry, CacheConfig, torch.device], CellCache | None]

DEVICE_TYPES = ("cpu", "cuda")


class CacheFactory:
    """Builders by device type and kind. An entry that was made stays (FAC-2)."""

    def __init__(self) -> None:
        self._builders: dict[tuple[str, str], Builder] = {}

    def register(self, device_type: str, kind: str, builder: Builder | None) -> None:
        """Raises InvalidBuilder for no builder and for a second one."""
        if builder is None:
            raise InvalidBuilder(f"no builder was given for {kind!r} on {device_type}")
        if (device_type, kind) in self._builders:
            raise InvalidBuilder(f"{kind!r} on {device_type} has a builder already: {self._list(device_type)}")
        self._builders[device_type, kind] = builder

    def kinds(self, device_type: str) -> tuple[str, ...]:
        return tuple(sorted(kind for device, kind in self._builders if device == device_type))

    def build(self, kind: str, geometry: Geometry, config: CacheConfig, device: torch.device) -> CellCache:
        """The cache, whose config is checked before its builder runs (FAC-3).

        Raises UnknownKind listing what there is, InvalidConfig, InvalidGeometry, InvalidBuilder (it built nothing) and
        CacheMemoryError.
        """
        builder = self._builders.get((device.type, kind))
        if builder is None:
            raise UnknownKind(f"there is no cache of kind {kind!r} on {device.type}: {self._list(device.type)}")
        check_config(config)
        cache = builder(geometry, config, device)
        if cache is None:
            raise InvalidBuilder(f"the builder of {kind!r} on {device.type} built nothing")
        return cache

    def _list(self, device_type: str) -> str:
        kinds = self.kinds(device_type)
        if kinds:
            return f"{device_type} has {', '.join(kinds)}"
        devices = sorted({device for device, _ in self._builders})
        return f"no kinds on {device_type}, only on {', '.join(devices) or 'no device'}"


def cache_factory() -> CacheFactory:
    """A new factory with every kind of ours (FAC-4)."""
    factory = CacheFactory()
    for device_type in DEVICE_TYPES:
        factory.register(device_type, "single", SequenceCache)
        factory.register(device_type, "batched-cell", CellCache)
        # Cells serve best on both: a row costs its own run, whoever else is in the pool.
        factory.register(device_type, "batched", CellCache)
    return factory
