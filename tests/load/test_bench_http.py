"""The bench of the HTTP layer compares like with like. Its figures are nobody's to assert."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_raw_app_sends_the_bytes_that_the_server_sends() -> None:
    ran = subprocess.run(
        (sys.executable, "-m", "load.bench_http", "--streams", "3", "--seconds", "0.5", "--repeat", "1"),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    records = [json.loads(line) for line in ran.stdout.splitlines()]
    figures = {(record["case"].partition(",")[0], record["unit"]): record["value"] for record in records}
    assert figures["stack", "tok/s"] == figures["stack", "frames/s"]
    assert figures["engine", "tok/s"] >= figures["engine", "frames/s"] > 0
    assert figures["stack", "bytes a frame"] == pytest.approx(figures["raw", "bytes a frame"], abs=1)
