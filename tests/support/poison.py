"""NaN in every cell that nobody holds: whoever reads one is found out by what comes of it."""

import torch

from cache.cell_cache import CellCache


def poison_free_cells(cache: CellCache, value: float = float("nan")) -> None:
    """Fill the K/V of all free cells of a CPU cache; the scratch row, which nobody reads either, included."""
    is_free = torch.ones(cache.capacity_cells + 1, dtype=torch.bool)
    for seq in range(cache.max_sequences):
        if cache.pos(seq):
            is_free[torch.from_numpy(cache.cells_of(seq)).long() + 1] = False
    for each in (*cache.pool.keys, *cache.pool.values):
        each[is_free] = value
