"""Rings: a window or chunk layer of a single sequence stores only what one of its rows may still see.

A ring of R slots is pool rows 1 .. R of its layers (row 0 is scratch). Position p lies in slot p mod R:

    size 4, max_write 4 -> R = 7       slot         0  1  2  3  4  5  6
                                       8 written    7  1  2  3  4  5  6    position 7 took slot 0 from position 0
    a step of one row at 7 reads       slots 4 5 6 0 = positions 4 .. 7

All rows of a step are stored before any row reads, and the earliest may still see size - 1 positions before itself:
R = size + max_write - 1 (SEQ-4, SEQ-5). A chunk's first row sees less than that, its last row as much.

A run counts positions, as everywhere. The list that it is cut from is periodic: one page of R entries, named by every
entry of the page table. So a ring's list is written once, and no step uploads any of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from cache.geometry import CacheConfig, CacheMemoryError, Geometry, Reach
from cache.pool import CpuPool, CudaPool, Pool
from cache.step import CellStep
from cache.upload import StepArrays, StepTensors, Uploads


def rings_for(geometry: Geometry, config: CacheConfig, device: torch.device) -> dict[Reach, Ring]:
    """A ring for every reach that gains by one: where it would hold the whole capacity the layers stay flat."""
    sizes = {reach: reach.size + config.max_write - 1 for reach in geometry.reaches if reach.kind != "all"}
    return {reach: Ring(reach, size, config, device) for reach, size in sizes.items() if size < config.capacity_cells}


class Ring:
    """The slots of all layers with one reach, and the tensors of a step that are theirs. Engine thread only."""

    def __init__(self, reach: Reach, slots: int, config: CacheConfig, device: torch.device):
        self.reach = reach
        self.slots = slots
        laps = -(-config.capacity_cells // slots)
        self._page_table = torch.zeros(1, laps, dtype=torch.int32, device=device)
        self._pages = torch.arange(1, slots + 1, dtype=torch.int32, device=device)[None]
        # Flat pool row -> ring pool row, [capacity + 1] i64; the scratch row is row 0 of both.
        positions = torch.arange(config.capacity_cells, device=device)
        self._rows_of = torch.cat([positions.new_zeros(1), positions % slots + 1])
        self._write_rows = torch.zeros(config.max_write, dtype=torch.int64, device=device)

    def floor(self, high_water: int) -> int:
        """The lowest position whose row finds all that it may see, once positions below `high_water` were written.

        The ring holds positions high_water - R .. high_water - 1 (SEQ-9); until it has wrapped that is all of them.
        """
        oldest = high_water - self.slots
        if oldest <= 0:
            return 0
        size = self.reach.size
        return oldest + size - 1 if self.reach.kind == "window" else -(-oldest // size) * size

    def follow(self, write_rows: torch.Tensor) -> None:
        """Derive where this ring's layers write from the flat ones' rows, [max_write] i64, on the step's stream."""
        torch.index_select(self._rows_of, 0, write_rows, out=self._write_rows)

    def step(self, flat: CellStep) -> CellStep:
        """`flat` as this ring's layers read it."""
        return replace(
            flat,
            write_rows=self._write_rows[: flat.width],
            runs={self.reach: flat.runs[self.reach]},
            page_table=self._page_table,
            pages=self._pages,
            plans={},
        )


class RingUploads:
    """Uploads that bring the rings along."""

    def __init__(self, flat: Uploads, rings: Sequence[Ring]):
        self._flat = flat
        self._rings = tuple(rings)
        self.step: StepTensors = flat.step
        self.page_table = flat.page_table
        self.pages = flat.pages

    @property
    def host(self) -> StepArrays:
        return self._flat.host

    @host.setter
    def host(self, arrays: StepArrays) -> None:
        self._flat.host = arrays

    def begin(self) -> None:
        self._flat.begin()

    def send(self) -> None:
        self._flat.send()
        for ring in self._rings:
            ring.follow(self.step.write_rows)

    def mark_step_done(self) -> None:
        self._flat.mark_step_done()


class RingPool:
    """K/V of a single sequence: ring layers have all their slots from the start, flat layers grow as in any pool."""

    def __init__(self, geometry: Geometry, config: CacheConfig, device: torch.device, rings: Mapping[Reach, Ring]):
        flat_layers = tuple(layer for layer in geometry.layers if layer.reach not in rings)
        self._ring_rows = max((ring.slots + 1 for ring in rings.values()), default=0)
        self._ring_bytes = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.scales = geometry.scales_in(config.kv_dtype)

        self._flat: Pool | None = None
        if flat_layers:
            flat = Geometry(flat_layers)
            self._flat = CudaPool(flat, config, device) if device.type == "cuda" else CpuPool(flat, config)
        flat_keys = iter(self._flat.keys if self._flat else ())
        flat_values = iter(self._flat.values if self._flat else ())
        try:
            for layer in geometry.layers:
                if layer.reach not in rings:
                    self.keys.append(next(flat_keys))
                    self.values.append(next(flat_values))
                    continue
                for stored, dim in ((self.keys, layer.k_dim), (self.values, layer.v_dim)):
                    shape = (rings[layer.reach].slots + 1, layer.num_kv_heads, dim)
                    stored.append(torch.empty(shape, dtype=config.kv_dtype, device=device))
                    stored[-1][0].zero_()  # read by nobody, but no NaN of the memory's last owner should lie around
                    self._ring_bytes += stored[-1].nbytes
        except RuntimeError as error:
            self.close()
            raise CacheMemoryError(f"cannot allocate the rings of the K/V pool: {error}") from error

    @property
    def rows(self) -> int:
        return self._flat.rows if self._flat else self._ring_rows

    @property
    def growth_count(self) -> int:
        return self._flat.growth_count if self._flat else 0

    @property
    def allocated_bytes(self) -> int:
        return self._ring_bytes + (self._flat.allocated_bytes if self._flat else 0)

    def ensure_cells(self, cells: int) -> None:
        if self._flat:
            self._flat.ensure_cells(cells)

    def trim(self, cells: int) -> None:
        if self._flat:
            self._flat.trim(cells)

    def close(self) -> None:
        self.keys.clear()
        self.values.clear()
        if self._flat:
            self._flat.close()
