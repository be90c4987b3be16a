"""The single and the draft cache on a GPU: rings in captured graphs, and blocks dropped without waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from cache.attend import attend, reference
from cache.draft_cache import DraftCache
from cache.factory import cache_factory
from cache.geometry import CacheConfig, Geometry, LayerGeometry, Reach
from cache.sequence_cache import SequenceCache
from cache.step import CellStep

CUDA = torch.device("cuda")
ALL, WINDOW, CHUNK = Reach(), Reach("window", 40), Reach("chunk", 48)
GEOMETRY = Geometry((LayerGeometry(2, 64, 64), LayerGeometry(2, 64, 64, WINDOW), LayerGeometry(1, 64, 64, CHUNK)))
DRAFT = Geometry(GEOMETRY.layers[:2])
QUERY_HEADS = 4
LONG_CYCLES = 400_000_000
"""Of the device's clock: a few tenths of a second."""
B = 8


def config(dtype: torch.dtype = torch.float32, **changes: int) -> CacheConfig:
    sizes = {"capacity_cells": 4096, "max_write": 16, "initial_cells": 64, "max_sequences": 8} | changes
    return CacheConfig(kv_dtype=dtype, **sizes)


@pytest.fixture
def drafts() -> Iterator[DraftCache]:
    with closing(DraftCache(DRAFT, config(torch.bfloat16), CUDA, B)) as cache:
        yield cache


def inputs(width: int, layer: LayerGeometry, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Query, key and value on the CPU."""
    heads = (QUERY_HEADS, layer.num_kv_heads, layer.num_kv_heads)
    dims = (layer.k_dim, layer.k_dim, layer.v_dim)
    return tuple(torch.randn(width, h, d).to(dtype) for h, d in zip(heads, dims, strict=True))


def write(step: CellStep, value: float) -> None:
    for each in (*step.pool.keys, *step.pool.values):
        each.index_fill_(0, step.write_rows, value)


def test_rings_on_the_device_equal_rings_on_the_cpu_through_growth_and_rewinds():
    torch.manual_seed(0)
    factory = cache_factory()
    with closing(factory.build("single", GEOMETRY, config(), CUDA)) as device:
        host = factory.build("single", GEOMETRY, config(), torch.device("cpu"))
        assert isinstance(host, SequenceCache)
        assert [each.shape for each in device.pool.keys] == [each.shape for each in host.pool.keys]
        for cache in (device, host):
            cache.seq_new()
        for turn in range(60):
            tokens = (16, 1, 7, 16)[turn % 4]
            if turn % 9 == 8:
                for cache in (device, host):
                    cache.rewind(0, max(host.rewind_floor, host.pos(0) - 11))
            steps = []
            for cache in (device, host):
                cache.declare_step([0] * tokens)
                steps.append(cache.prepare_step(16))
            for index, layer in enumerate(GEOMETRY.layers):
                rows = inputs(16, layer)
                mine, theirs = (
                    attend(*(each.to(cache_device) for each in rows), index, step, reach=layer.reach, scale=0.2)
                    for cache_device, step in zip(("cuda", "cpu"), steps, strict=True)
                )
                torch.testing.assert_close(mine.cpu(), theirs, atol=1e-5, rtol=1e-5)
            for cache in (device, host):
                cache.commit_step()
        assert device.metrics().growth_count > 0


def test_a_graph_captured_at_the_start_follows_the_ring_as_it_wraps():
    """RING-4."""
    torch.manual_seed(0)
    with closing(SequenceCache(GEOMETRY, config(), CUDA)) as cache:
        cache.seq_new()
        rows = [tuple(each.cuda() for each in inputs(4, layer)) for layer in GEOMETRY.layers]

        def forward(step: CellStep) -> list[torch.Tensor]:
            return [
                attend(*each, index, step, reach=layer.reach, scale=0.2)
                for index, (each, layer) in enumerate(zip(rows, GEOMETRY.layers, strict=True))
            ]

        cache.declare_step([0] * 4)
        step = cache.prepare_step(4)
        forward(step)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = forward(step)
        cache.undo_step()
        cache.seq_rm(0)
        cache.seq_new()
        for turn in range(60):
            tokens = (4, 1, 3)[turn % 3]
            cache.declare_step([0] * tokens)
            step = cache.prepare_step(4)
            for each in rows:
                for tensor in each:
                    tensor.normal_()
            graph.replay()
            cache.commit_step()
            for index, layer in enumerate(GEOMETRY.layers):
                stored = cache.pool.keys[index], cache.pool.values[index]
                mine = step.rings.get(layer.reach, step)
                masked = reference.attend_cells(rows[index][0], *stored, mine, reach=layer.reach, scale=0.2)
                torch.testing.assert_close(outs[index], masked, atol=1e-5, rtol=1e-5)
        assert cache.pos(0) > 2 * (40 + 16)


def test_preparing_a_step_over_rings_waits_for_nothing():
    with closing(SequenceCache(GEOMETRY, config(), CUDA)) as cache:
        cache.seq_new()
        cache.declare_step([0] * 4)
        cache.prepare_step(4)
        cache.commit_step()
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG_CYCLES)
        cache.declare_step([0] * 4)
        cache.prepare_step(4)
        cache.commit_step()
        assert not torch.cuda.current_stream().query()


def test_block_rows_attend_in_both_directions_in_bfloat16(drafts):
    a, b = drafts.seq_new(), drafts.seq_new()
    for rows in ([a] * 14 + [b] * 0, [b] * (2 + B) + [a] * 0, [a] * B + [b] * B, [b] * (7 + B)):
        drafts.declare_step(rows)
        step = drafts.prepare_step(16).cells
        for index, layer in enumerate(DRAFT.layers):
            query, key, value = (each.cuda() for each in inputs(16, layer, torch.bfloat16))
            out = attend(query, key, value, index, step, reach=layer.reach, scale=0.2)
            stored = step.pool.keys[index], step.pool.values[index]
            masked = reference.attend_cells(query, *stored, step, reach=layer.reach, scale=0.2)
            torch.testing.assert_close(out, masked, atol=2e-2, rtol=2e-2)
        drafts.commit_step(16)
    assert (drafts.pos(a), drafts.pos(b)) == (6, 9)


def test_a_commit_drops_the_block_without_waiting_for_the_device(drafts):
    owner = drafts.seq_new()
    drafts.declare_step([owner] * (2 + B))
    step = drafts.prepare_step(16)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG_CYCLES)
    write(step.cells, 1.0)
    drafts.commit_step(16)
    assert not torch.cuda.current_stream().query()
    assert drafts.pos(owner) == 2
    torch.cuda.synchronize()


@pytest.mark.parametrize("is_failure", [False, True], ids=["committed", "failed and recovered"])
def test_cells_that_a_slow_step_gave_back_are_written_behind_it_on_another_stream(drafts, is_failure):
    """DF-6 without its wait: an event orders the streams."""
    first, second = drafts.seq_new(), drafts.seq_new()
    slow, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(slow):
        drafts.declare_step([first] * B)
        step = drafts.prepare_step(B).cells
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG_CYCLES)
        write(step, 1.0)
        if is_failure:
            drafts.fail_step()
            assert drafts.recover() == (first,)
        else:
            drafts.commit_step(B)
    assert not slow.query()
    with torch.cuda.stream(other):
        drafts.declare_step([second] * B)
        step = drafts.prepare_step(B).cells
        write(step, 2.0)
        drafts.commit_step(B)
    torch.cuda.synchronize()
    assert step.write_rows.tolist() == list(range(1, 1 + B))
    for each in (*step.pool.keys, *step.pool.values):
        assert bool((each[1 : 1 + B] == 2.0).all())


@pytest.mark.parametrize("verb", ["recover", "clear"])
def test_df_9_after_a_failure_on_another_stream_cells_come_back_only_once_it_is_empty(drafts, verb):
    owner = drafts.seq_new()
    elsewhere = torch.cuda.Stream()
    fail_elsewhere(drafts, owner, elsewhere)
    assert drafts.free_cells == 4096 - 1 - B
    assert not elsewhere.query()
    getattr(drafts, verb)()
    assert elsewhere.query()
    assert drafts.free_cells == 4096


def test_a_stray_forward_of_a_failed_step_harms_no_other_owner(drafts):
    """It reads its rows from the tensors that the next step is written to."""
    owner, bystander = drafts.seq_new(), drafts.seq_new()
    elsewhere = torch.cuda.Stream()
    fail_elsewhere(drafts, owner, elsewhere)
    drafts.declare_step([bystander] * B)
    step = drafts.prepare_step(B).cells
    assert step.write_rows.tolist() == list(range(1 + 1 + B, 1 + 1 + 2 * B))
    write(step, 2.0)
    drafts.commit_step(B)
    torch.cuda.synchronize()
    for each in (*step.pool.keys, *step.pool.values):
        assert bool((each[1 : 2 + B] == 1.0).all())
        assert bool((each[2 + B : 2 + 2 * B] == 2.0).all())


def fail_elsewhere(drafts: DraftCache, owner: int, stream: torch.cuda.Stream) -> None:
    """A step of one context row whose forward is slow, on `stream`, and has been given up."""
    drafts.declare_step([owner] * (1 + B))
    step = drafts.prepare_step(16).cells
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
        write(step, 1.0)
    drafts.fail_step(is_ordered=False)
