"""How the runs of a step are cut, under Triton's interpreter: every cell once, and never too many pieces."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import pytest
import torch

from cache.geometry import Reach
from support.steps import build_step, plain_pool

pytest.importorskip("triton", reason="needs triton: pip install triton")
if torch.cuda.is_available():
    pytest.skip("the kernels run compiled here, in tests/gpu/test_gpu_attend.py", allow_module_level=True)

from cache.attend.work import Pieces, pieces_of

BLOCK = 16
TILE = 4


def cut(
    lengths: list[int],
    rows: list[tuple[int, int]],
    *,
    wanted: int,
    reach: Reach,
    rows_each: int = 1,
    tile_rows: int = 1,
) -> tuple[Pieces, list[list[int]], list[tuple[int, int]]]:
    """-> the pieces, the table's entries up to the first that is none, and (first, behind the last) of each row."""
    pool = plain_pool(sum(lengths), kv_heads=1, k_dim=16)
    order = iter(range(sum(lengths)))
    cells = [[next(order) for _ in range(length)] for length in lengths]
    step = build_step(pool, cells, rows, reaches=[reach], page_cells=64)
    pieces = pieces_of(
        step, reach, wanted=wanted, rows_each=rows_each, tile_rows=tile_rows, block=BLOCK, num_kv_heads=1
    )
    entries = pieces.table.tolist()
    count = next((at for at, entry in enumerate(entries) if entry[0] < 0), len(entries))
    assert all(entry[0] == -1 for entry in entries[count:]), "a piece stands behind one that is none"
    run = step.runs[reach]
    spans = [(int(start), int(start + length)) for start, length in zip(run.start, run.count, strict=True)]
    for group, _, _, _, owner, first, _, page in entries[:count]:
        assert owner == rows[group * rows_each][0]
        assert page == int(step.page_table[owner, first // 64])
    return pieces, entries[:count], spans


def check(pieces: Pieces, entries: list[list[int]], spans: dict[int, tuple[int, int]]) -> None:
    """spans: of each group that has pieces."""
    found = defaultdict(list)
    for group, number, of, slot, _, first, last, _ in entries:
        found[group].append((number, first, last, of, slot))
    assert set(found) == set(spans)
    slots = []
    for group, (start, end) in spans.items():
        mine = sorted(found[group])
        assert [number for number, *_ in mine] == list(range(len(mine)))
        assert {of for _, _, _, of, _ in mine} == {len(mine)}
        assert mine[0][1] == start // BLOCK * BLOCK
        assert mine[-1][2] == end
        assert all(one[2] == other[1] and one[2] % BLOCK == 0 for one, other in pairwise(mine))
        assert all(first < last for _, first, last, _, _ in mine)
        if len(mine) > 1:
            slots += [slot for *_, slot in mine]
            assert [slot for *_, slot in mine] == list(range(mine[0][4], mine[0][4] + len(mine)))
    assert len(set(slots)) == len(slots)
    assert max(slots, default=0) < pieces.most_slots
    assert pieces.most == len(pieces.table)


@pytest.mark.parametrize("seed", range(12))
def test_pieces_hold_every_cell_of_every_run_once(seed: int) -> None:
    """Runs of any lengths, alike or not, windows, and more or fewer pieces than there are rows."""
    rng = random.Random(seed)
    longest = rng.choice([5, 70, 700, 3000])
    lengths = [rng.randint(1, longest) if rng.random() < 0.7 else longest for _ in range(rng.randint(1, 40))]
    rows = [(owner, length - 1) for owner, length in enumerate(lengths)]
    reach = rng.choice([Reach(), Reach("window", 90), Reach("chunk", 128)])
    pieces, entries, spans = cut(lengths, rows, wanted=rng.choice([1, 4, 16, 66]), reach=reach)
    check(pieces, entries, dict(enumerate(spans)))


@pytest.mark.parametrize("wanted", [1, 2, 5, 33])
def test_uneven_runs_never_make_more_pieces_than_there_is_room_for(wanted: int) -> None:
    """The worst there is: one run holds nearly all, and half of the size would be twice the pieces."""
    for lengths in ([4000, *[1] * 30], [1500, 1500, 1500, *[400] * 9], [600] * 20 + [2000]):
        rows = [(owner, length - 1) for owner, length in enumerate(lengths)]
        pieces, entries, spans = cut(lengths, rows, wanted=wanted, reach=Reach())
        check(pieces, entries, dict(enumerate(spans)))


def test_each_row_is_cut_either_in_a_tile_or_alone() -> None:
    lengths = [300, 40, 90]
    rows = [*((0, p) for p in range(200, 211)), (1, 39), *((2, p) for p in range(70, 80))]
    *_, alone, spans = (None, *cut(lengths, rows, wanted=6, tile_rows=TILE, reach=Reach()))
    pieces, tiles, _ = cut(lengths, rows, wanted=6, rows_each=TILE, tile_rows=TILE, reach=Reach())
    of_tile = [[owner for owner, _ in rows[at : at + TILE]] for at in range(0, len(rows), TILE)]
    shared = [tile for tile, owners in enumerate(of_tile) if len(set(owners)) == 1]
    assert {group for group, *_ in tiles} == set(shared)
    assert {group for group, *_ in alone} == {row for row in range(len(rows)) if row // TILE not in shared}
    together = {
        tile: (
            min(first for first, _ in spans[tile * TILE : (tile + 1) * TILE]),
            max(last for _, last in spans[tile * TILE : (tile + 1) * TILE]),
        )
        for tile in shared
    }
    check(pieces, tiles, together)


def test_long_pieces_come_first() -> None:
    lengths = [30, 900, 31, 800, 29]
    rows = [(owner, length - 1) for owner, length in enumerate(lengths)]
    _, entries, _ = cut(lengths, rows, wanted=4, reach=Reach())
    sizes = [last - first for *_, first, last, _ in entries]
    assert min(sizes[:2]) > max(sizes[-3:])


def test_a_step_is_cut_once_for_all_its_layers() -> None:
    pool = plain_pool(40, kv_heads=1, k_dim=16)
    step = build_step(pool, [list(range(40))], [(0, 39)])
    args = {"wanted": 2, "rows_each": 1, "tile_rows": 1, "block": BLOCK, "num_kv_heads": 1}
    assert pieces_of(step, Reach(), **args) is pieces_of(step, Reach(), **args)
