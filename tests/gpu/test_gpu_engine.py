"""The whole engine on a GPU: the same tokens as on CPU, eager and captured, in any mix, across growth."""

import random

import pytest
import torch

from engine.build import build_engine
from engine.config import EngineConfig
from engine.types import GenerateRequest, SamplingParams
from support.model_folder import write_folder

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model"))


def engine(model, device, **options):
    torch.backends.cuda.matmul.allow_tf32 = False
    options = {"dtype": "float32", "max_num_seqs": 16, "widths": (1, 2, 4, 8, 16), "kv_cells": 4096} | options
    return build_engine(EngineConfig(model, device=device, **options), lambda *_: None)


def answers(loop, seed, count=24):
    """Tokens of `count` random requests, greedy and sampled, with forks, submitted while others run."""
    rng = random.Random(seed)
    requests = [
        GenerateRequest(
            f"{seed}-{number}",
            tuple(rng.randrange(100) for _ in range(rng.randint(1, 60))),
            n=rng.choice([1, 1, 2]),
            sampling=SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=number, top_k=rng.choice([0, 5])),
            max_new_tokens=rng.randint(1, 30),
        )
        for number in range(count)
    ]
    tokens = {}
    while requests or loop.has_work():
        if requests:
            loop.submit(requests.pop())
        for update in loop.step():
            assert update.error is None, update.error
            tokens.setdefault((update.request_id, update.index), []).extend(update.token_ids)
    return tokens


def differing(one, other):
    assert one.keys() == other.keys()
    return [key for key in one if one[key] != other[key]]


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_tokens_equal_those_of_the_cpu_in_any_mix(model, enforce_eager):
    loop, _ = engine(model, "cuda", enforce_eager=enforce_eager)
    reference, _ = engine(model, "cpu")
    for seed in range(3):
        assert differing(answers(loop, seed), answers(reference, seed)) == []
    assert loop.stats().cells_used == 0


def test_a_pool_that_grows_under_captured_graphs_changes_nothing(model):
    loop, _ = engine(model, "cuda", kv_cells=65536, max_num_seqs=64)
    reference, _ = engine(model, "cpu", kv_cells=65536, max_num_seqs=64)
    assert differing(answers(loop, 5, count=80), answers(reference, 5, count=80)) == []
    calls = dict(loop.stats().method_calls)
    assert calls["forward_16"] > 0
    assert calls["forward_others"] > 0
