"""Taps: hidden states of chosen decoder layers, copied behind each layer into one buffer that never moves.

What a draft model or an embedding needs of the inside of a forward. The copy is a forward hook, so it is part of
whatever runs the layers: an eager forward, or a graph that was captured after the hooks were set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class Taps:
    """Hooks on one model's body, and the buffer they fill. Engine thread only.

    buffer: [widest, k * hidden] in the model's dtype; column block i is the output of `layers[i]`.
    """

    def __init__(self, body: torch.nn.Module, layers: Sequence[int], widest: int) -> None:
        """Raises ValueError naming a layer that the body does not have."""
        found = decoder_layers(body)
        for layer in layers:
            if not 0 <= layer < len(found):
                raise ValueError(f"layer {layer} cannot be tapped: the model has layers 0 to {len(found) - 1}")
        self._num_layers = len(layers)
        self._widest = widest
        self._is_recording = False
        self._buffer: torch.Tensor | None = None  # made by the first forward, which knows the size of a hidden state
        self._hooks = [
            found[layer].register_forward_hook(lambda _, __, output, block=block: self._copy(output, block))
            for block, layer in enumerate(layers)
        ]

    def rows(self, width: int) -> torch.Tensor:
        """[width, k * hidden], a view: what the last forward of that width wrote, its padding rows included."""
        assert self._buffer is not None, "no forward has run"
        return self._buffer[:width]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """The forwards within are ours; others of the same model, an executor's beside us, leave the buffer alone."""
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def close(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def _copy(self, output: Any, block: int) -> None:
        if not self._is_recording:
            return
        hidden: torch.Tensor = (output[0] if isinstance(output, tuple) else output)[0]  # [W, hidden]
        width, size = hidden.shape
        if self._buffer is None:
            with torch.inference_mode(False):  # else nobody could write to it outside of that mode
                self._buffer = hidden.new_zeros(self._widest, self._num_layers * size)
        self._buffer[:width, block * size : (block + 1) * size].copy_(hidden)


def decoder_layers(body: torch.nn.Module) -> torch.nn.ModuleList:
    """The list of the body's layers: the outermost one whose every entry has an attention bound to cells in it."""
    for part in body.modules():
        if isinstance(part, torch.nn.ModuleList) and len(part) and all(map(_attends, part)):
            return part
    raise ValueError(f"{type(body).__name__} keeps its layers in no list: none of them can be tapped")


def _attends(layer: torch.nn.Module) -> bool:
    return any(hasattr(part, "cell_layer") for part in layer.modules())
