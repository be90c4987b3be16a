"""What fuse.py puts in the place of a layer and its parts: the same functions of rows, in fewer kernels.

A product leaves its parts [parts, R, N] unadded: whoever reads them adds them as it loads, with the residual or the
bias in the same pass. Eight kernels a layer for a few rows:

    q/k/v product -> norm heads, rotate, store K/V -> attend -> output product -> add, norm
                  -> gated product -> down product -> add, norm (the next layer's first)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from cache.attend import attend_stored
from cache.step import CellStep
from static_graphs.binding import BoundLayer
from static_graphs.kernels.norms import RmsNorm, add_norm, gate_by, rms_norm
from static_graphs.kernels.products import gated_product, product
from static_graphs.kernels.rotary import rotate_and_store
from static_graphs.tilings import RULE, Product, Tilings


class FusedLinear:
    """x [R, K] -> [parts, R, N] to be added by the reader, without the bias."""

    def __init__(self, weight: torch.Tensor, tilings: Tilings = RULE) -> None:
        self.weight = weight
        self.tilings = tilings

    @property
    def product(self) -> Product:
        return Product(*self.weight.shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        tiling = self.tilings.choose(x.shape[0], *self.weight.shape, bits=8 * self.weight.element_size())
        return functional.linear(x, self.weight)[None] if tiling is None else product(x, self.weight, tiling)


class FusedMlp:
    """x [R, K] -> [parts, R, K]."""

    def __init__(self, merged: torch.Tensor, down: torch.Tensor, activation: str, tilings: Tilings = RULE) -> None:
        self.merged = merged  # [2 * N, K]: gate, up
        self.down = FusedLinear(down, tilings)
        self.activation = activation
        self.tilings = tilings

    @property
    def products(self) -> tuple[Product, ...]:
        width, depth = self.merged.shape
        return Product(width // 2, depth, is_gated=True, is_whole=True), self.down.product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        width = self.merged.shape[0] // 2
        tiling = self.tilings.choose(x.shape[0], width, self.merged.shape[1], gated=True)
        if tiling is None:
            inner = gate_by(functional.linear(x, self.merged), self.activation)
        else:
            inner = gated_product(x, self.merged[:width], self.merged[width:], self.activation, tiling)
        return self.down(inner)


class FusedAttention:
    """hidden [R, K] -> [parts, R, K], the rows' K/V stored in the step's cells."""

    def __init__(
        self,
        bound: BoundLayer,
        merged: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        query_norm: RmsNorm | None,
        key_norm: RmsNorm | None,
        options: dict[str, Any],
        tilings: Tilings = RULE,
    ) -> None:
        self.bound = bound
        self.merge = FusedLinear(merged, tilings)
        self.bias = bias
        self.out = FusedLinear(out, tilings)
        self.query_norm = query_norm
        self.key_norm = key_norm
        self.options = options  # scale, softcap and sinks of attend_stored

    @property
    def products(self) -> tuple[Product, ...]:
        return self.merge.product, self.out.product

    def __call__(
        self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], step: CellStep
    ) -> torch.Tensor:
        layer, reach = self.bound.layer, self.bound.reach
        cos, sin = rotation
        query = rotate_and_store(
            self.merge(hidden),
            cos[0],
            sin[0],
            step.pool.keys[layer],
            step.pool.values[layer],
            step.rings.get(reach, step).write_rows,
            bias=self.bias,
            query_norm=self.query_norm,
            key_norm=self.key_norm,
            scales=step.pool.scales[layer],
        )
        seen = attend_stored(query, layer, step, reach=reach, **self.options)
        return self.out(seen.flatten(1))


class Flow:
    """What one layer left for the next: its output, already normed as the next layer's first norm would.

    Handed on only to who is called with that very output.
    """

    def __init__(self) -> None:
        self._left: tuple[torch.Tensor, torch.Tensor] | None = None  # one value: launches on threads may meet here

    def leave(self, output: torch.Tensor, normed: torch.Tensor) -> None:
        self._left = output, normed

    def take(self, given: torch.Tensor) -> torch.Tensor | None:
        """[R, N], or None where `given` is not the tensor that was left. Nothing is kept after it."""
        left, self._left = self._left, None
        return left[1] if left is not None and left[0] is given else None


class FusedLayer:
    """A decoder layer: [1, W, N] -> [1, W, N]."""

    def __init__(
        self,
        first: RmsNorm,
        attention: FusedAttention,
        second: RmsNorm,
        mlp: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.first = first
        self.attention = attention
        self.second = second
        self.mlp = mlp
        self.following: RmsNorm | None = None
        """The norm that the output's one reader begins with, where that is fused too."""
        self.flow = Flow()

    def __call__(
        self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], step: CellStep
    ) -> torch.Tensor:
        rows = hidden[0]
        normed = self.flow.take(hidden)
        if normed is None:
            normed = rms_norm(rows, self.first)
        rows, normed = add_norm(self.attention(normed, rotation, step), rows, self.second)
        assert normed is not None
        rows, normed = add_norm(self.mlp(normed), rows, self.following)
        output = rows[None]
        if normed is not None:
            self.flow.leave(output, normed)
        return output
