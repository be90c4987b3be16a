"""The engine's options, checked where they are declared. Torch-free: the server builds one and sends it.

`check_request` is the one rule of what may be admitted; the client applies it before a byte is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.errors import ConfigError, RequestTooLarge, RequestTooLong
from engine.logs import LogFormat
from engine.types import EngineInfo, GenerateRequest

DEFAULT_MODEL = "default"
"""Given as the model, it stands for the small model that engine/build.py finds."""
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
"""What that model is served as."""

DEFAULT_NUM_SEQS = 256
DEFAULT_CHUNK_TOKENS = 64
DEFAULT_FIXED_WIDTH = 256
"""Rows of every step of a batch-invariant engine: as many decodes, but one, run beside a prompt's token."""

FP8_CAPABILITY = (8, 9)
"""Of the CUDA devices that have FP8, the lowest."""

LoadFormat = Literal["auto", "dummy"]
CacheKind = Literal["cells", "single"]
KvCacheDtype = Literal["auto", "fp8", "fp8_e4m3"]
PoolingChoice = Literal["auto", "last", "mean"]
DefaultsChoice = Literal["auto", "none"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Read by engine/build.py. None means "derive it from the model and the machine"."""

    model: str
    """A local folder, a GGUF file, a hub id, or DEFAULT_MODEL."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: str = "auto"
    """auto, float32, bfloat16 or float16. auto: the checkpoint's on CUDA, float32 on CPU."""
    load_format: LoadFormat = "auto"
    seed: int = 0
    """Of dummy weights. Requests bring their own seed or get fresh randomness."""
    max_model_len: int | None = None
    cache: CacheKind = "cells"
    """cells: many sequences over one pool. single: one sequence, whose window layers store only what they see."""
    max_num_seqs: int | None = None
    """None: 256, 1 with the single cache, one less than its rows where every step is one width."""
    max_num_batched_tokens: int | None = None
    """Tokens of a step while nothing decodes (D10's prefill budget)."""
    max_num_mixed_tokens: int | None = None
    """Tokens of a step in which something decodes. Few keep inter-token latency even while prompts arrive, many end a
    batch sooner; a prompt has as many in one turn. None: the widest captured step; at most max_num_batched_tokens."""
    max_waiting: int = 256
    """Requests beyond max_num_seqs that may queue before a 429."""
    kv_cells: int | None = None
    kv_cache_gib: float | None = None
    kv_cache_dtype: KvCacheDtype = "auto"
    """auto: the model's. fp8, of which fp8_e4m3 is another name: float8_e4m3fn, with the checkpoint's scales."""
    gpu_memory_utilization: float = 0.9
    widths: tuple[int, ...] | None = None
    enforce_eager: bool = False
    batch_invariant: bool = False
    """A request's tokens and logprobs are bit for bit the same whatever runs beside it, and however its prompt was cut.
    On CUDA alone; every step is padded to `fixed_width`."""
    overlap: bool = True
    """On CUDA, launch each step before the ids of the one ahead of it are read (D7). Off: for finding faults."""
    pooling: PoolingChoice = "auto"
    """Of embeddings. auto: as the model's own files say, the last token where they say nothing."""
    generation_config: DefaultsChoice = "auto"
    """Whose sampling values hold where a request names none. auto: those of the model's generation_config.json, then
    the API's; none: the API's alone."""
    prefix_cache: bool = True
    """Sessions begin with what earlier ones have computed. The single cache has nothing to share, and ignores it."""

    kv_host_gib: float | None = None
    """Pinned host memory for prefixes that leave the pool; None: they are forgotten, and there are no tiers below."""
    kv_disk: str | None = None
    """A folder of this server's own, for what may outlive it."""
    kv_disk_gib: float | None = None
    """The most that folder may hold."""
    kv_redis: str | None = field(default=None, repr=False)
    """redis://, rediss:// or unix:// URL, which may hold a password."""
    kv_redis_secret_file: str | None = None
    """File of a secret that what is kept in Redis is signed with."""
    kv_chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    """Tokens that tiers keep together; doubled until they are 1 MiB."""
    kv_full_windows: bool = False
    """Tiers keep and bring up all K/V of layers with a window, not only what the end of a prefix can see of it."""

    log_format: LogFormat = "text"
    """How the engine's process writes its log; one in the server's process writes as that does."""
    test_faults: bool = False
    """Whether it can be told to fail: for tests."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model is empty: give a folder or a hub id")
        for name in ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "max_num_mixed_tokens", "kv_cells"):
            value = getattr(self, name)
            if value is not None:
                _at_least(name, value, 2 if name == "kv_cells" else 1)
        _at_least("max_waiting", self.max_waiting, 0)
        if self.kv_cells is not None and self.kv_cache_gib is not None:
            raise ConfigError("kv_cells and kv_cache_gib are two names for one size: give one of them")
        if self.kv_cache_gib is not None and self.kv_cache_gib <= 0:
            raise ConfigError(f"kv_cache_gib is {self.kv_cache_gib}: it must be above 0")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization is {self.gpu_memory_utilization}: it must lie in (0, 1]")
        self._check_tiers()
        if self.cache not in ("cells", "single"):
            raise ConfigError(f"cache is {self.cache!r}: it must be cells or single")
        if self.cache == "single" and self.max_num_seqs not in (None, 1):
            raise ConfigError(f"max_num_seqs is {self.max_num_seqs}: the single cache holds one sequence, use 1")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype is {self.dtype!r}: it must be auto, float32, bfloat16 or float16")
        if self.kv_cache_dtype not in ("auto", "fp8", "fp8_e4m3"):
            raise ConfigError(f"kv_cache_dtype is {self.kv_cache_dtype!r}: it must be auto or fp8, which is fp8_e4m3")
        if self.load_format not in ("auto", "dummy"):
            raise ConfigError(f"load_format is {self.load_format!r}: it must be auto or dummy")
        if self.pooling not in ("auto", "last", "mean"):
            raise ConfigError(f"pooling is {self.pooling!r}: it must be auto, last or mean")
        if self.generation_config not in ("auto", "none"):
            raise ConfigError(f"generation_config is {self.generation_config!r}: it must be auto or none")
        if self.device not in ("auto", "cpu", "cuda") and not _is_cuda_index(self.device):
            raise ConfigError(f"device is {self.device!r}: it must be auto, cpu, cuda or cuda:N")
        if self.widths is not None:
            if not self.widths:
                raise ConfigError("widths is empty: give at least one, e.g. 1,2,4,8")
            if any(width < 1 for width in self.widths) or list(self.widths) != sorted(set(self.widths)):
                raise ConfigError(f"widths are {self.widths}: they must be positive, ascending and different")
        if self.batch_invariant:
            self._check_fixed()

    def _check_fixed(self) -> None:
        width = self.fixed_width
        assert width is not None
        if self.widths is not None and len(self.widths) > 1:
            raise ConfigError(
                f"widths are {self.widths}: with batch_invariant every step has one, so give one, e.g. 256"
            )
        if width < 2:
            raise ConfigError(
                f"widths are {self.widths}: batch_invariant needs at least 2 rows, a decode's and a prompt's"
            )
        if self.device == "cpu":
            raise ConfigError("batch_invariant needs a CUDA device, and device is 'cpu': leave out either")
        if self.cache == "single":
            raise ConfigError("batch_invariant is not made for the single cache: use --cache cells, or leave it out")
        if self.num_seqs >= width:
            raise ConfigError(
                f"max_num_seqs is {self.num_seqs}: with batch_invariant a step is {width} rows (widths) and must have "
                f"room for a prompt's token, so give at most {width - 1}, or a width of {self.num_seqs + 1}"
            )
        for name in ("max_num_batched_tokens", "max_num_mixed_tokens"):
            if getattr(self, name) not in (None, width):
                raise ConfigError(
                    f"{name} is {getattr(self, name)}: with batch_invariant every step is {width} rows (widths), "
                    "so leave it out"
                )

    def _check_tiers(self) -> None:
        for name in ("kv_host_gib", "kv_disk_gib"):
            size = getattr(self, name)
            if size is not None and size <= 0:
                raise ConfigError(f"{name} is {size}: it must be above 0")
        if (self.kv_disk is None) != (self.kv_disk_gib is None):
            raise ConfigError("kv_disk and kv_disk_gib go together: a folder, and the most it may hold")
        below = "kv_disk" if self.kv_disk is not None else "kv_redis" if self.kv_redis is not None else None
        if self.kv_host_gib is None and below is not None:
            raise ConfigError(f"{below} needs kv_host_gib: K/V goes there and back through host memory")
        if self.kv_host_gib is not None and not self.prefix_cache:
            raise ConfigError("kv_host_gib keeps prefixes, but prefix_cache is off: use one without the other")
        if self.kv_host_gib is not None and self.cache == "single":
            raise ConfigError("kv_host_gib keeps prefixes, which the single cache does not have: use --cache cells")
        if self.kv_chunk_tokens not in (16, 32, 64, 128, 256):
            raise ConfigError(f"kv_chunk_tokens is {self.kv_chunk_tokens}: it must be 16, 32, 64, 128 or 256")
        for name, default in (("kv_chunk_tokens", DEFAULT_CHUNK_TOKENS), ("kv_full_windows", False)):
            if self.kv_host_gib is None and getattr(self, name) != default:
                raise ConfigError(f"{name} says how tiers keep K/V, and there are none: give kv_host_gib too")
        if self.kv_redis is not None and not self.kv_redis.startswith(("redis://", "rediss://", "unix://")):
            raise ConfigError("kv_redis must begin with redis://, rediss:// or unix://")
        if self.kv_redis_secret_file is not None and self.kv_redis is None:
            raise ConfigError("kv_redis_secret_file signs what Redis keeps, and there is none: give kv_redis too")

    @property
    def num_seqs(self) -> int:
        """Sequences that run at once."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        most = DEFAULT_NUM_SEQS if self.fixed_width is None else self.fixed_width - 1
        return 1 if self.cache == "single" else min(DEFAULT_NUM_SEQS, most)

    @property
    def fixed_width(self) -> int | None:
        """Rows of every step of a batch-invariant engine; None: a step is as wide as what it holds."""
        if not self.batch_invariant:
            return None
        return DEFAULT_FIXED_WIDTH if self.widths is None else self.widths[0]


def check_request(info: EngineInfo, request: GenerateRequest) -> None:
    """Raise what makes `request` impossible on this engine, however long it waited."""
    prompt, new = len(request.prompt_token_ids), request.max_new_tokens
    assert request.pooling is None or (request.n == 1 and new == 0 and info.pooling is not None)
    if prompt < 1:
        raise RequestTooLarge("the prompt has no tokens: at least 1 is needed")
    if prompt + new > info.max_model_len:
        raise RequestTooLong(prompt, new, info.max_model_len)
    if prompt + new > info.kv_cells:
        raise RequestTooLarge(
            f"the request needs up to {prompt + new} K/V cells ({prompt} prompt tokens and {new} new ones), "
            f"but the pool has {info.kv_cells}"
        )
    if request.n > 1 and info.is_single:
        raise RequestTooLarge(
            f"n is {request.n}, but this server runs with the single cache (--cache single), which holds one sequence: "
            "ask for one choice"
        )
    if request.n > info.max_num_seqs:
        raise RequestTooLarge(f"n is {request.n}, but at most {info.max_num_seqs} sequences run at once")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} is {value}: it must be at least {least}")


def _is_cuda_index(device: str) -> bool:
    return device.startswith("cuda:") and device[5:].isdigit()
