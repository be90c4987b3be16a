"""The CUDA attention kernels under Triton's interpreter, against the mask form. `conftest.py` switches it on.

About 2 ms an inner block: a case is at most 64 programs of 4 blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cache.geometry import FP8, KvScales, Reach
from support.steps import build_step, plain_pool

pytest.importorskip("triton", reason="needs triton: pip install triton")
if torch.cuda.is_available():
    pytest.skip("the kernels run compiled here, in tests/gpu/test_gpu_attend.py", allow_module_level=True)

from cache.attend import reference, triton_cells

ALL = Reach()


def check(
    cells: list[list[int]],
    rows: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (16, 16),
    reach: Reach = ALL,
    width: int | None = None,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-5,
    num_pieces: int = 1,
    tile_rows: int = 1,
    page_cells: int = 8,
    **extras: Any,
) -> None:
    pool = plain_pool(200, kv_heads=heads[1], k_dim=dims[0], v_dim=dims[1], dtype=dtype)
    for store in (pool.keys[0], pool.values[0]):
        owned = torch.tensor(sorted({cell + 1 for own in cells for cell in own}))
        kept = store[owned].clone()
        store.fill_(float("nan"))
        store[owned] = kept
    step = build_step(pool, cells, rows, reaches=[reach], width=width, page_cells=page_cells)
    query = torch.randn(step.width, heads[0], dims[0]).to(dtype)
    args = (query, pool.keys[0], pool.values[0], step)
    out = triton_cells.attend_cells(*args, reach=reach, scale=0.3, num_pieces=num_pieces, tile_rows=tile_rows, **extras)
    expected = reference.attend_cells(*args, reach=reach, scale=0.3, **extras)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


SCATTERED = [list(range(199, 49, -1)), list(range(10, 40)), [3]]
DECODES = [(1, 29), (0, 149), (2, 0)]
CHUNK = [(0, position) for position in range(66, 74)]


@pytest.mark.parametrize("num_pieces", [1, 2, 8])
def test_decodes_of_any_length_merge_over_any_number_of_parts(num_pieces: int) -> None:
    """More parts than a short row has blocks leave some without a cell."""
    check(SCATTERED, DECODES, num_pieces=num_pieces)


@pytest.mark.parametrize("reach", [ALL, Reach("window", 70)])
@pytest.mark.parametrize("num_pieces", [1, 2])
def test_pages_of_whole_blocks_are_read_block_by_block(num_pieces: int, reach: Reach) -> None:
    """Runs over several pages, and windows that begin in the middle of a block."""
    check(SCATTERED, [*CHUNK, *DECODES], page_cells=64, num_pieces=num_pieces, reach=reach, tile_rows=4)


@pytest.mark.parametrize(("tile_rows", "num_pieces"), [(1, 1), (4, 1), (4, 2), (8, 1)])
def test_chunk_rows_that_share_their_loads_see_no_more_than_their_own_run(tile_rows: int, num_pieces: int) -> None:
    """Tiles of one sequence, a tile over a boundary, and padding that fills up the last tile."""
    check(SCATTERED, [*CHUNK[:6], DECODES[0]], width=10, num_pieces=num_pieces, tile_rows=tile_rows)


def test_prompts_that_meet_in_a_tile_read_their_own_cells_there() -> None:
    """With a decode and a short one between them, which run row by row."""
    rows = [*CHUNK[:5], (2, 0), *((1, position) for position in range(22, 30))]
    check(SCATTERED, rows, tile_rows=8, num_pieces=2)
    check(SCATTERED, rows, tile_rows=16)


@pytest.mark.parametrize("page_cells", [8, 64])
def test_a_batch_invariant_step_gives_each_row_the_same_bits_beside_any_others(page_cells: int) -> None:
    pool = plain_pool(500, kv_heads=2, k_dim=16)
    cells = [list(range(0, 480)), list(range(10, 40)), [3]]
    rows = [(0, 400), (0, 401), (1, 29), (2, 0), *((1, position) for position in range(8, 16))]
    queries = {row: torch.randn(4, 16) for row in rows}

    def run(rows: list[tuple[int, int]], width: int) -> torch.Tensor:
        step = replace(build_step(pool, cells, rows, width=width, page_cells=page_cells), batch_invariant=True)
        query = torch.stack([queries[row] for row in rows] + [torch.randn(4, 16)] * (width - len(rows)))
        return triton_cells.attend_cells(query, pool.keys[0], pool.values[0], step, reach=ALL, scale=0.3)[: len(rows)]

    together = run(list(queries), 12)
    assert torch.equal(run(list(queries)[::-1], 14).flip(0), together)
    for row, expected in zip(queries, together, strict=True):
        assert torch.equal(run([row], 1)[0], expected)


@pytest.mark.parametrize("tile_rows", [1, 4])
@pytest.mark.parametrize("reach", [Reach("window", 3), Reach("window", 70), Reach("chunk", 64)])
def test_windows_and_chunks_begin_where_they_should(reach: Reach, tile_rows: int) -> None:
    check(SCATTERED, [*CHUNK, *DECODES], reach=reach, tile_rows=tile_rows)


@pytest.mark.parametrize(
    ("extras", "num_pieces"),
    [({"softcap": 2.0}, 1), ({"sinks": True}, 1), ({"sinks": True}, 2), ({"softcap": 2.0, "sinks": True}, 2)],
    ids=str,
)
def test_caps_and_sinks(extras: dict[str, Any], num_pieces: int) -> None:
    sinks = {"sinks": torch.randn(2)} if "sinks" in extras else {}
    check(SCATTERED, [*CHUNK[:4], *DECODES], heads=(2, 1), tile_rows=4, num_pieces=num_pieces, **(extras | sinks))


def test_a_softcap_saturates_instead_of_overflowing() -> None:
    check(SCATTERED, DECODES, softcap=1e-3, tolerance=1e-4)


@pytest.mark.parametrize(
    ("heads", "dims"),
    [((1, 1), (64, 64)), ((3, 3), (80, 80)), ((3, 1), (96, 96)), ((4, 2), (256, 256)), ((20, 1), (24, 8))],
    ids=str,
)
def test_head_groups_and_widths_that_are_no_power_of_two(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    check(SCATTERED, [*CHUNK[:2], *DECODES[:1]], heads=heads, dims=dims, tile_rows=2, num_pieces=2)


@pytest.mark.parametrize("heads", [(8, 1), (9, 1), (18, 2)], ids=str)
def test_each_head_of_a_group_is_merged_from_its_own_results(heads: tuple[int, int]) -> None:
    """Groups of up to 8 heads, and more, are merged by code of their own."""
    check(SCATTERED, DECODES[:2], heads=heads, num_pieces=4, sinks=torch.randn(heads[0]))


@pytest.mark.parametrize("num_pieces", [1, 2])
def test_half_precision_multiplies_halves_and_sums_floats(num_pieces: int) -> None:
    check(SCATTERED, [*CHUNK[:4], *DECODES], dtype=torch.float16, tolerance=3e-3, tile_rows=4, num_pieces=num_pieces)


@pytest.mark.parametrize("num_pieces", [1, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 3e-3)])
def test_fp8_cells_are_read_as_what_is_stored_times_its_scales(
    dtype: torch.dtype, tolerance: float, num_pieces: int
) -> None:
    pool = plain_pool(200, kv_heads=1, k_dim=16, v_dim=24, dtype=FP8)
    step = build_step(pool, SCATTERED, [*CHUNK[:4], *DECODES])
    query, sinks = torch.randn(step.width, 2, 16).to(dtype), torch.randn(2)
    args = {"reach": ALL, "scale": 0.3, "softcap": 3.0, "sinks": sinks}
    out = triton_cells.attend_cells(
        query,
        pool.keys[0],
        pool.values[0],
        step,
        scales=KvScales(0.7, 2.5),
        num_pieces=num_pieces,
        tile_rows=4,
        **args,
    )
    full = pool.keys[0].float() * 0.7, pool.values[0].float() * 2.5
    expected = reference.attend_cells(query, *full, step, **args)
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


def test_a_query_that_is_a_transposed_view_is_read_through_its_strides() -> None:
    pool = plain_pool(50, kv_heads=1, k_dim=16)
    step = build_step(pool, [list(range(40))], [(0, 38), (0, 39)])
    query = torch.randn(2, 2, 16).transpose(0, 1)
    args = (query, pool.keys[0], pool.values[0], step)
    out = triton_cells.attend_cells(*args, reach=ALL, scale=0.3)
    torch.testing.assert_close(out, reference.attend_cells(*args, reach=ALL, scale=0.3), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("width", "group", "expected"), [(1, 4, 1), (32, 4, 1), (256, 4, 16), (256, 3, 16), (256, 1, 64), (256, 128, 1)]
)
def test_tiles_fill_a_matrix_product_and_never_outgrow_the_step(width: int, group: int, expected: int) -> None:
    assert triton_cells.default_tile_rows(width, group, triton_cells.block_shape(128, upcast=False)) == expected
