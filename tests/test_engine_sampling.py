from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.logit_edits import LogitEdits, SlotEdits
from engine.sampling import LOGPROB_FLOOR, Sampled, Sampler
from engine.types import SamplingParams, TokenLogprobs
from support import sampling_oracle

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0)


def new_sampler(vocab_size: int, slots: int = 16) -> Sampler:
    return Sampler(vocab_size, CPU, slots)


def launch(
    sampler: Sampler,
    logits: Tensor,
    slots: Sequence[int],
    positions: int | Sequence[int],
    draws: int | Sequence[int] = 0,
) -> Sampled:
    rows = len(slots)
    return sampler.sample(
        logits.expand(rows, -1),
        np.array(slots, np.int64),
        np.broadcast_to(np.array(positions, np.int64), rows).copy(),
        np.broadcast_to(np.array(draws, np.int64), rows).copy(),
    )


def ids(sampled: Sampled) -> list[int]:
    return [token_id for token_id, _ in sampled.collect()]


def logprobs(sampled: Sampled) -> list[TokenLogprobs]:
    found = [value for _, value in sampled.collect() if value is not None]
    assert len(found) == len(sampled.ids)
    return found


def peaked(vocab_size: int, *values: tuple[int, float]) -> Tensor:
    row = torch.zeros(vocab_size)
    for token_id, value in values:
        row[token_id] = value
    return row


def edited(logits: Tensor, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int] = ()) -> Tensor:
    """The logits one slot draws from, before temperature."""
    edits = LogitEdits(logits.numel(), CPU)
    edits.open(0, SlotEdits.of(params, len(prompt), logits.numel()), prompt, generated)
    position = np.array([len(prompt) + len(generated)])
    return edits.apply(logits.unsqueeze(0), np.array([0]), position)[0]


# --- seeds and choices


def test_b10_choices_of_a_seed_differ_and_come_again() -> None:
    """FLAT 1000, n = 4, seed 7: four different texts, the same four again, others for a seed away from them."""
    flat = torch.zeros(1000)

    def texts(seed: int) -> list[list[int]]:
        sampler = new_sampler(1000)
        sampler.open(0, SamplingParams(), seed=seed, prompt=[1, 2, 3])
        first = ids(launch(sampler, flat, [0] * 4, 3, [0, 1, 2, 3]))
        for j, token_id in enumerate(first[1:], start=1):
            sampler.open(j, SamplingParams(), seed=seed + j, prompt=[1, 2, 3], generated=[token_id])
        steps = [first] + [ids(launch(sampler, flat, [0, 1, 2, 3], position)) for position in range(4, 19)]
        return [list(text) for text in zip(*steps, strict=True)]

    once = texts(7)
    assert len({tuple(text) for text in once}) == 4
    assert texts(7) == once
    assert texts(8)[:3] == once[1:]  # choice j is seed + j
    assert not {tuple(text) for text in texts(100)} & {tuple(text) for text in once}


def test_x_9_a_clone_or_a_preempted_session_goes_on_as_the_original_would() -> None:
    params = SamplingParams(temperature=0.9, frequency_penalty=0.7, repetition_penalty=1.3, bad_words=((4, 5), (6,)))
    table = torch.randn(40, 12, generator=torch.Generator().manual_seed(1)) * 2
    sampler = new_sampler(12)
    sampler.open(0, params, seed=-5, prompt=[1, 2])
    text = [ids(launch(sampler, table[position], [0], position))[0] for position in range(2, 40)]
    for kept in (0, 1, 17):
        sampler.open(3, params, seed=-5, prompt=[1, 2], generated=text[:kept])
        again = [ids(launch(sampler, table[position], [3], position))[0] for position in range(2 + kept, 40)]
        assert again == text[kept:]
        sampler.close(3)


def test_x_9_a_draw_does_not_depend_on_its_neighbours() -> None:
    sampler = new_sampler(300)
    kinds = [
        SamplingParams(),
        GREEDY,
        SamplingParams(top_k=9, top_p=0.9),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.2, presence_penalty=1.5),
        SamplingParams(top_k=280, logit_bias=((3, 5.0),)),
    ]
    for slot, params in enumerate(kinds):
        sampler.open(slot, params, seed=slot, prompt=[1])
    logits = torch.randn(300, generator=torch.Generator().manual_seed(2)) * 2
    alone = [ids(launch(sampler, logits, [slot], 9, 1))[0] for slot in range(6)]  # draw 1: nothing is recorded
    for order in (list(range(6)), [5, 0, 3], [2, 2, 4, 1]):
        assert ids(launch(sampler, logits, order, 9, 1)) == [alone[slot] for slot in order]


@pytest.mark.parametrize("seed", [0, 1, 2, -1, 2**63 - 1, -(2**63)])
def test_every_int64_seed_is_legal_and_choices_wrap(seed: int) -> None:
    sampler = new_sampler(50)
    sampler.open(0, SamplingParams(), seed=seed, prompt=[])
    row = torch.randn(50, generator=torch.Generator().manual_seed(3))
    drawn = ids(launch(sampler, row, [0] * 2500, 0, list(range(2500))))
    counts = np.bincount(drawn, minlength=50)
    assert sampling_oracle.chi_square_excess(counts, sampling_oracle.distribution(row.tolist())) < 4


def test_n_greedy_choices_are_equal() -> None:
    """SAM-7."""
    sampler = new_sampler(10)
    sampler.open(0, GREEDY, seed=1, prompt=[1])
    assert ids(launch(sampler, peaked(10, (4, 1.0), (7, 1.0)), [0] * 3, 1, [0, 1, 2])) == [4, 4, 4]


# --- penalties


def test_b13_penalties_are_exact_and_keep_prompt_and_output_apart() -> None:
    logits = torch.tensor([1.0, -2.0, 3.0, 0.5, 0.0, 6.0, -3.0, 1.0, 2.0, 7.0])
    prompt = [5, 5, 5, 6]
    frequency = SamplingParams(frequency_penalty=2)
    presence = SamplingParams(presence_penalty=2)
    repetition = SamplingParams(repetition_penalty=1.5)
    assert torch.equal(edited(logits, frequency, prompt), logits)
    assert torch.equal(edited(logits, presence, prompt), logits)
    repeated = logits.clone()
    repeated[5], repeated[6] = 6.0 / 1.5, -3.0 * 1.5
    assert torch.equal(edited(logits, repetition, prompt), repeated)

    assert edited(logits, frequency, prompt, [9, 9])[9] == 7.0 - 4.0
    assert edited(logits, presence, prompt, [9, 9])[9] == 7.0 - 2.0
    repeated[9] = 7.0 / 1.5
    assert torch.equal(edited(logits, repetition, prompt, [9, 9]), repeated)


def test_b13_drawn_tokens_are_counted_before_anyone_has_read_them() -> None:
    """Three steps are launched before the first is collected."""
    sampler = new_sampler(10)
    sampler.open(0, SamplingParams(temperature=0, frequency_penalty=2), seed=0, prompt=[9, 9])
    sampler.open(1, SamplingParams(temperature=0, presence_penalty=2), seed=0, prompt=[9, 9])
    logits = peaked(10, (9, 5.0), (3, 2.5), (4, 1.5))
    steps = [launch(sampler, logits, [0, 1], position) for position in range(2, 6)]
    # frequency: 9 falls 5, 3, 1; presence: 9 falls 5, 3, 3 and stays ahead of 2.5.
    assert [ids(step) for step in steps] == [[9, 9], [9, 9], [3, 9], [4, 9]]


def test_slots_opened_in_inference_mode_are_counted_outside_of_it() -> None:
    sampler = new_sampler(4)
    with torch.inference_mode():
        sampler.open(0, SamplingParams(temperature=0, frequency_penalty=2), seed=0, prompt=[1])
    assert ids(launch(sampler, peaked(4, (2, 3.0)), [0], 1)) == [2]


def test_ses_6_a_slot_without_a_policy_draws_nothing() -> None:
    """A session has its policy from the moment it is open, so only a fault of ours could come here."""
    sampler = new_sampler(8)
    sampler.open(0, GREEDY, seed=0, prompt=(1,))
    with pytest.raises(AssertionError, match=r"slots \[1\] are not open"):
        launch(sampler, torch.zeros(8), [0, 1], 1)
    sampler.close(0)
    with pytest.raises(AssertionError, match=r"slots \[0\] are not open"):
        launch(sampler, torch.zeros(8), [0], 1)


def test_only_choice_0_is_counted_for_a_slot() -> None:
    sampler = new_sampler(4)
    sampler.open(0, SamplingParams(temperature=0, frequency_penalty=2), seed=0, prompt=[1])
    logits = peaked(4, (2, 3.0), (3, 0.5))
    assert ids(launch(sampler, logits, [0] * 3, 1, [0, 1, 2])) == [2, 2, 2]
    assert ids(launch(sampler, logits, [0], 2)) == [2]  # counted once: 3 - 2 = 1, still ahead of 0.5
    assert ids(launch(sampler, logits, [0], 3)) == [3]


def test_a_reused_slot_starts_clean_and_more_slots_keep_what_was_counted() -> None:
    sampler = new_sampler(8, slots=32)
    params = SamplingParams(temperature=0, presence_penalty=2, bad_words=((1, 2),))
    logits = peaked(8, (1, 3.0), (2, 2.0), (5, 1.5))
    sampler.open(0, params, seed=0, prompt=[7])
    assert ids(launch(sampler, logits, [0], 1)) == [1]
    for slot in range(1, 20):
        sampler.open(slot, params, seed=0, prompt=[7])
    assert ids(launch(sampler, logits, list(range(20)), 2)) == [5] + [1] * 19
    sampler.close(0)
    sampler.open(0, params, seed=0, prompt=[7])
    assert ids(launch(sampler, logits, [0], 1)) == [1]


def test_bias_comes_before_penalties_and_masks_after_them() -> None:
    """4.3: (1 + 2) / 2 = 1.5, where penalties first would give 1 / 2 + 2 = 2.5."""
    params = SamplingParams(logit_bias=((5, 2.0), (6, 100.0)), repetition_penalty=2.0, bad_words=((6,),))
    answer = edited(peaked(10, (5, 1.0)), params, [5])
    assert answer[5] == 1.5
    assert answer[6] == -torch.inf


# --- bias and masks


def test_a_bias_of_minus_100_never_draws_and_of_plus_100_practically_always() -> None:
    sampler = new_sampler(20)
    sampler.open(0, SamplingParams(logit_bias=((3, -100.0),)), seed=0, prompt=[])
    sampler.open(1, SamplingParams(logit_bias=((3, 100.0),)), seed=0, prompt=[])
    logits = peaked(20, (3, 200.0))
    assert 3 not in ids(launch(sampler, logits, [0] * 500, list(range(500))))
    assert set(ids(launch(sampler, torch.zeros(20), [1] * 500, list(range(500))))) == {3}


def test_b12_rows_with_bias_and_penalties_leave_without_changing_the_others() -> None:
    vocab_size, steps = 30, 18
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(4))
    plain = SamplingParams(temperature=0.8)
    penalised = SamplingParams(temperature=0.8, frequency_penalty=1.0)
    biased = SamplingParams(temperature=0.8, logit_bias=((7, 100.0),))

    def alone(params: SamplingParams, seed: int) -> list[int]:
        sampler = new_sampler(vocab_size)
        sampler.open(0, params, seed=seed, prompt=[1])
        return [ids(launch(sampler, logits, [0], 1 + step))[0] for step in range(steps)]

    sampler = new_sampler(vocab_size)
    kinds = [(biased, penalised)[slot % 2] for slot in range(8)] + [plain] * 4
    ends = [3 + 2 * slot for slot in range(8)] + [steps] * 4
    for slot, params in enumerate(kinds):
        sampler.open(slot, params, seed=slot, prompt=[1])
    texts: list[list[int]] = [[] for _ in kinds]
    for step in range(steps):
        live = [slot for slot, end in enumerate(ends) if step < end]
        for slot, token_id in zip(live, ids(launch(sampler, logits, live, 1 + step)), strict=True):
            texts[slot].append(token_id)
        for slot, end in enumerate(ends):
            if end == step + 1:
                sampler.close(slot)
    for slot, params in enumerate(kinds):
        assert texts[slot] == alone(params, slot)[: ends[slot]]
    assert all(set(texts[slot]) == {7} for slot in range(0, 8, 2))


def test_allowed_token_ids_are_all_that_is_ever_drawn() -> None:
    sampler = new_sampler(50)
    allowed = (3, 40, 41)
    sampler.open(0, SamplingParams(allowed_token_ids=allowed, bad_words=((41,),)), seed=1, prompt=[])
    sampler.open(1, SamplingParams(temperature=0, allowed_token_ids=allowed), seed=1, prompt=[])
    logits = peaked(50, (10, 50.0), (40, 0.5))
    assert set(ids(launch(sampler, logits, [0] * 300, list(range(300))))) == {3, 40}
    assert ids(launch(sampler, logits, [1], 0)) == [40]


def test_min_tokens_masks_stop_ids_by_position_also_after_a_clone() -> None:
    sampler = new_sampler(10)
    params = SamplingParams(temperature=0, stop_token_ids=(2, 5), min_tokens=3)
    logits = peaked(10, (2, 9.0), (5, 8.0), (7, 1.0))
    sampler.open(0, params, seed=0, prompt=[1] * 4)
    assert [ids(launch(sampler, logits, [0], position))[0] for position in (4, 5, 6, 7)] == [7, 7, 7, 2]
    sampler.open(1, params, seed=0, prompt=[1] * 4, generated=[7, 7])
    assert [ids(launch(sampler, logits, [1], position))[0] for position in (6, 7)] == [7, 2]
    sampler.open(2, SamplingParams(temperature=0, stop_token_ids=(2,)), seed=0, prompt=[1] * 4)
    assert ids(launch(sampler, logits, [2], 4)) == [2]  # without min_tokens a stop id is an ordinary draw


def test_a_bad_word_of_several_tokens_is_never_completed_even_ahead_of_collect() -> None:
    sampler = new_sampler(10)
    words = ((1, 2, 3), (4, 3), (8, 8, 8, 8, 3))
    sampler.open(0, SamplingParams(temperature=0, bad_words=words), seed=0, prompt=[1])
    wishes = [2, 1, 2, 3, 1, 2, 4, 3, 2, 3]
    steps = [
        launch(sampler, peaked(10, (wish, 5.0), (6, 1.0)), [0], position)
        for position, wish in enumerate(wishes, start=1)
    ]
    # The prompt's 1 does not count; 1 2 [3] and 4 [3] give way to 6; 2 [3] alone is no word.
    assert [ids(step)[0] for step in steps] == [2, 1, 2, 6, 1, 2, 4, 6, 2, 3]


def test_bad_words_of_slots_with_different_lengths_do_not_disturb_each_other() -> None:
    sampler = new_sampler(10)
    sampler.open(0, SamplingParams(temperature=0, bad_words=((1, 3),)), seed=0, prompt=[], generated=[1])
    sampler.open(1, SamplingParams(temperature=0, bad_words=((9, 9, 9, 1, 3),)), seed=0, prompt=[], generated=[1])
    sampler.open(2, SamplingParams(temperature=0, bad_words=((9, 1, 3),)), seed=0, prompt=[], generated=[5, 9, 1])
    assert ids(launch(sampler, peaked(10, (3, 5.0), (6, 1.0)), [0, 1, 2], 3)) == [6, 3, 6]


# --- refusals


@pytest.mark.parametrize("bad", [100, 140, -1])
@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "bad_words"])
def test_b11_an_id_outside_the_vocabulary_is_refused_by_name_and_leaves_no_trace(name: str, bad: int) -> None:
    sampler = new_sampler(100)
    values = {
        "logit_bias": ((99, 1.0), (bad, 1.0)),
        "allowed_token_ids": (99, bad),
        "bad_words": ((99, bad),),
    }
    with pytest.raises(ValueError, match=f"{name}.*{bad}"):
        sampler.open(0, SamplingParams(**{name: values[name]}), seed=0, prompt=[1])
    sampler.open(0, SamplingParams(temperature=0, logit_bias=((99, 5.0),)), seed=0, prompt=[1])
    assert ids(launch(sampler, torch.zeros(100), [0], 1)) == [99]


def test_a_stop_id_the_logits_do_not_have_is_harmless() -> None:
    sampler = new_sampler(10)
    sampler.open(0, SamplingParams(temperature=0, stop_token_ids=(10, 3), min_tokens=1), seed=0, prompt=[1])
    assert ids(launch(sampler, peaked(10, (3, 2.0), (4, 1.0)), [0], 1)) == [4]


def test_what_cannot_be_done_is_refused_by_name() -> None:
    sampler = new_sampler(10)
    for params, seed, word in [
        (SamplingParams(grammar="root ::= x"), 0, "grammar"),
        (SamplingParams(), 2**63, "seed"),
        (SamplingParams(bad_words=((),)), 0, "bad_words"),
        (SamplingParams(allowed_token_ids=()), 0, "allowed_token_ids"),
    ]:
        with pytest.raises(ValueError, match=word):
            sampler.open(0, params, seed=seed, prompt=[1])


# --- logprobs


def test_logprobs_are_raw_whatever_was_done_before_the_draw() -> None:
    """4.1: before bias, penalties, masks and temperature."""
    sampler = new_sampler(40)
    logits = torch.randn(40, generator=torch.Generator().manual_seed(5)) * 2
    params = SamplingParams(
        temperature=0.3, top_p=0.5, logit_bias=((3, 100.0),), frequency_penalty=2.0, bad_words=((4,),), logprobs=4
    )
    sampler.open(0, params, seed=0, prompt=[1], generated=[3])
    (found,) = logprobs(launch(sampler, logits, [0], 2))
    reference = torch.log_softmax(logits.double(), dim=-1)
    assert found.token_id == 3
    assert found.logprob == pytest.approx(reference[3].item(), abs=1e-5)
    assert [token_id for token_id, _ in found.top] == logits.topk(4).indices.tolist()
    for token_id, value in found.top:
        assert value == pytest.approx(reference[token_id].item(), abs=1e-5)


def test_a_greedy_token_equals_the_top_of_its_logprobs_exactly_also_on_ties() -> None:
    sampler = new_sampler(500)
    sampler.open(0, SamplingParams(temperature=0, logprobs=3), seed=0, prompt=[1])
    logits = (torch.randn(64, 500, generator=torch.Generator().manual_seed(6)) * 2).bfloat16()
    at = np.zeros(64, np.int64)
    for found in logprobs(sampler.sample(logits, at, at, at)):
        assert found.top[0] == (found.token_id, found.logprob)


def test_b09_zero_logprobs_is_the_drawn_token_alone_and_none_is_none() -> None:
    sampler = new_sampler(10)
    for slot, k in enumerate((None, 0, 1, 10)):
        sampler.open(slot, SamplingParams(temperature=0, logprobs=k), seed=0, prompt=[1])
    answers = [value for _, value in launch(sampler, peaked(10, (4, 2.0)), [3, 0, 1, 2], 1).collect()]
    assert answers[1] is None
    assert [len(value.top) for value in answers if value is not None] == [10, 0, 1]


def test_b08_impossible_tokens_come_at_the_floor_and_everything_is_json() -> None:
    sampler = new_sampler(10)
    sampler.open(0, SamplingParams(top_k=1, logprobs=5), seed=0, prompt=[1])
    half = tuple((token_id, -100.0) for token_id in range(5))
    sampler.open(1, SamplingParams(logit_bias=half, logprobs=5), seed=0, prompt=[1])
    sampler.open(2, SamplingParams(allowed_token_ids=(9,), logprobs=1), seed=0, prompt=[1])
    logits = torch.full((10,), -torch.inf)
    logits[[2, 6]] = torch.tensor([1.0, 0.0])
    found = logprobs(launch(sampler, logits, [0, 1, 2], 1))
    assert [value.token_id for value in found] == [2, 6, 9]
    assert [value for _, value in found[0].top[2:]] == [LOGPROB_FLOOR] * 3
    assert found[2].logprob == LOGPROB_FLOOR  # forced on a model that rules it out
    for value in found[:2]:
        assert math.isfinite(value.logprob)
        assert value.logprob <= 0
    json.dumps([[value.logprob, value.top] for value in found], allow_nan=False)


def test_prompt_logprobs_are_the_log_softmax_of_the_targets() -> None:
    sampler = new_sampler(60)
    logits = torch.randn(150, 60, generator=torch.Generator().manual_seed(7))
    targets = torch.arange(150) % 60
    found = sampler.prompt_logprobs(logits, targets, 2)
    reference = torch.log_softmax(logits.double(), dim=-1)
    assert [value.token_id for value in found] == targets.tolist()
    for row, value in enumerate(found):
        assert value.logprob == pytest.approx(reference[row, targets[row]].item(), abs=1e-5)
        assert [token_id for token_id, _ in value.top] == logits[row].topk(2).indices.tolist()
    assert sampler.prompt_logprobs(logits[:0], targets[:0], 2) == []


def test_the_callers_logits_are_left_as_they_are() -> None:
    sampler = new_sampler(20)
    params = SamplingParams(
        logit_bias=((1, 2.0),), repetition_penalty=1.5, allowed_token_ids=(1, 2, 3), bad_words=((2,), (1, 3)), top_p=0.9
    )
    sampler.open(0, params, seed=0, prompt=[1, 2])
    logits = torch.randn(1, 20)
    before = logits.clone()
    launch(sampler, logits[0], [0], 2).collect()
    assert torch.equal(logits, before)


# --- rows that are no numbers


ROUTES = {
    "greedy": GREEDY,
    "plain": SamplingParams(seed=1),
    "narrow": SamplingParams(seed=1, top_k=5),
    "narrow and cut": SamplingParams(seed=1, top_k=5, top_p=0.9),
    "cut": SamplingParams(seed=1, top_p=0.9),
    "floor": SamplingParams(seed=1, min_p=0.1),
    "penalised": SamplingParams(seed=1, presence_penalty=0.5, repetition_penalty=1.2),
    "told": SamplingParams(seed=1, logprobs=2),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("broken", ["one NaN", "all NaN", "one infinity", "all ruled out"])
def test_r11_a_row_that_is_no_numbers_is_found_out_and_its_neighbours_are_what_they_were(
    route: str, broken: str
) -> None:
    sampler = new_sampler(97, slots=3)
    for slot in range(3):
        sampler.open(slot, ROUTES[route], seed=slot, prompt=[1, 2, 3])
    logits = torch.randn(3, 97, generator=torch.Generator().manual_seed(4))
    rows = (np.arange(3), np.full(3, 3), np.zeros(3, np.int64))
    whole = sampler.sample(logits, *rows)
    expected = ids(whole)
    assert whole.not_finite == []
    for slot in range(3):
        sampler.close(slot)
        sampler.open(slot, ROUTES[route], seed=slot, prompt=[1, 2, 3])
    bad = {"one NaN": math.nan, "all NaN": math.nan, "one infinity": math.inf, "all ruled out": -math.inf}[broken]
    logits[1, 40 if broken.startswith("one") else slice(None)] = bad
    sampled = sampler.sample(logits, *rows)
    drawn = ids(sampled)
    assert sampled.not_finite == [1]
    assert (drawn[0], drawn[2]) == (expected[0], expected[2])
    assert 0 <= drawn[1] < 97
