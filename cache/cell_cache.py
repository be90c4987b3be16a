"""Many sequences over one pool of cells: the verbs of the table, and the protocol of a step.

    declare_step -> prepare_step -> (the forward is launched) -> commit_step
                                 \\-> (it was not, or it failed) -> undo_step

Owns the lock: every call may come from any thread, though a step's three calls belong to the engine thread. A refusal
leaves table, declaration and pool as they were.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy.typing as npt
import torch

from cache.cells import I32, I64, CellTable, Declaration, Placement, runs
from cache.geometry import CacheConfig, Geometry, InvalidConfig, InvalidStep, Reach
from cache.pool import CpuPool, CudaPool, Pool, check_storage
from cache.programs import Programs
from cache.step import CellStep, Run
from cache.upload import DeviceUploads, HostUploads, Uploads

RunRule = Callable[[Reach, Placement], tuple[I64, I64]]
"""What each row of a placed step sees with that reach: where its run begins in its cell list, and how long it is."""


@dataclass(frozen=True, slots=True)
class CacheMetrics:
    """A snapshot. `logical_length` is the read extent: every held cell is below it."""

    logical_length: int
    free_cells: int
    num_sequences: int
    rows: int
    """Pool rows backed by memory, scratch included."""
    growth_count: int
    allocated_bytes: int


class CellCache:
    """K/V of up to `max_sequences` sequences in `capacity_cells` cells.

    A prepared step's tensors are the same buffers in every step: they are valid until the next `prepare_step`.
    """

    def __init__(
        self,
        geometry: Geometry,
        config: CacheConfig,
        device: torch.device,
        *,
        pool: Pool | None = None,
        uploads: Uploads | None = None,
        table: CellTable | None = None,
        run_rule: RunRule = lambda reach, placed: runs(reach, placed.positions),
    ):
        """`pool`, `uploads` and `table` are made for the device unless they are given; rows see what came before."""
        check_config(config)
        is_cuda = device.type == "cuda"
        if table is None:
            table = CellTable(config.capacity_cells, config.max_sequences, log_writes=is_cuda)
        if pool is None:
            pool = CudaPool(geometry, config, device) if is_cuda else CpuPool(geometry, config)
        if uploads is None:
            if is_cuda:
                uploads = DeviceUploads(table, geometry.reaches, config.max_write, device)
            else:
                uploads = HostUploads(table, geometry.reaches, config.max_write)
        self.geometry = geometry
        self.config = config
        self.pool = pool
        self._table = table
        self._uploads = uploads
        self._run_rule = run_rule
        self._programs = Programs(geometry, config.kv_dtype)
        self._lock = threading.RLock()
        self._declared: Declaration | None = None
        self._prepared: Placement | None = None
        self._spoiled_by: str | None = None  # the verb that ran between prepare and commit

    # -- What is held

    @property
    def capacity_cells(self) -> int:
        return self.config.capacity_cells

    @property
    def max_sequences(self) -> int:
        return self.config.max_sequences

    @property
    def free_cells(self) -> int:
        with self._lock:
            return self._table.free_cells

    def is_live(self, seq: int) -> bool:
        with self._lock:
            return self._table.is_live(seq)

    def pos(self, seq: int) -> int:
        """The next position `seq` would write; 0 when it is empty or not live (CELL-11)."""
        with self._lock:
            return self._table.pos(seq)

    def lengths(self) -> list[int]:
        """By sequence id, what `pos` says of it. One look for a whole step."""
        with self._lock:
            return self._table.lengths()

    def cells_of(self, seq: int, start: int = 0, stop: int | None = None) -> I32:
        """A copy of the cells of the sequence's positions [start, stop), in order; by default all."""
        with self._lock:
            return self._table.cells_of(seq, start, stop)

    def references(self) -> I32:
        """A copy of every cell's reference count, [capacity_cells]; 0 is free."""
        with self._lock:
            return self._table.references()

    def metrics(self) -> CacheMetrics:
        with self._lock:
            return CacheMetrics(
                logical_length=self._table.used_end,
                free_cells=self._table.free_cells,
                num_sequences=self._table.num_sequences,
                rows=self.pool.rows,
                growth_count=self.pool.growth_count,
                allocated_bytes=self.pool.allocated_bytes,
            )

    # -- Verbs. Those that touch cells spoil a step that is prepared but not committed (CELL-13).

    def seq_new(self) -> int:
        """The lowest free id, or CacheFull."""
        with self._lock:
            return self._table.seq_new()

    def seq_clone(self, src: int, upto: int | None = None) -> int:
        """A new sequence sharing the first min(upto, pos(src)) cells of `src`; takes no cell (CELL-7).

        Raises UnknownSequence, InvalidPosition (an empty source, a negative `upto`) or CacheFull (no id).
        """
        with self._lock:
            clone = self._table.seq_clone(src, upto)
            self._spoil("seq_clone")
            return clone

    def seq_from(self, cells: npt.ArrayLike) -> int:
        """A new sequence of cells that are held, in position order, as a sequence began with them; takes no cell.

        Raises InvalidPosition (a cell nobody holds) or CacheFull (no id).
        """
        with self._lock:
            seq = self._table.seq_from(cells)
            self._spoil("seq_from")
            return seq

    def rebase(self, seq: int, cells: npt.ArrayLike) -> None:
        """Let the sequence begin with `cells`, which hold the same tokens, instead of its own copies.

        Raises UnknownSequence or InvalidPosition: a cell nobody holds, more cells than `seq` has, or own copies that
        somebody else holds too and goes on from.
        """
        with self._lock:
            self._table.rebase(seq, cells)
            self._spoil("rebase")

    def claim_cells(self, num: int) -> I32:
        """Take `num` free cells for K/V that no step writes; they are the caller's until `release_cells`.

        Raises CacheFull or CacheMemoryError; nothing is claimed then.
        """
        with self._lock:
            if num <= self._table.free_cells:
                self.pool.ensure_cells(self._reachable_cells(num))
            cells = self._table.claim_cells(num)
            self._spoil("claim_cells")
            return cells

    def hold_cells(self, cells: npt.ArrayLike) -> None:
        """Keep cells beyond their sequences: one more reference each (no repeats). InvalidPosition for a free one."""
        with self._lock:
            self._table.hold_cells(cells)

    def release_cells(self, cells: npt.ArrayLike) -> None:
        """Give back what `hold_cells` took; cells that nobody else holds become free."""
        with self._lock:
            self._table.release_cells(cells)
            self._spoil("release_cells")

    def seq_rm(self, seq: int) -> None:
        """Drop the sequence; cells that nobody else holds become free."""
        with self._lock:
            self._table.seq_rm(seq)
            self._spoil("seq_rm")

    def rewind(self, seq: int, position: int) -> None:
        """Drop positions >= `position`; InvalidPosition outside [0, pos(seq)]."""
        with self._lock:
            self._table.rewind(seq, position)
            self._spoil("rewind")

    def clear(self) -> None:
        """Free every cell, release every id, forget declaration and step. The pool keeps its memory (CCELL-7)."""
        with self._lock:
            self._table.clear()
            self._declared = self._prepared = self._spoiled_by = None

    def trim(self) -> None:
        """Give back the pool memory past the last held cell. May wait for the device."""
        with self._lock:
            self.pool.trim(self._table.used_end)

    def close(self) -> None:
        """Release the pool. Nothing may run on it any more."""
        with self._lock:
            self.pool.close()

    # -- Programs

    def bind_program(self, name: str, geometry: Geometry | None, kv_dtype: torch.dtype) -> bool:
        """Check that a program was made for this cache; if not, this and every later step is refused (POOL-3).

        False for a part of the model that stores no K/V (`geometry` is None; an image encoder): it never steps a cache.
        """
        with self._lock:
            return self._programs.bind(name, geometry, kv_dtype)

    def release_program(self, name: str) -> None:
        """Forget a program that will not run again. Idempotent."""
        with self._lock:
            self._programs.release(name)

    # -- A step

    def declare_step(self, seq_ids: npt.ArrayLike) -> None:
        """Admit a step: seq_ids[i] owns token i, any interleaving. All tokens fit together or none does (CELL-16).

        Raises InvalidStep (no tokens, or a prepared step waits), UnknownSequence or CacheFull; an earlier
        declaration then stands. An accepted one replaces it.
        """
        with self._lock:
            self._check_nothing_prepared()
            self._declared = self._table.admit(seq_ids)

    def prepare_step(self, width: int) -> CellStep:
        """Claim one cell a declared token and write the step of `width` rows where the forward reads it.

        Rows past the declared tokens are padding: they write the scratch row and read the last cell that the last real
        row reads, so that they cost next to nothing.
        Every one of the `width` entries is rewritten (PAD-3). On CUDA the upload goes to the current stream.

        Raises InvalidProgram (sticky), InvalidStep, UnknownSequence (an owner left since the declaration) or
        CacheMemoryError. Whatever is raised, table and declaration are as before and a retry may succeed.
        """
        with self._lock:
            self._programs.check_step()
            self._check_nothing_prepared()
            if not 1 <= width <= self.config.max_write:
                raise InvalidStep(f"a {width}-row step is outside [1, {self.config.max_write}]")
            declared = self._declared
            if declared is None:
                raise InvalidStep("no step was declared since the last one was prepared")
            tokens = declared.seq_ids.size
            if tokens > width:
                raise InvalidStep(f"a {width}-row step cannot hold {tokens} declared tokens")
            self._table.check(declared)
            # Grow before placing, so that a failed allocation leaves the table as it was.
            self.pool.ensure_cells(self._reachable_cells(tokens))
            self._uploads.begin()
            placed = self._table.place(declared)
            try:
                read_len = self._write(placed, width)
                self._uploads.send()
            except BaseException:
                self._table.undo(placed)
                raise
            self._declared = None
            self._prepared = placed
            return self._step(tokens, width, read_len)

    def commit_step(self) -> None:
        """The prepared step was launched: its placement is final.

        InvalidStep when nothing is prepared, or when a verb has changed the table under the step since; then
        `undo_step` is what is left.
        """
        with self._lock:
            self._take_prepared(spoiled_is_fine=False)
            self._uploads.mark_step_done()

    def undo_step(self) -> None:
        """The prepared step was not launched, or its forward failed: release exactly the cells it claimed.

        What a sequence removed or rewound since no longer holds stays released; a clone made since keeps its share.
        """
        with self._lock:
            self._table.undo(self._take_prepared(spoiled_is_fine=True))

    # -- Under the lock

    def _spoil(self, verb: str) -> None:
        if self._prepared is not None:
            self._spoiled_by = verb

    def _check_nothing_prepared(self) -> None:
        if self._prepared is not None:
            raise InvalidStep("a prepared step must be committed or undone first")

    def _take_prepared(self, *, spoiled_is_fine: bool) -> Placement:
        if self._prepared is None:
            raise InvalidStep("no step is prepared")
        if self._spoiled_by is not None and not spoiled_is_fine:
            raise InvalidStep(f"{self._spoiled_by} changed the table after the step was prepared")
        placed, self._prepared, self._spoiled_by = self._prepared, None, None
        return placed

    def _reachable_cells(self, tokens: int) -> int:
        """The most cells a step can reach: lowest-free fills every hole before it passes used_end (POOL-6)."""
        occupied = self.config.capacity_cells - self._table.free_cells
        return max(self._table.used_end, occupied + tokens)

    def _write(self, placed: Placement, width: int) -> int:
        """Fill the host arrays of the step; returns the longest run."""
        host = self._uploads.host
        tokens = placed.cells.size
        host.write_rows[:tokens] = placed.cells
        host.write_rows[:tokens] += 1
        host.write_rows[tokens:width] = 0
        host.table_row[:tokens] = placed.seq_ids
        host.table_row[tokens:width] = placed.seq_ids[-1]
        read_len = 0
        for reach, (start, count) in host.runs.items():
            first, length = self._run_rule(reach, placed)
            start[:tokens], count[:tokens] = first, length
            start[tokens:width], count[tokens:width] = first[-1] + length[-1] - 1, 1  # PAD-4
            read_len = max(read_len, int(length.max()))
        return read_len

    def _step(self, tokens: int, width: int, read_len: int) -> CellStep:
        uploads = self._uploads
        return CellStep(
            num_tokens=tokens,
            width=width,
            write_rows=uploads.step.write_rows[:width],
            table_row=uploads.step.table_row[:width],
            runs={reach: Run(run.start[:width], run.count[:width]) for reach, run in uploads.step.runs.items()},
            page_table=uploads.page_table,
            pages=uploads.pages,
            read_len=read_len,
            pool=self.pool,
            batch_invariant=self.config.batch_invariant,
        )


def check_config(config: CacheConfig) -> None:
    """Refuse sizes and dtypes that no cache can have (BLD-2), before anything is built."""
    check_storage(config)
    if config.max_write > config.capacity_cells + 1:
        raise InvalidConfig(
            f"max_write is {config.max_write}: a step cannot be wider than the pool's {config.capacity_cells + 1} rows"
        )
