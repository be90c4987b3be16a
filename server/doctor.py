"""`cellserve doctor`: can this machine serve that model with these options? Looks, loads nothing, changes nothing.

Each check is a function that returns what it found; none raises. torch is imported by the one that asks about it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console
from rich.table import Table

from engine.config import DEFAULT_MODEL
from engine.errors import ConfigError
from server import run
from server.settings import Settings

Verdict = Literal["ok", "note", "fault"]

_GIB = 1 << 30
_LEAST_MEMORY_GIB = 2.0
_LEAST_DISK_GIB = 5.0
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_STYLES: dict[Verdict, str] = {"ok": "green", "note": "yellow", "fault": "bold red"}


@dataclass(frozen=True)
class Finding:
    """note: serving works, perhaps not as expected. fault: it will not start."""

    subject: str
    verdict: Verdict
    text: str


def examine(settings: Settings) -> int:
    """Print a table; exit code 0 when nothing is in the way, else 1."""
    findings = list(find(settings))
    table = Table("", "", "", box=None, show_header=False)
    for finding in findings:
        table.add_row(finding.subject, f"[{_STYLES[finding.verdict]}]{finding.verdict}", finding.text)
    Console(width=None if os.isatty(1) else 160).print(table)
    return run.EXIT_MODEL if any(finding.verdict == "fault" for finding in findings) else run.EXIT_OK


def find(settings: Settings) -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield driver()
    yield from torch_and_gpus(settings.device)
    weights_bytes = 0
    for finding, size_bytes in model(settings.model):
        weights_bytes += size_bytes
        yield finding
    yield memory(weights_bytes)
    yield disk()
    yield address(settings)


def driver() -> Finding:
    try:
        version = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", _DRIVER_FILE.read_text())
    except OSError:
        return Finding("driver", "note", "no NVIDIA driver is loaded")
    return Finding("driver", "ok", f"NVIDIA {version[1] if version else 'of an unknown version'}")


def torch_and_gpus(device: str) -> Iterator[Finding]:
    try:
        import torch
    except Exception as error:  # a broken installation raises what it likes
        yield Finding("torch", "fault", f"cannot be imported: {type(error).__name__}: {error}")
        return
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    yield Finding("torch", "ok", f"{torch.__version__}, {built}")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield _gpu(torch.cuda.get_device_name(index), *torch.cuda.mem_get_info(index), index)
        return
    wants_one = device.startswith("cuda")
    reason = "this torch is built without CUDA" if not torch.version.cuda else "torch sees none"
    if wants_one:
        yield Finding("GPU", "fault", f"--device {device} asks for one, but {reason}")
    elif _DRIVER_FILE.exists():
        yield Finding("GPU", "note", f"there is a driver, but {reason}: the model runs on the CPU")
    else:
        yield Finding("GPU", "note", "none: the model runs on the CPU")


def _gpu(name: str, free_bytes: int, total_bytes: int, index: int) -> Finding:
    text = f"{name}, {free_bytes / _GIB:.1f} of {total_bytes / _GIB:.1f} GiB free"
    if free_bytes < total_bytes / 2:
        return Finding(f"GPU {index}", "note", f"{text}: something else uses it")
    return Finding(f"GPU {index}", "ok", text)


def model(name: str) -> Iterator[tuple[Finding, int]]:
    """What lies at `name`, with the bytes of its weights."""
    if name == DEFAULT_MODEL:
        yield Finding("model", "ok", "the default one"), 0
        return
    path = Path(name).expanduser()
    if path.is_file():
        is_gguf = path.suffix == ".gguf"
        text = f"{path}, {path.stat().st_size / _GIB:.2f} GiB" if is_gguf else f"{path} is no .gguf file"
        yield Finding("model", "ok" if is_gguf else "fault", text), path.stat().st_size
    elif path.is_dir():
        yield from _folder(path)
    elif name.startswith(("/", "./", "../", "~")):
        yield Finding("model", "fault", f"there is nothing at {name}"), 0
    else:
        offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
        text = "a hub id; HF_HUB_OFFLINE is set, so it must be in the cache" if offline else "a hub id, fetched at need"
        yield Finding("model", "note" if offline else "ok", f"{name}: {text}"), 0


def _folder(path: Path) -> Iterator[tuple[Finding, int]]:
    if any(path.glob("*.gguf")) and not (path / "config.json").exists():
        yield Finding("model", "ok", f"{path}, a GGUF"), sum(file.stat().st_size for file in path.glob("*.gguf"))
        return
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        index = path / "model.safetensors.index.json"
        parts = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values() if index.exists() else ()
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        yield Finding("model", "fault", f"{path}: its description cannot be read: {error}"), 0
        return
    missing = sorted(part for part in set(parts) if not (path / part).exists())
    files = list(path.glob("*.safetensors"))
    size_bytes = sum(file.stat().st_size for file in files)
    kind = config.get("model_type", "of no named type") if isinstance(config, dict) else "of no named type"
    if missing:
        yield Finding("model", "fault", f"{path}: {len(missing)} weight files are missing, {missing[0]} first"), 0
    elif not files:
        yield Finding("model", "note", f"{path}, {kind}, without weights: only --load-format dummy serves it"), 0
    else:
        yield Finding("model", "ok", f"{path}, {kind}, {size_bytes / _GIB:.2f} GiB of weights"), size_bytes
    if any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        yield Finding("tokenizer", "ok", "there"), 0
    else:
        yield Finding("tokenizer", "note", "none: prompts and answers are ids"), 0


def memory(weights_bytes: int) -> Finding:
    available = psutil.virtual_memory().available
    text = f"{available / _GIB:.1f} GiB available"
    if available < weights_bytes:
        return Finding("memory", "note", f"{text}, less than the weights: on a CPU the model will not fit")
    return Finding("memory", "ok" if available >= _LEAST_MEMORY_GIB * _GIB else "note", text)


def disk() -> Finding:
    cache = Path(os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    text = f"{free / _GIB:.0f} GiB free for the cache in {cache}"
    if not os.access(place, os.W_OK):
        return Finding("disk", "note", f"{cache} cannot be written: models are not kept")
    return Finding("disk", "ok" if free >= _LEAST_DISK_GIB * _GIB else "note", text)


def address(settings: Settings) -> Finding:
    try:
        with run.bind(settings.host, settings.port) as listener:
            return Finding("port", "ok", f"{run.url_of(settings.model_copy(update={'uds': None}), listener)} is free")
    except ConfigError as error:
        return Finding("port", "fault", str(error))
