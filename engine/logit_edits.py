"""Bias, penalties and masks: what changes a row's logits before temperature (spec api 4.3's first three steps).

Owns, on the device, what grows as tokens are drawn: counts for penalties and the last tokens for bad words. Both are
updated from the drawn ids where they are, so the next step may be launched before anyone has read this one's. They hold
a row only for slots that need one. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.types import SamplingParams
from engine.uploads import upload

_NEVER = -100.0
"""A logit_bias this low is a ban."""
_NO_TOKEN = -1
_ANY_TOKEN = -2


@dataclass(frozen=True, slots=True)
class SlotEdits:
    """One slot's fixed edits, as data. Ids are checked against the vocabulary when it is made."""

    bias_ids: NDArray[np.int64]
    bias: NDArray[np.float32]
    banned_ids: NDArray[np.int64]
    """Single-token bad words and biases of -100 and less."""
    allowed_ids: NDArray[np.int64] | None
    words: tuple[tuple[int, ...], ...]
    """Bad words of several tokens."""
    stop_ids: NDArray[np.int64]
    """Banned while the drawn token's position is below `stops_from`."""
    stops_from: int
    repetition: float
    frequency: float
    presence: float

    @classmethod
    def of(cls, params: SamplingParams, prompt_length: int, vocab_size: int) -> SlotEdits:
        """Raises ValueError naming the field and the id that is outside the vocabulary."""
        if not _edits_anything(params):  # most requests: a burst of them is opened within one turn
            return _NO_EDITS
        bias = dict(params.logit_bias)
        fields = {
            "logit_bias": list(bias),
            "allowed_token_ids": list(params.allowed_token_ids or ()),
            "bad_words": [token_id for word in params.bad_words for token_id in word],
        }
        for name, ids in fields.items():
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise ValueError(f"{name} holds token id {token_id}: this model's ids are 0 to {vocab_size - 1}")
        if any(not word for word in params.bad_words):
            raise ValueError("bad_words holds an empty word")
        if params.allowed_token_ids is not None and not params.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty: no token could be drawn")
        added = {token_id: value for token_id, value in bias.items() if value > _NEVER}
        banned = {token_id for token_id, value in bias.items() if value <= _NEVER}
        banned.update(word[0] for word in params.bad_words if len(word) == 1)
        # A stop id the logits do not have is never drawn: nothing to mask.
        stops = sorted({i for i in params.stop_token_ids if 0 <= i < vocab_size}) if params.min_tokens > 0 else []
        return cls(
            bias_ids=_ids(added),
            bias=np.fromiter(added.values(), np.float32, len(added)),
            banned_ids=_ids(sorted(banned)),
            allowed_ids=None if params.allowed_token_ids is None else _ids(sorted(set(params.allowed_token_ids))),
            words=tuple(word for word in params.bad_words if len(word) > 1),
            stop_ids=_ids(stops),
            stops_from=prompt_length + params.min_tokens,
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
        )

    @property
    def has_penalties(self) -> bool:
        return self.repetition != 1.0 or self.frequency != 0.0 or self.presence != 0.0

    @property
    def is_empty(self) -> bool:
        sparse = (self.bias_ids.size, self.banned_ids.size, self.stop_ids.size, len(self.words))
        return not any(sparse) and self.allowed_ids is None and not self.has_penalties


def _edits_anything(params: SamplingParams) -> bool:
    if params.logit_bias or params.bad_words or params.allowed_token_ids is not None or params.min_tokens > 0:
        return True
    return (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)


class LogitEdits:
    """Applies the edits of any mix of slots to a batch of logits, and keeps what they depend on."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._edits: dict[int, SlotEdits] = {}
        self._counts = _Rows(2, vocab_size, torch.int32, 0, device)  # [row, 0] generated, [row, 1] in the prompt
        self._tails = _Rows(1, 0, torch.int64, _NO_TOKEN, device)  # [row, 0] last generated tokens, newest last
        self._version = 0
        self._step_key: tuple[int, bytes, bytes] | None = None
        self._step = _StepEdits()

    def open(self, slot: int, edits: SlotEdits, prompt: Sequence[int], generated: Sequence[int]) -> None:
        self._version += 1
        if edits.is_empty:
            return
        self._edits[slot] = edits
        if edits.has_penalties:
            in_text, in_prompt = self._counts.open(slot)
            drawn = upload(_ids(generated), self._device)
            in_text.scatter_add_(0, drawn, _ones_like(drawn))
            in_prompt.index_fill_(0, upload(_ids(prompt), self._device), 1)
        if edits.words:
            self._tails.widen(max(len(word) for word in edits.words) - 1)
            (tail,) = self._tails.open(slot)
            newest = _ids(generated)[-self._tails.width :]
            tail[self._tails.width - newest.size :] = upload(newest, self._device)

    def close(self, slot: int) -> None:
        self._version += 1
        self._edits.pop(slot, None)
        self._counts.close(slot)
        self._tails.close(slot)

    def apply(self, logits: Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """logits: [R, V], left as they are. -> f32[R, V]: bias, then penalties, then masks; `logits` without any.

        slots, positions: i64[R] on the host; positions are those of the tokens being drawn.
        """
        step = self._plan(slots, positions)
        if step.is_empty:
            return logits
        logits = logits.to(torch.float32, copy=True)
        if step.bias is not None:
            logits.index_put_(step.bias.where, step.bias.values, accumulate=True)
        if step.penalties is not None:
            self._penalise(logits, step.penalties)
        if step.allowed is not None:
            # Not -inf: of tokens the model rules out, the allowed ones must still lead the others.
            kept = logits[step.allowed.where].clamp_(min=torch.finfo(torch.float32).min)
            logits.index_fill_(0, step.allowed.rows, -torch.inf)
            logits[step.allowed.where] = kept
        if step.banned is not None:
            logits.index_put_(step.banned.where, step.banned.values, accumulate=True)
        if step.words is not None:
            self._ban_words(logits, step.words)
        return logits

    def record(self, ids: Tensor, slots: NDArray[np.int64], draws: NDArray[np.int64]) -> None:
        """Take note of drawn ids (i64[R], device): draw 0 of a slot is the one its session goes on with."""
        if not self._edits:
            return
        for state in (self._counts, self._tails):
            rows, where = state.rows_of(slots, only=draws == 0)
            if not where.size:
                continue
            at, drawn = upload(rows, self._device), ids[upload(where, self._device)]
            if state is self._counts:
                state.data.index_put_((at, torch.zeros_like(at), drawn), _ones_like(drawn), accumulate=True)
            else:
                older = state.data[at, :, 1:]
                state.data[at] = torch.cat((older, drawn.view(-1, 1, 1)), dim=-1)

    def _penalise(self, logits: Tensor, step: _Penalties) -> None:
        """Repetition looks at prompt and generated tokens, frequency and presence at generated ones only (B13)."""
        values = logits[step.rows]
        counts = self._counts.data[step.count_rows]  # [r, 2, V]
        generated = counts[:, 0]
        if step.has_repetition:
            is_seen = counts.sum(dim=1) > 0
            repeated = torch.where(values > 0, values / step.repetition, values * step.repetition)
            values = torch.where(is_seen, repeated, values)
        values -= step.frequency * generated
        values -= step.presence * (generated > 0)
        logits[step.rows] = values

    def _ban_words(self, logits: Tensor, step: _Words) -> None:
        """Ban each word's last token where the generated text ends in all of its others."""
        tails = self._tails.data[step.tail_rows, 0]  # [w, width]
        is_next = ((tails == step.prefixes) | (step.prefixes == _ANY_TOKEN)).all(dim=-1)
        ban = torch.where(is_next, -torch.inf, 0.0)
        logits.index_put_((step.rows, step.last_ids), ban, accumulate=True)  # words may share a last token

    def _plan(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> _StepEdits:
        """The step's edits on the device. Decoding repeats the same rows for many steps: the last answer is kept."""
        if not self._edits:
            return _StepEdits()
        edits = [self._edits.get(int(slot)) for slot in slots]
        stops = np.array(
            [edit is not None and position < edit.stops_from for edit, position in zip(edits, positions, strict=True)]
        )
        key = (self._version, slots.tobytes(), stops.tobytes())
        if key != self._step_key:
            self._step = self._build(slots, edits, stops)
            self._step_key = key
        return self._step

    def _build(self, slots: NDArray[np.int64], edits: list[SlotEdits | None], stops: NDArray[np.bool_]) -> _StepEdits:
        rows = [(row, edit) for row, edit in enumerate(edits) if edit is not None]
        banned = [(row, edit.banned_ids) for row, edit in rows]
        banned += [(row, edit.stop_ids) for row, edit in rows if stops[row]]
        return _StepEdits(
            bias=self._sparse([(row, edit.bias_ids) for row, edit in rows], [edit.bias for _, edit in rows]),
            penalties=self._penalties(slots, [(row, edit) for row, edit in rows if edit.has_penalties]),
            allowed=self._sparse([(row, edit.allowed_ids) for row, edit in rows if edit.allowed_ids is not None]),
            banned=self._sparse(banned),
            words=self._words(slots, [(row, edit) for row, edit in rows if edit.words]),
        )

    def _sparse(
        self, entries: list[tuple[int, NDArray[np.int64]]], values: list[NDArray[np.float32]] | None = None
    ) -> _Sparse | None:
        entries_size = sum(ids.size for _, ids in entries)
        if not entries_size:
            return None
        rows = np.repeat([row for row, _ in entries], [ids.size for _, ids in entries])
        flat = np.concatenate(values) if values is not None else np.full(entries_size, -np.inf, np.float32)
        where = (upload(rows, self._device), upload(np.concatenate([ids for _, ids in entries]), self._device))
        distinct = np.unique(rows)
        return _Sparse(rows=upload(distinct, self._device), where=where, values=upload(flat, self._device))

    def _penalties(self, slots: NDArray[np.int64], rows: list[tuple[int, SlotEdits]]) -> _Penalties | None:
        if not rows:
            return None
        at = np.array([row for row, _ in rows])
        factors = np.array([(edit.repetition, edit.frequency, edit.presence) for _, edit in rows], np.float32)
        repetition, frequency, presence = upload(factors, self._device).unsqueeze(-1).unbind(dim=1)
        return _Penalties(
            rows=upload(at, self._device),
            count_rows=upload(self._counts.rows_of(slots[at])[0], self._device),
            repetition=repetition,
            frequency=frequency,
            presence=presence,
            has_repetition=any(edit.repetition != 1.0 for _, edit in rows),
        )

    def _words(self, slots: NDArray[np.int64], rows: list[tuple[int, SlotEdits]]) -> _Words | None:
        if not rows:
            return None
        entries = [(row, word) for row, edit in rows for word in edit.words]
        prefixes = np.full((len(entries), self._tails.width), _ANY_TOKEN, np.int64)
        for prefix, (_, word) in zip(prefixes, entries, strict=True):
            prefix[len(prefix) - len(word) + 1 :] = word[:-1]
        at = np.array([row for row, _ in entries])
        return _Words(
            rows=upload(at, self._device),
            tail_rows=upload(self._tails.rows_of(slots[at])[0], self._device),
            prefixes=upload(prefixes, self._device),
            last_ids=upload(np.array([word[-1] for _, word in entries]), self._device),
        )


@dataclass(frozen=True, slots=True)
class _Sparse:
    rows: Tensor  # [r] i64, distinct rows of the batch
    where: tuple[Tensor, Tensor]  # ([n] i64 rows, [n] i64 token ids)
    values: Tensor  # [n] f32


@dataclass(frozen=True, slots=True)
class _Penalties:
    rows: Tensor  # [r] i64, rows of the batch
    count_rows: Tensor  # [r] i64
    repetition: Tensor  # [r, 1] f32, as the next two
    frequency: Tensor
    presence: Tensor
    has_repetition: bool


@dataclass(frozen=True, slots=True)
class _Words:
    """One entry a word and row."""

    rows: Tensor  # [w] i64
    tail_rows: Tensor  # [w] i64
    prefixes: Tensor  # [w, width] i64, right-aligned
    last_ids: Tensor  # [w] i64


@dataclass(frozen=True, slots=True)
class _StepEdits:
    bias: _Sparse | None = None
    penalties: _Penalties | None = None
    allowed: _Sparse | None = None
    banned: _Sparse | None = None
    words: _Words | None = None

    @property
    def is_empty(self) -> bool:
        return not any((self.bias, self.penalties, self.allowed, self.banned, self.words))


class _Rows:
    """A device tensor [rows, parts, width] with a row for each slot that asked for one; grows by doubling.

    A grown copy is made on the stream that the steps run on, so it follows every update already launched.
    """

    def __init__(self, parts: int, width: int, dtype: torch.dtype, fill: int, device: torch.device) -> None:
        self.data = torch.full((0, parts, width), fill, dtype=dtype, device=device)
        self._fill = fill
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []

    @property
    def width(self) -> int:
        return self.data.shape[-1]

    def open(self, slot: int) -> Tensor:
        """-> [parts, width], the slot's row, empty and in place."""
        if not self._free:
            used = self.data.shape[0]
            self._grow(max(4, 2 * used), self.width)
            self._free = list(range(used, self.data.shape[0]))
        row = self._free.pop()
        self._row_of[slot] = row
        return self.data[row].fill_(self._fill)

    def close(self, slot: int) -> None:
        row = self._row_of.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def widen(self, width: int) -> None:
        """Rows keep their content at the right end."""
        if width > self.width:
            self._grow(self.data.shape[0], width)

    def rows_of(
        self, slots: NDArray[np.int64], only: NDArray[np.bool_] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """-> (our rows, which entries of `slots` they belong to), for the slots that have one."""
        found = [
            (self._row_of[int(slot)], index)
            for index, slot in enumerate(slots)
            if (only is None or only[index]) and int(slot) in self._row_of
        ]
        rows, where = np.array(found, np.int64).reshape(-1, 2).T
        return rows, where

    def _grow(self, rows: int, width: int) -> None:
        with torch.inference_mode(False):  # else a caller's inference mode would forbid updates outside of it
            grown = self.data.new_full((rows, self.data.shape[1], width), self._fill)
            if self.data.numel():
                grown[: self.data.shape[0], :, width - self.width :] = self.data
        self.data = grown


def _ids(ids: Sequence[int] | dict[int, float]) -> NDArray[np.int64]:
    return np.fromiter(ids, np.int64, len(ids))


def _ones_like(ids: Tensor) -> Tensor:
    return torch.ones_like(ids, dtype=torch.int32)


_NO_EDITS = SlotEdits(
    bias_ids=_ids(()),
    bias=np.empty(0, np.float32),
    banned_ids=_ids(()),
    allowed_ids=None,
    words=(),
    stop_ids=_ids(()),
    stops_from=0,
    repetition=1.0,
    frequency=0.0,
    presence=0.0,
)
