"""Fixes at load the rotary frequencies that transformers would choose anew in every forward.

longrope and dynamic NTK look at the largest position on the packed axis, so a long neighbour would change a row. Both
are read off the module's `rope_type` by one decorator of transformers; a module whose frequencies are in place and
whose type reads "default" is left alone by it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from static_graphs.load_errors import UnsupportedModel


def fix_frequencies(module: torch.nn.Module, max_model_len: int) -> None:
    """longrope takes its long set iff `max_model_len` passes the original length; dynamic NTK is refused above it."""
    for name, part in module.named_modules():
        kinds = getattr(part, "rope_type", None)
        if isinstance(kinds, str):
            part.rope_type = _fix(part, name, kinds, None, max_model_len)
        elif isinstance(kinds, dict):
            part.rope_type = {
                layer_type: _fix(part, name, kind, layer_type, max_model_len) for layer_type, kind in kinds.items()
            }


def _fix(part: Any, name: str, kind: str, layer_type: str | None, max_model_len: int) -> str:
    """The type that stands for frequencies which no forward changes."""
    if kind == "longrope":
        _choose_longrope(part, layer_type, max_model_len)
        return "default"
    if "dynamic" in kind:
        original = int(part.original_max_seq_len)
        if max_model_len > original:
            raise UnsupportedModel(
                f"{name} scales its rotary frequencies with the longest sequence of a batch above {original} tokens: "
                f"a neighbour would change a row. max_model_len is {max_model_len}, it can be at most {original}"
            )
        return "default"
    return kind


def _choose_longrope(part: Any, layer_type: str | None, max_model_len: int) -> None:
    parameters = part.config.rope_parameters
    original = int((parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"])
    prefix = "" if layer_type is None else f"{layer_type}_"
    frequencies: torch.Tensor = getattr(part, f"{prefix}inv_freq")
    length = original + 1 if max_model_len > original else original
    chosen, _ = ROPE_INIT_FUNCTIONS["longrope"](part.config, frequencies.device, seq_len=length, layer_type=layer_type)
    frequencies.copy_(chosen)
