"""One figure as benchmarks.jsonl collects them: what, how much, of which machine and which state of this tree."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

Figure = dict[str, str | float | None]


def figure(
    bench: str,
    case: str,
    value: float,
    unit: str,
    device: torch.device,
    *,
    floor: float | None = None,
    peer: str | None = None,
    peer_value: float | None = None,
) -> Figure:
    """floor: the best that this machine could do, in the same unit. peer: what else was measured beside it."""
    return {
        "bench": bench,
        "case": case,
        "value": rounded(value),
        "unit": unit,
        "floor": None if floor is None else rounded(floor),
        "peer": peer,
        "peer_value": None if peer_value is None else rounded(peer_value),
        "machine": machine(device),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def rounded(value: float) -> float:
    """Four digits: more would be noise."""
    return float(f"{value:.4g}")


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), cpu)
    except OSError:
        pass  # not Linux: the platform's own word stands
    return f"{cpu}, {torch.get_num_threads()} torch threads"


def commit() -> str | None:
    """Of this source tree, with a + where files differ from it; None outside a git tree."""
    described = subprocess.run(
        ("git", "describe", "--always", "--dirty=+", "--exclude=*"),
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or None
