"""The same greedy prompts alone and in load: where answers part, and how sure of its token the reference was there.

Sums in bfloat16 depend on what shares a step, so two tokens that are nearly as likely may change places. No others may.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from engine.loop import EngineLoop
from engine.types import GenerateRequest, SamplingParams, TokenLogprobs

NEAR = 0.1
"""Largest gap between the two best log probabilities at which answers may part (R32)."""
NEW = 16
GREEDY = SamplingParams(temperature=0.0, logprobs=2)

Prompts = Mapping[str, tuple[int, ...]]


@dataclass
class Answer:
    tokens: list[int]
    gaps: list[float]
    """By which the best token led the second, of each."""


@dataclass(frozen=True)
class Parting:
    """The first token at which an answer differs from the reference."""

    name: str
    at: int
    expected: int | None
    got: int | None
    gap: float
    num_tokens: int
    """Of the prompt."""

    @property
    def is_explained(self) -> bool:
        return self.gap <= NEAR

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.num_tokens} tokens): token {self.at} is {self.got}, alone it is {self.expected}, "
            f"which led by {self.gap:.4f}"
        )


def mixed_prompts(count: int, vocab_size: int, *, longest: int = 400, seed: int = 0) -> dict[str, tuple[int, ...]]:
    """Lengths from one token to `longest`, most of them short; half begin with one of eight beginnings."""
    rng = Random(seed)

    def some(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(length))

    beginnings = [some(rng.randint(longest // 8, longest // 2)) for _ in range(8)]
    prompts = {}
    for number in range(count):
        length = 1 + int((longest - 1) * rng.random() ** 2)
        begun = rng.choice(beginnings)[: length - 1] if number % 2 else ()
        prompts[f"prompt {number}"] = begun + some(length - len(begun))
    return prompts


def alone(loop: EngineLoop, prompts: Prompts) -> dict[str, Answer]:
    """One after another, each from its first token on. The loop's own prefixes are left out."""
    quiet = loop.without_prefixes()
    return {name: in_load(quiet, {name: prompt})[name] for name, prompt in prompts.items()}


def in_load(loop: EngineLoop, prompts: Prompts) -> dict[str, Answer]:
    """All at once, as many at a time as the loop runs. Raises AssertionError where one fails."""
    answers = {name: Answer([], []) for name in prompts}
    for name, prompt in prompts.items():
        loop.submit(GenerateRequest(name, prompt, sampling=GREEDY, max_new_tokens=NEW))
    while loop.has_work():
        for update in loop.step():
            assert update.error is None, f"{update.request_id}: {update.error}"
            answer = answers[update.request_id]
            answer.tokens += update.token_ids
            answer.gaps += [_gap(each) for each in update.logprobs or ()]
    short = [name for name, answer in answers.items() if len(answer.tokens) != NEW]
    assert not short, f"not {NEW} tokens: {short}"
    return answers


def partings(prompts: Prompts, reference: Mapping[str, Answer], told: Mapping[str, Answer]) -> list[Parting]:
    found = []
    for name, right in reference.items():
        pairs = zip(right.tokens, told[name].tokens, strict=True)
        at = next((at for at, (expected, got) in enumerate(pairs) if expected != got), None)
        if at is not None:
            got = told[name].tokens[at]
            found.append(Parting(name, at, right.tokens[at], got, right.gaps[at], len(prompts[name])))
    return found


def shares(reference: Mapping[str, Answer], edges: Sequence[float] = (NEAR, 0.5, 1.0)) -> str:
    """How many of the reference's tokens lead by no more than each edge: what a rule about gaps can find."""
    gaps = [gap for answer in reference.values() for gap in answer.gaps]
    return ", ".join(f"{sum(gap <= edge for gap in gaps) / len(gaps):.1%} lead by {edge} at most" for edge in edges)


def _gap(told: TokenLogprobs) -> float:
    (_, best), (_, second) = told.top
    return best - second
