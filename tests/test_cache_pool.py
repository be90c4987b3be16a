"""The pool grows in place or not at all (POOL-*, D4): the CPU's accounting, CUDA's transactions on a fake driver."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import torch

from cache.geometry import CacheConfig, CacheMemoryError, Geometry, InvalidConfig, LayerGeometry
from cache.pool import CpuPool, CudaPool, Pool
from support.fake_driver import FakeDriver

# Rows of 24, 8, 48 and 16 bytes: no two sides hold the same number of rows in a granule.
UNEVEN = Geometry((LayerGeometry(2, 3, 1), LayerGeometry(4, 3, 1)))
DEVICE = torch.device("cpu")


def config(capacity: int = 4096, **options: object) -> CacheConfig:
    fields = dict(max_write=8, kv_dtype=torch.float32, initial_cells=16) | options
    return CacheConfig(capacity_cells=capacity, **fields)


@contextmanager
def cuda_pool(driver: FakeDriver, *, low_water: int = 0, capacity: int = 4096) -> Iterator[CudaPool]:
    pool = CudaPool(
        UNEVEN, config(capacity), DEVICE, driver=driver, low_water_cells=low_water, segment_bytes=4 * driver.granule
    )
    with closing(pool):
        yield pool


def state_of(pool: Pool, driver: FakeDriver) -> tuple[object, ...]:
    return pool.rows, pool.growth_count, pool.allocated_bytes, dict(driver.mapped)


# -- Both


@pytest.fixture(params=["cpu", "cuda on a fake driver"])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    if request.param == "cpu":
        yield CpuPool(UNEVEN, config())
    else:
        with cuda_pool(FakeDriver()) as made:
            yield made


def test_d4_addresses_and_shapes_are_the_same_before_and_after_growth(pool):
    """POOL-1, POOL-4: K and V apart; nothing is bound anew, because nothing moves."""
    tensors = [*pool.keys, *pool.values]
    assert [tuple(each.shape) for each in tensors] == [(4097, 2, 3), (4097, 4, 3), (4097, 2, 1), (4097, 4, 1)]
    before = [each.data_ptr() for each in tensors]
    for cells in (1, 16, 17, 500, 4096):
        pool.ensure_cells(cells)
    assert [each.data_ptr() for each in (*pool.keys, *pool.values)] == before
    assert pool.rows == 4097


def test_pool_5_nothing_is_backed_before_the_first_step_then_the_initial_cells(pool):
    assert pool.rows == 0
    pool.ensure_cells(3)
    assert (pool.rows, pool.growth_count) == (17, 0)


def test_pool_7_growth_doubles_or_takes_what_is_needed_up_to_the_capacity(pool):
    rows = []
    for cells in (16, 17, 200, 2500, 2500):
        pool.ensure_cells(cells)
        rows.append(pool.rows)
    assert rows == [17, 33, 201, 2501, 2501]
    pool.ensure_cells(2502)
    assert (pool.rows, pool.growth_count) == (4097, 4)


def test_trimmed_memory_comes_back_and_is_had_again(pool):
    pool.ensure_cells(4096)
    full = pool.allocated_bytes
    pool.trim(100)
    assert 101 <= pool.rows < 1000
    assert pool.allocated_bytes < full / 2
    pool.ensure_cells(4096)
    assert (pool.rows, pool.allocated_bytes) == (4097, full)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_bld_2_only_dense_scalar_dtypes_are_stored(dtype):
    with pytest.raises(InvalidConfig, match="choose one of uint8, int8"):
        CpuPool(UNEVEN, config(kv_dtype=dtype))
    driver = FakeDriver()
    with pytest.raises(InvalidConfig):
        CudaPool(UNEVEN, config(kv_dtype=dtype), DEVICE, driver=driver)
    assert not driver.reserved


# -- CPU


def test_pool_10_from_512_to_65536_cells_takes_7_growths():
    pool = CpuPool(Geometry((LayerGeometry(1, 1, 1),)), config(65536, initial_cells=512))
    for cells in range(1, 65537, 128):
        pool.ensure_cells(cells)
    pool.ensure_cells(65536)
    assert (pool.growth_count, pool.rows) == (7, 65537)
    assert pool.allocated_bytes == 65537 * 2 * 4


def test_more_cells_than_the_host_has_memory_for_is_a_named_refusal():
    with pytest.raises(CacheMemoryError, match="cannot reserve"):
        CpuPool(Geometry((LayerGeometry(1 << 24, 16, 16),)), config(1 << 30))


# -- CUDA, on a fake driver


def test_the_scratch_rows_are_mapped_and_finite_from_the_start():
    driver = FakeDriver()
    with cuda_pool(driver) as pool:
        assert len(driver.mapped) == 4
        assert all(not each[0].any() for each in (*pool.keys, *pool.values))


def test_growth_maps_only_what_is_missing_in_granules():
    driver = FakeDriver()
    with cuda_pool(driver) as pool:
        pool.ensure_cells(1000)
        assert driver.mapped_bytes == pool.allocated_bytes
        rows_bytes = [24, 8, 48, 16]
        assert driver.mapped_bytes == sum(-(-1001 * row // 64) * 64 for row in rows_bytes)
        assert max(driver.mapped.values()) == 4 * 64


@pytest.mark.parametrize("spare_granules", range(0, 60, 7))
def test_x_3_a_growth_that_runs_out_midway_leaves_everything_as_it_was_and_a_retry_works(spare_granules):
    driver = FakeDriver()
    with cuda_pool(driver) as pool:
        pool.ensure_cells(16)
        before = state_of(pool, driver)
        driver.budget = driver.mapped_bytes + 64 * spare_granules
        with pytest.raises(CacheMemoryError, match="from 16 to 100 cells"):
            pool.ensure_cells(100)
        assert state_of(pool, driver) == before
        driver.budget = 1 << 40
        pool.ensure_cells(100)
        assert pool.rows == 101


def test_when_memory_is_short_the_caches_of_others_are_emptied_and_the_growth_tried_once_more():
    driver = FakeDriver(budget=100_000)
    with cuda_pool(driver) as pool:
        pool.ensure_cells(16)
        driver.cached = driver.budget - driver.mapped_bytes
        pool.ensure_cells(100)
        assert (pool.rows, driver.released_caches) == (101, 1)


def test_when_a_doubling_does_not_fit_the_step_gets_what_it_needs():
    driver = FakeDriver()
    with cuda_pool(driver) as pool:
        pool.ensure_cells(600)
        driver.budget = driver.mapped_bytes + 10 * 96 + 4 * 64
        pool.ensure_cells(605)
        assert pool.rows == 606


def test_more_than_the_capacity_is_refused():
    driver = FakeDriver()
    with cuda_pool(driver) as pool, pytest.raises(CacheMemoryError, match="4097 cells do not fit a pool of 4096"):
        pool.ensure_cells(4097)


def test_a_pool_that_cannot_back_its_first_rows_leaves_nothing_behind():
    driver = FakeDriver(budget=3 * 64)
    with pytest.raises(CacheMemoryError, match="first rows"):
        CudaPool(UNEVEN, config(), DEVICE, driver=driver)
    assert not driver.mapped
    assert not driver.reserved


def test_close_gives_back_every_byte_and_address():
    driver = FakeDriver()
    with cuda_pool(driver, low_water=100) as pool:
        pool.ensure_cells(1000)
    assert not driver.mapped
    assert not driver.reserved
    assert driver.synchronized == 1
    pool.close()


def test_trim_waits_for_the_device_before_it_unmaps():
    driver = FakeDriver()
    with cuda_pool(driver) as pool:
        pool.ensure_cells(2000)
        pool.trim(2000)
        assert driver.synchronized == 0
        pool.trim(10)
        assert driver.synchronized == 1


def test_the_background_thread_maps_ahead_of_the_low_water_mark():
    driver = FakeDriver()
    with cuda_pool(driver, low_water=8) as pool:
        pool.ensure_cells(8)
        pool.wait_idle()
        assert pool.rows == 17
        pool.ensure_cells(9)
        pool.wait_idle()
        assert (pool.rows, pool.growth_count) == (33, 1)
        driver.mapping_threads.clear()
        for cells in range(10, 2000):
            pool.ensure_cells(cells)
            pool.wait_idle()
        assert driver.mapping_threads
        assert threading.get_ident() not in driver.mapping_threads
        assert pool.growth_count == 7


def test_a_shortage_ahead_of_need_is_nobodys_failure():
    driver = FakeDriver()
    with cuda_pool(driver, low_water=8) as pool:
        pool.ensure_cells(8)
        driver.budget = driver.mapped_bytes
        for cells in (9, 10, 11):
            pool.ensure_cells(cells)
            pool.wait_idle()
        # One refused try, not one a step.
        assert driver.mapping_threads[-1] != threading.get_ident()
        tries = len(driver.mapping_threads)
        pool.ensure_cells(12)
        pool.wait_idle()
        assert len(driver.mapping_threads) == tries
        with pytest.raises(CacheMemoryError):
            pool.ensure_cells(17)
        driver.budget = 1 << 40
        pool.ensure_cells(17)
        assert pool.rows >= 18


def test_a_driver_fault_in_the_background_meets_the_next_step():
    driver = FakeDriver()
    with cuda_pool(driver, low_water=8) as pool:
        pool.ensure_cells(8)
        driver.fault = RuntimeError("cuMemMap failed")
        pool.ensure_cells(9)
        pool.wait_idle()
        with pytest.raises(RuntimeError, match="cuMemMap failed"):
            pool.ensure_cells(10)


def test_a_trim_in_the_middle_of_mapping_ahead_withdraws_the_rest():
    driver = FakeDriver()
    with cuda_pool(driver, low_water=2000) as pool:
        trimming = threading.Thread(target=pool.trim, args=(16,))

        def trim_now() -> None:
            trimming.start()
            pool.wait_idle()

        pool.ensure_cells(16)
        pool.wait_idle()
        assert pool.rows >= 2017
        pool.trim(16)
        driver.on_next_map = trim_now
        pool.ensure_cells(16)
        pool.wait_idle()
        trimming.join()
        assert pool.rows < 100


def test_close_in_the_middle_of_mapping_ahead_leaves_nothing_behind():
    driver = FakeDriver()
    with cuda_pool(driver, low_water=4000) as pool:
        pool.ensure_cells(16)
    assert not driver.mapped
    assert not driver.reserved
