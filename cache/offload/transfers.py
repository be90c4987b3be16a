"""Chunks on their way between the pool and host memory: a staging ring and a stream for each direction.

    store   pool ──gather──> ring slot ──copy──> host      cells are free to change when `gathered` is called
    load    host ──copy──> ring slot ──scatter──> pool     cells may be read when `done` is called

A direction's work runs in order on its stream, so a ring slot is reused safely; the two directions overlap. Nothing
here waits: a full ring refuses, and `poll` calls back for what has finished, in order. Engine thread only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy.typing as npt
import torch

from cache.offload.gather import Mover, chunk_rows
from cache.offload.groups import Groups, InvalidGroups
from cache.offload.staging import BlockIds, Staging
from cache.pool import Pool

Callback = Callable[[], None]


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
class _Stage:
    """A point on a stream and what to call once the stream has passed it."""

    mark: Mark
    callback: Callback
    began: Mark | None = None
    """Of the copy's first work, for its last stage, which frees its slot."""
    size: int = 0
    """Bytes that had been moved when a last stage is passed."""


class _Ring:
    """One direction: its stream, its staging slots in rotation, what is under way."""

    def __init__(self, pool: Pool, groups: Groups, device: torch.device, slots: int, stream: CopyStream) -> None:
        self.stream = stream
        self.staging = Staging(groups, device, max_batch_size=slots)
        self.mover = Mover(pool, self.staging)
        self.ids = BlockIds(device, groups.chunk_tokens)
        self.stages: deque[_Stage] = deque()
        self.in_flight = 0
        self.moved_bytes = 0
        self.moved_s = 0.0
        self._next = 0

    def take_slot(self) -> int | None:
        if self.in_flight == self.staging.max_batch_size:
            return None
        slot, self._next = self._next, (self._next + 1) % self.staging.max_batch_size
        self.in_flight += 1
        return slot

    def part(self, slot: int, object_group: int | None) -> torch.Tensor:
        """What a transfer moves: flat bytes of the slot."""
        return self.staging.chunk(slot) if object_group is None else self.staging.object_group(slot, object_group)

    def poll(self) -> None:
        while self.stages and self.stages[0].mark.is_passed():
            stage = self.stages.popleft()
            if stage.began is not None:
                self.in_flight -= 1
                self.moved_bytes += stage.size
                self.moved_s += stage.mark.seconds_since(stage.began)
            stage.callback()


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
        ring_slots: int = 4,
        make_stream: Callable[[], CopyStream] | None = None,
    ) -> None:
        if make_stream is None:
            make_stream = (lambda: CudaStream(device)) if device.type == "cuda" else InlineStream
        self.groups = groups
        self._stores = _Ring(pool, groups, device, ring_slots, make_stream())
        self._loads = _Ring(pool, groups, device, ring_slots, make_stream())
        self.chunk_bytes = self._stores.staging.chunk_bytes

    @property
    def in_flight(self) -> int:
        """Chunks under way, both directions."""
        return self._stores.in_flight + self._loads.in_flight

    def traffic(self) -> tuple[Moved, Moved]:
        """What was loaded and what was stored so far."""
        return _moved(self._loads), _moved(self._stores)

    def object_bytes(self, object_group: int) -> int:
        """Of one stored object of the group."""
        return self._stores.staging.object_bytes(object_group)

    @property
    def staging_bytes(self) -> int:
        """Of both rings, on the device."""
        return self._stores.staging.buffer.numel() + self._loads.staging.buffer.numel()

    @property
    def ring_slots(self) -> int:
        """Of each direction."""
        return self._stores.staging.max_batch_size

    @property
    def can_store(self) -> bool:
        """Whether `store` has a free ring slot."""
        return self._stores.in_flight < self._stores.staging.max_batch_size

    def store(
        self,
        cells: npt.ArrayLike,
        host: torch.Tensor,
        *,
        gathered: Callback,
        done: Callback,
        object_group: int | None = None,
    ) -> bool:
        """Copy one chunk's K/V, as the caller's stream leaves it, into `host` [object_bytes or chunk_bytes] u8.

        Until `gathered` the cells must stay held, until `done` the host memory. False: the ring is full, try later.
        InvalidGroups for cells that are not one chunk or host memory of another size. Nothing has begun then.
        """
        rows = self._check(cells, host, object_group)
        ring = self._stores
        slot = ring.take_slot()
        if slot is None:
            return False
        with ring.stream.use():
            began = ring.stream.mark()
            ring.mover.gather(ring.ids.stage(list(rows))[0][None], slot, object_group)
            ring.stages.append(_Stage(ring.stream.mark(), gathered))
            host.copy_(ring.part(slot, object_group), non_blocking=True)
            ring.stages.append(_Stage(ring.stream.mark(), done, began, host.numel()))
        return True

    def load(
        self, host: torch.Tensor, cells: npt.ArrayLike, *, done: Callback, object_group: int | None = None
    ) -> bool:
        """Copy `host` into cells that one unfinished sequence owns alone. Verified bytes only: they reach attention.

        A group that keeps tails writes those alone: the rest of its chunk is what it was. Until `done`, cells and host
        memory must stay held and the cells unread. False and InvalidGroups as in `store`.
        """
        rows = self._check(cells, host, object_group)
        ring = self._loads
        slot = ring.take_slot()
        if slot is None:
            return False
        with ring.stream.use():
            began = ring.stream.mark()
            ring.part(slot, object_group).copy_(host, non_blocking=True)
            ring.mover.scatter(ring.ids.stage(list(rows))[0][None], slot, object_group)
            ring.stages.append(_Stage(ring.stream.mark(), done, began, host.numel()))
        return True

    def poll(self) -> None:
        """Call back for everything that has finished since, each direction in the order it was begun."""
        self._stores.poll()
        self._loads.poll()

    def close(self) -> None:
        """Give the staging buffers back. Nothing may be under way."""
        assert self.in_flight == 0, "copies are under way"
        self._stores.staging.close()
        self._loads.staging.close()

    def _check(self, cells: npt.ArrayLike, host: torch.Tensor, object_group: int | None) -> torch.Tensor:
        rows = chunk_rows(cells, self.groups.chunk_tokens)
        if rows.shape[0] != 1:
            raise InvalidGroups(f"{rows.shape[0]} chunks at once: a ring slot holds one")
        size = self.chunk_bytes if object_group is None else self.object_bytes(object_group)
        if host.shape != (size,) or host.dtype != torch.uint8:
            what = "a chunk" if object_group is None else f"a chunk's object group {object_group}"
            raise InvalidGroups(f"{what} is {size} bytes, not {host.dtype} {list(host.shape)}")
        return rows
