"""tests/TIERS.md names, for each rule of K/V below the pool, tests that exist or the reason why there is none."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent

LAST = {"G": 6, "C": 3, "W": 3, "O": 4, "S": 8, "B": 4, "X": 5, "K": 8, "I": 5, "M": 7, "R": 12}
IDS = {f"{kind}{number}" for kind, last in LAST.items() for number in range(1, last + 1)}
IDS |= {
    "PLAIN",
    "GDS",
    "IPC",
    "P1",
    "P2",
    "P4",
    "P5",
    "P6",
    "P7",
    "F3",
    "F4",
    "F6",
    "F8",
    *(f"Q{number}" for number in range(1, 13)),
}


def rows() -> dict[str, str]:
    found: dict[str, str] = {}
    for line in (TESTS / "TIERS.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 3 and cells[0] not in ("id", "---"):
            assert cells[0] not in found, f"{cells[0]} has two rows"
            found[cells[0]] = cells[2]
    return found


def test_every_rule_of_the_tiers_has_a_row_with_a_test_or_a_reason() -> None:
    table = rows()
    assert set(table) == IDS
    assert [rule for rule, text in table.items() if not text] == []


def test_the_tests_that_the_table_names_exist() -> None:
    files = {path: path.read_text() for path in TESTS.rglob("test_*.py")}
    there = {name for text in files.values() for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    there |= {path.name.removesuffix(".py") for path in files}
    named = {name for text in rows().values() for name in re.findall(r"\btest_\w+", text)}
    assert sorted(named - there) == []
