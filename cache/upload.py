"""Puts a step, and what changed in the cell lists, where the forward reads it.

`CellCache` fills the host arrays of a step; the forward reads tensors at fixed addresses. On the CPU both are the same
memory. On CUDA the host arrays lie in one pinned buffer that one asynchronous copy a step moves:

    write_rows i64[W] | table_row i32[W] | per reach: start i32[W], count i32[W] | index i64[k] | value i32[k]
    '---------- the step, W = max_write: fixed device addresses --------------' '------ list deltas -----'

A verb changes host lists only. The device's lists change on the step's own stream, by the deltas, so a step still
being read keeps the lists it was prepared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from cache.cells import I32, I64, CellTable, WriteLog
from cache.geometry import Reach
from cache.step import Run

DELTA_ENTRIES = 32768
"""List entries a step's copy has room for beside the step itself; more take a copy of their own."""
_DELTA_BYTES = 12


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The host side of a step, max_write entries each."""

    write_rows: I64
    table_row: I32
    runs: dict[Reach, tuple[I32, I32]]  # start, count


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The same entries where the forward reads them."""

    write_rows: torch.Tensor
    table_row: torch.Tensor
    runs: dict[Reach, Run]


class Uploads(Protocol):
    """Carries steps from the table to the forward. Engine thread only."""

    host: StepArrays
    step: StepTensors
    page_table: torch.Tensor  # [max_sequences, pages a sequence] i32
    pages: torch.Tensor  # [num_pages, page_cells] i32

    def begin(self) -> None:
        """Return once `host` may be refilled and the step before has been ordered ahead."""

    def send(self) -> None:
        """Make `step` and the lists say what `host` and the table say. After an error nothing reads `host` any more."""

    def mark_step_done(self) -> None:
        """The forward that reads the step has been launched."""


class HostUploads:
    """The CPU's: one memory, nothing to carry."""

    def __init__(self, table: CellTable, reaches: Sequence[Reach], max_write: int):
        memory: npt.NDArray[np.uint8] = np.zeros(_step_bytes(reaches, max_write), np.uint8)
        self.host = _host_arrays(memory, reaches, max_write)
        self.step = _step_tensors(torch.from_numpy(memory), reaches, max_write)
        self.page_table = torch.from_numpy(table.page_table)
        self.pages = torch.from_numpy(table.pages)

    def begin(self) -> None:
        pass

    def send(self) -> None:
        pass

    def mark_step_done(self) -> None:
        pass


class Stream(Protocol):
    """What staging asks of the device's current stream; a fake one tests the order of things without a device."""

    def pinned(self, size: int) -> torch.Tensor:
        """uint8[size] of host memory that an asynchronous copy may read."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy to the device; `source` is read later."""

    def scatter(self, destination: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> None:
        """Enqueue destination[index] = value, all on the device. An index that repeats carries the same value."""

    def record_copied(self) -> None:
        """Record the event "every copy so far was made"."""

    def wait_copied(self) -> None:
        """Block the host until the last such event; at once if there is none."""

    def synchronize(self) -> None:
        """Block the host until the stream is empty."""

    def record_step(self) -> None:
        """Record the event "the step is done" on the stream that runs it."""

    def follow_step(self) -> None:
        """Make the current stream wait for that event, if it was recorded on another one (POOL-11)."""


class DeviceUploads:
    """The GPU's: pinned staging, one copy a step, refilled only after the event of the copy that read it (STG-*)."""

    def __init__(
        self,
        table: CellTable,
        reaches: Sequence[Reach],
        max_write: int,
        device: torch.device,
        *,
        stream: Stream | None = None,
        delta_entries: int = DELTA_ENTRIES,
    ):
        assert table.log is not None, "deltas are read from the table's write log"
        self._log: WriteLog = table.log
        self._table = table
        self._reaches = tuple(reaches)
        self._max_write = max_write
        self._device = device
        self._stream = stream if stream is not None else CudaStream(device)
        self._step_bytes = _step_bytes(reaches, max_write)
        size = self._step_bytes + delta_entries * _DELTA_BYTES
        self._use_staging(self._stream.pinned(size))
        self._landing = torch.zeros(size, dtype=torch.uint8, device=device)
        self.step = _step_tensors(self._landing, reaches, max_write)
        # One buffer for both, so that the deltas of both are one scatter.
        self._lists = torch.zeros(table.page_table.size + table.pages.size, dtype=torch.int32, device=device)
        self.page_table = self._lists[: table.page_table.size].view(table.page_table.shape)
        self.pages = self._lists[table.page_table.size :].view(table.pages.shape)

    def begin(self) -> None:
        self._stream.wait_copied()
        self._stream.follow_step()

    def send(self) -> None:
        index, value = self._deltas()
        step_end, end = self._step_bytes, self._step_bytes + index.size * _DELTA_BYTES
        self._reserve_staging(end)
        value_start = step_end + index.nbytes
        self._staging_bytes[step_end:value_start].view(np.int64)[:] = index
        self._staging_bytes[value_start:end].view(np.int32)[:] = value
        try:
            if end <= self._landing.numel():
                self._stream.copy(self._landing[:end], self._staging[:end])
                self._apply(self._landing[step_end:end], index.size)
            else:
                self._stream.copy(self._landing[:step_end], self._staging[:step_end])
                deltas = torch.empty(end - step_end, dtype=torch.uint8, device=self._device)
                self._stream.copy(deltas, self._staging[step_end:end])
                self._apply(deltas, index.size)
        finally:
            # Also when one failed: those before it may still be reading the staging.
            self._fence()
        # Only now: deltas that did not arrive go with the next step.
        self._log.clear()

    def mark_step_done(self) -> None:
        self._stream.record_step()

    def _deltas(self) -> tuple[I64, I32]:
        """Where the device's lists are behind the table, and what belongs there."""
        table = self._table
        in_table = np.concatenate(self._log.page_table) if self._log.page_table else np.empty(0, np.int64)
        in_pages = np.concatenate(self._log.pages) if self._log.pages else np.empty(0, np.int64)
        index = np.concatenate((in_table, in_pages + table.page_table.size))
        value = np.concatenate((table.page_table.reshape(-1)[in_table], table.pages.reshape(-1)[in_pages]))
        return index, value

    def _apply(self, deltas: torch.Tensor, num: int) -> None:
        if num:
            self._stream.scatter(self._lists, deltas[: num * 8].view(torch.int64), deltas[num * 8 :].view(torch.int32))

    def _fence(self) -> None:
        try:
            self._stream.record_copied()
        except Exception:
            self._stream.synchronize()
            raise

    def _reserve_staging(self, size: int) -> None:
        if size > self._staging.numel():
            filled = self._staging_bytes[: self._step_bytes]
            self._use_staging(self._stream.pinned(max(size, 2 * self._staging.numel())))
            self._staging_bytes[: self._step_bytes] = filled

    def _use_staging(self, staging: torch.Tensor) -> None:
        self._staging = staging
        self._staging_bytes: npt.NDArray[np.uint8] = staging.numpy()
        # Rings read all max_write rows, also those that no step has filled yet, and whatever lay here is no row.
        self._staging_bytes[: self._step_bytes] = 0
        self.host = _host_arrays(self._staging_bytes, self._reaches, self._max_write)


class CudaStream:
    """The device's current stream, whichever it is at each call."""

    def __init__(self, device: torch.device):
        self._device = device
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._step_done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source, non_blocking=True)

    def scatter(self, destination: torch.Tensor, index: torch.Tensor, value: torch.Tensor) -> None:
        destination.index_copy_(0, index, value)

    def record_copied(self) -> None:
        self._copied.record(torch.cuda.current_stream(self._device))

    def wait_copied(self) -> None:
        self._copied.synchronize()

    def synchronize(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def record_step(self) -> None:
        self._step_done.record(torch.cuda.current_stream(self._device))

    def follow_step(self) -> None:
        # Free of charge on the stream that recorded it, and before the first record.
        torch.cuda.current_stream(self._device).wait_event(self._step_done)


def _step_bytes(reaches: Sequence[Reach], max_write: int) -> int:
    """Of the step part, rounded up so that what follows is aligned for i64."""
    return -(-max_write * (8 + 4 + 8 * len(reaches)) // 8) * 8


def _host_arrays(memory: npt.NDArray[np.uint8], reaches: Sequence[Reach], max_write: int) -> StepArrays:
    wide, narrow = _carve(memory, len(reaches), max_write)
    narrow = [each.view(np.int32) for each in narrow]
    runs = {reach: (narrow[1 + 2 * i], narrow[2 + 2 * i]) for i, reach in enumerate(reaches)}
    return StepArrays(wide.view(np.int64), narrow[0], runs)


def _step_tensors(memory: torch.Tensor, reaches: Sequence[Reach], max_write: int) -> StepTensors:
    wide, narrow = _carve(memory, len(reaches), max_write)
    narrow = [each.view(torch.int32) for each in narrow]
    runs = {reach: Run(narrow[1 + 2 * i], narrow[2 + 2 * i]) for i, reach in enumerate(reaches)}
    return StepTensors(wide.view(torch.int64), narrow[0], runs)


def _carve(memory: Any, num_reaches: int, max_write: int) -> tuple[Any, list[Any]]:
    """The step part of a byte array or byte tensor: its i64 piece, then its i32 pieces."""
    narrow_start = 8 * max_write
    ends = [narrow_start + 4 * max_write * i for i in range(2 + 2 * num_reaches)]
    return memory[:narrow_start], [memory[start:end] for start, end in pairwise(ends)]
