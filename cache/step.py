"""The value that tells one forward where to write its K/V and which cells each of its rows reads.

A row attends a run (DESIGN D2): row r reads `cells_of[table_row[r]][start[r] : start[r] + count[r]]`. Causality,
windows and forks are all (start, count). On CUDA the tensors are the same buffers in every step, so a captured
graph reads the current step through fixed addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from cache.geometry import Reach

if TYPE_CHECKING:
    from cache.pool import Pool


@dataclass(frozen=True, slots=True)
class Run:
    """For one reach: where each row's run begins in its sequence's cell list and how long it is."""

    start: torch.Tensor  # [W] i32
    count: torch.Tensor  # [W] i32; >= 1 in every row, padding included


@dataclass(frozen=True, slots=True)
class CellStep:
    """One prepared step of W rows, the first `num_tokens` of them real. Read by `cache.attend`.

    "Pool row" everywhere: cell c is row c + 1, row 0 is the scratch row (D4).
    Padding rows write the scratch row and read one cell that the last real row reads (PAD-4): so nothing turns NaN.
    """

    num_tokens: int
    width: int
    write_rows: torch.Tensor  # [W] i64 pool row each row's K/V goes to; 0 for padding
    table_row: torch.Tensor  # [W] i32 which sequence's cell list the row reads
    runs: Mapping[Reach, Run]
    page_table: torch.Tensor  # [max_sequences, pages a sequence] i32: index into `pages`
    pages: torch.Tensor  # [num_pages, page_cells] i32 pool rows, in position order of their sequence
    read_len: int  # longest count of any row and reach
    pool: Pool
    batch_invariant: bool = False
    """Each row's result is to depend on its own run alone, whatever else the step holds."""
    rings: Mapping[Reach, CellStep] = field(default_factory=dict, compare=False, repr=False)
    """The same step as the layers of these reaches read it, where they store a ring instead of every position."""
    plans: dict[object, object] = field(default_factory=dict, compare=False, repr=False)
    """What an attention path derived from this step, per reach: the first layer pays, the others reuse it."""
