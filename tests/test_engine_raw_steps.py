"""RAW-1..7 and X-8: packed tokens of sequences that belong to no session."""

import numpy as np
import pytest
import torch

from engine.errors import StepFailed
from engine.raw_steps import RawStep, RawStepError
from engine.types import Batch, SamplingParams
from support.poison import poison_free_cells
from support.toy_decoder import CONTEXT, DIM, VOCAB, ToyDecoder
from support.toy_executor import METHODS, draw, generate, last_row, open_greedy, toy_executor

TEXT = tuple(np.random.default_rng(3).integers(0, VOCAB, 60).tolist())


@pytest.fixture(scope="module")
def model():
    return ToyDecoder()


@pytest.fixture(params=METHODS)
def executor(request, model):
    return toy_executor(model, tap_layers=(1, 0), **METHODS[request.param])


class Seen:
    """Copies what a raw step brings, as every caller must."""

    def __init__(self, stop_behind=None):
        self.outputs = []
        self.stop_behind = stop_behind

    def __call__(self, output):
        taps = None if output.taps is None else output.taps.clone()
        self.outputs.append((output.offset, output.length, output.logits.clone(), taps, output.selected_indices.copy()))
        return len(self.outputs) != self.stop_behind

    def logits_of(self, num_indices):
        """Entry of logit_indices -> its row; entries that nobody answered are missing."""
        rows = {}
        for _, _, logits, _, indices in self.outputs:
            assert len(logits) == len(indices)
            for row, index in zip(logits, indices.tolist(), strict=True):
                assert index not in rows
                rows[index] = row
        assert all(0 <= index < num_indices for index in rows)
        return rows


def raw(tokens, positions, seq_ids, logit_indices=()):
    return RawStep(
        np.array(tokens, np.int64),
        np.array(positions, np.int64),
        np.array(seq_ids, np.int32),
        np.array(logit_indices, np.int64),
    )


def one_sequence(sequence, count, start=0, logit_indices=()):
    return raw(TEXT[start : start + count], range(start, start + count), [sequence] * count, logit_indices)


def plain_logits(model, tokens):
    return model.head(model.plain_hidden(tokens))


def close(one, other):
    return torch.allclose(one, other, rtol=1e-4, atol=1e-3)


def test_raw_1_rows_are_answered_in_any_order_with_repeats_and_minus_one_discards(executor, model):
    cache = executor.cache_control
    poison_free_cells(cache)
    sequence, seen = cache.seq_new(), Seen()
    wanted = (6, -1, 0, 6, 3)
    assert executor.execute_raw(one_sequence(sequence, 7, logit_indices=wanted), seen)
    rows, expected = seen.logits_of(len(wanted)), plain_logits(model, TEXT[:7])
    assert sorted(rows) == [0, 2, 3, 4]
    assert all(close(rows[index], expected[wanted[index]]) for index in rows)


def test_raw_1_sequences_interleave_on_the_axis(executor, model):
    cache = executor.cache_control
    one, other, seen = cache.seq_new(), cache.seq_new(), Seen()
    tokens, owners = (5, 9, 6, 7, 9), (one, other, one, one, other)
    step = raw(tokens, (0, 0, 1, 2, 1), owners, (3, 4))
    assert executor.execute_raw(step, seen)
    rows = seen.logits_of(2)
    assert close(rows[0], plain_logits(model, (5, 6, 7))[-1])
    assert close(rows[1], plain_logits(model, (9, 9))[-1])


def test_raw_2_a_wide_step_runs_as_several_forwards_and_each_row_maps_back(executor, model):
    sequence, seen = executor.cache_control.seq_new(), Seen()
    wanted = (39, 5, -1, 31, 32, 5)
    assert executor.execute_raw(one_sequence(sequence, 40, logit_indices=wanted), seen)
    assert [(offset, length) for offset, length, *_ in seen.outputs] == [(0, 32), (32, 8)]
    assert [indices.tolist() for *_, indices in seen.outputs] == [[1, 3, 5], [0, 4]]
    rows, expected = seen.logits_of(len(wanted)), plain_logits(model, TEXT[:40])
    assert all(close(rows[index], expected[wanted[index]]) for index in (0, 1, 3, 4, 5))


def test_raw_2_a_forward_that_nobody_asked_for_brings_no_rows_but_its_taps(executor):
    sequence, seen = executor.cache_control.seq_new(), Seen()
    assert executor.execute_raw(one_sequence(sequence, 3), seen)
    ((offset, length, logits, taps, indices),) = seen.outputs
    assert (offset, length, logits.shape, len(indices)) == (0, 3, (0, VOCAB), 0)
    assert taps is not None


def test_raw_2_taps_hold_every_row_of_the_forward_and_the_real_ones_are_the_layers_outputs(executor, model):
    sequence, seen = executor.cache_control.seq_new(), Seen()
    executor.execute_raw(one_sequence(sequence, 3), seen)
    executor.execute_raw(one_sequence(sequence, 32, start=3), seen)
    (_, _, _, first, _), (_, _, _, second, _) = seen.outputs
    assert (first.shape, second.shape) == ((4, 2 * DIM), (32, 2 * DIM))  # forward_4 pads one row
    layers = {}
    hooks = [
        layer.register_forward_hook(lambda _, __, output, at=at: layers.__setitem__(at, output[0]))
        for at, layer in enumerate(model.body.layers)
    ]
    model.plain_hidden(TEXT[:35])
    for hook in hooks:
        hook.remove()
    expected = torch.cat((layers[1], layers[0]), dim=-1)  # in the order of tap_layers
    assert close(first[:3], expected[:3])
    assert close(second, expected[3:35])
    assert first[3].isfinite().all()


def test_raw_3_taps_are_borrowed_the_next_forward_writes_over_them(executor):
    sequence, kept = executor.cache_control.seq_new(), []
    executor.execute_raw(one_sequence(sequence, 40), lambda output: kept.append(output.taps) or True)
    first, second = kept
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(first[: len(second)], second)


def test_an_executor_without_tapped_layers_has_no_taps(model):
    executor, seen = toy_executor(model), Seen()
    executor.execute_raw(one_sequence(executor.cache_control.seq_new(), 3), seen)
    assert seen.outputs[0][3] is None


def test_raw_3_a_callback_that_says_false_ends_the_step_behind_that_forward(executor):
    cache = executor.cache_control
    sequence, seen = cache.seq_new(), Seen(stop_behind=1)
    assert not executor.execute_raw(one_sequence(sequence, 40), seen)
    assert len(seen.outputs) == 1
    assert cache.pos(sequence) == 32  # written: its owner rewinds or removes it (RAW-4)
    cache.rewind(sequence, 0)
    assert executor.execute_raw(one_sequence(sequence, 40), Seen())


def test_raw_3_a_raw_step_inside_a_raw_step_is_refused(executor):
    cache = executor.cache_control
    one, other = cache.seq_new(), cache.seq_new()

    def consume(_):
        executor.execute_raw(one_sequence(other, 1), Seen())
        raise AssertionError("not reached")

    with pytest.raises(RawStepError, match="from the callback of another"):
        executor.execute_raw(one_sequence(one, 1), consume)
    assert cache.pos(other) == 0
    assert executor.execute_raw(one_sequence(other, 1), Seen()), "the next one is no re-entry"


def test_raw_3_what_a_callback_raises_reaches_the_caller(executor):
    def consume(_):
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        executor.execute_raw(one_sequence(executor.cache_control.seq_new(), 1), consume)


def test_raw_4_behind_a_failed_step_its_owners_are_dropped_and_nothing_is_lost(executor):
    """Tokens of forwards that ran stay in the cache: an owner that went on from there would be out of step."""
    model, cache = executor.model, executor.cache_control
    one, other, seen = cache.seq_new(), cache.seq_new(), Seen()
    assert executor.execute_raw(one_sequence(other, 5), Seen())
    free = cache.free_cells
    tokens = [token if token != 9 else 8 for token in TEXT[:40]]
    tokens[36] = model.fail_on = 9
    with pytest.raises(StepFailed, match=r"forward 32\.\.40 of a raw step failed: token 9 broke the model"):
        executor.execute_raw(raw(tokens, range(40), [one] * 40), seen)
    model.fail_on = None
    assert len(seen.outputs) == 1
    assert cache.pos(one) == 32, "the failed forward gave its own cells back"
    cache.seq_rm(one)
    assert cache.free_cells == free
    again = Seen()
    assert executor.execute_raw(one_sequence(other, 1, start=5, logit_indices=(0,)), again), "the others go on"
    assert close(again.logits_of(1)[0], plain_logits(model, TEXT[:6])[-1])


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda s: raw((), (), ()), "a step needs at least one token"),
        (lambda s: raw((VOCAB,), (0,), (s,)), r"token id 32 of entry 0 is outside \[0, 32\)"),
        (lambda s: raw((1, -1), (0, 1), (s, s)), "token id -1 of entry 1"),
        (lambda s: raw((1, 2), (0, 1), (s, s), (0, 2)), r"logit index 2 of entry 1 is outside \[-1, 2\)"),
        (lambda s: raw((1,), (0,), (s,), (-2,)), "logit index -2"),
        (lambda s: raw((1,), (CONTEXT,), (s,)), "position 64 of entry 0"),
        (lambda s: raw((1, 2), (0, 2), (s, s)), "row 1 is at position 2: sequence 0 goes on at 1"),
        (lambda s: raw((1,), (1,), (s,)), "row 0 is at position 1: sequence 0 goes on at 0"),
        (lambda s: raw((1,), (0,), (s + 1,)), "sequence 1 is not live"),
        (lambda s: raw((1,) * 256, range(256), (s,) * 256), "outside|256-token step does not fit"),
    ],
)
def test_raw_7_a_step_that_cannot_run_is_refused_before_anything_changes(executor, step, words):
    """CELL-21."""
    cache = executor.cache_control
    sequence = cache.seq_new()
    with pytest.raises(RawStepError, match=words):
        executor.execute_raw(step(sequence), Seen())
    assert (cache.pos(sequence), cache.free_cells) == (0, executor.total_cells)
    assert executor.execute_raw(one_sequence(sequence, 1), Seen())


def test_raw_7_a_step_that_does_not_fit_as_a_whole_runs_no_part_of_it(model):
    executor, seen = toy_executor(model, capacity_cells=64), Seen()
    cache = executor.cache_control
    held, sequence = cache.seq_new(), cache.seq_new()
    executor.execute_raw(one_sequence(held, 25), Seen())
    with pytest.raises(RawStepError, match="a 40-token step does not fit: 39 cells free of 64"):
        executor.execute_raw(one_sequence(sequence, 40), seen)
    assert (seen.outputs, cache.pos(sequence), cache.free_cells) == ([], 0, 39)


@pytest.mark.parametrize("name", ["positions", "seq_ids"])
def test_raw_7_arrays_of_different_lengths_are_no_step(name):
    fields = {"tokens": np.zeros(2, np.int64), "positions": np.zeros(2, np.int64), "seq_ids": np.zeros(2, np.int32)}
    fields[name] = fields[name][:1]
    with pytest.raises(RawStepError, match=f"2 tokens and 1 {name}"):
        RawStep(**fields, logit_indices=np.zeros(0, np.int64))


LOGITS = torch.tensor([[0.0, 3.0, 3.0, 1.0], [9.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 5.0]])


def test_raw_5_argmax_looks_at_the_first_rows_and_ties_go_to_the_lowest_id(executor):
    """SAM-6."""
    assert executor.argmax_rows(LOGITS, 2) == [1, 0]
    assert executor.argmax_rows(LOGITS.bfloat16(), 3) == [1, 0, 3]
    assert executor.argmax_rows(LOGITS, 0) == []


def test_raw_5_rows_are_drawn_with_the_callers_coins(executor):
    """SAM-6, SAM-7."""
    params = np.array([[0.0, 1.0, 0.0, 0.9], [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 2.0, 0.999]], np.float32)
    assert executor.sample_rows(LOGITS, 3, params) == [1, 0, 0]
    greedy = np.array([[0.0, 0.5, 3.0, 0.9]] * 2, np.float32)
    assert executor.sample_rows(LOGITS, 2, greedy) == executor.argmax_rows(LOGITS, 2)


@pytest.mark.parametrize(
    ("rows", "params", "words"),
    [
        (4, [[0, 1, 0, 0]] * 4, "4 rows are asked for of logits with 3"),
        (-1, [], "-1 rows"),
        (2, [[0, 1, 0, 0]], r"params are \[1, 4\]: 2 rows need \[2, 4\]"),
        (1, [[0, 1, 0]], r"params are \[1, 3\]"),
        (1, [[1, 1, 0, 1]], r"each coin in \[0, 1\)"),
        (1, [[float("nan"), 1, 0, 0]], "finite"),
    ],
)
def test_raw_5_rows_that_cannot_be_drawn_are_refused(executor, rows, params, words):
    with pytest.raises(RawStepError, match=words):
        executor.sample_rows(LOGITS, rows, np.array(params, np.float32))


def test_x_8_raw_draws_move_no_sessions_randomness(executor):
    def drawn(between):
        session = executor.open_session(SamplingParams(seed=1), seed=1, prompt=(1,))
        tokens = []
        for position in range(8):
            between()
            chunk = last_row(session, tokens[-1:] or (1,), position)
            tokens += executor.execute(Batch((chunk,))).chunks[0].token_ids
        executor.close_session(session)
        return tokens

    coins = np.array([[1.0, 1.0, 0.0, 0.5]], np.float32)
    alone = drawn(lambda: None)
    beside = drawn(lambda: (executor.argmax_rows(LOGITS, 1), executor.sample_rows(LOGITS, 1, coins)))
    assert alone == beside


def test_raw_sequences_and_sessions_share_the_pool_without_meeting(executor, model):
    cache, seen = executor.cache_control, Seen()
    sequence, session = cache.seq_new(), open_greedy(executor)
    executor.execute_raw(one_sequence(sequence, 5), seen)
    (token,) = draw(executor, last_row(session, (1, 2, 3), 0))
    executor.execute_raw(one_sequence(sequence, 1, start=5, logit_indices=(0,)), seen)
    assert token == model.next_token((1, 2, 3))
    assert close(seen.logits_of(1)[0], plain_logits(model, TEXT[:6])[-1])
    executor.close_session(session)
    cache.seq_rm(sequence)
    assert generate(executor, [(1, 2, 3)], 1) == [[token]]
