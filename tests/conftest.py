"""What holds for every test: one thread a process, no network, which tests are selected, which may skip.

- `full` tests are left out unless --full is given (make test-full).
- `gpu` tests, and all under tests/gpu, skip with a reason where there is no CUDA device.
- With CI=true a skip that tests/allowed_skips.txt does not name fails the run: a test that nobody runs is found out.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

# Before torch is imported anywhere, here or in a process that a test starts. Workers share the cores: more threads
# than one each would only fight.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ALLOWED_SKIPS = Path(__file__).with_name("allowed_skips.txt")
GPU_TESTS = Path(__file__).with_name("gpu")
NO_GPU = "needs a CUDA device: not run on this machine"

_skips: dict[str, str] = {}  # node id -> reason; in the process that reports


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the long forms too (tests marked full)")


def pytest_configure(config: pytest.Config) -> None:
    if not _has_cuda():
        # Before triton is imported anywhere (transformers does): its own library is interpreted or compiled as a whole.
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
    needs_gpu = [item for item in items if item.get_closest_marker("gpu") or GPU_TESTS in item.path.parents]
    if needs_gpu and not _has_cuda():
        for item in needs_gpu:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _note_skip(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note_skip(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    unlisted = _unlisted_skips(session.config)
    if unlisted and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    unlisted = _unlisted_skips(config)
    if unlisted:
        terminalreporter.section(f"skips that {ALLOWED_SKIPS.name} does not name", red=True)
        for node_id, reason in unlisted.items():
            terminalreporter.line(f"{node_id} | {reason}")


def _has_cuda() -> bool:
    """Asks torch only where a driver's device file is there: the import takes seconds."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return False
    import torch

    return torch.cuda.is_available()


def _note_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    # An expected failure is reported as skipped too, but it ran.
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _skips[report.nodeid] = reason.removeprefix("Skipped: ")


def _unlisted_skips(config: pytest.Config) -> dict[str, str]:
    """Empty outside CI, and in xdist's workers, whose reports the controller sees."""
    if os.environ.get("CI") != "true" or hasattr(config, "workerinput"):
        return {}
    lines = [line.strip() for line in ALLOWED_SKIPS.read_text().splitlines()]
    allowed = [line.partition(" | ")[::2] for line in lines if line and not line.startswith("#")]
    return {
        node_id: reason
        for node_id, reason in _skips.items()
        if not any(fnmatchcase(node_id, where) and fnmatchcase(reason, why) for where, why in allowed)
    }
