"""Attention over cells (CELL-26 .. CELL-29, REF-1 .. REF-3): reference by example, CPU path by reference."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
import torch

from cache.attend import attend, cpu_runs, reference, store
from cache.geometry import FP8, InvalidProgram, KvScales, Reach
from support.steps import build_step, plain_pool, random_cells, random_rows

ALL = Reach()


def seen(cells: list[list[int]], rows: list[tuple[int, int]], num_cells: int, reach: Reach = ALL) -> list[str]:
    """Each row's visible cells as text, the scratch row left out."""
    pool = plain_pool(num_cells, kv_heads=1, k_dim=2)
    step = build_step(pool, cells, rows, reaches=[reach], page_cells=2)
    mask = reference.visible_rows(step, reach, num_cells + 1)
    assert not mask[:, 0].any()
    return ["".join("1" if bit else "." for bit in row) for row in mask[:, 1:].tolist()]


def test_two_new_sequences_in_one_step_see_only_themselves() -> None:
    """CELL-27, CELL-29.1"""
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
    """CELL-27, SEQ-5, PAD-2."""
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


def test_the_package_imports_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import cache.attend"
    subprocess.run([sys.executable, "-c", code], check=True)


REACHES = [ALL, Reach("window", 5), Reach("window", 40), Reach("chunk", 16)]
EXTRAS = [{}, {"softcap": 2.0}, {"sinks": True}, {"softcap": 2.0, "sinks": True}]


@pytest.mark.parametrize("seed", range(24))
def test_the_cpu_path_equals_the_mask_in_any_mix_of_rows(seed: int) -> None:
    """CELL-26, REF-1..3, T-ATT: decodes, chunks, forks, windows, padding, unlike K and V, head groups, caps, sinks."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kv_heads, group = rng.choice([(1, 1), (2, 3), (3, 1)])
    k_dim, v_dim = rng.choice([(16, 16), (24, 8)])
    pool = plain_pool(600, kv_heads=kv_heads, k_dim=k_dim, v_dim=v_dim, generator=generator)
    cells = random_cells(rng, 600, sequences=rng.randint(1, 6), longest=90)
    rows = random_rows(rng, cells, longest_chunk=60)
    step = build_step(pool, cells, rows, reaches=REACHES, width=len(rows) + rng.choice([0, 0, 3, 20]))
    query = torch.randn(step.width, kv_heads * group, k_dim, generator=generator)
    for reach in REACHES:
        extras: dict[str, Any] = dict(EXTRAS[(seed + REACHES.index(reach)) % len(EXTRAS)])
        if "sinks" in extras:
            extras["sinks"] = torch.randn(kv_heads * group, generator=generator)
        args = (query, pool.keys[0], pool.values[0], step)
        expected = reference.attend_cells(*args, reach=reach, scale=0.3, **extras)
        actual = cpu_runs.attend_cells(*args, reach=reach, scale=0.3, **extras)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("extras", [{}, {"softcap": 2.0}], ids=["plain", "softcap"])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "tolerance"),
    [
        (torch.float64, torch.float64, 1e-12),
        (torch.bfloat16, torch.bfloat16, 2e-2),
        (torch.float16, torch.float16, 2e-3),
        (torch.float32, torch.float16, 1e-5),
    ],
)
def test_other_dtypes_and_a_pool_narrower_than_the_query_are_served(
    dtype: torch.dtype, kv_dtype: torch.dtype, tolerance: float, extras: dict[str, float]
) -> None:
    pool = plain_pool(100, kv_heads=2, k_dim=16, dtype=kv_dtype)
    cells = [list(range(40)), list(range(99, 70, -1))]
    step = build_step(pool, cells, [(0, p) for p in range(10, 40)] + [(1, 28)])
    args = (torch.randn(31, 4, 16).to(dtype), pool.keys[0], pool.values[0], step)
    actual = cpu_runs.attend_cells(*args, reach=ALL, scale=0.3, **extras)
    assert actual.dtype == dtype
    expected = reference.attend_cells(*args, reach=ALL, scale=0.3, **extras)
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_holds_a_row_over_its_scale_to_the_nearest_number_it_has_and_cuts_what_lies_beyond(
    dtype: torch.dtype,
) -> None:
    """An overflow must not become NaN, and a NaN must stay one: it ends its own request."""
    new = torch.tensor([0.0, 1.0, -1.06, 448.0, 460.0, 1e9, -1e9, torch.inf, torch.nan]).to(dtype)
    held = torch.tensor([0.0, 1.0, -1.0, 448.0, 448.0, 448.0, -448.0, 448.0, torch.nan])
    for scale in (1.0, 0.25):
        stored = torch.zeros(3, 1, 9).to(FP8)
        store(stored, torch.tensor([2]), (new * scale)[None, None], scale)
        torch.testing.assert_close(stored.float()[2, 0], held, rtol=0, atol=0, equal_nan=True)
        assert not stored[:2].float().any()


@pytest.mark.parametrize("seed", range(4))
def test_fp8_cells_are_read_as_what_is_stored_times_its_scales(seed: int) -> None:
    """Over all that attention knows; a step's own rows included, which are read as they were stored."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    scales = KvScales(rng.choice([1.0, 0.03]), rng.choice([1.0, 3.7]))
    pool = plain_pool(600, kv_heads=2, k_dim=24, v_dim=8, dtype=FP8, generator=generator, scales=scales)
    cells = random_cells(rng, 600, sequences=4, longest=90)
    step = build_step(pool, cells, random_rows(rng, cells, longest_chunk=60), reaches=REACHES)
    query = torch.randn(step.width, 6, 24, generator=generator)
    key, value = (torch.randn(step.width, 2, dim, generator=generator) for dim in (24, 8))
    for reach in REACHES:
        extras: dict[str, Any] = dict(EXTRAS[(seed + REACHES.index(reach)) % len(EXTRAS)])
        if "sinks" in extras:
            extras["sinks"] = torch.randn(6, generator=generator)
        actual = attend(query, key, value, 0, step, reach=reach, scale=0.3, **extras)
        full = pool.keys[0].float() * scales.key, pool.values[0].float() * scales.value
        expected = reference.attend_cells(query, *full, step, reach=reach, scale=0.3, **extras)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("path", [reference, cpu_runs], ids=["reference", "cpu_runs"])
@pytest.mark.parametrize("extras", [{}, {"softcap": 2.0}], ids=["plain", "softcap"])
def test_nan_in_cells_nobody_reads_never_leaks(path: Any, extras: dict[str, float]) -> None:
    """PAD-4, PAD-5: freed cells keep their bytes: whatever lies there, and in the scratch row, must not reach a row."""
    pool = plain_pool(200, kv_heads=2, k_dim=8)
    cells = [list(range(10, 70)), [90, 100, 95], list(range(120, 160)), [5]]
    rows = [(1, 2), (3, 0), *((0, p) for p in range(30, 60)), (2, 39)]
    owned = torch.tensor([cell + 1 for own in cells for cell in own])
    for side in (pool.keys[0], pool.values[0]):
        kept = side[owned].clone()
        side.fill_(float("nan"))
        side[owned] = kept
    step = build_step(pool, cells, rows, reaches=REACHES, width=36)
    for reach in REACHES:
        query = torch.randn(36, 4, 8)
        assert (
            path.attend_cells(query, pool.keys[0], pool.values[0], step, reach=reach, scale=0.3, **extras)
            .isfinite()
            .all()
        )


@pytest.mark.parametrize("extras", [{}, {"softcap": 2.0}], ids=["plain", "softcap"])
def test_a_sequence_full_of_nan_harms_nobody_else(extras: dict[str, float]) -> None:
    pool = plain_pool(200, kv_heads=2, k_dim=8)
    cells = [list(range(10, 70)), [90, 100, 95], list(range(120, 160))]
    for side in (pool.keys[0], pool.values[0]):
        side[121:161] = float("nan")
    rows = [(1, 2), *((2, p) for p in range(10, 40)), *((0, p) for p in range(30, 60)), (2, 39)]
    step = build_step(pool, cells, rows)
    query = torch.randn(len(rows), 4, 8)
    out = cpu_runs.attend_cells(query, pool.keys[0], pool.values[0], step, reach=ALL, scale=0.3, **extras)
    poisoned = torch.tensor([sequence == 2 for sequence, _ in rows])
    assert out[~poisoned].isfinite().all()
    assert out[poisoned].isnan().all()


@pytest.mark.parametrize("seed", range(4))
def test_neighbours_do_not_change_a_row(seed: int) -> None:
    """A row alone, in its step, and in its step with the sequences reordered: the same within float rounding."""
    rng = random.Random(seed)
    pool = plain_pool(400, kv_heads=2, k_dim=16)
    cells = random_cells(rng, 400, sequences=5, longest=50)
    chunks = [
        [(s, p) for p in range(len(own) - rng.choice([1, min(20, len(own))]), len(own))] for s, own in enumerate(cells)
    ]
    query = {row: torch.randn(4, 16) for chunk in chunks for row in chunk}

    def attended(order: list[list[tuple[int, int]]]) -> dict[tuple[int, int], torch.Tensor]:
        rows = [row for chunk in order for row in chunk]
        step = build_step(pool, cells, rows)
        stacked = torch.stack([query[row] for row in rows])
        out = cpu_runs.attend_cells(stacked, pool.keys[0], pool.values[0], step, reach=ALL, scale=0.3)
        return dict(zip(rows, out, strict=True))

    together, reordered = attended(chunks), attended(rng.sample(chunks, len(chunks)))
    for row, out in together.items():
        torch.testing.assert_close(out, reordered[row], atol=2e-6, rtol=0)
        torch.testing.assert_close(out, attended([[row]])[row], atol=2e-6, rtol=0)


def test_layers_share_one_plan_per_reach_and_a_new_step_has_its_own() -> None:
    pool = plain_pool(50, kv_heads=1, k_dim=8, layers=3)
    reaches = [ALL, Reach("window", 4)]
    step = build_step(pool, [list(range(20))], [(0, 19)], reaches=reaches)
    for layer in range(3):
        for reach in reaches:
            attend(
                torch.randn(1, 2, 8), torch.randn(1, 1, 8), torch.randn(1, 1, 8), layer, step, reach=reach, scale=1.0
            )
    assert len(step.plans) == 2
    assert build_step(pool, [list(range(20))], [(0, 19)]).plans == {}
