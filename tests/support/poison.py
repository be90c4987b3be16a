"""NaN in every cell that nobody holds: whoever reads one is found out by what comes of it."""

import torch

from cache.cell_cache import CellCache
from cache.geometry import FP8


def poison_free_cells(cache: CellCache, value: float = float("nan")) -> None:
    """Fill the K/V of all free cells of a CPU cache; the scratch row, which nobody reads either, included."""
    is_free = torch.ones(cache.capacity_cells + 1, dtype=torch.bool)
    is_free[1:] = torch.from_numpy(cache.references() == 0)
    for each in (*cache.pool.keys, *cache.pool.values):
        if each.dtype == FP8:  # which knows no assignment by mask
            each.view(torch.uint8)[is_free] = torch.tensor(value).to(FP8).view(torch.uint8)
        else:
            each[is_free] = value
