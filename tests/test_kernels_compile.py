"""Every kernel that is launched passes Triton's front end for sm_90, as it is launched and without a GPU.

The interpreter, under which kernels run where there is no GPU, checks no types: a variable that changes its type
between branches or turns of a loop passes there and fails on a GPU. `support.kernel_launches` says what is launched.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton: pip install triton")

ROOT = Path(__file__).parent.parent
PACKAGES = ("server", "engine", "cache", "static_graphs")

Variants = dict[str, list[dict[str, Any]]]
"""By kernel, as `support.kernel_launches` prints them."""


@cache
def trees() -> dict[str, ast.Module]:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
        for path in files
    }


def kernels_of(modules: dict[str, ast.Module]) -> set[str]:
    """The dotted names of what is @triton.jit and is launched, `kernel[grid](...)`, or called by no kernel.

    What no kernel calls is there to be launched, however that is written.
    """
    jitted = {
        f"{module}.{function.name}": function
        for module, tree in modules.items()
        for function in tree.body
        if isinstance(function, ast.FunctionDef)
        and any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)
    }
    launched, called = set(), set()
    for module, tree in modules.items():
        full = {
            name.asname or name.name: f"{node.module}.{name.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for name in node.names
        }
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Subscript(value=ast.Name(name))):
                    launched.add(full.get(name, f"{module}.{name}"))
                case ast.Call(func=ast.Subscript(value=ast.Attribute(ast.Name(home), name))):
                    launched.add(f"{full.get(home, home)}.{name}")
        for function in tree.body:
            if jitted.get(f"{module}.{getattr(function, 'name', '')}") is function:
                names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
                called |= {full.get(name, f"{module}.{name}") for name in names}
    return {name for name in jitted if name in launched or name not in called}


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Variants:
    """Of a process of its own: in this one TRITON_INTERPRET may have put the interpreter in its place."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
    }
    ran = subprocess.run(
        [sys.executable, "-m", "support.kernel_launches"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = defaultdict(list)
    for variant in json.loads(ran.stdout):
        found[variant["kernel"]].append(variant)
    return found


@pytest.mark.parametrize("kernel", sorted(kernels_of(trees())))
def test_a_kernel_compiles_as_it_is_launched(kernel: str, variants: Variants) -> None:
    launched = variants.get(kernel, [])
    assert launched, f"{kernel} is launched by no case of tests/support/kernel_launches.py"
    broken = [variant for variant in launched if variant["error"]]
    cases = ", ".join(variant["case"] for variant in broken)
    assert not broken, f"{len(broken)} of {len(launched)} variants ({cases}), the first: {broken[0]['error']}"
    for flag in launched[0]["flags"]:
        values = {variant["flags"][flag] for variant in launched}
        assert len(values) == 2 or flag == "PDL", f"{kernel} is only launched with {flag}={values}: add the other case"


@pytest.mark.parametrize("broken", ["pointer_or_number", "number_that_widens"])
def test_a_variable_that_changes_its_type_does_not_pass(broken: str, variants: Variants) -> None:
    """What the interpreter lets through."""
    (variant,) = variants[f"__main__.{broken}"]
    assert "type" in variant["error"]


def test_attention_over_a_group_of_many_heads_is_no_more_code_than_over_a_few(variants: Variants) -> None:
    """A merge written out for each of 71 heads took half a minute to compile, for every variant."""
    lines = {variant["case"]: variant["lines"] for variant in variants["cache.attend.triton_cells._attend_pieces"]}
    assert lines["a group of many heads"] <= lines["one piece"]


def test_kernels_are_found_however_they_are_launched() -> None:
    home = """
@triton.jit
def helper(x): return x
@triton.jit
def first(x): helper(x)
@triton.autotune([], key=[])
@triton.jit
def second(x): other.twice(x)
@triton.jit
def elsewhere(x): second(x)
def launch(): (first if x else elsewhere)[(1,)](x)
def plain(x): [helper][0](x)
"""
    away = """
from home import second as kernel
import home
kernel[(1,)](1)
"""
    modules = {"home": ast.parse(home), "away": ast.parse(away)}
    assert kernels_of(modules) == {"home.first", "home.second", "home.elsewhere"}
