"""Scales for K/V in FP8 as a checkpoint brings them: one number for all keys of a layer, one for all its values.

Named as vLLM reads them: `….self_attn.k_scale` and `v_scale`, as llm-compressor writes them, or one module further down
(`attn`, `k_proj`, `v_proj`, `qkv_proj`); an older `kv_scale` is both. A checkpoint without any leaves all at 1.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from cache.geometry import InvalidGeometry, KvScales
from static_graphs.binding import BoundLayer
from static_graphs.load_errors import ModelLoadError
from static_graphs.loading import Source

if TYPE_CHECKING:
    from static_graphs.model import LoadedModel

logger = logging.getLogger(__name__)

_SIDES = {"k_scale": ("key",), "v_scale": ("value",), "kv_scale": ("key", "value")}
_FURTHER_DOWN = ("attn", "k_proj", "v_proj", "qkv_proj")


def with_kv_scales(model: LoadedModel, source: Source) -> LoadedModel:
    """`model` whose geometry has the checkpoint's scales.

    Raises ModelLoadError for scales that are not one number above 0 for a layer of this model, and for those of another
    kind of quantisation than FP8.
    """
    _check_scheme(source)
    names = _names_of_layers(model)
    found: dict[tuple[int, str], float] = {}
    for name, scale in _stored_scales(source):
        path, _, kind = name.rpartition(".")
        if path not in names and path.rpartition(".")[2] in _FURTHER_DOWN:
            path = path.rpartition(".")[0]
        if path not in names:
            raise ModelLoadError(f"{source.folder} has {name}, but the model has no attention module {path}")
        if scale.numel() != 1:
            raise ModelLoadError(
                f"{source.folder} has {name} of shape {list(scale.shape)}: one number is read, not one for each head"
            )
        for side in _SIDES[kind]:
            # Modules that share K/V come behind the one that stores it.
            found.setdefault((names[path], side), float(scale))
    if not found:
        logger.info("K/V is stored in FP8 as it is: the checkpoint has no scales for it")
        return model
    try:
        scales = tuple(
            KvScales(found.get((layer, "key"), 1.0), found.get((layer, "value"), 1.0))
            for layer in range(len(model.geometry.layers))
        )
    except InvalidGeometry as error:
        raise ModelLoadError(f"{source.folder} has a scale for K/V that is none: {error}") from error
    logger.info("K/V is stored in FP8 with the checkpoint's %d scales", len(found))
    return replace(model, geometry=replace(model.geometry, scales=scales))


def _names_of_layers(model: LoadedModel) -> dict[str, int]:
    """Layer id by the path of each attention module."""
    paths = {}
    for path, part in model.module.named_modules():
        bound = getattr(part, "cell_layer", None)
        if isinstance(bound, BoundLayer):
            paths[path] = bound.layer
    return paths


def _stored_scales(source: Source) -> list[tuple[str, Any]]:
    """(name, tensor) of everything that is named like one, in the order of the names. A GGUF has none."""
    if source.gguf_file is not None:
        return []
    index = source.folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            files = {source.folder / shard for shard in shards}
        else:
            files = set(source.folder.glob("model*.safetensors"))
        return sorted((pair for file in files for pair in _scales_of(file)), key=lambda pair: pair[0])
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        raise ModelLoadError(f"the scales for K/V in {source.folder} cannot be read: {error}") from error


def _scales_of(file: Path) -> list[tuple[str, Any]]:
    with safe_open(file, framework="pt") as stored:
        return [(name, stored.get_tensor(name)) for name in stored.keys() if name.rpartition(".")[2] in _SIDES]  # noqa: SIM118


def _check_scheme(source: Source) -> None:
    """Refuse scales that were made for something else than FP8 (int8, say)."""
    try:
        written = json.loads((source.folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return  # a GGUF
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{source.folder / 'config.json'} cannot be read: {error}") from error
    scheme = (written.get("quantization_config") or {}).get("kv_cache_scheme")
    if scheme is not None and (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
        kind = f"{scheme.get('num_bits')}-bit {scheme.get('type')}"
        raise ModelLoadError(
            f"{source.folder} has scales for K/V in {kind}, which do not fit FP8: use --kv-cache-dtype auto"
        )
