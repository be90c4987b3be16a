"""tests/FAULTS.md names every kind of fault, every rule and every figure, and no test or entry that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import test_faults_server
import test_faults_tiers

TESTS = Path(__file__).parent
TABLE = (TESTS / "FAULTS.md").read_text()


def test_every_kind_rule_and_figure_has_its_row_once() -> None:
    rows = re.findall(r"^\| ([FRG]\d+)\b", TABLE, re.MULTILINE)
    assert rows == [
        *(f"F{number:02}" for number in range(1, 49)),
        *(f"R{number}" for number in range(1, 41)),
        *(f"G{number}" for number in range(2, 13)),
    ]


def test_every_test_that_is_named_is_there() -> None:
    there = {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    named = set(re.findall(r"`(test_\w+)`", TABLE))
    assert len(named) > 40
    assert named - there == set()


def test_every_entry_that_is_named_is_there() -> None:
    names = " | ".join([*test_faults_server.KINDS, *test_faults_tiers.KINDS])
    for row in re.findall(r"^\| F\d+ .*$", TABLE, re.MULTILINE):
        for entry in re.findall(r"entr(?:y|ies) (f\d+(?: f\d+)*)", row):
            assert entry in names, row


def test_the_kinds_that_hold_are_as_many_as_it_says() -> None:
    rows = re.findall(r"^\| F\d+ \|(.*)$", TABLE, re.MULTILINE)
    held = [row for row in rows if not row.rstrip(" |").endswith("not there")]
    assert f"G1: {len(held)} of 48 kinds" in TABLE
