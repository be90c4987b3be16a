"""Known faults of what is installed beside this Python: `python scripts/audit.py PIP_AUDIT [OPTIONS OF PIP-AUDIT]`.

Ends with 0 only where every package was looked up and nothing is known of any; with 1 where a fault is known; with 2
where something could not be looked up, for a fault of that would not be found either. Builds that no index has (a local
version, such as 2.13.0+cpu) and cellserve itself are listed and count for neither.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import site
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


def verdict(report: Mapping[str, Any], versions: Mapping[str, str]) -> tuple[int, list[str]]:
    """-> exit code, lines. report: pip-audit's JSON. versions: of what is installed, by name."""
    faults: list[str] = []
    unknown: list[str] = []
    ours: list[str] = []
    for package in report["dependencies"]:
        name = package["name"]
        for fault in package.get("vulns", ()):
            fixed = ", ".join(fault.get("fix_versions", ())) or "none yet"
            faults.append(f"{name} {package['version']}: {fault['id']}, fixed in {fixed}")
        if "skip_reason" in package:
            is_ours = name == "cellserve" or "+" in versions.get(_normal(name), "")
            (ours if is_ours else unknown).append(name)
    looked_up = len(report["dependencies"]) - len(unknown) - len(ours)
    lines = [f"{looked_up} of {len(report['dependencies'])} packages were looked up", *faults]
    if ours:
        lines.append(f"in no index: {', '.join(ours)}")
    if unknown:
        lines.append(f"NOT LOOKED UP (is https://pypi.org/pypi/NAME/VERSION/json within reach?): {', '.join(unknown)}")
    return (1 if faults else 2 if unknown else 0), lines


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(argv: list[str]) -> int:
    command = [*argv, "--progress-spinner", "off", "--format", "json"]
    for folder in site.getsitepackages():
        command += ["--path", folder]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if not ran.stdout:
        print("pip-audit told nothing: see above", file=sys.stderr)
        return 2
    versions = {_normal(each.metadata["Name"]): each.version for each in importlib.metadata.distributions()}
    code, lines = verdict(json.loads(ran.stdout), versions)
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
