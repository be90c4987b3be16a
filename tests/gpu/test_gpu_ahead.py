"""A first start on a GPU compiles what its captures need at once, a second one finds it; both draw the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

START = """
import json
import torch
from engine.create import create_executor
from engine.executor_options import ExecutorOptions
from static_graphs.fuse import fuse
from static_graphs.model import model_from_config
from support.tiny_models import tiny
from support.toy_executor import generate

sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05}
model = model_from_config(tiny("llama", **sizes), device="cuda", dtype=torch.bfloat16, seed=3)
fuse(model)
phases = []
options = ExecutorOptions(capacity_cells=4096, widths=(1, 2, 8, 32, 64, 128), max_sessions=8, reserves_cells=False)
executor = create_executor(model, options, lambda phase, *_: phases.append(phase))
print(json.dumps([sorted(set(phases)), generate(executor, [(1, 5), (4, 5, 6), tuple(range(3, 60))], 20)]))
"""


def test_a_first_start_compiles_its_kernels_at_once_and_a_second_one_finds_them(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    paths = [str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    starts = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", START], env=environment, capture_output=True, text=True, cwd=root)
        assert done.returncode == 0, done.stderr[-3000:]
        starts.append(json.loads(done.stdout.splitlines()[-1]))
    (first, first_drawn), (second, second_drawn) = starts
    assert "compiling kernels" in first
    assert "compiling kernels" not in second
    assert first_drawn == second_drawn
