"""Requests of every kind that an engine takes, drawn at random, and what must hold of each answer by itself."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from engine.sampling import LOGPROB_FLOOR
from engine.types import EngineInfo, GenerateRequest, SamplingParams, TokenLogprobs, Update

KEPT = 64
"""Answers that are held for a repeat."""
MOST_PROMPT_ROWS = 1500
"""Prompt tokens whose log probabilities are asked for."""


@dataclass
class Choice:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None


@dataclass
class Asked:
    """A request, and what was told of it."""

    request: GenerateRequest
    is_kept: bool = False
    """May be asked again."""
    first: Asked | None = None
    """What it repeats."""
    talk: int | None = None
    """The conversation that its answer goes on with."""
    cancelled: set[int] = field(default_factory=set)
    choices: list[Choice] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    def __post_init__(self) -> None:
        self.choices = [Choice() for _ in range(self.request.n)]

    def take(self, update: Update) -> bool:
        """-> whether that was the last of it."""
        choice = self.choices[update.index]
        assert choice.finish is None, f"news of choice {update.index} behind its end"
        choice.tokens += update.token_ids
        choice.logprobs += update.logprobs or ()
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        choice.finish, choice.error = update.finish, update.error
        return all(each.finish is not None for each in self.choices)

    def told(self) -> object:
        return [(each.tokens, each.logprobs, each.finish) for each in self.choices], self.prompt_logprobs


class Mix:
    """Draws requests."""

    def __init__(self, seed: int, info: EngineInfo, longest: int, new: int, *, is_invariant: bool) -> None:
        self.draw = random.Random(seed)
        self._ids = np.random.default_rng(seed)
        self._vocab, self._longest, self._new, self._is_invariant = info.vocab_size, longest, new, is_invariant
        self._beginnings = [self.tokens(longest // part) for part in (3, 4, 6, 12)]
        self._talks = [self.tokens(8) for _ in range(12)]
        self.kept: list[Asked] = []

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._ids.integers(0, self._vocab, count).tolist())

    def keep(self, asked: Asked) -> None:
        """An answer as it was the first time, and a conversation as it went on."""
        if asked.talk is not None:
            talk = asked.request.prompt_token_ids + tuple(asked.choices[0].tokens)
            self._talks[asked.talk] = talk if len(talk) < self._longest // 2 else self.tokens(8)
        if asked.is_kept and asked.first is None:
            if len(self.kept) < KEPT:
                self.kept.append(asked)
            elif self.draw.random() < 0.1:
                self.kept[self.draw.randrange(KEPT)] = asked

    def next(self, name: str, *, grows: bool = False) -> Asked:
        """grows: a short prompt with the longest answer, many of which outgrow the pool together."""
        draw = self.draw
        if self.kept and draw.random() < 0.2:
            first = draw.choice(self.kept)
            return Asked(replace(first.request, request_id=name), first=first, is_kept=True)
        prompt, talk = self._prompt()
        prompt = prompt[:5] if grows else prompt
        is_plain = draw.random() < 0.25
        params = self._plain(len(prompt)) if is_plain else self._any(len(prompt))
        count = draw.choice((1, 1, 1, 1, 1, 2, 3, 4))
        new = self._new if grows else draw.randint(1, self._new)
        if params.prompt_logprobs is not None and draw.random() < 0.2:
            count, new = 1, 0
        is_kept = draw.random() < 0.5 and (is_plain or (self._is_invariant and params.seed is not None))
        request = GenerateRequest(
            name,
            prompt,
            n=count,
            sampling=params,
            max_new_tokens=new,
            priority=draw.choice((0, 0, 0, 1)),
            cache_salt=draw.choice((None,) * 8 + ("a", "b")),
            client=draw.choice("xyz"),
        )
        return Asked(request, is_kept=is_kept, talk=talk)

    def _prompt(self) -> tuple[tuple[int, ...], int | None]:
        draw, longest = self.draw, self._longest
        match draw.choices(("short", "long", "shared", "talk"), (35, 10, 30, 25))[0]:
            case "short":
                return self.tokens(draw.choice((1, 2, draw.randint(3, longest // 20)))), None
            case "long":
                return self.tokens(draw.randint(longest // 4, longest)), None
            case "shared":
                begun = draw.choice(self._beginnings)
                return begun[: draw.choice((len(begun), draw.randint(1, len(begun))))] + self.tokens(
                    draw.randint(1, longest // 20)
                ), None
        talk = draw.randrange(len(self._talks))
        return self._talks[talk] + self.tokens(draw.randint(1, longest // 20)), talk

    def _plain(self, length: int) -> SamplingParams:
        """Greedy, and nothing edits the scores: log probabilities say by how much a token leads."""
        rows = self.draw.choice((None,) * 5 + (1,)) if length <= MOST_PROMPT_ROWS else None
        return SamplingParams(temperature=0.0, logprobs=self.draw.choice((2, 5)), seed=1, prompt_logprobs=rows)

    def _any(self, length: int) -> SamplingParams:
        draw = self.draw
        params = SamplingParams(
            temperature=draw.choice((0.0, 0.5, 1.0, 1.5)),
            top_p=draw.choice((1.0, 1.0, 0.9, 0.3)),
            top_k=draw.choice((0, 0, 1, 5, 40, 900)),
            min_p=draw.choice((0.0, 0.0, 0.02, 0.3)),
            presence_penalty=draw.choice((0.0, 0.0, 0.7, -0.4)),
            frequency_penalty=draw.choice((0.0, 0.0, 0.3)),
            repetition_penalty=draw.choice((1.0, 1.0, 1.2, 0.9)),
            seed=draw.choice((None, draw.getrandbits(62), draw.getrandbits(62), draw.getrandbits(62))),
            logprobs=draw.choice((None, None, 0, 1, 8)),
            prompt_logprobs=draw.choice((None,) * 12 + (0, 3)) if length <= MOST_PROMPT_ROWS else None,
        )
        match draw.randrange(6):
            case 0:
                bias = {token: draw.choice((-100.0, -3.0, 2.0, 6.0)) for token in self.tokens(6)}
                return replace(params, logit_bias=tuple(bias.items()))
            case 1:
                allowed = self.tokens(20)
                return replace(params, allowed_token_ids=allowed, stop_token_ids=allowed[:2], min_tokens=2)
            case 2:  # ends as soon as it may
                stop = self.tokens(1)
                return replace(
                    params, stop_token_ids=stop, logit_bias=((stop[0], 100.0),), min_tokens=draw.randint(0, 9)
                )
            case 3:
                return replace(params, bad_words=(self.tokens(1), self.tokens(2)))
        return params


def judge(asked: Asked, vocab_size: int) -> Iterable[str]:
    """What is wrong with a finished answer, by itself."""
    request, params = asked.request, asked.request.sampling
    never = {token for token, bias in params.logit_bias if bias <= -100} | {
        w[0] for w in params.bad_words if len(w) == 1
    }
    for index, choice in enumerate(asked.choices):
        tokens, stops = choice.tokens, [at for at, t in enumerate(choice.tokens) if t in params.stop_token_ids]
        if choice.finish == "failed" or choice.error is not None:
            yield f"choice {index} failed: {choice.error}"
            continue
        if choice.finish == "cancelled" and index not in asked.cancelled:
            yield f"choice {index} was cancelled, and nobody had asked for it"
        if choice.finish == "length" and (len(tokens) != request.max_new_tokens or stops):
            yield f"choice {index} has {len(tokens)} tokens of {request.max_new_tokens}, stop tokens at {stops}"
        if choice.finish == "stop" and (stops != [len(tokens) - 1] or len(tokens) <= params.min_tokens):
            yield f"choice {index} stopped behind {len(tokens)} tokens, stop tokens at {stops}"
        if dict(params.logit_bias).get(next(iter(params.stop_token_ids), -1)) and len(tokens) > params.min_tokens + 1:
            yield f"choice {index} has {len(tokens)} tokens and was to stop behind {params.min_tokens + 1}"
        wrong = [token for token in tokens if not 0 <= token < vocab_size or token in never]
        wrong += [token for token in tokens if token not in (params.allowed_token_ids or tokens)]
        wrong += [pair[1] for pair in itertools.pairwise(tokens) if pair in params.bad_words]
        if wrong:
            yield f"choice {index} drew {wrong[:5]}, which it must not"
        if len(choice.logprobs) != (0 if params.logprobs is None else len(tokens)):
            yield f"choice {index} has {len(choice.logprobs)} log probabilities of {len(tokens)} tokens"
        for at, (token, value) in enumerate(zip(tokens, choice.logprobs, strict=False)):
            for fault in faults(value, token, params.logprobs or 0, vocab_size):
                yield f"choice {index}, token {at}: {fault}"
    if params.prompt_logprobs is not None and not asked.cancelled and asked.choices[0].error is None:
        values = asked.prompt_logprobs or ()
        if len(values) != len(request.prompt_token_ids) and len(request.prompt_token_ids) > 1:
            yield f"{len(values)} log probabilities of {len(request.prompt_token_ids)} prompt tokens"
        for at, (token, each) in enumerate(zip(request.prompt_token_ids, values, strict=False)):
            if (each is None) != (at == 0):
                yield f"prompt token {at} has the log probability {each}"
            elif each is not None:
                for fault in faults(each, token, params.prompt_logprobs, vocab_size):
                    yield f"prompt token {at}: {fault}"


def faults(value: TokenLogprobs, token: int, count: int, vocab_size: int) -> Iterable[str]:
    """What is wrong with one position's log probabilities. The floor stands for NaN, and for what was ruled out."""
    listed = [each for _, each in value.top]
    if value.token_id != token:
        yield f"log probabilities of {value.token_id}, not of {token}"
    if not all(LOGPROB_FLOOR < each <= 0 for each in (value.logprob, *listed)):
        yield f"log probabilities are no such numbers: {value}"
    if len(dict(value.top)) != min(count, vocab_size) or listed != sorted(listed, reverse=True):
        yield f"not the {count} best, in order: {value}"
    if dict(value.top).get(token, value.logprob) != value.logprob:
        yield f"the drawn token has two log probabilities: {value}"
    if listed and (listed[0] < -math.log(vocab_size) - 1e-3 or value.logprob > listed[0]):
        yield f"the best is not the best: {value}"
