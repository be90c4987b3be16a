"""Lay a batch's chunks on one token axis. Pure; checks everything before the caller changes anything (PACK-*).

Whatever is wrong with a chunk concerns its session alone: that session is refused by name, none of its chunks is
packed, and the others stand (X-10). So a step launched behind a refusal that nobody has read yet is harmless too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.types import Chunk

LAST_TOKEN = -1
"""Stands for the session's last drawn token, where only the device knows it."""


class Slot(NamedTuple):
    """Where a session lives in the cache, read by `pack`."""

    seq_id: int
    position: int
    """Tokens it holds."""


@dataclass(frozen=True, slots=True)
class PackLimits:
    """What one session may bring."""

    max_session_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class PackedStep:
    """T tokens and R asked-for logits rows of one step."""

    tokens: npt.NDArray[np.int64]  # [T]; LAST_TOKEN = the sequence's last token, which only the device knows
    positions: npt.NDArray[np.int64]  # [T]
    seq_ids: npt.NDArray[np.int32]  # [T]
    selected: npt.NDArray[np.int64]  # [R] rows on the packed axis, any order; repeats allowed
    answers: npt.NDArray[np.int32]  # [R] chunk that asked
    draws: npt.NDArray[np.int32]  # [R] choice drawn from the row; -1 = its log probabilities alone are wanted
    rewinds: tuple[tuple[int, int], ...]  # (seq id, position) to rewind to before the step
    refusals: Mapping[int, str]  # session id -> why none of its chunks is in the step
    pooled: npt.NDArray[np.int64]  # [P] rows whose hidden states are handed out, ascending
    pooled_by: npt.NDArray[np.int32]  # [P] chunk that asked

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


def pack(
    chunks: Sequence[Chunk],
    slot_of: Callable[[int], Slot | None],
    limits: PackLimits,
    refused: Mapping[int, str] = MappingProxyType({}),
) -> PackedStep:
    """Pack `chunks` in their order.

    slot_of: session id -> its slot, None when unknown. refused: sessions that the caller rules out, and why.
    A chunk continues where its session, or its session's previous chunk in this batch, ends. A session's first chunk
    may begin earlier, at 0 too: that rewinds (PACK-4).
    """
    slots: dict[int, Slot] = {}
    rewinds: dict[int, tuple[int, int]] = {}  # by session
    refusals = dict(refused)
    cursors: dict[int, int] = {}
    for chunk in chunks:
        session_id = chunk.session_id
        if session_id in refusals:
            continue
        slot = slots.get(session_id) or slot_of(session_id)
        if slot is None:
            refusals[session_id] = f"session {session_id} is not open"
            continue
        cursor = cursors.get(session_id)
        reason = _why_refused(chunk, slot.position, cursor, limits)
        if reason is not None:
            refusals[session_id] = f"session {session_id} {reason}"
            continue
        if cursor is None:
            slots[session_id] = slot
            if chunk.position < slot.position:
                rewinds[session_id] = (slot.seq_id, chunk.position)
        cursors[session_id] = chunk.position + len(chunk.tokens)
    return _lay_out(chunks, slots, rewinds, refusals)


def select_rows(
    wanted: npt.NDArray[np.int64], offset: int, length: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Which of the `wanted` packed rows [R] a slice of `length` tokens at `offset` serves (EXE-14).

    -> (rows of the slice, indices into `wanted`), both in the order of `wanted`; -1 is wanted by no slice.
    """
    indices = np.flatnonzero((wanted >= offset) & (wanted < offset + length))
    return wanted[indices] - offset, indices


def _why_refused(chunk: Chunk, held: int, cursor: int | None, limits: PackLimits) -> str | None:
    """held: tokens of the session. cursor: where its previous chunk of the batch ends, None for its first."""
    tokens, start = chunk.tokens, chunk.position
    end = start + len(tokens)
    if len(tokens) == 1 and cursor is None and start == held < limits.max_session_tokens:  # most: one token behind all
        (token,) = tokens
        if LAST_TOKEN <= token < limits.vocab_size:
            return None
    if not tokens:
        return "brings no tokens"
    if end > limits.max_session_tokens:  # ahead of the gap: the steps behind one that was refused for this have both
        return f"would hold {end} tokens: the limit is {limits.max_session_tokens}"
    if start < 0 or start > (held if cursor is None else cursor):
        return f"holds {held if cursor is None else cursor} tokens: a chunk at {start} leaves a gap"
    if cursor is not None and start < cursor:
        return f"overlaps itself at {start} within one batch"
    # On a device an id past the embedding is a fault that ends the engine, so none reaches it.
    if min(tokens) < LAST_TOKEN or max(tokens) >= limits.vocab_size:
        outside = next(token for token in tokens if not LAST_TOKEN <= token < limits.vocab_size)
        return f"brings token id {outside}: this model's ids are 0 to {limits.vocab_size - 1}"
    return None


def _lay_out(
    chunks: Sequence[Chunk],
    slots: Mapping[int, Slot],
    rewinds: Mapping[int, tuple[int, int]],
    refusals: Mapping[int, str],
) -> PackedStep:
    packed = [(index, chunk) for index, chunk in enumerate(chunks) if chunk.session_id not in refusals]
    counts = np.array([len(chunk.tokens) for _, chunk in packed], np.int64)
    starts = counts.cumsum() - counts
    shifts = np.array([chunk.position for _, chunk in packed], np.int64) - starts
    owners = np.array([slots[chunk.session_id].seq_id for _, chunk in packed], np.int32)
    num_tokens = int(counts.sum())
    selected: list[int] = []
    answers: list[int] = []
    draws: list[int] = []
    pooled: list[int] = []
    pooled_by: list[int] = []
    for (index, chunk), offset, count in zip(packed, starts.tolist(), counts.tolist(), strict=True):
        if chunk.wanted_rows == "last" and chunk.draws == 1 and chunk.pooling is None:  # most
            selected.append(offset + count - 1)
            answers.append(index)
            draws.append(0)
            continue
        if chunk.wanted_rows == "all":
            num_targets = count if chunk.following_token >= 0 else count - 1
            selected.extend(range(offset, offset + num_targets))
            answers.extend([index] * num_targets)
            draws.extend([-1] * num_targets)
        if chunk.wanted_rows != "none":
            selected.extend([offset + count - 1] * chunk.draws)
            answers.extend([index] * chunk.draws)
            draws.extend(range(chunk.draws))
        if chunk.pooling is not None:
            num_pooled = count if chunk.pooling == "mean" else 1
            pooled.extend(range(offset + count - num_pooled, offset + count))
            pooled_by.extend([index] * num_pooled)
    return PackedStep(
        tokens=np.fromiter(chain.from_iterable(chunk.tokens for _, chunk in packed), np.int64, num_tokens),
        positions=np.arange(num_tokens) + np.repeat(shifts, counts),
        seq_ids=np.repeat(owners, counts),
        selected=np.array(selected, np.int64),
        answers=np.array(answers, np.int32),
        draws=np.array(draws, np.int32),
        rewinds=tuple(rewind for session_id, rewind in rewinds.items() if session_id not in refusals),
        refusals=refusals,
        pooled=np.array(pooled, np.int64),
        pooled_by=np.array(pooled_by, np.int32),
    )
