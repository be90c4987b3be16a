"""Gather and scatter between pool rows and staging on CUDA, in Triton: one launch a kernel group. Equal to `gather`.

    program (side and layer, block of slots, batch slot)

A program reads its layer's address from the group's pointer table and its slots' pool rows from the row list, and
copies rows as words of up to 8 bytes; a copy knows no dtype, so the interpreter gets bfloat16 right here. Run under
the interpreter only so far: speed on a device, and how many multiprocessors a copy should take, are unmeasured.
"""

# Triton is not typed, and a kernel's arguments are pointers and compile-time constants.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cache.offload.groups import KernelGroup
from cache.offload.staging import Staging

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
BLOCK_SLOTS = 16
MAX_BLOCK_WORDS = 256


def copy_rows(
    staging: Staging, group: KernelGroup, pointers: torch.Tensor, rows: torch.Tensor, first: int, *, is_gather: bool
) -> None:
    """Copy the group's rows of a batch of chunks, pool -> staging if `is_gather`, else the other way.

    pointers: the group's `pointer_table`. rows: [batch, slots kept] i64, last dimension contiguous; chunk i of the
    batch is in batch slot first + i. All on the pool's device; on the current stream.
    """
    batch, slots = rows.shape
    word = next(word for word in WORDS if group.row_bytes % word.itemsize == 0)
    row_words = group.row_bytes // word.itemsize
    region = staging.kernel_region(first, group.index)
    _copy_rows[(group.kv * len(group.layers), triton.cdiv(slots, BLOCK_SLOTS), batch)](
        pointers,
        staging.buffer.view(word),
        rows,
        region.offset // word.itemsize,
        staging.chunk_bytes // word.itemsize,
        rows.stride(0),
        slots,
        ROW_WORDS=row_words,
        BLOCK_SLOTS=BLOCK_SLOTS,
        BLOCK_WORDS=min(MAX_BLOCK_WORDS, triton.next_power_of_2(row_words)),
        WORD={torch.int64: tl.int64, torch.int32: tl.int32, torch.int16: tl.int16, torch.uint8: tl.uint8}[word],
        IS_GATHER=is_gather,
        num_warps=4,
    )


@triton.jit
def _copy_rows(
    pointers,  # [kv * layers] i64 addresses
    staging,  # words of the whole buffer
    rows,  # [batch, slots] i64 pool rows
    region,  # words before the group's region in the first batch slot
    chunk_words,  # words from one batch slot to the next
    rows_stride,
    num_slots,
    ROW_WORDS: tl.constexpr,  # noqa: N803
    BLOCK_SLOTS: tl.constexpr,  # noqa: N803
    BLOCK_WORDS: tl.constexpr,  # noqa: N803
    WORD: tl.constexpr,  # noqa: N803
    IS_GATHER: tl.constexpr,  # noqa: N803
):
    plane = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    slots = tl.program_id(1) * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
    is_slot = slots < num_slots
    pool = tl.load(pointers + plane).to(tl.pointer_type(WORD))
    row = tl.load(rows + batch * rows_stride + slots, mask=is_slot, other=0)
    pooled = pool + (row * ROW_WORDS)[:, None]
    staged = staging + region + batch * chunk_words + ((plane * num_slots + slots) * ROW_WORDS)[:, None]
    for start in range(0, ROW_WORDS, BLOCK_WORDS):
        words = (start + tl.arange(0, BLOCK_WORDS))[None, :]
        mask = is_slot[:, None] & (words < ROW_WORDS)
        if IS_GATHER:
            tl.store(staged + words, tl.load(pooled + words, mask=mask), mask=mask)
        else:
            tl.store(pooled + words, tl.load(staged + words, mask=mask), mask=mask)
