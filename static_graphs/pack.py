"""Packs linear weights for the CPU: each in the blocked order that oneDNN's products read, laid out once at load.

torch's own `linear` keeps weights as the checkpoint has them, and at the few rows of a decode step spends most of its
time bringing them into that order. Numbers: BENCHMARKS.md. A module keeps its place and its name in the tree, so this
works for whatever architecture calls a plain `nn.Linear`; all else is left alone. Siblings that a model gives the same
rows (q, k and v; gate and up) are one product.

The operators are those that torch's compiler emits for frozen CPU models; where a build of torch lacks them, or a dtype
that they take, nothing is packed and serving is right, only slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch
from torch import nn

from static_graphs.model import LoadedModel

HINT_ROWS = 32
"""Rows that the layout is chosen for. Measured: no better choice for 1 or for 512 rows."""
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names under one parent that are merged where they all are plain linears of one input width. A part that is given
another tensor than its siblings computes the product for itself. Trap: a model that changed one tensor in place between
the siblings' calls would get the product of what it was before; no model type of ARCHITECTURES.md is known to."""


class Product:
    """Rows times one packed weight, or several merged ones: each part is asked for by its own module.

    The first part asked for computes all; the last one taken lets go of the result. Engine thread only.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._sizes = [linear.out_features for linear in linears]
        weight = torch.cat([linear.weight.detach() for linear in linears]) if len(linears) > 1 else linears[0].weight
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), HINT_ROWS)
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._rows: torch.Tensor | None = None
        self._left: dict[int, torch.Tensor] = {}

    def take(self, rows: torch.Tensor, part: int) -> torch.Tensor:
        """rows [..., in] -> [..., out] of the part."""
        if rows is not self._rows or part not in self._left:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
            if len(self._sizes) == 1:
                return product
            self._rows, self._left = rows, dict(enumerate(torch.split(product, self._sizes, dim=-1)))
        taken = self._left.pop(part)
        if not self._left:
            self._rows = None
        return taken


class PackedLinear(nn.Module):
    """An `nn.Linear` whose weight exists in packed form alone, its own or merged with its siblings'."""

    def __init__(self, linear: nn.Linear, product: Product, part: int = 0) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self._product = product
        self._part = part

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        return self._product.take(rows, self._part)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pack_linears(model: LoadedModel) -> int:
    """Replace every plain linear of the model by its packed form, in place. -> how many; 0 where this does not apply.

    A weight that is an embedding too stays for the embedding, so it is there twice.
    """
    if not can_pack(model.device, model.dtype):
        return 0
    packed: dict[nn.Linear, PackedLinear] = {}
    for root in (model.body, model.head):
        for parent in list(root.modules()):
            linears = {name: child for name, child in parent.named_children() if _is_plain(child, model.dtype)}
            for names in _groups(linears):
                group = [linears[name] for name in names]
                if group[0] not in packed:
                    product = Product(group)
                    packed.update({one: PackedLinear(one, product, part) for part, one in enumerate(group)})
                for name, one in zip(names, group, strict=True):
                    parent._modules[name] = packed[one]
    return len(packed)


def _is_plain(module: nn.Module, dtype: torch.dtype) -> TypeGuard[nn.Linear]:
    """Subclasses have a forward of their own."""
    return type(module) is nn.Linear and module.weight.dtype == dtype


def _groups(linears: Mapping[str, nn.Linear]) -> list[tuple[str, ...]]:
    """Names whose weights become one product: siblings where all are there and agree, every other one alone."""
    merged = [
        names
        for names in SIBLINGS
        if all(name in linears for name in names)
        and len({(linears[name].in_features, linears[name].bias is None) for name in names}) == 1
    ]
    taken = {name for names in merged for name in names}
    return merged + [(name,) for name in linears if name not in taken]


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch has packed products of `dtype` for `device`."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight") or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
