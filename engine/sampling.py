"""Sampling state of the engine's sessions: one permanent row a slot, gathered for each step. Engine thread only.

A slot's parameters are host rows: a step sends what its R rows need in one copy. What depends on drawn tokens lives on
the device (`logit_edits.py`). The order of steps is spec api 4.3's, the noise is D9's: choice j of a slot at a
position draws the same token whatever shares its step, so a clone or a preempted session that is opened with the tokens
it has generated goes on exactly as it would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.grammar import Grammars
from engine.grammar_masks import GrammarMasks
from engine.logit_edits import LogitEdits, SlotEdits
from engine.types import SamplingParams, TokenLogprobs
from engine.uploads import upload
from static_graphs.sampler import (
    GREEDY_BELOW,
    MAX_CANDIDATES,
    Prepared,
    RawLogprobs,
    Route,
    SampleInputs,
    marked,
    raw_logprobs,
    sample,
    sample_argmax,
)

LOGPROB_FLOOR = -9999.0
"""Reported for a token the model rules out: minus infinity is not JSON (B08)."""

_ROW = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),
        ("seed", np.int64),
        ("logprobs", np.int64),  # -1: none
        ("is_open", np.bool_),
    ]
)
REHEARSED = (
    SamplingParams(frequency_penalty=0.5, top_p=0.9),
    SamplingParams(frequency_penalty=0.5, logprobs=1),
)
"""Between them they launch every kernel of a step whose logits are edited, however they are, and of logprobs."""
_PROMPT_LOGPROB_ROWS = 64
"""Rows at a time: float32 copies of a whole prefill chunk's logits would be gigabytes."""


class Sampler:
    """Draws for slots 0 .. max_slots - 1 from logits of `vocab_size` columns on `device`."""

    def __init__(self, vocab_size: int, device: torch.device, max_slots: int, grammars: Grammars | None = None) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows = np.zeros(max_slots, _ROW)
        self._edits = LogitEdits(vocab_size, device)
        self._masks = GrammarMasks(vocab_size, device, grammars)

    def open(
        self, slot: int, params: SamplingParams, *, seed: int, prompt: Sequence[int], generated: Sequence[int] = ()
    ) -> None:
        """Give a free slot to a session. A clone or a preempted session brings what it has `generated` so far.

        seed: any int64; `params.seed` is not read. Raises ValueError, as `check` does, before anything is changed.
        """
        assert not self._rows[slot]["is_open"], f"slot {slot} is open already"
        edits = self.check(params, seed=seed, prompt_length=len(prompt))
        self._edits.open(slot, edits, prompt, generated)
        if params.grammar is not None:
            self._masks.open(slot, params.grammar, len(prompt), list(generated))
        self._rows[slot] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.top_k if 0 < params.top_k < self._vocab_size else 0,
            seed,
            -1 if params.logprobs is None else params.logprobs,
            True,
        )

    def check(self, params: SamplingParams, *, seed: int, prompt_length: int) -> SlotEdits:
        """ValueError for what `open` would refuse: a grammar, a seed past 64 bits, an id outside the vocabulary."""
        if params.grammar is not None and not self._masks.is_possible:
            raise ValueError("grammar is not supported: this model has no tokens that could match one")
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed {seed} does not fit into 64 bits")
        return SlotEdits.of(params, prompt_length, self._vocab_size)

    def close(self, slot: int) -> None:
        """Free a slot; one that is free already stays so."""
        self._rows[slot]["is_open"] = False
        self._edits.close(slot)
        self._masks.close(slot)

    def sample(
        self,
        logits: Tensor,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        draws: NDArray[np.int64],
        fed: NDArray[np.int64] | None = None,
        prepared: Prepared | None = None,
    ) -> Sampled:
        """Launch one draw for each row; nothing waits for the device.

        logits: [R, V], left as they are. slots, positions, draws: i64[R] on the host, read before this returns.
        positions: of the tokens being drawn (a prompt of n tokens draws its first at n). draws: j of a row draws with
        the slot's seed + j, from that slot's penalties; only draw 0 is recorded in them.
        fed: i64[R], the token that each row ran; needed, and not -1, where a slot has a grammar.
        prepared: of `logits`, where the head that gave them is captured.
        """
        rows = self._rows[slots]
        assert rows["is_open"].all(), f"slots {slots[~rows['is_open']].tolist()} are not open"
        edited = self._edits.apply(logits, slots, positions)
        edited, errors = self._masks.apply(edited, slots, positions, fed)
        usable = prepared if edited is logits else None
        ids = self._draw(edited, rows, positions, rows["seed"] + draws, usable)
        self._edits.record(ids, slots, draws)
        told = marked(ids, logits.amax(1).isfinite()) if prepared is None else prepared.best.mark(ids)
        wanting = np.flatnonzero(rows["logprobs"] >= 0)
        if not wanting.size:
            return Sampled(ids, told, [], [], None, errors)
        at = upload(wanting, self._device)
        k = rows["logprobs"][wanting]
        raw = raw_logprobs(logits if wanting.size == len(rows) else logits[at], ids[at], int(k.max()))
        return Sampled(ids, told, wanting.tolist(), k.tolist(), raw, errors)

    def prompt_logprobs(self, logits: Tensor, targets: Tensor, k: int) -> list[TokenLogprobs]:
        """Raw logprobs of given tokens: logits [R, V], targets i64[R]. Waits for the device."""
        targets = targets.to(logits.device)
        answers: list[TokenLogprobs] = []
        for start in range(0, len(targets), _PROMPT_LOGPROB_ROWS):
            ids = targets[start : start + _PROMPT_LOGPROB_ROWS]
            raw = raw_logprobs(logits[start : start + _PROMPT_LOGPROB_ROWS], ids, k)
            answers += _token_logprobs(ids.tolist(), raw, [k] * len(ids))
        return answers

    def _draw(
        self,
        logits: Tensor,
        rows: NDArray[np.void],
        positions: NDArray[np.int64],
        seeds: NDArray[np.int64],
        prepared: Prepared | None,
    ) -> Tensor:
        """On a host each kind of row goes the cheapest way that is right for it: a greedy one costs one argmax.

        The kernels of a device serve any mix at once.
        """
        if self._device.type == "cuda":
            return self._draw_kind(logits, rows, positions, seeds, prepared)
        is_greedy = rows["temperature"] < GREEDY_BELOW
        is_narrow = ~is_greedy & (rows["top_k"] > 0) & (rows["top_k"] <= MAX_CANDIDATES)
        is_cut = ~is_greedy & ~is_narrow & ((rows["top_k"] > 0) | (rows["top_p"] < 1.0) | (rows["min_p"] > 0.0))
        kinds = [np.flatnonzero(kind) for kind in (is_greedy, is_narrow, is_cut, ~(is_greedy | is_narrow | is_cut))]
        kinds = [kind for kind in kinds if kind.size]
        if len(kinds) == 1:
            return self._draw_kind(logits, rows, positions, seeds)
        ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        for kind in kinds:
            at = upload(kind, self._device)
            ids[at] = self._draw_kind(logits[at], rows[kind], positions[kind], seeds[kind])
        return ids

    def _draw_kind(
        self,
        logits: Tensor,
        rows: NDArray[np.void],
        positions: NDArray[np.int64],
        seeds: NDArray[np.int64],
        prepared: Prepared | None = None,
    ) -> Tensor:
        params = (rows["temperature"], rows["top_k"], rows["top_p"], rows["min_p"])
        route = Route.of(*params, vocab_size=self._vocab_size)
        if not route.has_random:
            return sample_argmax(logits) if prepared is None else prepared.best.ids
        host = SampleInputs.packed(rows["temperature"], rows["top_p"], rows["min_p"], rows["top_k"], seeds, positions)
        packed = upload(host, self._device)
        if prepared is not None:
            return prepared.draw(packed, route.has_top_k or route.has_top_p)
        return sample(logits, SampleInputs.unpacked(packed), route)


@dataclass(slots=True)
class Sampled:
    """One launched draw. Its copies to the host were started behind it; `collect` waits for them."""

    ids: Tensor  # [R] i64, device
    _told: Tensor  # [R] i64, device: what `marked` made of them
    _wanting: list[int]
    """Rows that asked for logprobs, and how many alternatives each wants."""
    _alternatives: list[int]
    _raw: RawLogprobs | None
    errors: dict[int, str] = field(default_factory=dict)
    """Rows whose grammar cannot go on, and why: what they drew means nothing."""
    not_finite: list[int] = field(init=False, default_factory=list)
    """Rows whose scores are no numbers, known once they were collected: what they drew means nothing."""
    _host_ids: Tensor = field(init=False)
    _host_raw: RawLogprobs | None = field(init=False, default=None)
    _done: torch.cuda.Event | None = field(init=False, default=None)
    _answers: list[tuple[int, TokenLogprobs | None]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._host_ids = self._told.to("cpu", non_blocking=True)
        if self._raw is not None:
            self._host_raw = RawLogprobs(
                chosen=self._raw.chosen.to("cpu", non_blocking=True),
                top_ids=self._raw.top_ids.to("cpu", non_blocking=True),
                top=self._raw.top.to("cpu", non_blocking=True),
            )
        if self.ids.is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def collect(self) -> list[tuple[int, TokenLogprobs | None]]:
        """Each row's id, with its raw logprobs where its slot asked for them. The only wait; again: the same list."""
        if self._answers is None:
            if self._done is not None:
                self._done.synchronize()
            told: list[int] = self._host_ids.tolist()
            self.not_finite = [row for row, token_id in enumerate(told) if token_id < 0]
            ids = [token_id if token_id >= 0 else -1 - token_id for token_id in told]
            logprobs: list[TokenLogprobs | None] = [None] * len(ids)
            if self._host_raw is not None:
                found = _token_logprobs([ids[row] for row in self._wanting], self._host_raw, self._alternatives)
                for row, value in zip(self._wanting, found, strict=True):
                    logprobs[row] = value
            self._answers = list(zip(ids, logprobs, strict=True))
        return self._answers


def rehearse(params: SamplingParams, vocab_size: int, device: torch.device, dtype: torch.dtype) -> None:
    """Launch one draw by `params` from logits of `dtype`, which leaves another nothing to compile. Any thread."""
    sampler = Sampler(vocab_size, device, max_slots=1)
    sampler.open(0, params, seed=0, prompt=())
    zero = np.zeros(1, np.int64)
    sampler.sample(torch.zeros(1, vocab_size, dtype=dtype, device=device), zero, zero, zero)


def _token_logprobs(ids: list[int], raw: RawLogprobs, alternatives: list[int]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(token_id, _floor(chosen), tuple((top_id, _floor(value)) for top_id, value in top[:k]))
        for token_id, chosen, top, k in zip(
            ids,
            raw.chosen.tolist(),
            (list(zip(*pair, strict=True)) for pair in zip(raw.top_ids.tolist(), raw.top.tolist(), strict=True)),
            alternatives,
            strict=True,
        )
    ]


def _floor(logprob: float) -> float:
    """Not max(): a comparison with NaN is false, so a broken model's values end at the floor too."""
    return logprob if logprob > LOGPROB_FLOOR else LOGPROB_FLOOR
