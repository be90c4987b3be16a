"""Hidden states of a step's chunks, pooled where they are and copied to the host behind it. Engine thread only."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from engine.packing import PackedStep, select_rows
from engine.uploads import upload
from static_graphs.methods import StepSlice


class PooledStep:
    """What the chunks of one step asked for; filled slice by slice, read once the step is collected.

    A chunk's rows may lie in several slices. Sums are taken in float32, each chunk's rows by themselves: no neighbour
    and no atomic addition can change their order.
    """

    def __init__(self, packed: PackedStep) -> None:
        self._packed = packed
        self._parts: list[tuple[list[int], torch.Tensor]] = []  # chunks, and for each a row of [chunks, hidden] f32
        self._done: torch.cuda.Event | None = None

    def take(self, step_slice: StepSlice) -> Callable[[torch.Tensor], None] | None:
        """What to call with the slice's hidden states; None where nobody asks for any of them."""
        rows, asked = select_rows(self._packed.pooled, step_slice.offset, step_slice.length)
        if not len(rows):
            return None
        return lambda hidden: self._pool(hidden, rows, self._packed.pooled_by[asked])

    def collect(self) -> dict[int, bytes]:
        """By chunk: float32 [hidden]. Waits for the device."""
        if self._done is not None:
            self._done.synchronize()
        sums: dict[int, npt.NDArray[np.float32]] = {}
        for chunks, values in self._parts:
            for chunk, row in zip(chunks, values.numpy(), strict=True):
                sums[chunk] = sums[chunk] + row if chunk in sums else row
        return {chunk: row.tobytes() for chunk, row in sums.items()}

    def _pool(self, hidden: torch.Tensor, rows: npt.NDArray[np.int64], by: npt.NDArray[np.int32]) -> None:
        """hidden: [W, hidden], device. rows: [P] of it, ascending, each chunk's side by side; by: [P] their chunks."""
        chunks, starts, counts = np.unique(by, return_index=True, return_counts=True)
        if (counts == 1).all():
            pooled = hidden.index_select(0, upload(rows[starts], hidden.device)).float()
        else:
            first = rows[starts].tolist()
            pooled = torch.stack(
                [hidden[at : at + count].float().sum(0) for at, count in zip(first, counts.tolist(), strict=True)]
            )
        self._parts.append((chunks.tolist(), pooled.to("cpu", non_blocking=True)))
        if hidden.is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()
