"""What a person runs first works without a container engine: Make's and Docker's files name only things that exist."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
INSTALL = ROOT / "scripts" / "install.sh"


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=60)


def test_shell_scripts_parse_and_are_executable() -> None:
    for script in (INSTALL, ROOT / ".ci" / "run"):
        assert os.access(script, os.X_OK), f"{script} is not executable"
        checked = run("bash", "-n", script)
        assert checked.returncode == 0, checked.stderr


def test_install_refuses_an_unknown_step_by_name() -> None:
    refused = run(INSTALL, "everything")
    assert refused.returncode == 2
    assert "no step 'everything'" in refused.stderr


def test_make_knows_what_the_readme_and_ci_ask_of_it() -> None:
    planned = run("make", "--dry-run", "install", "serve", "test", "test-full", "lint", "bench")
    assert planned.returncode == 0, planned.stderr


def test_make_serve_passes_on_only_what_it_was_given() -> None:
    bare = run("make", "--dry-run", "serve", HOST="login-host", PORT="1").stdout
    assert "--host" not in bare
    assert "--port" not in bare
    full = run("make", "--dry-run", "serve", "MODEL=/m", "PORT=9", "HOST=0.0.0.0", "ARGS=--seed 1").stdout
    assert "cellserve serve /m --host 0.0.0.0 --port 9 --seed 1" in full


def run_one_skipping_test(tmp_path: Path, reason: str, ci: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "allowed_skips.txt").write_text("test_one.py::* | needs a moon*\n")
    (tmp_path / "test_one.py").write_text(f"import pytest\n\ndef test_one():\n    pytest.skip({reason!r})\n")
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", ".")
    return run(*command, cwd=tmp_path, CI=ci, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")


def test_a_listed_skip_passes_in_ci(tmp_path: Path) -> None:
    assert run_one_skipping_test(tmp_path, "needs a moon, in phase", ci="true").returncode == 0


def test_an_unlisted_skip_fails_ci_and_is_named(tmp_path: Path) -> None:
    failed = run_one_skipping_test(tmp_path, "felt like it", ci="true")
    assert failed.returncode == 1
    assert "test_one.py::test_one | felt like it" in failed.stdout


def test_an_unlisted_skip_passes_outside_ci(tmp_path: Path) -> None:
    assert run_one_skipping_test(tmp_path, "felt like it", ci="").returncode == 0
