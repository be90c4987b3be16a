"""Attention over cells (CELL-26 .. CELL-29, REF-1 .. REF-3): reference by example, CPU path by reference."""

from __future__ import annotations

import pytest
import torch
from support.steps import build_step, plain_pool

from cache.attend import attend, reference
from cache.geometry import InvalidProgram, Reach

ALL = Reach()


def seen(cells: list[list[int]], rows: list[tuple[int, int]], num_cells: int, reach: Reach = ALL) -> list[str]:
    """Each row's visible cells as text, the scratch row left out."""
    pool = plain_pool(num_cells, kv_heads=1, k_dim=2)
    step = build_step(pool, cells, rows, reaches=[reach], page_cells=2)
    mask = reference.visible_rows(step, reach, num_cells + 1)
    assert not mask[:, 0].any()
    return ["".join("1" if bit else "." for bit in row) for row in mask[:, 1:].tolist()]


def test_two_new_sequences_in_one_step_see_only_themselves() -> None:
    """CELL-29.1"""
    rows = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert seen([[0, 1, 2], [3, 4]], rows, 5) == ["1....", "11...", "111..", "...1.", "...11"]


def test_refilled_cells_are_seen_in_position_order_of_their_new_owner() -> None:
    """CELL-29.3"""
    assert seen([[2, 3, 0, 1]], [(0, 2), (0, 3)], 4) == ["1.11", "1111"]


@pytest.mark.parametrize(("size", "expected"), [(4, "1111"), (3, ".111"), (1, "...1")])
def test_a_window_counts_positions_itself_included(size: int, expected: str) -> None:
    """CELL-28, CELL-29.4"""
    assert seen([[0, 1, 2, 3]], [(0, 3)], 4, Reach("window", size)) == [expected]


def test_a_chunk_reaches_back_to_its_own_beginning() -> None:
    assert seen([[0, 1, 2, 3, 4]], [(0, 3), (0, 4)], 5, Reach("chunk", 2)) == ["..11.", "....1"]


def test_a_fork_sees_the_shared_cells_and_its_own() -> None:
    """CELL-29.6"""
    cells = [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6]]
    assert seen(cells, [(1, 4)], 7) == ["1111..1"]
    assert seen(cells, [(1, 4)], 7, Reach("window", 4)) == [".111..1"]


def test_every_row_is_stored_before_any_row_reads_and_padding_lands_in_scratch() -> None:
    pool = plain_pool(4, kv_heads=1, k_dim=4, v_dim=3)
    before = pool.keys[0].clone()
    step = build_step(pool, [[2, 0]], [(0, 0), (0, 1)], width=4)
    key, value = torch.randn(4, 1, 4), torch.randn(4, 1, 3)
    out = attend(torch.zeros(4, 2, 4), key, value, 0, step, reach=ALL, scale=1.0)
    assert torch.equal(pool.keys[0][[3, 1]], key[:2])
    assert torch.equal(pool.keys[0][[2, 4]], before[[2, 4]])
    torch.testing.assert_close(out[1], value[:2].mean(0).expand(2, 3))
    assert out.shape == (4, 2, 3)
    assert out.isfinite().all()


def test_shapes_that_disagree_with_the_pool_are_refused_before_anything_is_written() -> None:
    pool = plain_pool(4, kv_heads=2, k_dim=4)
    step = build_step(pool, [[0, 1]], [(0, 1)])
    before = pool.keys[0].clone()
    query, row = torch.zeros(1, 4, 4), torch.zeros(1, 2, 4)
    with pytest.raises(InvalidProgram, match="3 query heads over 2"):
        attend(torch.zeros(1, 3, 4), row, row, 0, step, reach=ALL, scale=1.0)
    with pytest.raises(InvalidProgram, match="key is"):
        attend(query, torch.zeros(1, 1, 4), row, 0, step, reach=ALL, scale=1.0)
    with pytest.raises(InvalidProgram, match="value is"):
        attend(query, row, torch.zeros(1, 2, 3), 0, step, reach=ALL, scale=1.0)
    with pytest.raises(InvalidProgram, match="query is"):
        attend(torch.zeros(1, 4, 8), row, row, 0, step, reach=ALL, scale=1.0)
    with pytest.raises(InvalidProgram, match="was prepared for"):
        attend(query, row, row, 0, step, reach=Reach("window", 3), scale=1.0)
    with pytest.raises(InvalidProgram, match="layer 1 owns no"):
        attend(query, row, row, 1, step, reach=ALL, scale=1.0)
    with pytest.raises(InvalidProgram, match="sinks"):
        attend(query, row, row, 0, step, reach=ALL, scale=1.0, sinks=torch.zeros(2))
    assert torch.equal(pool.keys[0], before)
