"""Packed steps over scattered cells: the caller says which rows a step holds, positions are derived."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch

from cache.cell_cache import CellCache
from cache.geometry import CacheConfig
from cache.step import CellStep
from static_graphs.model import LoadedModel


class PackedRun:
    """A cache full of holes and of NaN, so that no sequence's cells lie together and no stray read stays unseen."""

    def __init__(
        self,
        model: LoadedModel,
        seed: int,
        *,
        capacity: int = 256,
        max_width: int = 64,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """kv_dtype None: the model's."""
        self.model = model
        self.random = random.Random(seed)
        config = CacheConfig(capacity, max_width, kv_dtype or model.dtype, initial_cells=capacity, max_sequences=16)
        self.cache = CellCache(model.geometry, config, model.device)
        for side in (self.cache.pool.keys, self.cache.pool.values):
            for layer in side:
                layer.fill_(torch.nan)
        decoys = [self.cache.seq_new() for _ in range(4)]
        for _ in range(2):
            self.cache.declare_step(np.array([self.random.choice(decoys) for _ in range(max_width)], dtype=np.int32))
            self.cache.prepare_step(max_width)
            self.cache.commit_step()
        for decoy in decoys[1:]:
            self.cache.seq_rm(decoy)

    def open(self) -> int:
        return self.cache.seq_new()

    def close(self, sequence: int) -> None:
        self.cache.seq_rm(sequence)

    @torch.inference_mode()
    def step(self, rows: Sequence[tuple[int, int]], width: int | None = None) -> torch.Tensor:
        """rows: (sequence, token) in packed order -> logits [len(rows), V]. Rows past them, up to `width`, pad."""
        width = len(rows) if width is None else width
        self.cache.declare_step(np.array([sequence for sequence, _ in rows], dtype=np.int32))
        next_position = {sequence: self.cache.pos(sequence) for sequence, _ in rows}
        positions = []
        for sequence, _ in rows:
            positions.append(next_position[sequence])
            next_position[sequence] += 1
        step = self.cache.prepare_step(width)
        padding = width - len(rows)
        device = self.model.device
        tokens = torch.tensor([token for _, token in rows] + [rows[-1][1]] * padding, device=device)
        placed = torch.tensor(self.placed(positions, step) + [positions[-1]] * padding, device=device)
        logits = self.model.logits(self.model.hidden(tokens, placed, step)[: len(rows)])
        self.cache.commit_step()
        return logits

    def placed(self, positions: list[int], step: CellStep) -> list[int]:
        """The positions that the rows are told; a test of the tests overrides it to do harm."""
        return positions
