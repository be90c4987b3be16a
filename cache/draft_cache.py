"""The cache of a block drafter (DFlash): context rows stay, block rows live for one step (DF-*).

Every forward of the draft model carries, per owner, some new context rows (projections of the target's hidden states)
and then B block rows (an anchor and masks), which see their whole owner and one another in both directions:

    context length before the step L0, new context rows n, L = L0 + n

    positions   0 .. L0-1 | L0 .. L-1 | L .. L+B-1
                 kept       kept        dropped at commit
    a context row at p sees   max(0, p-w+1) .. p            as in any cache
    a block row sees          max(0, L-w) .. L+B-1          w: the layer's window; everything without one

Owns the step's protocol and who is in doubt; cells are those of a `CellCache` that nobody else touches.

A step that ended in doubt (its forward failed, or its end could not be recorded) poisons its owners alone, and
`recover` gives them back the context they had before it. Nothing here waits for the device in a step that goes well:
what a later step overwrites is ordered behind the earlier one by stream and event. Only where no event stands behind a
failed forward does the host wait, once, before the next step: the stray forward may still read the step's tensors.

Every call may come from any thread, though a step's calls belong to one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cache.cell_cache import CacheMetrics, CellCache
from cache.cells import I32, I64, CellTable, Placement, runs
from cache.geometry import (
    CacheConfig,
    Geometry,
    InvalidConfig,
    InvalidGeometry,
    InvalidStep,
    Reach,
    SequencePoisoned,
    UnknownSequence,
)
from cache.step import CellStep
from cache.upload import Uploads


@dataclass(frozen=True, slots=True)
class DraftStep:
    """One prepared draft step."""

    cells: CellStep
    query_rows: I64  # [owners * B] the block rows, owner by owner in declared order; never padded (DF-8)


@dataclass(frozen=True, slots=True)
class _Declared:
    owners: I32  # [S] in declared order
    counts: I64  # [S] rows of each, block included


@dataclass(frozen=True, slots=True)
class _Pending:
    width: int
    bases: Mapping[int, int]
    """Each owner's context length before the step."""


class DraftCache:
    """K/V of a draft model that proposes `block_rows` tokens at a time, for up to `max_sequences` owners."""

    def __init__(
        self,
        geometry: Geometry,
        config: CacheConfig,
        device: torch.device,
        block_rows: int,
        *,
        uploads: Uploads | None = None,
        table: CellTable | None = None,
        fence: Callable[[], None] | None = None,
    ):
        """`uploads`, `table` and `fence` are made for the device unless they are given.

        fence: returns once every stream of the device is empty, or raises.
        """
        _check_block(geometry, config, block_rows)
        self.block_rows = block_rows
        self._cells = CellCache(
            geometry,
            config,
            device,
            uploads=uploads,
            table=table,
            run_rule=lambda reach, placed: block_runs(reach, placed, block_rows),
        )
        self._fence = fence if fence is not None else lambda: _synchronize(device)
        self._lock = threading.RLock()
        self._declared: _Declared | None = None
        self._pending: _Pending | None = None
        self._poisoned: dict[int, int] = {}  # owner -> context length it goes back to
        self._unordered: set[int] = set()  # poisoned owners whose cells some stream may still be writing
        self._leaving: set[int] = set()  # removed, but their cells cannot be handed out yet

    # -- What is held

    @property
    def capacity_cells(self) -> int:
        return self._cells.capacity_cells

    @property
    def max_sequences(self) -> int:
        return self._cells.max_sequences

    @property
    def free_cells(self) -> int:
        return self._cells.free_cells

    @property
    def poisoned(self) -> frozenset[int]:
        """Owners that wait for `recover`; those removed since are not among them."""
        with self._lock:
            return frozenset(self._poisoned.keys() - self._leaving)

    def is_live(self, seq: int) -> bool:
        with self._lock:
            return self._cells.is_live(seq) and seq not in self._leaving

    def pos(self, seq: int) -> int:
        """Context rows of `seq`: a step counts once it is committed. 0 when it is not live."""
        with self._lock:
            if not self.is_live(seq):
                return 0
            bases = self._pending.bases if self._pending is not None else {}
            return bases.get(seq, self._poisoned.get(seq, self._cells.pos(seq)))

    def metrics(self) -> CacheMetrics:
        return self._cells.metrics()

    def close(self) -> None:
        """Release the pool. Nothing may run on it any more."""
        self._cells.close()

    # -- Verbs

    def bind_program(self, name: str, geometry: Geometry | None, kv_dtype: torch.dtype) -> bool:
        """See CellCache."""
        return self._cells.bind_program(name, geometry, kv_dtype)

    def release_program(self, name: str) -> None:
        """See CellCache."""
        self._cells.release_program(name)

    def seq_new(self) -> int:
        """The lowest free id, or CacheFull. Always allowed."""
        return self._cells.seq_new()

    def seq_clone(self, src: int, upto: int | None = None) -> int:
        """A new owner sharing the first min(upto, pos(src)) context rows of `src`; takes no cell.

        Raises InvalidStep while a step is prepared, SequencePoisoned, and what `CellCache.seq_clone` raises.
        """
        with self._lock:
            self._check_settled(src)
            return self._cells.seq_clone(src, upto)

    def rewind(self, seq: int, position: int) -> None:
        """Drop the context rows >= `position`. Raises as `seq_clone` does, and InvalidPosition."""
        with self._lock:
            self._check_settled(seq)
            self._cells.rewind(seq, position)

    def seq_rm(self, seq: int) -> None:
        """Drop the owner. Id and cells come back at once, or with the end of the step or doubt they are in (DF-3c)."""
        with self._lock:
            self._check_live(seq)
            self._leaving.add(seq)
            self._remove_leaving()

    def clear(self) -> None:
        """Drop every owner, declaration and doubt; the pool keeps its memory (DF-9).

        Waits for the device when a step is prepared or was not ordered: its forward may belong to another thread. When
        that wait fails, nothing is handed out again, the owners are in doubt, and a later `clear` may succeed.
        """
        with self._lock:
            if self._pending is not None or self._unordered:
                try:
                    self._fence()
                except BaseException:
                    if self._pending is not None:
                        self._close(is_ordered=False)
                    raise
            self._cells.clear()
            self._declared = self._pending = None
            self._poisoned.clear()
            self._unordered.clear()
            self._leaving.clear()

    # -- A step

    def declare_step(self, seq_ids: npt.ArrayLike) -> None:
        """Admit a step: each owner's rows stand together, its new context rows first, its B block rows last.

        Raises InvalidStep (a step is prepared, no rows, more than max_write, an owner in two places or with fewer than
        B rows), SequencePoisoned, UnknownSequence or CacheFull; an earlier declaration then stands.
        """
        ids: I32 = np.array(seq_ids, np.int32)
        with self._lock:
            self._check_nothing_pending()
            declared = self._check_owners(ids) if ids.ndim == 1 and ids.size else None
            self._cells.declare_step(ids)
            self._declared = declared

    def prepare_step(self, width: int) -> DraftStep:
        """Claim the rows' cells and write the step where the forward reads it; see `CellCache.prepare_step`.

        Waits for the device if an unordered step failed before it. Whatever is raised, nothing has changed and no
        other owner is in doubt: a failed upload takes its cells back.
        """
        with self._lock:
            self._check_nothing_pending()
            if self._declared is not None:
                self._order_strays()
            cells = self._cells.prepare_step(width)
            declared, self._declared = self._declared, None
            assert declared is not None, "the cells had a declaration"
            bases = {
                owner: self._cells.pos(owner) - count
                for owner, count in zip(declared.owners.tolist(), declared.counts.tolist(), strict=True)
            }
            self._pending = _Pending(width, bases)
            ends = np.cumsum(declared.counts)
            query_rows: I64 = (ends[:, None] + np.arange(-self.block_rows, 0)).reshape(-1)
            return DraftStep(cells, query_rows)

    def commit_step(self, width: int) -> None:
        """The step was launched, `width` rows wide: its context rows stay, its block rows' cells are free again.

        Does not wait: whoever gets those cells next is ordered behind this step. Raises InvalidStep when nothing is
        prepared or the width is another than was prepared, and whatever recording the event raises; the step's owners,
        and no others, are then poisoned.
        """
        with self._lock:
            pending = self._close(is_ordered=True)
            if width != pending.width:
                self._remove_leaving()
                raise InvalidStep(f"a {width}-row step was committed, but {pending.width} rows were prepared")
            self._settle({owner: self._cells.pos(owner) - self.block_rows for owner in pending.bases})

    def undo_step(self) -> None:
        """The prepared step was not launched: its owners are as they were before it."""
        with self._lock:
            self._take_pending()
            self._cells.undo_step()
            self._remove_leaving()

    def fail_step(self, *, is_ordered: bool = True) -> None:
        """The step was launched and failed: its owners are poisoned until `recover`.

        is_ordered: the stream that ran it is current, so that an event recorded now comes after all it did. Otherwise
        (another thread ran it) recovery waits for the whole device.
        """
        with self._lock:
            self._close(is_ordered=is_ordered)
            self._remove_leaving()

    def recover(self) -> tuple[int, ...]:
        """Give every poisoned owner the context it had before the step that poisoned it; returns those still live.

        Waits for the device only if a step was not ordered; what that wait raises leaves all as it is, for a retry.
        Raises InvalidStep while a step is prepared.
        """
        with self._lock:
            self._check_nothing_pending()
            self._order_strays()
            recovered = tuple(sorted(self.poisoned))
            self._settle(dict(self._poisoned))
            return recovered

    # -- Under the lock

    def _check_live(self, seq: int) -> None:
        if not self.is_live(seq):
            raise UnknownSequence(f"sequence {seq} is not live")

    def _check_nothing_pending(self) -> None:
        if self._pending is not None:
            raise InvalidStep("a prepared step must be committed, undone or failed first")

    def _check_settled(self, seq: int) -> None:
        self._check_nothing_pending()
        self._check_live(seq)
        self._check_not_poisoned(seq)

    def _check_not_poisoned(self, seq: int) -> None:
        if seq in self._poisoned:
            raise SequencePoisoned(f"the last step of sequence {seq} ended in doubt: recover first")

    def _check_owners(self, ids: I32) -> _Declared:
        if ids.size > self._cells.config.max_write:
            raise InvalidStep(f"a {ids.size}-row step is wider than max_write, {self._cells.config.max_write}")
        starts = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1])))
        owners, counts = ids[starts], np.diff(starts, append=ids.size)
        seen: set[int] = set()
        for owner, count in zip(owners.tolist(), counts.tolist(), strict=True):
            if owner in seen:
                raise InvalidStep(f"the rows of sequence {owner} stand in two places of the step")
            seen.add(owner)
            if count < self.block_rows:
                raise InvalidStep(f"sequence {owner} has {count} rows, fewer than its block's {self.block_rows}")
            self._check_live(owner)
            self._check_not_poisoned(owner)
        return _Declared(owners, counts)

    def _take_pending(self) -> _Pending:
        if self._pending is None:
            raise InvalidStep("no step is prepared")
        pending, self._pending = self._pending, None
        return pending

    def _close(self, *, is_ordered: bool) -> _Pending:
        """End the prepared step with its cells claimed and its owners poisoned, and record the event behind it."""
        pending = self._take_pending()
        self._poisoned.update(pending.bases)
        self._unordered.update(pending.bases)
        self._cells.commit_step()
        if is_ordered:
            self._unordered.difference_update(pending.bases)
        return pending

    def _order_strays(self) -> None:
        """Wait until no forward of an unordered step can be running."""
        if self._unordered:
            self._fence()
            self._unordered.clear()
            self._remove_leaving()

    def _settle(self, lengths: Mapping[int, int]) -> None:
        """These owners hold so many context rows, and no doubt is left about them."""
        for owner, length in lengths.items():
            self._cells.rewind(owner, length)
            del self._poisoned[owner]
        self._remove_leaving()

    def _remove_leaving(self) -> None:
        """Remove what nothing keeps. A prepared step keeps everything: a verb would change the table under it."""
        if self._pending is not None:
            return
        for seq in sorted(self._leaving - self._unordered):
            self._cells.seq_rm(seq)
            self._leaving.remove(seq)
            self._poisoned.pop(seq, None)


def block_runs(reach: Reach, placed: Placement, block_rows: int) -> tuple[I64, I64]:
    """What each row sees: context rows what came before, block rows their owner's recent context and whole block."""
    owner = np.searchsorted(placed.owners, placed.seq_ids)  # [T] index into the distinct owners
    ends = (placed.lengths + np.bincount(owner, minlength=placed.owners.size))[owner]
    context = ends - block_rows
    is_block = placed.positions >= context
    start, count = runs(reach, placed.positions)
    block_start = np.maximum(context - reach.size, 0) if reach.kind == "window" else np.zeros_like(context)
    start = np.where(is_block, block_start, start)
    return start, np.where(is_block, ends - block_start, count)


def _check_block(geometry: Geometry, config: CacheConfig, block_rows: int) -> None:
    if not 1 <= block_rows <= config.max_write:
        raise InvalidConfig(f"a block of {block_rows} rows is outside [1, max_write = {config.max_write}]")
    if block_rows >= config.capacity_cells:
        raise InvalidConfig(f"a block of {block_rows} rows leaves no context in {config.capacity_cells} cells")
    for reach in geometry.reaches:
        if reach.kind == "chunk":
            raise InvalidGeometry(f"a draft layer cannot see in chunks of {reach.size}: its block would lie across two")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
