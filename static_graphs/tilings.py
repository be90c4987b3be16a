"""Which way a matrix product of few rows is computed: by one of our kernels, cut so or so, or by cuBLAS (None)."""

from __future__ import annotations

from static_graphs.kernels.products import Tiling

MAX_ROWS = 64
"""Rows from which on cuBLAS is faster: the products begin to wait for the matrix units instead of the weights."""
NARROW = 1024
"""Columns so few that cuBLAS leaves most of the device idle: there ours win up to twice as many rows."""
PROGRAMS = 264
"""Two a multiprocessor of an H200: as many parts as give no more programs than run at once."""


def choose(rows: int, width: int, depth: int, *, gated: bool = False) -> Tiling | None:
    """For x [rows, depth] by a weight [width, depth]; gated: by two of them. None: cuBLAS.

    Measured on an H200 over the shapes of an 8B and a 0.6B model: of 20 tilings the best one's time, or 5 % more.
    """
    most_rows = MAX_ROWS if gated or width > NARROW else 2 * MAX_ROWS
    if rows > most_rows or depth < 64 or width < 64:
        return None
    if rows == 1:
        block_k = 1024 if depth % 1024 == 0 else 512
        return Tiling(2 if gated or width <= 4096 else 4, block_k, is_dot=False)
    if gated:
        return Tiling(64, 64) if rows > 16 else Tiling(64, 128)
    if width > 64 * PROGRAMS:
        return Tiling(64, 128, stages=3)
    parts = 1
    limit = PROGRAMS if rows <= 16 else PROGRAMS // 2
    while width // 64 * parts * 2 <= limit and depth % (256 * parts) == 0:
        parts *= 2
    return Tiling(64, 128, parts, stages=4 if rows <= MAX_ROWS else 3)
