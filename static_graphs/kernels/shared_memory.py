"""How deep a product's pipeline may be: each stage holds a block of its operands in a multiprocessor's shared memory.

Tilings are measured on an H200, where a program may have 227 KB. An A100 gives it 163, an L4 or an RTX 4090 99: there
the same kernel is launched with fewer stages instead of not at all.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

_READS_SHARED = (9, 10)
"""Major compute capabilities whose matrix units read their operands in shared memory: a stage stays until it is used.
Others read registers, and the stage that is being used is in those."""


@dataclass(frozen=True, slots=True)
class Room:
    """What a program has on one device."""

    shared_bytes: int
    capability: tuple[int, int]

    def stages(self, wanted: int, stage_bytes: int, *, is_exact: bool = False) -> int:
        """Of `wanted` stages so many as fit, one at least. is_exact: float32, for which no matrix unit is used."""
        spare = 0 if self.capability[0] in _READS_SHARED and not is_exact else 1
        return max(1, min(wanted, self.shared_bytes // stage_bytes + spare))


@functools.cache
def room_of(device: torch.device) -> Room:
    """On a CPU kernels are interpreted, and everything fits."""
    if device.type != "cuda":
        return Room(1 << 40, (0, 0))
    known = torch.cuda.get_device_properties(device)
    shared: int = getattr(known, "shared_memory_per_block_optin", known.shared_memory_per_block)
    return Room(shared, (known.major, known.minor))
