"""Attention over cells on a GPU: the compiled kernels against the mask form, bfloat16 and captured graphs included."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from cache.attend import attend, reference
from cache.geometry import Reach
from cache.step import CellStep
from support.steps import PlainPool, build_step, plain_pool, random_cells, random_rows

REACHES = [Reach(), Reach("window", 40), Reach("chunk", 256)]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(
    ("heads", "dims"),
    [((32, 8), (128, 128)), ((9, 3), (64, 64)), ((8, 8), (96, 96)), ((4, 2), (256, 256)), ((16, 1), (192, 128))],
    ids=str,
)
def test_the_kernels_equal_the_mask_in_any_mix_of_rows(
    heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> None:
    """Decodes, chunks, forks, padding and every reach, with and without a cap and sinks."""
    from cache.attend import triton_cells

    for seed, num_pieces in ((0, None), (1, 4)):
        rng = random.Random(seed)
        pool = plain_pool(4000, kv_heads=heads[1], k_dim=dims[0], v_dim=dims[1], dtype=dtype, device="cuda")
        cells = random_cells(rng, 4000, sequences=5, longest=600)
        rows = random_rows(rng, cells, longest_chunk=60)
        step = build_step(pool, cells, rows, reaches=REACHES, width=len(rows) + 5, page_cells=64, device="cuda")
        args = (torch.randn(step.width, heads[0], dims[0], device="cuda").to(dtype), pool.keys[0], pool.values[0], step)
        for reach in REACHES:
            for extras in (dict[str, Any](), {"softcap": 3.0}, {"sinks": torch.randn(heads[0], device="cuda")}):
                out = triton_cells.attend_cells(*args, reach=reach, scale=0.1, num_pieces=num_pieces, **extras)
                expected = reference.attend_cells(*args, reach=reach, scale=0.1, **extras)
                torch.testing.assert_close(out, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_nan_in_cells_nobody_reads_never_leaks() -> None:
    pool = plain_pool(300, kv_heads=2, k_dim=64, dtype=torch.bfloat16, device="cuda")
    cells = [list(range(10, 200)), [250, 240, 245]]
    owned = torch.tensor([cell + 1 for own in cells for cell in own], device="cuda")
    for store in (pool.keys[0], pool.values[0]):
        kept = store[owned].clone()
        store.fill_(float("nan"))
        store[owned] = kept
    step = build_step(pool, cells, [(1, 2), *((0, p) for p in range(100, 190))], width=96, device="cuda")
    query = torch.randn(96, 4, 64, device="cuda", dtype=torch.bfloat16)
    key = torch.randn(96, 2, 64, device="cuda", dtype=torch.bfloat16)
    assert attend(query, key, key, 0, step, reach=Reach(), scale=0.1).isfinite().all()


def test_a_captured_graph_serves_steps_of_any_mix_and_length() -> None:
    """STG-5, D5: the launch depends on the width alone; what each row reads is looked up through fixed addresses."""
    pool = plain_pool(60_000, kv_heads=2, k_dim=64, dtype=torch.bfloat16, device="cuda")
    first = _step(pool, [1] * 64, longest=30)
    query = torch.randn(64, 8, 64, device="cuda", dtype=torch.bfloat16)
    key = torch.randn(64, 2, 64, device="cuda", dtype=torch.bfloat16)
    attend(query, key, key, 0, first, reach=Reach(), scale=0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(query, key, key, 0, first, reach=Reach(), scale=0.1)
    for chunks in ([1] * 64, [64], [1] * 16 + [48], [7, 1, 30, 1, 1, 24]):
        _overwrite(first, _step(pool, chunks, longest=900))
        query.normal_()
        graph.replay()
        expected = reference.attend_cells(query, pool.keys[0], pool.values[0], first, reach=Reach(), scale=0.1)
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


def _step(pool: PlainPool, chunks: list[int], *, longest: int) -> CellStep:
    """The last rows of a sequence per chunk; always 64 sequences of one page, so that the tables keep their shape."""
    order = iter(random.Random(longest).sample(range(60_000), 60_000))
    lengths = [longest] * len(chunks) + [1] * (64 - len(chunks))
    cells = [[next(order) for _ in range(length)] for length in lengths]
    rows = [(sequence, p) for sequence, chunk in enumerate(chunks) for p in range(longest - chunk, longest)]
    return build_step(pool, cells, rows, page_cells=1024, device="cuda")


def _overwrite(target: CellStep, source: CellStep) -> None:
    """What a cell cache does between replays: the same buffers, another step."""
    run, new = target.runs[Reach()], source.runs[Reach()]
    pairs = [
        (target.write_rows, source.write_rows),
        (target.table_row, source.table_row),
        (target.page_table, source.page_table),
        (target.pages, source.pages),
        (run.start, new.start),
        (run.count, new.count),
    ]
    for old, fresh in pairs:
        old.copy_(fresh)
