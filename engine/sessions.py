"""One choice of a request while the engine works on it: its tokens, how far they are computed, what comes next.

Owned by the engine thread (engine/loop.py). Knows neither cells nor other sessions.

    tokens:   [ prompt ............ | generated ...... ] (in flight)
    cache:    [ 0 .. num_settled .. num_computed )
    to run:                [ num_computed .. len(tokens) + num_in_flight )
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.types import Chunk, FinishReason, GenerateRequest, TokenLogprobs
from engine.view import ViewedSession

FORGIVEN_TOKENS = 32
"""A session that has drawn as many since a failed step is not what steps fail of: that one counts no more."""


@dataclass(eq=False, slots=True)
class Session:
    """A stem draws all `n` first tokens of its request, then is choice 0; every other choice is forked from it."""

    request: GenerateRequest
    index: int
    arrival: int
    """Order of the request's arrival; kept when the session is requeued, so that it is not overtaken."""
    seed: int
    """Of this choice: the request's seed + index, wrapped to a signed 64-bit value."""
    draws: int
    """Choices this session still stands for: n before the fork, 1 after it."""
    tokens: list[int]
    """Prompt and every generated token known to the host."""
    num_computed: int = 0
    """Tokens that are in the cache or in a launched step."""
    num_settled: int = 0
    """Of them, those whose steps were collected: their K/V is there for whoever comes next."""
    num_in_flight: int = 0
    """Drawn tokens of this session the host has not seen yet; 2 only between a launch and the collect behind it."""
    executor_id: int | None = None
    """None while it waits."""
    finished: FinishReason | None = None
    submitted_s: float = 0.0
    """When its request came, by the loop's clock."""
    queued_s: float | None = None
    """How long it had waited when it first ran; None before that, and for forks."""
    cached_tokens: int | None = None
    """Prompt tokens that were already computed when it first ran; None before that."""
    cancelled_draws: set[int] = field(default_factory=set)
    """Choices a stem stands for that were cancelled one by one: they end when they have a session of their own."""
    reported: bool = False
    """Whether an update of this choice has gone out."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """By prompt position; filled chunk by chunk, reported with choice 0's first update."""
    failed_steps: int = 0
    """Steps that failed with this session among them, one soon after another; what they had made of it is gone."""
    is_suspect: bool = False
    """It may be what the last of them failed of: it runs alone until it has drawn a token."""
    pooled: npt.NDArray[np.float32] | None = None  # [hidden]
    """What its chunks' hidden states have come to so far, for a request with pooling."""
    prompt_len: int = field(init=False)
    _failed_at: int = field(init=False, default=0)
    """How many tokens it had when one failed last."""
    _end: int = field(init=False)
    """Tokens it may come to."""
    _draws_blind: bool = field(init=False)
    """Whether a token may be drawn behind one that the host has not seen."""

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.prompt_token_ids)
        self._end = self.prompt_len + self.request.max_new_tokens
        self._draws_blind = self.request.sampling.grammar is None

    @property
    def num_generated(self) -> int:
        """Tokens drawn for this choice, those in flight included."""
        return len(self.tokens) - self.prompt_len + self.num_in_flight

    @property
    def remaining(self) -> int:
        """Tokens to run before the next draw; 0 when nothing more will be drawn, or not yet."""
        in_flight = self.num_in_flight
        if in_flight and not self._draws_blind:
            return 0  # what may come next depends on a token that is still on the device
        drawn_to = len(self.tokens) + in_flight
        if drawn_to >= self._end and not self.wants_prompt_only:
            return 0
        return drawn_to - self.num_computed

    @property
    def wants_prompt_only(self) -> bool:
        """Nothing is drawn, but the prompt's log probabilities or its embedding are asked for and not all there."""
        return self.request.max_new_tokens == 0 and self.num_computed < self.prompt_len

    @property
    def is_decoding(self) -> bool:
        """Its next step feeds back one drawn token. Prompts of one token are prefill (RUN-14)."""
        return len(self.tokens) + self.num_in_flight > self.prompt_len and self.remaining == 1

    @property
    def wants_prompt_rows(self) -> bool:
        return self.request.sampling.prompt_logprobs is not None and not self.reported

    def begin_at(self, position: int) -> None:
        """Its first `position` tokens were computed by others."""
        self.num_computed = self.num_settled = position
        if self.cached_tokens is None:
            self.cached_tokens = min(position, self.prompt_len)

    def take(self, count: int) -> Chunk:
        """The next `count` tokens as a chunk, counted as computed from here on.

        The last chunk draws; a token still on the device is named -1.
        """
        assert self.executor_id is not None
        remaining = self.remaining
        assert 0 < count <= remaining, (count, remaining)
        start, end = self.num_computed, self.num_computed + count
        tokens = tuple(self.tokens[start:end]) or (-1,)
        if start >= self.prompt_len and remaining == 1:  # what most steps are made of
            self.num_computed = end
            self.num_in_flight += 1
            return Chunk(self.executor_id, tokens, start, "last", 1, True)
        is_decode, is_last = self.is_decoding, count == remaining
        draws = 0
        if is_last and self.request.max_new_tokens > 0:
            draws = self.draws if self.num_generated == 0 else 1
        wanted_rows: Literal["none", "last", "all"] = (
            "all" if self.wants_prompt_rows and start < self.prompt_len else "last" if draws else "none"
        )
        chunk = Chunk(
            session_id=self.executor_id,
            tokens=tokens,
            position=start,
            wanted_rows=wanted_rows,
            draws=draws,
            is_decode=is_decode,
            following_token=self.request.prompt_token_ids[end] if end < self.prompt_len else -1,
            pooling=self.request.pooling if is_last or self.request.pooling == "mean" else None,
        )
        self.num_computed = end
        self.num_in_flight += 1 if draws else 0
        return chunk

    def settle(self, chunk: Chunk) -> None:
        """A step with `chunk` was collected. One from before a preemption says nothing about the cells of today."""
        if chunk.session_id == self.executor_id:
            self.num_settled = chunk.position + len(chunk.tokens)

    def record_pooled(self, chunk: Chunk, pooled: bytes) -> None:
        """Add what a collected chunk handed out. One from before a preemption comes again."""
        if chunk.session_id == self.executor_id:
            values = np.frombuffer(pooled, np.float32)
            self.pooled = values if self.pooled is None else self.pooled + values

    def embedding(self) -> bytes | None:
        """The whole prompt's, of length 1 (the length of a sum or of its mean is all the same); None if not finite."""
        assert self.pooled is not None
        values = self.pooled.astype(np.float64)
        length = np.linalg.norm(values)
        if not np.isfinite(length):
            return None
        return (values / (length or 1.0)).astype("<f4").tobytes()

    def record_prompt_logprobs(self, position: int, values: tuple[TokenLogprobs, ...]) -> None:
        """`values[i]` is of the prompt token at position + 1 + i; nothing predicts the first one."""
        if not self.prompt_logprobs:
            self.prompt_logprobs = [None] * self.prompt_len
        self.prompt_logprobs[position + 1 : position + 1 + len(values)] = values

    def accept(self, token_id: int) -> FinishReason | None:
        """Add a drawn token of this choice; say whether it ended it. Stop beats length on one token (RUN-19)."""
        self.num_in_flight -= 1
        self.tokens.append(token_id)
        length, sampling = len(self.tokens), self.request.sampling
        if token_id in sampling.stop_token_ids and length - self.prompt_len > sampling.min_tokens:
            return "stop"
        return "length" if length >= self._end else None

    def viewed(self) -> ViewedSession:
        """For someone who looks; it runs."""
        assert self.executor_id is not None
        return ViewedSession(
            id=self.executor_id,
            prompt_tokens=self.prompt_len,
            cached_tokens=self.cached_tokens or 0,
            computed_tokens=self.num_settled,
            generated_tokens=len(self.tokens) - self.prompt_len,
            is_decoding=self.is_decoding,
        )

    def suspect(self) -> None:
        """A step with it failed: forget that step, and whatever is in flight behind it."""
        if len(self.tokens) >= self._failed_at + FORGIVEN_TOKENS:
            self.failed_steps = 0
        self.failed_steps += 1
        self._failed_at = len(self.tokens)
        self.is_suspect = True
        self.num_in_flight = 0
        self.requeue()

    def requeue(self) -> None:
        """Back to waiting, with every token it has; those that nobody else keeps are computed again."""
        self.executor_id = None
        self.num_computed = self.num_settled = 0
        self.pooled = None


def choice_seed(seed: int, index: int) -> int:
    """seed + index as a signed 64-bit value (spec api 4.2)."""
    return (seed + index + 2**63) % 2**64 - 2**63
