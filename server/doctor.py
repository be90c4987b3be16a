"""`cellserve doctor`: can this machine serve that model with these options? Looks, loads nothing, changes nothing.

Each check is a function that returns what it found; none raises. torch is imported by the one that asks about it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from engine.config import DEFAULT_MODEL, FP8_CAPABILITY
from engine.errors import ConfigError
from server import run
from server.settings import Settings

Verdict = Literal["ok", "note", "fault"]

_GIB = 1 << 30
_LEAST_MEMORY_GIB = 2.0
_LEAST_DISK_GIB = 5.0
_LEAST_FILES = 4096
"""Open files: each connection is one."""
_ASK_S = 2.0
_TABLE_S = 60.0
"""It imports torch and triton."""
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
    yield packages()
    yield driver()
    yield from torch_and_gpus(settings.device)
    yield from tilings(settings)
    weights_bytes = 0
    for finding, size_bytes in model(settings.model):
        weights_bytes += size_bytes
        yield finding
    yield from room_on_gpu(settings, weights_bytes)
    yield from kv_dtype(settings.kv_cache_dtype, settings.device)
    yield from invariance(settings.batch_invariant, settings.device)
    yield memory(weights_bytes, settings.kv_host_gib or 0.0)
    yield disk()
    yield from tiers(settings)
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield address(settings)


def packages() -> Finding:
    """What a report of a fault must name."""
    return Finding("cellserve", "ok", ", ".join(f"{name} {_version(name)}" for name in ("cellserve", "transformers")))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


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
        if not any(map(shutil.which, ("cc", "gcc", "clang"))):
            yield Finding("compiler", "fault", "no C compiler: Triton cannot build kernels (apt-get install gcc)")
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


def tilings(settings: Settings) -> Iterator[Finding]:
    """Whether products of few rows are cut as measured on this GPU. Nothing to say where the model runs on the CPU."""
    import torch

    if settings.device == "cpu" or settings.enforce_eager or not torch.cuda.is_available():
        return
    device = "cuda" if settings.device == "auto" else settings.device
    command = (sys.executable, "-m", "static_graphs.tiling_table", device)  # of the engine's side: not imported here
    try:
        asked = subprocess.run(
            command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=_TABLE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding("products", "note", f"whether they were measured cannot be told: {error}")
        return
    yield tuned(asked.returncode, asked.stdout if asked.stdout.strip() else asked.stderr, settings.model)


def tuned(exit_code: int, said: str, model: str) -> Finding:
    """From what static_graphs.tiling_table said last."""
    text = (said.strip().splitlines() or ["nothing was said"])[-1]
    if exit_code == 0:
        return Finding("products", "ok", text)
    name = "" if model == DEFAULT_MODEL else f" {shlex.quote(model)}"
    return Finding("products", "note", f"{text}. To measure: python -m static_graphs.tune{name}")


def kv_dtype(name: str, device: str) -> Iterator[Finding]:
    """Nothing to say where K/V is stored as the weights are."""
    import torch

    if name == "auto":
        return
    if device == "cpu" or not torch.cuda.is_available():
        yield Finding("K/V dtype", "note", f"{name} is shorter on a CPU, and slower: it is converted at every read")
        return
    major, minor = torch.cuda.get_device_capability(None if device in ("auto", "cuda") else device)
    text = f"{name} needs compute capability {'.'.join(map(str, FP8_CAPABILITY))}, this GPU has {major}.{minor}"
    yield Finding("K/V dtype", "ok" if (major, minor) >= FP8_CAPABILITY else "fault", text)


def invariance(batch_invariant: bool, device: str) -> Iterator[Finding]:
    """Nothing to say where it is not asked for. Whether a model can be is proven when it starts."""
    import torch

    if not batch_invariant:
        return
    if device == "cpu" or not torch.cuda.is_available():
        yield Finding("batch invariance", "fault", "--batch-invariant needs a CUDA device: leave it out here")
    else:
        yield Finding("batch invariance", "ok", "proven when the model starts")


def room_on_gpu(settings: Settings, weights_bytes: int) -> Iterator[Finding]:
    """Nothing to say where the model runs on the CPU, or nobody knows how large it is."""
    import torch

    if settings.device == "cpu" or not weights_bytes or not torch.cuda.is_available():
        return
    device = torch.device("cuda" if settings.device == "auto" else settings.device)
    yield room(weights_bytes, *torch.cuda.mem_get_info(device), settings.gpu_memory_utilization)


def room(weights_bytes: int, free_bytes: int, total_bytes: int, utilization: float) -> Finding:
    """Whether the weights leave memory for K/V."""
    share = utilization * total_bytes
    left = min(share, free_bytes) - weights_bytes
    text = f"{weights_bytes / _GIB:.1f} GiB of weights in {min(share, free_bytes) / _GIB:.1f} GiB"
    if left > 0:
        return Finding("K/V", "ok" if left > 0.1 * share else "note", f"{text}: {left / _GIB:.1f} GiB are left for K/V")
    if free_bytes < share:
        return Finding("K/V", "fault", f"{text}: end what else uses the GPU, or take a smaller model")
    return Finding("K/V", "fault", f"{text}: raise --gpu-memory-utilization ({utilization:g}) or take a smaller model")


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


def memory(weights_bytes: int, kv_host_gib: float = 0.0) -> Finding:
    available = psutil.virtual_memory().available
    text = f"{available / _GIB:.1f} GiB available"
    if available < kv_host_gib * _GIB:
        return Finding("memory", "fault", f"{text}, but --kv-host-gib asks for {kv_host_gib:g}")
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


def tiers(settings: Settings) -> Iterator[Finding]:
    """What was asked for below the pool."""
    if settings.kv_disk is not None:
        yield _kv_disk(Path(settings.kv_disk), settings.kv_disk_gib or 0.0)
    if settings.kv_redis is not None:
        yield _kv_redis(settings.kv_redis.get_secret_value())


def _kv_disk(folder: Path, asked_gib: float) -> Finding:
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        return Finding("kv-disk", "fault", f"{place} cannot be written: --kv-disk {folder} needs a folder of its own")
    kept_bytes = sum(file.stat().st_size for file in folder.glob("**/*") if file.is_file()) if folder.is_dir() else 0
    free_gib = (shutil.disk_usage(place).free + kept_bytes) / _GIB
    text = f"{free_gib:.1f} GiB for --kv-disk {folder}"
    if free_gib < asked_gib:
        return Finding("kv-disk", "fault", f"{text}, but --kv-disk-gib is {asked_gib:g}")
    return Finding("kv-disk", "ok", f"{text}, {kept_bytes / _GIB:.1f} of it filled by an earlier server")


def _kv_redis(url: str) -> Finding:
    """Whether something answers there as Redis does. The URL may hold a password, and is not repeated."""
    if importlib.util.find_spec("redis") is None:
        return Finding("kv-redis", "fault", "--kv-redis needs the redis package: pip install redis")
    address = urlsplit(url)
    place = address.path if address.scheme == "unix" else f"{address.hostname}:{address.port or 6379}"
    try:
        if address.scheme == "unix":
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(_ASK_S)
            connection.connect(address.path)
        else:
            connection = socket.create_connection((address.hostname or "localhost", address.port or 6379), _ASK_S)
        with connection:
            if address.scheme == "rediss":
                return Finding("kv-redis", "ok", f"{place} takes connections")
            connection.sendall(b"PING\r\n")
            answer = connection.recv(64)
    except OSError as error:
        return Finding("kv-redis", "note", f"{place} does not answer ({error.strerror or error}): served without it")
    if answer.startswith((b"+PONG", b"-NOAUTH")):
        return Finding("kv-redis", "ok", f"{place} answers")
    return Finding("kv-redis", "note", f"{place} answers, but not as Redis does: served without it")


def open_files(limit: int) -> Finding:
    if limit != resource.RLIM_INFINITY and limit < _LEAST_FILES:
        return Finding("files", "note", f"{limit} may be open, one a connection: raise it (ulimit -n {_LEAST_FILES})")
    return Finding(
        "files", "ok", "any number may be open" if limit == resource.RLIM_INFINITY else f"{limit} may be open"
    )


def address(settings: Settings) -> Finding:
    if settings.uds is not None:
        return _unix_address(settings.uds)
    try:
        with run.bind(settings.host, settings.port) as listener:
            return Finding("port", "ok", f"{run.url_of(settings, listener)} is free")
    except ConfigError as error:
        return Finding("port", "fault", f"{error}{_who_answers(settings)}")


def _unix_address(path: Path) -> Finding:
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        return Finding("socket", "fault", f"--uds {path}: its folder cannot be written")
    if path.is_socket() and run.is_answered(path):
        return Finding("socket", "fault", f"--uds {path}: a server listens there")
    if path.exists() and not path.is_socket():
        return Finding("socket", "fault", f"--uds {path}: something that is no socket lies there")
    return Finding("socket", "ok", f"{path} is free")


def _who_answers(settings: Settings) -> str:
    """Of a server of ours that has the port: what it says of itself."""
    scheme = "http" if settings.ssl_certfile is None else "https"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)
    try:
        answer = httpx.get(f"{scheme}://{host}:{settings.port}/ready", timeout=_ASK_S, verify=False, trust_env=False)
        told: Any = answer.json()
        phase = told["phase"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return "; what has it does not answer as cellserve does"
    counted = f" ({told['done']} of {told['of']})" if isinstance(told.get("of"), int) else ""
    return f"; a cellserve has it and says: {str(phase)[:80]}{counted}"
