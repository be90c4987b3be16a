"""Tiers below the pool: the same tokens with and without, hits from host memory and disk, faults cost hits only."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from cache.geometry import CacheFull
from cache.offload.transfers import CopyStream, InlineStream, Mark
from engine.kv_tiers import LONGEST_FETCH_S
from engine.thread import run_engine
from engine.types import GenerateRequest, SamplingParams
from engine.wire import FromEngine, Step, Stop, Submit, ToEngine
from support.redis_server import Server
from support.scripted import scripted_info
from support.tier_chunks import FakeTier
from support.tiered import GREEDY, WAIT_S, LaggingMark, LaggingStream, Tiered, tokens
from support.toy_decoder import CONTEXT, ToyDecoder
from support.toy_executor import toy_executor


@pytest.fixture(scope="module")
def model() -> ToyDecoder:
    return ToyDecoder()


@pytest.fixture(params=[InlineStream, LaggingStream], ids=["inline", "lagging"])
def stream(request: pytest.FixtureRequest) -> type[CopyStream]:
    return request.param


@pytest.fixture(params=[False, True], ids=["whole windows", "tails"])
def tiered(model: ToyDecoder, stream: type[CopyStream], request: pytest.FixtureRequest) -> Iterator[Tiered]:
    engine = Tiered(model, stream=stream, tails=request.param)
    yield engine
    engine.close()


def test_a_prefix_that_left_the_pool_comes_back_from_host_memory_in_whole_chunks(
    tiered: Tiered, model: ToyDecoder
) -> None:
    prompt = tokens(1, 45)
    assert [tiered.ask("cold", prompt), tiered.ask("in the pool", prompt)] == [0, 44]
    tiered.forget_pool()
    assert tiered.ask("from host", prompt) == 32
    assert tiered.ask("in the pool again", prompt) == 44
    expected = model.continuation(prompt, 3)
    assert all(tiered.tokens(name) == expected for name in ("cold", "from host", "in the pool again"))


def test_what_the_tree_has_inside_a_chunk_is_kept_and_the_rest_is_loaded(tiered: Tiered, model: ToyDecoder) -> None:
    prompt = tokens(2, 50)
    tiered.ask("first", prompt)
    tiered.forget_pool()
    assert tiered.ask("short", prompt[:22]) == 16
    assert tiered.ask("long", prompt) == 48
    assert tiered.tokens("long") == model.continuation(prompt, 3)


def test_each_turn_of_a_chat_computes_its_new_tokens_and_the_last_one_before(tiered: Tiered) -> None:
    """Eight turns of 4 new tokens and an answer of 3: counted by what the engine ran, in the pool and from a tier."""
    said: list[int] = []
    for turn in range(8):
        said += tokens(60 + turn, 4)
        before = tiered.loop.stats().prompt_tokens
        cached = tiered.ask(f"turn {turn}", said)
        computed = tiered.loop.stats().prompt_tokens - before
        assert computed == len(said) - cached
        assert computed == (4 if turn == 0 else 5), "an answer's last token was drawn, never run"
        said += tiered.tokens(f"turn {turn}")
    tiered.forget_pool()
    before = tiered.loop.stats().prompt_tokens
    assert tiered.ask("from a tier", said) == 48
    assert tiered.loop.stats().prompt_tokens - before == len(said) - 48


def test_an_answer_is_kept_too_so_the_next_turn_finds_it(tiered: Tiered, model: ToyDecoder) -> None:
    prompt = tokens(3, 20)
    tiered.ask("first", prompt, new=20)
    tiered.forget_pool()
    conversation = [*prompt, *tiered.tokens("first"), 7, 8]
    assert tiered.ask("second", conversation) == 32
    assert tiered.tokens("second") == model.continuation(conversation, 3)


def test_a_prompt_is_kept_while_its_answer_is_still_drawn(tiered: Tiered, model: ToyDecoder) -> None:
    """Not only when the session ends: a preempted or lost one has left it already."""
    prompt = tokens(12, 36)
    tiered.submit("long", prompt, max_new_tokens=20, sampling=GREEDY)
    while tiered.store.host.status().objects < 2:
        tiered.step()
        assert not any(update.finish for update in tiered.updates)
    assert tiered.ask("other", prompt) == 35
    tiered.run()
    assert tiered.tokens("long") == model.continuation(prompt, 20)


def test_an_answer_that_ends_while_its_prompt_is_still_copied_is_kept_behind_it(model: ToyDecoder) -> None:
    engine, prompt = Tiered(model, stream=SlowStream, ring=8), tokens(13, 36)
    engine.ask("short", prompt, new=14)
    engine.forget_pool()
    assert engine.ask("again", [*prompt, *engine.tokens("short"), 5]) == 48
    engine.close()


def test_an_answer_is_kept_with_its_prompt_where_that_was_evicted_meanwhile(model: ToyDecoder) -> None:
    engine, prompt = Tiered(model, slots=3), tokens(14, 36)
    engine.submit("long", prompt, max_new_tokens=20, sampling=GREEDY)
    while engine.store.host.status().objects < 2:
        engine.step()
    engine.ask("other", tokens(15, 48), new=1)
    assert engine.store.host.counts["evicted"] >= 2
    assert engine.finish("long") == "length"
    engine.forget_pool()
    assert engine.ask("again", [*prompt, *engine.tokens("long")]) == 48
    engine.close()


class CountingStream(InlineStream):
    launches = 0

    def use(self) -> AbstractContextManager[object]:
        CountingStream.launches += 1
        return super().use()


def test_prompts_that_are_computed_together_go_down_in_one_launch(model: ToyDecoder) -> None:
    engine = Tiered(model, ring=16, stream=CountingStream)
    for number in range(8):
        engine.submit(str(number), tokens(70 + number, 17), max_new_tokens=8, sampling=GREEDY)
    while engine.store.host.status().objects < 8:
        engine.step()
        assert not any(update.finish for update in engine.updates)
    # The first prompts of these have nothing to wait for; all others come behind them, full batch or not.
    assert CountingStream.launches <= 3
    engine.run()
    engine.close()


def test_a_prompt_that_no_tier_can_have_waits_for_none(model: ToyDecoder, tmp_path: Path) -> None:
    engine = Tiered(model, folder=tmp_path)
    engine.submit("fresh", tokens(16, 40), max_new_tokens=3, sampling=GREEDY)
    below = engine.loop.kv_report().tiers
    assert below is not None
    assert (below.fetches, below.lookup_tokens, [tier.misses for tier in below.tiers]) == (0, 32, [1, 1])
    engine.run()
    engine.close()


class SlowMark(LaggingMark):
    LAG = 200


class SlowStream(LaggingStream):
    def mark(self) -> Mark:
        return SlowMark()


class Letters:
    """One request, and the end when nothing is left to do."""

    def __init__(self, first: ToEngine) -> None:
        self._first: list[ToEngine] = [first]

    def take(self, *, wait: bool) -> list[ToEngine]:
        first, self._first = self._first, []
        return first or ([Stop()] if wait else [])


def test_turns_that_only_watch_a_copy_tell_the_server_nothing(model: ToyDecoder) -> None:
    engine, sent = Tiered(model, stream=SlowStream), list[FromEngine]()
    asked = Submit(GenerateRequest("r", tuple(tokens(1, 40)), max_new_tokens=3, sampling=SamplingParams(seed=1)))
    assert run_engine(lambda progress: (engine.loop, scripted_info()), Letters(asked), sent.append)
    empty = [message for message in sent if isinstance(message, Step) and not message.updates]
    assert 0 < len(empty) < 50
    engine.close()


def test_salts_separate_tenants_in_the_tiers_too(tiered: Tiered) -> None:
    prompt = tokens(4, 40)
    tiered.ask("a", prompt, cache_salt="a")
    tiered.forget_pool()
    found = [tiered.ask(f"of {salt}", prompt, cache_salt=salt) for salt in ("b", None, "", "a")]
    assert found == [0, 0, 0, 32]


def test_two_hundred_that_ask_the_same_at_once_load_each_chunk_once(model: ToyDecoder) -> None:
    tier, prompt = FakeTier(), tokens(5, 40)
    first = Tiered(model, tier)
    first.ask("first", prompt)
    first.close()
    tier.loads.clear()
    second = Tiered(model, tier)
    names = [str(number) for number in range(200)]
    for name in names:
        second.submit(name, prompt, max_new_tokens=2, sampling=GREEDY)
    second.run()
    assert all(second.cached(name) >= 32 for name in names)
    assert all(second.tokens(name) == model.continuation(prompt, 2) for name in names)
    assert len(tier.loads) == 2, "one load a chunk"
    second.close()


@pytest.mark.parametrize("fault", ["corrupt", "missing", "gone"])
def test_a_fault_below_costs_the_hit_and_never_the_request(model: ToyDecoder, fault: str) -> None:
    tier, prompt = FakeTier(), tokens(6, 40)
    engine = Tiered(model, tier, slots=2)
    engine.ask("first", prompt)
    engine.ask("other", tokens(7, 40))
    assert engine.store.flush(WAIT_S)
    engine.forget_pool()
    if fault == "corrupt":
        tier.corrupt_all()
    elif fault == "missing":
        tier.records.clear()
    else:
        tier.fault = "gone"
    assert engine.ask("again", prompt) == 0
    assert engine.tokens("again") == model.continuation(prompt, 3)
    engine.close()


def test_a_tier_that_hangs_costs_no_hit_in_host_memory(model: ToyDecoder) -> None:
    tier, prompts = FakeTier(), [tokens(80 + number, 40) for number in range(4)]
    first = Tiered(model, tier)
    for number in range(3):
        first.ask(str(number), prompts[number])
    first.close()
    engine = Tiered(model, tier)
    engine.ask("in host memory", prompts[3])
    assert engine.store.flush(WAIT_S)
    engine.forget_pool()
    tier.hold()
    for number in range(3):
        engine.submit(f"hung {number}", prompts[number], max_new_tokens=3, sampling=GREEDY)
    assert all(tier.waiting.acquire(timeout=WAIT_S) for _ in engine.store._threads[:-1])
    engine.submit("again", prompts[3], max_new_tokens=3, sampling=GREEDY)
    while not any(update.finish for update in engine.updates if update.request_id == "again"):
        engine.step()
    assert engine.cached("again") == 32
    tier.release()
    engine.run()
    engine.close()


def test_a_restart_with_a_disk_finds_the_repeated_prompt(model: ToyDecoder, tmp_path: Path) -> None:
    prompt = tokens(8, 60)
    first = Tiered(model, folder=tmp_path)
    assert first.ask("cold", prompt) == 0
    first.close()
    second = Tiered(model, folder=tmp_path)
    assert second.ask("after a restart", prompt) == 48
    assert second.tokens("after a restart") == model.continuation(prompt, 3)
    second.close()


def test_cancelled_while_its_prefix_is_on_its_way(model: ToyDecoder) -> None:
    tier, prompt = FakeTier(), tokens(9, 40)
    first = Tiered(model, tier)
    first.ask("first", prompt)
    first.close()
    second = Tiered(model, tier)
    tier.hold()
    second.submit("cancelled", prompt, max_new_tokens=3, sampling=GREEDY)
    assert tier.waiting.acquire(timeout=WAIT_S)
    second.step()
    second.submit("other", tokens(10, 5), max_new_tokens=3, sampling=GREEDY)
    while "other" not in [update.request_id for update in second.updates if update.finish]:
        second.step()
    second.loop.cancel("cancelled")
    tier.release()
    second.run()
    assert second.finish("cancelled") == "cancelled"
    assert second.ask("again", prompt) == 32
    second.close()


@pytest.mark.parametrize("seed", range(4))
def test_greedy_tokens_are_the_same_with_tiers_and_without(
    model: ToyDecoder, stream: type[CopyStream], seed: int
) -> None:
    """Turns of conversations over few cells and few host slots, cancels, faults; freed cells are NaN."""
    rng, tier = random.Random(seed), FakeTier()
    engine = Tiered(model, tier, slots=5, cells=120, seqs=4, stream=stream)
    expected: dict[str, list[int]] = {}
    texts = [tokens(100 + seed, 18), tokens(200 + seed, 33)]
    for number in range(30):
        prompt = [*rng.choice(texts), *tokens(rng.randrange(1000), rng.randint(1, 4))][: CONTEXT - 12]
        new = rng.randint(1, 8)
        expected[str(number)] = model.continuation(prompt, new)
        texts.append([*prompt, *expected[str(number)]])
        engine.submit(str(number), prompt, max_new_tokens=new, sampling=GREEDY, priority=rng.randint(0, 1))
        for _ in range(rng.randint(0, 10)):
            engine.step()
        if rng.random() < 0.3:
            engine.forget_pool()
        if rng.random() < 0.1:
            tier.fault = None if tier.fault else "gone"
        if rng.random() < 0.1:
            engine.loop.cancel(str(rng.randint(0, number)))
    engine.run()
    for name, continuation in expected.items():
        drawn = engine.tokens(name)
        assert drawn == (continuation if engine.finish(name) == "length" else continuation[: len(drawn)])
    assert engine.store.status()["host"][2].get("evicted", 0) > 0
    engine.close()


def test_claimed_cells_are_nobodys_but_the_callers_and_backed_by_memory(model: ToyDecoder) -> None:
    executor = toy_executor(model)
    cache = executor.cache_control
    cells = cache.claim_cells(100)
    assert cells.tolist() == list(range(100))
    assert cache.pool.rows > 100
    assert cache.free_cells == cache.capacity_cells - 100
    with pytest.raises(CacheFull):
        cache.claim_cells(cache.capacity_cells)
    seq = cache.seq_from(cells[:20])
    cache.release_cells(cells)
    assert (cache.pos(seq), cache.free_cells) == (20, cache.capacity_cells - 20)
    cache.seq_rm(seq)
    assert cache.free_cells == cache.capacity_cells


def test_a_session_waits_for_a_tier_no_longer_than_its_prefix_is_worth(model: ToyDecoder) -> None:
    tier, prompt = FakeTier(), tokens(11, 40)
    first = Tiered(model, tier)
    first.ask("first", prompt)
    first.close()
    engine = Tiered(model, tier)
    engine.loop._prompt_tokens, engine.loop._step_time_s = 10_000, 0.001
    tier.hold()
    started = time.monotonic()
    assert engine.ask("hung", prompt) == 0
    assert time.monotonic() - started < LONGEST_FETCH_S
    tier.release()
    engine.close()


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server: apt-get install redis-server")
def test_redis_killed_and_started_again_under_load_fails_no_request_and_no_token(
    model: ToyDecoder, tmp_path: Path
) -> None:
    server, rng = Server(tmp_path), random.Random(0)
    engine = Tiered(model, slots=3, seqs=4, url=server.url)
    prompts = [tokens(300 + number, 40) for number in range(4)]
    asked: dict[str, list[int]] = {}
    for number in range(48):
        if number == 16:
            server.kill()
        if number == 32:
            server.start()
        asked[str(number)] = rng.choice(prompts)
        engine.submit(str(number), asked[str(number)], max_new_tokens=3, sampling=GREEDY)
        for _ in range(rng.randint(1, 8)):
            engine.step()
        if rng.random() < 0.5:
            engine.forget_pool()
    engine.run()
    assert all(engine.tokens(name) == model.continuation(prompt, 3) for name, prompt in asked.items())
    assert all(engine.finish(name) == "length" for name in asked)
    counts = engine.store.status()["redis"][2]
    assert counts["loaded"] > 0
    assert counts["fault"] > 0
    engine.close()
    server.kill()


# --- tails of windows: the toy's second layer sees 4 tokens, a chunk has 16 -------------------------------------------


@pytest.fixture
def tails(model: ToyDecoder) -> Iterator[Tiered]:
    engine = Tiered(model, tails=True)
    yield engine
    engine.close()


def test_each_object_group_is_stored_apart_and_a_window_keeps_its_tail(tails: Tiered) -> None:
    tails.ask("first", tokens(30, 45))
    groups = tails.loop.kv_report().tiers.object_groups
    assert [(group.layers, group.window_chunks) for group in groups] == [((0,), None), ((1,), 1)]
    assert groups[1].object_bytes * 4 == groups[0].object_bytes
    full, windowed = (store.host.status() for store in tails.objects.stores)
    assert (full.objects, windowed.objects) == (2, 2)
    assert (full.used_bytes, windowed.used_bytes) == (2 * groups[0].object_bytes, 2 * groups[1].object_bytes)


def test_a_prefix_from_a_tier_brings_up_the_end_of_a_window_alone(tails: Tiered, model: ToyDecoder) -> None:
    prompt = tokens(31, 60)
    tails.ask("first", prompt)
    tails.forget_pool()
    assert tails.ask("again", prompt) == 48
    assert tails.tokens("again") == model.continuation(prompt, 3)
    below = tails.loop.kv_report().tiers
    full, windowed = (group.object_bytes for group in below.object_groups)
    assert below.tiers[0].loaded_bytes == 3 * full + windowed


def test_a_prompt_that_leaves_a_restored_prefix_inside_computes_it_and_makes_it_whole(
    tails: Tiered, model: ToyDecoder
) -> None:
    """What a tier gave of the window ends behind the branch; the tree then gets what the second one computed."""
    prompt = tokens(32, 52)
    branch = [*prompt[:40], *tokens(33, 6)]
    tails.ask("first", prompt)
    tails.forget_pool()
    assert tails.ask("restored", prompt) == 48
    assert tails.ask("branch", branch) == 0, "no window before token 40 is whole"
    assert tails.ask("branch again", branch) == 45
    assert tails.ask("other branch", [*prompt[:33], 1, 2]) == 33, "what the first branch computed is whole everywhere"
    assert tails.ask("the restored one", prompt) == 51
    for name, asked in (("branch", branch), ("branch again", branch), ("the restored one", prompt)):
        assert tails.tokens(name) == model.continuation(asked, 3)


def test_cells_that_had_holes_have_none_when_they_are_computed_anew(tails: Tiered) -> None:
    prompt, other = tokens(37, 52), tokens(38, 52)
    tails.ask("first", prompt)
    tails.forget_pool()
    assert tails.ask("restored", prompt) == 48
    tails.forget_pool()
    assert [tails.ask("cold", other), tails.ask("warm", other[:30]), tails.ask("warmer", other)] == [0, 29, 51]


def test_two_that_run_on_a_restored_prefix_keep_their_cells_while_it_is_made_whole(
    tails: Tiered, model: ToyDecoder
) -> None:
    prompt = tokens(34, 50)
    branch = [*prompt[:44], 3, 4]
    tails.ask("first", prompt)
    tails.forget_pool()
    tails.submit("runs", prompt, max_new_tokens=10, sampling=GREEDY)
    while not tails.of("runs"):
        tails.step()
    assert tails.cached("runs") == 48
    tails.submit("branch", branch, max_new_tokens=10, sampling=GREEDY)
    while tails.loop.has_work():
        tails.step()
        tails.check()
    assert tails.tokens("runs") == model.continuation(prompt, 10)
    assert tails.tokens("branch") == model.continuation(branch, 10)


def test_what_was_restored_with_holes_goes_down_again_without_the_objects_it_lacks(
    tails: Tiered, model: ToyDecoder
) -> None:
    prompt = tokens(35, 40)
    tails.ask("first", prompt)
    tails.forget_pool()
    assert tails.ask("restored", prompt) == 32
    for store in tails.objects.stores:  # host memory loses it, the pool does not
        store.host._residents = type(store.host._residents)()
        store.host._free = list(range(store.host.num_slots))
    tails.ask("longer", [*prompt, *tokens(36, 16)])
    full, windowed = (store.host.status().objects for store in tails.objects.stores)
    assert (full, windowed) == (3, 2), "of chunk 0 the window's tail is in no cell"
    tails.forget_pool()
    assert tails.ask("restored again", [*prompt, *tokens(36, 16)]) == 48
    assert tails.tokens("restored again") == model.continuation([*prompt, *tokens(36, 16)], 3)
