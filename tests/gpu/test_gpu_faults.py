"""Faults of a real device: its allocator refuses at the n-th step (R12), a kernel fails for good (R13)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support import lost_device
from support.exhausted import ToyRounds

pytestmark = pytest.mark.gpu

STEPS = range(1, 201)
DEATHS = 3


def test_r12_memory_that_runs_out_at_any_step_costs_no_wrong_token_and_no_cell(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = ToyRounds("cpu").round()
    rounds = ToyRounds("cuda")
    quiet = rounds.round()
    differing = [choice for choice in expected if quiet[choice] != expected[choice]]
    assert differing == [], "an undisturbed round says something else than the CPU: no matter of memory"
    assert rounds.steps() > STEPS[-1], f"a round has {rounds.steps()} steps: too few"
    found = rounds.without_memory_at(STEPS, expected)
    with capsys.disabled():
        print(
            f"\nR12: {len(STEPS)} rounds of {len(expected)} choices, {rounds.steps()} steps, "
            f"{rounds.engine.loop.stats().steps_failed} failed, {found.told} choices told of an error"
        )
    assert not found.wrong, "\n".join([f"{len(found.wrong)} findings", *found.wrong[:5]])
    assert rounds.engine.loop.stats().steps_failed >= len(STEPS)


def test_r12_the_error_is_the_allocators_own() -> None:
    rounds = ToyRounds("cuda")
    for point in ("upload.oom", "forward.oom", "sampler.oom"):
        rounds.faults.arm(point, times=6)
        answers = rounds.round()
        rounds.faults.disarm()
        told = {rounds.engine.of(*choice)[-1].error for choice, (_, end) in answers.items() if end == "failed"}
        assert told, f"of six failures behind one another at {point} some must end a session"
        assert all(error and "CUDA out of memory. Tried to allocate" in error for error in told), told


def test_r13_a_kernel_that_fails_ends_the_engine_alone_and_the_next_one_answers_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        before, *deaths = lost_device.run(tmp_path, "cuda", "device.assert", DEATHS)
    except BaseException as error:
        log = tmp_path / "log"
        error.add_note(log.read_text()[-6000:] if log.exists() else "the server has not begun its log")
        raise
    log_text = (tmp_path / "log").read_text()
    with capsys.disabled():
        for number, death in enumerate(deaths, 1):
            print(
                f"\nR13: death {number}: {death.num_told} told within {death.told_s:.3f} s of their last token, "
                f"{death.num_rerun} ran again, ready {death.ready_s:.1f} s behind the first word"
            )
    wrong = [text for death in (before, *deaths) for text in death.wrong]
    assert not wrong, "\n".join([f"{len(wrong)} findings", *wrong[:5], "log:", log_text[-6000:]])
    assert log_text.count("the engine stopped (a step failed with") == DEATHS, log_text[-6000:]
    assert "device-side assert" in log_text, f"the device itself has not failed:\n{log_text[-6000:]}"
