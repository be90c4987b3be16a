"""The proof that a bound model is right, made at every load: its packed forward equals its own eager one.

Two short sequences run mixed over a small cell cache, cut in uneven pieces, beside a row that stands at the last
position the model is to serve; then each alone through transformers' own eager attention. Whatever else lets a row
depend on its neighbours (a convolution, a recurrence, frequencies chosen by the longest sequence, a position taken
from the axis) shows here, and so does anything that the head does beyond the hidden rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from cache.cell_cache import CellCache
from cache.geometry import CacheConfig
from static_graphs.binding import CELLS, use_attention
from static_graphs.load_errors import UnsupportedModel

if TYPE_CHECKING:
    from static_graphs.model import LoadedModel

_LENGTHS = (9, 6)
_PIECES = ((4, 2), (1, 1), (4, 3))
"""Tokens of each sequence in each step."""
_TOLERANCE = 1e-3
_LOW_PRECISION_TOLERANCE = 0.1


def prove(model: LoadedModel) -> None:
    """Raise UnsupportedModel where the packed forward is not the model's own. Leaves the model set to serve."""
    sequences = [[(17 * i + 5 * s) % (model.vocab_size - 3) + 3 for i in range(n)] for s, n in enumerate(_LENGTHS)]
    try:
        with torch.inference_mode():
            packed = _packed(model, sequences)
            expected = _eager(model, sequences)
    except UnsupportedModel:
        raise
    except Exception as error:  # a model's own code on input it was not written for
        raise UnsupportedModel(f"a packed step fails: {type(error).__name__}: {error}") from error
    scale = expected.abs().amax()
    errors = (packed - expected).abs().amax(dim=1) / scale  # [rows]
    # Rounding to 16 bits may turn a single row (an expert chosen by a hair); a fault turns them all.
    worst = float(errors.max() if model.dtype == torch.float32 else errors.median())
    limit = _TOLERANCE if model.dtype == torch.float32 else _LOW_PRECISION_TOLERANCE
    if not worst <= limit:
        raise UnsupportedModel(
            f"its rows depend on more than their own sequence's cells: "
            f"packed and eager logits differ by {worst:.2g} of their size, at most {limit:.2g} is rounding"
        )


def _packed(model: LoadedModel, sequences: list[list[int]]) -> torch.Tensor:
    """[rows, V] f32, sequence by sequence."""
    width = max(sum(pieces) for pieces in _PIECES) + 1
    cells = sum(_LENGTHS) + len(_PIECES)
    config = CacheConfig(cells, width, model.dtype, initial_cells=cells, max_sequences=len(sequences) + 1)
    cache = CellCache(model.geometry, config, model.device)
    ids = [cache.seq_new() for _ in sequences]
    neighbour = cache.seq_new()
    done = [0] * len(sequences)
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    for pieces in _PIECES:
        rows: list[tuple[int, int, int]] = [(neighbour, 3, model.max_model_len - 1)]  # (sequence, token, position)
        for s, count in enumerate(pieces):
            rows += [(ids[s], sequences[s][p], p) for p in range(done[s], done[s] + count)]
        cache.declare_step(np.array([row[0] for row in rows], dtype=np.int32))
        step = cache.prepare_step(len(rows))
        tokens = torch.tensor([row[1] for row in rows], device=model.device)
        positions = torch.tensor([row[2] for row in rows], device=model.device)
        logits = model.logits(model.hidden(tokens, positions, step)).float()
        cache.commit_step()
        at = 1
        for s, count in enumerate(pieces):
            found[s].append(logits[at : at + count])
            at, done[s] = at + count, done[s] + count
    return torch.cat([piece for pieces in found for piece in pieces])


def _eager(model: LoadedModel, sequences: list[list[int]]) -> torch.Tensor:
    """[rows, V] f32 of each sequence alone, by the module's whole forward."""
    use_attention(model.module, "eager")
    try:
        alone = [
            model.module(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0]
            for tokens in sequences
        ]
    finally:
        use_attention(model.module, CELLS)
    return torch.cat(alone).float()
