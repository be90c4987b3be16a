"""Faults that servers of this kind have had (B15 to B41), where no other test has the input or the right answer.

tests/API_RULES.md names the tests of all of them.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from engine.config import check_request
from engine.create import create_executor
from engine.errors import RequestTooLarge
from engine.executor_options import ExecutorOptions
from engine.types import GenerateRequest
from static_graphs.loading import random_module
from static_graphs.model import model_from_config
from support.looped import Engine
from support.scripted import ScriptedExecutor, scripted_info
from support.tier_chunks import FakeTier
from support.tiered import GREEDY, WAIT_S, Tiered, tokens
from support.tiny_models import tiny
from support.toy_decoder import VOCAB, ToyDecoder
from support.toy_executor import toy_executor


@pytest.fixture(scope="module")
def model() -> ToyDecoder:
    return ToyDecoder()


@pytest.fixture(params=[False, True], ids=["back-to-back", "overlapped"])
def overlaps(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def hashed(prompt: tuple[int, ...], generated: tuple[int, ...], seed: int) -> int:
    """Another text for every prompt, whatever runs beside it."""
    return hash((prompt, generated)) % 900


@pytest.mark.parametrize(("prompt", "new"), [(5000, 1), (4000, 4000)])
def test_b15_what_never_fits_the_pool_is_refused_at_once_and_named(prompt: int, new: int) -> None:
    info = scripted_info(max_model_len=16384, kv_cells=4096)
    with pytest.raises(RequestTooLarge, match="the pool has 4096"):
        check_request(info, GenerateRequest("r", (5,) * prompt, max_new_tokens=new))
    check_request(info, GenerateRequest("r", (5,) * 10, max_new_tokens=4086))


ORDERS = tuple(itertools.permutations(("slow", "wide", "short 0", "short 1")))
SOME_ORDERS = (ORDERS[1], ORDERS[14])
"""The others are as long: who asks a tier behind a slow answer waits up to two seconds, then computes."""


@pytest.mark.parametrize("has_priorities", [False, True])
@pytest.mark.parametrize("orders", [SOME_ORDERS, pytest.param(ORDERS, marks=pytest.mark.full)], ids=["some", "all"])
def test_b16_a_prefix_that_is_slow_to_come_holds_up_nobody_else(
    model: ToyDecoder, orders: Sequence[tuple[str, ...]], has_priorities: bool
) -> None:
    """Whoever waits for a tier holds no cell that the head of the queue needs, in whatever order they came."""
    tier, slow, wide = FakeTier(), tokens(20, 40), tokens(21, 50)
    first = Tiered(model, tier)
    first.ask("first", slow)
    first.close()
    prompts = {"slow": slow, "wide": wide, **{f"short {i}": tokens(30 + i, 8) for i in range(4)}}
    expected = {name: model.continuation(prompt, 3) for name, prompt in prompts.items()}
    for order in orders:
        engine = Tiered(model, tier, cells=64)
        tier.hold()
        for place, name in enumerate((*order, "short 2", "short 3")):
            priority = place % 3 if has_priorities else 0
            engine.submit(name, prompts[name], max_new_tokens=3, sampling=GREEDY, priority=priority)
        deadline_s = time.monotonic() + WAIT_S
        while not set(prompts) - {"slow"} <= {update.request_id for update in engine.updates if update.finish}:
            engine.step()
            assert time.monotonic() < deadline_s, order
        tier.release()
        engine.run()
        assert {name: engine.tokens(name) for name in prompts} == expected
        engine.close()


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_b17_what_is_preempted_loses_and_repeats_nothing(overlaps: bool, prefix_cache: bool) -> None:
    executor = ScriptedExecutor(hashed, cells=6 * 80, overlaps=overlaps)
    engine = Engine(executor, seqs=16, budget=64, chunk=8, prefix_cache=prefix_cache)
    prompts = {str(i): tuple(random.Random(i).choices(range(900), k=20)) for i in range(16)}
    for name, prompt in prompts.items():
        engine.submit(name, prompt, max_new_tokens=60)
    engine.run()
    for name, prompt in prompts.items():
        reference: list[int] = []
        while len(reference) < 60:
            reference.append(hashed(prompt, tuple(reference), 0))
        assert engine.tokens(name) == reference
        assert engine.finish(name) == "length"
    assert engine.loop.stats().preemptions > 10
    assert engine.holds_nothing()


WINDOWED = {"sliding_window": 8, "num_hidden_layers": 2}


@cache
def windowed() -> Any:
    return random_module(tiny("mistral", **WINDOWED), device=torch.device("cpu"), dtype=torch.float32, seed=5)


@cache
def reference_logprobs(prompt: tuple[int, ...], count: int) -> list[tuple[int, float]]:
    """Greedy, by a full recompute of every step."""
    ids = list(prompt)
    found = []
    with torch.inference_mode():
        for _ in range(count):
            values = windowed()(torch.tensor([ids]), use_cache=False).logits[0, -1].float().log_softmax(-1)
            token = int(values.argmax())
            found.append((token, float(values[token])))
            ids.append(token)
    return found


def test_b19_a_window_is_exact_where_the_length_reaches_it(overlaps: bool) -> None:
    config = tiny("mistral", **WINDOWED)
    options = ExecutorOptions(
        capacity_cells=600, widths=(1, 2, 4, 8), max_dynamic=32, max_sessions=8, reserves_cells=False
    )
    engine = Engine(create_executor(model_from_config(config, seed=5), options), seqs=8, budget=16, chunk=5)
    text = random.Random(2).choices(range(64), k=12)
    prompts = {f"alone {n}": random.Random(n).choices(range(64), k=n) for n in (6, 7, 8, 9, 10, 16, 17)}
    shared = {f"shared {n}": [*text, *random.Random(n).choices(range(64), k=n)] for n in (1, 4, 5)}
    sampling = {"temperature": 0.0, "logprobs": 0}
    for name, prompt in prompts.items():
        engine.submit(name, prompt, max_new_tokens=20, sampling=sampling)
        engine.run()
    for name, prompt in prompts.items():
        engine.submit(f"mixed {name}", prompt, max_new_tokens=20, sampling=sampling)
    for name, prompt in shared.items():
        engine.submit(name, prompt, max_new_tokens=20, sampling=sampling)
    engine.run()
    assert max(engine.cached(name) for name in shared) == 12
    for name, prompt in {**prompts, **shared}.items():
        expected = reference_logprobs(tuple(prompt), 20)
        for asked in (name, f"mixed {name}") if name in prompts else (name,):
            values = [entry for update in engine.of(asked) for entry in update.logprobs or ()]
            assert [entry.token_id for entry in values] == [token for token, _ in expected], asked
            assert [entry.logprob for entry in values] == pytest.approx([value for _, value in expected], abs=1e-4)


def test_b20_the_pools_sums_add_up_with_shared_prompts_leavers_and_evictions(model: ToyDecoder) -> None:
    """Full layers and window layers, host memory below, eviction in between."""
    engine = Tiered(model, FakeTier(), cells=200, seqs=6)
    shared = tokens(40, 40)
    for i in range(32):
        engine.submit(str(i), [*shared, *tokens(50 + i, 5)], max_new_tokens=4, sampling=GREEDY)
        engine.step()
        if i % 8 == 3:
            engine.loop.cancel(str(i))
        stats = engine.loop.stats()
        cells = engine.executor
        assert stats.cells_used + stats.cells_cached + cells.free_cells == cells.total_cells
    engine.run()
    stats = engine.loop.stats()
    assert stats.cells_used == 0
    assert engine.executor.free_cells + stats.cells_cached == engine.executor.total_cells
    for i in range(32):
        assert engine.finish(str(i)) == ("cancelled" if i % 8 == 3 else "length")
    engine.close()


def test_b24_what_a_preempted_request_leaves_below_is_what_it_said(model: ToyDecoder) -> None:
    prompt = tokens(60, 30)
    for _ in range(20):  # the tier may answer about the urgent one only when the victim has ended: then once more
        engine = Tiered(model, FakeTier(), cells=64)
        engine.submit("victim", prompt, max_new_tokens=25, sampling=GREEDY)
        while not engine.loop.stats().running:  # the tier is asked first
            engine.step()
        engine.submit("urgent", tokens(61, 20), max_new_tokens=30, sampling=GREEDY, priority=-1)
        engine.run()
        if engine.loop.stats().preemptions:
            break
        engine.close()
    assert engine.loop.stats().preemptions > 0
    said = model.continuation(prompt, 25)
    assert engine.tokens("victim") == said
    assert engine.store.flush(WAIT_S)
    engine.forget_pool()
    again = [*prompt, *said[:20]]
    assert engine.ask("again", again) == 48
    assert engine.tokens("again") == model.continuation(again, 3)
    engine.close()


def test_b25_a_long_prompt_whose_client_has_gone_runs_no_more_than_the_chunk_in_flight(overlaps: bool) -> None:
    """RUN-27."""
    executor = ScriptedExecutor(cells=40_000, max_session_tokens=40_000, overlaps=overlaps)
    engine = Engine(executor, budget=512, chunk=512)
    engine.submit("long", range(30_000), max_new_tokens=4)
    engine.step()
    begun = len(executor.batches)
    engine.loop.cancel("long")
    engine.run()
    assert len(executor.batches) <= begun + 1
    assert engine.finish("long") == "cancelled"
    assert engine.holds_nothing()


def test_b26_those_who_left_the_queue_are_not_worked_through(overlaps: bool) -> None:
    executor = ScriptedExecutor(overlaps=overlaps)
    engine = Engine(executor, seqs=1)
    engine.submit("a", (5,), max_new_tokens=6)
    engine.step()
    left = "bcdefghijk"
    for i, name in enumerate(left):
        engine.submit(name, (100 + i,) * 8, max_new_tokens=6)
    engine.step()
    for name in left:
        engine.loop.cancel(name)
    engine.submit("l", (7,), max_new_tokens=2)
    engine.run()
    assert engine.tokens("l") == [8, 9]
    assert {engine.finish(name) for name in left} == {"cancelled"}
    run = {token for batch in executor.batches for chunk in batch.chunks for token in chunk.tokens}
    assert not run & set(range(100, 110))
    assert executor.opened == 2


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_b41_one_prompt_says_one_thing_whoever_runs_beside_it(model: ToyDecoder, temperature: float) -> None:
    engine = Engine(toy_executor(model), seqs=8, budget=24, chunk=7)
    rng = random.Random(3)
    prompt = tokens(70, 21)
    for i in range(30):
        engine.submit(str(i), prompt, max_new_tokens=10, sampling={"temperature": temperature, "seed": 5})
        for j in range(rng.randint(0, 2)):
            beside = prompt[: rng.choice((0, 1, 20))] + rng.choices(range(VOCAB), k=rng.randint(1, 9))
            engine.submit(f"{i} beside {j}", beside, max_new_tokens=rng.randint(1, 9), priority=rng.randint(-1, 1))
        for _ in range(rng.randint(0, 6)):
            engine.step()
    engine.run()
    assert len({tuple(engine.tokens(str(i))) for i in range(30)}) == 1
