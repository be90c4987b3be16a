"""The executor on a toy model: sessions, forks, rewinds and failures over real cells."""

import numpy as np
import pytest
import torch

from cache.geometry import Geometry, LayerGeometry
from engine.build import build_engine
from engine.config import EngineConfig, check_request
from engine.errors import ConfigError, RequestTooLarge, SessionRefused, SessionsExhausted, StepFailed
from engine.loop import EngineLoop
from engine.scheduler import SchedulerLimits
from engine.types import Batch, Chunk, GenerateRequest, SamplingParams
from static_graphs.sampler import Route, SampleInputs, sample
from support.looped import Engine
from support.model_folder import write_folder
from support.toy_decoder import ToyDecoder
from support.toy_executor import toy_executor

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def executor(model):
    loop, _ = build(model)
    return loop._executor


def build(model, **options):
    options = {"max_num_seqs": 4, "widths": (1, 2, 4), "kv_cells": 200, "max_num_batched_tokens": 32} | options
    return build_engine(EngineConfig(model, device="cpu", **options), lambda *_: None)


def run(loop, *requests):
    tokens, ends = {}, {}
    for request in requests:
        loop.submit(request)
    while loop.has_work():
        for update in loop.step():
            tokens.setdefault((update.request_id, update.index), []).extend(update.token_ids)
            if update.finish:
                ends[update.request_id, update.index] = update.finish
    return tokens, ends


def draw(executor, session, tokens, position, draws=1):
    chunk = Chunk(session, tuple(tokens), position, wanted_rows="last", draws=draws)
    return executor.execute(Batch((chunk,))).chunks[0].token_ids


def continued(executor, session, prompt, count):
    """Whatever the session's policy: `count` tokens, one a step, from position 0."""
    tokens, position = list(draw(executor, session, prompt, 0)), len(prompt)
    while len(tokens) < count:
        tokens += draw(executor, session, tokens[-1:], position)
        position += 1
    return tokens


def test_a_batch_of_sessions_draws_what_each_draws_alone(model):
    prompts = [(1, 2, 3), (9,), tuple(range(20, 45)), (4, 4, 4, 4)]
    requests = [GenerateRequest(str(i), p, sampling=GREEDY, max_new_tokens=12) for i, p in enumerate(prompts)]
    together, _ = run(build(model)[0], *requests)
    for request in requests:
        alone, _ = run(build(model)[0], request)
        assert together[request.request_id, 0] == alone[request.request_id, 0]
    assert len({token for tokens in together.values() for token in tokens}) >= 8


def test_x_9_a_seeded_request_repeats_itself_whatever_runs_beside_it(model):
    sampled = SamplingParams(temperature=1.0, seed=3)
    request = GenerateRequest("a", (5, 6), n=3, sampling=sampled, max_new_tokens=10)
    alone, _ = run(build(model)[0], request)
    others = [GenerateRequest(str(i), (i,) * 7, sampling=GREEDY, max_new_tokens=9) for i in range(5)]
    beside, _ = run(build(model, kv_cells=60)[0], *others[:2], request, *others[2:])
    assert [beside["a", i] for i in range(3)] == [alone["a", i] for i in range(3)]
    assert len({tuple(alone["a", i]) for i in range(3)}) == 3


def test_preempted_requests_draw_the_same_tokens(model):
    requests = [
        GenerateRequest(str(i), (i + 1, i + 2), sampling=SamplingParams(seed=i), max_new_tokens=30) for i in range(4)
    ]
    roomy, _ = run(build(model)[0], *requests)
    loop, _ = build(model, kv_cells=50)
    tight, _ = run(loop, *requests)
    assert loop.stats().preemptions > 0
    assert tight == roomy
    assert loop.stats().cells_used == 0


def test_ses_1_sessions_are_bounded_and_their_ids_never_come_back(executor):
    """RUN-4, SES-3: closing what is closed is ignored."""
    first = [executor.open_session(GREEDY, seed=0, prompt=(1,)) for _ in range(4)]
    with pytest.raises(SessionsExhausted, match="all 4 sessions"):
        executor.open_session(GREEDY, seed=0, prompt=(1,))
    executor.close_session(first[0])
    executor.close_session(first[0])
    later = executor.open_session(GREEDY, seed=0, prompt=(1,))
    assert later > max(first)
    with pytest.raises(SessionsExhausted):
        executor.clone_session(later, 0, GREEDY, seed=0, prompt=(1,))


def test_ses_4_a_clone_shares_cells_and_goes_on_as_its_source_would(executor):
    """RUN-31."""
    source = executor.open_session(GREEDY, seed=0, prompt=(1, 2, 3))
    expected = draw(executor, source, (1, 2, 3), 0)
    used = executor.free_cells
    clone = executor.clone_session(source, 2, GREEDY, seed=0, prompt=(1, 2, 3))
    assert executor.free_cells == used
    assert executor.position(clone) == 2
    assert draw(executor, clone, (3,), 2) == expected
    executor.close_session(source)
    executor.close_session(clone)
    assert executor.free_cells == executor.total_cells


def test_ses_4_a_clone_of_what_is_not_there_is_refused_and_leaves_nothing(executor):
    """RUN-30."""
    source = executor.open_session(GREEDY, seed=0, prompt=(1,))

    def refused(session, upto, words):
        with pytest.raises(SessionRefused, match=words):
            executor.clone_session(session, upto, GREEDY, seed=0, prompt=(1,))

    refused(99, 0, "session 99 is not open")
    refused(source, 0, "holds 0 tokens: its first 0 cannot be cloned")
    draw(executor, source, (1, 2), 0)
    refused(source, 3, "holds 2 tokens: its first 3 cannot be cloned")
    refused(source, -1, "its first -1 cannot be cloned")
    assert executor.kv_metrics().num_sequences == 1
    assert executor.position(executor.clone_session(source, 0, GREEDY, seed=0, prompt=(1,))) == 0


def test_ses_2_a_session_whose_policy_is_refused_leaves_no_sequence(executor):
    with pytest.raises(ValueError, match="logit_bias holds token id 128"):
        executor.open_session(SamplingParams(logit_bias=((128, 1.0),)), seed=0, prompt=(1,))
    assert executor.kv_metrics().num_sequences == 0


def test_ses_5_a_new_policy_draws_as_if_the_session_had_been_opened_with_it(executor):
    """RUN-11."""
    sampled = SamplingParams(temperature=1.5)
    opened = executor.open_session(sampled, seed=7, prompt=(1, 2, 3))
    expected = continued(executor, opened, (1, 2, 3), 6)
    changed = executor.open_session(GREEDY, seed=0, prompt=(1, 2, 3))
    greedy = continued(executor, changed, (1, 2, 3), 6)
    executor.set_sampling(changed, sampled, seed=7, prompt=(1, 2, 3))
    assert continued(executor, changed, (1, 2, 3), 6) == expected != greedy
    executor.set_sampling(changed, sampled, seed=7, prompt=(1, 2, 3))
    assert continued(executor, changed, (1, 2, 3), 6) == expected, "a seed gives its tokens again"
    executor.set_sampling(changed, sampled, seed=8, prompt=(1, 2, 3))
    assert continued(executor, changed, (1, 2, 3), 6) != expected


def test_ses_5_no_seed_is_one_that_nobody_can_repeat(executor):
    session = executor.open_session(GREEDY, seed=0, prompt=(1,))
    answers = set()
    for _ in range(3):
        executor.set_sampling(session, SamplingParams(temperature=5.0), seed=None, prompt=(1,))
        answers.add(tuple(continued(executor, session, (1,), 8)))
    assert len(answers) == 3


def test_ses_5_a_policy_that_cannot_be_served_leaves_the_one_in_force(executor):
    session = executor.open_session(GREEDY, seed=0, prompt=(1, 2, 3))
    expected = draw(executor, session, (1, 2, 3), 0)
    for params, seed in ((SamplingParams(allowed_token_ids=(500,)), 0), (SamplingParams(), 2**63)):
        with pytest.raises(ValueError, match=r"token id 500|does not fit"):
            executor.set_sampling(session, params, seed=seed, prompt=(1, 2, 3))
    assert draw(executor, session, (1, 2, 3), 0) == expected
    executor.set_sampling(99, GREEDY, seed=0, prompt=())  # unknown: ignored


def test_x_9_a_seed_and_a_position_draw_one_token_behind_a_rewind_a_clone_and_a_failed_batch():
    """SAM-12, with SAM-8 and SAM-9 superseded: the draw is a counter hash, not a sequence of coins (D9)."""
    toy = ToyDecoder()
    executor = toy_executor(toy)
    sampled = SamplingParams(temperature=20.0)
    session = executor.open_session(sampled, seed=0, prompt=(1, 2, 3))
    tokens = continued(executor, session, (1, 2, 3), 6)
    assert tokens != toy.continuation((1, 2, 3), 6)
    assert draw(executor, session, tokens[:1], 3) == (tokens[1],)
    clone = executor.clone_session(session, 4, sampled, seed=0, prompt=(1, 2, 3), generated=tokens[:2])
    assert draw(executor, clone, tokens[1:2], 4) == (tokens[2],)
    neighbour = executor.clone_session(session, 4, sampled, seed=1, prompt=(1, 2, 3), generated=tokens[:2])
    assert continued(executor, neighbour, (1, 2, 3), 6) != tokens
    toy.fail_on = 9
    with pytest.raises(StepFailed):
        draw(executor, neighbour, (9,), 3)
    toy.fail_on = None
    assert draw(executor, clone, tokens[2:3], 5) == (tokens[3],)


def test_x_9_a_prompt_of_n_tokens_draws_its_first_at_position_n():
    toy = ToyDecoder()
    executor = toy_executor(toy)
    logits = toy.head(toy.plain_hidden((1, 2, 3))[-1:])
    flat = SampleInputs(*map(torch.tensor, ([20.0], [0], [1.0], [0.0], [7], [3])))
    route = Route.of(np.array([20.0]), np.array([0]), np.array([1.0]), np.array([0.0]), toy.vocab_size)
    session = executor.open_session(SamplingParams(temperature=20.0), seed=7, prompt=(1, 2, 3))
    assert draw(executor, session, (1, 2, 3), 0) == tuple(sample(logits, flat, route).tolist())


def test_a_token_that_only_the_device_knows_is_the_sessions_own_draw_not_a_forks():
    toy = ToyDecoder()
    executor = toy_executor(toy)
    session = executor.open_session(SamplingParams(temperature=20.0), seed=1, prompt=(1, 2, 3))
    own, *forks = draw(executor, session, (1, 2, 3), 0, draws=4)
    after = {token: toy.next_token((1, 2, 3, token)) for token in (own, *forks)}
    assert after[own] not in {after[token] for token in forks}
    executor.set_sampling(session, GREEDY, seed=0, prompt=(1, 2, 3))
    assert draw(executor, session, (-1,), 3) == (after[own],)


def test_exe_18_a_step_whose_rewind_frees_too_little_runs_no_slice_of_it():
    """PACK-6."""
    executor = toy_executor(ToyDecoder())  # 255 cells, at most 32 rows a slice
    sessions = [executor.open_session(GREEDY, seed=0, prompt=()) for _ in range(4)]
    for session, tokens in zip(sessions, (60, 60, 60, 40), strict=True):
        executor.execute(Batch((Chunk(session, (1,) * tokens, 0),)))
    clone = executor.clone_session(sessions[0], 60, GREEDY, seed=0, prompt=())
    before = executor.method_calls()
    with pytest.raises(StepFailed, match="40-token step does not fit: 35 cells free of 255"):
        executor.launch(Batch((Chunk(clone, (1,) * 40, 20),)))  # its tail is shared
    assert executor.method_calls() == before


def test_t_ses_each_row_of_a_step_is_drawn_by_its_own_sessions_policy(executor):
    biased = SamplingParams(temperature=0.0, logit_bias=((5, 1e4),))
    sessions = [executor.open_session(params, seed=0, prompt=(1,)) for params in (GREEDY, biased, GREEDY)]
    chunks = tuple(Chunk(session, (1,), 0, wanted_rows="last") for session in sessions)
    first, second, third = (output.token_ids for output in executor.execute(Batch(chunks)).chunks)
    assert first == third != second == (5,)


def test_pack_4_a_chunk_behind_the_end_rewinds_and_draws_again(executor):
    session = executor.open_session(GREEDY, seed=0, prompt=(1, 2, 3))
    first = draw(executor, session, (1, 2, 3), 0)
    draw(executor, session, first, 3)
    assert draw(executor, session, (3,), 2) == first
    assert executor.position(session) == 3
    assert draw(executor, session, (1, 2, 3), 0) == first


def test_exe_12_a_step_that_does_not_fit_changes_nothing(executor):
    session = executor.open_session(GREEDY, seed=0, prompt=(1, 2, 3))
    draw(executor, session, (1, 2, 3), 0)
    free = executor.free_cells
    others = [executor.open_session(GREEDY, seed=0, prompt=(1,)) for _ in range(2)]
    with pytest.raises(StepFailed, match="198-token step does not fit: 197 cells free of 200"):
        executor.launch(Batch(tuple(Chunk(other, (1,) * 99, 0) for other in others)))
    assert (executor.free_cells, executor.position(session)) == (free, 3)
    assert len(draw(executor, session, (1,), 3)) == 1
    assert len(draw(executor, others[0], (1,), 0)) == 1


def test_x_10_a_session_at_its_limit_ends_alone():
    executor = toy_executor(ToyDecoder(), max_session_tokens=5)
    full, other = (executor.open_session(GREEDY, seed=0, prompt=(1,)) for _ in range(2))
    alone = draw(executor, other, (7, 8), 0)
    draw(executor, full, (1, 2, 3, 4, 5), 0)
    free = executor.free_cells
    batch = Batch((Chunk(full, (6,), 5, wanted_rows="last"), Chunk(other, (8,), 1, wanted_rows="last")))
    refused, stands = executor.execute(batch).chunks
    assert refused.error == f"session {full} would hold 6 tokens: the limit is 5"
    assert refused.token_ids == ()
    assert (stands.error, stands.token_ids) == (None, alone)
    assert (executor.position(full), executor.position(other), executor.free_cells) == (5, 2, free)
    assert len(draw(executor, full, (5,), 4)) == 1, "it is as it was"


def test_x_10_a_step_of_refusals_alone_runs_nothing(executor):
    outputs = executor.execute(Batch((Chunk(99, (1,), 0), Chunk(98, (1,), 0)))).chunks
    assert [output.error for output in outputs] == ["session 99 is not open", "session 98 is not open"]
    assert all(calls == 0 for _, calls in executor.method_calls())


def test_x_10_an_id_the_model_does_not_have_is_refused_before_it_reaches_a_forward(executor):
    session, other = (executor.open_session(GREEDY, seed=0, prompt=(1,)) for _ in range(2))
    batch = Batch((Chunk(session, (1, 128), 0), Chunk(other, (1,), 0, wanted_rows="last")))
    refused, stands = executor.execute(batch).chunks
    assert refused.error == f"session {session} brings token id 128: this model's ids are 0 to 127"
    assert len(stands.token_ids) == 1


def test_x_10_the_loop_ends_a_full_choice_by_length_and_the_other_one_goes_on():
    toy = ToyDecoder()
    executor = toy_executor(toy, max_session_tokens=10)
    loop = EngineLoop(executor, SchedulerLimits(max_num_seqs=2, prefill_budget=8, mixed_budget=8, prefill_chunk=4))
    full = GenerateRequest("full", (1, 2, 3, 4), sampling=GREEDY, max_new_tokens=20)
    short = GenerateRequest("short", (5,), sampling=GREEDY, max_new_tokens=9)
    tokens, ends = run(loop, full, short)
    assert ends == {("full", 0): "length", ("short", 0): "length"}
    assert tokens["full", 0] == toy.continuation((1, 2, 3, 4), 7)  # the last one is drawn, but never fed
    assert tokens["short", 0] == toy.continuation((5,), 9)


def test_exe_18_the_sessions_of_a_failed_step_never_run_again_and_the_others_do():
    toy = ToyDecoder()
    executor = toy_executor(toy)
    failed, beside, other = (executor.open_session(GREEDY, seed=0, prompt=(1,)) for _ in range(3))
    draw(executor, other, (1, 2), 0)
    free, toy.fail_on = executor.free_cells, 9
    chunks = (Chunk(beside, (1,) * 30, 0), Chunk(failed, (1, 2, 9), 0, wanted_rows="last"))
    with pytest.raises(StepFailed, match="a step of 33 tokens failed: token 9 broke the model"):
        executor.launch(Batch(chunks))
    toy.fail_on = None
    assert executor.free_cells == free - 32, "the first of its two forwards ran, the second gave its cell back"
    batch = Batch(tuple(Chunk(s, (3,), executor.position(s), wanted_rows="last") for s in (failed, beside, other)))
    outputs = executor.execute(batch).chunks
    assert [output.error for output in outputs] == [
        f"session {failed} cannot go on: a step of it failed",
        f"session {beside} cannot go on: a step of it failed",
        None,
    ]
    assert outputs[2].token_ids == (toy.next_token((1, 2, 3)),)
    with pytest.raises(SessionRefused, match="a step of it failed"):
        executor.clone_session(beside, 1, GREEDY, seed=0, prompt=(1,))
    executor.close_session(failed)
    executor.close_session(beside)
    assert executor.free_cells == free - 1


def test_exe_18_a_session_that_is_not_open_does_not_hide_why_its_step_failed():
    toy = ToyDecoder()
    executor = toy_executor(toy)
    session = executor.open_session(GREEDY, seed=0, prompt=(9,))
    toy.fail_on = 9
    with pytest.raises(StepFailed, match="token 9 broke the model"):
        executor.launch(Batch((Chunk(99, (1,), 0), Chunk(session, (9,), 0, wanted_rows="last"))))


@pytest.mark.parametrize("shape", ["one token too few", "one row too many"])
def test_exe_15_logits_of_another_shape_fail_the_step(shape):
    class Broken(ToyDecoder):
        def logits(self, hidden):
            logits = super().logits(hidden)
            return logits[:, :-1] if shape == "one token too few" else torch.cat((logits, logits))

    executor = toy_executor(Broken())
    session = executor.open_session(GREEDY, seed=0, prompt=(1,))
    free = executor.free_cells
    with pytest.raises(StepFailed, match=r"forward_2 gave logits \[\d, 3\d\]: \[1, 32\] were expected"):
        draw(executor, session, (1, 2), 0)
    assert executor.free_cells == free
    with pytest.raises(SessionRefused, match="a step of it failed"):
        executor.clone_session(session, 0, GREEDY, seed=0, prompt=(1,))


def test_exe_17_only_a_chunk_that_asks_for_it_draws_and_then_one_token(executor):
    asking, silent = (executor.open_session(GREEDY, seed=0, prompt=(1,)) for _ in range(2))
    chunks = (Chunk(asking, (1, 2), 0, wanted_rows="last"), Chunk(silent, (1, 2), 0))
    outputs = executor.execute(Batch(chunks)).chunks
    assert [len(output.token_ids) for output in outputs] == [1, 0]
    assert [output.session_id for output in outputs] == [asking, silent]


def test_pack_6_a_rewind_that_is_refused_fails_the_step_and_runs_nothing():
    """The single cache's rings hold nothing that old: only the cache knows, so packing has let it pass."""
    executor = toy_executor(ToyDecoder(), cache_kind="single", max_sessions=1, widths=(1, 2), max_dynamic=None)
    session = executor.open_session(GREEDY, seed=0, prompt=())
    for position in range(0, 30, 2):
        executor.execute(Batch((Chunk(session, (1, 2), position),)))
    before = executor.method_calls()
    with pytest.raises(StepFailed, match="cannot rewind to 1"):
        executor.launch(Batch((Chunk(session, (1,), 1),)))
    assert executor.method_calls() == before
    assert executor.position(session) == 30


def test_a_closed_session_may_still_be_in_flight(executor):
    session, other = (executor.open_session(GREEDY, seed=0, prompt=(1,)) for _ in range(2))
    in_flight = executor.launch(Batch(tuple(Chunk(s, (1, 2), 0, wanted_rows="last") for s in (session, other))))
    executor.close_session(session)
    outputs = executor.collect(in_flight).chunks
    assert outputs[0].token_ids == outputs[1].token_ids


@pytest.mark.parametrize(("options", "methods"), [
    ({"widths": (4,), "max_num_batched_tokens": 2, "max_num_seqs": 2}, ["forward_4"]),
    ({"widths": (8, 64), "max_num_batched_tokens": 32, "max_num_seqs": 3}, ["forward_8", "forward_64"]),
    ({"widths": (8,), "max_num_batched_tokens": 32}, ["forward_8", "forward_others"]),
    ({"widths": None, "kv_cells": 3}, ["forward_1", "forward_2", "forward_others"]),
])  # fmt: skip
def test_the_widths_that_were_asked_for_are_the_ones_that_run(model, options, methods):
    loop, info = build(model, **options)
    calls = loop.stats().method_calls
    assert [name for name, _ in calls] == methods
    assert [f"forward_{width}" for width in info.widths] == [name for name in methods if name != "forward_others"]
    tokens, _ = run(loop, GenerateRequest("a", (5,), sampling=GREEDY, max_new_tokens=2))
    assert tokens == run(build(model)[0], GenerateRequest("a", (5,), sampling=GREEDY, max_new_tokens=2))[0]


def test_calls_and_padding_are_counted(executor):
    """EXE-13, PAD-2: padding costs rows and no cells."""
    session = executor.open_session(GREEDY, seed=0, prompt=(1, 2, 3))
    draw(executor, session, (1, 2, 3), 0)
    draw(executor, session, (4,), 3)
    assert executor.method_calls() == (("forward_1", 1), ("forward_2", 0), ("forward_4", 1), ("forward_others", 0))
    assert executor.padding_rows == 1


def test_prompt_logprobs_equal_those_of_a_plain_forward(model):
    from transformers import AutoModelForCausalLM

    prompt = tuple(range(3, 80))
    params = SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=1)
    loop, _ = build(model)
    loop.submit(GenerateRequest("a", prompt, sampling=params, max_new_tokens=1))
    updates = []
    while loop.has_work():
        updates += loop.step()
    got = updates[0].prompt_logprobs
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([prompt])).logits[0]
    expected = torch.log_softmax(logits.float(), -1)
    assert got[0] is None
    assert [entry.token_id for entry in got[1:]] == list(prompt[1:])
    for row, entry in enumerate(got[1:]):
        assert entry.logprob == pytest.approx(expected[row, entry.token_id].item(), abs=1e-4)
        assert [token for token, _ in entry.top] == expected[row].topk(2).indices.tolist()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_model_len": 300, "kv_cells": 200}, "--max-model-len 200 or --kv-cells 300"),
        ({"device": "cuda:99"}, "use --device cpu|CUDA devices"),
        ({"kv_cells": None, "kv_cache_gib": 1e-7}, "holds no sequence: one cell of this model takes 512 bytes"),
        ({"kv_cells": 10, "widths": (4, 16)}, "widths go up to 16 rows, but the K/V pool has 10 cells"),
        ({"kv_cells": 10**14}, "capacity_cells is 100000000000000: at most 2147483646 can be addressed"),
        ({"max_num_batched_tokens": 1, "max_num_seqs": 4, "widths": (1, 2, 4)}, None),
        ({"max_num_mixed_tokens": 4}, "max_num_mixed_tokens is 4: a step must have room for 4 decodes .* at least 5"),
        ({"max_num_mixed_tokens": 5}, None),
        ({"max_num_mixed_tokens": 99, "max_num_batched_tokens": 32}, "is 99, but a step takes at most 32 tokens"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(model, options, words):
    options = {"device": "cpu", "widths": (1,), "max_num_seqs": 4} | options
    if words is None:
        assert build_engine(EngineConfig(model, **options), lambda *_: None)
        return
    with pytest.raises(ConfigError, match=words):
        build_engine(EngineConfig(model, **options), lambda *_: None)


def test_a_pool_that_the_machine_has_no_memory_for_is_refused_by_name():
    toy = ToyDecoder()
    toy.geometry = Geometry((LayerGeometry(1 << 24, 16, 16),))
    with pytest.raises(ConfigError, match="a K/V pool of 1073741824 cells does not fit into this machine's memory"):
        toy_executor(toy, capacity_cells=1 << 30)


def test_the_smallest_pool_serves_the_smallest_request(model):
    loop, info = build(model, kv_cells=2, widths=None, max_num_batched_tokens=None)
    assert info.max_model_len == 2
    tokens, ends = run(loop, GenerateRequest("a", (1,), sampling=GREEDY, max_new_tokens=1))
    assert len(tokens["a", 0]) == 1
    assert ends["a", 0] == "length"


def test_the_single_cache_serves_one_request_after_another_as_cells_would(tmp_path):
    model = write_folder(tmp_path)
    requests = [GenerateRequest(str(i), (i + 1, 5, 9), sampling=GREEDY, max_new_tokens=12) for i in range(3)]
    loop, info = build(model, cache="single", max_num_seqs=None, kv_cells=None)
    assert (info.max_num_seqs, info.kv_cells) == (1, 512)
    assert run(loop, *requests) == run(build(model)[0], *requests)


def test_the_single_cache_refuses_what_it_cannot_do(model):
    with pytest.raises(ConfigError, match="max_num_seqs is 4: the single cache holds one sequence"):
        build(model, cache="single")
    _, info = build(model, cache="single", max_num_seqs=1)
    with pytest.raises(RequestTooLarge, match=r"n is 2, but this server runs with the single cache \(--cache single\)"):
        check_request(info, GenerateRequest("a", (1,), n=2))


def test_r11_a_row_of_nan_fails_its_session_alone_and_leaves_no_prefix():
    class Sick(ToyDecoder):
        def logits(self, hidden):
            scores = super().logits(hidden)
            scores[0] = float("nan") if self.is_sick else scores[0]
            return scores

    toy = Sick()
    toy.is_sick = False
    engine = Engine(toy_executor(toy), seqs=4, budget=24, chunk=8)
    engine.submit("sick", (1, 2, 3), max_new_tokens=9, sampling={"temperature": 0.0})
    engine.submit("well", (4, 5), max_new_tokens=9, sampling={"temperature": 0.0})
    while len(engine.tokens("sick")) < 3:
        engine.step()
    toy.is_sick = True
    engine.step()
    toy.is_sick = False
    engine.run()
    assert (engine.finish("sick"), engine.of("sick")[-1].error_code) == ("failed", "not_finite")
    assert engine.tokens("sick") == toy.continuation((1, 2, 3), 3)
    assert engine.tokens("well") == toy.continuation((4, 5), 9)
    assert engine.loop.stats().rows_failed == 1
    engine.submit("again", (1, 2, 3, *toy.continuation((1, 2, 3), 3)), max_new_tokens=2, sampling={"temperature": 0.0})
    engine.run()
    assert engine.cached("again") == 0
    engine.loop.reset_prefix_cache()
    assert engine.executor.free_cells == engine.executor.total_cells
