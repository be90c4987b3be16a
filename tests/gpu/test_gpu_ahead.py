"""A first start on a GPU compiles what its captures need at once, a second one finds it; both draw the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from static_graphs.ahead import run_at_once

pytestmark = pytest.mark.gpu

MODEL = """
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
options = ExecutorOptions(capacity_cells=4096, widths=(1, 2, 8, 32, 64, 128), max_sessions=16, reserves_cells=False)
executor = create_executor(model, options, lambda phase, *_: phases.append(phase))
"""

GENERATES = """
print(json.dumps([sorted(set(phases)), generate(executor, [(1, 5), (4, 5, 6), tuple(range(3, 60))], 20)]))
"""

DRAWS_EDITED = """
from engine.types import SamplingParams
from static_graphs.kernels.compilations import compilations
from support.toy_executor import draw, last_row

KINDS = [
    {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 3},
    {"logit_bias": ((3, 4.0), (4, -100.0)), "min_p": 0.05},
    {"allowed_token_ids": (1, 2, 3), "top_k": 50, "top_p": 0.9, "logprobs": 0},
]
compiled = {}
for rows in (1, 3, 16):
    for kinds in (KINDS, KINDS[:1], KINDS[1:2], KINDS[2:]):  # together, and each kind alone
        sessions = [
            executor.open_session(SamplingParams(**kinds[row % len(kinds)]), seed=row, prompt=(5,))
            for row in range(rows)
        ]
        tokens = [5] * rows
        with compilations() as names:
            for position in range(3):
                chunks = [last_row(*at, position) for at in zip(sessions, [(token,) for token in tokens])]
                tokens = draw(executor, *chunks)
        compiled.setdefault(str(rows), []).extend(names)
        for session in sessions:
            executor.close_session(session)
print(json.dumps([sorted(set(phases)), compiled]))
"""


def run(script: str, kernels: Path) -> list[Any]:
    """What a process prints last, whose compiled kernels are kept there."""
    root = Path(__file__).parents[2]
    paths = [str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"TRITON_CACHE_DIR": str(kernels), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_a_first_start_compiles_its_kernels_at_once_and_a_second_one_finds_them(tmp_path: Path) -> None:
    (first, first_drawn), (second, second_drawn) = (run(MODEL + GENERATES, tmp_path) for _ in range(2))
    assert "compiling kernels" in first
    assert "compiling kernels" not in second
    assert first_drawn == second_drawn


def test_a_step_with_edited_logits_compiles_nothing_behind_a_first_start(tmp_path: Path) -> None:
    phases, compiled = run(MODEL + DRAWS_EDITED, tmp_path)
    assert "compiling kernels" in phases
    assert compiled == {"1": [], "3": [], "16": []}


def test_jobs_run_behind_the_current_stream_and_each_thread_has_one_stream() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.zeros(1 << 24, device=device)
    for _ in range(200):  # under way while the jobs begin
        total += 1
    streams: dict[int, set[int]] = defaultdict(set)
    seen: list[torch.Tensor] = []

    def job() -> None:
        streams[threading.get_ident()].add(torch.cuda.current_stream(device).cuda_stream)
        seen.append(total.min())

    run_at_once([job] * 40, device)
    assert [value.item() for value in seen] == [200.0] * 40
    assert all(len(own) == 1 for own in streams.values())
    assert torch.cuda.current_stream(device).cuda_stream not in set.union(*streams.values())
