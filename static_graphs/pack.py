"""Packs linear weights for the CPU: each in the blocked order that oneDNN's products read, laid out once at load.

torch's own `linear` keeps weights as the checkpoint has them, and at the few rows of a decode step spends most of its
time bringing them into that order. Numbers: BENCHMARKS.md. A module keeps its place and its name in the tree, so this
works for whatever architecture calls a plain `nn.Linear`; all else is left alone.

The operators are those that torch's compiler emits for frozen CPU models; where a build of torch lacks them, or a dtype
that they take, nothing is packed and serving is right, only slower.
"""

from __future__ import annotations

import torch
from torch import nn

from static_graphs.model import LoadedModel

HINT_ROWS = 32
"""Rows that the layout is chosen for. Measured: no better choice for 1 or for 512 rows."""


class PackedLinear(nn.Module):
    """An `nn.Linear` whose weight exists in packed form alone."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), HINT_ROWS)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return product

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pack_linears(model: LoadedModel) -> int:
    """Replace every plain linear of the model by its packed form, in place. -> how many; 0 where this does not apply.

    A weight that is an embedding too stays for the embedding, so it is there twice.
    """
    if not can_pack(model.device, model.dtype):
        return 0
    packed: dict[int, PackedLinear] = {}
    for root in (model.body, model.head):
        for parent in root.modules():
            for name, child in parent.named_children():
                # Subclasses have a forward of their own.
                if type(child) is not nn.Linear or child.weight.dtype != model.dtype:
                    continue
                if id(child) not in packed:
                    packed[id(child)] = PackedLinear(child)
                parent._modules[name] = packed[id(child)]
    return len(packed)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch has packed products of `dtype` for `device`."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight") or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
