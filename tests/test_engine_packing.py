"""PACK-*: chunks on one token axis."""

import pytest

from engine.packing import PackingError, Slot, pack
from engine.types import Chunk

SLOTS = {1: Slot(seq_id=5, position=0), 2: Slot(seq_id=9, position=4)}


def packed(*chunks, limit=64):
    return pack(chunks, SLOTS.get, limit)


def test_pack_1_chunks_keep_their_order_and_pack_7_the_last_row_answers():
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


def test_pack_3_consecutive_chunks_of_one_session_abut():
    step = packed(Chunk(session_id=1, tokens=(1, 2), position=0), Chunk(session_id=1, tokens=(3,), position=2))
    assert step.positions.tolist() == [0, 1, 2]


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


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([Chunk(session_id=3, tokens=(1,), position=0)], "session 3 is not open"),
        ([Chunk(session_id=1, tokens=(), position=0)], "brings no tokens"),
        ([Chunk(session_id=1, tokens=(1,), position=1)], "holds 0 tokens: a chunk at 1 leaves a gap"),
        ([Chunk(session_id=1, tokens=(1,), position=-1)], "leaves a gap"),
        (
            [Chunk(session_id=2, tokens=(1,), position=4), Chunk(session_id=2, tokens=(1,), position=3)],
            "overlaps itself at 3",
        ),
        ([Chunk(session_id=2, tokens=(1, 2), position=4)], "would hold 6 tokens: the limit is 5"),
    ],
)
def test_pack_2_to_5_what_cannot_be_packed_is_named(chunks, words):
    with pytest.raises(PackingError, match=words):
        packed(*chunks, limit=5)
