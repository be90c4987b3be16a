"""Pool rows to staging and back: the meaning, by `index_select` and `index_copy`, and the way to the kernels on CUDA.

A chunk's cells lie scattered; in staging its slots lie in order. The scratch row is never gathered and never written.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from cache.geometry import FP8
from cache.offload.groups import InvalidGroups, KernelGroup, Side, pointer_table
from cache.offload.staging import Staging
from cache.pool import Pool


def chunk_rows(cells: npt.ArrayLike, chunk_tokens: int) -> torch.Tensor:
    """The pool rows of whole chunks' cells, [batch, chunk_tokens] i64 on the host: cell c is row c + 1.

    InvalidGroups for cells that are not whole chunks, for none, and for a negative one (the scratch row is no cell).
    """
    rows = np.asarray(cells, np.int64).reshape(-1) + 1
    if not rows.size or rows.size % chunk_tokens:
        raise InvalidGroups(f"{rows.size} cells are not whole chunks of {chunk_tokens}")
    if rows.min() < 1:
        raise InvalidGroups(f"cell {rows.min() - 1} cannot be moved: cells are numbered from 0")
    return torch.from_numpy(rows.reshape(-1, chunk_tokens))


class Mover:
    """Moves chunks between one pool and one staging buffer on the same device. On the current stream; one thread."""

    def __init__(self, pool: Pool, staging: Staging, *, use_kernels: bool | None = None) -> None:
        """use_kernels: by default where the pool is on CUDA."""
        self._pool = pool
        self._staging = staging
        self._groups = staging.groups
        device = staging.buffer.device
        self._use_kernels = device.type == "cuda" if use_kernels is None else use_kernels
        self._pointers = [pointer_table(pool, group, device) for group in self._groups.kernel_groups]

    def gather(self, rows: torch.Tensor, first: int = 0, object_group: int | None = None) -> None:
        """Copy chunks out of the pool: chunk i, rows[i], into batch slot first + i.

        rows: [batch, chunk_tokens] i64 on the pool's device, as `chunk_rows` makes them. InvalidGroups when the batch
        does not fit the buffer. object_group: that one's layers alone; None: all.
        """
        self._move(rows, first, object_group, is_gather=True)

    def scatter(self, rows: torch.Tensor, first: int = 0, object_group: int | None = None) -> None:
        """The reverse. A windowed group writes the rows that it keeps: the chunk's last ones. No row twice."""
        self._move(rows, first, object_group, is_gather=False)

    def _move(self, rows: torch.Tensor, first: int, object_group: int | None, *, is_gather: bool) -> None:
        batch = rows.shape[0]
        if first < 0 or first + batch > self._staging.max_batch_size:
            raise InvalidGroups(
                f"batch slots {first} to {first + batch - 1}: there are {self._staging.max_batch_size} in the buffer"
            )
        expected = self._groups.chunk_tokens
        kernel_groups = self._groups.kernel_groups
        if object_group is not None:
            kernel_groups = self._groups.members(object_group)
        for group in kernel_groups:
            if rows.shape[1] * group.ratio != expected:
                raise InvalidGroups(
                    f"{rows.shape[1]} rows a chunk for kernel group {group.index} of ratio {group.ratio}"
                )
            kept = rows[:, rows.shape[1] - group.slots_per_chunk :]
            if self._use_kernels:
                from cache.offload.kernels import copy_rows  # only where Triton is

                copy_rows(self._staging, group, self._pointers[group.index], kept, first, is_gather=is_gather)
            else:
                for slot, chunk in enumerate(kept, first):
                    self._copy(group, slot, chunk, is_gather=is_gather)

    def _copy(self, group: KernelGroup, slot: int, rows: torch.Tensor, *, is_gather: bool) -> None:
        view = self._staging.kernel_group(slot, group.index)  # [kv, layers, slots, hidden]
        for side, planes in zip(group.sides, view, strict=True):
            for layer, plane in zip(group.layers, planes, strict=True):
                pooled = self._side(side)[layer].flatten(1)  # [rows, hidden]
                if group.dtype == FP8:  # index_copy_ does not know it, and a byte is a byte
                    pooled, plane = pooled.view(torch.uint8), plane.view(torch.uint8)
                if is_gather:
                    torch.index_select(pooled, 0, rows, out=plane)
                else:
                    pooled.index_copy_(0, rows, plane)

    def _side(self, side: Side) -> list[torch.Tensor]:
        return self._pool.keys if side == "keys" else self._pool.values
