"""The one place where an engine is put together: options -> model -> pool -> executor -> loop.

Imports torch and the model, so the server never imports it; the engine process and the in-process client do.
"""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch

from cache.geometry import FP8, MAX_CAPACITY_CELLS, Geometry
from engine.config import DEFAULT_MODEL, FP8_CAPABILITY, EngineConfig
from engine.create import Progress, create_executor
from engine.errors import ConfigError, ModelError
from engine.executor_options import ExecutorOptions
from engine.grammar import Grammars
from engine.loop import EngineLoop
from engine.scheduler import SchedulerLimits
from engine.tier_setup import position_record, tiers_below, weights_digest
from engine.types import EngineInfo, GenerationDefaults
from static_graphs.binding import count_experts
from static_graphs.kv_scales import with_kv_scales
from static_graphs.loading import default_model, export_tokenizer, locate, must_convert
from static_graphs.model import LoadedModel, ModelLoadError, load_model
from static_graphs.pack import pack_linears
from static_graphs.tiling_table import tilings_for
from static_graphs.tilings import RULE, Tilings

logger = logging.getLogger(__name__)

CPU_WIDTHS = (1, 2, 4, 8, 16)
"""Padding is free where a step waits for weights; wider steps run at their exact size."""
CPU_POOL_BYTES = 4 << 30
CPU_PREFILL = (512, 256)
"""Tokens of a step without decodes, of a step beside decodes (at least)."""
CUDA_WIDTHS = (1, 2, 4, *range(8, 257, 8), 384, 512, 768, 1024)
CUDA_PREFILL = (8192, 1024)
"""The second is the widest captured width: prompts beside 256 decodes come at up to 768 tokens a step."""
CUDA_MOST_TOKENS = 61_440
"""A launch has up to 65,535 programs in a row, and attention has one for each row of a step and some more."""
SMALL_MODEL = 2_000_000_000
"""Parameters below which a full step of prompts is over before a host has launched its kernels one by one."""


def build_engine(config: EngineConfig, progress: Progress) -> tuple[EngineLoop, EngineInfo]:
    """Load and assemble. Raises ConfigError or ModelError with a message a user can act on."""
    device = _device(config.device)
    _require_fp8(config, device)
    if config.batch_invariant and device.type != "cuda":
        raise ConfigError("batch_invariant needs a CUDA device, and this torch sees none: leave it out")
    name = default_model() if config.model == DEFAULT_MODEL else config.model
    try:
        is_new = must_convert(name)
        progress("converting the GGUF file, which is done once" if is_new else "loading the model", 0, 1)
        model = load_model(
            name,
            device=device,
            dtype=config.dtype,
            load_format=config.load_format,
            max_model_len=config.max_model_len,
            seed=config.seed,
        )
        kv_dtype = model.dtype if config.kv_cache_dtype == "auto" else FP8
        if kv_dtype == FP8 and config.load_format != "dummy":
            model = with_kv_scales(model, locate(name))
        tier_names = _tier_names(config, model)  # of the weights as they were loaded
        tilings = RULE if config.enforce_eager else tilings_for(device, model.dtype)
        fused_experts = 0 if config.enforce_eager else _quicken(model, tilings)
        if config.batch_invariant:
            _require_fused_experts(config, model, fused_experts)
        tokenizer_dir, num_token_ids = _export_tokenizer(name)
        grammars = _grammars(tokenizer_dir, model)
    except ModelLoadError as error:
        raise ModelError(str(error)) from error
    kv_cells = _kv_cells(config, model.geometry, kv_dtype, device)
    if config.cache == "single" and config.kv_cells is None:
        kv_cells = min(kv_cells, model.max_model_len)  # one sequence needs no more
    max_model_len = _max_model_len(config, model.max_model_len, kv_cells)
    is_cuda = device.type == "cuda"
    widths = _widths(config, CUDA_WIDTHS if is_cuda else CPU_WIDTHS, kv_cells)
    limits = _limits(config, widths, CUDA_PREFILL if is_cuda else CPU_PREFILL)
    widest = min(max(limits.prefill_budget, limits.mixed_budget), kv_cells)  # no step has more tokens than cells
    if is_cuda and widest > CUDA_MOST_TOKENS:
        raise ConfigError(
            f"a step of {widest} tokens (max_num_batched_tokens, max_num_mixed_tokens) is wider than a launch on this "
            f"device can be: give at most {CUDA_MOST_TOKENS}"
        )
    options = ExecutorOptions(
        capacity_cells=kv_cells,
        widths=widths,
        max_dynamic=widest if widest > widths[-1] else None,
        max_sessions=config.num_seqs,
        max_session_tokens=max_model_len,
        cache_kind="single" if config.cache == "single" else "batched",
        kv_dtype=kv_dtype,
        reserves_cells=False,  # the loop preempts when cells run out (D10)
        max_sequences=config.num_seqs,
        captures_static_methods=not config.enforce_eager,
        captures_full_step=sum(weight.numel() for weight in model.module.parameters()) < SMALL_MODEL,
        overlaps=config.overlap,
        batch_invariant=config.batch_invariant,
    )
    executor = create_executor(model, options, progress, grammars)
    info = EngineInfo(
        model=name,
        architecture=model.architecture,
        device=str(device),
        dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype="fp8" if kv_dtype == FP8 else str(kv_dtype).removeprefix("torch."),
        max_model_len=max_model_len,
        vocab_size=min(num_token_ids or model.vocab_size, model.vocab_size),
        kv_cells=kv_cells,
        max_num_seqs=config.num_seqs,
        max_waiting=config.max_waiting,
        widths=options.widths,
        eos_token_ids=model.eos_token_ids,
        tokenizer_dir=tokenizer_dir,
        defaults=_defaults(model.defaults) if config.generation_config == "auto" else GenerationDefaults(),
        has_grammars=grammars is not None,
        is_single=config.cache == "single",
        pooling=model.embedding.kind if config.pooling == "auto" else config.pooling,
        no_embeddings=model.embedding.reason,
        embedding_size=model.hidden_size,
        matryoshka=model.matryoshka,
        created_s=int(time.time()),
    )
    has_prefixes = config.prefix_cache and config.cache == "cells"
    make_tiers = tiers_below(config, executor.cache_control, *tier_names, device, tilings)
    loop = EngineLoop(executor, limits, prefix_cache=has_prefixes, make_tiers=make_tiers, grammars=grammars)
    return loop, info


def _require_fp8(config: EngineConfig, device: torch.device) -> None:
    """Refuse K/V in FP8 on a CUDA device that cannot convert it."""
    if config.kv_cache_dtype == "auto" or device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        own, needed = (".".join(map(str, each)) for each in (capability, FP8_CAPABILITY))
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype!r}, which needs compute capability {needed}: "
            f"{torch.cuda.get_device_name(device)} has {own}. Use auto"
        )


def _tier_names(config: EngineConfig, model: LoadedModel) -> tuple[str, str]:
    """What tells this model's K/V from another's. Weights are read for it only where K/V may outlive the process."""
    outlives = config.kv_disk is not None or config.kv_redis is not None
    weights = weights_digest(model.module) if outlives else "this process"
    return weights, position_record(model.module, model.max_model_len)


def _require_fused_experts(config: EngineConfig, model: LoadedModel, fused: int) -> None:
    """Refuse a mixture whose products are as long as a step happens to send each expert rows."""
    if count_experts(model.module) > fused:
        why = "enforce_eager leaves to transformers" if config.enforce_eager else "no kernel of ours computes"
        raise ConfigError(
            f"{model.architecture} is a mixture of experts that {why}: its rows would be computed as the step beside "
            "them suits, so it cannot be served with batch_invariant. Leave that out"
        )


def _quicken(model: LoadedModel, tilings: Tilings) -> int:
    """Make the same model faster where this device has a way to; -> modules of experts that our kernels compute.

    Raises ModelLoadError where the proof fails.
    """
    if model.device.type == "cuda":
        from static_graphs.fuse import fuse  # needs triton, which is there wherever torch has CUDA

        fused = fuse(model, tilings)
        logger.info("%s", fused)
        return fused.experts
    pack_linears(model)
    return 0


def _widths(config: EngineConfig, ladder: tuple[int, ...], kv_cells: int) -> tuple[int, ...]:
    """As asked; else what of the ladder the pool can hold."""
    widths = config.widths if config.fixed_width is None else (config.fixed_width,)
    if widths is None:
        return tuple(width for width in ladder if width <= kv_cells)
    if widths[-1] > kv_cells:
        raise ConfigError(
            f"widths go up to {widths[-1]} rows, but the K/V pool has {kv_cells} cells: "
            f"use widths up to {kv_cells} or --kv-cells {widths[-1]}"
        )
    return widths


def _limits(config: EngineConfig, widths: tuple[int, ...], prefill: tuple[int, int]) -> SchedulerLimits:
    """Beside decodes a step is kept as narrow as the widest static method, so that inter-token latency holds (D10).

    Prompts take turns of as many tokens: those that fit one go in order of arrival, and longer ones hold them up no
    more than about a step. Where every step is one width, all of that is the width.
    """
    if (fixed := config.fixed_width) is not None:
        return SchedulerLimits(config.num_seqs, prefill_budget=fixed, mixed_budget=fixed, prefill_chunk=fixed)
    budget, beside_decodes = prefill
    budget = config.max_num_batched_tokens or max(budget, 2 * widths[-1])
    beside_all = config.num_seqs + min(beside_decodes // 4, budget)  # prompts go on beside the most decodes too
    mixed = max(widths[-1], min(beside_decodes, budget), beside_all)
    if config.max_num_mixed_tokens is not None:
        mixed = config.max_num_mixed_tokens
        if mixed <= config.num_seqs:
            raise ConfigError(
                f"max_num_mixed_tokens is {mixed}: a step must have room for {config.num_seqs} decodes "
                f"(max_num_seqs) and a prompt's token, so give at least {config.num_seqs + 1}"
            )
        if mixed > max(budget, beside_all):
            raise ConfigError(
                f"max_num_mixed_tokens is {mixed}, but a step takes at most {budget} tokens (max_num_batched_tokens)"
            )
    return SchedulerLimits(max_num_seqs=config.num_seqs, prefill_budget=budget, mixed_budget=mixed, prefill_chunk=mixed)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but this torch sees no CUDA device: use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, but there are {torch.cuda.device_count()} CUDA devices, from 0")
    return device


def _defaults(written: Mapping[str, float]) -> GenerationDefaults:
    values = dict(written)
    top_k = values.pop("top_k", None)
    return GenerationDefaults(top_k=None if top_k is None else int(top_k), **values)


def _export_tokenizer(model: str) -> tuple[str | None, int | None]:
    """Write what the server needs to make text: (folder, number of token ids), None for a model without a tokenizer."""
    folder = Path(tempfile.mkdtemp(prefix="cellserve-tokenizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    num_token_ids = export_tokenizer(model, folder)
    return (None, None) if num_token_ids is None else (str(folder), num_token_ids)


def _grammars(tokenizer_dir: str | None, model: LoadedModel) -> Grammars | None:
    """None where a token's bytes, or the token that ends an answer, cannot be known: then structured output is off."""
    if tokenizer_dir is None or not model.eos_token_ids:
        return None
    source = (Path(tokenizer_dir) / "tokenizer.json").read_text(encoding="utf-8")
    try:
        return Grammars(source, model.vocab_size, model.eos_token_ids)
    except ValueError as error:
        logger.warning("structured output is off: the tokenizer cannot be matched with grammars (%s)", error)
        return None


def _kv_cells(config: EngineConfig, geometry: Geometry, kv_dtype: torch.dtype, device: torch.device) -> int:
    """Cells of the pool: as asked, or what the machine's memory gives."""
    if config.kv_cells is not None:
        return config.kv_cells
    bytes_per_cell = geometry.bytes_per_cell(kv_dtype)
    if config.kv_cache_gib is not None:
        pool_bytes = int(config.kv_cache_gib * (1 << 30))
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        pool_bytes = int(free - (1 - config.gpu_memory_utilization) * total)
    else:
        pool_bytes = min(CPU_POOL_BYTES, psutil.virtual_memory().available // 2)
    cells = pool_bytes // bytes_per_cell - 1  # one row is scratch
    if cells < 2:
        raise ConfigError(
            f"a K/V pool of {max(pool_bytes, 0) / (1 << 30):.3f} GiB holds no sequence: one cell of this model takes "
            f"{bytes_per_cell} bytes. Give --kv-cells or --kv-cache-gib, or free memory"
        )
    return min(cells, MAX_CAPACITY_CELLS)


def _max_model_len(config: EngineConfig, model_len: int, kv_cells: int) -> int:
    """The context that is served: the model's, no more than the pool holds unless that was asked for."""
    if config.max_model_len is not None and config.max_model_len > kv_cells:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the K/V pool has {kv_cells} cells: "
            f"use --max-model-len {kv_cells} or --kv-cells {config.max_model_len}"
        )
    return min(model_len, kv_cells)
