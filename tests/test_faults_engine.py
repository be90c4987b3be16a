"""Faults inside the engine, on real cells and a real sampler: the streams beside them are what they are without.

Eight bystanders run beside every fault: greedy, seeded, penalised, and two that share a prefix. Their tokens are
compared with those of a run without a fault. tests/FAULTS.md has the kinds.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from engine.errors import DeviceLost
from engine.faults import Faults, checked
from support.looped import Engine
from support.poison import poison_free_cells
from support.scripted import ScriptedExecutor
from support.toy_decoder import ToyDecoder
from support.toy_executor import toy_executor

NEW = 12
GREEDY = {"temperature": 0.0}
SHARED = (9, 8, 7, 6, 5, 4, 3, 2)
BYSTANDERS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "greedy": ((1, 2, 3), GREEDY),
    "greedy too": (tuple(range(20)), GREEDY),
    "seeded": ((4, 5), {"seed": 1}),
    "seeded too": ((5, 4, 3, 2, 1), {"seed": 2, "top_p": 0.9}),
    "penalised": ((6,), {"seed": 3, "presence_penalty": 1.0, "frequency_penalty": 0.5}),
    "narrow": ((7, 7, 7), {"seed": 4, "top_k": 5, "logprobs": 2}),
    "shares": ((*SHARED, 10), GREEDY),
    "shares too": ((*SHARED, 11), {"seed": 5}),
}


class Faulty(Engine):
    """The bystanders' engine, with NaN in every free cell before each step."""

    def __init__(self, model: ToyDecoder, *, cells: int = 255, seqs: int = 8) -> None:
        super().__init__(toy_executor(model, capacity_cells=cells), seqs=seqs, budget=24, chunk=8)
        self.faults = Faults()
        self.faults.fit(self.loop)
        for name, (prompt, sampling) in BYSTANDERS.items():
            self.submit(name, prompt, max_new_tokens=NEW, sampling=dict(sampling))

    def step(self) -> Any:
        poison_free_cells(self.executor.cache_control)
        return super().step()

    def told(self) -> dict[str, list[int]]:
        return {name: self.tokens(name) for name in BYSTANDERS}

    def ends(self) -> list[str]:
        return [self.finish(name) for name in BYSTANDERS]

    def is_sound(self) -> bool:
        state = checked(self.loop)
        assert state["problems"] == []
        self.loop.reset_prefix_cache()
        return bool(state["is_idle"] and self.executor.free_cells == self.executor.total_cells)


@pytest.fixture(scope="module")
def model() -> ToyDecoder:
    return ToyDecoder()


@pytest.fixture(scope="module")
def ref(model: ToyDecoder) -> dict[str, list[int]]:
    """What everybody gets without a fault."""
    engine = Faulty(model).run()
    assert engine.ends() == ["length"] * 8
    return engine.told()


MOMENTS = (0, 3, 9)


STEPS = [*MOMENTS, *(pytest.param(step, marks=pytest.mark.full) for step in range(13) if step not in MOMENTS)]
"""Steps that pass before the fault: a few, and with --full all there are."""


@pytest.mark.parametrize("after", STEPS)
@pytest.mark.parametrize(
    "point",
    ["step.raise", "forward.raise", "forward.oom", "sampler.raise", "sampler.oom", "upload.raise", "upload.oom"],
)
def test_f16_f17_a_step_that_fails_costs_nobody_a_token(
    model: ToyDecoder, ref: dict[str, list[int]], point: str, after: int
) -> None:
    engine = Faulty(model)
    engine.faults.arm(point, after=after)
    engine.run()
    assert engine.faults.fired == {point: 1}
    assert (engine.told(), engine.ends()) == (ref, ["length"] * 8)
    assert engine.loop.stats().steps_failed == 1
    assert engine.is_sound()


@pytest.mark.parametrize("point", ["step.raise", "forward.oom", "sampler.raise"])
def test_f17_failures_one_after_another_end_some_and_change_nobodys_tokens(
    model: ToyDecoder, ref: dict[str, list[int]], point: str
) -> None:
    engine = Faulty(model)
    engine.faults.arm(point, after=5, times=4)
    engine.run()
    ends = dict(zip(BYSTANDERS, engine.ends(), strict=True))
    assert list(ends.values()).count("failed") == 3, "the first failure is everybody's, the others each one's own"
    for name, tokens in engine.told().items():
        assert tokens == (ref[name] if ends[name] == "length" else ref[name][: len(tokens)])
    assert engine.is_sound()


@pytest.mark.parametrize("after", STEPS)
@pytest.mark.parametrize("point", ["row.raise", "row.nan", "logits.nan"])
def test_f13_f14_f15_a_row_that_fails_ends_its_own_request_and_no_other(
    model: ToyDecoder, ref: dict[str, list[int]], point: str, after: int
) -> None:
    engine = Faulty(model)
    engine.faults.arm(point, after=after, row=after)
    engine.run()
    ends = dict(zip(BYSTANDERS, engine.ends(), strict=True))
    assert sorted(ends.values()) == ["failed", *["length"] * 7]
    for name, tokens in engine.told().items():
        assert tokens == (ref[name] if ends[name] == "length" else ref[name][: len(tokens)])
    assert engine.loop.stats().rows_failed == 1
    assert engine.is_sound()


@pytest.mark.parametrize("after", range(8))
def test_f13_a_request_that_cannot_be_opened_ends_alone(
    model: ToyDecoder, ref: dict[str, list[int]], after: int
) -> None:
    engine = Faulty(model)
    engine.faults.arm("open.raise", after=after)
    engine.run()
    ends = dict(zip(BYSTANDERS, engine.ends(), strict=True))
    assert sorted(ends.values()) == ["failed", *["length"] * 7]
    assert all(engine.told()[name] == ref[name] for name, end in ends.items() if end == "length")
    assert engine.is_sound()


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_f25_r20_g13_preempted_again_and_again_everybody_gets_the_same(
    model: ToyDecoder, ref: dict[str, list[int]], every: int
) -> None:
    engine = Faulty(model)
    for number in range(30):
        engine.faults.arm("preempt", after=number * every)
    engine.run()
    assert engine.loop.stats().preemptions >= 2
    assert (engine.told(), engine.ends()) == (ref, ["length"] * 8)
    assert engine.is_sound()


@pytest.mark.parametrize("cells", [36, 40, 64, 80])
def test_f25_r21_a_pool_that_is_always_short_is_slow_and_right(
    model: ToyDecoder, ref: dict[str, list[int]], cells: int
) -> None:
    engine = Faulty(model, cells=cells).run()
    assert engine.loop.stats().preemptions > 0
    assert (engine.told(), engine.ends()) == (ref, ["length"] * 8)
    assert engine.is_sound()


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 40))])
def test_the_order_of_a_steps_chunks_changes_nobodys_tokens(
    model: ToyDecoder, ref: dict[str, list[int]], seed: int
) -> None:
    """An order that fails a test can be had again by its seed."""
    engine = Faulty(model)
    engine.faults.arm("order", seed=seed, times=10_000)
    engine.run()
    assert engine.faults.fired["order"] > 10
    assert engine.told() == ref


@pytest.mark.full
@pytest.mark.parametrize(("first", "second"), list(itertools.product(range(0, 12, 2), repeat=2)))
@pytest.mark.parametrize("points", [("step.raise", "preempt"), ("forward.oom", "logits.nan"), ("preempt", "row.raise")])
def test_two_faults_at_any_two_moments_leave_the_others_right(
    model: ToyDecoder, ref: dict[str, list[int]], points: tuple[str, str], first: int, second: int
) -> None:
    engine = Faulty(model, cells=80)
    engine.faults.arm(points[0], after=first)
    engine.faults.arm(points[1], after=second)
    engine.run()
    ends = dict(zip(BYSTANDERS, engine.ends(), strict=True))
    assert list(ends.values()).count("failed") <= 1
    for name, tokens in engine.told().items():
        assert tokens == (ref[name] if ends[name] == "length" else ref[name][: len(tokens)])
    assert engine.is_sound()


class Lost(ToyDecoder):
    """A model on a device that is lost: every forward is told so."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def hidden(self, tokens: Any, positions: Any, step: Any) -> Any:
        raise self.error


def test_r13_a_lost_device_ends_the_engine_and_no_request_is_tried_again_on_it() -> None:
    engine = Faulty(Lost(torch.AcceleratorError("CUDA error: device-side assert triggered")))
    with pytest.raises(DeviceLost, match="device-side assert"):
        engine.run()
    assert engine.updates == []


def test_r13_memory_that_is_refused_is_a_steps_business_whoever_says_so() -> None:
    """What asks for pinned memory says it as a lost device does."""
    engine = Faulty(Lost(torch.AcceleratorError("CUDA error: out of memory")))
    engine.run()
    assert engine.ends() == ["failed"] * 8
    assert engine.is_sound()


class LostAtOpening(ScriptedExecutor):
    def open_session(self, *args: Any, **fields: Any) -> int:
        raise DeviceLost("the device is lost")


def test_r13_a_device_that_is_lost_while_a_request_is_opened_is_not_taken_for_the_requests_fault() -> None:
    engine = Engine(LostAtOpening())
    engine.submit("a", (1, 2))
    with pytest.raises(DeviceLost):
        engine.step()


def test_a_point_or_an_option_that_is_none_is_refused_by_name(model: ToyDecoder) -> None:
    engine = Faulty(model)
    for order, word in (
        ('{"do": "arm", "point": "step.rise"}', "there is no point step.rise"),
        ('{"do": "arm", "point": "tier.full"}', "there is no point tier.full"),
        ('{"do": "arm", "point": "step.raise", "when": 3}', "when"),
        ('{"do": "dance"}', "nobody knows how to dance"),
        ("[]", "error"),
        ("{", "Expecting"),
    ):
        assert word in engine.loop.obey(order)


def test_what_does_not_add_up_is_told(model: ToyDecoder) -> None:
    engine = Faulty(model).run()
    assert checked(engine.loop)["problems"] == []
    engine.executor.cache_control.claim_cells(1)
    (problem,) = [text for text in checked(engine.loop)["problems"] if "free and" in text]
    assert "of 255 cells" in problem
