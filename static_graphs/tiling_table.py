"""Measured tilings on disk: one JSON file a GPU in the user's cache folder, true for one torch and one triton.

`python -m static_graphs.tiling_table cuda` says in one line what there is for that device, for `cellserve doctor`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from static_graphs.tilings import RULE, Measured, Tiling, Tilings, bucket, shared_bytes

logger = logging.getLogger(__name__)

COMMAND = "python -m static_graphs.tune"
_BLOCK_LIMIT = 1 << 14
"""Numbers of a block of weights, which one row's program holds in registers."""
SHARED_LIMIT = 227 << 10
"""Bytes of shared memory that a program may have on any GPU so far."""


class UnusableTable(Exception):
    """A table that may not be used, and why."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What measured times are true for."""

    gpu: str
    capability: str
    torch_version: str
    triton_version: str

    @staticmethod
    def of(device: torch.device) -> Stamp:
        """Of a CUDA device."""
        major, minor = torch.cuda.get_device_capability(device)
        return Stamp(torch.cuda.get_device_name(device), f"{major}.{minor}", str(torch.__version__), _triton_version())

    @property
    def path(self) -> Path:
        """One file a kind of GPU."""
        name = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")
        return _cache_folder() / "cellserve" / f"tilings-{name}-sm{self.capability.replace('.', '')}.json"


def _triton_version() -> str:
    for name in ("triton", "pytorch-triton"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def _cache_folder() -> Path:
    """As the XDG specification has it: a relative path counts as none."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return folder if folder.is_absolute() else Path.home() / ".cache"


def tilings_for(device: torch.device, dtype: torch.dtype) -> Tilings:
    """What was measured on this device for weights of 16 bits, else the rule. One log line says which and why."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return RULE
    stamp = Stamp.of(device)
    try:
        measured = read_table(stamp)
    except UnusableTable as error:
        logger.warning("products of few rows are cut by rule: %s. To measure again: %s", error, COMMAND)
        return RULE
    if not measured:
        logger.info("products of few rows are cut by rule; to measure what is best on this GPU: %s", COMMAND)
        return RULE
    logger.info("products of few rows are cut as measured: %d choices of %s", len(measured), stamp.path)
    return Tilings(measured)


def read_table(stamp: Stamp) -> dict[Measured, Tiling | None]:
    """Empty where no file is. Raises UnusableTable where it cannot be read or holds for something else."""
    path = stamp.path
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UnusableTable(f"{path} cannot be read: {error}") from error
    if not isinstance(table, dict) or not isinstance(table.get("choices"), list):
        raise UnusableTable(f"{path} is damaged: it is no table of tilings")
    for name, own in asdict(stamp).items():
        if table.get(name) != own:
            raise UnusableTable(f"{path} was measured with {name} {table.get(name)!r}, here it is {own!r}")
    try:
        return dict(map(_choice, table["choices"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UnusableTable(f"{path} is damaged: {type(error).__name__} {error} in a choice") from error


def write_table(stamp: Stamp, choices: Mapping[Measured, Tiling | None]) -> Path:
    """In the place of the file that is there: a reader sees all of it or the old one. Raises OSError."""
    path = stamp.path
    rows = [
        key._asdict() | {"tiling": None if tiling is None else asdict(tiling)}
        for key, tiling in sorted(choices.items(), key=lambda choice: choice[0])
    ]
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    head = json.dumps(asdict(stamp), indent=2).removesuffix("\n}")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f'{head},\n  "choices": [\n{lines}\n  ]\n}}\n')
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path


def main(device: str) -> int:
    """Print one line; 0: there is a table for this GPU, torch and triton, 1: there is none."""
    stamp = Stamp.of(torch.device(device))
    try:
        measured = read_table(stamp)
    except UnusableTable as error:
        print(f"cut by rule: {error}")
        return 1
    if not measured:
        print(f"cut by rule: nothing was measured on this {stamp.gpu}")
        return 1
    shapes = {key[:3] for key in measured}
    print(f"cut as measured on this {stamp.gpu}: {len(shapes)} shapes, {len(measured)} choices in {stamp.path}")
    return 0


def _choice(row: dict[str, Any]) -> tuple[Measured, Tiling | None]:
    """Raises KeyError, TypeError or ValueError for what no kernel could be told."""
    key = Measured(*(row[name] for name in Measured._fields))
    if not all(type(size) is int and size > 0 for size in (key.width, key.depth, key.rows)):
        raise ValueError(f"a size of {key}")
    if type(key.gated) is not bool or key.rows != bucket(key.rows):
        raise ValueError(f"{key}")
    if row["tiling"] is None:
        return key, None
    tiling = Tiling(**row["tiling"])
    sizes = (tiling.block_n, tiling.block_k, tiling.parts, tiling.warps, tiling.stages, tiling.fetch)
    if not all(type(size) is int and size > 0 for size in sizes) or type(tiling.is_dot) is not bool:
        raise ValueError(f"{tiling}")
    if any(size & (size - 1) for size in (tiling.block_n, tiling.block_k, tiling.warps, tiling.fetch)):
        raise ValueError(f"{tiling}: not powers of two")
    shared = shared_bytes(tiling, key.rows, gated=key.gated)
    if shared > SHARED_LIMIT or tiling.block_n * tiling.block_k > _BLOCK_LIMIT:
        raise ValueError(f"{tiling}: more than a program holds")
    if tiling.warps > 16 or tiling.fetch < 64:
        raise ValueError(f"{tiling}: out of range")
    if tiling.is_dot and min(tiling.block_n, tiling.block_k) < 16:
        raise ValueError(f"{tiling}: less than a matrix instruction takes")
    if not tiling.is_dot and key.rows > 1:
        raise ValueError(f"{tiling}: one row's, for {key.rows}")
    if tiling.parts > 1 and (key.gated or tiling.block_k * (tiling.parts - 1) >= key.depth):
        raise ValueError(f"{tiling}: parts for {key}")
    return key, tiling


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
