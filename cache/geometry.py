"""What a cache must hold (the model's side) and how much of it (the deployment's side), and this package's errors.

Nothing here knows of models, requests or programs.

CacheError
├── InvalidGeometry      the layers cannot be cached as described (GEO-*)
├── InvalidConfig        the sizes cannot work together (BLD-*)
├── CacheFull            not enough cells or sequence ids; nothing was claimed
├── UnknownSequence      the id is not live
├── InvalidPosition      a rewind past what the sequence holds, or a clone of nothing
├── InvalidStep          the step protocol was broken (declare -> prepare -> commit or undo)
├── SequencePoisoned     a step of the sequence ended in doubt; it waits for recovery
├── Unsupported          this kind of cache has no such verb
├── CacheMemoryError     physical memory could not be had; everything is as it was, a retry may succeed
├── InvalidProgram       the model's layers disagree with the geometry; remembered (sticky)
├── UnknownKind          no builder for that kind of cache on that device
└── InvalidBuilder       a builder that cannot be registered, or built nothing
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest number that FP8 has; it has no infinity."""


class CacheError(Exception):
    """Base of this package's errors. A refusal leaves no trace."""


class InvalidGeometry(CacheError):
    """The layers cannot be cached as described."""


class InvalidConfig(CacheError):
    """The sizes cannot work together."""


class CacheFull(CacheError):
    """Not enough free cells or sequence ids; nothing was claimed."""


class UnknownSequence(CacheError):
    """The sequence id is not live."""


class InvalidPosition(CacheError):
    """A rewind past what the sequence holds, or a clone of nothing."""


class InvalidStep(CacheError):
    """The step protocol was broken."""


class SequencePoisoned(CacheError):
    """A step of the sequence ended in doubt; it waits for recovery."""


class Unsupported(CacheError):
    """This kind of cache has no such verb."""


class CacheMemoryError(CacheError):
    """Physical memory could not be had; everything is as it was."""


class InvalidProgram(CacheError):
    """The model's layers disagree with the geometry."""


class UnknownKind(CacheError):
    """No builder for that kind of cache on that device."""


class InvalidBuilder(CacheError):
    """A builder that cannot be registered, or built nothing."""


@dataclass(frozen=True, slots=True, order=True)
class Reach:
    """Which of a sequence's earlier positions a row at position p sees (itself always included).

    all:    0 .. p
    window: max(0, p - size + 1) .. p        (CELL-28: distance in positions, itself counted)
    chunk:  (p // size) * size .. p          (Llama 4's chunked attention)
    """

    kind: Literal["all", "window", "chunk"] = "all"
    size: int = 0

    def __post_init__(self) -> None:
        if self.kind == "all" and self.size != 0:
            raise InvalidGeometry(f"a layer that sees everything has size 0, not {self.size}")
        if self.kind != "all" and self.size < 1:
            raise InvalidGeometry(f"a {self.kind} layer needs a size of at least 1, not {self.size}")


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One layer's K/V: what one token stores in it, and how far its rows see."""

    num_kv_heads: int
    k_dim: int
    v_dim: int
    reach: Reach = Reach()

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "k_dim", "v_dim"):
            if getattr(self, name) < 1:
                raise InvalidGeometry(f"{name} is {getattr(self, name)}: it must be at least 1")


@dataclass(frozen=True, slots=True)
class KvScales:
    """What one layer's stored numbers are multiplied by when they are read: its K/V, over these, fills FP8's range."""

    key: float = 1.0
    value: float = 1.0

    def __post_init__(self) -> None:
        for name in ("key", "value"):
            scale = getattr(self, name)
            if not (math.isfinite(scale) and scale > 0):
                raise InvalidGeometry(f"the {name} scale is {scale}: it must be above 0 and finite")


UNSCALED = KvScales()


@dataclass(frozen=True, slots=True)
class Geometry:
    """The layers that own K/V, in order; a layer's id is its index (GEO-1)."""

    layers: tuple[LayerGeometry, ...]
    scales: tuple[KvScales, ...] = ()
    """Of each layer, for K/V in FP8; (): all are 1."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise InvalidGeometry("a geometry needs at least one layer")
        if self.scales and len(self.scales) != len(self.layers):
            raise InvalidGeometry(f"there are {len(self.scales)} scales for {len(self.layers)} layers")

    @property
    def reaches(self) -> tuple[Reach, ...]:
        """The distinct reaches, sorted (BLD-3)."""
        return tuple(sorted({layer.reach for layer in self.layers}))

    def bytes_per_cell(self, kv_dtype: torch.dtype) -> int:
        """K and V bytes of one token over all layers."""
        elements = sum(layer.num_kv_heads * (layer.k_dim + layer.v_dim) for layer in self.layers)
        return elements * kv_dtype.itemsize

    def record_in(self, kv_dtype: torch.dtype) -> str:
        """What the bytes of K/V stored as `kv_dtype` mean, one way to write it."""
        name = str(kv_dtype).removeprefix("torch.")
        if all(scales == UNSCALED for scales in self.scales_in(kv_dtype)):
            return name
        return name + " times " + ",".join(f"{each.key!r}/{each.value!r}" for each in self.scales)

    def scales_in(self, kv_dtype: torch.dtype) -> tuple[KvScales, ...]:
        """Of each layer, stored as `kv_dtype`: 1 in every dtype but FP8, whose range alone is too short for K/V."""
        if kv_dtype != FP8 or not self.scales:
            return (UNSCALED,) * len(self.layers)
        return self.scales


MAX_CAPACITY_CELLS = 2**31 - 2
"""Rows are int32 on a device, and cell c is row c + 1."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How much a cache may hold. `capacity_cells` excludes the scratch row."""

    capacity_cells: int
    max_write: int
    """Widest step: rows of one forward, padding included."""
    kv_dtype: torch.dtype
    initial_cells: int = 512
    """Cells backed by memory at the first step; grows by doubling. Clamped to the capacity."""
    max_sequences: int = 1024
    batch_invariant: bool = False
    """Each row of a step is to be attended as its own run says, whatever else the step holds."""

    def __post_init__(self) -> None:
        for name in ("capacity_cells", "max_write", "initial_cells", "max_sequences"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.capacity_cells > MAX_CAPACITY_CELLS:
            raise InvalidConfig(
                f"capacity_cells is {self.capacity_cells}: at most {MAX_CAPACITY_CELLS} can be addressed"
            )
