"""What no line of this program does: run what it reads, or trust what it should not (S10, S11, S16, S19)."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from scripts import audit

ROOT = Path(__file__).parents[1]
PACKAGES = ("server", "engine", "cache", "static_graphs")

RUNS_WHAT_IT_READS = {
    *("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle", "copyreg"),
    *("code", "codeop", "imp", "xmlrpc", "pty", "telnetlib", "ftplib"),
}
CALLS = {
    # Call -> the modules that may, and why.
    **dict.fromkeys(("eval", "exec", "compile", "__import__", "breakpoint"), ()),
    "input": ("server.terminal_chat",),
    **dict.fromkeys(("os.system", "os.popen", "os.execv", "os.execvp", "os.spawnv", "pty.spawn"), ()),
    **dict.fromkeys(("torch.load", "np.load", "numpy.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"), ()),
    **dict.fromkeys(("tempfile.mktemp", "os.tempnam", "ssl._create_unverified_context"), ()),
    **dict.fromkeys(("hashlib.md5", "hashlib.sha1"), ()),
    **dict.fromkeys(("subprocess.call", "subprocess.getoutput", "subprocess.getstatusoutput"), ()),
}
METHODS = ("recv_pyobj", "send_pyobj", "set_unsafe", "allow_pickle")
TALKS = {"httpx", "urllib.request", "http.client", "requests", "aiohttp", "ftplib", "smtplib"}
CLIENTS = {
    "server.batch",
    "server.doctor",
    "server.bench_client",
    "server.bench",
    "server.terminal_chat",
    "server.kv_command",
}
"""Commands that talk with a server that a person named. The serving process imports none of what they call with."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts), ast.parse(path.read_text(), str(path))


def imported(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno


def test_nothing_is_imported_that_runs_what_it_reads() -> None:
    """S10."""
    assert not [
        f"{module}:{line} imports {name}"
        for module, tree in modules()
        for name, line in imported(tree)
        if name.split(".")[0] in RUNS_WHAT_IT_READS
    ]


def test_nothing_is_called_that_runs_what_it_is_given() -> None:
    """S10, S11: nor by a name that is made at run time.

    The doctor asks this machine's own server how it is, whose certificate is for another name.
    """
    found = []
    for module, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in METHODS:
                found.append(f"{module}:{node.lineno} names {node.attr}")
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if called in CALLS and module not in CALLS[called]:
                found.append(f"{module}:{node.lineno} calls {called}")
            if called.endswith("import_module") and not all(isinstance(a, ast.Constant) for a in node.args):
                found.append(f"{module}:{node.lineno} imports a name that is made at run time")
            for keyword in node.keywords:
                value = ast.unparse(keyword.value)
                if (keyword.arg, value) in {
                    *(("shell", "True"), ("trust_remote_code", "True"), ("verify", "False"), ("allow_pickle", "True")),
                    *(("weights_only", "False"), ("use_safetensors", "False"), ("autoescape", "False")),
                }:
                    found.append(f"{module} says {keyword.arg}={value}")
    assert set(found) <= {"server.doctor says verify=False"}


def test_remote_code_is_refused_wherever_a_model_is_read() -> None:
    """S11: each call that reads something of a model says that none of its code is run; a default may change."""
    found = []
    for module, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".from_pretrained", ".from_config")):
                given = {keyword.arg for keyword in node.keywords}
                spread = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg is None]
                if "trust_remote_code" not in given and "_LOCAL" not in spread and not _is_of_our_own(node):
                    found.append(f"{module}:{node.lineno} {ast.unparse(node.func)}")
    assert found == []


def _is_of_our_own(node: ast.Call) -> bool:
    """A model of a configuration that was read already: its class is transformers' own by then."""
    return ast.unparse(node.func).endswith(".from_config")


def test_nothing_that_serves_talks_to_anybody() -> None:
    """S16: a client library that is not there cannot be made to fetch."""
    assert not [
        f"{module}:{line} imports {name}"
        for module, tree in modules()
        for name, line in imported(tree)
        if name in TALKS and module not in CLIENTS
    ]


def test_no_check_of_a_request_is_an_assertion() -> None:
    """`python -O` leaves assertions out. In the files that judge what callers send there are none about it."""
    judging = {
        *("server.guards", "server.bodies", "server.fields", "server.schemas", "server.structured", "server.tools"),
        *("server.admission", "server.key_limits", "server.template_sandbox", "server.settings"),
    }
    assert not [
        f"{module}:{node.lineno}"
        for module, tree in modules()
        if module in judging
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]


# Dependencies.


def declared() -> dict[str, str]:
    """Name -> requirement, of everything that is installed with the server."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {_normal(re.split(r"[\[><=!~; ]", line)[0]): line for line in project["dependencies"]}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


BROUGHT = {
    # Imported, and brought by a dependency that is declared and whose part it is.
    **{"starlette": "fastapi", "h11": "uvicorn", "yaml": "pydantic-settings", "annotated_types": "pydantic"},
    **{"huggingface_hub": "transformers", "safetensors": "transformers", "markupsafe": "jinja2"},
}
OPTIONAL = {"triton", "redis", "ray", "opentelemetry"}
"""Imported where they are there; what needs them says so."""
NAMES = {"zmq": "pyzmq", "cuda": "cuda-bindings", "prometheus_client": "prometheus-client"}
LICENCES = re.compile(r"MIT|BSD|Apache|ISC|PSF|Python Software|MPL|Zlib|0BSD|NVIDIA", re.IGNORECASE)
UNUSED = {"accelerate"}
"""Declared for what transformers does with it."""


def third_parties() -> set[str]:
    names = {name.split(".")[0] for _, tree in modules() for name, _ in imported(tree)}
    return names - set(sys.stdlib_module_names) - set(PACKAGES)


def test_every_import_is_declared_or_part_of_what_is() -> None:
    """S19: nothing is installed by accident, and so nothing is left out of an audit."""
    known = declared()
    assert not {
        name
        for name in third_parties() - OPTIONAL
        if _normal(NAMES.get(name, name)) not in known and BROUGHT.get(name) not in known
    }


def test_everything_that_is_declared_is_used() -> None:
    """S19: each is code that we would have to answer for."""
    used = {_normal(NAMES.get(name, name)) for name in third_parties()}
    assert set(declared()) - used == UNUSED | {"pydantic-settings"} - used


def test_every_dependency_has_a_floor() -> None:
    """S19: an old version with a known fault is not one that we say works."""
    assert not [line for line in declared().values() if not re.search(r">=\d", line)]


@pytest.mark.parametrize("name", sorted(declared()))
def test_the_licence_of_every_dependency_lets_us_serve_with_it(name: str) -> None:
    """S19."""
    try:
        told = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        assert "; " in declared()[name], f"{name} is not installed, and no marker says that it need not be"
        return
    classifiers = [line for line in told.get_all("Classifier") or [] if line.startswith("License ::")]
    licence = " ".join([told.get("License-Expression") or "", (told.get("License") or "")[:200], *classifiers])
    assert LICENCES.search(licence), licence
    assert not re.search(r"(?<!L)GPL|SSPL|BUSL|Commons Clause", licence), licence


def audited(**packages: dict[str, Any]) -> tuple[int, str]:
    report = {"dependencies": [{"name": name, **told} for name, told in packages.items()]}
    code, lines = audit.verdict(report, {"torch": "2.13.0+cpu", "idna": "3.10"})
    return code, "\n".join(lines)


def test_an_audit_that_could_not_look_up_a_package_fails_and_names_it() -> None:
    """S19: nothing known of what nobody looked up is no good news."""
    clean: dict[str, Any] = {"version": "3.10", "vulns": []}
    skipped = {"skip_reason": "not found on PyPI"}
    assert audited(idna=clean) == (0, "1 of 1 packages were looked up")
    code, told = audited(idna=skipped, h11=clean)
    assert code == 2
    assert "1 of 2 packages were looked up" in told
    assert told.splitlines()[-1].endswith(": idna")
    assert audited(idna=clean, torch=skipped, cellserve=skipped)[0] == 0, "what no index has"


def test_an_audit_names_each_known_fault_and_where_it_is_mended() -> None:
    """S19."""
    fault = {"id": "PYSEC-1", "fix_versions": ["3.11"]}
    code, told = audited(idna={"version": "3.10", "vulns": [fault]}, h11={"skip_reason": "not found"})
    assert code == 1
    assert "idna 3.10: PYSEC-1, fixed in 3.11" in told
