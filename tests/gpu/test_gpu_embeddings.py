"""Embeddings on a GPU, beside completions: pooled behind replayed graphs, copied while the next step runs."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from support.looped import Engine
from support.toy_decoder import ToyDecoder
from support.toy_executor import toy_executor

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("has_graphs", [True, False])
def test_vectors_are_those_of_the_cpu_whatever_runs_beside_them(pooling: str, has_graphs: bool) -> None:
    executor = toy_executor(ToyDecoder("cuda"), captures_static_methods=has_graphs)
    assert executor.overlaps
    oracle = ToyDecoder()
    engine = Engine(executor, seqs=8, budget=9, chunk=5)
    draw = random.Random(3)
    prompts = {f"e{i}": [draw.randrange(32) for _ in range(draw.choice((1, 2, 7, 20, 33)))] for i in range(24)}
    spoken = {f"g{i}": [draw.randrange(32) for _ in range(draw.randint(1, 9))] for i in range(8)}
    for i, (name, prompt) in enumerate(prompts.items()):
        if i < len(spoken):
            engine.submit(f"g{i}", spoken[f"g{i}"], max_new_tokens=12, sampling={"temperature": 0.0})
        engine.submit(name, prompt, pooling=pooling, max_new_tokens=0)
        engine.step()
    engine.run()
    for name, prompt in prompts.items():
        (update,) = engine.of(name)
        hidden = oracle.plain_hidden(prompt).numpy().astype(np.float64)
        pooled = hidden[-1] if pooling == "last" else hidden.sum(0)
        assert np.frombuffer(update.embedding, "<f4") == pytest.approx(pooled / np.linalg.norm(pooled), abs=2e-5)
    for name, prompt in spoken.items():
        assert engine.tokens(name) == oracle.continuation(prompt, 12)
