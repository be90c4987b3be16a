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


@pytest.mark.parametrize("kv_cells", [300, 4096], ids=["under pressure", "roomy"])
def test_d13_conversations_find_what_was_computed_and_say_what_the_cpu_says(model, kv_cells):
    """Steps overlap here: a prefix may be shared, or its own copy let go, while a step that reads it is in flight."""
    loop, _ = engine(model, "cuda", kv_cells=kv_cells, widths=(1, 2, 4, 8, 16))
    reference, _ = engine(model, "cpu", prefix_cache=False)
    prompts = {str(number): (7, 8, 9) * 5 + (number % 3,) for number in range(12)}
    for turn in range(4):
        said = [talk(each, turn, prompts) for each in (loop, reference)]
        assert differing(*said) == []
        prompts = {name: (*prompt, *said[0][name], 1 + turn) for name, prompt in prompts.items()}
    assert loop.stats().prompt_tokens < reference.stats().prompt_tokens
    loop.reset_prefix_cache()
    assert (loop.stats().cells_used, loop.stats().cells_cached) == (0, 0)


def talk(loop, turn, prompts):
    """One turn of every conversation, all at once: its new tokens by name."""
    for name, prompt in prompts.items():
        request = GenerateRequest(
            f"{turn}-{name}", prompt, sampling=SamplingParams(temperature=0.0), max_new_tokens=5 + int(name)
        )
        loop.submit(request)
    said = {name: [] for name in prompts}
    while loop.has_work():
        for update in loop.step():
            assert update.error is None, update.error
            said[update.request_id.split("-")[1]].extend(update.token_ids)
    return said


def test_a_pool_that_grows_under_captured_graphs_changes_nothing(model):
    loop, _ = engine(model, "cuda", kv_cells=65536, max_num_seqs=64)
    reference, _ = engine(model, "cpu", kv_cells=65536, max_num_seqs=64)
    assert differing(answers(loop, 5, count=80), answers(reference, 5, count=80)) == []
    calls = dict(loop.stats().method_calls)
    assert calls["forward_16"] > 0
    assert calls["forward_others"] > 0
