"""Grammars as the sampler sees them: each slot's matcher, and the masks of a step's rows. Engine thread only.

A row's mask needs every token before it on the host: the loop runs such a session only behind its last draw. Rows
without a grammar are untouched, and a step without any costs one look at an empty table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.grammar import Grammars, Matcher
from engine.types import Grammar
from engine.uploads import upload


@dataclass(slots=True)
class _Slot:
    matcher: Matcher
    prompt_length: int


class GrammarMasks:
    def __init__(self, vocab_size: int, device: torch.device, grammars: Grammars | None) -> None:
        """grammars: None where the model has no tokens that could match one."""
        self._vocab_size = vocab_size
        self._device = device
        self._grammars = grammars
        self._slots: dict[int, _Slot] = {}

    @property
    def is_possible(self) -> bool:
        return self._grammars is not None

    def open(self, slot: int, grammar: Grammar, prompt_length: int, generated: list[int]) -> None:
        """The slot's answer follows `grammar` from its first token on, `generated` included."""
        assert self._grammars is not None
        self._slots[slot] = _Slot(self._grammars.matcher(grammar, generated), prompt_length)

    def close(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def apply(
        self,
        logits: Tensor,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        fed: NDArray[np.int64] | None,
    ) -> tuple[Tensor, dict[int, str]]:
        """Rule out what the grammars do not allow.

        logits: [R, V], left as they are. slots, positions: i64[R], as in `Sampler.sample`. fed: i64[R], the token
        that each row ran: where an answer has begun it is the last one drawn, which its matcher takes here.
        -> f32[R, V], or `logits` where no row has a grammar; and for each row whose grammar cannot go on the reason:
        such a row is not masked.
        """
        if not self._slots:
            return logits, {}
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self._slots]
        if not rows:
            return logits, {}
        assert self._grammars is not None
        errors: dict[int, str] = {}
        at: dict[int, int] = {}  # slot -> its line of `masks`; draws of one row share it
        matchers: list[Matcher] = []
        for row in rows:
            slot = int(slots[row])
            if slot in at:
                continue
            self._advance(self._slots[slot], int(positions[row]), None if fed is None else int(fed[row]))
            at[slot] = len(matchers)
            matchers.append(self._slots[slot].matcher)
        masks = self._grammars.fill(matchers)
        for row in rows:
            line = at[int(slots[row])]
            error = matchers[line].error
            if error is not None:
                errors[row] = f"the grammar cannot go on: {error}"
                masks[line] = -1
        lines = np.array([at[int(slots[row])] for row in rows])
        return self._masked(logits, np.array(rows), masks[lines]), errors

    @staticmethod
    def _advance(slot: _Slot, position: int, fed: int | None) -> None:
        """Bring the matcher to the token that will stand at `position`."""
        missing = position - slot.prompt_length - slot.matcher.num_tokens
        assert missing in (0, 1), f"a grammar's session drew at {position}, {missing} tokens past its matcher"
        if missing:
            assert fed is not None, "a row of a grammar must say which token it ran"
            assert fed >= 0, "a grammar's session ran a token that only the device knows"
            slot.matcher.take(fed)

    def _masked(self, logits: Tensor, rows: NDArray[np.int64], masks: NDArray[np.int32]) -> Tensor:
        """masks: i32[r, words] of the rows -> logits with -inf where a bit is 0."""
        logits = logits.to(torch.float32)
        words = upload(masks, self._device)
        bits = torch.arange(32, dtype=torch.int32, device=self._device)
        is_allowed = (words.unsqueeze(-1).bitwise_right_shift(bits) & 1).flatten(1)[:, : self._vocab_size].bool()
        where = upload(rows, self._device)
        # Not -inf: of tokens that the model or a ban rules out, the allowed ones must still lead the others.
        allowed = logits[where].clamp_(min=torch.finfo(torch.float32).min)
        return logits.index_copy(0, where, allowed.masked_fill_(~is_allowed, -torch.inf))
