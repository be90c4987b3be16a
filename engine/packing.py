"""Lay a batch's chunks on one token axis. Pure; checks everything before the caller changes anything (PACK-*)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.types import Chunk


class PackingError(ValueError):
    """The batch does not continue its sessions as it must; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a session lives in the cache, read by `pack`."""

    seq_id: int
    position: int
    """Tokens it holds."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    """T tokens and R asked-for logits rows of one step."""

    tokens: npt.NDArray[np.int64]  # [T]; -1 = the sequence's last token, which only the device knows
    positions: npt.NDArray[np.int64]  # [T]
    seq_ids: npt.NDArray[np.int32]  # [T]
    selected: npt.NDArray[np.int64]  # [R] rows on the packed axis, ascending; repeats allowed
    answers: npt.NDArray[np.int32]  # [R] chunk that asked
    draws: npt.NDArray[np.int32]  # [R] choice drawn from the row; -1 = its log probabilities alone are wanted
    rewinds: tuple[tuple[int, int], ...]  # (seq id, position) to rewind to before the step


def pack(chunks: Sequence[Chunk], slot_of: Callable[[int], Slot | None], max_session_tokens: int) -> PackedStep:
    """Pack `chunks` in their order.

    slot_of: session id -> its slot, None when unknown.
    A chunk continues where its session, or its session's previous chunk in this batch, ends. A session's first chunk
    may begin earlier, at 0 too: that rewinds (PACK-4). Raises PackingError naming session and numbers.
    """
    tokens: list[int] = []
    positions: list[int] = []
    seq_ids: list[int] = []
    selected: list[int] = []
    answers: list[int] = []
    draws: list[int] = []
    rewinds: list[tuple[int, int]] = []
    cursors: dict[int, int] = {}
    for index, chunk in enumerate(chunks):
        slot = slot_of(chunk.session_id)
        if slot is None:
            raise PackingError(f"session {chunk.session_id} is not open")
        count, start = len(chunk.tokens), chunk.position
        if count == 0:
            raise PackingError(f"session {chunk.session_id} brings no tokens")
        cursor = cursors.get(chunk.session_id, slot.position)
        if start < 0 or start > cursor:
            raise PackingError(f"session {chunk.session_id} holds {cursor} tokens: a chunk at {start} leaves a gap")
        if start < cursor:
            if chunk.session_id in cursors:
                raise PackingError(f"session {chunk.session_id} overlaps itself at {start} within one batch")
            rewinds.append((slot.seq_id, start))
        end = start + count
        if end > max_session_tokens:
            raise PackingError(f"session {chunk.session_id} would hold {end} tokens: the limit is {max_session_tokens}")
        cursors[chunk.session_id] = end
        offset = len(tokens)
        tokens.extend(chunk.tokens)
        positions.extend(range(start, end))
        seq_ids.extend([slot.seq_id] * count)
        if chunk.wanted_rows == "all":
            num_targets = count if chunk.following_token >= 0 else count - 1
            selected.extend(range(offset, offset + num_targets))
            answers.extend([index] * num_targets)
            draws.extend([-1] * num_targets)
        if chunk.wanted_rows != "none":
            selected.extend([offset + count - 1] * chunk.draws)
            answers.extend([index] * chunk.draws)
            draws.extend(range(chunk.draws))
    return PackedStep(
        tokens=np.array(tokens, np.int64),
        positions=np.array(positions, np.int64),
        seq_ids=np.array(seq_ids, np.int32),
        selected=np.array(selected, np.int64),
        answers=np.array(answers, np.int32),
        draws=np.array(draws, np.int32),
        rewinds=tuple(rewinds),
    )
