"""Packed steps over shuffled cells, driven by hand: which rows a step holds is the caller's, positions are derived."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from cache.geometry import Geometry
from cache.step import CellStep
from static_graphs.model import LoadedModel
from support.steps import build_step, plain_pool


class ShuffledCells:
    """A pool whose cells are handed out in random order, and each live sequence's cells."""

    def __init__(self, geometry: Geometry, num_cells: int, shuffle: random.Random) -> None:
        self.pool = plain_pool(num_cells, kv_heads=1, k_dim=1)
        self.pool.keys[:] = [
            torch.full((num_cells + 1, la.num_kv_heads, la.k_dim), torch.nan) for la in geometry.layers
        ]
        self.pool.values[:] = [
            torch.full((num_cells + 1, la.num_kv_heads, la.v_dim), torch.nan) for la in geometry.layers
        ]
        self.geometry = geometry
        self.free = list(range(num_cells))
        shuffle.shuffle(self.free)
        self.sequences: list[list[int]] = []

    def open(self) -> int:
        self.sequences.append([])
        return len(self.sequences) - 1

    def step(self, rows: Sequence[int], width: int | None = None) -> tuple[CellStep, list[int]]:
        """Claim a cell for each row (its sequence); the step and each row's position."""
        placed = []
        for sequence in rows:
            self.sequences[sequence].append(self.free.pop())
            placed.append((sequence, len(self.sequences[sequence]) - 1))
        step = build_step(self.pool, self.sequences, placed, reaches=self.geometry.reaches, width=width)
        return step, [position for _, position in placed]


@torch.inference_mode()
def run_packed(model: LoadedModel, cells: ShuffledCells, rows: Sequence[tuple[int, int]], width: int) -> torch.Tensor:
    """rows: (sequence, token) in packed order -> logits [len(rows), V]. Rows past them up to `width` are padding."""
    step, positions = cells.step([sequence for sequence, _ in rows], width)
    padding = width - len(rows)
    tokens = torch.tensor([token for _, token in rows] + [rows[-1][1]] * padding)
    hidden = model.hidden(tokens, torch.tensor(positions + [positions[-1]] * padding), step)
    return model.logits(hidden[: len(rows)])
