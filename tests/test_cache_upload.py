"""Staging and deltas (STG-*, X-5, D5), on a stream whose copies read their source late."""

import numpy as np
import pytest
import torch

from cache.cell_cache import CellCache
from cache.cells import CellTable
from cache.geometry import CacheConfig, Geometry, LayerGeometry, Reach
from cache.step import CellStep
from cache.upload import DeviceUploads
from support.fake_stream import FakeStream
from support.slow_cells import random_step, state_of

ALL = Reach()
WINDOW = Reach("window", 3)
GEOMETRY = Geometry((LayerGeometry(1, 2, 2), LayerGeometry(1, 2, 2, WINDOW)))
CPU = torch.device("cpu")


class Bench:
    """A cache that uploads to "the device" through a fake stream."""

    def __init__(self, *, capacity: int = 64, max_write: int = 8, delta_entries: int = 1024, page_cells: int = 4):
        config = CacheConfig(capacity, max_write=max_write, kv_dtype=torch.float32, max_sequences=8)
        self.table = CellTable(capacity, 8, page_cells=page_cells, log_writes=True)
        self.stream = FakeStream()
        self.uploads = DeviceUploads(
            self.table, GEOMETRY.reaches, max_write, CPU, stream=self.stream, delta_entries=delta_entries
        )
        self.cache = CellCache(GEOMETRY, config, CPU, uploads=self.uploads, table=self.table)
        self.stream.calls.clear()

    def run(self, seq_ids: list[int], width: int | None = None) -> CellStep:
        self.cache.declare_step(seq_ids)
        step = self.cache.prepare_step(len(seq_ids) if width is None else width)
        self.cache.commit_step()
        return step

    def device_cells(self, seq: int, length: int) -> list[int]:
        positions = np.arange(length)
        pages = self.uploads.page_table[seq].numpy()[positions // self.table.page_cells]
        return (self.uploads.pages.numpy()[pages, positions % self.table.page_cells] - 1).tolist()

    def check_lists(self) -> None:
        """Every live sequence's list on the device is the table's."""
        for seq in range(self.table.max_sequences):
            if self.table.is_live(seq):
                assert self.device_cells(seq, self.table.pos(seq)) == self.table.cells_of(seq).tolist()


def test_stg_3_a_step_is_one_copy_and_one_scatter():
    """POOL-11: a step follows the event of the one before it (`follow_step`, `record_step`)."""
    bench = Bench()
    bench.cache.seq_new()
    bench.run([0, 0, 0])
    assert bench.stream.calls == ["wait_copied", "follow_step", "copy", "scatter", "record_copied", "record_step"]


def test_a_step_arrives_whole_at_addresses_that_stay():
    """POOL-2: as runs and lists, not as masks (D2). PAD-3."""
    bench = Bench()
    bench.cache.seq_new()
    first = bench.run([0, 0, 0], width=8)
    bench.stream.drain()
    assert first.write_rows.tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert first.runs[ALL].count.tolist() == [1, 2, 3, 1, 1, 1, 1, 1]
    second = bench.run([0], width=8)
    bench.stream.drain()
    assert second.write_rows.tolist() == [4] + [0] * 7
    assert second.runs[WINDOW].start.tolist() == [1] + [3] * 7
    for reach in (ALL, WINDOW):
        assert first.runs[reach].start.data_ptr() == second.runs[reach].start.data_ptr()
    assert first.write_rows.data_ptr() == second.write_rows.data_ptr()
    assert first.pages.data_ptr() == second.pages.data_ptr()
    bench.check_lists()


def test_rows_that_no_step_has_filled_name_the_scratch_row_whatever_the_staging_held():
    """Rings derive theirs from all `max_write` rows, of which a step fills its width."""
    bench = Bench()
    bench.cache.seq_new()
    bench.run([0, 0, 0])
    bench.stream.drain()
    assert bench.uploads.step.write_rows.tolist() == [1, 2, 3, 0, 0, 0, 0, 0]


def test_stg_1_a_verb_does_not_change_a_step_still_being_read():
    bench = Bench()
    for _ in range(2):
        bench.cache.seq_new()
    bench.run([0] * 6 + [1] * 2)
    before = bench.cache.cells_of(0).tolist()
    # The copy has not run yet; the table moves on.
    bench.cache.rewind(0, 1)
    bench.cache.seq_rm(1)
    bench.cache.seq_clone(0)
    bench.stream.drain()
    assert bench.device_cells(0, 6) == before
    assert bench.device_cells(1, 2) == [6, 7]


def test_x_5_refilling_waits_for_the_copy_that_last_read_the_staging():
    """STG-2."""
    bench = Bench()
    bench.cache.seq_new()
    for length in range(1, 12):
        step = bench.run([0])
        assert bench.stream.calls[0] == "wait_copied"
        bench.stream.calls.clear()
        bench.stream.drain()
        assert step.runs[ALL].count.tolist() == [length]
    bench.check_lists()


@pytest.mark.parametrize("call", ["copy", "scatter"])
def test_x_5_a_failed_copy_still_records_the_event_and_the_retry_brings_everything(call):
    """STG-4."""
    bench = Bench()
    bench.cache.seq_new()
    bench.run([0, 0])
    bench.cache.declare_step([0, 0, 0])
    before = state_of(bench.table)
    bench.stream.fail = {call}
    bench.stream.calls.clear()
    with pytest.raises(RuntimeError, match=f"{call} failed"):
        bench.cache.prepare_step(3)
    assert bench.stream.calls[-1] == "record_copied"
    assert state_of(bench.table) == before
    bench.cache.prepare_step(3)
    bench.stream.drain()
    bench.check_lists()


def test_x_5_an_event_that_cannot_be_recorded_is_replaced_by_waiting_and_reported():
    """STG-4."""
    bench = Bench()
    bench.cache.seq_new()
    bench.cache.declare_step([0])
    bench.stream.fail = {"record_copied"}
    with pytest.raises(RuntimeError, match="record_copied failed"):
        bench.cache.prepare_step(1)
    assert bench.stream.calls[-1] == "synchronize"
    assert bench.cache.pos(0) == 0


def test_stg_2_staging_grows_to_what_is_needed_or_twice_what_it_was():
    bench = Bench(capacity=4096, max_write=512, delta_entries=8, page_cells=256)
    bench.cache.seq_new()
    step = bench.run([0] * 500)
    bench.stream.drain()
    assert bench.stream.calls.count("pinned") == 1
    assert step.write_rows.tolist() == list(range(1, 501))
    assert step.runs[ALL].count.tolist() == list(range(1, 501))
    bench.check_lists()
    # More deltas than the step's own copy has room for travel beside it.
    assert bench.stream.calls.count("copy") == 2
    bench.run([0] * 4)
    assert bench.stream.calls.count("copy") == 3
    assert bench.stream.calls.count("pinned") == 1


def test_stg_4_a_copy_that_failed_halfway_is_waited_for_before_its_staging_is_filled_again():
    bench = Bench()
    bench.cache.seq_new()
    bench.cache.declare_step([0])
    bench.stream.fail = {"scatter"}
    with pytest.raises(RuntimeError, match="scatter failed"):
        bench.cache.prepare_step(1)
    bench.stream.fail = set()
    failed = list(bench.stream.calls)
    bench.cache.prepare_step(1)
    assert failed[-1] == "record_copied"
    assert bench.stream.calls[len(failed)] == "wait_copied"


def test_stg_5_all_host_work_of_a_step_is_done_before_its_forward_and_only_an_event_behind_it():
    bench = Bench()
    bench.cache.seq_new()
    bench.cache.declare_step([0])
    bench.cache.prepare_step(4)
    assert "copy" in bench.stream.calls
    bench.stream.calls.clear()
    bench.cache.commit_step()
    assert bench.stream.calls == ["record_step"]


def test_clones_made_between_steps_arrive_with_the_next_one():
    bench = Bench()
    bench.cache.seq_new()
    bench.run([0] * 7)
    clones = [bench.cache.seq_clone(0, upto) for upto in (7, 5, 4)]
    bench.run([0, *clones])
    bench.stream.drain()
    bench.check_lists()


@pytest.mark.parametrize("delta_entries", [4, 1024])
def test_after_any_verbs_the_devices_lists_are_the_tables(delta_entries):
    rng = np.random.default_rng(delta_entries)
    bench = Bench(capacity=61, delta_entries=delta_entries)
    cache, table = bench.cache, bench.table
    for turn in range(600):
        live = [seq for seq in range(8) if table.is_live(seq)]
        kind = rng.choice(
            ["step", "new", "clone", "rm", "rewind", "undo", "fail"], p=[0.4, 0.15, 0.15, 0.1, 0.1, 0.05, 0.05]
        )
        seq = int(rng.choice(live)) if live else 0
        if kind == "new" and len(live) < 8:
            cache.seq_new()
        elif kind == "clone" and len(live) < 8 and table.pos(seq):
            cache.seq_clone(seq, int(rng.integers(0, table.pos(seq) + 1)))
        elif kind == "rm" and live:
            cache.seq_rm(seq)
        elif kind == "rewind" and live:
            cache.rewind(seq, int(rng.integers(0, table.pos(seq) + 1)))
        elif kind in ("step", "undo", "fail") and live and table.free_cells:
            cache.declare_step(random_step(rng, live, min(8, table.free_cells)))
            if kind == "fail":
                bench.stream.fail = {"copy"}
                with pytest.raises(RuntimeError):
                    cache.prepare_step(8)
                continue
            cache.prepare_step(8)
            if turn % 3:
                bench.stream.drain()
                bench.check_lists()
            cache.undo_step() if kind == "undo" else cache.commit_step()
    table.check_integrity()


def test_lists_built_from_cells_arrive_and_shared_pages_are_not_sent_again():
    bench = Bench(page_cells=4)
    first, second = bench.cache.seq_new(), bench.cache.seq_new()
    bench.run([first] * 8)
    bench.run([second] * 7)
    cells = bench.cache.cells_of(first)
    bench.cache.hold_cells(cells)
    bench.cache.seq_rm(first)
    begun = bench.cache.seq_from(cells[:6])
    bench.cache.rebase(second, cells[:5])
    bench.run([begun, second])
    bench.stream.drain()
    bench.check_lists()
    assert bench.table.cells_of(second).tolist()[:5] == cells[:5].tolist()
    assert bench.table.page_table[begun, 0] == bench.table.page_table[second, 0]
    bench.table.check_integrity()
