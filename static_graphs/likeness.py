"""Whether a part of a model computes what it is taken for, by running it on random rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

ROWS = 8
SCALES = (1.0, 1e-2, 30.0)
"""Sizes of random input that parts are tried at: an eps shows at the small one, a clamp at the large one."""

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda gate: functional.gelu(gate, approximate="tanh"),
}
"""Those that the kernels have, by plain torch."""


def random_rows(shape: tuple[int, ...], scale: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The same at every call. The mean is not 0: what subtracts it is found out."""
    generator = torch.Generator(device).manual_seed(1)
    values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    return (scale * (values + 0.5)).to(dtype)


def same(
    part: nn.Module,
    expected: Callable[[torch.Tensor], torch.Tensor],
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether `part` computes `expected` of rows [1, R, width] of any size."""
    for scale in SCALES:
        x = random_rows((1, ROWS, width), scale, dtype, device)
        try:
            found = part(x)
        except (TypeError, RuntimeError):
            return False
        if not isinstance(found, torch.Tensor) or not close(found, expected(x)):
            return False
    return True


def close(found: torch.Tensor, expected: torch.Tensor, limit_of_16_bits: float = 2e-2) -> bool:
    """Equal but for rounding: float32 to 1e-4, 16 bits to 2 % of the tensor's size, or what else is said."""
    if found.shape != expected.shape:
        return False
    limit = 1e-4 if found.dtype == torch.float32 else limit_of_16_bits
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    return bool(error <= limit)
