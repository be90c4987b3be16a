"""The sweep over every model type, and that its table is what it says today."""

from __future__ import annotations

import pytest

from static_graphs import sweep


def test_one_type_of_each_outcome() -> None:
    assert sweep.try_type("mixtral").verdict == "equal"
    assert sweep.try_type("phimoe") == sweep.Outcome(
        "phimoe", "PhimoeForCausalLM", "equal", "4 layers: 2 x 8 window 5"
    ), "its window stands in its masks alone"
    assert sweep.try_type("minicpm3").detail == "4 layers: 4 x 12/6 all"
    assert sweep.try_type("minimax").verdict == "refused"


# Older releases of transformers script functions of some models as these are imported, which torch advises against.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_the_table_lists_every_type_that_declares_attention_back_ends() -> None:
    written = sweep.TABLE.read_text(encoding="utf-8")
    listed = [line.split("|")[1].strip() for line in written.splitlines() if line.startswith("| ")][1:]
    known = set(sweep.causal_types())
    assert set(listed) >= known, "write the table again: python -m static_graphs.sweep"
    assert sum("| equal |" in line for line in written.splitlines()) >= 100
    assert "| different |" not in written


@pytest.mark.full
def test_the_table_is_what_the_sweep_finds() -> None:
    assert sweep.table([sweep.try_apart(name) for name in sweep.causal_types()]) == sweep.TABLE.read_text("utf-8")
