"""The proof that a bound model is right, made at every load: its packed forward equals its own eager one.

Two short sequences run mixed over a small cell cache, cut in uneven pieces, beside a row that stands at the last
position the model is to serve; then each alone through transformers' own eager attention. Whatever else lets a row
depend on its neighbours (a convolution, a recurrence, frequencies chosen by the longest sequence, a position taken
from the axis) shows here, and so does anything that the head does beyond the hidden rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from cache.cell_cache import CellCache
from cache.geometry import CacheConfig
from static_graphs.binding import CELLS, use_attention
from static_graphs.load_errors import UnsupportedModel

if TYPE_CHECKING:
    from static_graphs.model import LoadedModel

# Tokens of each of two sequences in each step.
_PIECES = ((4, 2), (1, 1), (4, 3))
_TOLERANCE = 1e-3
_LOW_PRECISION_TOLERANCE = 0.1


def prove(model: LoadedModel, own: torch.Tensor | None = None) -> None:
    """Raise UnsupportedModel where the packed forward is not the model's own. Leaves the model set to serve.

    own: what `own_logits` gave earlier, where the module was changed since.
    """
    try:
        errors = row_errors(model, _PIECES, own)
    except UnsupportedModel:
        raise
    except Exception as error:  # a model's own code on input it was not written for
        raise UnsupportedModel(f"a packed step fails: {type(error).__name__}: {error}") from error
    # Rounding to 16 bits may turn a single row (an expert chosen by a hair); a fault turns them all.
    worst = float(errors.max() if model.dtype == torch.float32 else errors.median())
    limit = _TOLERANCE if model.dtype == torch.float32 else _LOW_PRECISION_TOLERANCE
    if not worst <= limit:
        raise UnsupportedModel(
            f"its rows depend on more than their own sequence's cells and positions: "
            f"packed and eager logits differ by {worst:.2g} of their size, at most {limit:.2g} is rounding"
        )


def own_logits(model: LoadedModel) -> torch.Tensor:
    """[rows, V] f32: the module's own logits of the proof's sequences."""
    with torch.inference_mode():
        return _eager(model, _sequences(model, _PIECES))


def row_errors(model: LoadedModel, pieces: Sequence[tuple[int, ...]], own: torch.Tensor | None = None) -> torch.Tensor:
    """[rows] f32: how far each row's packed logits lie from its eager ones, as a share of the largest logit.

    pieces: for each step, how many tokens of each sequence it holds.
    """
    sequences = _sequences(model, pieces)
    with torch.inference_mode():
        packed = _packed(model, sequences, pieces)
        expected = _eager(model, sequences) if own is None else own
    return (packed - expected).abs().amax(dim=1) / expected.abs().amax()


def _sequences(model: LoadedModel, pieces: Sequence[tuple[int, ...]]) -> list[list[int]]:
    lengths = [sum(counts) for counts in zip(*pieces, strict=True)]
    return [[(17 * i + 5 * s) % (model.vocab_size - 3) + 3 for i in range(n)] for s, n in enumerate(lengths)]


def _packed(model: LoadedModel, sequences: list[list[int]], pieces: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """[rows, V] f32, sequence by sequence."""
    width = max(sum(counts) for counts in pieces) + 1
    cells = sum(len(tokens) for tokens in sequences) + len(pieces)
    config = CacheConfig(cells, width, model.dtype, initial_cells=cells, max_sequences=len(sequences) + 1)
    cache = CellCache(model.geometry, config, model.device)
    try:
        return _run(model, cache, sequences, pieces)
    finally:
        cache.close()


def _run(
    model: LoadedModel, cache: CellCache, sequences: list[list[int]], pieces: Sequence[tuple[int, ...]]
) -> torch.Tensor:
    ids = [cache.seq_new() for _ in sequences]
    neighbour = cache.seq_new()
    done = [0] * len(sequences)
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    for counts in pieces:
        rows: list[tuple[int, int, int]] = [(neighbour, 3, model.max_model_len - 1)]  # (sequence, token, position)
        for s, count in enumerate(counts):
            rows += [(ids[s], sequences[s][p], p) for p in range(done[s], done[s] + count)]
        cache.declare_step(np.array([row[0] for row in rows], dtype=np.int32))
        step = cache.prepare_step(len(rows))
        tokens = torch.tensor([row[1] for row in rows], device=model.device)
        positions = torch.tensor([row[2] for row in rows], device=model.device)
        logits = model.logits(model.hidden(tokens, positions, step)).float()
        cache.commit_step()
        at = 1
        for s, count in enumerate(counts):
            found[s].append(logits[at : at + count])
            at, done[s] = at + count, done[s] + count
    return torch.cat([piece for sequence in found for piece in sequence])


def _eager(model: LoadedModel, sequences: list[list[int]]) -> torch.Tensor:
    """[rows, V] f32 of each sequence alone, by the module's whole forward and with positions that it numbers itself."""
    use_attention(model.module, "eager")
    try:
        alone = []
        for tokens in sequences:
            ids = torch.tensor([tokens], device=model.device)
            alone.append(model.module(input_ids=ids, use_cache=False).logits[0])
        numbered = torch.arange(len(sequences[-1]), device=model.device)[None]
        again = model.module(input_ids=ids, position_ids=numbered, use_cache=False).logits[0]
    finally:
        use_attention(model.module, CELLS)
    if not torch.allclose(alone[-1], again, atol=1e-3 * float(again.abs().max())):
        raise UnsupportedModel("it does not number a sequence's positions from 0")
    return torch.cat(alone).float()
