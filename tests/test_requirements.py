"""Each requirement of executor, scheduler and engine is carried by a test, or tests/REQUIREMENTS.md says why not.

A test carries an id by its name (test_cell_7_..., test_pack_2_to_5_..., test_exe_8_and_9_...) or by its docstring
(CELL-7, RAW-1..7). `python tests/test_requirements.py` writes the table's middle column anew and keeps the sentences.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = TESTS / "REQUIREMENTS.md"

LAST = {
    **{"CELL": 29, "CCELL": 7, "DF": 11, "SEQ": 10, "BSEQ": 5, "RING": 5, "CSEQ": 2, "REF": 6},
    **{"POOL": 12, "PAD": 7, "STG": 5, "GRA": 2},
    **{"EXE": 18, "PLAN": 5, "SES": 6, "PACK": 7, "SAM": 12, "RAW": 7, "SPEC": 9, "X": 11},
    **{"SCH": 13, "RUN": 31, "PFX": 7, "MET": 7},
}
"""The largest number of each kind; they count from 1."""

GROUPS = ("SEQ", "FACE", "REG", "FAC", "CELL", "ROWS", "ATT", "PACK", "SES", "SEL", "PLAN", "CUDA", "SAM")
"""Of older tests that these behaviours were first pinned by: T-SEQ ..."""

EXTRA = ("DF-3b", "DF-3c", *(f"T-{group}" for group in GROUPS))
IDS = tuple(f"{kind}-{number}" for kind, last in LAST.items() for number in range(1, last + 1)) + EXTRA

_IN_TEXT = re.compile(r"\b([A-Z]+)-(\d+)([bc]?)(?:\.\.(\d+))?")
_IN_NAME = re.compile(r"(?<![a-z])([a-z]+)_(\d+)([bc]?)(?:_(to|and)_(\d+))?(?=_|$)")


def ids_in(name: str, docstring: str) -> set[str]:
    """The ids that a test carries."""
    found: set[str] = set()
    for kind, first, letter, last in _IN_TEXT.findall(docstring):
        found |= {f"{kind}-{number}{letter}" for number in range(int(first), int(last or first) + 1)}
    found |= set(re.findall(r"\bT-[A-Z]+", docstring))
    found |= {f"T-{group.upper()}" for group in re.findall(r"(?<![a-z])t_([a-z]+)(?=_|$)", name)}
    for kind, first, letter, word, second in _IN_NAME.findall(name):
        last = int(second) if word == "to" else int(first)
        found |= {f"{kind.upper()}-{number}{letter}" for number in range(int(first), last + 1)}
        if word == "and":
            found.add(f"{kind.upper()}-{second}")
    return found & set(IDS)


def carriers() -> dict[str, list[str]]:
    """Id -> the test files that carry it."""
    files: dict[str, list[str]] = {requirement: [] for requirement in IDS}
    for path in sorted(TESTS.rglob("test_*.py")):
        carried: set[str] = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                carried |= ids_in(node.name, ast.get_docstring(node) or "")
        for requirement in carried:
            files[requirement].append(path.relative_to(TESTS).as_posix())
    return files


def rows() -> dict[str, tuple[list[str], str]]:
    """The table as it is committed: id -> (files, sentence)."""
    found: dict[str, tuple[list[str], str]] = {}
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 3 and cells[0] in IDS:
            assert cells[0] not in found, f"{cells[0]} has two rows"
            found[cells[0]] = (cells[1].split(), cells[2])
    return found


def test_every_requirement_has_a_test_or_a_reason_why_not():
    carried, table = carriers(), rows()
    assert [requirement for requirement in IDS if requirement not in table] == []
    assert [requirement for requirement in IDS if not carried[requirement] and not table[requirement][1]] == []


def test_the_table_names_no_test_file_that_does_not_carry_the_id():
    carried = carriers()
    stale = {
        requirement: sorted(set(files) - set(carried[requirement]))
        for requirement, (files, _) in rows().items()
        if set(files) - set(carried[requirement])
    }
    assert stale == {}, "run `python tests/test_requirements.py`"


def test_ids_are_read_from_names_and_docstrings():
    assert ids_in("test_pack_2_to_5_and_more", "") == {"PACK-2", "PACK-3", "PACK-4", "PACK-5"}
    assert ids_in("test_exe_8_and_9_defaults", "RAW-1..3, DF-3b: so it is") == {
        *("EXE-8", "EXE-9", "RAW-1", "RAW-2", "RAW-3", "DF-3b")
    }
    assert ids_in("test_cell_29_1_two_prefills", "CELL-29.6, UTF-8, CELL-30") == {"CELL-29"}
    assert ids_in("test_ccell_7_metrics", "") == {"CCELL-7"}
    assert ids_in("test_t_seq_a_branch_and_a_test_sel_", "T-FAC.") == {"T-SEQ", "T-FAC"}
    assert ids_in("test_pack_1_keeps_order_and_pack_7_answers", "") == {"PACK-1", "PACK-7"}


def write() -> None:
    carried, table = carriers(), rows()
    lines = TABLE.read_text().splitlines()
    head = lines[: lines.index("|---|---|---|") + 1]
    body = [f"| {id_} | {' '.join(carried[id_])} | {table.get(id_, ([], ''))[1]} |" for id_ in IDS]
    TABLE.write_text("\n".join(head + body) + "\n")


if __name__ == "__main__":
    write()
