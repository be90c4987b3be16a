"""The cell cache's step protocol, padding and atomicity (CELL-13..25, CCELL-*, PAD-*, X-1..X-6)."""

import json
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from cache.attend import attend
from cache.bench import main as bench_main
from cache.cell_cache import CellCache
from cache.cells import CellTable
from cache.geometry import (
    CacheConfig,
    CacheError,
    CacheFull,
    CacheMemoryError,
    Geometry,
    InvalidConfig,
    InvalidProgram,
    InvalidStep,
    LayerGeometry,
    Reach,
    UnknownSequence,
)
from cache.pool import CpuPool
from cache.step import CellStep
from cache.upload import HostUploads
from support.poison import poison_free_cells
from support.slow_cells import random_step, state_of

ALL = Reach()
WINDOW = Reach("window", 3)
GEOMETRY = Geometry((LayerGeometry(2, 4, 4), LayerGeometry(2, 4, 4, WINDOW), LayerGeometry(2, 4, 4, WINDOW)))
CPU = torch.device("cpu")


class WatchedPool(CpuPool):
    """Remembers what it was asked for; refuses the next growth on demand."""

    def __init__(self, geometry: Geometry, config: CacheConfig):
        super().__init__(geometry, config)
        self.asked: list[int] = []
        self.refusals = 0

    def ensure_cells(self, cells: int) -> None:
        self.asked.append(cells)
        if self.refusals:
            self.refusals -= 1
            raise CacheMemoryError("no memory")
        super().ensure_cells(cells)


class FailingUploads(HostUploads):
    """Fails the next sends on demand."""

    failures = 0

    def send(self) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the copy failed")


class Bench:
    """A cache whose parts are in reach."""

    def __init__(self, *lengths: int, capacity: int = 16, max_write: int = 8, max_sequences: int = 4):
        config = CacheConfig(
            capacity, max_write=max_write, kv_dtype=torch.float32, initial_cells=4, max_sequences=max_sequences
        )
        self.table = CellTable(capacity, max_sequences)
        self.pool = WatchedPool(GEOMETRY, config)
        self.uploads = FailingUploads(self.table, GEOMETRY.reaches, max_write)
        self.cache = CellCache(GEOMETRY, config, CPU, pool=self.pool, uploads=self.uploads, table=self.table)
        for length in lengths:
            seq = self.cache.seq_new()
            if length:
                self.run([seq] * length)

    def run(self, seq_ids: list[int], width: int | None = None) -> CellStep:
        self.cache.declare_step(seq_ids)
        step = self.cache.prepare_step(len(seq_ids) if width is None else width)
        self.cache.commit_step()
        return step

    def state(self) -> tuple[object, ...]:
        return state_of(self.table), self.pool.rows, self.pool.growth_count


def lists_of(step: CellStep, seq: int, length: int) -> list[int]:
    """Pool rows of a sequence as a forward finds them."""
    page_cells = step.pages.shape[1]
    return [int(step.pages[step.page_table[seq, p // page_cells], p % page_cells]) for p in range(length)]


# -- What a step says


def test_x_1_padding_writes_the_scratch_row_and_reads_the_last_real_rows_own_cell():
    """CELL-23: what a step says."""
    bench = Bench(2)
    step = bench.run([0, 0, 0], width=8)
    assert step.write_rows.tolist() == [3, 4, 5, 0, 0, 0, 0, 0]
    assert step.table_row.tolist() == [0] * 8
    assert step.runs[ALL].start.tolist() == [0, 0, 0, 4, 4, 4, 4, 4]
    assert step.runs[ALL].count.tolist() == [3, 4, 5, 1, 1, 1, 1, 1]
    assert step.runs[WINDOW].start.tolist() == [0, 1, 2, 4, 4, 4, 4, 4]
    assert step.runs[WINDOW].count.tolist() == [3, 3, 3, 1, 1, 1, 1, 1]
    assert (step.num_tokens, step.width, step.read_len) == (3, 8, 5)


def test_x_1_a_narrow_step_after_a_wide_one_rewrites_every_entry():
    bench = Bench(0, 0)
    bench.run([0] * 8, width=8)
    step = bench.run([1], width=8)
    assert step.write_rows.tolist() == [9] + [0] * 7
    assert step.table_row.tolist() == [1] * 8
    assert step.runs[ALL].count.tolist() == [1] * 8
    assert step.runs[WINDOW].start.tolist() == [0] * 8


def test_x_1_a_padded_step_leaves_a_neighbours_bytes_alone():
    bench = Bench(5, 0)
    for each in (*bench.pool.keys, *bench.pool.values):
        each.normal_()
    before = [each[1:6].clone() for each in (*bench.pool.keys, *bench.pool.values)]
    step = bench.run([1, 1], width=8)
    for each in (*step.pool.keys, *step.pool.values):
        each[step.write_rows] = float("nan")
    assert all(
        torch.equal(kept, each[1:6]) for kept, each in zip(before, (*bench.pool.keys, *bench.pool.values), strict=True)
    )


def test_x_2_filling_the_pool_never_hands_out_the_scratch_row():
    """PAD-1: the scratch row is row 0 and never moves, where the rule has the last one; the design wins (D4)."""
    bench = Bench(0, 0)
    rows = [row for turn in range(4) for row in bench.run([turn % 2] * 4).write_rows.tolist()]
    assert rows == list(range(1, 17))
    with pytest.raises(CacheFull):
        bench.cache.declare_step([0])
    assert bench.pool.rows == 17


def test_pad_1_the_scratch_row_stays_row_0_through_growth_and_no_list_names_it():
    """The rule's scratch row is the last one and moves; the design's is row 0 and does not (D4)."""
    bench = Bench(0, 0)
    for _ in range(4):
        step = bench.run([0, 1], width=8)
        assert step.write_rows[2:].tolist() == [0] * 6
        assert 0 not in lists_of(step, 0, bench.cache.pos(0)) + lists_of(step, 1, bench.cache.pos(1))
    assert bench.pool.growth_count > 0


def test_pad_2_padding_claims_no_cell_and_no_position():
    bench = Bench(3, 1)
    bench.run([1], width=8)
    assert (bench.cache.free_cells, bench.cache.pos(0), bench.cache.pos(1)) == (16 - 5, 3, 2)


@pytest.mark.parametrize("narrow", range(1, 8))
def test_pad_3_every_entry_is_rewritten_whatever_the_step_before_left(narrow):
    bench = Bench(0, 0)
    bench.run([0] * 8, width=8)
    step = bench.run([1] * narrow, width=8)
    assert step.write_rows.tolist() == [9 + row for row in range(narrow)] + [0] * (8 - narrow)
    assert step.table_row.tolist() == [1] * 8


def test_pad_4_a_padding_row_reads_the_last_cell_that_the_last_real_row_reads_and_never_nothing():
    bench = Bench(5, 2)
    step = bench.run([0, 1], width=6)
    for run in step.runs.values():
        assert run.start[2:].tolist() == [int(run.start[1] + run.count[1]) - 1] * 4
        assert run.count[2:].tolist() == [1] * 4
    assert step.table_row[2:].tolist() == [1] * 4


def test_pad_5_a_step_reads_below_read_len_only_whatever_lies_behind_it():
    bench = Bench(6, 2)
    bench.cache.seq_rm(0)  # its cells 0 to 5 stay where they are
    step = bench.run([1], width=4)
    assert step.read_len == max(int(run.count.max()) for run in step.runs.values()) == 3


def test_a_forward_finds_the_rows_of_each_sequence_in_position_order():
    bench = Bench(3, 2, 0)
    bench.cache.rewind(0, 1)
    step = bench.run([2, 0, 1, 0])
    assert lists_of(step, 0, 3) == [1, 3, 7]
    assert lists_of(step, 1, 3) == [4, 5, 6]
    assert lists_of(step, 2, 1) == [2]


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_step_says_whether_its_rows_may_depend_on_each_other(batch_invariant: bool) -> None:
    config = CacheConfig(16, max_write=4, kv_dtype=torch.float32, batch_invariant=batch_invariant)
    cache = CellCache(GEOMETRY, config, CPU)
    cache.declare_step([cache.seq_new()])
    assert cache.prepare_step(4).batch_invariant is batch_invariant


def test_on_the_cpu_a_steps_tensors_are_one_memory_with_the_table():
    bench = Bench(0)
    first = bench.run([0])
    second = bench.run([0])
    assert first.pages.data_ptr() == bench.table.pages.ctypes.data
    assert first.write_rows.data_ptr() == second.write_rows.data_ptr()


def test_x_4_each_reach_has_one_run_and_all_layers_one_placement():
    """CELL-19, CELL-24: no layer claims cells of its own. Runs, not masks (D2)."""
    bench = Bench(0)
    step = bench.run([0, 0, 0, 0])
    assert set(step.runs) == {ALL, WINDOW}
    assert bench.cache.free_cells == 12
    assert step.runs[ALL].count.tolist() == [1, 2, 3, 4]
    assert step.runs[WINDOW].count.tolist() == [1, 2, 3, 3]


# -- Growth


def test_x_3_a_step_asks_for_no_more_cells_than_it_can_reach():
    bench = Bench(6, 2)
    bench.cache.rewind(0, 1)  # holes below used_end = 8
    bench.pool.asked.clear()
    bench.run([0, 0])
    bench.run([0, 0, 0, 0])
    bench.run([1] * 7)
    assert bench.pool.asked == [8, 9, 16]
    assert bench.cache.metrics().logical_length == 16


@pytest.mark.parametrize(("tokens", "rows"), [(1, 9), (2, 9), (3, 9), (4, 10), (8, 14), (11, 17)])
def test_pool_6_a_step_needs_the_rows_up_to_the_last_cell_it_can_reach_and_the_scratch_row(tokens, rows):
    """max(used_end, occupied + tokens) + 1; 8 cells are in use up to the last one, 3 of them are free."""
    bench = Bench(4, 4, max_write=11)
    bench.cache.rewind(0, 1)
    bench.run([1] * tokens)
    assert bench.pool.asked[-1] + 1 == rows <= bench.pool.rows


def test_ccell_4_a_refused_growth_leaves_table_pool_and_declaration_and_a_retry_works():
    bench = Bench(4)
    bench.cache.declare_step([0, 0])
    before = bench.state()
    bench.pool.refusals = 2
    for _ in range(2):
        with pytest.raises(CacheMemoryError):
            bench.cache.prepare_step(2)
        assert bench.state() == before
    step = bench.cache.prepare_step(2)
    bench.cache.commit_step()
    assert step.write_rows.tolist() == [5, 6]


def test_ccell_4_a_failed_upload_takes_the_placement_back_and_a_retry_places_the_same():
    bench = Bench(3, 1)
    bench.cache.declare_step([0, 1, 0])
    bench.cache.seq_clone(0)
    before = state_of(bench.table)
    bench.uploads.failures = 1
    with pytest.raises(RuntimeError, match="copy failed"):
        bench.cache.prepare_step(4)
    assert state_of(bench.table) == before
    step = bench.cache.prepare_step(4)
    bench.cache.commit_step()
    assert step.write_rows.tolist() == [5, 6, 7, 0]
    assert step.runs[ALL].count.tolist() == [4, 2, 5, 1]


# -- Protocol


def test_x_6_a_step_wider_than_the_cache_or_than_nothing_is_refused():
    """CCELL-3."""
    bench = Bench(0)
    bench.cache.declare_step([0])
    for width in (0, -1, 9):
        with pytest.raises(InvalidStep, match=r"outside \[1, 8\]"):
            bench.cache.prepare_step(width)
    bench.cache.prepare_step(8)


def test_x_6_prepare_needs_a_declaration_that_fits():
    """CELL-20, CCELL-3: a refused step leaves the declaration."""
    bench = Bench(0)
    with pytest.raises(InvalidStep, match="no step was declared"):
        bench.cache.prepare_step(1)
    bench.cache.declare_step([0, 0, 0])
    with pytest.raises(InvalidStep, match="2-row step cannot hold 3"):
        bench.cache.prepare_step(2)
    bench.cache.prepare_step(3)


def test_ccell_2_a_declaration_is_spent_by_one_prepare():
    bench = Bench(0)
    bench.run([0])
    with pytest.raises(InvalidStep, match="no step was declared"):
        bench.cache.prepare_step(1)


def test_cell_15_a_refused_declaration_leaves_the_earlier_one_standing():
    bench = Bench(0)
    bench.cache.declare_step([0, 0])
    for bad, error in (([], InvalidStep), ([3], UnknownSequence), ([0] * 17, CacheFull)):
        with pytest.raises(error):
            bench.cache.declare_step(bad)
    assert bench.cache.prepare_step(2).write_rows.tolist() == [1, 2]


def test_cell_15_an_accepted_declaration_replaces_the_earlier_one():
    bench = Bench(0, 0)
    bench.cache.declare_step([0, 0])
    bench.cache.declare_step([1])
    assert bench.cache.prepare_step(1).table_row.tolist() == [1]


def test_a_prepared_step_must_be_committed_or_undone_before_the_next():
    """CELL-14, CCELL-5: declare, prepare, commit; commit takes no width, only its turn."""
    bench = Bench(0)
    bench.cache.declare_step([0])
    bench.cache.prepare_step(1)
    with pytest.raises(InvalidStep, match="committed or undone"):
        bench.cache.declare_step([0])
    with pytest.raises(InvalidStep, match="committed or undone"):
        bench.cache.prepare_step(1)
    bench.cache.commit_step()
    for close in (bench.cache.commit_step, bench.cache.undo_step):
        with pytest.raises(InvalidStep, match="no step is prepared"):
            close()


@pytest.mark.parametrize(
    "verb",
    [
        lambda cache: cache.seq_clone(1),
        lambda cache: cache.seq_rm(1),
        lambda cache: cache.rewind(1, 0),
    ],
    ids=["seq_clone", "seq_rm", "rewind"],
)
def test_cell_13_a_verb_spoils_a_prepared_step_which_can_then_only_be_undone(verb: Callable[[CellCache], object]):
    bench = Bench(2, 2)
    bench.cache.declare_step([0, 0])
    bench.cache.prepare_step(2)
    verb(bench.cache)
    with pytest.raises(InvalidStep, match="changed the table"):
        bench.cache.commit_step()
    bench.cache.undo_step()
    assert bench.cache.pos(0) == 2
    bench.table.check_integrity()
    bench.run([0])


def test_cell_13_a_new_sequence_or_a_refused_verb_spoils_nothing():
    bench = Bench(2)
    bench.cache.declare_step([0])
    bench.cache.prepare_step(1)
    bench.cache.seq_new()
    with pytest.raises(CacheError):
        bench.cache.rewind(0, 99)
    bench.cache.commit_step()


def test_cell_13_a_verb_leaves_an_unplaced_declaration_alone():
    bench = Bench(3, 2)
    bench.cache.declare_step([0])
    bench.cache.seq_rm(1)
    bench.cache.rewind(0, 1)
    step = bench.cache.prepare_step(1)
    assert step.runs[ALL].count.tolist() == [2]


def test_cell_12_clear_forgets_declaration_step_and_holders_but_keeps_the_memory():
    """CCELL-7, POOL-9."""
    bench = Bench(8)
    bench.cache.declare_step([0])
    bench.cache.prepare_step(1)
    rows = bench.cache.metrics().rows
    bench.cache.clear()
    assert bench.cache.free_cells == 16
    assert bench.cache.metrics().rows == rows
    with pytest.raises(InvalidStep):
        bench.cache.commit_step()
    assert bench.cache.seq_new() == 0
    bench.cache.declare_step([0])
    bench.cache.clear()
    with pytest.raises(InvalidStep):
        bench.cache.prepare_step(1)


def test_cell_25_an_owner_that_left_after_the_declaration_is_refused_before_the_pool_grows():
    bench = Bench(4, 0)
    bench.cache.declare_step([0, 1])
    bench.cache.seq_rm(1)
    bench.cache.seq_new()
    before = bench.state()
    with pytest.raises(UnknownSequence):
        bench.cache.prepare_step(2)
    assert bench.state() == before
    assert bench.cache.pos(1) == 0


def test_undo_releases_exactly_the_cells_the_step_claimed():
    """CELL-22: the design's undo wins (D8)."""
    bench = Bench(3, 2)
    before = state_of(bench.table)
    bench.cache.declare_step([0, 1, 1])
    bench.cache.prepare_step(4)
    bench.cache.undo_step()
    assert state_of(bench.table) == before
    assert bench.run([0]).write_rows.tolist() == [6]


# -- Programs and configuration


def test_pool_3_a_program_made_for_another_cache_is_refused_now_and_at_every_step():
    bench = Bench(0)
    bench.cache.bind_program("forward_1", GEOMETRY, torch.float32)
    bench.cache.declare_step([0])
    with pytest.raises(InvalidProgram, match=r"forward_2 stores K/V as torch\.bfloat16"):
        bench.cache.bind_program("forward_2", GEOMETRY, torch.bfloat16)
    for _ in range(2):
        with pytest.raises(InvalidProgram, match="forward_2"):
            bench.cache.prepare_step(1)
    other = Geometry((*GEOMETRY.layers[:2], LayerGeometry(2, 4, 4)))
    with pytest.raises(InvalidProgram, match="layer 2 of forward_4"):
        bench.cache.bind_program("forward_4", other, torch.float32)
    with pytest.raises(InvalidProgram, match="has 1 layers, the cache 3"):
        bench.cache.bind_program("forward_8", Geometry(GEOMETRY.layers[:1]), torch.float32)


def test_bld_2_a_step_wider_than_the_pool_is_refused():
    CellCache(GEOMETRY, CacheConfig(7, max_write=8, kv_dtype=torch.float32), CPU)
    with pytest.raises(InvalidConfig, match="max_write is 9"):
        CellCache(GEOMETRY, CacheConfig(7, max_write=9, kv_dtype=torch.float32), CPU)


def test_ccell_7_metrics_count_rows_growths_and_bytes():
    """POOL-8 counts growths; nothing is bound again behind one, because addresses stay (D4)."""
    bench = Bench(4, 2)
    metrics = bench.cache.metrics()
    assert (metrics.logical_length, metrics.free_cells, metrics.num_sequences) == (6, 10, 2)
    assert (metrics.rows, metrics.growth_count) == (9, 1)
    assert metrics.allocated_bytes == 9 * GEOMETRY.bytes_per_cell(torch.float32)


def test_trim_keeps_what_is_held():
    bench = Bench(8, 8)
    bench.cache.seq_rm(1)
    bench.cache.trim()
    assert bench.cache.metrics().rows == 9
    bench.run([0] * 8)
    assert bench.cache.metrics().rows == 17


# -- Threads


def test_ccell_1_verbs_from_many_threads_and_steps_from_one_keep_the_table_whole():
    cache_table = CellTable(256, 64)
    config = CacheConfig(256, max_write=32, kv_dtype=torch.float32, max_sequences=64)
    cache = CellCache(GEOMETRY, config, CPU, table=cache_table)
    base = cache.seq_new()
    cache.declare_step([base] * 20)
    cache.prepare_step(32)
    cache.commit_step()
    errors: list[BaseException] = []

    def churn(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(150):
                mine = cache.seq_clone(base, int(rng.integers(1, 21)))
                cache.rewind(mine, int(rng.integers(0, cache.pos(mine) + 1)))
                cache.seq_rm(mine)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    own = cache.seq_new()
    for _ in range(200):
        cache.declare_step([own])
        cache.prepare_step(4)
        try:
            cache.commit_step()
        except InvalidStep:  # a verb came between: CELL-13
            cache.undo_step()
    for thread in threads:
        thread.join()
    assert not errors
    cache_table.check_integrity()
    cache.seq_rm(own)
    cache.seq_rm(base)
    assert (cache.free_cells, cache.metrics().num_sequences) == (256, 0)


# -- With attention over it


def test_rows_see_nothing_of_cells_that_others_freed():
    """PAD-4: K/V that nobody holds is NaN at every step; padded, forked, rewound and refilled, no row meets one."""
    rng = np.random.default_rng(3)
    generator = torch.Generator().manual_seed(3)
    config = CacheConfig(48, max_write=16, kv_dtype=torch.float32, max_sequences=6)
    cache = CellCache(GEOMETRY, config, CPU)
    live = [cache.seq_new()]
    for turn in range(60):
        if turn % 5 == 4 and cache.pos(live[0]) and len(live) < 6:
            live.append(cache.seq_clone(live[0], int(rng.integers(1, cache.pos(live[0]) + 1))))
        elif turn % 7 == 6 and len(live) > 1:
            cache.seq_rm(live.pop(0))
        elif len(live) < 3:
            live.append(cache.seq_new())
        if cache.free_cells < 8:
            for seq in live:
                cache.rewind(seq, cache.pos(seq) // 2)
        poison_free_cells(cache)
        cache.declare_step(random_step(rng, live, 8))
        step = cache.prepare_step(int(rng.integers(8, 17)))
        query, key, value = torch.randn(3, step.width, 2, 4, generator=generator)
        for layer, geometry in enumerate(GEOMETRY.layers):
            seen = attend(query, key, value, layer, step, reach=geometry.reach, scale=0.5)
            assert bool(torch.isfinite(seen).all())
        cache.commit_step()


def test_the_bench_prints_one_json_line(capsys):
    bench_main(["--cells", "2048", "--sequences", "4", "--length", "8", "--steps", "3"])
    report = json.loads(capsys.readouterr().out)
    assert report["us_per_step"]["decode"]["p50"] > 0


def test_lengths_say_of_every_sequence_what_pos_says():
    cache = Bench(3, 5, 2).cache
    cache.seq_rm(2)
    assert cache.lengths() == [cache.pos(sequence) for sequence in range(cache.max_sequences)] == [3, 5, 0, 0]
