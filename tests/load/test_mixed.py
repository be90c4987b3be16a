"""The mixed load, in small on a CPU: all of it happens, all of it holds, and what does not hold is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.build import build_engine
from engine.config import EngineConfig
from engine.types import GenerateRequest, SamplingParams, TokenLogprobs
from support.mixed_requests import Asked, Choice, Mix, judge
from support.model_folder import write_folder
from tests.load import mixed

VOCAB = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=1024, num_key_value_heads=4)


def test_r31_r32_a_short_mixed_load_holds_and_everything_happens_in_it(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--longest 800 --new 40 --seqs 32 --kv-cells 900 --host-mib 4 --phase-steps 30"
    figures = tmp_path / "figures.jsonl"
    flags = ["--device", "cpu", "--model", model, *sizes.split(" "), "--json", str(figures)]
    code = mixed.main([*flags, "--requests", "120", "--seed", "3"])
    told = capsys.readouterr().out
    assert code == 0, told
    assert "NOT SHOWN" not in told
    assert figures.read_text().count('"bench": "mixed load"') == 15


@pytest.fixture
def run(model: str) -> mixed.Run:
    config = EngineConfig(model, device="cpu", max_num_seqs=8, kv_cells=600, generation_config="none")
    loop, info = build_engine(config, lambda *_: None)
    mix = Mix(1, info, 120, 10, is_invariant=False)
    return mixed.Run(loop, info, mix, is_invariant=False)


def test_a_cell_that_nobody_gives_back_is_found_at_the_lull(run: mixed.Run) -> None:
    run.submit()
    run.lull()
    assert run.wrong == []
    run.loop.executor.cache_control.claim_cells(1)  # type: ignore[attr-defined]
    run.lull()
    assert "at rest, free and cached cells: 599, not 600" in run.wrong


@pytest.mark.parametrize("is_invariant", [False, True])
def test_r31_r32_a_repeat_that_draws_another_token_is_found(run: mixed.Run, is_invariant: bool) -> None:
    run._is_invariant = is_invariant
    request = GenerateRequest("a", (1, 2), sampling=SamplingParams(temperature=0.0, logprobs=2, seed=1))
    sure, unsure = ((TokenLogprobs(3, -0.5, ((3, -0.5), (4, second))),) for second in (-1.0, -0.55))
    other = TokenLogprobs(4, -0.5, ((4, -0.5), (3, -0.6)))

    def answered(token: int, values: TokenLogprobs) -> Asked:
        asked = Asked(request)
        asked.choices = [Choice([token], [values], "length")]
        return asked

    assert list(run._compared(answered(3, *sure), answered(3, *sure))) == []
    assert len(list(run._compared(answered(3, *sure), answered(4, other)))) == 1
    assert len(list(run._compared(answered(3, *unsure), answered(4, other)))) == is_invariant
    assert run.counts["partings"] == (0 if is_invariant else 2)


RIGHT = Choice([7, 9], [TokenLogprobs(7, -1.0, ((7, -1.0),)), TokenLogprobs(9, -3.0, ((8, -1.5),))], "length")


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, None),
        ({"finish": "failed", "error": "a fault"}, "failed: a fault"),
        ({"finish": "cancelled"}, "nobody had asked"),
        ({"tokens": [7], "logprobs": RIGHT.logprobs[:1]}, "1 tokens of 2"),
        ({"tokens": [7, VOCAB]}, "drew [128]"),
        ({"tokens": [7, 11]}, "drew [11]"),
        ({"tokens": [7, 5]}, "stop tokens at [1]"),
        ({"tokens": [7, 5], "finish": "stop"}, "log probabilities of 9, not of 5"),
        ({"tokens": [5, 5], "finish": "stop"}, "stop tokens at [0, 1]"),
        ({"logprobs": RIGHT.logprobs[:1]}, "1 log probabilities of 2"),
        ({"logprobs": [TokenLogprobs(7, 0.1, ((7, 0.1),)), RIGHT.logprobs[1]]}, "no such numbers"),
        ({"logprobs": [TokenLogprobs(7, -9999.0, ((8, -1.0),)), RIGHT.logprobs[1]]}, "no such numbers"),
        ({"logprobs": [TokenLogprobs(7, -1.1, ((7, -1.0),)), RIGHT.logprobs[1]]}, "two log probabilities"),
        ({"logprobs": [TokenLogprobs(7, -1.0, ((8, -1.5),)), RIGHT.logprobs[1]]}, "the best is not the best"),
        ({"logprobs": [TokenLogprobs(7, -1.0), RIGHT.logprobs[1]]}, "not the 1 best"),
    ],
)
def test_what_is_wrong_with_an_answer_is_named(changed: dict[str, Any], found: str | None) -> None:
    params = SamplingParams(logprobs=1, stop_token_ids=(5,), logit_bias=((11, -100.0),))
    asked = Asked(GenerateRequest("a", (1,), sampling=params, max_new_tokens=2))
    asked.choices = [replace(RIGHT, **changed)]
    problems = list(judge(asked, VOCAB))
    assert (found in "; ".join(problems)) if found is not None else problems == []


def test_the_same_seed_draws_the_same_requests(run: mixed.Run) -> None:
    one, other = (Mix(5, run._info, 300, 9, is_invariant=True) for _ in range(2))
    assert [one.next(f"{n}").request for n in range(50)] == [other.next(f"{n}").request for n in range(50)]
