"""Programs bound to a cache: each is checked, the whole once more at the first step (POOL-3, POOL-12, REG-3)."""

import pytest
import torch

from cache.cell_cache import CellCache
from cache.geometry import CacheConfig, CacheError, Geometry, InvalidProgram, LayerGeometry, Reach

LAYER = LayerGeometry(2, 4, 4)
GEOMETRY = Geometry((LAYER, LayerGeometry(2, 4, 4, Reach("window", 3))))


def new_cache() -> CellCache:
    cache = CellCache(GEOMETRY, CacheConfig(16, max_write=4, kv_dtype=torch.float32), torch.device("cpu"))
    cache.declare_step([cache.seq_new()])
    return cache


def step(cache: CellCache) -> None:
    cache.prepare_step(1)
    cache.commit_step()
    cache.declare_step([0])


def refusal(cache: CellCache) -> str:
    """Why the next step is refused; the refusal changes nothing."""
    before = cache.metrics()
    with pytest.raises(CacheError) as caught:
        cache.prepare_step(1)
    assert cache.metrics() == before
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_program_with_every_layer_steps():
    cache = new_cache()
    assert cache.bind_program("forward_1", GEOMETRY, torch.float32) is True
    step(cache)


@pytest.mark.parametrize(
    ("layers", "dtype", "reason"),
    [
        (GEOMETRY.layers, torch.bfloat16, "stores K/V as torch.bfloat16, the cache as torch.float32"),
        (GEOMETRY.layers[:1], torch.float32, "has 1 layers, the cache 2"),
        ((*GEOMETRY.layers, LAYER), torch.float32, "has 3 layers, the cache 2"),
        ((LAYER, LAYER), torch.float32, "layer 1 of forward_2 is"),
        ((LayerGeometry(4, 4, 4), GEOMETRY.layers[1]), torch.float32, "layer 0 of forward_2 is"),
    ],
    ids=["dtype", "a layer missing", "a layer too many", "reach", "shape"],
)
def test_pool_3_what_disagrees_is_refused_and_remembered(layers, dtype, reason):
    cache = new_cache()
    cache.bind_program("forward_1", GEOMETRY, torch.float32)
    with pytest.raises(InvalidProgram) as caught:
        cache.bind_program("forward_2", Geometry(layers), dtype)
    assert reason in str(caught.value)
    first = refusal(cache)
    assert reason in first
    # Sticky: neither a good program nor the release of the bad one mends it.
    cache.bind_program("forward_4", GEOMETRY, torch.float32)
    cache.release_program("forward_2")
    assert refusal(cache) == first


def test_reg_3_a_part_without_kv_binds_silently_and_is_not_counted():
    """CCELL-6: and nothing is bound again before a run (D4)."""
    cache = new_cache()
    assert cache.bind_program("vision", None, torch.bfloat16) is False
    cache.bind_program("forward_1", GEOMETRY, torch.float32)
    step(cache)


def test_pool_12_the_first_step_finds_that_no_program_stores_a_layer_and_the_error_stays():
    cache = new_cache()
    cache.bind_program("vision", None, torch.float32)
    cache.bind_program("embed", None, torch.float32)
    reason = "InvalidProgram: none of embed, vision stores K/V: all 2 layers of the cache were found nowhere"
    assert refusal(cache) == reason
    cache.bind_program("forward_1", GEOMETRY, torch.float32)
    assert refusal(cache) == reason


def test_pool_12_a_program_released_before_the_first_step_does_not_count():
    cache = new_cache()
    cache.bind_program("vision", None, torch.float32)
    cache.bind_program("forward_1", GEOMETRY, torch.float32)
    cache.release_program("forward_1")
    cache.release_program("forward_1")
    assert "none of vision stores K/V" in refusal(cache)


def test_pool_12_the_whole_is_checked_once_so_releasing_at_the_end_refuses_nothing():
    cache = new_cache()
    cache.bind_program("vision", None, torch.float32)
    cache.bind_program("forward_1", GEOMETRY, torch.float32)
    step(cache)
    cache.release_program("forward_1")
    step(cache)
