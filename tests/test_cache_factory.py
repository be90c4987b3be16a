"""Kinds of cache by device: insert-only, checked before building, errors that list what there is (FAC-*, T-FAC)."""

import pytest
import torch

from cache.cell_cache import CellCache
from cache.factory import CacheFactory, cache_factory
from cache.geometry import (
    CacheConfig,
    CacheMemoryError,
    Geometry,
    InvalidBuilder,
    InvalidConfig,
    LayerGeometry,
    Reach,
    UnknownKind,
)
from cache.sequence_cache import SequenceCache

GEOMETRY = Geometry((LayerGeometry(2, 4, 4), LayerGeometry(2, 4, 4, Reach("window", 4))))
CONFIG = CacheConfig(32, max_write=8, kv_dtype=torch.float32)
CPU = torch.device("cpu")


class Recorder:
    """A builder that notes what it was called with and gives `result` (or raises it)."""

    def __init__(self, result: CellCache | Exception | None = None):
        self.result = result
        self.calls: list[tuple[object, ...]] = []

    def __call__(self, *arguments: object) -> CellCache | None:
        self.calls.append(arguments)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize(
    ("kind", "built", "sequences"),
    [("single", SequenceCache, 1), ("batched-cell", CellCache, 1024), ("batched", CellCache, 1024)],
)
def test_fac_1_each_kind_builds_its_cache_and_the_engine_drives_them_alike(kind, built, sequences):
    """T-FAC."""
    cache = cache_factory().build(kind, GEOMETRY, CONFIG, CPU)
    assert type(cache) is built
    assert (cache.capacity_cells, cache.free_cells, cache.max_sequences) == (32, 32, sequences)
    seq = cache.seq_new()
    cache.declare_step([seq] * 5)
    step = cache.prepare_step(8)
    cache.commit_step()
    assert (step.num_tokens, cache.pos(seq), cache.free_cells) == (5, 5, 27)
    cache.rewind(seq, 4)
    cache.seq_rm(seq)
    assert cache.metrics().free_cells == 32


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_fac_4_every_device_has_single_batched_cell_and_batched(device_type):
    assert cache_factory().kinds(device_type) == ("batched", "batched-cell", "single")


@pytest.mark.parametrize(
    ("kind", "device", "reason"),
    [
        ("batched-sequence", CPU, "no cache of kind 'batched-sequence' on cpu: cpu has batched, batched-cell, single"),
        ("", CPU, "no cache of kind '' on cpu: cpu has batched, batched-cell, single"),
        ("single", torch.device("meta"), "no cache of kind 'single' on meta: no kinds on meta, only on cpu, cuda"),
    ],
    ids=["unknown kind", "no kind", "unknown device"],
)
def test_fac_3_an_unknown_kind_is_refused_with_what_there_is(kind, device, reason):
    with pytest.raises(UnknownKind) as caught:
        cache_factory().build(kind, GEOMETRY, CONFIG, device)
    assert str(caught.value).endswith(reason)


def test_fac_3_an_empty_factory_says_so():
    with pytest.raises(UnknownKind, match="no kinds on cpu, only on no device"):
        CacheFactory().build("single", GEOMETRY, CONFIG, CPU)


def test_fac_2_an_entry_stays_whoever_comes_after():
    factory = CacheFactory()
    first, second = Recorder(CellCache(GEOMETRY, CONFIG, CPU)), Recorder()
    factory.register("cpu", "mine", first)
    with pytest.raises(InvalidBuilder, match="'mine' on cpu has a builder already: cpu has mine"):
        factory.register("cpu", "mine", second)
    with pytest.raises(InvalidBuilder, match="'mine' on cpu"):
        factory.register("cpu", "mine", first)
    assert factory.build("mine", GEOMETRY, CONFIG, CPU) is first.result
    assert first.calls == [(GEOMETRY, CONFIG, CPU)]
    assert second.calls == []


def test_fac_2_no_builder_registers_nothing():
    factory = CacheFactory()
    with pytest.raises(InvalidBuilder, match="no builder was given for 'mine' on cpu"):
        factory.register("cpu", "mine", None)
    assert factory.kinds("cpu") == ()


def test_a_kind_of_one_device_is_none_of_another():
    factory = CacheFactory()
    factory.register("cuda", "mine", Recorder())
    factory.register("cpu", "mine", Recorder())
    factory.register("cpu", "other", Recorder())
    assert (factory.kinds("cpu"), factory.kinds("cuda")) == (("mine", "other"), ("mine",))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (CacheConfig(4, max_write=6, kv_dtype=torch.float32), "max_write is 6"),
        (CacheConfig(4, max_write=2, kv_dtype=torch.float64), "cannot be stored as torch.float64"),
    ],
    ids=["a step wider than the pool", "no storage dtype"],
)
def test_fac_3_a_config_is_refused_before_the_builder_runs(config, reason):
    factory = CacheFactory()
    builder = Recorder()
    factory.register("cpu", "mine", builder)
    with pytest.raises(InvalidConfig, match=reason):
        factory.build("mine", GEOMETRY, config, CPU)
    assert builder.calls == []


def test_more_cells_than_int32_rows_can_name_are_refused_before_anything_is_allocated():
    assert CacheConfig(2**31 - 2, max_write=2, kv_dtype=torch.float32).capacity_cells == 2147483646
    with pytest.raises(InvalidConfig, match="capacity_cells is 2147483647: at most 2147483646 can be addressed"):
        CacheConfig(2**31 - 1, max_write=2, kv_dtype=torch.float32)


def test_fac_3_a_builder_that_builds_nothing_is_named():
    factory = CacheFactory()
    factory.register("cpu", "mine", Recorder(None))
    with pytest.raises(InvalidBuilder, match="the builder of 'mine' on cpu built nothing"):
        factory.build("mine", GEOMETRY, CONFIG, CPU)


def test_a_builders_own_refusal_is_handed_on():
    factory = CacheFactory()
    factory.register("cpu", "mine", Recorder(CacheMemoryError("no memory")))
    with pytest.raises(CacheMemoryError, match="no memory"):
        factory.build("mine", GEOMETRY, CONFIG, CPU)


def test_two_factories_know_nothing_of_each_other():
    mine, yours = cache_factory(), cache_factory()
    mine.register("cpu", "extra", Recorder())
    assert "extra" not in yours.kinds("cpu")
