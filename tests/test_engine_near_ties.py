"""How answers in load are compared with those alone (tests/gpu has a real device): in float32 none parts."""

from __future__ import annotations

import pytest

from engine.loop import EngineLoop
from engine.scheduler import SchedulerLimits
from support.near_ties import Answer, alone, in_load, mixed_prompts, partings, shares
from support.toy_decoder import VOCAB, ToyDecoder
from support.toy_executor import toy_executor


def test_r32_in_float32_no_answer_parts() -> None:
    limits = SchedulerLimits(max_num_seqs=8, prefill_budget=32, mixed_budget=32, prefill_chunk=8)
    loop = EngineLoop(toy_executor(ToyDecoder()), limits)
    prompts = mixed_prompts(20, VOCAB, longest=40)
    reference = alone(loop, prompts)
    assert loop.stats().steps == 0
    assert partings(prompts, reference, in_load(loop, prompts)) == []
    assert loop.stats().prompt_tokens < sum(map(len, prompts.values())), "prefixes are shared"
    assert "lead by 0.1 at most" in shares(reference)


@pytest.mark.parametrize(("gap", "is_explained"), [(0.1, True), (0.11, False)])
def test_r32_where_an_answer_parts_first_says_whether_it_is_explained(gap: float, is_explained: bool) -> None:
    right, other = Answer([1, 2, 3], [5.0, gap, 9.0]), Answer([1, 4, 5], [5.0, 5.0, 5.0])
    (parting,) = partings({"a": (7, 7)}, {"a": right}, {"a": other})
    assert (parting.at, parting.expected, parting.got, parting.is_explained) == (1, 2, 4, is_explained)
    assert partings({"a": (7, 7)}, {"a": right}, {"a": right}) == []
