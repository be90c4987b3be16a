"""Who may import whom: the arrows between the packages, one home for each third party, no torch in a server."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("server", "engine", "cache", "static_graphs")

ARROWS = {
    "server": [
        "server.*",
        *(f"engine.{module}" for module in ("types", "errors", "config", "client", "metrics", "view", "logs")),
    ],
    "engine": ["engine.*", "static_graphs.*", "cache.*"],
    "static_graphs": ["static_graphs.*", "cache.*"],
    "cache": ["cache.*"],
}

HOMES = {
    "zmq": ["engine.process", "engine.spawned", "engine.relay"],
    "msgspec": ["engine.types", "engine.wire", "engine.relay", "engine.streams", "static_graphs.loading"],
    "triton": [
        "static_graphs.kernels.*",
        "cache.attend.launch",
        "cache.attend.merge",
        "cache.attend.triton_cells",
        "cache.attend.work",
        "cache.offload.kernels",
    ],
    "cuda": ["cache.pool*"],
    "transformers": ["static_graphs.*", "engine.bench"],
    "gguf": ["static_graphs.*"],
    "redis": ["cache.offload.redis_tier"],
    "llguidance": ["engine.grammar"],
    "ray": ["server.ray_app"],
    "prometheus_client": ["server.metrics", "server.engine_metrics", "server.metric_sums"],
    "opentelemetry": ["server.tracing"],
    "tokenizers": ["server.*"],
    "jinja2": ["server.*"],
    "fastapi": ["server.*"],
    "starlette": ["server.*"],
    "uvicorn": ["server.run", "server.http_protocol", "server.body_writer"],
    "pydantic_settings": ["server.options", "server.settings"],
}
"""Third party -> the modules that may know it. Whoever wants it elsewhere asks them."""

HEAVY = ("torch", "transformers", "triton")
"""Seconds to import and gigabytes to install: not for a process that only speaks HTTP."""

DESERIALISERS = ("pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib")
"""They run what they read (S10)."""


@dataclass(frozen=True)
class Import:
    """`module` is imported in line `line`; `is_lazy` inside a function, so not by importing the file."""

    module: str
    line: int
    is_lazy: bool


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of all our packages."""
    files = {
        path.relative_to(ROOT).with_suffix(""): path for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    }
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in files.items()}


@cache
def imports_of(module: str) -> tuple[Import, ...]:
    return tuple(_imports(ast.parse(modules()[module].read_text(), module), is_lazy=False))


def _imports(node: ast.AST, is_lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            for name in child.names:
                yield Import(name.name, child.lineno, is_lazy)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            assert child.module is not None
            for name in child.names:
                full = f"{child.module}.{name.name}"
                yield Import(full if full in modules() else child.module, child.lineno, is_lazy)
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, is_lazy or is_function)


def matches(module: str, patterns: list[str]) -> bool:
    """ "a.*" stands for a and everything in it."""
    return any(fnmatchcase(module, pattern) or fnmatchcase(f"{module}.", pattern) for pattern in patterns)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_follow_the_arrows(package: str) -> None:
    against = [
        f"{module}:{found.line} imports {found.module}"
        for module in modules()
        if module.split(".")[0] == package
        for found in imports_of(module)
        if found.module.split(".")[0] in PACKAGES and not matches(found.module, ARROWS[package])
    ]
    assert against == []


def test_each_third_party_has_one_home() -> None:
    strays = [
        f"{module}:{found.line} imports {found.module}: only {', '.join(HOMES[found.module.split('.')[0]])} may"
        for module in modules()
        for found in imports_of(module)
        if not matches(module, HOMES.get(found.module.split(".")[0], ["*"]))
    ]
    assert strays == []


def test_importing_the_server_or_the_client_reaches_nothing_heavy() -> None:
    """Follows every import that is run with its file. A path that reaches torch is told step by step."""
    path = {module: module for module in modules() if module.split(".")[0] == "server" or module == "engine.client"}
    queue = list(path)
    heavy = []
    for module in queue:
        for found in imports_of(module):
            if found.is_lazy:
                continue
            if found.module.split(".")[0] in HEAVY:
                heavy.append(f"{path[module]} -> {found.module}")
            if found.module in modules() and found.module not in path:
                path[found.module] = f"{path[module]} -> {found.module}"
                queue.append(found.module)
    assert heavy == []


def test_nothing_is_deserialised_that_could_run() -> None:
    found = [
        f"{module}:{entry.line} imports {entry.module}"
        for module in modules()
        for entry in imports_of(module)
        if entry.module.split(".")[0] in DESERIALISERS
    ]
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(), module)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("eval", "exec", "torch.load", "yaml.load"):
                found.append(f"{module}:{node.lineno} calls {ast.unparse(node.func)}")
            if isinstance(node, ast.Attribute) and node.attr in ("recv_pyobj", "send_pyobj"):
                found.append(f"{module}:{node.lineno} names {node.attr}")
    assert found == []


def test_the_packages_are_this_projects_own() -> None:
    """Their names are plain: another `server` or `cache` on the path must not stand in front."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        assert Path(spec.origin).parent == ROOT / package


SERVE_ONE_REQUEST = """
import json, sys
from starlette.testclient import TestClient
from server.app import create_app
from server.settings import Settings
from support.scripted import scripted_client

app = create_app(scripted_client(), Settings(model="scripted"))
statuses = {}
with TestClient(app) as client:
    while client.get("/ready").status_code != 200:
        pass
    statuses["models"] = client.get("/v1/models").status_code
    statuses["metrics"] = client.get("/metrics").status_code
    body = {"model": "scripted", "prompt": [5, 6], "max_tokens": 4}
    statuses["completions"] = client.post("/v1/completions", json=body).status_code
print(json.dumps({"statuses": statuses, "heavy": [name for name in HEAVY if name in sys.modules]}))
"""


def test_a_server_that_has_served_a_request_has_not_imported_torch() -> None:
    search = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    served = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"HEAVY = {HEAVY}\n{SERVE_ONE_REQUEST}"],
        env=os.environ | {"PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert served.returncode == 0, served.stderr
    outcome = json.loads(served.stdout.splitlines()[-1])
    assert outcome["heavy"] == []
    assert outcome["statuses"] == {"models": 200, "metrics": 200, "completions": 200}


GENERATE_ON_A_CPU = """
import sys, json
sys.modules["triton"] = None  # an import of it fails, as where it is not installed
from pathlib import Path
from engine.build import build_engine
from engine.config import EngineConfig
from engine.types import GenerateRequest
from static_graphs.shapes import SHAPES

shape = {**SHAPES["0.6b"], "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 100}
Path(sys.argv[1], "config.json").write_text(json.dumps(shape))
config = EngineConfig(sys.argv[1], device="cpu", load_format="dummy", max_model_len=64, kv_cells=64)
loop, _ = build_engine(config, lambda *_: None)
loop.submit(GenerateRequest("a", (1, 2, 3), max_new_tokens=4))
told = []
while loop.has_work():
    told += [token for update in loop.step() for token in update.token_ids]
print(len(told))
"""


def test_an_engine_on_a_cpu_needs_no_triton(tmp_path: Path) -> None:
    """torch brings it where it has CUDA, and nothing else does: not on a laptop, not in the CPU image."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GENERATE_ON_A_CPU, str(tmp_path)],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split()[-1] == "4"
