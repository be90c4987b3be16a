"""The executor on a toy model: sessions, forks, rewinds and failures over real cells."""

import pytest
import torch

from engine.build import build_engine
from engine.config import EngineConfig, check_request
from engine.errors import ConfigError, RequestTooLarge, SessionsExhausted, StepFailed
from engine.types import Batch, Chunk, GenerateRequest, SamplingParams
from support.model_folder import write_folder

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
    first = [executor.open_session(GREEDY, seed=0, prompt=(1,)) for _ in range(4)]
    with pytest.raises(SessionsExhausted, match="all 4 sessions"):
        executor.open_session(GREEDY, seed=0, prompt=(1,))
    executor.close_session(first[0])
    executor.close_session(first[0])
    assert executor.open_session(GREEDY, seed=0, prompt=(1,)) not in first


def test_ses_4_a_clone_shares_cells_and_goes_on_as_its_source_would(executor):
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


def test_calls_and_padding_are_counted(executor):
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
        ({"max_num_batched_tokens": 1, "max_num_seqs": 4, "widths": (1, 2, 4)}, None),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(model, options, words):
    options = {"device": "cpu", "widths": (1,), "max_num_seqs": 4} | options
    if words is None:
        assert build_engine(EngineConfig(model, **options), lambda *_: None)
        return
    with pytest.raises(ConfigError, match=words):
        build_engine(EngineConfig(model, **options), lambda *_: None)


def test_the_smallest_pool_serves_the_smallest_request(model):
    loop, info = build(model, kv_cells=2, max_num_batched_tokens=None)
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
    with pytest.raises(RequestTooLarge, match="n is 2, but at most 1 sequences"):
        check_request(info, GenerateRequest("a", (1,), n=2))
