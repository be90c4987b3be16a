"""One sequence with rings (SEQ-*, RING-*, CSEQ-*, BLD-1, T-SEQ): every row against attention over a plain history."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from cache.attend import attend, reference, triton_cells
from cache.cell_cache import CellCache
from cache.cells import CellTable
from cache.geometry import (
    CacheConfig,
    CacheFull,
    Geometry,
    InvalidConfig,
    InvalidPosition,
    InvalidProgram,
    InvalidStep,
    LayerGeometry,
    Reach,
    UnknownSequence,
    Unsupported,
)
from cache.sequence_cache import SequenceCache
from cache.step import CellStep
from cache.upload import HostUploads
from static_graphs.model import model_from_config
from support.tiny_models import tiny

CPU = torch.device("cpu")
ALL, WINDOW, CHUNK = Reach(), Reach("window", 4), Reach("chunk", 5)
MIXED = Geometry(
    (
        LayerGeometry(2, 4, 3),
        LayerGeometry(1, 4, 4, WINDOW),
        LayerGeometry(2, 3, 4, CHUNK),
        LayerGeometry(2, 4, 4, WINDOW),
    )
)
WINDOWED = Geometry((LayerGeometry(1, 4, 4, WINDOW),))
QUERY_HEADS = 2


class Bench:
    """A cache beside the plain history that it should be equal to.

    What was never stored is NaN. `history[layer]` is all K and V of the sequence as it stands, never overwritten.
    """

    def __init__(self, geometry: Geometry = MIXED, *, capacity: int = 64, max_write: int = 4, seed: int = 0):
        config = CacheConfig(capacity, max_write=max_write, kv_dtype=torch.float32, initial_cells=8)
        self.cache = SequenceCache(geometry, config, CPU)
        self.layers = geometry.layers
        self.random = torch.Generator().manual_seed(seed)
        for each in (*self.cache.pool.keys, *self.cache.pool.values):
            each.fill_(float("nan"))
        self.cache.seq_new()
        self.queries: list[torch.Tensor] = []  # each layer's, of the last step
        self.forget()

    def forget(self) -> None:
        self.history = [
            (torch.empty(0, layer.num_kv_heads, layer.k_dim), torch.empty(0, layer.num_kv_heads, layer.v_dim))
            for layer in self.layers
        ]

    def prepare(self, tokens: int, width: int | None = None) -> CellStep:
        self.cache.declare_step([0] * tokens)
        return self.cache.prepare_step(tokens if width is None else width)

    def run(self, tokens: int, width: int | None = None) -> list[torch.Tensor]:
        """One step through every layer; each layer's outputs of the real rows."""
        step = self.prepare(tokens, width)
        outputs = [self._layer(index, step) for index in range(len(self.layers))]
        self.cache.commit_step()
        return outputs

    def write(self, total: int) -> None:
        """Steps of at most max_write tokens, as wide as they can be."""
        while (left := total - self.cache.pos(0)) > 0:
            self.run(min(left, self.cache.config.max_write))

    def rewind(self, position: int, verb: Callable[[int, int], None] | None = None) -> None:
        (verb or self.cache.rewind)(0, position)
        self.history = [(k[:position], v[:position]) for k, v in self.history]

    def state(self) -> tuple[object, ...]:
        """All that a later call could depend on."""
        cache = self.cache
        kept = [each.nan_to_num(-7.0).tolist() for each in (*cache.pool.keys, *cache.pool.values)]
        return cache.metrics(), cache.pos(0), cache.is_live(0), cache.rewind_floor, kept

    def expected(self, layer: int, query: torch.Tensor, first: int) -> torch.Tensor:
        """Attention of rows at positions first, first + 1, ... over the history, from the meaning of the reach."""
        keys, values = (
            each.double().repeat_interleave(QUERY_HEADS // each.shape[1], 1) for each in self.history[layer]
        )
        reach = self.layers[layer].reach
        out = []
        for row, q in enumerate(query.double()):
            p = first + row
            oldest = {"all": 0, "window": p - reach.size + 1, "chunk": p - p % max(reach.size, 1)}[reach.kind]
            seen = slice(max(oldest, 0), p + 1)
            weights = torch.softmax(torch.einsum("hd,nhd->hn", q, keys[seen]), dim=1)
            out.append(torch.einsum("hn,nhd->hd", weights, values[seen]))
        return torch.stack(out).float()

    def error(self, tokens: int, width: int | None = None) -> float:
        """How far a step is from its oracle; NaN counts as infinitely far."""
        first = self.cache.pos(0)
        self.queries.clear()
        outputs = self.run(tokens, width)
        differences = [
            (out - self.expected(layer, self.queries[layer], first)).abs().max().nan_to_num(float("inf"))
            for layer, out in enumerate(outputs)
        ]
        return float(max(differences))

    def check(self, tokens: int, width: int | None = None) -> None:
        assert self.error(tokens, width) < 1e-5

    def _layer(self, index: int, step: CellStep) -> torch.Tensor:
        layer = self.layers[index]
        query = torch.randn(step.width, QUERY_HEADS, layer.k_dim, generator=self.random)
        key = torch.randn(step.width, layer.num_kv_heads, layer.k_dim, generator=self.random)
        value = torch.randn(step.width, layer.num_kv_heads, layer.v_dim, generator=self.random)
        out = attend(query, key, value, index, step, reach=layer.reach, scale=1.0)
        real = step.num_tokens
        old_k, old_v = self.history[index]
        self.history[index] = torch.cat([old_k, key[:real]]), torch.cat([old_v, value[:real]])
        self.queries.append(query[:real])
        return out[:real]


def slots_written(step: CellStep, reach: Reach) -> list[int]:
    return (step.rings[reach].write_rows[: step.num_tokens] - 1).tolist()


def slots_read(step: CellStep, reach: Reach) -> list[int]:
    """Slots that the step's rows see together, in position order."""
    ring = step.rings[reach]
    run = ring.runs[reach]
    positions = np.arange(int(run.start[0]), int(run.start[-1] + run.count[-1]))
    slots = ring.pages.shape[1]
    return (ring.pages[ring.page_table[0, positions // slots].long(), positions % slots] - 1).tolist()


def held(bench: Bench, layer: int = 0) -> list[float]:
    """The number stored in each slot of a layer, scratch left out."""
    return bench.cache.pool.keys[layer][1:, 0, 0].tolist()


def mark_positions(bench: Bench, total: int) -> None:
    """Write `total` positions into a windowed model, each position's K being its number."""
    while (done := bench.cache.pos(0)) < total:
        tokens = min(bench.cache.config.max_write, total - done)
        step = bench.prepare(tokens)
        ring = step.rings[bench.layers[0].reach]
        bench.cache.pool.keys[0][ring.write_rows] = torch.arange(done, done + tokens).float()[:, None, None]
        bench.cache.commit_step()


# -- Where things lie


@pytest.mark.parametrize(
    ("position", "tokens", "written", "read", "base"),
    [
        (0, 4, [0, 1, 2, 3], [0, 1, 2, 3], 0),
        (7, 1, [0], [4, 5, 6, 0], 4),
        (5, 4, [5, 6, 0, 1], [2, 3, 4, 5, 6, 0, 1], 2),
    ],
    ids=["start", "wrap", "wrap inside the step"],
)
def test_seq_6_a_step_writes_and_reads_these_slots(position, tokens, written, read, base):
    bench = Bench(WINDOWED)
    bench.write(position)
    step = bench.prepare(tokens)
    assert step.rings[WINDOW].pages.shape == (1, 7)
    assert slots_written(step, WINDOW) == written
    assert slots_read(step, WINDOW) == read
    assert int(step.rings[WINDOW].runs[WINDOW].start[0]) == base


def test_seq_6_a_step_wider_than_max_write_is_refused():
    bench = Bench(WINDOWED)
    before = bench.state()
    with pytest.raises(InvalidStep, match="5-token step is wider than max_write, 4"):
        bench.cache.declare_step([0] * 5)
    assert bench.state() == before


@pytest.mark.parametrize(
    ("slots", "total", "positions"),
    [(7, 8, [7, 1, 2, 3, 4, 5, 6]), (7, 3, [0, 1, 2, -4, -3, -2, -1]), (6, 20, [18, 19, 14, 15, 16, 17])],
)
@pytest.mark.parametrize("max_write", [1, 2, 3])
def test_ring_3_each_slot_holds_this_position(slots, total, positions, max_write):
    reach = Reach("window", slots + 1 - max_write)
    bench = Bench(Geometry((LayerGeometry(1, 1, 1, reach),)), max_write=max_write)
    mark_positions(bench, total)
    assert [p if p >= 0 else None for p in positions] == [None if np.isnan(p) else p for p in held(bench)]


def test_ring_1_each_slot_holds_the_latest_position_of_its_class():
    random = np.random.default_rng(0)
    for _ in range(20):
        max_write, size, total = (int(each) for each in random.integers(1, [6, 9, 40]))
        bench = Bench(Geometry((LayerGeometry(1, 1, 1, Reach("window", size)),)), max_write=max_write)
        mark_positions(bench, total)
        slots = size + max_write - 1
        formula = [j + (total - 1 - j) // slots * slots for j in range(slots)]
        assert [None if np.isnan(p) else p for p in held(bench)] == [p if p >= 0 else None for p in formula]


def test_seq_4_a_window_or_chunk_layer_stores_size_plus_max_write_minus_one_slots():
    cache = Bench(capacity=64, max_write=4).cache
    assert [each.shape[0] - 1 for each in cache.pool.keys] == [64, 7, 8, 7]
    assert [each.shape[0] - 1 for each in cache.pool.values] == [64, 7, 8, 7]
    assert [tuple(each.shape[1:]) for each in cache.pool.keys] == [(2, 4), (1, 4), (2, 3), (2, 4)]
    assert [tuple(each.shape[1:]) for each in cache.pool.values] == [(2, 3), (1, 4), (2, 4), (2, 4)]


def test_a_layer_whose_ring_would_hold_the_whole_capacity_stays_flat_and_grows():
    bench = Bench(capacity=8, max_write=4)
    assert [each.shape[0] - 1 for each in bench.cache.pool.keys] == [8, 7, 8, 7]
    assert set(bench.prepare(1).rings) == {WINDOW}
    bench.cache.commit_step()
    bench.forget()
    bench.cache.seq_rm(0)
    bench.cache.seq_new()
    for _ in range(4):
        bench.check(2)


def test_padding_writes_every_layers_scratch_row_and_reads_something_that_the_last_real_row_reads():
    bench = Bench(max_write=8)
    bench.write(6)
    step = bench.prepare(3, width=8)
    for each in (step, *step.rings.values()):
        assert each.write_rows[3:].tolist() == [0] * 5
        assert (each.write_rows[:3] > 0).all()
        for run in each.runs.values():
            assert (run.count[3:] > 0).all()
            assert (run.start[3:] >= run.start[2]).all()
            assert (run.start[3:] + run.count[3:] == run.start[2] + run.count[2]).all()


def test_d5_a_steps_tensors_stay_at_their_addresses():
    """RING-4: a graph replays against the positions it finds there."""
    bench = Bench()
    bench.write(30)
    addresses = []
    for tokens in (1, 4):
        step = bench.prepare(tokens, 4)
        bench.cache.commit_step()
        each = (step, *step.rings.values())
        addresses.append([t.data_ptr() for s in each for t in (s.write_rows, s.table_row, s.page_table, s.pages)])
        addresses[-1] += [run.start.data_ptr() for s in each for run in s.runs.values()]
    assert addresses[0] == addresses[1]


def test_a_cell_caches_step_has_no_rings():
    """RING-5."""
    cache = CellCache(MIXED, CacheConfig(16, max_write=4, kv_dtype=torch.float32), CPU)
    cache.declare_step([cache.seq_new()])
    assert cache.prepare_step(1).rings == {}


# -- Attention


@pytest.mark.parametrize("geometry", [MIXED, WINDOWED], ids=["flat, window and chunk", "window only"])
@pytest.mark.parametrize("seed", range(4))
def test_rows_equal_attention_over_the_plain_history_whatever_the_chunks_and_rewinds(geometry, seed):
    """SEQ-1, SEQ-3, SEQ-5, RING-2: one length for all layers."""
    random = np.random.default_rng(seed)
    bench = Bench(geometry, capacity=90, max_write=int(random.integers(1, 20)), seed=seed)
    rewinds = 0
    for _ in range(60):
        length, max_write = bench.cache.pos(0), bench.cache.config.max_write
        back = int(random.integers(0, max_write + 2))
        if random.random() < 0.3 and back <= length:
            try:
                bench.rewind(length - back)
                rewinds += back > 0
            except InvalidPosition:
                assert bench.cache.pos(0) == length
        tokens = min(int(random.integers(1, max_write + 1)), bench.cache.free_cells)
        if tokens == 0:
            bench.cache.clear()
            bench.cache.seq_new()
            bench.forget()
            continue
        bench.check(tokens, int(random.integers(tokens, max_write + 1)))
    assert rewinds > 0


def test_the_kernels_read_a_ring_as_the_mask_form_does():
    bench = Bench(max_write=6)
    bench.write(32)
    step = bench.prepare(5, width=6)
    for index, layer in enumerate(bench.layers):
        mine = step.rings.get(layer.reach, step)
        shape = (step.width, layer.num_kv_heads)
        key, value = torch.randn(*shape, layer.k_dim), torch.randn(*shape, layer.v_dim)
        query = torch.randn(step.width, QUERY_HEADS, layer.k_dim)
        served = attend(query, key, value, index, step, reach=layer.reach, scale=0.5)
        stored = bench.cache.pool.keys[index], bench.cache.pool.values[index]
        masked = reference.attend_cells(query, *stored, mine, reach=layer.reach, scale=0.5)
        kernel = triton_cells.attend_cells(query, *stored, mine, reach=layer.reach, scale=0.5)
        torch.testing.assert_close(served, masked, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(kernel, masked, atol=1e-5, rtol=1e-5)


def test_ref_6_a_window_that_matches_does_not_make_the_history_match():
    benches = [Bench(seed=0), Bench(seed=1)]
    for bench in benches:
        bench.write(8)
        bench.random.manual_seed(9)
        bench.write(12)
    flat, window, *_ = zip(*(bench.run(1) for bench in benches), strict=True)
    assert torch.equal(*window)
    assert not torch.allclose(*flat)


# -- Rewinding


@pytest.mark.parametrize("max_write", [1, 3, 5])
def test_seq_9_the_floor_is_the_high_water_less_max_write(max_write):
    bench = Bench(WINDOWED, max_write=max_write)
    bench.write(21)
    before = bench.state()
    with pytest.raises(InvalidPosition, match=f"cannot rewind to {20 - max_write}: 21 positions were written"):
        bench.rewind(20 - max_write)
    assert bench.state() == before
    bench.rewind(21 - max_write)
    assert bench.cache.pos(0) == 21 - max_write


@pytest.mark.parametrize("max_write", [1, 3, 5])
def test_t_seq_a_branch_at_the_floor_equals_a_cold_run_in_other_chunks(max_write):
    bench = Bench(max_write=max_write)
    bench.write(21)
    bench.rewind(21 - max_write)
    for tokens in (1, max_write, max_write):
        bench.check(tokens)
    cold = Bench(max_write=7, seed=5)
    total = bench.cache.pos(0)
    replayed = _replay(cold, bench, total)
    probe = torch.randn(1, QUERY_HEADS, 4)
    torch.testing.assert_close(_probe(bench, 1, probe), _probe(replayed, 1, probe), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(_probe(bench, 0, probe), _probe(replayed, 0, probe), atol=1e-6, rtol=1e-6)


def _replay(cold: Bench, source: Bench, total: int) -> Bench:
    """Store the source's history into `cold`, in cold's own chunks."""
    while (done := cold.cache.pos(0)) < total:
        tokens = min(cold.cache.config.max_write, total - done)
        step = cold.prepare(tokens)
        for index, layer in enumerate(cold.layers):
            key, value = (each[done : done + tokens] for each in source.history[index])
            query = torch.zeros(tokens, QUERY_HEADS, layer.k_dim)
            attend(query, key, value, index, step, reach=layer.reach, scale=1.0)
        cold.cache.commit_step()
    return cold


def _probe(bench: Bench, index: int, query: torch.Tensor) -> torch.Tensor:
    """What one more row, storing zeros, sees in a layer; taken back afterwards."""
    layer = bench.layers[index]
    step = bench.prepare(1)
    key, value = (torch.zeros(1, layer.num_kv_heads, dim) for dim in (layer.k_dim, layer.v_dim))
    out = attend(query, key, value, index, step, reach=layer.reach, scale=1.0)
    bench.cache.undo_step()
    return out


@pytest.mark.parametrize("max_write", [1, 3, 5])
def test_t_seq_without_the_check_one_below_the_floor_really_reads_stale_rows(max_write):
    """The oracle's own test: what SequenceCache.rewind refuses, the verb it guards lets through."""
    bench = Bench(WINDOWED, max_write=max_write)
    bench.write(21)
    bench.rewind(20 - max_write, lambda seq, position: CellCache.rewind(bench.cache, seq, position))
    assert bench.error(1) > 1e-2


@pytest.mark.parametrize("reach", [WINDOW, Reach("window", 2), CHUNK, Reach("chunk", 2)], ids=str)
def test_seq_9_what_is_accepted_reads_right_and_what_a_window_is_refused_would_not(reach):
    geometry = Geometry((LayerGeometry(1, 4, 4, reach),))
    for max_write in (1, 2, 4):
        slots = reach.size + max_write - 1
        for total in (slots - 1, slots, slots + 1, 2 * slots + 3):
            for position in range(total):
                bench = Bench(geometry, max_write=max_write)
                bench.write(total)
                try:
                    bench.rewind(position)
                except InvalidPosition:
                    assert total > slots
                    if position == 0 or reach.kind == "chunk":
                        continue  # a row that sees only itself would be right
                    bench.rewind(position, lambda seq, p, cache=bench.cache: CellCache.rewind(cache, seq, p))
                    assert bench.error(1) > 1e-3
                else:
                    for _ in range(min(3, max_write)):
                        bench.check(max_write)


def test_seq_9_until_the_ring_has_wrapped_nothing_is_lost_and_position_0_is_fine():
    bench = Bench(WINDOWED)
    bench.write(7)
    bench.rewind(0)
    bench.check(4)
    bench.write(8)
    with pytest.raises(InvalidPosition, match=r"8 positions were written.*seen from 4 on"):
        bench.rewind(0)
    bench.cache.seq_rm(0)
    bench.cache.seq_new()
    bench.forget()
    bench.check(4)


def test_seq_9_rewinding_does_not_lower_the_high_water():
    bench = Bench(WINDOWED)
    bench.write(21)
    bench.rewind(18)
    for refused in (16, 14):
        with pytest.raises(InvalidPosition):
            bench.rewind(refused)
    bench.rewind(17)
    bench.check(1)
    with pytest.raises(InvalidPosition, match="21 positions were written"):
        bench.rewind(16)


def test_seq_8_a_flat_model_rewinds_to_0_and_no_model_grows_by_it():
    bench = Bench(Geometry((LayerGeometry(1, 4, 4),)))
    bench.write(40)
    bench.rewind(0)
    bench.check(3)
    for position in (4, -1):
        with pytest.raises(InvalidPosition, match="holds 3 positions"):
            bench.rewind(position)
    bench.rewind(3)


def test_seq_10_removing_or_clearing_starts_again_in_the_same_storage():
    bench = Bench()
    addresses = [each.data_ptr() for each in (*bench.cache.pool.keys, *bench.cache.pool.values)]
    bench.write(40)
    before = bench.cache.metrics()
    for restart in (lambda: bench.cache.seq_rm(0), bench.cache.clear):
        restart()
        assert bench.cache.seq_new() == 0
        bench.forget()
        assert bench.cache.pos(0) == 0
        bench.write(6)
        bench.rewind(0)
        bench.check(2)
    after = bench.cache.metrics()
    assert (after.rows, after.allocated_bytes) == (before.rows, before.allocated_bytes)
    assert addresses == [each.data_ptr() for each in (*bench.cache.pool.keys, *bench.cache.pool.values)]


# -- Admission, growth, protocol


def test_seq_2_a_step_past_the_capacity_is_refused_whatever_the_rings_would_take():
    """SEQ-7, CSEQ-1."""
    bench = Bench(capacity=10)
    bench.write(8)
    before = bench.state()
    with pytest.raises(CacheFull, match="a 3-token step does not fit: 2 cells free of 10"):
        bench.cache.declare_step([0] * 3)
    assert bench.state() == before
    bench.check(2)
    assert bench.cache.free_cells == 0


def test_cseq_2_only_flat_layers_grow():
    bench = Bench(capacity=64)
    ring_bytes = 4 * (8 * (4 + 4) + 9 * 2 * (3 + 4) + 8 * 2 * (4 + 4))
    flat_cell = 4 * 2 * (4 + 3)
    assert bench.cache.metrics().allocated_bytes == ring_bytes
    for total, rows, growths in ((8, 9, 0), (9, 17, 1), (40, 65, 3)):
        bench.write(total)
        metrics = bench.cache.metrics()
        assert (metrics.rows, metrics.growth_count, metrics.logical_length) == (rows, growths, total)
        assert metrics.allocated_bytes == ring_bytes + rows * flat_cell
    bench.rewind(40)
    bench.cache.clear()
    bench.cache.trim()
    assert bench.cache.metrics().rows == 9


def test_a_model_of_rings_alone_has_all_its_memory_from_the_start():
    bench = Bench(WINDOWED, capacity=1000)
    before = bench.cache.metrics()
    bench.write(200)
    bench.cache.trim()
    after = bench.cache.metrics()
    assert (after.rows, after.growth_count, after.allocated_bytes) == (8, 0, before.allocated_bytes)


def test_undo_gives_the_positions_back_but_not_what_may_have_been_overwritten():
    bench = Bench(WINDOWED)
    bench.write(20)
    bench.prepare(4)
    bench.cache.undo_step()
    assert (bench.cache.pos(0), bench.cache.free_cells) == (20, 44)
    with pytest.raises(InvalidPosition, match="24 positions were written"):
        bench.rewind(19)
    bench.check(4)


class FailingUploads(HostUploads):
    failures = 0

    def send(self) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the copy failed")


def test_a_step_that_was_never_prepared_moves_no_floor():
    config = CacheConfig(64, max_write=4, kv_dtype=torch.float32)
    table = CellTable(64, 1)
    uploads = FailingUploads(table, WINDOWED.reaches, 4)
    bench = Bench(WINDOWED)
    bench.cache = SequenceCache(WINDOWED, config, CPU, uploads=uploads, table=table)
    bench.cache.seq_new()
    bench.write(20)
    before = bench.state()
    bench.cache.declare_step([0] * 4)
    uploads.failures = 1
    with pytest.raises(RuntimeError, match="copy failed"):
        bench.cache.prepare_step(4)
    assert bench.state() == before
    bench.cache.prepare_step(4)
    bench.cache.undo_step()
    bench.rewind(20)


def test_there_is_one_sequence_and_it_cannot_be_cloned():
    bench = Bench()
    bench.write(5)
    before = bench.state()
    assert bench.cache.max_sequences == 1
    with pytest.raises(CacheFull, match="all 1 sequence ids"):
        bench.cache.seq_new()
    with pytest.raises(Unsupported, match="cannot clone"):
        bench.cache.seq_clone(0, 3)
    with pytest.raises(UnknownSequence):
        bench.cache.seq_clone(1)
    for unknown in (1, -1):
        with pytest.raises(UnknownSequence):
            bench.cache.declare_step([0, unknown])
        with pytest.raises(UnknownSequence):
            bench.cache.rewind(unknown, 0)
        with pytest.raises(UnknownSequence):
            bench.cache.seq_rm(unknown)
    assert bench.state() == before


def test_the_step_protocol_is_the_cell_caches():
    """SEQ-1, CSEQ-1."""
    bench = Bench()
    with pytest.raises(InvalidStep, match="no step was declared"):
        bench.cache.prepare_step(1)
    bench.prepare(2)
    with pytest.raises(InvalidStep, match="committed or undone"):
        bench.cache.declare_step([0])
    bench.cache.rewind(0, 1)
    with pytest.raises(InvalidStep, match="rewind changed the table"):
        bench.cache.commit_step()
    bench.cache.undo_step()
    assert bench.cache.pos(0) == 0


def test_pool_3_a_program_for_other_layers_is_refused_at_every_step():
    bench = Bench()
    with pytest.raises(InvalidProgram):
        bench.cache.bind_program("forward_1", WINDOWED, torch.float32)
    bench.cache.declare_step([0])
    with pytest.raises(InvalidProgram, match="forward_1 has 1 layers, the cache 4"):
        bench.cache.prepare_step(1)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (CacheConfig(8, max_write=10, kv_dtype=torch.float32), "max_write is 10"),
        (CacheConfig(8, max_write=4, kv_dtype=torch.complex64), "stored as torch.complex64"),
    ],
    ids=["a step wider than the pool", "no scalar dtype"],
)
def test_bld_1_sizes_that_cannot_be_are_refused_before_anything_is_built(config, reason):
    with pytest.raises(InvalidConfig, match=reason):
        SequenceCache(MIXED, config, CPU)


# -- Whole models


@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text", "gpt_oss", "llama4_text"])
def test_a_model_of_windows_or_chunks_runs_on_rings_as_it_runs_on_cells(model_type):
    model = model_from_config(tiny(model_type), seed=3)
    config = CacheConfig(80, max_write=7, kv_dtype=torch.float32)
    rings, cells = SequenceCache(model.geometry, config, CPU), CellCache(model.geometry, config, CPU)
    assert min(each.shape[0] for each in rings.pool.keys) < 20
    tokens = torch.randint(3, 60, (80,), generator=torch.Generator().manual_seed(0))

    def run(cache: CellCache, count: int, width: int) -> torch.Tensor:
        first = cache.pos(0)
        cache.declare_step([0] * count)
        step = cache.prepare_step(width)
        padding = (0, width - count)
        inputs = torch.nn.functional.pad(tokens[first : first + count], padding)
        positions = torch.nn.functional.pad(torch.arange(first, first + count), padding)
        with torch.inference_mode():
            logits = model.logits(model.hidden(inputs, positions, step))
        cache.commit_step()
        return logits[:count]

    for cache in (rings, cells):
        cache.seq_new()
    for count in (7, 7, 1, 1, 5, 7, 7, 3, 7, 1):
        torch.testing.assert_close(run(rings, count, 7), run(cells, count, 7), atol=1e-4, rtol=1e-4)
    for cache in (rings, cells):
        cache.rewind(0, max(rings.rewind_floor, 40))
    for count in (1, 6, 7):
        torch.testing.assert_close(run(rings, count, count), run(cells, count, count), atol=1e-4, rtol=1e-4)
