"""One sequence, whose window and chunk layers store a ring of what they may still see, and whose other layers grow.

A cell cache with a single id places position p in cell p, so its verbs, its step protocol and its flat layers serve as
they are; the rings follow from the same positions (cache/ring.py). A context of 128 k tokens then costs a window layer
as much as one of 5 k.

The price: what a ring has overwritten is gone. A rewind may not go below the floor, and nothing can be cloned.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from cache.cell_cache import CellCache, check_config
from cache.cells import CellTable
from cache.geometry import CacheConfig, Geometry, InvalidPosition, InvalidStep, UnknownSequence, Unsupported
from cache.ring import RingPool, RingUploads, rings_for
from cache.step import CellStep
from cache.upload import DeviceUploads, HostUploads, Uploads


class SequenceCache(CellCache):
    """K/V of one sequence of up to `capacity_cells` positions. Its id is 0, whatever `max_sequences` would allow.

    What steps read is fixed in address and shape, rings included, so captured graphs serve it as they serve cells.
    """

    def __init__(
        self,
        geometry: Geometry,
        config: CacheConfig,
        device: torch.device,
        *,
        uploads: Uploads | None = None,
        table: CellTable | None = None,
    ):
        """`uploads` and `table` (of one sequence) are made for the device unless they are given."""
        check_config(config)
        config = replace(config, max_sequences=1)
        is_cuda = device.type == "cuda"
        if table is None:
            table = CellTable(config.capacity_cells, 1, log_writes=is_cuda)
        self._rings = rings_for(geometry, config, device)
        if uploads is None:
            if is_cuda:
                uploads = DeviceUploads(table, geometry.reaches, config.max_write, device)
            else:
                uploads = HostUploads(table, geometry.reaches, config.max_write)
        if self._rings:
            uploads = RingUploads(uploads, tuple(self._rings.values()))
        pool = RingPool(geometry, config, device, self._rings)
        super().__init__(geometry, config, device, pool=pool, uploads=uploads, table=table)
        # The largest length that may have been written since the sequence began; a rewind does not lower it.
        self._high_water = 0

    @property
    def rewind_floor(self) -> int:
        """The lowest position that `rewind` accepts: every ring still holds what a row there may see (SEQ-9)."""
        with self._lock:
            return max((ring.floor(self._high_water) for ring in self._rings.values()), default=0)

    def seq_clone(self, src: int, upto: int | None = None) -> int:
        """Refused: Unsupported."""
        with self._lock:
            if not self.is_live(src):
                raise UnknownSequence(f"sequence {src} is not live")
            raise Unsupported("a cache of a single sequence cannot clone it: use a batched-cell cache")

    def seq_from(self, cells: npt.ArrayLike) -> int:
        """Refused: Unsupported. Rings hold what no list of cells says."""
        raise Unsupported("a cache of a single sequence cannot begin one with cells: use a batched-cell cache")

    def rebase(self, seq: int, cells: npt.ArrayLike) -> None:
        """Refused: Unsupported."""
        raise Unsupported("a cache of a single sequence has no cells to begin with instead: use a batched-cell cache")

    def seq_rm(self, seq: int) -> None:
        with self._lock:
            super().seq_rm(seq)
            self._high_water = 0

    def clear(self) -> None:
        with self._lock:
            super().clear()
            self._high_water = 0

    def rewind(self, seq: int, position: int) -> None:
        """Drop positions >= `position`. InvalidPosition outside [rewind_floor, pos(seq)]."""
        with self._lock:
            if self.is_live(seq) and 0 <= position < self.rewind_floor:
                raise InvalidPosition(
                    f"cannot rewind to {position}: {self._high_water} positions were written, and its window layers "
                    f"still hold what is seen from {self.rewind_floor} on. Remove the sequence to start again"
                )
            super().rewind(seq, position)

    def declare_step(self, seq_ids: npt.ArrayLike) -> None:
        """As in any cache; a step of more than `max_write` tokens would outrun the rings and is InvalidStep (SEQ-4)."""
        if np.size(seq_ids) > self.config.max_write:
            raise InvalidStep(f"a {np.size(seq_ids)}-token step is wider than max_write, {self.config.max_write}")
        super().declare_step(seq_ids)

    def prepare_step(self, width: int) -> CellStep:
        """As in any cache, with `rings` for the layers that have one.

        From here on the rows may have been written, so undoing the step gives back its positions but not what its
        rows overwrote: the floor stays where the step has moved it.
        """
        with self._lock:
            flat = super().prepare_step(width)
            self._high_water = max(self._high_water, self.pos(0))
            return replace(flat, rings={reach: ring.step(flat) for reach, ring in self._rings.items()})
