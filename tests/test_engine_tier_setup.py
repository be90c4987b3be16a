"""Tiers from options: what a real engine finds again after a restart, and what it must not find."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cache.cell_cache import CellCache
from cache.geometry import CacheConfig, Geometry, LayerGeometry
from cache.radix import RadixTree
from engine.build import build_engine
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.loop import EngineLoop
from engine.tier_setup import GIB, tiers_below, weights_digest
from engine.types import GenerateRequest, SamplingParams, Update
from static_graphs.tilings import RULE, Measured, Tiling, Tilings
from support.model_folder import write_folder
from support.redis_server import Server
from support.tiny_models import tiny

PROMPT = tuple(range(100)) * 3
MIB = 1 / 1024
EAGER = {"enforce_eager": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_folder(tmp_path_factory.mktemp("model"))


def loop_of(model: str, **options: object) -> EngineLoop:
    sizes = {"device": "cpu", "max_num_seqs": 2, "kv_cells": 512, "kv_host_gib": 4 * MIB}
    return build_engine(EngineConfig(model, **(sizes | options)), lambda *_: None)[0]


def ask(loop: EngineLoop, name: str, prompt: tuple[int, ...] = PROMPT) -> tuple[int, list[int]]:
    """-> prompt tokens that were there, tokens drawn."""
    sampling = SamplingParams(temperature=0.0)
    loop.submit(GenerateRequest(name, prompt, sampling=sampling, max_new_tokens=4))
    updates: list[Update] = []
    while loop.has_work():
        updates += loop.step()
    assert updates[-1].finish == "length"
    return updates[0].cached_tokens or 0, [token for update in updates for token in update.token_ids]


def stored(loop: EngineLoop) -> None:
    """Wait until the tiers have everything, and let the folder go."""
    for store in loop._prefixes._tiers._objects.stores:
        store.close(10)


def test_a_server_that_starts_again_finds_its_prompts_and_answers_the_same(model: str, tmp_path: Path) -> None:
    disk = {"kv_disk": str(tmp_path), "kv_disk_gib": 8 * MIB}
    first = loop_of(model, **disk)
    cold = ask(first, "cold")
    first.reset_prefix_cache()
    assert ask(first, "from host") == (256, cold[1])
    stored(first)
    second = loop_of(model, **disk)
    assert ask(second, "from disk") == (256, cold[1])
    stored(second)


@pytest.mark.parametrize(
    ("model_type", "full_windows", "num_groups"),
    [("gemma3_text", False, 2), ("gemma3_text", True, 1), ("mistral", False, 1)],
)
def test_a_model_with_windows_finds_its_prompts_on_disk_in_each_of_its_object_groups(
    tmp_path: Path, model_type: str, full_windows: bool, num_groups: int
) -> None:
    config = tiny(model_type, max_position_embeddings=512)
    config.save_pretrained(tmp_path / "model")
    options = {
        **{"kv_disk": str(tmp_path / "kv"), "kv_disk_gib": 8 * MIB, "kv_full_windows": full_windows},
        **{"load_format": "dummy", "seed": 1},
    }
    prompt = tuple(token % 64 for token in PROMPT)
    first = loop_of(str(tmp_path / "model"), **options)
    cold = ask(first, "cold", prompt)
    assert len(first.kv_report().tiers.object_groups) == num_groups
    stored(first)
    second = loop_of(str(tmp_path / "model"), **options)
    assert ask(second, "from disk", prompt) == (256, cold[1])
    stored(second)
    used = sum(path.stat().st_size for path in (tmp_path / "kv").rglob("*") if path.is_file())
    assert used <= 8 * MIB * GIB


def test_a_model_with_more_object_groups_takes_the_folders_room_from_the_one_before(model: str, tmp_path: Path) -> None:
    disk = {"kv_disk": str(tmp_path / "kv"), "kv_disk_gib": 8 * MIB}
    first = loop_of(model, **disk)
    ask(first, "first")
    second_model = tmp_path / "model"
    tiny("gemma3_text", max_position_embeddings=512).save_pretrained(second_model)
    windowed = {**disk, "load_format": "dummy"}
    with pytest.raises(ConfigError, match="in use by another server"):
        loop_of(str(second_model), **windowed)
    stored(first)
    second = loop_of(str(second_model), **windowed)
    assert list((tmp_path / "kv").glob("*/*.seg")) == []
    stored(second)


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server: apt-get install redis-server")
def test_servers_share_what_redis_keeps_only_under_one_secret(model: str, tmp_path: Path) -> None:
    """Whoever else may write there could otherwise put K/V, and so words, into this server's mouth."""
    redis = Server(tmp_path)
    found = []
    for number, secret in enumerate(("ours", "ours", "theirs")):
        (tmp_path / "secret").write_text(f"{secret * 8}\n")
        loop = loop_of(model, kv_redis=redis.url, kv_redis_secret_file=str(tmp_path / "secret"))
        found.append(ask(loop, str(number))[0])
        stored(loop)
    redis.kill()
    assert found == [0, 256, 0]


def test_a_secret_that_is_none_is_refused_with_what_makes_one(model: str, tmp_path: Path) -> None:
    options = {"kv_redis": "unix:///nowhere", "kv_redis_secret_file": str(tmp_path / "secret")}
    with pytest.raises(ConfigError, match=r"secret cannot be read: No such file"):
        loop_of(model, **options)
    (tmp_path / "secret").write_text("hunter2\n")
    with pytest.raises(ConfigError, match=r"holds 7 bytes: .* has 16 or more, e.g. of `openssl rand -hex 32`"):
        loop_of(model, **options)


def test_other_weights_find_nothing_in_the_same_folder(model: str, tmp_path: Path) -> None:
    disk = {"kv_disk": str(tmp_path), "kv_disk_gib": 8 * MIB}
    first = loop_of(model, load_format="dummy", seed=1, **disk)
    ask(first, "first")
    stored(first)
    second = loop_of(model, load_format="dummy", seed=2, **disk)
    assert ask(second, "second")[0] == 0
    stored(second)
    third = loop_of(model, load_format="dummy", seed=1, **disk)
    assert ask(third, "third")[0] == 256
    stored(third)


def test_without_the_options_there_are_no_tiers(model: str) -> None:
    loop = loop_of(model, kv_host_gib=None)
    ask(loop, "cold")
    loop.reset_prefix_cache()
    assert ask(loop, "again")[0] == 0


def test_a_digest_tells_any_change_of_a_weight() -> None:
    layer = nn.Linear(64, 3)
    digest = weights_digest(layer)
    assert weights_digest(layer) == digest
    with torch.no_grad():
        layer.weight[[0, 1]] = layer.weight[[1, 0]]
    swapped = weights_digest(layer)
    with torch.no_grad():
        layer.bias[2] += 1e-3
    assert len({digest, swapped, weights_digest(layer)}) == 3


def test_servers_that_promise_every_bit_find_only_what_was_computed_as_they_compute() -> None:
    """A prefix of a server whose steps are of other widths would be right, and not the same to the last bit."""
    cache = CellCache(
        Geometry((LayerGeometry(1, 4, 4),)), CacheConfig(64, 8, torch.float32, max_sequences=1), torch.device("cpu")
    )

    def root(tilings: Tilings = RULE, **way: Any) -> bytes:
        config = EngineConfig("m", kv_host_gib=4 * MIB, **way)
        make_tiers = tiers_below(config, cache, "w", "p", torch.device("cpu"), tilings)
        assert make_tiers is not None
        return make_tiers(RadixTree(cache))._namespace.root

    fixed = {"batch_invariant": True, "widths": (64,)}
    measured = Tilings({Measured(4096, 1024, False, 64): Tiling(64, 128)})
    apart = [
        root(),
        root(**fixed),
        root(measured, **fixed),
        root(**(fixed | {"widths": (128,)})),
        root(**fixed, **EAGER),
    ]
    assert len(set(apart)) == len(apart)
    assert root(**EAGER) == root(measured) == root()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_disk": "/tmp/kv", "kv_disk_gib": 1.0}, "kv_disk needs kv_host_gib"),
        ({"kv_redis": "redis://localhost"}, "kv_redis needs kv_host_gib"),
        ({"kv_host_gib": 1.0, "kv_disk": "/tmp/kv"}, "kv_disk and kv_disk_gib go together"),
        ({"kv_host_gib": 1.0, "kv_disk_gib": 1.0}, "kv_disk and kv_disk_gib go together"),
        ({"kv_host_gib": 0.0}, "kv_host_gib is 0.0"),
        ({"kv_host_gib": 1.0, "prefix_cache": False}, "prefix_cache is off"),
        ({"kv_host_gib": 1.0, "cache": "single"}, "the single cache does not have"),
        ({"kv_host_gib": 1.0, "kv_redis": "http://localhost"}, "kv_redis must begin with redis://"),
        ({"kv_redis_secret_file": "/run/secret"}, "kv_redis_secret_file signs what Redis keeps, and there is none"),
        ({"kv_chunk_tokens": 48}, "kv_chunk_tokens is 48"),
        ({"kv_chunk_tokens": 128}, "kv_chunk_tokens says how tiers keep K/V, and there are none: give kv_host_gib"),
        ({"kv_full_windows": True}, "kv_full_windows says how tiers keep K/V, and there are none: give kv_host_gib"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig("model", **options)


def test_tiers_that_cannot_be_had_are_refused_at_start(model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bytes of host memory do not hold one chunk"):
        loop_of(model, kv_host_gib=1000 / GIB)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot keep K/V in"):
        loop_of(model, kv_disk=str(tmp_path / "file"), kv_disk_gib=8 * MIB)
