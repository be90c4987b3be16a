"""The soak, in small: everything is given back, every answer is right, the books balance at every pause."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.load import soak


def test_r39_g3_g4_a_short_soak_leaks_nothing_and_answers_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, drawing = tmp_path / "figures.jsonl", tmp_path / "memory.svg"
    flags = ["--requests", "600", "--sample", "150", "--warm-up", "150", "--clients", "16"]
    code = soak.main([*flags, "--json", str(figures), "--picture", str(drawing)])
    told = capsys.readouterr().out
    assert code == 0, told
    assert "WRONG" not in told
    assert figures.read_text().count('"bench": "soak"') == 5
    assert drawing.read_text().startswith("<svg")


@pytest.mark.full
def test_r39_g3_a_soak_of_20_000_requests_is_flat(capsys: pytest.CaptureFixture[str]) -> None:
    code = soak.main(["--requests", "20000", "--warm-up", "5000"])
    assert code == 0, capsys.readouterr().out


def test_a_soak_that_finds_something_says_so() -> None:
    samples = [soak.Sample(10_000 * step, 100.0 + 5 * step, 50.0, 20 + step, 9, 8, step, 1.0, 2.0) for step in range(4)]
    run = soak.Run(server=None, tiny=None, draw=None, samples=samples, wrong=["a wrong answer"])  # type: ignore[arg-type]
    figures, wrong = soak.verdict(run)
    assert figures["API memory slope"] == pytest.approx(5.0)
    assert wrong == [
        "a wrong answer",
        "API memory slope: 5.00 MB per 10,000 requests",
        "3 cells leaked",
        "23 descriptors at the end, 20 at the first sample",
    ]
