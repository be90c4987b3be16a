"""The head as CUDA graphs, over a ladder of rows, with the argmax and the draws behind it as graphs too.

Whichever body ran, its selected rows are gathered to one place; the narrowest head that holds them runs there. A body's
own ladder would be the wrong one: a wide step of prompts may draw from a single row.
Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from static_graphs.forwards import Model, Scores
from static_graphs.graphs import captured
from static_graphs.sampler import Best, Prepared, Route, SampleInputs, sample

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""A head waits for its weights, so that few rows too many cost little."""


def _route(has_cuts: bool) -> Route:
    return Route(True, 0, has_top_k=has_cuts, has_top_p=has_cuts, has_min_p=True)


def rehearse_draws(model: Model, hidden: torch.Tensor, has_cuts: bool) -> None:
    """Launch what one of a head's draws consists of, for whatever rows hidden [R, hidden] holds.

    The draw without cuts begins with the kernels of the head's argmax.
    """
    logits = model.logits(hidden)
    packed = torch.zeros(SampleInputs.PACKED, ROWS[-1], dtype=torch.int64, device=hidden.device)
    sample(logits, SampleInputs.unpacked(packed[:, : len(hidden)]), _route(has_cuts))


class CapturedHeads:
    """Captured widest first, in the memory pool of the bodies. Each writes the same memory again when it runs."""

    def __init__(self, model: Model, hidden: torch.Tensor, memory: Any, ladder: Sequence[int] = ROWS) -> None:
        """hidden: [W, hidden], of the widest body: its rows, dtype and device are what heads are made for.
        ladder: rows of the heads, ascending; those that are more than W are left out."""
        self._model = model
        self._memory = memory
        self.rows = tuple(rows for rows in ladder if rows <= len(hidden))
        most = max(self.rows, default=0)
        self._chosen = hidden.new_zeros(most, hidden.shape[1])  # read by every head
        self._inputs = torch.zeros(SampleInputs.PACKED, most, dtype=torch.int64, device=hidden.device)
        self._heads: dict[int, torch.cuda.CUDAGraph] = {}  # by rows
        self._scores: dict[int, Scores] = {}
        self._draws: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}  # and has_cuts: ids [rows]

    def capture(self, rows: int) -> None:
        """The head of so many rows, and both its draws: those that cut by top_k or top_p, and those that do not."""

        def score() -> Scores:
            logits = self._model.logits(self._chosen[:rows])
            return Scores(logits, Prepared(Best.of(logits), partial(self._draw, rows)))

        self._heads[rows], self._scores[rows] = captured(score, self._memory)
        logits = self._scores[rows].logits
        inputs = SampleInputs.unpacked(self._inputs[:, :rows])
        for has_cuts in (False, True):
            self._draws[rows, has_cuts] = captured(partial(sample, logits, inputs, _route(has_cuts)), self._memory)

    def run(self, hidden: torch.Tensor, selected: torch.Tensor) -> Scores | None:
        """hidden [W, hidden], selected [R] i64 -> of the R rows, until any head runs again; None: too many rows."""
        count = len(selected)
        rows = next((rows for rows in self.rows if rows >= count), None)
        if rows is None:
            return None
        torch.index_select(hidden, 0, selected, out=self._chosen[:count])
        self._heads[rows].replay()
        return self._scores[rows].first(count)

    @torch.inference_mode()
    def _draw(self, rows: int, packed: torch.Tensor, has_cuts: bool) -> torch.Tensor:
        """Behind the head of `rows`. packed: i64[PACKED, R] -> i64[R]."""
        count = packed.shape[1]
        self._inputs[:, :count].copy_(packed)
        graph, ids = self._draws[rows, has_cuts]
        graph.replay()
        return ids[:count]
