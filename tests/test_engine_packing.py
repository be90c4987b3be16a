"""PACK-*, T-PACK, T-SEL: chunks on one token axis, and which rows of it each slice answers."""

import numpy as np
import pytest

from engine.packing import PackLimits, Slot, pack, select_rows
from engine.types import Chunk

SLOTS = {1: Slot(seq_id=5, position=0), 2: Slot(seq_id=9, position=4), 3: Slot(seq_id=7, position=2)}


def packed(*chunks, limit=64, **options):
    return pack(chunks, SLOTS.get, PackLimits(max_session_tokens=limit, vocab_size=32), **options)


def test_pack_1_chunks_keep_their_order_and_pack_7_the_last_row_answers():
    """REF-5, T-PACK."""
    step = packed(
        Chunk(session_id=1, tokens=(1, 2, 3), position=0, wanted_rows="last"),
        Chunk(session_id=2, tokens=(7,), position=4),
    )
    assert step.tokens.tolist() == [1, 2, 3, 7]
    assert step.positions.tolist() == [0, 1, 2, 4]
    assert step.seq_ids.tolist() == [5, 5, 5, 9]
    assert step.selected.tolist() == [2]
    assert step.answers.tolist() == [0]
    assert step.draws.tolist() == [0]
    assert (step.rewinds, step.refusals) == ((), {})


def test_pack_3_consecutive_chunks_of_one_session_abut():
    step = packed(Chunk(session_id=1, tokens=(1, 2), position=0), Chunk(session_id=1, tokens=(3,), position=2))
    assert step.positions.tolist() == [0, 1, 2]


def test_pack_3_chunks_of_one_session_may_lie_apart_in_the_batch():
    step = packed(
        Chunk(session_id=1, tokens=(1, 2), position=0),
        Chunk(session_id=2, tokens=(8,), position=4),
        Chunk(session_id=1, tokens=(3,), position=2, wanted_rows="last"),
    )
    assert step.positions.tolist() == [0, 1, 4, 2]
    assert step.seq_ids.tolist() == [5, 5, 9, 5]
    assert (step.selected.tolist(), step.answers.tolist()) == ([3], [2])


def test_n_choices_draw_from_one_row():
    step = packed(Chunk(session_id=2, tokens=(7, 8), position=4, wanted_rows="last", draws=3))
    assert step.selected.tolist() == [1, 1, 1]
    assert step.draws.tolist() == [0, 1, 2]


def test_all_rows_are_wanted_for_the_tokens_that_follow_them():
    inner = packed(Chunk(session_id=2, tokens=(7, 8), position=4, wanted_rows="all", draws=0, following_token=9))
    assert (inner.selected.tolist(), inner.draws.tolist()) == ([0, 1], [-1, -1])
    last = packed(Chunk(session_id=2, tokens=(7, 8), position=4, wanted_rows="all", draws=1))
    assert (last.selected.tolist(), last.draws.tolist()) == ([0, 1], [-1, 0])


def test_pack_4_a_first_chunk_may_rewind_even_to_zero():
    assert packed(Chunk(session_id=2, tokens=(7,), position=2)).rewinds == ((9, 2),)
    assert packed(Chunk(session_id=2, tokens=(7,), position=0)).rewinds == ((9, 0),)


def test_pack_4_what_follows_a_rewind_continues_from_it():
    step = packed(Chunk(session_id=2, tokens=(7,), position=2), Chunk(session_id=2, tokens=(8,), position=3))
    assert (step.positions.tolist(), step.rewinds) == ([2, 3], ((9, 2),))


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([Chunk(4, (1,), 0)], "session 4 is not open"),
        ([Chunk(2, (), 4)], "session 2 brings no tokens"),
        ([Chunk(2, (1,), 5)], "session 2 holds 4 tokens: a chunk at 5 leaves a gap"),
        ([Chunk(2, (1,), -1)], "leaves a gap"),
        ([Chunk(2, (1,), 2), Chunk(2, (1,), 4)], "session 2 holds 3 tokens: a chunk at 4 leaves a gap"),
        ([Chunk(2, (1,), 4), Chunk(2, (1,), 4)], "session 2 overlaps itself at 4"),
        ([Chunk(2, (1, 2), 5)], "session 2 would hold 7 tokens: the limit is 6"),
        ([Chunk(2, (1, 32), 2)], "session 2 brings token id 32: this model's ids are 0 to 31"),
        ([Chunk(2, (-2,), 4)], "session 2 brings token id -2"),
    ],
)
def test_pack_2_to_5_what_is_wrong_with_a_session_leaves_the_others_in_the_step(chunks, words):
    step = packed(Chunk(1, (1, 2), 0), chunks[0], Chunk(3, (3,), 1, wanted_rows="last"), *chunks[1:], limit=6)
    assert step.refusals.keys() == {chunks[0].session_id}
    assert words in step.refusals[chunks[0].session_id]
    assert step.seq_ids.tolist() == [5, 5, 7]
    assert (step.selected.tolist(), step.answers.tolist()) == ([2], [2])
    assert step.rewinds == ((7, 1),)


def test_pack_5_none_of_a_refused_sessions_chunks_is_in_the_step():
    step = packed(Chunk(session_id=2, tokens=(1,), position=3), Chunk(session_id=2, tokens=(1, 2), position=4), limit=5)
    assert (step.num_tokens, step.rewinds) == (0, ())
    assert step.refusals.keys() == {2}


def test_a_session_that_the_caller_rules_out_is_refused_with_the_callers_words():
    step = packed(Chunk(1, (1,), 0), Chunk(2, (1,), 4), refused={2: "it is broken"})
    assert step.refusals == {2: "it is broken"}
    assert step.seq_ids.tolist() == [5]


@pytest.mark.parametrize(
    ("offset", "length", "rows", "indices"),
    [(0, 6, [2, 5], [0, 2]), (6, 4, [3], [3]), (10, 3, [], [])],
)
def test_t_sel_each_slice_answers_the_rows_that_lie_in_it(offset, length, rows, indices):
    """EXE-14."""
    got = select_rows(np.array([2, -1, 5, 9]), offset, length)
    assert [part.tolist() for part in got] == [rows, indices]


def test_t_sel_rows_come_in_the_order_they_were_asked_for_with_their_repeats():
    """EXE-14: rows are not padded to the width; the head has a ladder of its own (D6)."""
    rows, indices = select_rows(np.array([7, 4, -1, 7, 2, 5]), 4, 4)
    assert (rows.tolist(), indices.tolist()) == ([3, 0, 3, 1], [0, 1, 3, 5])
