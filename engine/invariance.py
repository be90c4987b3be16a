"""The proof, made at every batch-invariant start, that a row's logits do not depend on its step nor on its place there.

One sequence runs whole, then cut in two at several places: its rows stand elsewhere among others, beside padding, and
read what an earlier step stored. Products whose tiles differ within one call (a sum over the depth that is divided for
some rows only), parts that were left as transformers wrote them, attention: all of it shows as a bit that differs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cache.cell_cache import CellCache
from engine.errors import ModelError
from engine.slices import run_slice
from static_graphs.forwards import Forwards
from static_graphs.methods import plan_slices


def prove_invariant(forwards: Forwards, cache: CellCache, device: torch.device, *, longest: int) -> None:
    """longest: tokens that a sequence may have. Nothing of it stays in the cache or is counted. Engine thread only.

    Raises ModelError where a bit of a row's logits differs.
    """
    length = min(forwards.methods[-1].max_tokens, longest)
    tokens = torch.arange(3, 3 + length, device=device) * 17 % forwards.vocab_size
    whole = _logits(forwards, cache, tokens, [length])
    for first in sorted({1, length // 2, length - 1} - {0, length}):
        cut = _logits(forwards, cache, tokens, [first, length - first])
        differing = int((_bits(cut) != _bits(whole)).any(dim=1).sum())
        if differing:
            raise ModelError(
                f"it cannot be served with batch_invariant: {differing} of {length} rows have other logits where their "
                f"prompt is cut at {first}. Leave batch_invariant out, or try another width (widths) or dtype"
            )
    forwards.forget_calls()
    if device.type == "cuda":  # logits of a whole step, several times: the pool grows into what torch does not keep
        del whole, cut
        torch.cuda.empty_cache()


def _logits(forwards: Forwards, cache: CellCache, tokens: torch.Tensor, pieces: Sequence[int]) -> torch.Tensor:
    """[tokens, V] of one sequence that runs in so many steps, of so many tokens each."""
    sequence = cache.seq_new()
    found: list[torch.Tensor] = []
    at = 0
    try:
        for count in pieces:
            (only,) = plan_slices(count, forwards.methods)
            positions = torch.arange(at, at + count, device=tokens.device)
            rows = torch.arange(count, device=tokens.device)
            owners = np.full(count, sequence, np.int32)
            scores = run_slice(forwards, cache, only, tokens[at : at + count], positions, owners, rows)
            assert scores is not None
            found.append(scores.logits.clone())  # a captured head writes the same memory again
            at += count
    finally:
        cache.seq_rm(sequence)
    return torch.cat(found)


def _bits(logits: torch.Tensor) -> torch.Tensor:
    """The same as integers, so that NaN equals itself."""
    return logits.view(torch.int32 if logits.dtype == torch.float32 else torch.int16)
