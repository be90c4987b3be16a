"""The bench of reuse: every case runs at a tiny size and prints figures that are what their names say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cache.offload import bench as offload_bench
from engine import kv_bench
from support.model_folder import write_folder

TINY = (
    *("--prompt", "300", "--repeat", "1", "--turns", "3", "--turn", "8", "--requests", "2", "--prefix", "40"),
    *("--fresh-prompt", "8", "--new-tokens", "4", "--pairs", "1", "--host-gib", "0.01"),
    *("--chunks", "4", "--entries", "2000", "--trace", "100"),
)


def figures(captured: str) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {}
    for line in captured.splitlines():
        record = json.loads(line)
        found.setdefault(record["bench"], []).append(record)
    return found


def test_every_case_runs_at_a_tiny_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kv_bench.main(["--model", write_folder(tmp_path), *TINY]) == 0
    found = figures(capsys.readouterr().out)
    engine_cases = {f"kv {case}" for case in kv_bench.ENGINE_CASES}
    assert set(found) == {"link", "move", "index", "policy"} | engine_cases
    measured = [record for bench in ("link", "move", "index", "kv repeat") for record in found[bench]]
    # A process that has had more memory before needs none from the system for so few entries.
    assert [record for record in measured if record["unit"] != "bytes" and record["value"] <= 0] == []
    from_host = next(record for record in found["kv repeat"] if "from host memory" in record["case"])
    assert "256 tokens" in from_host["case"], "whole chunks come from host memory"
    computed = found["kv chat"][0]
    assert (computed["value"], computed["peer_value"]) == (9, 32)
    assert all(record["peer"] == "--no-prefix-cache" for record in (found["kv shared"][0], found["kv fresh"][0]))


def test_what_cannot_be_measured_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert kv_bench.main(["--cases", "repeat,magic"]) == 2
    assert "no case magic" in capsys.readouterr().err
    assert offload_bench.main(["--device", "cuda"]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err
