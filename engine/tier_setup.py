"""Options and a model -> the tiers below the pool, and the record of what their bytes depend on."""

from __future__ import annotations

import atexit
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import torch

from cache.cell_cache import CellCache
from cache.geometry import CacheMemoryError, InvalidConfig
from cache.offload.chunks import Namespace, fitting_chunk_tokens, geometry_record
from cache.offload.disk import DiskTier, clear_folder
from cache.offload.groups import Groups
from cache.offload.host import HostSlab
from cache.offload.objects import ObjectStores, needed_windows
from cache.offload.records import Layout
from cache.offload.redis_tier import RedisTier
from cache.offload.store import Store
from cache.offload.tiers import Tier
from cache.offload.transfers import Transfers
from cache.radix import RadixTree
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv_tiers import KvTiers
from static_graphs.tiling_table import Stamp
from static_graphs.tilings import RULE, Tilings

GIB = 1 << 30
SECRET_BYTES = 16
_PART_WORDS = 1 << 24
"""Bounds the memory that the sums over a weight take."""

logger = logging.getLogger(__name__)


def tiers_below(
    config: EngineConfig,
    cache: CellCache,
    weights: str,
    positions: str,
    device: torch.device,
    tilings: Tilings = RULE,
) -> Callable[[RadixTree], KvTiers] | None:
    """What joins a tree to the configured tiers; None where there are none.

    weights, positions: of `weights_digest` and `position_record`. tilings: by which the fused layers cut products.
    Raises ConfigError for tiers that cannot be had. They are closed with the process, behind a last chance to copy down
    what is dirty.
    """
    if config.kv_host_gib is None:
        return None
    kv_dtype = cache.config.kv_dtype
    chunk_tokens = fitting_chunk_tokens(cache.geometry, kv_dtype, config.kv_chunk_tokens)
    is_separate = not config.kv_full_windows
    groups = Groups.of(
        cache.geometry, kv_dtype, chunk_tokens, separate=is_separate, full_windows=config.kv_full_windows
    )
    transfers = Transfers(cache.pool, groups, device)
    namespace = Namespace(
        weights=weights,
        dtype=cache.geometry.record_in(kv_dtype),
        geometry=geometry_record(cache.geometry),
        rope=positions,
        steps=step_record(config, device, tilings),
    )
    try:
        objects = _stores(config, groups, transfers, namespace, pinned=device.type == "cuda")
    except (InvalidConfig, CacheMemoryError, ValueError) as error:
        raise ConfigError(str(error)) from error
    except ImportError as error:
        raise ConfigError("kv_redis needs the redis package: pip install redis") from error
    atexit.register(objects.close)
    first = objects.stores[0]
    logger.info(
        "prefixes that leave the pool go to %s, %d tokens (%d bytes) together",
        " and ".join([first.host.name, *(guarded.tier.name for guarded in first.tiers)]),
        chunk_tokens,
        transfers.chunk_bytes,
    )
    return lambda tree: KvTiers(tree, cache, objects, transfers, namespace, chunk_tokens, clock=time.monotonic)


def _stores(
    config: EngineConfig, groups: Groups, transfers: Transfers, namespace: Namespace, *, pinned: bool
) -> ObjectStores:
    """A store for each object group, whose part of every tier is as large as its part of a chunk."""
    assert config.kv_host_gib is not None
    windows = needed_windows(groups)
    folder = None if config.kv_disk is None else Path(config.kv_disk)
    if folder is not None and len(windows) > 1:
        clear_folder(folder)
    secret = _redis_secret(config)
    stores: list[Store] = []
    try:
        for index, window in enumerate(windows):
            size = transfers.object_bytes(index)
            part = size / transfers.chunk_bytes
            space = object_namespace(namespace, groups, index)
            layout = Layout(space.digest, groups.chunk_tokens, size)
            host_bytes = int(config.kv_host_gib * GIB * part)
            host = HostSlab(size, host_bytes, pinned=pinned, needs_parents=window is None)
            tiers: list[Tier] = []
            if folder is not None and config.kv_disk_gib is not None:
                own = folder if len(windows) == 1 else folder / f"objects-{index}"
                disk_bytes = int(config.kv_disk_gib * GIB * part)
                tiers.append(DiskTier(own, space, layout, disk_bytes, needs_parents=window is None))
            if config.kv_redis is not None:
                tiers.append(RedisTier(config.kv_redis, replace(layout, secret=secret)))
            stores.append(Store(host, tiers))
    except BaseException:
        for store in stores:
            store.close()
        raise
    return ObjectStores(stores, windows)


def _redis_secret(config: EngineConfig) -> bytes:
    """The key of the file's secret; b"" without a file. Records of servers with other secrets, or none, are no hits."""
    path = config.kv_redis_secret_file
    if path is None:
        return b""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"kv_redis_secret_file {path} cannot be read: {error.strerror or error}") from error
    if len(secret) < SECRET_BYTES:
        raise ConfigError(
            f"kv_redis_secret_file {path} holds {len(secret)} bytes: a secret that cannot be guessed has "
            f"{SECRET_BYTES} or more, e.g. of `openssl rand -hex 32`"
        )
    return blake2b(secret, digest_size=32, person=b"cellserve kv").digest()


def object_namespace(namespace: Namespace, groups: Groups, index: int) -> Namespace:
    """Of one object group's stored bytes. Keys are the whole namespace's: a chunk has one in all of its groups."""
    members = groups.members(index)
    is_whole = len(groups.object_groups) == 1 and all(
        group.slots_per_chunk * group.ratio == groups.chunk_tokens for group in members
    )
    if is_whole:
        return namespace
    kept = "; ".join(f"layers {list(group.layers)}: last {group.slots_per_chunk}" for group in members)
    return replace(namespace, geometry=f"{namespace.geometry} of a chunk's {groups.chunk_tokens}: {kept}")


def weights_digest(module: torch.nn.Module) -> str:
    """Of every parameter and buffer: name, shape, dtype, and two sums over all of its bytes, one of them by place."""
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype} {_sums(tensor)}\n".encode())
    return digest.hexdigest()


def position_record(module: torch.nn.Module, max_model_len: int) -> str:
    """The model's own description, which says how it turns positions into angles, and the length it was loaded for."""
    described = getattr(module, "config", None)
    fields = {} if described is None else described.to_dict()
    fields.pop("_name_or_path", None)  # the same model from another folder is the same model
    record = json.dumps(fields, sort_keys=True, default=str)
    return f"{blake2b(record.encode(), digest_size=16).hexdigest()} up to {max_model_len}"


def step_record(config: EngineConfig, device: torch.device, tilings: Tilings) -> str:
    """What the last bits of K/V depend on, where they are promised; "" where they are not, and any server's will do."""
    if config.fixed_width is None:
        return ""
    kernels = "as transformers wrote them" if config.enforce_eager else f"fused {tilings.record}".rstrip()
    where = Stamp.of(device) if device.type == "cuda" else device
    return f"{config.fixed_width} rows, layers {kernels}, on {where}"


def _sums(tensor: torch.Tensor) -> tuple[int, ...]:
    if not tensor.numel():
        return ()
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    width = next(width for width in (8, 4, 2, 1) if raw.numel() % width == 0)
    words = raw.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width])
    sums = []
    for start in range(0, words.numel(), _PART_WORDS):
        part = words[start : start + _PART_WORDS]
        placed = torch.arange(1, 2 * part.numel(), 2, dtype=torch.int64, device=part.device)
        sums += [int(part.sum(dtype=torch.int64)), int((part.to(torch.int64) * placed).sum())]
    return tuple(sums)
