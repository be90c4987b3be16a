"""The products' kernels fit the shared memory of GPUs that are smaller than the one their tilings were measured on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton: pip install triton")

from static_graphs.kernels.shared_memory import Room

ROOT = Path(__file__).parents[1]
H200, A100, L4 = Room(232_448, (9, 0)), Room(166_912, (8, 0)), Room(101_376, (8, 9))


def test_stages_are_as_wanted_where_they_fit() -> None:
    assert H200.stages(4, 36_864) == 4
    assert H200.stages(4, 65_536) == 3
    assert A100.stages(4, 36_864) == 4


def test_a_matrix_unit_that_reads_registers_frees_a_stage() -> None:
    assert L4.stages(4, 36_864) == 3  # 2 in shared memory
    assert Room(101_376, (9, 0)).stages(4, 36_864) == 2


def test_one_stage_is_the_least() -> None:
    assert L4.stages(4, 200_000) == 1


def test_every_product_that_the_rules_choose_fits_a_gpu_of_99_kb(tmp_path: Path) -> None:
    room = L4
    capability = ".".join(map(str, room.capability))
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    told = subprocess.run(
        [sys.executable, "-m", "support.compiled_products", capability, str(room.shared_bytes)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    found = [json.loads(line) for line in told.stdout.splitlines()]
    assert {each["kernel"] for each in found} == {"_multiply_rows", "_multiply_pairs"}
    for each in found:
        assert each["bytes"] <= room.shared_bytes, each
        assert each["constants"]["UPCAST"] or each["stages"] >= 2, each
