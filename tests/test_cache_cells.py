"""The cell table's rules (CELL-*), its worked examples, and the table against a slow oracle."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from cache.cells import BLOCK_CELLS, CellTable, Placement, page_cells_for, runs
from cache.geometry import CacheError, CacheFull, InvalidPosition, InvalidStep, Reach, UnknownSequence
from support.slow_cells import SlowCells, mask_rows, random_step, slow_mask_rows, state_of

ALL = Reach()


def window(size: int) -> Reach:
    return Reach("window", size)


def step(table: CellTable, *seq_ids: int) -> Placement:
    return table.place(table.admit(seq_ids))


def table_with(*lengths: int, capacity: int = 16, max_sequences: int = 4) -> CellTable:
    """Sequences 0, 1, ... of these lengths, each placed in a step of its own."""
    table = CellTable(capacity, max_sequences)
    for length in lengths:
        seq = table.seq_new()
        if length:
            step(table, *[seq] * length)
    return table


# -- Worked examples (CELL-29)


def test_cell_29_1_two_prefills_in_one_step_see_only_themselves():
    table = table_with(0, 0)
    placed = step(table, 0, 0, 0, 1, 1)
    assert placed.cells.tolist() == [0, 1, 2, 3, 4]
    assert mask_rows(table, placed, ALL) == ["1....", "11...", "111..", "...1.", "...11"]


def test_cell_29_2_a_decode_and_a_prefill_share_a_step():
    table = table_with(2, 0)
    placed = step(table, 0, 1, 1)
    assert placed.cells.tolist() == [2, 3, 4]
    assert mask_rows(table, placed, ALL) == ["111..", "...1.", "...11"]


def test_cell_29_3_refilled_holes_keep_the_mask_right():
    table = table_with(2, 2)
    table.seq_rm(0)
    placed = step(table, 1, 1)
    assert placed.cells.tolist() == [0, 1]
    assert table.used_end == 4
    assert mask_rows(table, placed, ALL) == ["1.11", "1111"]


@pytest.mark.parametrize(("size", "last_row"), [(4, "1111"), (3, ".111"), (2, "..11"), (1, "...1"), (9, "1111")])
def test_cell_29_4_a_window_counts_the_row_itself(size, last_row):
    table = table_with(0)
    placed = step(table, 0, 0, 0, 0)
    assert mask_rows(table, placed, window(size))[-1] == last_row


def test_cell_29_5_windows_go_by_position_not_by_cell():
    table = table_with(3, 0)
    placed = step(table, 1, 0)
    assert mask_rows(table, placed, window(2)) == ["...1.", "..1.1"]


def test_cell_29_6_a_clone_does_not_see_what_its_source_wrote_later():
    table = table_with(4)
    clone = table.seq_clone(0, 4)
    assert step(table, 0, 0).cells.tolist() == [4, 5]
    placed = step(table, clone)
    assert placed.cells.tolist() == [6]
    assert mask_rows(table, placed, ALL) == ["1111..1"]
    assert mask_rows(table, placed, window(4)) == [".111..1"]


def test_cell_29_7_cells_are_free_when_their_last_holder_leaves():
    table = table_with(4)
    clone = table.seq_clone(0, 2)
    table.seq_rm(0)
    assert (table.free_cells, table.pos(clone)) == (14, 2)
    table.seq_rm(clone)
    assert (table.free_cells, table.used_end) == (16, 0)


def test_a_chunk_row_sees_its_own_chunk_only():
    start, count = runs(Reach("chunk", 4), np.array([0, 3, 4, 6, 8]))
    assert start.tolist() == [0, 0, 4, 4, 8]
    assert count.tolist() == [1, 4, 1, 3, 1]


# -- Ids


def test_cell_6_the_lowest_free_id_is_issued_and_taken_before_it_holds_anything():
    table = CellTable(16, 3)
    assert [table.seq_new() for _ in range(3)] == [0, 1, 2]
    table.seq_rm(1)
    assert table.seq_new() == 1


def test_cell_6_after_clear_the_next_id_is_0():
    table = table_with(3, 2)
    table.clear()
    assert table.seq_new() == 0
    assert (table.free_cells, table.used_end) == (16, 0)


def test_more_than_a_thousand_sequences_live_at_once():
    """CELL-2 has 64 ids, a bit each; the design counts holders instead (D3), and wins."""
    table = CellTable(4096, 1024)
    ids = [table.seq_new() for _ in range(1024)]
    step(table, *ids)
    assert table.free_cells == 4096 - 1024
    with pytest.raises(CacheFull):
        table.seq_new()


def test_a_thousand_clones_of_a_long_prefix_reserve_no_contexts_of_their_own():
    table = CellTable(65536, 1024)
    first = table.seq_new()
    step(table, *[first] * 60000)
    clones = [table.seq_clone(first) for _ in range(1023)]
    step(table, *clones)
    assert table.free_cells == 65536 - 60000 - 1023
    assert table.cells_of(clones[-1])[-2:].tolist() == [59999, 60000 + 1022]
    assert table.pages.nbytes < 48 << 20


# -- Clones and rewinds


def test_cell_7_a_clone_takes_no_free_cell_and_its_length_is_the_shorter_of_upto_and_the_source():
    """CELL-4: cells are counted, not their holders."""
    table = table_with(5)
    assert [table.pos(table.seq_clone(0, upto)) for upto in (None, 3, 99)] == [5, 3, 5]
    assert table.free_cells == 11


def test_cell_7_a_clone_of_nothing_is_alive_and_empty():
    table = table_with(5)
    clone = table.seq_clone(0, 0)
    assert table.is_live(clone)
    assert table.pos(clone) == 0


def test_cell_7_source_and_clone_go_their_own_ways_inside_one_page():
    """CELL-3: writes behind a clone go to fresh cells."""
    table = table_with(5)
    clone = table.seq_clone(0)
    step(table, 0, clone, 0, clone)
    assert table.cells_of(0).tolist() == [0, 1, 2, 3, 4, 5, 7]
    assert table.cells_of(clone).tolist() == [0, 1, 2, 3, 4, 6, 8]
    table.check_integrity()


def test_cell_8_a_removed_sequence_gives_back_its_own_cells_its_id_and_the_end_of_the_pool():
    table = table_with(4, 3, 0)
    clone = table.seq_clone(0, 2)
    table.seq_rm(0)
    assert (table.free_cells, table.used_end) == (16 - 5, 7), "cells 0 and 1 are the clone's, 4 to 6 the neighbour's"
    table.seq_rm(1)
    assert (table.free_cells, table.used_end) == (14, 2), "the end shrinks past every free cell"
    table.seq_rm(2)
    assert [table.seq_new() for _ in range(3)] == [0, 1, 2], "an id comes back though it never held a cell"
    for unknown in (-1, 4):
        with pytest.raises(UnknownSequence):
            table.seq_rm(unknown)
    assert table.cells_of(clone).tolist() == [0, 1]
    table.check_integrity()


def test_cell_10_rewinding_a_shared_tail_leaves_it_to_the_other_holder():
    table = table_with(6)
    clone = table.seq_clone(0)
    table.rewind(0, 2)
    assert (table.pos(0), table.pos(clone), table.free_cells) == (2, 6, 10)
    step(table, 0)
    assert table.cells_of(clone).tolist() == [0, 1, 2, 3, 4, 5]
    assert table.cells_of(0).tolist() == [0, 1, 6]


def test_cell_9_a_rewind_frees_the_tail_which_may_be_written_again():
    """CELL-21: a position is always the next of its sequence, because the table derives it."""
    table = table_with(6)
    table.rewind(0, 6)
    table.rewind(0, 2)
    assert (table.free_cells, table.used_end) == (14, 2)
    assert step(table, 0).positions.tolist() == [2]
    table.rewind(0, 0)
    assert table.is_live(0)
    assert table.pos(0) == 0


def test_cell_11_an_unknown_sequence_is_at_position_0():
    assert [table_with(3).pos(seq) for seq in (-1, 1, 99)] == [0, 0, 0]


# -- Placement


def test_cell_17_tokens_of_several_sequences_interleave_in_any_way():
    table = table_with(2, 1, 0)
    placed = step(table, 1, 0, 1, 2, 0, 0)
    assert placed.positions.tolist() == [1, 2, 2, 0, 3, 4]
    assert placed.cells.tolist() == [3, 4, 5, 6, 7, 8]
    assert table.cells_of(0).tolist() == [0, 1, 4, 7, 8]


def test_cell_18_the_lowest_free_cells_are_taken_in_token_order():
    table = table_with(1, 1, 1, 1)
    table.seq_rm(0)
    table.seq_rm(2)
    assert step(table, 3, 1, 3).cells.tolist() == [0, 2, 4]


def test_cell_18_lowest_free_crosses_the_borders_of_blocks():
    capacity = 2 * BLOCK_CELLS + 7
    table = CellTable(capacity, 4)
    even, odd = table.seq_new(), table.seq_new()
    step(table, *[even, odd] * (capacity // 2), even)
    assert table.free_cells == 0
    table.seq_rm(even)
    assert step(table, *[odd] * 516).cells.tolist() == list(range(0, capacity, 2))
    table.check_integrity()


def test_a_sequence_may_fill_the_whole_pool():
    table = table_with(16)
    assert (table.free_cells, table.used_end) == (0, 16)
    clone = table.seq_clone(0)
    table.seq_rm(0)
    assert table.cells_of(clone).tolist() == list(range(16))


def test_undo_releases_exactly_what_the_step_claimed():
    """CELL-22 leaves a failed step's cells claimed; the design takes them back (D8), and wins."""
    table = table_with(3, 2)
    table.seq_clone(0, 2)
    before = state_of(table)
    table.undo(step(table, 0, 1, 1, 2))
    assert state_of(table) == before
    table.check_integrity()


def test_undo_leaves_alone_an_owner_removed_and_issued_anew():
    table = table_with(3, 2)
    placed = step(table, 0, 1)
    table.seq_rm(0)
    assert table.seq_new() == 0
    step(table, 0, 0, 0, 0, 0, 0)
    table.undo(placed)
    assert (table.pos(0), table.pos(1)) == (6, 2)


# -- Cells without a sequence


def test_d3_held_cells_outlive_their_sequence_and_begin_another():
    table = table_with(5)
    cells = table.cells_of(0, 0, 3)
    table.hold_cells(cells)
    table.seq_rm(0)
    assert (table.free_cells, table.used_end) == (13, 3)
    seq = table.seq_from(cells)
    assert step(table, seq).positions.tolist() == [3]
    table.release_cells(cells)
    assert table.cells_of(seq).tolist() == [0, 1, 2, 3]
    table.seq_rm(seq)
    assert table.free_cells == 16
    table.check_integrity()


def test_a_cell_that_is_held_twice_is_let_go_twice():
    table = table_with(2)
    for _ in range(2):
        table.hold_cells([1])
    table.seq_rm(0)
    table.release_cells([1])
    assert table.free_cells == 15
    table.release_cells([1])
    assert table.free_cells == 16


def test_a_rebased_sequence_goes_on_behind_the_others_cells_and_frees_its_own():
    table = table_with(4, 6)
    table.rebase(1, table.cells_of(0))
    assert table.cells_of(1).tolist() == [0, 1, 2, 3, 8, 9]
    assert step(table, 1).cells.tolist() == [4]
    table.seq_rm(0)
    assert table.cells_of(1).tolist() == [0, 1, 2, 3, 8, 9, 4]
    table.check_integrity()


def test_what_follows_cells_that_somebody_else_has_too_is_not_moved():
    table = table_with(4, 6)
    table.seq_clone(1, 5)
    before = state_of(table)
    with pytest.raises(InvalidPosition, match="another holder"):
        table.rebase(1, table.cells_of(0))
    assert state_of(table) == before


def test_a_thousand_sequences_begun_with_a_long_list_share_its_pages():
    table = CellTable(65536, 1024)
    first = table.seq_new()
    step(table, *[first] * 60000)
    cells = table.cells_of(first)
    table.hold_cells(cells)
    table.seq_rm(first)
    begun = [table.seq_from(cells) for _ in range(1024)]
    step(table, *begun)
    assert len(np.unique(table.page_table[begun, :14])) == 14
    assert table.cells_of(begun[-1])[-2:].tolist() == [59999, 60000 + 1023]


# -- Refusals


REFUSALS: list[tuple[str, Callable[[CellTable], object], type[CacheError]]] = [
    ("clone of an unknown id", lambda t: t.seq_clone(3), UnknownSequence),
    ("clone of an id out of range", lambda t: t.seq_clone(-1), UnknownSequence),
    ("clone of an empty source", lambda t: t.seq_clone(2), InvalidPosition),
    ("clone of a negative prefix", lambda t: t.seq_clone(0, -1), InvalidPosition),
    ("removal of an unknown id", lambda t: t.seq_rm(3), UnknownSequence),
    ("a sequence of a free cell", lambda t: t.seq_from([0, 6]), InvalidPosition),
    ("a sequence of no cell of the pool", lambda t: t.seq_from([16]), InvalidPosition),
    ("a hold of a free cell", lambda t: t.hold_cells([0, 6]), InvalidPosition),
    ("a release of what only a sequence holds", lambda t: t.release_cells([0]), InvalidPosition),
    ("a rebase of an unknown id", lambda t: t.rebase(3, [0]), UnknownSequence),
    ("a rebase onto more cells than there are", lambda t: t.rebase(1, [0, 1, 2]), InvalidPosition),
    ("a part of a list past its end", lambda t: t.cells_of(1, 1, 3), InvalidPosition),
    ("rewind of an unknown id", lambda t: t.rewind(7, 0), UnknownSequence),
    ("rewind below 0", lambda t: t.rewind(0, -1), InvalidPosition),
    ("rewind past the end", lambda t: t.rewind(0, 5), InvalidPosition),
    ("an empty step", lambda t: t.admit([]), InvalidStep),
    ("an id out of range", lambda t: t.admit([0, 4]), UnknownSequence),
    ("a negative id", lambda t: t.admit([0, -1]), UnknownSequence),
    ("an id not issued", lambda t: t.admit([0, 3]), UnknownSequence),
    ("more tokens than cells", lambda t: t.admit([0] * 6 + [1] * 5), CacheFull),
]


@pytest.mark.parametrize(("verb", "error"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS])
def test_a_refusal_leaves_no_trace(verb, error):
    """CELL-7..9, CELL-15, REF-4: every verb checks its ids and raises. Removing a range is no verb of ours."""
    table = table_with(4, 2, 0)
    before = state_of(table)
    with pytest.raises(error):
        verb(table)
    assert state_of(table) == before
    table.check_integrity()


def test_cell_15_a_full_pool_is_refused_with_the_numbers():
    with pytest.raises(CacheFull, match="a 11-token step does not fit: 10 cells free of 16"):
        table_with(4, 2).admit([0] * 11)


def test_a_clone_is_refused_when_no_id_is_left():
    table = table_with(1, 1, 1, 1)
    before = state_of(table)
    with pytest.raises(CacheFull):
        table.seq_clone(0)
    assert state_of(table) == before


def test_cell_16_two_sequences_that_fit_alone_may_not_fit_together():
    table = table_with(4, 2)
    table.admit([0] * 6)
    table.admit([1] * 6)
    with pytest.raises(CacheFull):
        table.admit([0] * 6 + [1] * 6)


def test_cell_25_an_owner_removed_after_the_declaration_is_refused_at_placement():
    table = table_with(2, 2)
    declared = table.admit([0, 1])
    table.seq_rm(1)
    before = state_of(table)
    with pytest.raises(UnknownSequence):
        table.place(declared)
    assert state_of(table) == before
    assert table.seq_new() == 1
    with pytest.raises(UnknownSequence, match="removed after the step was declared"):
        table.place(declared)
    assert table.pos(1) == 0


@pytest.mark.parametrize("capacity", [1, 15, 16, 255, 256, 1000, 65536, 1 << 20])
def test_pages_are_powers_of_two_and_smaller_in_small_pools(capacity):
    size = page_cells_for(capacity)
    assert 16 <= size <= 4096
    assert size & (size - 1) == 0


# -- Against the oracle


def fast_place(table: CellTable, ids: list[int]) -> list[int]:
    return step(table, *ids).cells.tolist()


def both(table: CellTable, slow: SlowCells, verb: str, *arguments: object) -> None:
    """One verb on both: the same answer, or the same refusal without a trace."""
    before = state_of(table)
    fast_verb = partial(fast_place, table) if verb == "place" else getattr(table, verb)
    try:
        expected = getattr(slow, verb)(*arguments)
    except CacheError as error:
        with pytest.raises(type(error)):
            fast_verb(*arguments)
        assert state_of(table) == before
    else:
        assert fast_verb(*arguments) == expected


def random_verbs(verbs: int, seed: int, *, capacity: int, max_sequences: int, page_cells: int) -> None:
    """Drive both tables with the same verbs; every answer, refusal, list and mask must be the same."""
    rng = np.random.default_rng(seed)
    table = CellTable(capacity, max_sequences, page_cells=page_cells)
    slow = SlowCells(capacity, max_sequences)
    kinds = ["place", "seq_new", "seq_clone", "seq_rm", "rewind", "undo", "clear"]
    odds = [0.36, 0.1, 0.1, 0.1, 0.12, 0.045, 0.005]
    kinds += ["hold", "let go", "seq_from", "rebase"]
    odds += [0.05, 0.04, 0.05, 0.03]
    kept: list[list[int]] = []  # beginnings of sequences that are held loosely
    for turn, kind in enumerate(rng.choice(kinds, size=verbs, p=odds)):
        is_wild = rng.random() < 0.1 or not slow.lists
        seq = int(rng.integers(-1, max_sequences + 1)) if is_wild else int(rng.choice([*slow.lists]))
        position = int(rng.integers(-1, slow.pos(seq) + 2))
        ids = random_step(rng, [*slow.lists], 12) if slow.lists else []
        if kind == "seq_clone":
            both(table, slow, kind, seq, None if rng.random() < 0.3 else position)
        elif kind == "seq_rm":
            both(table, slow, kind, seq)
        elif kind == "rewind":
            both(table, slow, kind, seq, position)
        elif kind == "place":
            both(table, slow, kind, ids)
        elif kind == "hold":
            kept.append(slow.lists.get(seq, [])[: max(position, 0)])
            both(table, slow, "hold_cells", kept[-1])
        elif kind == "let go":
            both(table, slow, "release_cells", kept.pop(int(rng.integers(len(kept)))) if kept else [capacity])
        elif kind in ("seq_from", "rebase"):
            cells = kept[int(rng.integers(len(kept)))] if kept else []
            cells = cells[: int(rng.integers(len(cells) + 1))]
            both(table, slow, kind, *([cells] if kind == "seq_from" else [seq, cells]))
        elif kind == "undo":
            if 0 < len(ids) <= table.free_cells:
                before = state_of(table)
                table.undo(step(table, *ids))
                assert state_of(table) == before
        else:
            both(table, slow, kind)
            if kind == "clear":
                kept.clear()
        assert state_of(table)[0] == slow.lists
        assert (table.free_cells, table.used_end) == (slow.free_cells, slow.used_end)
        if turn % 16 == 0:
            table.check_integrity()
            compare_masks(table, slow, rng)


def compare_masks(table: CellTable, slow: SlowCells, rng: np.random.Generator) -> None:
    if not slow.lists or not table.free_cells:
        return
    ids = random_step(rng, [*slow.lists], min(12, table.free_cells))
    placed = step(table, *ids)
    cells = slow.place(ids)
    for reach in (ALL, window(3), Reach("chunk", 5)):
        assert mask_rows(table, placed, reach) == slow_mask_rows(slow, ids, cells, reach)


SHAPES = [
    dict(capacity=61, max_sequences=7, page_cells=4),
    dict(capacity=200, max_sequences=5, page_cells=16),
    dict(capacity=30, max_sequences=12, page_cells=1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape['capacity']} cells")
def test_the_table_answers_as_the_slow_one(shape):
    """CELL-1, CELL-5, T-CELL: whatever the verbs, lists, counts, positions and `used_end` are the oracle's."""
    random_verbs(1000, seed=shape["capacity"], **shape)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape['capacity']} cells")
def test_the_table_answers_as_the_slow_one_over_1e5_verbs(shape, seed):
    random_verbs(100_000 // (4 * len(SHAPES)) + 1, seed=1000 + seed, **shape)
