"""How a chunk's K/V is grouped: layers copied by one kernel launch, and groups stored as one object.

    kernel group   layers of equal geometry: one launch gathers or scatters all of them
    object group   kernel groups whose windows reach equally many chunks: stored together, looked up together

A layer whose K and V are equally wide is one entry of two sides, stored [kv=2, layers, slots, hidden]. Where the widths
differ (MLA) each side is an entry of its own with kv=1, so K and V become two kernel groups.

Two things that this layout's description serves elsewhere have no place in one process. Nothing is shared by CUDA IPC:
the pool is this process's own memory, so there are no handles to unwrap, no peer to outlive and no lock with a time
limit. And no tensor's layout is discovered: `Geometry` says what every layer stores, and the pool is made from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from cache.geometry import CacheError, Geometry, LayerGeometry
from cache.pool import Pool

Side = Literal["keys", "values"]
BORROWED = -1
"""The engine group of a layer that reads another layer's K/V: it stores nothing and is never copied (G3)."""


class InvalidGroups(CacheError, ValueError):
    """Layers, windows and chunk do not fit together, or a group, slot or token count outside them was asked for."""


@dataclass(frozen=True, slots=True)
class LayerKv:
    """What one layer stores in a slot, on one side or on both."""

    layer: int
    sides: tuple[Side, ...]
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    slots_per_block: int = 1
    engine_group: int = 0


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """How the engine keeps the layers of one kernel group: a block of its tables, and how far its rows see (G6)."""

    layers: tuple[int, ...]
    tokens_per_block: int = 1
    """Logical tokens; 0 where it is not known, which means one token a slot (C1)."""
    window: int | None = None
    """Tokens; None sees everything."""


@dataclass(frozen=True, slots=True)
class KernelGroup:
    """Layers of equal geometry, in ascending order."""

    index: int
    layers: tuple[int, ...]
    sides: tuple[Side, ...]
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    engine_group: int
    ratio: int
    """Logical tokens a slot."""
    window: int | None
    slots_per_chunk: int
    """Slots kept of each chunk: all, or its tail where the window is shorter."""

    @property
    def kv(self) -> int:
        return len(self.sides)

    @property
    def hidden(self) -> int:
        """Elements of one side of one slot."""
        return self.num_heads * self.head_dim

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        """K/V bytes of one chunk, padding not counted."""
        return self.kv * len(self.layers) * self.slots_per_chunk * self.row_bytes


@dataclass(frozen=True, slots=True)
class ObjectGroup:
    """Kernel groups stored as one object a chunk."""

    index: int
    kernel_groups: tuple[int, ...]
    window_chunks: int | None
    """A hit needs only that many chunks before its end; None needs all of them."""


class Groups:
    """The groups of one cache for one chunk length. Immutable; decided before anything is sized by it (W3)."""

    def __init__(
        self,
        layers: Sequence[LayerKv],
        chunk_tokens: int,
        *,
        engine_groups: Sequence[EngineGroup] = (),
        separate: bool = True,
        full_windows: bool = False,
    ) -> None:
        """engine_groups: one a kernel group, by its index; without them every layer sees everything at ratio 1.

        separate: an object group for each reach in chunks; otherwise one holds everything and is read as a whole.
        full_windows: keep every slot of every chunk, so that a chunk serves any hit inside it.
        Raises InvalidGroups.
        """
        if chunk_tokens < 1:
            raise InvalidGroups(f"a chunk of {chunk_tokens} tokens: it must hold at least 1")
        self.chunk_tokens = chunk_tokens
        self.kernel_groups = _kernel_groups(layers, chunk_tokens, engine_groups, full_windows=full_windows)
        self.object_groups = _object_groups(self.kernel_groups, chunk_tokens, separate=separate, full=full_windows)

    @classmethod
    def of(
        cls,
        geometry: Geometry,
        kv_dtype: torch.dtype,
        chunk_tokens: int,
        *,
        separate: bool = True,
        full_windows: bool = False,
    ) -> Groups:
        """The groups of a pool of cells: one token a slot, a reach's size as window.

        Chunked attention sees at most its size back, like a window of that size.
        """
        kinds: dict[tuple[LayerGeometry, tuple[Side, ...]], list[int]] = {}
        entries = []
        for index, layer in enumerate(geometry.layers):
            sides_of: tuple[tuple[Side, ...], ...] = (("keys", "values"),)
            if layer.k_dim != layer.v_dim:
                sides_of = (("keys",), ("values",))
            for sides in sides_of:
                members = kinds.setdefault((layer, sides), [])
                members.append(index)
                dim = layer.k_dim if sides[0] == "keys" else layer.v_dim
                group = list(kinds).index((layer, sides))
                entries.append(LayerKv(index, sides, layer.num_kv_heads, dim, kv_dtype, engine_group=group))
        engine_groups = [
            EngineGroup(tuple(members), window=layer.reach.size if layer.reach.kind != "all" else None)
            for (layer, _), members in kinds.items()
        ]
        return cls(entries, chunk_tokens, engine_groups=engine_groups, separate=separate, full_windows=full_windows)

    def members(self, object_group: int) -> tuple[KernelGroup, ...]:
        """The kernel groups of an object group."""
        if not 0 <= object_group < len(self.object_groups):
            raise InvalidGroups(f"object group {object_group}: there are {len(self.object_groups)}")
        return tuple(self.kernel_groups[index] for index in self.object_groups[object_group].kernel_groups)

    def slots_per_chunk(self, kernel_group: int) -> int:
        return self._kernel_group(kernel_group).slots_per_chunk

    def shape_dtype(self, num_tokens: int, kernel_group: int) -> tuple[torch.Size, torch.dtype]:
        """[kv, layers, slots, hidden] of that many tokens, and what they are stored as.

        InvalidGroups unless the tokens are whole chunks; these are a multiple of every ratio (C2).
        """
        group = self._kernel_group(kernel_group)
        if num_tokens < 0 or num_tokens % self.chunk_tokens:
            raise InvalidGroups(f"num_tokens ({num_tokens}) must be a multiple of chunk_tokens ({self.chunk_tokens})")
        slots = num_tokens // self.chunk_tokens * group.slots_per_chunk
        return torch.Size((group.kv, len(group.layers), slots, group.hidden)), group.dtype

    def cache_size_per_token(self) -> int:
        """Stored bytes a logical token, over all groups, truncated. To report: it shrinks where only tails are kept."""
        return sum(group.chunk_bytes for group in self.kernel_groups) // self.chunk_tokens

    def rows_of(self, kernel_group: int, rows: torch.Tensor) -> torch.Tensor:
        """Of a chunk's slots, [chunk_tokens / ratio] in order, those that the group keeps: the last ones (W2)."""
        group = self._kernel_group(kernel_group)
        expected = self.chunk_tokens // group.ratio
        if rows.numel() != expected:
            raise InvalidGroups(f"{rows.numel()} rows for kernel group {kernel_group}: a chunk of it has {expected}")
        return rows[expected - group.slots_per_chunk :]

    def usable_chunks(self, has: npt.ArrayLike) -> int:
        """The longest prefix, in chunks, that every object group can serve (O3).

        has: [chunks, object groups] bool, what is stored. A full group needs all chunks of the prefix, a windowed one
        the last `window_chunks` before its end; so a longer prefix may be usable where a shorter one is not.
        """
        stored = np.asarray(has, bool).reshape(-1, len(self.object_groups))
        ends = np.arange(stored.shape[0] + 1)
        usable = np.ones(ends.size, bool)
        for group in self.object_groups:
            column = stored[:, group.index]
            # Length of the unbroken run of stored chunks that ends where a prefix of n chunks does.
            gaps = np.where(column, 0, np.arange(1, ends.size))
            run = ends - np.concatenate(([0], np.maximum.accumulate(gaps)))
            needed = ends if group.window_chunks is None else np.minimum(ends, group.window_chunks)
            usable &= run >= needed
        return int(ends[usable].max())

    def _kernel_group(self, index: int) -> KernelGroup:
        if not 0 <= index < len(self.kernel_groups):
            raise InvalidGroups(f"kernel group {index}: there are {len(self.kernel_groups)}")
        return self.kernel_groups[index]


def pointer_table(pool: Pool, group: KernelGroup, device: torch.device) -> torch.Tensor:
    """The addresses of the group's pool tensors, [kv * layers] i64 on `device`: all keys, then all values (G5).

    Built once: a pool's addresses never change (D4).
    """
    sides = [pool.keys if side == "keys" else pool.values for side in group.sides]
    addresses = [tensors[layer].data_ptr() for tensors in sides for layer in group.layers]
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def _kernel_groups(
    layers: Sequence[LayerKv], chunk_tokens: int, engine_groups: Sequence[EngineGroup], *, full_windows: bool
) -> tuple[KernelGroup, ...]:
    members: dict[LayerKv, list[int]] = {}  # geometry (a LayerKv at layer 0) -> its layers
    for entry in sorted(layers, key=lambda entry: (entry.layer, entry.sides)):
        if entry.engine_group != BORROWED:
            kind = LayerKv(
                0,
                entry.sides,
                entry.num_heads,
                entry.head_dim,
                entry.dtype,
                entry.slots_per_block,
                entry.engine_group,
            )
            members.setdefault(kind, []).append(entry.layer)
    if not members:
        raise InvalidGroups("no layer stores K/V of its own")
    described: Sequence[EngineGroup] = engine_groups or [EngineGroup(tuple(own), 0) for own in members.values()]
    if len(described) != len(members):
        raise InvalidGroups(f"{len(described)} engine groups describe {len(members)} kernel groups")
    groups = []
    for index, ((kind, own), engine) in enumerate(zip(members.items(), described, strict=True)):
        if engine.layers != tuple(own):
            raise InvalidGroups(f"engine group {index} has layers {engine.layers}, its kernel group has {tuple(own)}")
        ratio = _ratio(index, kind.slots_per_block, engine.tokens_per_block, chunk_tokens)
        kept = chunk_tokens
        if engine.window is not None and engine.window < chunk_tokens and not full_windows:
            kept = engine.window
            block = engine.tokens_per_block or 1
            if kept < 1 or kept % block:
                raise InvalidGroups(
                    f"kernel group {index}: a window of {kept} tokens is no multiple of {block} a block"
                )
        groups.append(
            KernelGroup(
                index=index,
                layers=tuple(own),
                sides=kind.sides,
                num_heads=kind.num_heads,
                head_dim=kind.head_dim,
                dtype=kind.dtype,
                engine_group=kind.engine_group,
                ratio=ratio,
                window=engine.window,
                slots_per_chunk=kept // ratio,
            )
        )
    return tuple(groups)


def _ratio(index: int, slots_per_block: int, tokens_per_block: int, chunk_tokens: int) -> int:
    if slots_per_block < 1 or tokens_per_block < 0:
        raise InvalidGroups(f"kernel group {index}: {tokens_per_block} tokens in {slots_per_block} slots a block")
    if not tokens_per_block:
        return 1
    if tokens_per_block % slots_per_block:
        raise InvalidGroups(
            f"kernel group {index}: {tokens_per_block} tokens a block are no multiple of its {slots_per_block} slots"
        )
    if chunk_tokens % tokens_per_block:
        raise InvalidGroups(
            f"kernel group {index}: a chunk of {chunk_tokens} tokens is no multiple of {tokens_per_block} a block"
        )
    return tokens_per_block // slots_per_block


def _object_groups(
    groups: Sequence[KernelGroup], chunk_tokens: int, *, separate: bool, full: bool
) -> tuple[ObjectGroup, ...]:
    buckets: dict[int | None, list[int]] = {}
    for group in groups:
        reach = None
        if separate and not full and group.window is not None:
            reach = -(-group.window // chunk_tokens)
        buckets.setdefault(reach, []).append(group.index)
    return tuple(
        ObjectGroup(index, tuple(own), window_chunks) for index, (window_chunks, own) in enumerate(buckets.items())
    )
