"""Small host arrays to the device without waiting for it. Engine thread only.

Only pinned memory is read by a copy that the host does not wait for: a pageable array would hold the engine up until
every step launched before has run, and nothing would overlap (D7).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array on `device`, in the order of the current stream. On the CPU it shares the array's memory.

    torch keeps the pinned buffer until the copy has run.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def upload_integers(device: torch.device, *arrays: npt.NDArray[Any]) -> tuple[torch.Tensor, ...]:
    """One-dimensional arrays of integers as i64, all in one copy."""
    ends = np.cumsum([0, *(len(array) for array in arrays)]).tolist()
    together = upload(np.concatenate(arrays, dtype=np.int64), device)
    return tuple(together[start:end] for start, end in pairwise(ends))
