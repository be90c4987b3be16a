"""Prefix reuse (D13, PFX-*): what a request begins with, what it may not, and what room the prefixes leave."""

import random

import numpy as np
import pytest

from support.looped import Engine
from support.poison import poison_free_cells
from support.scripted import ScriptedExecutor, count_up
from support.toy_decoder import CONTEXT, ToyDecoder
from support.toy_executor import toy_executor

GREEDY = {"temperature": 0.0}


@pytest.fixture(params=[False, True], ids=["back-to-back", "overlapped"])
def overlaps(request):
    return request.param


def engine_of(overlaps=False, answer=count_up, cells=4096, **options):
    return Engine(ScriptedExecutor(answer, cells=cells, overlaps=overlaps), **options)


def ask(engine, name, prompt, **fields):
    """Submit and run to the end; -> the prompt tokens that were there already."""
    engine.submit(name, prompt, **fields)
    engine.run()
    return engine.cached(name)


# -- What a request begins with


def test_a_repeated_prompt_is_all_there_but_for_the_last_token(overlaps):
    """PFX-2."""
    engine = engine_of(overlaps)
    assert [ask(engine, name, range(9), max_new_tokens=3) for name in "abc"] == [0, 8, 8]
    assert engine.tokens("a") == engine.tokens("b") == engine.tokens("c") == [9, 10, 11]
    assert engine.loop.stats().prompt_tokens == 9 + 1 + 1


def test_api_222_the_next_turn_of_a_conversation_finds_prompt_and_answer(overlaps):
    """RUN-12, RUN-23."""
    engine = engine_of(overlaps)
    ask(engine, "first", range(9), max_new_tokens=4)
    conversation = [*range(9), *engine.tokens("first")]
    assert ask(engine, "second", [*conversation, 50, 51]) == len(conversation) - 1, "the last token was never fed"


@pytest.mark.parametrize(
    ("asked", "length"), [((0, 1, 2, 3), 3), ((0, 1, 9), 2), ((0,), 0), ((5, 6), 0), (range(12), 9)]
)
def test_hits_have_any_length(asked, length):
    engine = engine_of()
    ask(engine, "first", range(8), max_new_tokens=2)
    assert ask(engine, "second", asked) == length


def test_a_running_request_gives_what_it_has_so_far(overlaps):
    """PFX-5."""
    engine = engine_of(overlaps)
    engine.submit("running", range(6), max_new_tokens=400)
    for _ in range(10):
        engine.step()
    known = [*range(6), *engine.tokens("running")]
    engine.submit("follows", [*known, 50], max_new_tokens=1)
    while not engine.of("follows"):
        engine.step()
    assert engine.cached("follows") == len(known) - 1
    assert not engine.of("running")[-1].finish


def test_a_cancelled_request_leaves_what_it_had_computed(overlaps):
    engine = engine_of(overlaps, budget=4, chunk=4)
    engine.submit("cancelled", range(40), max_new_tokens=5)
    for _ in range(4):
        engine.step()
    engine.loop.cancel("cancelled")
    engine.run()
    assert ask(engine, "again", range(40)) == (12 if overlaps else 16)


def test_d7_a_row_that_was_wasted_is_no_part_of_the_prefix():
    """RUN-22."""
    engine = engine_of(overlaps=True)
    ask(engine, "stops", range(5), max_new_tokens=9, sampling={"stop_token_ids": (6,)})
    assert engine.tokens("stops") == [5, 6]
    assert ask(engine, "follows", [*range(7), 50]) == 6


def test_what_a_failed_step_may_have_left_is_not_used(overlaps):
    engine = engine_of(overlaps, budget=4, chunk=4)
    for number in range(3, 20):
        engine.executor.fail_step(number)
    ask(engine, "fails", range(40))
    engine.executor.heal()
    assert engine.finish("fails") == "failed"
    assert ask(engine, "again", range(40)) == 0
    assert engine.holds_nothing()


def test_salts_separate_tenants(overlaps):
    engine = engine_of(overlaps)
    ask(engine, "a", range(20), cache_salt="a")
    assert [ask(engine, f"{salt} first", range(20), cache_salt=salt) for salt in ("b", None, "")] == [0, 0, 0]
    assert [ask(engine, f"{salt} again", range(20), cache_salt=salt) for salt in ("a", "b", None, "")] == [19] * 4


def test_tenants_do_not_share_prompts_in_flight_either(overlaps):
    engine = engine_of(overlaps)
    for salt in ("a", "b", None):
        engine.submit(f"of {salt}", range(40), cache_salt=salt)
    engine.run()
    assert [engine.cached(f"of {salt}") for salt in ("a", "b", None)] == [0, 0, 0]


@pytest.mark.parametrize("max_new_tokens", [0, 2])
def test_prompt_logprobs_are_computed_for_every_row_and_leave_a_prefix(overlaps, max_new_tokens):
    engine = engine_of(overlaps)
    ask(engine, "first", range(9))
    sampling = {"prompt_logprobs": 0}
    assert ask(engine, "scored", range(9), max_new_tokens=max_new_tokens, sampling=sampling) == 0
    assert [entry and entry.token_id for entry in engine.of("scored")[0].prompt_logprobs] == [None, *range(1, 9)]
    engine.loop.reset_prefix_cache()
    ask(engine, "scored alone", range(9), max_new_tokens=max_new_tokens, sampling=sampling)
    assert ask(engine, "last", range(9)) == 8


def test_every_choice_says_what_its_prompt_found(overlaps):
    engine = engine_of(overlaps)
    ask(engine, "first", range(9))
    ask(engine, "three", range(9), n=3, max_new_tokens=4)
    assert [engine.cached("three", index) for index in range(3)] == [8, 8, 8]


def test_turned_off_nothing_is_kept():
    engine = engine_of(prefix_cache=False)
    assert [ask(engine, name, range(40), n=2) for name in "ab"] == [0, 0]
    assert engine.executor.free_cells == engine.executor.total_cells


# -- Prompts in flight


def test_pfx_7_identical_prompts_in_flight_are_computed_once(overlaps):
    engine = engine_of(overlaps, seqs=8, budget=16, chunk=8)
    for number in range(8):
        engine.submit(str(number), range(40), max_new_tokens=5)
    engine.run()
    assert [engine.tokens(str(number)) for number in range(8)] == [list(range(40, 45))] * 8
    assert [engine.cached(str(number)) for number in range(8)] == [0] + [39] * 7
    assert engine.loop.stats().prompt_tokens == 40 + 7
    assert engine.holds_nothing()


def test_prompts_that_begin_alike_wait_for_what_they_share_only(overlaps):
    engine = engine_of(overlaps, seqs=8, budget=64, chunk=8)
    shared = list(range(30))
    engine.submit("long", [*shared, *range(100, 400)], max_new_tokens=1)
    for number in range(3):
        engine.submit(str(number), [*shared, 50 + number], max_new_tokens=2)
    engine.run()
    assert [engine.cached(str(number)) for number in range(3)] == [30] * 3
    ends = [update.request_id for update in engine.updates if update.finish]
    assert ends[-1] == "long"


def test_who_waits_for_a_prefix_keeps_nobody_behind_it():
    engine = engine_of(budget=4, chunk=4)
    for name in ("donor", "waits"):
        engine.submit(name, range(200), max_new_tokens=1)
    engine.submit("other", [7, 7, 7], max_new_tokens=1)
    engine.run()
    ends = [update.request_id for update in engine.updates if update.finish]
    assert ends == ["other", "donor", "waits"]
    assert engine.cached("waits") == 199


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_nobody_waits_for_a_prefill_that_ended(overlaps, end):
    engine = engine_of(overlaps, budget=4, chunk=4)
    engine.submit("donor", range(100), max_new_tokens=1)
    engine.submit("waits", range(100), max_new_tokens=2)
    for _ in range(5):
        engine.step()
    assert engine.loop.stats().waiting == 1
    if end == "failed":
        for number in range(6, 12):
            engine.executor.fail_step(number)
        while not any(update.finish for update in engine.of("donor")):
            engine.step()
        engine.executor.heal()
    if end == "cancelled":
        engine.loop.cancel("donor")
    engine.run()
    assert (engine.finish("donor"), engine.tokens("waits")) == (end, [100, 101])
    assert engine.holds_nothing()


def test_sessions_that_computed_the_same_give_their_own_copies_back():
    """PFX-4: Both drew the same answer; the one that ends later goes on from the first one's cells."""
    engine = engine_of()
    engine.submit("short", range(5), max_new_tokens=10)
    engine.submit("long", range(5), max_new_tokens=20)
    engine.run()
    assert len(engine.executor.written) == 5 + 20 - 1
    assert ask(engine, "follows", [*range(25), 99]) == 24


# -- Room


def test_prefixes_go_before_anybody_is_preempted(overlaps):
    """PFX-6."""
    engine = engine_of(overlaps, cells=64)
    for number in range(8):
        ask(engine, str(number), range(100 * number, 100 * number + 40), max_new_tokens=10)
    stats = engine.loop.stats()
    assert (stats.preemptions, stats.cells_used) == (0, 0)
    assert stats.cells_cached > 0
    assert engine.holds_nothing()


def test_the_least_recently_used_prefix_goes_first():
    """PFX-4."""
    engine = engine_of(cells=100)
    ask(engine, "a", range(0, 30))
    ask(engine, "b", range(100, 130))
    ask(engine, "a again", range(0, 30))
    ask(engine, "c", range(200, 240))
    assert ask(engine, "a once more", range(0, 30), max_new_tokens=1) == 29
    assert ask(engine, "b again", range(100, 130), max_new_tokens=1) < 29


def test_a_request_that_shares_what_runs_needs_room_for_its_own_tokens_only():
    engine = engine_of(cells=100, seqs=8)
    engine.submit("runs", range(60), max_new_tokens=10)
    for _ in range(5):
        engine.step()
    engine.submit("shares", [*range(60), 7], max_new_tokens=2)
    while not engine.of("shares"):
        engine.step()
    assert not engine.of("runs")[-1].finish
    assert engine.cached("shares") == 60
    engine.run()
    assert engine.loop.stats().preemptions == 0


def test_d10_a_preempted_session_comes_back_from_the_tree(overlaps):
    engine = engine_of(overlaps, cells=60, seqs=2)
    for name, start in (("a", 100), ("b", 300)):
        engine.submit(name, range(start, start + 10), max_new_tokens=35)
    engine.run()
    stats = engine.loop.stats()
    assert stats.preemptions > 0
    assert engine.tokens("a") == list(range(110, 145))
    assert engine.tokens("b") == list(range(310, 345))
    assert [engine.cached(name) for name in "ab"] == [0, 0], "its own work is no hit"
    resumed = [chunk for batch in engine.executor.batches for chunk in batch.chunks if chunk.position == 0]
    assert len(resumed) == 2, "nobody began again from the first token"
    assert engine.holds_nothing()


def test_a_prompt_whose_forks_still_run_is_not_evicted(overlaps):
    """The stem stops at its first token; its prompt is what its forks go on from."""
    answer = {4: 0}
    engine = engine_of(
        overlaps, lambda prompt, generated, seed: answer.get(seed, 50) if not generated else 60, cells=60
    )
    sampling = {"seed": 4, "stop_token_ids": (0,)}
    engine.submit("forks", range(20), n=3, max_new_tokens=12, sampling=sampling)
    while not engine.of("forks"):
        engine.step()
    engine.submit("presses", range(500, 530), max_new_tokens=5)
    engine.run()
    assert [engine.tokens("forks", index) for index in range(3)] == [[0], [50] + [60] * 11, [50] + [60] * 11]
    assert engine.finish("presses") == "length"
    assert engine.holds_nothing()


# -- Any mix, against oracles


class WatchedExecutor(ScriptedExecutor):
    """Knows every token list that was ever computed, and what a session that opens could have begun with."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.computed = []

    def open_session(self, params, *, seed, prompt, generated=(), prefix=None):
        if prefix is not None:  # else it is a clone
            known = [session.tokens for session in self.sessions.values()] + self.computed
            wanted = [*prompt, *generated][:-1]
            assert len(prefix) == max((common(tokens, wanted) for tokens in known), default=0)
        return super().open_session(params, seed=seed, prompt=prompt, generated=generated, prefix=prefix)

    def close_session(self, session_id):
        if session_id in self.sessions:
            self.computed.append(list(self.sessions[session_id].tokens))
        super().close_session(session_id)


def common(a, b):
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


def hashed(prompt, generated, seed):
    """Few tokens, so that answers meet; each depends on everything before it."""
    return hash((prompt[-3:], generated[-2:], len(generated) % 3)) % 4


def random_turns(rng, num, answer, *, ids, longest, salts=(None,)):
    """Turns of a few conversations that begin alike: (name, prompt, new tokens, salt).

    answer: (prompt, new tokens) -> the tokens that the model says.
    """
    shared = [rng.randrange(ids) for _ in range(longest // 3)]
    conversations = [shared[: rng.randint(0, len(shared))] for _ in range(4)]
    turns = []
    for number in range(num):
        at = rng.randrange(len(conversations))
        prompt = conversations[at] + [rng.randrange(ids) for _ in range(rng.randint(1, 6))]
        new = rng.randint(1, 15)
        turns.append((str(number), prompt, new, salts[at % len(salts)]))
        if rng.random() < 0.7:  # else the same turn is tried again
            conversations[at] = [*prompt, *answer(prompt, new)]
        if len(conversations[at]) > longest:
            conversations[at] = shared[: rng.randint(0, len(shared))]
    return turns


def check_books(engine):
    """Each held cell is a session's or the tree's, and what counts as free with eviction is just that."""
    executor, prefixes = engine.executor, engine.loop._prefixes
    assert prefixes.cached_cells == len(executor.written) - executor.session_cells
    assert prefixes.available_cells == executor.total_cells - executor.session_cells
    prefixes._tree.check_integrity()
    assert prefixes._tree.num_leases == len(executor.sessions)


@pytest.mark.parametrize("seed", range(12))
def test_every_request_begins_with_the_longest_prefix_there_is(seed):
    """PFX-2: With room for everything, so that nothing is evicted."""
    rng = random.Random(seed)
    engine = Engine(WatchedExecutor(hashed, cells=20_000), seqs=rng.randint(2, 6), budget=24, chunk=rng.randint(2, 12))
    turns = random_turns(rng, 40, alone, ids=4, longest=80)
    for name, prompt, new, _ in turns:
        engine.submit(name, prompt, max_new_tokens=new, n=rng.choice((1, 1, 1, 2)))
        for _ in range(rng.randint(0, 4)):
            engine.step()
            check_books(engine)
    engine.run()
    assert engine.loop.stats().preemptions == 0
    assert sum(engine.cached(name) for name, *_ in turns) > 100
    assert engine.holds_nothing()


@pytest.mark.parametrize("seed", range(25))
def test_under_pressure_every_request_gets_the_tokens_it_gets_without_reuse(seed, overlaps):
    """Forks, priorities, cancels, preemptions, evictions and salts over too few cells."""
    rng = random.Random(seed)
    executor = ScriptedExecutor(hashed, cells=90, overlaps=overlaps)
    engine = Engine(executor, seqs=rng.randint(3, 6), budget=rng.randint(16, 32), chunk=rng.randint(1, 8))
    expected = {}
    for name, prompt, new, salt in random_turns(rng, 30, alone, ids=4, longest=60, salts=(None, "a")):
        n = rng.choice((1, 1, 1, 3))
        engine.submit(name, prompt, max_new_tokens=new, n=n, priority=rng.randint(0, 1), cache_salt=salt)
        expected[name] = (n, alone(prompt, new))
        for _ in range(rng.randint(0, 5)):
            engine.step()
            check_books(engine)
        if rng.random() < 0.1:
            engine.loop.cancel(str(rng.randint(0, int(name))))
    engine.run()
    for name, (n, tokens) in expected.items():
        for index in range(n):
            drawn = engine.tokens(name, index)
            assert drawn == (tokens if engine.finish(name, index) == "length" else tokens[: len(drawn)])
    assert engine.holds_nothing()
    assert executor.opened == executor.closed


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_under_pressure_every_request_gets_its_tokens_over_many_seeds(seed, overlaps):
    test_under_pressure_every_request_gets_the_tokens_it_gets_without_reuse(seed, overlaps)


def alone(prompt, new):
    generated = ()
    for _ in range(new):
        generated += (hashed(tuple(prompt), generated, 0),)
    return list(generated)


# -- Real cells


@pytest.fixture(scope="module")
def model():
    return ToyDecoder()


class Toy(Engine):
    """The toy decoder's engine, with NaN in every free cell before each step."""

    def __init__(self, model, *, cells=255, seqs=8, **options):
        super().__init__(toy_executor(model, capacity_cells=cells), seqs=seqs, budget=24, chunk=8, **options)

    def step(self):
        poison_free_cells(self.executor.cache_control)
        return super().step()

    def holds_nothing(self):
        self.loop.reset_prefix_cache()
        metrics = self.executor.kv_metrics()
        return (metrics.free_cells, metrics.num_sequences) == (self.executor.total_cells, 0)


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 40])
def test_b18_the_first_answer_to_a_prompt_is_the_second_and_that_of_eight_at_once(model, length):
    prompt = [int(token) for token in np.random.default_rng(length).integers(0, 32, length)]
    toy = Toy(model)
    new = min(20, CONTEXT - length - 2)
    for name in "abc":
        assert ask(toy, name, prompt, max_new_tokens=new, sampling=GREEDY) == (0 if name == "a" else length - 1)
    for number in range(8):
        toy.submit(str(number), prompt, max_new_tokens=new, sampling=GREEDY)
    toy.run()
    expected = model.continuation(prompt, new)
    assert all(toy.tokens(name) == expected for name in "abc01234567")
    for name, changed in (("longer", [*prompt, 9]), ("changed", [*prompt[:-1], (prompt[-1] + 1) % 32])):
        assert ask(toy, name, changed, max_new_tokens=new, sampling=GREEDY) <= length
        assert toy.tokens(name) == model.continuation(changed, new)
    assert toy.holds_nothing()


@pytest.mark.parametrize("seed", range(6))
def test_greedy_tokens_are_the_same_with_reuse_and_without(model, seed):
    """Many turns over few cells: what was evicted is NaN, what is shared is what was computed."""
    rng = random.Random(seed)
    turns = random_turns(rng, 24, model.continuation, ids=32, longest=40)
    computed = []
    for prefix_cache in (True, False):
        toy = Toy(model, cells=110, seqs=4, prefix_cache=prefix_cache)
        for name, prompt, new, _ in turns:
            toy.submit(name, prompt, max_new_tokens=new, sampling=GREEDY)
            for _ in range(rng.randint(0, 12)):
                toy.step()
            if rng.random() < 0.1:
                toy.loop.reset_prefix_cache()
        toy.run()
        assert [toy.tokens(name) for name, *_ in turns] == [model.continuation(turn[1], turn[2]) for turn in turns]
        assert toy.holds_nothing()
        computed.append(toy.loop.stats().prompt_tokens)
    assert computed[0] < computed[1]
