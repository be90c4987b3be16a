"""The CUDA pool on a device: it grows and shrinks behind addresses that a captured graph holds (D4)."""

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from cache.cell_cache import CellCache
from cache.geometry import CacheConfig, CacheMemoryError, Geometry, LayerGeometry, Reach
from cache.pool import CudaDriver, CudaPool, OutOfDeviceMemory

GEOMETRY = Geometry((LayerGeometry(8, 128, 128), LayerGeometry(4, 96, 64, Reach("window", 64))))


def config(capacity: int = 1 << 18) -> CacheConfig:
    return CacheConfig(capacity_cells=capacity, max_write=64, kv_dtype=torch.bfloat16, initial_cells=512)


class LimitedDriver(CudaDriver):
    """The real driver, with room for `left` more mappings."""

    left = 1 << 30

    def map(self, address: int, size: int) -> None:
        if self.left == 0:
            raise OutOfDeviceMemory("the test's limit")
        super().map(address, size)
        self.left -= 1


@pytest.fixture
def driver() -> LimitedDriver:
    return LimitedDriver(torch.device("cuda"))


@pytest.fixture
def pool(driver: LimitedDriver) -> Iterator[CudaPool]:
    with closing(CudaPool(GEOMETRY, config(), torch.device("cuda"), driver=driver, low_water_cells=0)) as made:
        yield made


def test_a_graph_captured_before_growth_reads_and_writes_rows_mapped_after_it(pool):
    pool.ensure_cells(512)
    keys = pool.keys[0]
    rows = torch.arange(4, device="cuda")
    written = torch.randn(4, 8, 128, device="cuda", dtype=torch.bfloat16)
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        keys.index_copy_(0, rows, written)
        keys.index_select(0, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        keys.index_copy_(0, rows, written)
        read = keys.index_select(0, rows)
    for cells in (4096, 100_000, 1 << 18):
        pool.ensure_cells(cells)
        assert pool.rows >= cells + 1
        rows.copy_(torch.arange(cells - 3, cells + 1))
        written.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(read, written)
        assert torch.equal(keys[cells - 3 : cells + 1], written)


def test_growth_keeps_every_byte(pool):
    pool.ensure_cells(512)
    for each in (*pool.keys, *pool.values):
        each[:513].copy_(torch.arange(513, device="cuda").view(-1, 1, 1) % 100)
    pool.ensure_cells(50_000)
    for each in (*pool.keys, *pool.values):
        assert torch.equal(each[:513, 0, 0].float(), torch.arange(513, device="cuda").float() % 100)


def test_the_background_thread_maps_while_a_graph_is_captured():
    with closing(CudaPool(GEOMETRY, config(), torch.device("cuda"), low_water_cells=512)) as pool:
        counter = torch.zeros(1, device="cuda")
        graph = torch.cuda.CUDAGraph()
        pool.ensure_cells(512)
        pool.wait_idle()
        before = pool.rows
        with torch.cuda.graph(graph):
            pool.ensure_cells(before - 1)
            counter.add_(1)
            pool.wait_idle()
        assert pool.rows > before
        graph.replay()
        torch.cuda.synchronize()
        assert counter.item() == 1


def test_trim_gives_memory_back_to_the_device(pool):
    pool.ensure_cells(512)
    torch.cuda.synchronize()
    pool.ensure_cells(1 << 18)
    free_grown = torch.cuda.mem_get_info()[0]
    grown = pool.allocated_bytes
    pool.keys[0][7].fill_(3)
    pool.trim(512)
    returned = grown - pool.allocated_bytes
    assert returned > grown / 2
    assert torch.cuda.mem_get_info()[0] - free_grown >= returned // 2
    assert bool((pool.keys[0][7] == 3).all())
    pool.ensure_cells(1 << 18)
    pool.keys[0][-1].fill_(5)
    torch.cuda.synchronize()


def test_running_out_midway_leaves_everything_as_it_was_and_a_retry_works(pool, driver):
    pool.ensure_cells(512)
    pool.values[1][:513].fill_(2)
    before = (pool.rows, pool.growth_count, pool.allocated_bytes)
    driver.left = 2
    with pytest.raises(CacheMemoryError):
        pool.ensure_cells(200_000)
    assert (pool.rows, pool.growth_count, pool.allocated_bytes) == before
    assert bool((pool.values[1][:513] == 2).all())
    driver.left = 1 << 30
    pool.ensure_cells(200_000)
    pool.values[1][200_000].fill_(4)
    torch.cuda.synchronize()


def test_close_gives_everything_back(driver):
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    pool = CudaPool(GEOMETRY, config(), torch.device("cuda"), driver=driver)
    pool.ensure_cells(1 << 18)
    assert torch.cuda.mem_get_info()[0] < free
    pool.close()
    assert torch.cuda.mem_get_info()[0] >= free - (64 << 20)


def test_steps_arrive_on_the_device_at_fixed_addresses_with_the_lists_they_read():
    cache = CellCache(GEOMETRY, config(4096), torch.device("cuda"))
    with closing(cache):
        a, b = cache.seq_new(), cache.seq_new()
        cache.declare_step([a, a, a, b])
        step = cache.prepare_step(8)
        cache.commit_step()
        addresses = (step.write_rows.data_ptr(), step.table_row.data_ptr(), step.pages.data_ptr())
        assert step.write_rows.tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
        assert step.table_row.tolist() == [a, a, a, b, b, b, b, b]
        clone = cache.seq_clone(a, 2)
        cache.declare_step([clone, a])
        step = cache.prepare_step(2)
        cache.commit_step()
        assert (step.write_rows.data_ptr(), step.table_row.data_ptr(), step.pages.data_ptr()) == addresses
        assert step.runs[Reach()].count.tolist() == [3, 4]
        for seq in (a, b, clone):
            cells = cache.cells_of(seq)
            page = step.page_table[seq, 0]
            assert step.pages[page, : len(cells)].cpu().numpy().tolist() == (cells + 1).tolist()
