"""The engine's turn on a scripted executor: what every request is owed, whatever else runs beside it."""

import random

import pytest

from engine.loop import MAX_FAILED_STEPS
from engine.sessions import FORGIVEN_TOKENS
from support.looped import Engine
from support.scripted import ScriptedExecutor


@pytest.fixture(params=[False, True], ids=["back-to-back", "overlapped"])
def overlaps(request):
    return request.param


def test_a_request_gets_its_tokens_and_one_end(overlaps):
    engine = Engine(ScriptedExecutor(overlaps=overlaps))
    engine.submit("a", (5, 6), max_new_tokens=3)
    engine.run()
    assert (engine.tokens("a"), engine.finish("a")) == ([7, 8, 9], "length")
    assert engine.holds_nothing()


def test_run_19_a_stop_token_is_delivered_and_beats_the_length(overlaps):
    engine = Engine(ScriptedExecutor(overlaps=overlaps))
    engine.submit("a", (5,), max_new_tokens=3, sampling={"stop_token_ids": (8,)})
    engine.run()
    assert (engine.tokens("a"), engine.finish("a"), engine.of("a")[-1].stop_token_id) == ([6, 7, 8], "stop", 8)


def test_x_10_a_full_context_ends_its_own_choice_by_length_and_no_other(overlaps):
    engine = Engine(ScriptedExecutor(max_session_tokens=6, overlaps=overlaps))
    engine.submit("long", (5, 6, 7, 8), max_new_tokens=9)
    engine.submit("short", (20,), max_new_tokens=5)
    engine.run()
    assert (engine.tokens("long"), engine.finish("long")) == ([9, 10, 11], "length")
    assert (engine.tokens("short"), engine.finish("short")) == ([21, 22, 23, 24, 25], "length")
    assert engine.holds_nothing()


def test_x_10_a_prompt_past_the_context_fails_alone_and_says_why(overlaps):
    engine = Engine(ScriptedExecutor(max_session_tokens=6, overlaps=overlaps))
    engine.submit("long", range(7), max_new_tokens=1)
    engine.submit("short", (20,), max_new_tokens=2)
    engine.run()
    assert (engine.tokens("long"), engine.finish("long")) == ([], "failed")
    assert "the limit of 6" in engine.of("long")[-1].error
    assert (engine.tokens("short"), engine.finish("short")) == ([21, 22], "length")


def test_a_row_behind_an_unseen_stop_is_wasted_and_never_delivered():
    engine = Engine(ScriptedExecutor(overlaps=True))
    engine.submit("a", (5,), max_new_tokens=9, sampling={"stop_token_ids": (6,)})
    engine.run()
    assert engine.tokens("a") == [6]
    assert [len(batch.chunks) for batch in engine.executor.batches] == [1, 1]
    assert engine.holds_nothing()


def test_overlap_launches_the_next_step_before_the_last_ids_are_known():
    """RUN-17, RUN-20, RUN-21."""
    engine = Engine(ScriptedExecutor(overlaps=True))
    engine.submit("a", (5,), max_new_tokens=3)
    assert engine.step() == []
    engine.step()
    assert engine.executor.batches[1].chunks[0].tokens == (-1,)


def test_min_tokens_come_before_any_stop(overlaps):
    engine = Engine(ScriptedExecutor(overlaps=overlaps))
    engine.submit("a", (5,), max_new_tokens=4, sampling={"stop_token_ids": (6, 7, 8), "min_tokens": 2})
    engine.run()
    assert engine.tokens("a") == [6, 7, 8]


def test_n_choices_share_one_prefill_and_draw_from_their_own_seeds(overlaps):
    executor = ScriptedExecutor(lambda prompt, generated, seed: 100 * seed + len(generated), overlaps=overlaps)
    engine = Engine(executor)
    engine.submit("a", range(9), n=3, max_new_tokens=2, sampling={"seed": 4})
    engine.run()
    assert [engine.tokens("a", index) for index in range(3)] == [[400, 401], [500, 501], [600, 601]]
    assert engine.loop.stats().prompt_tokens == 9
    assert engine.holds_nothing()


def test_4_3_no_seed_is_fresh_randomness_for_each_request():
    engine = Engine(ScriptedExecutor(lambda prompt, generated, seed: seed % 2**40))
    for name in ("a", "b"):
        engine.submit(name, (5,), max_new_tokens=1)
    engine.run()
    assert engine.tokens("a") != engine.tokens("b")


def test_a_first_token_that_stops_one_choice_leaves_the_others_running(overlaps):
    executor = ScriptedExecutor(lambda prompt, generated, seed: seed if not generated else 50, overlaps=overlaps)
    engine = Engine(executor)
    engine.submit("a", range(3), n=3, max_new_tokens=2, sampling={"seed": 0, "stop_token_ids": (0,)})
    engine.run()
    assert [engine.tokens("a", index) for index in range(3)] == [[0], [1, 50], [2, 50]]
    assert [engine.finish("a", index) for index in range(3)] == ["stop", "length", "length"]
    assert engine.holds_nothing()


def test_nothing_to_draw_and_nothing_to_score_ends_without_a_step():
    engine = Engine(ScriptedExecutor())
    engine.submit("a", (5, 6), n=2, max_new_tokens=0)
    engine.run()
    assert [engine.finish("a", index) for index in range(2)] == ["length", "length"]
    assert engine.executor.batches == []


@pytest.mark.parametrize("max_new", [0, 2])
def test_prompt_logprobs_come_once_and_cover_every_chunk(overlaps, max_new):
    """RUN-13."""
    engine = Engine(ScriptedExecutor(overlaps=overlaps))
    engine.submit("a", range(10, 19), max_new_tokens=max_new, sampling={"prompt_logprobs": 1, "logprobs": 0})
    engine.run()
    first, *others = engine.of("a")
    assert [entry and entry.token_id for entry in first.prompt_logprobs] == [None, *range(11, 19)]
    assert all(update.prompt_logprobs is None for update in others)
    assert engine.finish("a") == "length"


def test_a_cancelled_request_ends_once_for_each_choice_and_frees_its_cells(overlaps):
    """SCH-9, RUN-18."""
    engine = Engine(ScriptedExecutor(overlaps=overlaps))
    engine.submit("a", range(30), n=2, max_new_tokens=9)
    engine.submit("b", (1, 2), max_new_tokens=4)
    engine.step()
    engine.loop.cancel("a")
    engine.loop.cancel("a")
    engine.run()
    assert [engine.finish("a", index) for index in range(2)] == ["cancelled", "cancelled"]
    assert engine.tokens("b") == [3, 4, 5, 6]
    assert engine.holds_nothing()


def test_a_cancelled_choice_frees_its_own_cells_at_once_and_its_siblings_go_on(overlaps):
    engine = Engine(ScriptedExecutor(overlaps=overlaps))
    engine.submit("a", (5, 6), n=3, max_new_tokens=6)
    while not engine.tokens("a", 1):
        engine.step()
    sessions = len(engine.executor.sessions)
    engine.loop.cancel("a", 1)
    engine.loop.cancel("a", 1)
    engine.loop.cancel("a", 7)
    assert len(engine.executor.sessions) == sessions - 1
    engine.run()
    assert [engine.finish("a", index) for index in range(3)] == ["length", "cancelled", "length"]
    assert engine.tokens("a", 0) == engine.tokens("a", 2) == [7, 8, 9, 10, 11, 12]
    assert engine.holds_nothing()


@pytest.mark.parametrize("index", [0, 1])
def test_a_choice_cancelled_before_it_has_a_session_ends_behind_the_first_draw(overlaps, index):
    engine = Engine(ScriptedExecutor(overlaps=overlaps))
    engine.submit("a", (5, 6), n=2, max_new_tokens=6)
    engine.loop.cancel("a", index)
    engine.run()
    assert engine.finish("a", index) == "cancelled"
    assert (engine.tokens("a", index), engine.tokens("a", 1 - index)) == ([7], [7, 8, 9, 10, 11, 12])
    assert engine.holds_nothing()


def test_choices_cancelled_one_by_one_until_none_is_left_end_without_a_step():
    engine = Engine(ScriptedExecutor())
    engine.submit("a", (5, 6), n=2, max_new_tokens=6)
    engine.loop.cancel("a", 1)
    engine.loop.cancel("a", 0)
    engine.run()
    assert [engine.finish("a", index) for index in range(2)] == ["cancelled"] * 2
    assert engine.executor.batches == []


def test_a_cancelled_choice_that_waits_leaves_the_queue():
    """SCH-9."""
    engine = Engine(ScriptedExecutor(), seqs=1)
    engine.submit("a", (1,), max_new_tokens=5)
    engine.submit("b", (2,), max_new_tokens=5)
    engine.step()
    engine.loop.cancel("b")
    assert engine.loop.stats().waiting == 0
    engine.run()
    assert engine.finish("b") == "cancelled"


def test_a_deadline_ends_a_request_wherever_it_is():
    now = [0.0]
    engine = Engine(ScriptedExecutor(), seqs=1, clock=lambda: now[0])
    engine.submit("running", (1,), max_new_tokens=50, deadline_s=5.0)
    engine.submit("waiting", (2,), max_new_tokens=50, deadline_s=5.0)
    engine.submit("patient", (3,), max_new_tokens=2)
    engine.step()
    now[0] = 6.0
    engine.run()
    for name in ("running", "waiting"):
        assert engine.finish(name) == "failed"
        assert engine.of(name)[-1].error_code == "deadline_exceeded"
        assert "5.0 s" in engine.of(name)[-1].error
    assert engine.finish("patient") == "length"


def test_a_queue_timeout_ends_what_still_waits_and_nothing_that_has_run():
    now = [0.0]
    engine = Engine(ScriptedExecutor(), seqs=1, clock=lambda: now[0])
    engine.submit("running", (1,), max_new_tokens=5, queue_timeout_s=5.0)
    engine.submit("waiting", (2,), max_new_tokens=5, queue_timeout_s=5.0)
    engine.step()
    now[0] = 6.0
    engine.run()
    assert (engine.finish("running"), engine.finish("waiting")) == ("length", "failed")
    assert engine.of("waiting")[-1].error_code == "queue_timeout"
    assert engine.holds_nothing()


@pytest.mark.parametrize("number", range(1, 15))
def test_r12_a_step_that_fails_once_costs_nobody_a_token(overlaps, number):
    executor = ScriptedExecutor(overlaps=overlaps)
    executor.fail_step(number)
    engine = Engine(executor, seqs=3, budget=8, chunk=4)
    engine.submit("a", (1,), max_new_tokens=9)
    engine.submit("b", range(20), max_new_tokens=5, n=2)
    engine.submit("later", (3,), max_new_tokens=7)
    engine.run()
    assert (engine.tokens("a"), engine.tokens("later")) == (list(range(2, 11)), list(range(4, 11)))
    assert engine.tokens("b", 0) == engine.tokens("b", 1) == list(range(20, 25))
    assert engine.loop.stats().steps_failed == 1
    assert engine.holds_nothing()


def test_r10_what_a_step_fails_of_ends_alone_and_the_others_go_on(overlaps):
    """RUN-15."""
    executor = ScriptedExecutor(overlaps=overlaps)
    executor.fail_steps_with((2,))
    engine = Engine(executor, seqs=8, budget=16)
    for first in range(1, 8):
        engine.submit(str(first), (first,), max_new_tokens=6, n=2 if first == 5 else 1)
    engine.run()
    for first in (1, 3, 4, 5, 6, 7):
        assert engine.tokens(str(first)) == list(range(first + 1, first + 7))
    assert engine.tokens("5", 1) == engine.tokens("5", 0)
    assert (engine.finish("2"), engine.of("2")[-1].error_code) == ("failed", "step_failed")
    assert engine.tokens("2") == []
    assert engine.holds_nothing()


def test_an_executor_whose_every_step_fails_ends_each_request_once(overlaps):
    """RUN-15."""
    executor = ScriptedExecutor(overlaps=overlaps)
    for number in range(1, 200):
        executor.fail_step(number)
    engine = Engine(executor, seqs=2)
    for first in range(1, 6):
        engine.submit(str(first), (first,), max_new_tokens=6)
    engine.run()
    assert [engine.finish(str(first)) for first in range(1, 6)] == ["failed"] * 5
    assert engine.holds_nothing()


def test_a_session_that_is_in_one_failed_step_after_another_ends(overlaps):
    """Each time it gets through alone, and fails again among others."""
    executor = ScriptedExecutor(overlaps=overlaps)
    engine = Engine(executor, seqs=2)
    engine.submit("a", (1,), max_new_tokens=200)
    for _ in range(MAX_FAILED_STEPS + 1):
        drawn = len(engine.tokens("a"))
        while len(engine.tokens("a")) < drawn + 3:
            engine.step()
        executor.fail_step(len(executor.batches) + 1)
    engine.run()
    assert engine.finish("a") == "failed"
    assert engine.tokens("a") == list(range(2, 2 + len(engine.tokens("a"))))
    assert engine.holds_nothing()


def test_r10_a_long_answer_outlives_any_number_of_requests_that_steps_fail_of(overlaps):
    executor = ScriptedExecutor(overlaps=overlaps)
    executor.fail_steps_with((2,))
    engine = Engine(executor, seqs=2)
    new = 2 * MAX_FAILED_STEPS * (FORGIVEN_TOKENS + 16)  # a step each, a few of them lost
    engine.submit("long", (5,), max_new_tokens=new)
    for number in range(2 * MAX_FAILED_STEPS):
        for _ in range(FORGIVEN_TOKENS + 16):
            engine.step()
        engine.submit(f"bad {number}", (2,), max_new_tokens=6)
    engine.run()
    assert engine.loop.stats().steps_failed >= 2 * MAX_FAILED_STEPS
    assert (engine.finish("long"), engine.tokens("long")) == ("length", list(range(6, 6 + new)))
    assert engine.holds_nothing()


def test_r10_a_request_that_cannot_be_opened_ends_alone(overlaps):
    class Choosy(ScriptedExecutor):
        def open_session(self, params, **fields):
            if fields["prompt"] == (2,):
                raise ValueError("not this one")
            return super().open_session(params, **fields)

    engine = Engine(Choosy(overlaps=overlaps), seqs=4)
    for first in range(1, 4):
        engine.submit(str(first), (first,), max_new_tokens=3)
    engine.run()
    assert [engine.finish(str(first)) for first in range(1, 4)] == ["length", "failed", "length"]
    assert "not this one" in engine.of("2")[-1].error
    assert engine.loop.stats().rows_failed == 1
    assert engine.holds_nothing()


def test_x_10_one_session_that_fails_ends_alone(overlaps):
    """RUN-16."""
    executor = ScriptedExecutor(overlaps=overlaps)
    executor.fail_session((1,), "this one cannot go on")
    engine = Engine(executor)
    engine.submit("a", (1,), max_new_tokens=5)
    engine.submit("b", (2,), max_new_tokens=3)
    engine.run()
    assert (engine.finish("a"), engine.of("a")[-1].error) == ("failed", "this one cannot go on")
    assert engine.tokens("b") == [3, 4, 5]
    assert engine.holds_nothing()


def test_preemption_loses_no_token_and_repeats_none(overlaps):
    engine = Engine(ScriptedExecutor(cells=24, overlaps=overlaps))
    for name, start in (("a", 100), ("b", 200)):
        engine.submit(name, range(start, start + 3), max_new_tokens=20)
    engine.run()
    assert engine.loop.stats().preemptions > 0
    assert engine.tokens("a") == list(range(103, 123))
    assert engine.tokens("b") == list(range(203, 223))
    assert engine.holds_nothing()


def test_the_urgent_request_is_not_the_one_that_is_preempted():
    engine = Engine(ScriptedExecutor(cells=24))
    engine.submit("later", range(3), max_new_tokens=20, priority=1)
    engine.step()
    engine.submit("urgent", range(100, 103), max_new_tokens=20, priority=0)
    engine.run()
    ends = [update.request_id for update in engine.updates if update.finish]
    assert ends == ["urgent", "later"]


def test_an_engine_that_cannot_move_says_so():
    engine = Engine(ScriptedExecutor(cells=4))
    engine.submit("too big", range(9), max_new_tokens=1)
    with pytest.raises(RuntimeError, match="1 waiting and 0 running choices, 4 of 4 cells free"):
        engine.step()


def hashed(prompt, generated, seed):
    """A next token that depends on everything before it."""
    return hash((prompt, generated, seed)) % 97


@pytest.mark.parametrize("seed", range(40))
def test_x_11_any_mix_gives_each_request_what_it_gets_alone(seed, overlaps):
    """Random prompts, forks, stops, priorities and cancels over too few cells; at the end nothing is held."""
    rng = random.Random(seed)
    executor = ScriptedExecutor(hashed, cells=60, overlaps=overlaps)
    engine = Engine(executor, seqs=rng.randint(3, 6), budget=rng.randint(4, 20), chunk=rng.randint(1, 4))
    expected, cancelled, submitted = {}, set(), []
    while len(submitted) < 25 or engine.loop.has_work():
        if len(submitted) < 25 and rng.random() < 0.5:
            name = str(len(submitted))
            prompt = tuple(rng.randrange(97) for _ in range(rng.randint(1, 25)))
            n, new, root = rng.choice([1, 1, 1, 3]), rng.randint(1, 25), rng.randrange(1000)
            stops = tuple(rng.sample(range(97), 4))
            engine.submit(
                name,
                prompt,
                n=n,
                max_new_tokens=new,
                priority=rng.randint(0, 2),
                sampling={"seed": root, "stop_token_ids": stops},
            )
            submitted.append(name)
            expected[name] = [alone(prompt, root + index, new, stops) for index in range(n)]
        if submitted and rng.random() < 0.05:
            name = rng.choice(submitted)
            cancelled.add(name)
            engine.loop.cancel(name, rng.choice([None, 0, 2]))
        if engine.loop.has_work():
            engine.step()
    for name, choices in expected.items():
        for index, tokens in enumerate(choices):
            if engine.finish(name, index) == "cancelled":
                assert name in cancelled
                assert engine.tokens(name, index) == tokens[: len(engine.tokens(name, index))]
            else:
                assert engine.tokens(name, index) == tokens
    assert engine.holds_nothing()
    assert executor.opened == executor.closed


def alone(prompt, seed, new, stops):
    generated = ()
    while len(generated) < new:
        generated += (hashed(prompt, generated, seed),)
        if generated[-1] in stops:
            break
    return list(generated)
