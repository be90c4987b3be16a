"""Embeddings: a prompt's hidden states behind the final norm, pooled, of length 1, in the loop that also generates."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from engine.create import create_executor
from engine.executor_options import ExecutorOptions
from static_graphs.loading import random_module
from static_graphs.model import model_from_config
from support.looped import Engine
from support.scripted import ScriptedExecutor, scripted_hidden
from support.tier_chunks import FakeTier
from support.tiered import Tiered, tokens
from support.tiny_models import tiny
from support.toy_decoder import ToyDecoder
from support.toy_executor import toy_executor
from support.toy_server import Overlapping

POOLINGS = ("last", "mean")
TOLERANCE = 2e-6
"""Of a number of a vector of length 1, float32: cells and chunks add in another order than one plain forward."""


@pytest.fixture(params=[False, True], ids=["back-to-back", "overlapped"])
def overlaps(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def embed(engine: Engine, name: str, prompt: Any, pooling: str = "last", **fields: Any) -> None:
    engine.submit(name, prompt, pooling=pooling, max_new_tokens=0, **fields)


def vector(engine: Engine, name: str) -> np.ndarray:
    (update,) = engine.of(name)
    assert (update.finish, update.token_ids) == ("length", ())
    assert update.embedding is not None
    return np.frombuffer(update.embedding, "<f4")


def unit(values: Any) -> np.ndarray:
    values = np.asarray(values, np.float64)
    return values / np.linalg.norm(values)


def expected(prompt: Any, pooling: str) -> np.ndarray:
    """What the scripted executor's hidden states come to."""
    rows = [scripted_hidden(token, position) for position, token in enumerate(prompt)]
    return unit(rows[-1] if pooling == "last" else np.sum(rows, axis=0))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_prompt_in_many_chunks_is_pooled_once_and_its_session_freed(overlaps: bool, pooling: str) -> None:
    engine = Engine(ScriptedExecutor(overlaps=overlaps), budget=4, chunk=4)
    embed(engine, "a", range(5, 24), pooling)
    embed(engine, "b", (9,), pooling)
    engine.submit("c", (5, 6, 7), max_new_tokens=8)
    engine.run()
    for name, prompt in (("a", range(5, 24)), ("b", (9,))):
        assert vector(engine, name) == pytest.approx(expected(prompt, pooling), abs=TOLERANCE)
        assert np.linalg.norm(vector(engine, name)) == pytest.approx(1, abs=TOLERANCE)
    assert engine.tokens("c") == list(range(8, 16))
    assert engine.loop.stats().generated_tokens == 8
    assert engine.holds_nothing()


def test_last_reuses_a_prefix_and_mean_sees_every_row_itself() -> None:
    engine = Engine(ScriptedExecutor(), budget=4, chunk=4)
    prompt = tuple(range(30, 50))
    for name, pooling in (("first", "last"), ("again", "last"), ("mean", "mean"), ("draws", None)):
        engine.submit(name, prompt, pooling=pooling, max_new_tokens=0 if pooling else 2)
        engine.run()
    assert [engine.cached(name) for name in ("first", "again", "mean", "draws")] == [0, 19, 0, 19]
    assert (vector(engine, "first") == vector(engine, "again")).all()
    assert vector(engine, "mean") == pytest.approx(expected(prompt, "mean"), abs=TOLERANCE)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_an_embedding_that_is_preempted_begins_anew_and_is_the_same(overlaps: bool, pooling: str) -> None:
    executor = ScriptedExecutor(cells=40, overlaps=overlaps)
    engine = Engine(executor, budget=8, chunk=4, prefix_cache=False)
    engine.submit("a", (5, 6, 7, 8), max_new_tokens=30)
    for _ in range(2):
        engine.step()
    prompt = range(100, 118)
    embed(engine, "b", prompt, pooling, priority=1)
    engine.submit("c", (9, 10, 11, 12), max_new_tokens=20)
    engine.run()
    assert vector(engine, "b") == pytest.approx(expected(prompt, pooling), abs=TOLERANCE)
    assert engine.tokens("a") == list(range(9, 39))
    assert engine.holds_nothing()


def test_a_cancelled_or_failed_embedding_gives_everything_back(overlaps: bool) -> None:
    executor = ScriptedExecutor(overlaps=overlaps)
    engine = Engine(executor, budget=4, chunk=4)
    embed(engine, "gone", range(5, 30))
    for _ in range(2):
        engine.step()
    engine.loop.cancel("gone")
    engine.run()
    assert engine.finish("gone") == "cancelled"
    executor.fail_session((7, 8, 9))
    embed(engine, "broken", (7, 8, 9))
    embed(engine, "well", (8, 9, 10))
    engine.run()
    assert (engine.finish("broken"), engine.of("broken")[-1].embedding) == ("failed", None)
    assert vector(engine, "well") == pytest.approx(expected((8, 9, 10), "last"), abs=TOLERANCE)
    assert engine.holds_nothing()


def test_hidden_states_that_are_not_finite_fail_their_request_alone() -> None:
    executor = ScriptedExecutor()
    pooled = executor._pooled
    executor._pooled = lambda chunk: (
        np.array([np.nan, 0, 1], np.float32).tobytes() if 66 in chunk.tokens else pooled(chunk)
    )
    engine = Engine(executor)
    embed(engine, "bad", (66,))
    embed(engine, "good", (67,))
    engine.run()
    assert engine.finish("bad") == "failed"
    assert "not finite" in engine.of("bad")[-1].error
    assert engine.finish("good") == "length"


def test_all_logprobs_of_a_prompt_come_though_its_last_chunk_is_launched_before_they_are_read() -> None:
    engine = Engine(ScriptedExecutor(overlaps=True), budget=4, chunk=4)
    engine.submit("a", range(5, 16), max_new_tokens=0, sampling={"prompt_logprobs": 0})
    engine.run()
    (update,) = engine.of("a")
    assert update.prompt_logprobs is not None
    assert [entry and entry.token_id for entry in update.prompt_logprobs] == [None, *range(6, 16)]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("is_overlapping", [False, True])
def test_the_toy_models_vectors_are_the_same_beside_completions(pooling: str, is_overlapping: bool) -> None:
    model = ToyDecoder()
    executor = toy_executor(model)
    draw = random.Random(3)
    engine = Engine(Overlapping(executor) if is_overlapping else executor, seqs=8, budget=9, chunk=5)
    prompts = {f"e{i}": [draw.randrange(32) for _ in range(draw.choice((1, 2, 7, 20, 33)))] for i in range(8)}
    spoken = {f"g{i}": [draw.randrange(32) for _ in range(draw.randint(1, 9))] for i in range(4)}
    for i, (name, prompt) in enumerate(prompts.items()):
        if i < len(spoken):
            engine.submit(f"g{i}", spoken[f"g{i}"], max_new_tokens=12, sampling={"temperature": 0.0})
        embed(engine, name, prompt, pooling)
        engine.step()
    engine.run()
    for name, prompt in prompts.items():
        hidden = model.plain_hidden(prompt).numpy()
        assert vector(engine, name) == pytest.approx(
            unit(hidden[-1] if pooling == "last" else hidden.sum(0)), abs=TOLERANCE
        )
    for name, prompt in spoken.items():
        assert engine.tokens(name) == model.continuation(prompt, 12)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_vectors_are_transformers_own_hidden_states(model_type: str, pooling: str) -> None:
    """Behind the final norm, mixed with running completions, in chunks, with prefixes kept."""
    config = tiny(model_type)
    own = random_module(config, device=torch.device("cpu"), dtype=torch.float32, seed=5)
    model = model_from_config(config, seed=5)
    options = ExecutorOptions(
        capacity_cells=400, widths=(1, 2, 4, 8), max_dynamic=32, max_sessions=8, reserves_cells=False
    )
    engine = Engine(create_executor(model, options), seqs=8, budget=16, chunk=6)
    draw = random.Random(1)
    shared = [draw.randrange(64) for _ in range(17)]
    prompts = {
        f"e{i}": shared[: draw.choice((0, 9, 17))] + [draw.randrange(64) for _ in range(i + 1)] for i in range(6)
    }
    for i, (name, prompt) in enumerate(prompts.items()):
        engine.submit(f"g{i}", shared[: i + 3], max_new_tokens=6, sampling={"temperature": 0.0})
        embed(engine, name, prompt, pooling)
        engine.step()
    engine.run()
    for name, prompt in prompts.items():
        with torch.inference_mode():
            answer = own(torch.tensor([prompt]), output_hidden_states=True, use_cache=False)
        hidden = answer.hidden_states[-1][0].double().numpy()
        assert vector(engine, name) == pytest.approx(
            unit(hidden[-1] if pooling == "last" else hidden.sum(0)), abs=TOLERANCE
        )
    for i in range(6):
        ids = torch.tensor([shared[: i + 3]])
        with torch.inference_mode():
            whole = own.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=0
            )
        assert engine.tokens(f"g{i}") == whole[0, i + 3 :].tolist()
    if pooling == "last":
        assert sum(engine.cached(name) for name in prompts) > 0


@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_single_cache_embeds_one_prompt_after_another(pooling: str) -> None:
    model = ToyDecoder()
    executor = toy_executor(model, cache_kind="single", max_sessions=1)
    engine = Engine(executor, seqs=1, budget=9, chunk=5, prefix_cache=False)
    draw = random.Random(4)
    prompts = {f"e{i}": [draw.randrange(32) for _ in range(draw.choice((1, 7, 30)))] for i in range(5)}
    for name, prompt in prompts.items():
        embed(engine, name, prompt, pooling)
    engine.run()
    for name, prompt in prompts.items():
        hidden = model.plain_hidden(prompt).numpy()
        assert vector(engine, name) == pytest.approx(
            unit(hidden[-1] if pooling == "last" else hidden.sum(0)), abs=TOLERANCE
        )


def test_a_prefix_from_a_tier_gives_the_same_vector() -> None:
    model = ToyDecoder()
    engine = Tiered(model, FakeTier())
    prompt = tokens(80, 45)
    for name, pooling in (("cold", "last"), ("from host", "last"), ("mean", "mean")):
        embed(engine, name, prompt, pooling)
        engine.run()
        engine.forget_pool()
    assert [engine.cached(name) for name in ("cold", "from host", "mean")] == [0, 32, 0]
    hidden = model.plain_hidden(prompt).numpy()
    for name in ("cold", "from host"):
        assert vector(engine, name) == pytest.approx(unit(hidden[-1]), abs=TOLERANCE)
    assert vector(engine, "mean") == pytest.approx(unit(hidden.sum(0)), abs=TOLERANCE)
    engine.close()
