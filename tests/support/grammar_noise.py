"""Answers that only a grammar gives a form: every token is as likely as any other."""

from __future__ import annotations

import numpy as np
import torch

from engine.grammar import Grammars
from engine.sampling import Sampler
from engine.types import Grammar, SamplingParams
from support.tiny_tokenizer import TinyTokenizer

CPU = torch.device("cpu")
VOCAB = 300
PROMPT = (1, 2, 3)


def grammars_of(tiny: TinyTokenizer) -> Grammars:
    return Grammars((tiny.folder / "tokenizer.json").read_text(), VOCAB, [tiny.eos_id])


def answer(grammars: Grammars, tiny: TinyTokenizer, grammar: Grammar, seed: int, limit: int = 3000) -> str | None:
    """The text of an answer drawn from nothing but noise; None when it was still going on after `limit` tokens."""
    sampler = Sampler(VOCAB, CPU, 2, grammars)
    sampler.open(0, SamplingParams(grammar=grammar), seed=seed, prompt=PROMPT)
    logits = torch.zeros(1, VOCAB)
    drawn = [PROMPT[-1]]
    while drawn[-1] != tiny.eos_id and len(drawn) <= limit:
        at = np.array([len(PROMPT) + len(drawn) - 1])
        sampled = sampler.sample(logits, np.array([0]), at, np.array([0]), np.array(drawn[-1:]))
        assert not sampled.errors
        drawn += sampled.ids.tolist()
    return text_of(tiny, drawn[1:-1]) if drawn[-1] == tiny.eos_id else None


def text_of(tiny: TinyTokenizer, token_ids: list[int]) -> str:
    words = {token_id: word.encode() for word, token_id in tiny.words.items()}
    pieces = [words.get(i) or bytes([i - tiny.first_byte_id]) for i in token_ids]
    return b"".join(pieces).decode()
