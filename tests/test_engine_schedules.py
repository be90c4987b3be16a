"""T-CUDA and X-11 on CPU: whatever runs in one step, each session draws what it would draw alone.

The toy decoder has a layer that sees everything and one with a window of 4; K/V of freed cells is NaN, so whoever reads
a cell that is not its own draws nonsense.
"""

import random

import pytest

from engine.loop import EngineLoop
from engine.scheduler import SchedulerLimits
from engine.types import GenerateRequest, SamplingParams
from support.poison import poison_free_cells
from support.toy_decoder import ToyDecoder
from support.toy_executor import (
    GREEDY,
    METHODS,
    RandomLife,
    draw,
    generate,
    last_row,
    open_greedy,
    toy_executor,
)

PROMPTS = [(1,), (4, 5, 6), (9, 3, 27, 3, 14, 8, 30), tuple(range(3, 23))]
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def model():
    return ToyDecoder()


@pytest.fixture(params=METHODS)
def executor(request, model):
    return toy_executor(model, **METHODS[request.param])


def test_t_cuda_concurrent_generations_equal_their_eager_continuations_also_on_freed_cells(executor, model):
    expected = [model.continuation(prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert len({token for tokens in expected for token in tokens}) >= 8
    for _ in range(2):
        poison_free_cells(executor.cache_control)
        assert generate(executor, PROMPTS, NEW_TOKENS) == expected
    metrics = executor.kv_metrics()
    assert metrics.growth_count > 0
    assert metrics.rows > 16
    assert (metrics.free_cells, metrics.num_sequences, metrics.logical_length) == (255, 0, 0)


def test_t_cuda_sessions_share_their_forwards(model):
    executor = toy_executor(model)
    generate(executor, PROMPTS, NEW_TOKENS)
    calls = dict(executor.method_calls())
    assert calls == {"forward_1": 0, "forward_2": 0, "forward_4": 5, "forward_8": 0, "forward_others": 1}


def test_t_cuda_one_prompt_twice_in_a_batch_draws_the_same_twice(executor, model):
    first, second = generate(executor, [PROMPTS[2]] * 2, NEW_TOKENS)
    assert first == second == model.continuation(PROMPTS[2], NEW_TOKENS)


def test_t_cuda_logical_length_never_passes_the_tokens_held_or_the_rows(model):
    executor = toy_executor(model)
    session = open_greedy(executor)
    for start in range(0, 60, 5):
        draw(executor, last_row(session, range(5), start))
        metrics = executor.kv_metrics()
        assert metrics.logical_length == start + 5 <= metrics.rows


def test_t_cuda_a_schedule_of_all_widths_then_shared_decodes_uses_every_method(executor, model):
    text = [random.Random(1).randrange(32) for _ in range(41)]
    prefilled, held = open_greedy(executor), 0
    for width in (20, 1, 4, 2, 4, 7, 3):
        poison_free_cells(executor.cache_control)
        drawn = draw(executor, last_row(prefilled, text[held : held + width], held))
        held += width
        assert drawn == [model.next_token(text[:held])]
    tokens = {prefilled: text + drawn}
    for prompt in PROMPTS[:3]:
        session = open_greedy(executor)
        (token,) = draw(executor, last_row(session, prompt, 0))
        tokens[session] = [*prompt, token]
    for _ in range(5):
        chunks = [last_row(session, held[-1:], len(held) - 1) for session, held in tokens.items()]
        for held, token in zip(tokens.values(), draw(executor, *chunks), strict=True):
            assert token == model.next_token(held)
            held.append(token)
    assert all(calls > 0 for _, calls in executor.method_calls())


def test_pack_4_a_whole_batch_is_checked_before_any_session_is_rewound(model):
    """PACK-6: a session that is wrong is refused alone, where the rule fails the batch; the design wins (D8)."""
    executor = toy_executor(model, capacity_cells=32)
    held, other = open_greedy(executor), open_greedy(executor)
    draw(executor, last_row(held, (1, 2, 3, 4), 0))
    assert [executor.position(held), executor.position(other)] == [4, 0]
    assert draw(executor, last_row(held, (3,), 2), last_row(other, (7,), 0)) == [
        model.next_token((1, 2, 3)),
        model.next_token((7,)),
    ]
    assert executor.position(held) == 3


def live(executor, model, seed, operations, **options):
    life = RandomLife(executor, model, seed, **options)
    life.run(operations)
    assert life.opened == life.closed
    metrics = executor.kv_metrics()
    assert (metrics.free_cells, metrics.num_sequences) == (executor.total_cells, 0)
    return life


def test_random_schedules_draw_what_each_session_draws_alone(executor, model):
    """Acceptance (a), in short: with clones, rewinds and cancels."""
    drawn = 0
    for seed in range(100):
        drawn += live(executor, model, seed, 20, behind_each=lambda: poison_free_cells(executor.cache_control)).drawn
    assert drawn > 1000


@pytest.mark.full
def test_a_thousand_random_schedules_draw_what_each_session_draws_alone(executor, model):
    """Acceptance (a)."""
    for seed in range(500):
        live(executor, model, seed, 60, behind_each=lambda: poison_free_cells(executor.cache_control))


def test_x_11_ten_thousand_random_operations_leave_nothing_behind(model):
    executor = toy_executor(model, capacity_cells=150)
    live(executor, model, 11, 10_000, checked=0.05, steps=3.0)
    executor.cache_control.clear()
    assert executor.kv_metrics().logical_length == 0


def test_x_11_requests_that_are_cancelled_forked_and_preempted_leave_nothing_behind(model):
    executor = toy_executor(model, capacity_cells=90, max_sessions=6)
    loop = EngineLoop(executor, SchedulerLimits(max_num_seqs=6, prefill_budget=32, mixed_budget=32, prefill_chunk=8))
    rng = random.Random(5)
    ends: dict[tuple[str, int], int] = {}
    expected = set()
    for number in range(120):
        request = GenerateRequest(
            str(number),
            tuple(rng.randrange(32) for _ in range(rng.randint(1, 20))),
            n=rng.choice((1, 1, 3)),
            sampling=rng.choice((GREEDY, SamplingParams(seed=number))),
            max_new_tokens=rng.randint(1, 40),
        )
        loop.submit(request)
        expected.update((request.request_id, index) for index in range(request.n))
        for _ in range(rng.randint(0, 3)):
            count(loop.step(), ends)
        if rng.random() < 0.6:
            loop.cancel(str(rng.randint(max(0, number - 20), number)))
    while loop.has_work():
        count(loop.step(), ends)
    assert ends == dict.fromkeys(expected, 1)
    assert loop.stats().preemptions > 0
    loop.reset_prefix_cache()
    metrics = executor.kv_metrics()
    assert (metrics.free_cells, metrics.num_sequences) == (90, 0)


def count(updates, ends):
    for update in updates:
        assert update.error is None, update.error
        if update.finish:
            ends[update.request_id, update.index] = ends.get((update.request_id, update.index), 0) + 1
