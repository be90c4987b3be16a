"""Chunks on their way between the pool and host memory: a staging ring and a stream for each direction.

    store   pool ──gather──> ring slot ──copy──> host      cells are free to change when `gathered` is called
    load    host ──copy──> ring slot ──scatter──> pool     cells may be read when `done` is called

Chunks move in batches: a launch costs the host as much for one as for eight. A direction's work runs in order on its
stream, so a ring slot is reused safely; the two directions overlap. Nothing here waits: a full ring refuses, and `poll`
calls back for what has finished, in order. Engine thread only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from cache.offload.gather import Mover
from cache.offload.groups import Groups, InvalidGroups
from cache.offload.staging import BlockIds, Staging
from cache.pool import Pool

Callback = Callable[[], None]
Cells = npt.NDArray[np.int64]

RING_BYTES = 128 << 20
"""Of each direction: two batches, large enough that what a launch costs the host is little beside the copy."""


class Mark(Protocol):
    """A point in a stream's work. Never waits."""

    def is_passed(self) -> bool:
        """Whether everything queued before it has finished."""
        ...

    def seconds_since(self, earlier: Mark) -> float:
        """Of the stream's own time, between two passed marks of it."""
        ...


class CopyStream(Protocol):
    """Where one direction's work is queued."""

    def use(self) -> AbstractContextManager[object]:
        """Queue on this stream inside the context, behind everything the caller's stream has queued before it."""

    def mark(self) -> Mark:
        """Behind everything queued so far."""
        ...


class HostMark:
    """Passed when it was made."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def is_passed(self) -> bool:
        return True

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, HostMark)
        return self._at_s - earlier._at_s


class InlineStream:
    """Host memory: work is finished when it was queued."""

    def use(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> Mark:
        return HostMark()


class _EventMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def is_passed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _EventMark)
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class CudaStream:
    """A low-priority stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Its priority is the lowest one there is: the default.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def use(self) -> AbstractContextManager[object]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def mark(self) -> Mark:
        return _EventMark(self._stream)


@dataclass(slots=True)
class _Job:
    """One chunk's copy: its pool cells, its place in host memory, and who is told."""

    cells: Cells
    host: torch.Tensor
    done: Callback
    gathered: Callback | None = None


@dataclass(slots=True)
class _Stage:
    """A point on a stream and whom to call once the stream has passed it."""

    mark: Mark
    callbacks: list[Callback]
    began: Mark | None = None
    """Of the batch's first work, for its last stage, which frees its page."""
    page: int = 0
    size: int = 0
    """Bytes that had been moved when a last stage is passed."""


class _Ring:
    """One direction: its stream, its staging slots in pages of a batch each, what is under way.

    Jobs gather in a batch until it is full or `flush`: then one upload of row numbers and one launch a kernel group
    serve them all. What one job costs the caller is its copy.
    """

    def __init__(self, pool: Pool, groups: Groups, device: torch.device, slots: int, stream: CopyStream) -> None:
        self.stream = stream
        self.staging = Staging(groups, device, max_batch_size=slots)
        self.batch_size = max(1, slots // 2)  # one page is filled while the other one is copied
        self.stages: deque[_Stage] = deque()
        self.in_flight = 0
        self.moved_bytes = 0
        self.moved_s = 0.0
        self._mover = Mover(pool, self.staging)
        self._ids = BlockIds(device, self.batch_size * groups.chunk_tokens)
        self._chunk_tokens = groups.chunk_tokens
        self._free_pages = deque(range(slots // self.batch_size))
        self._batch: list[_Job] = []
        self._object_group: int | None = None
        """Of the jobs in the batch."""

    def has_room(self, object_group: int | None) -> bool:
        """Whether `add` takes one more."""
        return bool(self._free_pages) or (bool(self._batch) and self._object_group == object_group)

    def add(self, job: _Job, object_group: int | None) -> bool:
        if self._batch and self._object_group != object_group:
            self.flush()
        if not self.has_room(object_group):
            return False
        self._object_group = object_group
        self._batch.append(job)
        self.in_flight += 1
        if len(self._batch) == self.batch_size:
            self.flush()
        return True

    def flush(self) -> None:
        """Launch what has gathered."""
        if not self._batch:
            return
        jobs, self._batch = self._batch, []
        page = self._free_pages.popleft()
        first, group = page * self.batch_size, self._object_group
        parts = [self._part(slot, group) for slot in range(first, first + len(jobs))]
        with self.stream.use():
            began = self.stream.mark()
            cells = np.concatenate([job.cells for job in jobs])
            rows = self._ids.stage([torch.from_numpy(cells + 1)])[0].view(len(jobs), self._chunk_tokens)
            if jobs[0].gathered is not None:
                self._mover.gather(rows, first, group)
                self.stages.append(_Stage(self.stream.mark(), [job.gathered for job in jobs if job.gathered]))
                for job, part in zip(jobs, parts, strict=True):
                    job.host.copy_(part, non_blocking=True)
            else:
                for job, part in zip(jobs, parts, strict=True):
                    part.copy_(job.host, non_blocking=True)
                self._mover.scatter(rows, first, group)
            size = sum(job.host.numel() for job in jobs)
            self.stages.append(_Stage(self.stream.mark(), [job.done for job in jobs], began, page, size))

    def poll(self) -> None:
        self.flush()
        while self.stages and self.stages[0].mark.is_passed():
            stage = self.stages.popleft()
            if stage.began is not None:
                self._free_pages.append(stage.page)
                self.in_flight -= len(stage.callbacks)
                self.moved_bytes += stage.size
                self.moved_s += stage.mark.seconds_since(stage.began)
            for callback in stage.callbacks:
                callback()

    def _part(self, slot: int, object_group: int | None) -> torch.Tensor:
        """What a copy moves: flat bytes of the slot."""
        return self.staging.chunk(slot) if object_group is None else self.staging.object_group(slot, object_group)


@dataclass(frozen=True, slots=True)
class Moved:
    """One direction's traffic: what is finished, and copies under way."""

    size: int
    """Bytes."""
    seconds: float
    """By the device's clock; copies that wait for one another on a stream count that time too."""
    in_flight: int


def _moved(ring: _Ring) -> Moved:
    return Moved(ring.moved_bytes, ring.moved_s, ring.in_flight)


class Transfers:
    """Moves chunks between one pool and flat host tensors, pinned where the pool is on CUDA.

    What moves at once is one object group's part of a chunk (`object_bytes`), or all of them (`chunk_bytes`).
    """

    def __init__(
        self,
        pool: Pool,
        groups: Groups,
        device: torch.device,
        *,
        ring_slots: int | None = None,
        make_stream: Callable[[], CopyStream] | None = None,
    ) -> None:
        """ring_slots: chunks that each direction stages; by default as many as `RING_BYTES` hold, 4 to 16."""
        if make_stream is None:
            make_stream = (lambda: CudaStream(device)) if device.type == "cuda" else InlineStream
        if ring_slots is None:
            ring_slots = max(4, min(16, RING_BYTES // sum(group.chunk_bytes for group in groups.kernel_groups)))
        self.groups = groups
        self._stores = _Ring(pool, groups, device, ring_slots, make_stream())
        self._loads = _Ring(pool, groups, device, ring_slots, make_stream())
        self.chunk_bytes = self._stores.staging.chunk_bytes
        self._object_bytes = [self._stores.staging.object_bytes(group.index) for group in groups.object_groups]

    @property
    def in_flight(self) -> int:
        """Chunks under way, both directions."""
        return self._stores.in_flight + self._loads.in_flight

    def traffic(self) -> tuple[Moved, Moved]:
        """What was loaded and what was stored so far."""
        return _moved(self._loads), _moved(self._stores)

    def object_bytes(self, object_group: int) -> int:
        """Of one stored object of the group."""
        return self._object_bytes[object_group]

    @property
    def staging_bytes(self) -> int:
        """Of both rings, on the device."""
        return self._stores.staging.buffer.numel() + self._loads.staging.buffer.numel()

    @property
    def ring_slots(self) -> int:
        """Of each direction."""
        return self._stores.staging.max_batch_size

    @property
    def batch_size(self) -> int:
        """Chunks that move together, at most."""
        return self._stores.batch_size

    def can_store(self, object_group: int | None = None) -> bool:
        """Whether `store` finds room."""
        return self._stores.has_room(object_group)

    def store(
        self,
        cells: npt.ArrayLike,
        host: torch.Tensor,
        *,
        gathered: Callback,
        done: Callback,
        object_group: int | None = None,
    ) -> bool:
        """Copy one chunk's K/V into `host` [object_bytes or chunk_bytes] u8: as the caller's stream leaves it when the
        batch is launched, by `flush` at the latest.

        Until `gathered` the cells must stay held, until `done` the host memory. False: the ring is full, try later.
        InvalidGroups for cells that are not one chunk or host memory of another size. Nothing has begun then.
        """
        job = _Job(self._check(cells, host, object_group), host, done, gathered)
        return self._stores.add(job, object_group)

    def load(
        self, host: torch.Tensor, cells: npt.ArrayLike, *, done: Callback, object_group: int | None = None
    ) -> bool:
        """Copy `host` into cells that one unfinished sequence owns alone. Verified bytes only: they reach attention.

        A group that keeps tails writes those alone: the rest of its chunk is what it was. Until `done`, cells and host
        memory must stay held and the cells unread. False and InvalidGroups as in `store`.
        """
        job = _Job(self._check(cells, host, object_group), host, done)
        return self._loads.add(job, object_group)

    def flush(self) -> None:
        """Launch what has gathered, before the caller's stream changes a stored cell."""
        self._stores.flush()
        self._loads.flush()

    def poll(self) -> None:
        """`flush`, and call back for all that has finished since, each direction in the order it was begun."""
        self._stores.poll()
        self._loads.poll()

    def close(self) -> None:
        """Give the staging buffers back. Nothing may be under way."""
        assert self.in_flight == 0, "copies are under way"
        self._stores.staging.close()
        self._loads.staging.close()

    def _check(self, cells: npt.ArrayLike, host: torch.Tensor, object_group: int | None) -> Cells:
        checked = np.asarray(cells, np.int64).reshape(-1)
        if checked.size != self.groups.chunk_tokens:
            raise InvalidGroups(f"{checked.size} cells are not one chunk of {self.groups.chunk_tokens}")
        if checked.min() < 0:
            raise InvalidGroups(f"cell {checked.min()} cannot be moved: cells are numbered from 0")
        size = self.chunk_bytes if object_group is None else self.object_bytes(object_group)
        if host.numel() != size or host.dim() != 1 or host.dtype != torch.uint8:
            what = "a chunk" if object_group is None else f"a chunk's object group {object_group}"
            raise InvalidGroups(f"{what} is {size} bytes, not {host.dtype} {list(host.shape)}")
        return checked
