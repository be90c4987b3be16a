"""The block drafter's cache: DF-1 .. DF-9, every cell of the DF-3b table, X-7.

Poisoning is per owner here, where the rules it comes from poison the whole cache: in the tables below "poisoned" is the
state of the failed step's owner, and every row is followed by a step of another owner, which must not notice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch

from cache.attend import attend, reference, triton_cells
from cache.cells import CellTable
from cache.draft_cache import DraftCache, DraftStep
from cache.factory import cache_factory
from cache.geometry import (
    CacheConfig,
    CacheError,
    CacheFull,
    Geometry,
    InvalidConfig,
    InvalidGeometry,
    InvalidPosition,
    InvalidProgram,
    InvalidStep,
    LayerGeometry,
    Reach,
    SequencePoisoned,
    UnknownKind,
    UnknownSequence,
)
from cache.sequence_cache import SequenceCache
from cache.upload import HostUploads
from support.slow_cells import state_of

CPU = torch.device("cpu")
ALL, WINDOW = Reach(), Reach("window", 3)
GEOMETRY = Geometry((LayerGeometry(2, 4, 3), LayerGeometry(1, 4, 4, WINDOW)))
B = 3
A, OTHER = 0, 1


class FailingUploads(HostUploads):
    """Fails the next send, or the next event behind a step, on demand."""

    fail_send = fail_event = False

    def send(self) -> None:
        if self.fail_send:
            self.fail_send = False
            raise RuntimeError("the copy failed")

    def mark_step_done(self) -> None:
        if self.fail_event:
            self.fail_event = False
            raise RuntimeError("the event failed")


class Bench:
    """A draft cache whose parts are in reach. contexts: how many rows each owner holds."""

    def __init__(self, *contexts: int, capacity: int = 64, max_write: int = 16, max_sequences: int = 4):
        config = CacheConfig(capacity, max_write, torch.float32, initial_cells=4, max_sequences=max_sequences)
        self.table = CellTable(capacity, max_sequences)
        self.uploads = FailingUploads(self.table, GEOMETRY.reaches, max_write)
        self.fences = 0
        self.fence_fails = False
        self.cache = DraftCache(GEOMETRY, config, CPU, B, uploads=self.uploads, table=self.table, fence=self.fence)
        for each in (*self.pool.keys, *self.pool.values):
            each.fill_(float("nan"))
        for context in contexts:
            owner = self.cache.seq_new()
            if context:
                self.run([owner] * (context + B))

    @property
    def pool(self):
        return self.cache._cells.pool

    def fence(self) -> None:
        self.fences += 1
        if self.fence_fails:
            raise RuntimeError("the device is gone")

    def prepare(self, seq_ids: list[int], width: int | None = None) -> DraftStep:
        self.cache.declare_step(seq_ids)
        return self.cache.prepare_step(len(seq_ids) if width is None else width)

    def run(self, seq_ids: list[int], width: int | None = None) -> DraftStep:
        step = self.prepare(seq_ids, width)
        self.cache.commit_step(step.cells.width)
        return step

    def contexts(self) -> list[int]:
        return [self.cache.pos(seq) for seq in range(self.cache.max_sequences)]

    def state(self) -> tuple[object, ...]:
        """All that a later call could depend on."""
        cache = self.cache
        live = [cache.is_live(seq) for seq in range(cache.max_sequences)]
        doubts = cache._pending, cache._poisoned.copy(), cache._unordered.copy(), cache._leaving.copy()
        return state_of(self.table), cache.metrics(), self.contexts(), live, cache.poisoned, doubts

    def phase(self) -> str:
        if self.cache._pending is not None:
            return "pending"
        return "poisoned" if A in self.cache._poisoned else "idle"


# -- A step


def test_df_6_context_rows_stay_and_block_rows_are_dropped_at_commit():
    bench = Bench(0)
    step = bench.run([A] * (4 + B))
    assert step.cells.write_rows.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert bench.cache.pos(A) == 4
    assert bench.cache.free_cells == 60
    # The next step's rows take the dropped cells.
    assert bench.run([A] * B).cells.write_rows.tolist() == [5, 6, 7]
    assert bench.cache.pos(A) == 4
    assert bench.table.cells_of(A).tolist() == [0, 1, 2, 3]


def test_d2_block_rows_see_the_context_inside_the_window_and_the_whole_block():
    """DF-11."""
    bench = Bench(5, 0)
    step = bench.run([OTHER] * (1 + B) + [A] * (2 + B), width=12).cells
    flat, window = step.runs[ALL], step.runs[WINDOW]
    assert flat.start.tolist() == [0] * 9 + [9] * 3
    assert flat.count.tolist() == [1, 4, 4, 4] + [6, 7, 10, 10, 10] + [1] * 3
    # OTHER: L = 1, so its block sees 0 .. 3. A: L = 7, so its block sees 4 .. 9.
    assert window.start.tolist() == [0, 0, 0, 0] + [3, 4, 4, 4, 4] + [9] * 3
    assert window.count.tolist() == [1, 4, 4, 4] + [3, 3, 6, 6, 6] + [1] * 3
    assert step.write_rows[9:].tolist() == [0] * 3
    assert step.table_row[9:].tolist() == [A] * 3


def test_df_8_query_rows_are_each_owners_block_in_declared_order_and_never_padded():
    """PAD-7."""
    bench = Bench(2, 4)
    step = bench.run([OTHER] * (2 + B) + [A] * B, width=16)
    assert step.query_rows.tolist() == [2, 3, 4, 5, 6, 7]


def test_x_7_several_owners_in_one_step_each_keep_their_own_context():
    bench = Bench(2, 4, 0)
    bench.run([2] * (1 + B) + [A] * B + [OTHER] * (2 + B))
    assert bench.contexts() == [2, 6, 1, 0]
    assert bench.cache.free_cells == 64 - 9
    bench.table.check_integrity()


@pytest.mark.parametrize("seed", range(3))
def test_rows_equal_attention_in_both_directions_over_the_plain_context(seed):
    random = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    bench = Bench(0, 0, 0, max_write=24)
    empty = [
        (torch.empty(0, la.num_kv_heads, la.k_dim), torch.empty(0, la.num_kv_heads, la.v_dim)) for la in GEOMETRY.layers
    ]
    contexts = {owner: list(empty) for owner in range(3)}
    for _ in range(12):
        owners = random.permutation(3)[: random.integers(1, 4)].tolist()
        fresh = {owner: int(random.integers(0, 4)) for owner in owners}
        rows = [owner for owner in owners for _ in range(fresh[owner] + B)]
        step = bench.prepare(rows, int(random.integers(len(rows), 25)))
        for index, layer in enumerate(GEOMETRY.layers):
            shape = step.cells.width, layer.num_kv_heads
            query = torch.randn(step.cells.width, 2, layer.k_dim, generator=generator)
            key = torch.randn(*shape, layer.k_dim, generator=generator)
            value = torch.randn(*shape, layer.v_dim, generator=generator)
            args = {"reach": layer.reach, "scale": 0.7}
            out = attend(query, key, value, index, step.cells, **args)
            masked = reference.attend_cells(query, bench.pool.keys[index], bench.pool.values[index], step.cells, **args)
            torch.testing.assert_close(out, masked, atol=1e-5, rtol=1e-5)
            assert out.isfinite().all()
            first = 0
            for owner in owners:
                last = first + fresh[owner] + B
                old_k, old_v = contexts[owner][index]
                k, v = torch.cat([old_k, key[first:last]]), torch.cat([old_v, value[first:last]])
                length = k.shape[0] - B
                oldest = max(0, length - layer.reach.size) if layer.reach.kind == "window" else 0
                seen_k, seen_v = (each[oldest:].repeat_interleave(2 // layer.num_kv_heads, 1) for each in (k, v))
                weights = torch.softmax(torch.einsum("thd,nhd->htn", query[last - B : last], seen_k) * 0.7, -1)
                expected = torch.einsum("htn,nhd->thd", weights, seen_v)
                torch.testing.assert_close(out[last - B : last], expected, atol=1e-5, rtol=1e-5)
                contexts[owner][index] = k[:length], v[:length]
                first = last
        bench.cache.commit_step(step.cells.width)


def test_the_kernels_see_a_block_as_the_mask_form_does():
    bench = Bench(5, 2)
    for each in (*bench.pool.keys, *bench.pool.values):
        each.normal_()
    step = bench.prepare([A] * (1 + B) + [OTHER] * B, width=8).cells
    for index, layer in enumerate(GEOMETRY.layers):
        query = torch.randn(8, 4, layer.k_dim)
        args = (query, bench.pool.keys[index], bench.pool.values[index], step)
        masked = reference.attend_cells(*args, reach=layer.reach, scale=0.5)
        for tile_rows in (1, 4):
            out = triton_cells.attend_cells(*args, reach=layer.reach, scale=0.5, tile_rows=tile_rows)
            torch.testing.assert_close(out, masked, atol=1e-5, rtol=1e-5)


def test_a_clone_shares_the_context_and_drafts_on_its_own():
    bench = Bench(4)
    free = bench.cache.free_cells
    clone = bench.cache.seq_clone(A, 2)
    assert bench.cache.free_cells == free
    bench.run([clone] * (1 + B) + [A] * B)
    assert bench.contexts()[:2] == [4, 3]
    bench.cache.rewind(A, 1)
    assert bench.contexts()[:2] == [1, 3]
    bench.table.check_integrity()


# -- Declarations


@pytest.mark.parametrize(
    ("rows", "error", "reason"),
    [
        ([], InvalidStep, "at least one token"),
        ([A] * 17, InvalidStep, "17-row step is wider than max_write, 16"),
        ([A] * B + [OTHER] * B + [A] * B, InvalidStep, "sequence 0 stand in two places"),
        ([A] * B + [OTHER] * (B - 1), InvalidStep, "sequence 1 has 2 rows, fewer than its block's 3"),
        ([3] * B, UnknownSequence, "sequence 3 is not live"),
        ([-1] * B, UnknownSequence, "sequence -1 is not live"),
        ([A] * 14, CacheFull, "14-token step does not fit: 13 cells free of 20"),
    ],
    ids=["empty", "too wide", "DF-7 not adjacent", "fewer than a block", "unknown", "negative", "no room"],
)
def test_a_refused_declaration_changes_nothing_and_leaves_the_earlier_one(rows, error, reason):
    """DF-2, DF-7."""
    bench = Bench(5, 2, capacity=20)
    bench.cache.declare_step([OTHER] * (1 + B))
    before = bench.state()
    with pytest.raises(error, match=reason):
        bench.cache.declare_step(rows)
    assert bench.state() == before
    step = bench.cache.prepare_step(4)
    assert step.query_rows.tolist() == [1, 2, 3]
    bench.cache.commit_step(4)
    assert bench.contexts()[:2] == [5, 3]


def test_cell_25_an_owner_that_left_after_the_declaration_is_refused():
    bench = Bench(2, 2)
    bench.cache.declare_step([A] * B)
    bench.cache.seq_rm(A)
    before = bench.state()
    for _ in range(2):
        with pytest.raises(UnknownSequence):
            bench.cache.prepare_step(B)
    assert bench.state() == before


# -- The state table DF-3b


def in_state(state: str) -> Bench:
    """Owners A and OTHER hold 4 and 2 context rows; A is in `state`."""
    bench = Bench(4, 2)
    if state != "idle":
        bench.prepare([A] * (1 + B), width=6)
    if state == "poisoned":
        bench.cache.fail_step(is_ordered=False)
    assert bench.phase() == state
    return bench


def prepare_after(fault: str) -> Callable[[Bench], object]:
    def act(bench: Bench) -> None:
        bench.cache.declare_step([A] * B)
        if fault == "upload":
            bench.uploads.fail_send = True
        bench.cache.prepare_step({"": B, "width": 99, "narrow": B - 1, "upload": B}[fault])

    return act


def commit_after(fault: str) -> Callable[[Bench], object]:
    def act(bench: Bench) -> None:
        bench.uploads.fail_event = fault == "event"
        bench.cache.commit_step(5 if fault == "width" else 6)

    return act


def clear_after(fault: str) -> Callable[[Bench], object]:
    def act(bench: Bench) -> None:
        bench.fence_fails = fault == "fence"
        bench.cache.clear()

    return act


# Where this table differs from the rules it comes from, the line says so:
#   *  an upload that fails takes its cells back, so nobody is poisoned by it
#   +  a commit with nothing prepared has no owner to poison
#   #  a removal is put off, not refused (DF-3c)
# There is no rebind: a forward is handed the step itself, so it cannot run on one that was not prepared.
TABLE = [
    # state, call, error, next state
    ("idle", "declare", lambda b: b.cache.declare_step([A] * B), None, "idle"),
    ("idle", "prepare", prepare_after(""), None, "pending"),
    ("idle", "prepare undeclared", lambda b: b.cache.prepare_step(B), InvalidStep, "idle"),
    ("idle", "prepare too wide", prepare_after("width"), InvalidStep, "idle"),
    ("idle", "prepare too narrow", prepare_after("narrow"), InvalidStep, "idle"),
    ("idle", "prepare, upload fails *", prepare_after("upload"), RuntimeError, "idle"),
    ("idle", "commit +", commit_after(""), InvalidStep, "idle"),
    ("idle", "undo", lambda b: b.cache.undo_step(), InvalidStep, "idle"),
    ("idle", "fail", lambda b: b.cache.fail_step(), InvalidStep, "idle"),
    ("idle", "clone", lambda b: b.cache.seq_clone(A), None, "idle"),
    ("idle", "rewind", lambda b: b.cache.rewind(A, 1), None, "idle"),
    ("idle", "remove", lambda b: b.cache.seq_rm(A), None, "idle"),
    ("idle", "clear", clear_after(""), None, "idle"),
    ("idle", "recover", lambda b: b.cache.recover(), None, "idle"),
    ("pending", "declare", lambda b: b.cache.declare_step([OTHER] * B), InvalidStep, "pending"),
    ("pending", "prepare", lambda b: b.cache.prepare_step(B), InvalidStep, "pending"),
    ("pending", "commit", commit_after(""), None, "idle"),
    ("pending", "commit of another width", commit_after("width"), InvalidStep, "poisoned"),
    ("pending", "commit, event fails", commit_after("event"), RuntimeError, "poisoned"),
    ("pending", "undo", lambda b: b.cache.undo_step(), None, "idle"),
    ("pending", "fail", lambda b: b.cache.fail_step(), None, "poisoned"),
    ("pending", "clone", lambda b: b.cache.seq_clone(OTHER), InvalidStep, "pending"),
    ("pending", "rewind", lambda b: b.cache.rewind(OTHER, 1), InvalidStep, "pending"),
    ("pending", "remove #", lambda b: b.cache.seq_rm(A), None, "pending"),
    ("pending", "clear", clear_after(""), None, "idle"),
    ("pending", "clear, fence fails", clear_after("fence"), RuntimeError, "poisoned"),
    ("pending", "recover", lambda b: b.cache.recover(), InvalidStep, "pending"),
    ("poisoned", "declare", lambda b: b.cache.declare_step([OTHER] * B + [A] * B), SequencePoisoned, "poisoned"),
    ("poisoned", "prepare", lambda b: b.cache.prepare_step(B), InvalidStep, "poisoned"),
    ("poisoned", "commit", commit_after(""), InvalidStep, "poisoned"),
    ("poisoned", "undo", lambda b: b.cache.undo_step(), InvalidStep, "poisoned"),
    ("poisoned", "fail", lambda b: b.cache.fail_step(), InvalidStep, "poisoned"),
    ("poisoned", "clone", lambda b: b.cache.seq_clone(A), SequencePoisoned, "poisoned"),
    ("poisoned", "rewind", lambda b: b.cache.rewind(A, 1), SequencePoisoned, "poisoned"),
    ("poisoned", "remove #", lambda b: b.cache.seq_rm(A), None, "poisoned"),
    ("poisoned", "clear", clear_after(""), None, "idle"),
    ("poisoned", "clear, fence fails", clear_after("fence"), RuntimeError, "poisoned"),
    ("poisoned", "recover", lambda b: b.cache.recover(), None, "idle"),
]
MOVES = ("commit of another width", "commit, event fails", "clear, fence fails")
"""Refused calls that change something: they end the prepared step."""


@pytest.mark.parametrize(
    ("state", "name", "call", "error", "after"), TABLE, ids=[f"{row[0]}: {row[1]}" for row in TABLE]
)
def test_df_3b_state_table(state, name, call, error, after):
    """DF-1, DF-2, DF-3, DF-4, DF-5, DF-6: DF-5's rebind has no counterpart, because addresses stay (D4). X-7."""
    bench = in_state(state)
    before = bench.state()
    if error is None:
        call(bench)
    else:
        with pytest.raises(error):
            call(bench)
        assert bench.state() == before or (state == "pending" and name in MOVES)
    assert bench.phase() == after
    bench.table.check_integrity()
    # Whatever happened to A, somebody else drafts as ever.
    if after != "pending":
        bench.fence_fails = False
        other = OTHER if bench.cache.is_live(OTHER) else bench.cache.seq_new()
        context = bench.cache.pos(other)
        bench.run([other] * (1 + B))
        assert bench.cache.pos(other) == context + 1
        # That step waited for the failed one, so an owner that was leaving has left.
        assert bench.phase() == ("idle" if name == "remove #" else after)


# -- Doubt and recovery


@pytest.mark.parametrize(
    ("fault", "fences"),
    [
        (lambda b: b.cache.fail_step(), 0),
        (commit_after("width"), 0),
        (commit_after("event"), 1),
        (lambda b: b.cache.fail_step(is_ordered=False), 1),
    ],
    ids=["failed on its stream", "width mismatch", "event not recorded", "failed on another stream"],
)
def test_recovery_gives_back_the_context_and_waits_only_where_no_event_will_do(fault, fences):
    bench = Bench(4, 2, 3)
    before = bench.state()
    bench.prepare([A] * (2 + B) + [OTHER] * B, width=9)
    with suppress(CacheError, RuntimeError):
        fault(bench)
    assert bench.cache.poisoned == {A, OTHER}
    assert bench.contexts()[:3] == [4, 2, 3]
    assert bench.cache.recover() == (A, OTHER)
    assert bench.fences == fences
    assert bench.state()[0] == before[0]
    assert bench.contexts()[:3] == [4, 2, 3]
    bench.run([A] * (1 + B) + [OTHER] * (1 + B))
    assert bench.contexts()[:3] == [5, 3, 3]


def test_the_cells_of_an_owner_in_doubt_go_to_nobody():
    bench = Bench(4, 2)
    doubtful = set(bench.prepare([A] * (1 + B)).cells.write_rows.tolist())
    bench.cache.fail_step(is_ordered=False)
    for _ in range(3):
        rows = bench.run([OTHER] * (2 + B)).cells.write_rows.tolist()
        assert not doubtful & set(rows)
    assert bench.contexts()[:2] == [4, 8]


def test_after_an_unordered_failure_the_next_step_waits_once_so_that_no_stray_forward_reads_its_tensors():
    bench = in_state("poisoned")
    bench.cache.declare_step([OTHER] * B)
    before = bench.state()
    bench.fence_fails = True
    with pytest.raises(RuntimeError, match="device is gone"):
        bench.cache.prepare_step(B)
    assert bench.state() == before
    bench.fence_fails = False
    bench.cache.prepare_step(B)
    bench.cache.commit_step(B)
    bench.run([OTHER] * B)
    assert bench.fences == 2
    assert bench.phase() == "poisoned"
    assert bench.cache.recover() == (A,)
    assert bench.fences == 2


def test_df_9_a_recovery_or_clear_whose_fence_fails_hands_nothing_out_and_can_be_retried():
    bench = in_state("poisoned")
    before = bench.state()
    bench.fence_fails = True
    for attempt in (bench.cache.recover, bench.cache.clear, bench.cache.recover):
        with pytest.raises(RuntimeError, match="device is gone"):
            attempt()
        assert bench.state() == before
    bench.fence_fails = False
    assert bench.cache.recover() == (A,)
    assert bench.fences == 4


def test_df_9_clear_waits_for_the_device_only_while_a_step_may_still_run():
    for state, fences in (("idle", 0), ("pending", 1), ("poisoned", 1)):
        bench = in_state(state)
        bench.cache.clear()
        assert bench.fences == fences
        assert bench.cache.free_cells == 64
        assert bench.cache.seq_new() == 0
        assert bench.contexts() == [0] * 4


def test_df_9_a_step_left_pending_by_a_failed_clear_frees_its_cells_at_the_next_one():
    bench = in_state("pending")
    bench.fence_fails = True
    with pytest.raises(RuntimeError):
        bench.cache.clear()
    assert bench.contexts()[:2] == [4, 2]
    assert bench.cache.free_cells == 64 - 4 - 2 - 4
    bench.fence_fails = False
    bench.cache.clear()
    assert bench.cache.free_cells == 64


@pytest.mark.parametrize(
    ("end", "free"),
    [
        (lambda b: b.cache.commit_step(6), 62),
        (lambda b: b.cache.undo_step(), 62),
        (lambda b: b.cache.fail_step(), 62),
        (lambda b: b.cache.fail_step(is_ordered=False), 54),
    ],
    ids=["commit", "undo", "fail", "fail on another stream"],
)
def test_df_3c_an_owner_removed_in_a_step_leaves_as_soon_as_its_cells_may(end, free):
    bench = in_state("pending")
    bench.cache.seq_rm(A)
    assert bench.cache.free_cells == 54
    assert (bench.cache.is_live(A), bench.cache.pos(A)) == (False, 0)
    end(bench)
    assert bench.cache.free_cells == free
    assert bench.cache.poisoned == frozenset()
    assert bench.cache.recover() == ()
    assert bench.cache.free_cells == 62
    assert bench.cache.seq_new() == A
    assert bench.fences == (free == 54)


def test_df_3c_an_owner_that_is_leaving_is_gone_for_its_caller_and_its_id_is_not_issued_yet():
    bench = in_state("poisoned")
    bench.cache.seq_rm(A)
    before = bench.state()
    for call in (
        lambda: bench.cache.seq_rm(A),
        lambda: bench.cache.rewind(A, 0),
        lambda: bench.cache.seq_clone(A),
        lambda: bench.cache.declare_step([A] * B),
    ):
        with pytest.raises(UnknownSequence, match="sequence 0 is not live"):
            call()
    assert bench.state() == before
    assert bench.cache.seq_new() == 2
    bench.cache.recover()
    assert bench.cache.seq_new() == A


def test_df_3c_a_bystander_removed_while_a_step_is_prepared_does_not_spoil_it():
    bench = in_state("pending")
    bench.cache.seq_rm(OTHER)
    bench.cache.commit_step(6)
    assert bench.contexts()[:2] == [5, 0]
    assert bench.cache.free_cells == 59
    assert bench.cache.seq_new() == OTHER


def test_a_sequence_made_while_a_step_is_prepared_does_not_spoil_it():
    bench = in_state("pending")
    assert bench.cache.seq_new() == 2
    bench.cache.commit_step(6)
    assert bench.contexts()[:3] == [5, 2, 0]


def test_random_steps_failures_and_removals_lose_no_cell():
    random = np.random.default_rng(0)
    bench = Bench(capacity=200, max_sequences=6)
    contexts: dict[int, int] = {}
    for _ in range(400):
        cache = bench.cache
        healthy = [owner for owner in contexts if owner not in cache.poisoned]
        if len(contexts) < 5 and random.random() < 0.3:
            if len(cache._leaving) + len(contexts) < 6:
                contexts[cache.seq_new()] = 0
        elif healthy:
            owners = random.permutation(healthy)[: random.integers(1, 4)].tolist()
            fresh = {owner: int(random.integers(0, 3)) for owner in owners}
            rows = [owner for owner in owners for _ in range(fresh[owner] + B)]
            if len(rows) > min(16, cache.free_cells):
                continue
            bench.prepare(rows)
            gone = int(random.choice(list(contexts))) if random.random() < 0.2 else None
            if gone is not None:
                cache.seq_rm(gone)
                del contexts[gone]
            outcome = random.choice(["commit", "undo", "fail", "lost"], p=[0.7, 0.1, 0.1, 0.1])
            if outcome == "commit":
                cache.commit_step(len(rows))
                contexts = {owner: length + fresh.get(owner, 0) for owner, length in contexts.items()}
            elif outcome == "undo":
                cache.undo_step()
            else:
                cache.fail_step(is_ordered=outcome == "fail")
        if random.random() < 0.1:
            cache.recover()
        if contexts and random.random() < 0.1:
            gone = int(random.choice(list(contexts)))
            cache.seq_rm(gone)
            del contexts[gone]
        assert {owner: cache.pos(owner) for owner in contexts} == contexts
    bench.cache.recover()
    assert bench.cache.free_cells == 200 - sum(contexts.values())
    bench.table.check_integrity()


# -- Verbs and configuration


def test_a_rewind_past_the_context_is_refused():
    bench = Bench(4)
    before = bench.state()
    for position in (5, -1):
        with pytest.raises(InvalidPosition):
            bench.cache.rewind(A, position)
    with pytest.raises(InvalidPosition):
        bench.cache.seq_clone(A, -1)
    assert bench.state() == before


def test_pool_3_a_program_for_other_layers_is_refused_at_every_step():
    bench = Bench(2)
    with pytest.raises(InvalidProgram):
        bench.cache.bind_program("draft_8", GEOMETRY, torch.bfloat16)
    bench.cache.declare_step([A] * B)
    before = bench.state()
    for _ in range(2):
        with pytest.raises(InvalidProgram, match="draft_8 stores K/V as"):
            bench.cache.prepare_step(B)
    assert bench.state() == before
    assert bench.phase() == "idle"


def test_df_10_a_cache_of_one_sequence_takes_no_draft_blocks():
    """The block is the draft cache's own argument, and no kind of the factory has one."""
    config = CacheConfig(16, max_write=8, kv_dtype=torch.float32)
    with pytest.raises(TypeError, match="positional arguments"):
        SequenceCache(GEOMETRY, config, CPU, B)
    with pytest.raises(UnknownKind, match="cpu has batched, batched-cell, single"):
        cache_factory().build("draft", GEOMETRY, config, CPU)
    assert not issubclass(DraftCache, SequenceCache)


@pytest.mark.parametrize(
    ("geometry", "block", "capacity", "error", "reason"),
    [
        (GEOMETRY, 0, 64, InvalidConfig, r"block of 0 rows is outside \[1, max_write = 8\]"),
        (GEOMETRY, 9, 64, InvalidConfig, r"block of 9 rows is outside \[1, max_write = 8\]"),
        (GEOMETRY, 8, 8, InvalidConfig, "block of 8 rows leaves no context in 8 cells"),
        (Geometry((LayerGeometry(1, 4, 4, Reach("chunk", 8)),)), 2, 64, InvalidGeometry, "cannot see in chunks of 8"),
    ],
    ids=["no block", "wider than a step", "no context", "chunks"],
)
def test_bld_2_blocks_that_cannot_be_are_refused(geometry, block, capacity, error, reason):
    with pytest.raises(error, match=reason):
        DraftCache(geometry, CacheConfig(capacity, max_write=8, kv_dtype=torch.float32), CPU, block)
