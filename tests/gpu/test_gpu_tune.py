"""Tuning on a GPU: small products are measured, stored, and read back by who serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

pytestmark = pytest.mark.gpu


def test_products_are_measured_and_their_choices_read_back_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from static_graphs import tiling_table, tune
    from static_graphs.tilings import RULE, Product
    from static_graphs.trials import Trial, graph_us

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = torch.device("cuda")
    assert tiling_table.tilings_for(device, torch.bfloat16) is RULE
    assert tiling_table.main("cuda") == 1
    products = [Product(512, 1024), Product(512, 256, is_gated=True, is_whole=True)]
    tune.tune(products, [1, 8], device, processes=8, console=Console(stderr=True))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["case"].partition(":")[0] for line in lines] == [
        "512 x 256 gated, up to 1 rows",
        "512 x 256 gated, up to 16 rows",
        "512 x 1024, up to 1 rows",
        "512 x 1024, up to 16 rows",
    ]
    assert all(line["value"] > 0 for line in lines)
    tilings = tiling_table.tilings_for(device, torch.bfloat16)
    assert len(tilings.measured) == 4
    assert tiling_table.tilings_for(device, torch.float32) is RULE
    assert tiling_table.main("cuda") == 0
    for of in products:
        trial = Trial(of, device, graph_us)
        for rows in (1, 2, 16):
            tiling = tilings.choose(rows, of.width, of.depth, gated=of.is_gated)
            assert trial.time_us(rows, tiling) is not None, (of, rows, tiling)
