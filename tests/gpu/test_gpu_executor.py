"""The executor on a GPU: captured and eager, its sessions draw what the toy decoder's plain attention draws.

Device copies of test_engine_schedules.py and test_engine_raw_steps.py; the oracle runs on the CPU.
"""

import random

import numpy as np
import pytest
import torch

from engine.raw_steps import RawStep
from engine.types import Batch, Chunk, SamplingParams
from static_graphs.additional import AdditionalMethod
from support.poison import poison_free_cells
from support.toy_decoder import DIM, ToyDecoder
from support.toy_executor import METHODS, RandomLife, draw, generate, last_row, open_greedy, toy_executor

pytestmark = pytest.mark.gpu

PROMPTS = [(1,), (4, 5, 6), (9, 3, 27, 3, 14, 8, 30), tuple(range(3, 23))]
NEW_TOKENS = 6
TEXT = [random.Random(1).randrange(32) for _ in range(41)]


@pytest.fixture(autouse=True)
def _full_precision():
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def oracle():
    return ToyDecoder()


@pytest.fixture(params=METHODS)
def methods(request):
    return METHODS[request.param]


@pytest.fixture(params=[True, False], ids=["graphs", "eager"])
def device_executor(request, methods):
    def make(**changes):
        return toy_executor(ToyDecoder("cuda"), captures_static_methods=request.param, **(methods | changes))

    return make


def test_t_cuda_concurrent_generations_equal_their_eager_continuations_across_growth(device_executor, oracle):
    executor = device_executor(capacity_cells=65_535)
    expected = [oracle.continuation(prompt, NEW_TOKENS) for prompt in PROMPTS]
    for _ in range(2):
        assert generate(executor, PROMPTS, NEW_TOKENS) == expected
    assert generate(executor, [PROMPTS[2]] * 2, NEW_TOKENS) == [expected[2]] * 2
    metrics = executor.kv_metrics()
    assert (metrics.free_cells, metrics.num_sequences, metrics.logical_length) == (65_535, 0, 0)
    assert executor.samples_on_device


def test_t_cuda_a_schedule_of_all_widths_then_shared_decodes_uses_every_method(device_executor, oracle):
    executor = device_executor()
    prefilled, held = open_greedy(executor), 0
    for width in (20, 1, 4, 2, 4, 7, 3):
        drawn = draw(executor, last_row(prefilled, TEXT[held : held + width], held))
        held += width
        assert drawn == [oracle.next_token(TEXT[:held])]
    tokens = {prefilled: TEXT + drawn}
    for prompt in PROMPTS[:3]:
        session = open_greedy(executor)
        (token,) = draw(executor, last_row(session, prompt, 0))
        tokens[session] = [*prompt, token]
    for _ in range(5):
        chunks = [last_row(session, known[-1:], len(known) - 1) for session, known in tokens.items()]
        for known, token in zip(tokens.values(), draw(executor, *chunks), strict=True):
            assert token == oracle.next_token(known)
            known.append(token)
    assert all(calls > 0 for _, calls in executor.method_calls())


def test_a_full_step_of_the_dynamic_method_is_captured_and_draws_what_it_draws_eagerly(oracle):
    """And one of a token less is not padded to it."""
    executor = toy_executor(ToyDecoder("cuda"), captures_full_step=True)
    for size in (32, 31, 32, 30):
        session = open_greedy(executor)
        assert draw(executor, last_row(session, TEXT[:size], 0)) == [oracle.next_token(TEXT[:size])]
        executor.close_session(session)
    assert executor.padding_rows == 0


def test_captured_draws_are_the_eager_ones_in_any_mix(methods):
    """Greedy, plain and cut rows, alone and together, at row counts between those that are captured."""
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, top_k=5),
        SamplingParams(temperature=1.2, top_p=0.9),
        SamplingParams(temperature=1.0, min_p=0.2),
    ]

    def run(captures: bool) -> list[list[int]]:
        executor = toy_executor(ToyDecoder("cuda"), captures_static_methods=captures, **methods)
        prompt = PROMPTS[2]
        sessions = [executor.open_session(kind, seed=number, prompt=prompt) for number, kind in enumerate(kinds)]
        drawn = [[token] for token in draw(executor, *(last_row(session, prompt, 0) for session in sessions))]
        for chosen in ((0,), (1,), (3,), (0, 1), (1, 2, 3), (0, 1, 2, 3, 4), (4, 0, 2), (0, 1, 2, 3, 4)):
            rows = [last_row(sessions[n], drawn[n][-1:], len(prompt) + len(drawn[n]) - 1) for n in chosen]
            for n, token in zip(chosen, draw(executor, *rows), strict=True):
                drawn[n].append(token)
        return drawn

    assert run(True) == run(False)


def test_random_schedules_draw_what_each_session_draws_alone_and_read_no_freed_cell(device_executor, oracle):
    executor = device_executor(initial_capacity=255)
    generate(executor, PROMPTS[:1], 1)  # maps the whole pool, so that all of it can be poisoned
    for seed in range(40):
        RandomLife(executor, oracle, seed, behind_each=lambda: poison_free_cells(executor.cache_control)).run(20)
    metrics = executor.kv_metrics()
    assert (metrics.free_cells, metrics.num_sequences) == (255, 0)


def test_x_11_random_operations_leave_nothing_behind(device_executor, oracle):
    executor = device_executor(capacity_cells=150)
    RandomLife(executor, oracle, 11, checked=0.05, steps=3.0).run(3_000)
    metrics = executor.kv_metrics()
    assert (metrics.free_cells, metrics.num_sequences) == (150, 0)


def test_raw_2_taps_are_written_by_graphs_too(device_executor, oracle):
    executor = device_executor(tap_layers=(1, 0))
    cache, outputs = executor.cache_control, []

    def consume(output):
        outputs.append(
            (output.logits.to("cpu", copy=True), output.taps.to("cpu", copy=True), output.selected_indices.tolist())
        )
        return True

    sequence = cache.seq_new()
    seq_ids = np.full(36, sequence, np.int32)
    tokens, positions = np.array(TEXT[:36]), np.arange(36)
    for start, stop in ((0, 3), (3, 36)):
        span = slice(start, stop)
        wanted = np.array([stop - start - 1, -1, 0, 0])
        assert executor.execute_raw(RawStep(tokens[span], positions[span], seq_ids[span], wanted), consume)
    layers = {}
    hooks = [
        layer.register_forward_hook(lambda _, __, output, at=at: layers.__setitem__(at, output[0]))
        for at, layer in enumerate(oracle.body.layers)
    ]
    hidden = oracle.plain_hidden(TEXT[:36])
    for hook in hooks:
        hook.remove()
    taps = torch.cat((layers[1], layers[0]), dim=-1)
    assert [output[1].shape for output in outputs] == [(4, 2 * DIM), (32, 2 * DIM), (1, 2 * DIM)]
    torch.testing.assert_close(outputs[0][1][:3], taps[:3], rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(outputs[1][1], taps[3:35], rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(outputs[2][1], taps[35:], rtol=1e-3, atol=1e-2)
    assert outputs[0][1].isfinite().all()
    assert [output[2] for output in outputs] == [[0, 2, 3], [2, 3], [0]]
    torch.testing.assert_close(outputs[2][0], oracle.head(hidden[35:]), rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(outputs[1][0], oracle.head(hidden[[3, 3]]), rtol=1e-3, atol=1e-2)


def test_raw_5_rows_are_drawn_on_the_device(device_executor):
    executor = device_executor()
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [9.0, 0.0, 0.0, 0.0]], device="cuda")
    assert executor.argmax_rows(logits, 2) == [1, 0]
    assert executor.sample_rows(logits, 2, np.array([[0, 1, 0, 0.9], [1, 1, 0, 0.0]], np.float32)) == [1, 0]


def test_exe_8_additional_methods_are_captured_and_replay_on_the_same_addresses(device_executor):
    state, step = torch.zeros(3, device="cuda"), torch.ones(3, device="cuda")
    executor = device_executor(additional_methods=(AdditionalMethod("add", lambda: state.add_(step)),))
    state.zero_()
    executor.run_additional("add")
    step.fill_(10.0)
    executor.run_additional("add")
    assert state.tolist() == [11.0] * 3


def test_x_10_an_id_past_the_vocabulary_never_reaches_the_device(device_executor, oracle):
    executor = device_executor()
    bad, good = open_greedy(executor), open_greedy(executor)
    refused, stands = executor.execute(Batch((Chunk(bad, (32,), 0), last_row(good, (1, 2), 0)))).chunks
    assert "token id 32" in refused.error
    assert stands.token_ids == (oracle.next_token((1, 2)),)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_a_launch_never_waits_for_the_device(device_executor, temperature):
    """Neither of a prompt, nor of a decode, nor of both in one step, while the device is busy with something else.

    One launch at a time, as the loop has them: one behind another that has not begun does wait, for its staging.
    """
    executor = device_executor(capacity_cells=65_535)
    params, prompt = SamplingParams(temperature=temperature, top_p=0.9), PROMPTS[2]
    for is_busy in (False, True):  # what is compiled at first use, is by then
        first, second = (executor.open_session(params, seed=n, prompt=prompt) for n in range(2))
        start, decode = Chunk(first, prompt, 0, "last", 1), Chunk(first, (-1,), len(prompt), "last", 1, is_decode=True)
        batches = [Batch((start,)), Batch((decode, Chunk(second, prompt, 0, "last", 1)))]
        batches.append(Batch((Chunk(second, (-1,), len(prompt), "last", 1, is_decode=True),)))
        for number, batch in enumerate(batches):
            torch.cuda.synchronize()
            if is_busy:
                torch.cuda._sleep(1_000_000_000)  # about half a second
            reached = torch.cuda.Event()
            reached.record()
            in_flight = executor.launch(batch)
            assert not (is_busy and reached.query()), f"launch {number} waited for what was ahead of it"
            assert all(chunk.error is None for chunk in executor.collect(in_flight).chunks)
        executor.close_session(first)
        executor.close_session(second)
