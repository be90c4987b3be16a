"""Each rule of the API, each feature and each known fault has a test, or tests/API_RULES.md says why it has none."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = TESTS / "API_RULES.md"

LAST = {"4.1": 12, "4.2": 11, "4.3": 10, "4.4": 11, "4.5": 8, "4.6": 7, "4.7": 15, "4.8": 5, "4.9": 6}
"""The number of the last rule of each section; they count from 1, those of 4.7 from 0."""
FAULTS = 41

RULES = (
    *(f"{section}.{number}" for section, last in LAST.items() for number in range(1, last + 1)),
    "4.7.0",
    *(f"B{number:02}" for number in range(1, FAULTS + 1)),
)
FEATURE_SECTIONS = tuple(f"1.{number}" for number in range(1, 11))

_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows() -> dict[str, tuple[str, str, str]]:
    """Id -> (rule, tests, sentence)."""
    found: dict[str, tuple[str, str, str]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if not line.startswith("| ") or cells[0] == "id":
            continue
        assert len(cells) == 4, line
        assert cells[0] not in found, f"{cells[0]} has two rows"
        found[cells[0]] = (cells[1], cells[2], cells[3])
    return found


@cache
def names_in(path: Path) -> frozenset[str]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    )


def test_every_rule_and_every_fault_has_a_row() -> None:
    table = rows()
    assert [rule for rule in RULES if rule not in table] == []
    others = [rule for rule in table if rule not in RULES]
    assert [rule for rule in others if rule.split(" ")[0] not in FEATURE_SECTIONS] == []
    assert {rule.split(" ")[0] for rule in others} == set(FEATURE_SECTIONS)


def test_every_row_has_a_test_or_a_sentence_that_says_why_not() -> None:
    assert [rule for rule, (_, tests, sentence) in rows().items() if not (_TEST.search(tests) or sentence)] == []


def test_every_test_that_is_named_is_there() -> None:
    gone = []
    for rule, (_, tests, _) in rows().items():
        assert not _TEST.sub("", tests).strip(), f"{rule} names something that is no test"
        for file, name in _TEST.findall(tests):
            if not (TESTS / file).is_file() or name not in names_in(TESTS / file):
                gone.append(f"{rule}: {file}::{name}")
    assert gone == []
