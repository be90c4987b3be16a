"""One forward over a cell cache: claim, run, and keep the claim or take it back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from cache.cell_cache import CellCache
from static_graphs.forwards import Forwards, Scores
from static_graphs.methods import StepSlice


def run_slice(
    forwards: Forwards,
    cache: CellCache,
    step_slice: StepSlice,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    seq_ids: npt.NDArray[np.int32],
    selected: torch.Tensor | None,
    on_hidden: Callable[[torch.Tensor], None] | None = None,
) -> Scores | None:
    """tokens, positions: [length] i64, device, of the slice alone; seq_ids [length].

    selected: [R] i64, device, the slice's rows whose logits are wanted; None: no row's.
    on_hidden: called with the body's hidden states [W, hidden] before the head runs.
    -> of the R rows, None where none is wanted. A forward that raises gives back exactly the cells it claimed; one that
    was launched keeps them.
    """
    cache.declare_step(seq_ids)
    step = cache.prepare_step(step_slice.width)
    try:
        scores = forwards.run(step_slice, tokens, positions, step, selected, on_hidden)
    except BaseException:
        cache.undo_step()
        raise
    cache.commit_step()
    return scores
