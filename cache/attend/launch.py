"""How every kernel here is launched: back to back on the device, where it can be told so.

On sm_90 a kernel may start while the one before it still runs (programmatic dependent launch). The rule that makes it
right: a kernel touches nothing that another kernel wrote, or may still read, before `gdc_wait`; and every program of
every kernel waits, also one that has nothing to do, so that the one behind it may rely on all that came before.
Weights are written by no kernel, so they are fetched ahead of the wait; a step's tables are older than the graph.

Counts of rows are arguments that no kernel is compiled anew for (`do_not_specialize`): a start captures dozens.

Products and attention let the next kernel in (`gdc_launch_dependents`) when their last loads are under way, not at
their start: programs that wait and fetch while others still stream make a step up to 2 % longer.
"""

# Triton is not typed, and a kernel's arguments are pointers and compile-time constants.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

LINE = tl.constexpr(64)
"""Elements that one request to the L2 cache brings: 128 bytes of 16-bit values."""


def overlapped(device: torch.device) -> dict[str, Any]:
    """The launch arguments of a kernel that has a PDL constexpr."""
    return {"PDL": True, "launch_pdl": True} if _overlaps(device) else {"PDL": False}


@functools.cache
def _overlaps(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def next_power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


@triton.jit
def fetch_ahead(pointers):
    """Ask for the lines of these addresses to be brought into the L2 cache: a hint, right whatever becomes of them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
