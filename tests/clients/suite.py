"""Another server's own tests, asked of ours. Their code is read from where the caller has it, and never kept here.

    python suite.py vllm|llama_cpp SOURCE URL FOLDER [pytest's options]

SOURCE: the unpacked source package; URL: the server, which runs; FOLDER: what it serves. `NAME_suite.toml` says which
files are taken, what of stand_ins/ is put in the place of modules that start servers or download, and which tests are
left out and which fail, each with its reason. Ends with 1 when a test does otherwise than listed, or when less than
nine in ten of the applicable pass. Needs pytest and what the tests import.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
LEAST = 0.9


def outcomes(name: str, source: Path, url: str, folder: str, options: list[str]) -> dict[str, str]:
    """Test id -> passed, failed or skipped, of all that were collected."""
    suite = tomllib.loads((HERE / f"{name}_suite.toml").read_text())
    with tempfile.TemporaryDirectory() as scratch:
        for pattern in suite["files"]:
            found = sorted((source / suite["root"]).glob(pattern))
            assert found, f"{pattern} is not in {source / suite['root']}"
            for path in found:
                place = Path(scratch, suite["into"], path.relative_to(source / suite["root"]))
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, place)
        for place, stand_in in suite["stand_ins"].items():
            Path(scratch, place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(HERE / "stand_ins" / stand_in, Path(scratch, place))
        report = Path(scratch, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "--timeout", "120"]
        command += ["-o", "junit_family=xunit1", f"--junitxml={report}", "--tb=short", *suite["tests"], *options]
        port = url.rpartition(":")[2]
        subprocess.run(
            command,
            cwd=scratch,
            env=os.environ
            | {"SUT_URL": url, "SUT_FOLDER": folder, "PYTHONPATH": scratch, "HF_HUB_OFFLINE": "1"}
            | {"DEBUG_EXTERNAL": "1", "PORT": port},
        )
        told = {}
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
            outcome = "skipped" if kinds == {"skipped"} else "failed" if kinds else "passed"
            told[f"{Path(case.get('file', '')).name}::{case.get('name')}"] = outcome
        return told


def listed(suite: dict, kind: str, test: str) -> bool:
    return any(fnmatchcase(test, pattern.replace("[", "[[]")) for entry in suite[kind] for pattern in entry["tests"])


def main() -> int:
    name, source, url, folder, *options = sys.argv[1:]
    suite = tomllib.loads((HERE / f"{name}_suite.toml").read_text())
    told = outcomes(name, Path(source), url, folder, options)
    applicable = {test: outcome for test, outcome in told.items() if not listed(suite, "left_out", test)}
    passed = {test for test, outcome in applicable.items() if outcome == "passed"}
    surprises = [
        f"{outcome}: {test}"
        for test, outcome in applicable.items()
        if outcome == "skipped" or listed(suite, "fails", test) != (outcome == "failed")
    ]
    for line in surprises:
        print("otherwise than listed,", line)
    rate = len(passed) / len(applicable)
    print(f"{name}: {len(passed)} of {len(applicable)} applicable tests pass ({rate:.0%}); {len(told)} were collected")
    return int(bool(surprises) or rate < LEAST)


if __name__ == "__main__":
    sys.exit(main())
