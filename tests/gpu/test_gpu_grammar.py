"""Grammar masks on a CUDA device: the CPU's draws, and nothing waits for the device."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch

from engine.sampling import Sampled, Sampler
from engine.types import Grammar, SamplingParams
from support.grammar_noise import PROMPT, VOCAB, grammars_of
from support.tiny_tokenizer import write_byte_level

ROWS = 4
GRAMMARS = (Grammar("regex", "[a-z]{40}"), None, Grammar("json", '{"type": "object"}'), Grammar("regex", "[0-9 ]+"))


def opened(folder: Path, device: str) -> Sampler:
    sampler = Sampler(VOCAB, torch.device(device), ROWS, grammars_of(write_byte_level(folder)))
    for slot, grammar in enumerate(GRAMMARS):
        params = SamplingParams(grammar=grammar, temperature=0.0 if slot == 3 else 1.0, logprobs=1)
        sampler.open(slot, params, seed=slot, prompt=PROMPT)
    return sampler


def step(sampler: Sampler, logits: torch.Tensor, position: int, fed: list[int]) -> Sampled:
    at = np.full(ROWS, position)
    return sampler.sample(logits, np.arange(ROWS), at, np.zeros(ROWS, np.int64), np.array(fed))


def test_a_gpu_draws_what_a_cpu_draws_under_grammars(tmp_path: Path) -> None:
    host, device = opened(tmp_path / "a", "cpu"), opened(tmp_path / "b", "cuda")
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16()
    fed = [PROMPT[-1]] * ROWS
    for position in range(len(PROMPT), len(PROMPT) + 30):
        ours = step(device, logits.cuda(), position, fed)
        theirs = step(host, logits, position, fed)
        fed = [token_id for token_id, _ in theirs.collect()]
        assert [token_id for token_id, _ in ours.collect()] == fed
        assert ours.errors == theirs.errors == {}


def test_nothing_waits_for_the_device_before_collect(tmp_path: Path) -> None:
    sampler = opened(tmp_path, "cuda")
    logits = torch.zeros(ROWS, VOCAB, device="cuda")
    step(sampler, logits, len(PROMPT), [PROMPT[-1]] * ROWS).collect()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        step(sampler, logits, len(PROMPT), [PROMPT[-1]] * ROWS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
