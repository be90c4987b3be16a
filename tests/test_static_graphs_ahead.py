"""What is compiled ahead of the captures, and how it is known that there is something to compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton: pip install triton")

from static_graphs.kernels.products import next_power
from static_graphs.tilings import MIN_ROWS, Tilings, kernel_rows

COMPILES_TWICE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from static_graphs.kernels.compilations import compilations

@triton.jit
def _nothing(out):
    tl.store(out, 1)

for _ in range(2):
    with compilations() as names:
        triton.compile(ASTSource(_nothing, {"out": "*i32"}), target=GPUTarget("cuda", 90, 32))
    print(names)
"""


def test_a_kernel_that_is_compiled_is_told_of_and_one_from_the_disk_is_not(tmp_path: Path) -> None:
    script = tmp_path / "compiles.py"  # triton reads a kernel's source from its file
    script.write_text(COMPILES_TWICE)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, script], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["['_nothing']", "[]"]


def test_one_kernel_serves_the_products_of_row_counts_that_are_called_alike() -> None:
    """Those that no kernel of ours serves are cuBLAS's in every shape."""
    tilings = Tilings()
    shapes = [(6144, 4096, False), (1024, 4096, False), (512, 1024, False), (14336, 4096, True)]
    kernels: dict[object, set[object]] = {}
    for rows in range(1, 400):
        block = 1 if rows == 1 else max(MIN_ROWS, next_power(rows))
        launched = [tilings.choose(rows, width, depth, gated=gated) for width, depth, gated in shapes]
        kernels.setdefault(kernel_rows(rows), set()).add((block, rows == block, *launched))
    assert all(
        len(served) == 1 if kernel is not None else all(each[2:] == (None,) * len(shapes) for each in served)
        for kernel, served in kernels.items()
    )


def test_a_start_rehearses_every_kernel_that_serving_draws_with(tmp_path: Path) -> None:
    """Whatever is edited, cut and asked for, and however many rows there are. It rehearses no other either."""
    root = Path(__file__).parents[1]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join((str(root), str(root / "tests"))),
    }
    command = [sys.executable, "-m", "support.draw_launches"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for dtype, launches in json.loads(done.stdout).items():
        rehearsed = set(launches["rehearsed"])
        served = {variant: case for case, variants in launches["served"].items() for variant in variants}
        missing = {variant.split()[0]: case for variant, case in served.items() if variant not in rehearsed}
        assert not missing, f"{dtype}: compiled by the first request that asks for it, and where: {missing}"
        assert rehearsed == set(served)
