"""Whether a failure is one step's, or the end of the device and of every tensor on it.

A kernel that fails is told of by whatever asks the device next, in its own words: torch raises AcceleratorError, cuBLAS
and Triton a RuntimeError like any other. So the device is asked.
"""

from __future__ import annotations

import torch

from engine.errors import DeviceLost


def check_device(device: torch.device, error: Exception) -> None:
    """Raise DeviceLost, if that is what `error` comes of; waits for the device. Engine thread only.

    Memory that ran out is a step's own business, whoever says so: what asks for pinned memory raises AcceleratorError.
    """
    if isinstance(error, torch.AcceleratorError) and "out of memory" not in str(error):
        raise DeviceLost(f"the device is lost: {error}") from error
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as lost:
        raise DeviceLost(f"the device is lost: {lost}") from error
