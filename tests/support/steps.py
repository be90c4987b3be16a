"""Steps built by hand: cell lists and rows in, a CellStep out, with no cell table in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, cast

import torch

from cache.geometry import UNSCALED, KvScales, Reach
from cache.step import CellStep, Run


@dataclass(frozen=True)
class PlainPool:
    """The part of a pool that attention reads: per layer [rows, KV, D]."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    scales: tuple[KvScales, ...]


def plain_pool(
    num_cells: int,
    *,
    kv_heads: int,
    k_dim: int,
    v_dim: int | None = None,
    layers: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    generator: torch.Generator | None = None,
    scales: KvScales = UNSCALED,
) -> PlainPool:
    """A pool of random K/V with its scratch row."""

    def fill(dim: int) -> list[torch.Tensor]:
        shape = (num_cells + 1, kv_heads, dim)
        return [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(layers)]

    return PlainPool(fill(k_dim), fill(k_dim if v_dim is None else v_dim), (scales,) * layers)


def run_of(position: int, reach: Reach) -> tuple[int, int]:
    """(start, count) of a row at `position`."""
    match reach.kind:
        case "all":
            start = 0
        case "window":
            start = max(0, position - reach.size + 1)
        case "chunk":
            start = position // reach.size * reach.size
    return start, position + 1 - start


def build_step(
    pool: PlainPool,
    cells: Sequence[Sequence[int]],
    rows: Sequence[tuple[int, int]],
    *,
    reaches: Sequence[Reach] = (Reach(),),
    width: int | None = None,
    page_cells: int = 8,
    device: str = "cpu",
) -> CellStep:
    """cells: each sequence's cells in position order, this step's included. rows: (sequence, position) of each token.

    Rows past len(rows) up to `width` are padding, which reads the last cell that the last row reads. Pages are handed
    out back to front, so that no path can take the page table for the identity.
    """
    width = len(rows) if width is None else width
    padding = width - len(rows)
    padded = list(rows) + [rows[-1]] * padding
    pages_each = max(1, -(-max(len(owned) for owned in cells) // page_cells))
    num_pages = pages_each * len(cells)
    pages = torch.zeros(num_pages, page_cells, dtype=torch.int32)
    page_table = torch.arange(num_pages - 1, -1, -1, dtype=torch.int32).reshape(len(cells), pages_each)
    for sequence, owned in enumerate(cells):
        for position, cell in enumerate(owned):
            pages[page_table[sequence, position // page_cells], position % page_cells] = cell + 1
    runs: dict[Reach, Run] = {}
    for reach in reaches:
        real = [run_of(position, reach) for _, position in rows]
        spans = torch.tensor(real + [(rows[-1][1], 1)] * padding, dtype=torch.int32).to(device)
        runs[reach] = Run(spans[:, 0].contiguous(), spans[:, 1].contiguous())
    write_rows = [cells[sequence][position] + 1 for sequence, position in rows] + [0] * padding
    return CellStep(
        num_tokens=len(rows),
        width=width,
        write_rows=torch.tensor(write_rows, dtype=torch.int64, device=device),
        table_row=torch.tensor([sequence for sequence, _ in padded], dtype=torch.int32, device=device),
        runs=runs,
        page_table=page_table.to(device),
        pages=pages.to(device),
        read_len=max(int(run.count.max()) for run in runs.values()),
        pool=cast(Any, pool),
    )


def random_cells(random: Random, num_cells: int, *, sequences: int, longest: int) -> list[list[int]]:
    """Cell lists of that many sequences: some fork another one, some ascend, the rest are scattered."""
    free = random.sample(range(num_cells), num_cells)
    cells: list[list[int]] = []
    for _ in range(sequences):
        shared: list[int] = []
        if cells and random.random() < 0.3:
            source = random.choice(cells)
            shared = source[: random.randint(1, len(source))]
        fresh = [free.pop() for _ in range(random.randint(1, longest))]
        cells.append(shared + (sorted(fresh) if random.random() < 0.5 else fresh))
    return cells


def random_rows(random: Random, cells: Sequence[Sequence[int]], *, longest_chunk: int) -> list[tuple[int, int]]:
    """Each sequence's last positions, one (a decode) or several (a chunk), in any order and sometimes interleaved."""
    chunks: list[list[tuple[int, int]]] = []
    for sequence in random.sample(range(len(cells)), len(cells)):
        owned = len(cells[sequence])
        size = 1 if random.random() < 0.5 else random.randint(1, min(longest_chunk, owned))
        chunks.append([(sequence, position) for position in range(owned - size, owned)])
    if random.random() < 0.3:  # CELL-17: any interleaving, each sequence in its own order
        rows = []
        while chunks:
            chunk = random.choice(chunks)
            rows.append(chunk.pop(0))
            chunks = [left for left in chunks if left]
        return rows
    return [row for chunk in chunks for row in chunk]
