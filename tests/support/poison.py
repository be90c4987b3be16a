"""NaN in every cell that nobody holds: whoever reads one is found out by what comes of it."""

import torch

from cache.cell_cache import CellCache


def poison_free_cells(cache: CellCache, value: float = float("nan")) -> None:
    """Fill the K/V of all free cells of a CPU cache; the scratch row, which nobody reads either, included."""
    is_free = torch.ones(cache.capacity_cells + 1, dtype=torch.bool)
    is_free[1:] = torch.from_numpy(cache.references() == 0)
    for each in (*cache.pool.keys, *cache.pool.values):
        each[is_free] = value
