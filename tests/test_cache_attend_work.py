"""How the runs of a step are cut, under Triton's interpreter: every cell once, and never too many pieces."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
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
    wanted: int | None,
    reach: Reach,
    rows_each: int = 1,
    tile_rows: int = 1,
    width: int | None = None,
) -> tuple[Pieces, list[list[int]], list[tuple[int, int]]]:
    """-> the pieces, those entries of the table that are one, and (first, behind the last) of each row."""
    pool = plain_pool(sum(lengths), kv_heads=1, k_dim=16)
    order = iter(range(sum(lengths)))
    cells = [[next(order) for _ in range(length)] for length in lengths]
    step = build_step(pool, cells, rows, reaches=[reach], page_cells=64, width=width)
    pieces = pieces_of(
        step, reach, wanted=wanted, rows_each=rows_each, tile_rows=tile_rows, block=BLOCK, num_kv_heads=1
    )
    entries = pieces.table.tolist()
    rows = rows + [rows[-1]] * (step.width - len(rows))  # so is padding
    if pieces.shares is None:
        count = next((at for at, entry in enumerate(entries) if entry[0] < 0), len(entries))
        assert all(entry[0] == -1 for entry in entries[count:]), "a piece stands behind one that is none"
    else:
        count = int(pieces.shares[-1])
    run = step.runs[reach]
    spans = [(int(start), int(start + length)) for start, length in zip(run.start, run.count, strict=True)]
    for group, _, _, _, owner, first, _, page in entries[:count]:
        tile, is_tail = divmod(group, 2)
        row = group if rows_each == 1 else tail(tile, rows_each, step.width) if is_tail else tile * rows_each
        assert owner == rows[row][0]
        assert page == int(step.page_table[owner, first // 64])
    return pieces, entries[:count], spans


def tail(tile: int, tile_rows: int, width: int) -> int:
    return min((tile + 1) * tile_rows, width) - 1


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
    assert len(entries) <= len(pieces.table)
    assert pieces.programs == (len(pieces.table) if pieces.shares is None else len(pieces.shares) - 1)


def any_decodes(rng: random.Random) -> tuple[list[int], list[tuple[int, int]]]:
    """-> sequences' lengths, alike or not, and the last row of each."""
    longest = rng.choice([5, 70, 700, 3000])
    lengths = [rng.randint(1, longest) if rng.random() < 0.7 else longest for _ in range(rng.randint(1, 40))]
    return lengths, [(owner, length - 1) for owner, length in enumerate(lengths)]


@pytest.mark.parametrize("seed", range(12))
def test_pieces_hold_every_cell_of_every_run_once(seed: int) -> None:
    """Runs of any lengths, alike or not, windows, and more or fewer pieces than there are rows."""
    rng = random.Random(seed)
    lengths, rows = any_decodes(rng)
    reach = rng.choice([Reach(), Reach("window", 90), Reach("chunk", 128)])
    pieces, entries, spans = cut(lengths, rows, wanted=rng.choice([1, 4, 16, 66]), reach=reach)
    check(pieces, entries, dict(enumerate(spans)))


@pytest.mark.parametrize("seed", range(12))
def test_each_program_has_an_equal_share_of_neighbouring_pieces(seed: int) -> None:
    """Counted in blocks; where they are many, one more a run for its beginning and end. The last may have less."""
    rng = random.Random(seed)
    lengths, rows = any_decodes(rng)
    wanted = rng.choice([1, 4, 16, 66])
    pieces, entries, spans = cut(lengths, rows, wanted=wanted, reach=Reach())
    assert pieces.shares is not None
    if len(lengths) <= wanted and all(entry[2] == 1 for entry in entries):
        return  # nearly even
    shares = pieces.shares.tolist()
    assert shares[0] == 0
    assert shares[-1] == len(entries)
    assert all(one <= other for one, other in pairwise(shares))
    blocks_of_all = sum(-(-last // BLOCK) for _, last in spans)
    gap = int(blocks_of_all > 4 * wanted)
    size = -(-(blocks_of_all + gap * len(rows)) // wanted)
    held = [
        sum(-(-(entry[6] - entry[5]) // BLOCK) + gap * (entry[1] == entry[2] - 1) for entry in entries[one:other])
        for one, other in pairwise(shares)
    ]
    used = [blocks for blocks in held if blocks]
    assert held[: len(used)] == used
    # A gap may lie on the border of two shares, and count to neither's pieces or to the one behind it.
    assert all(size - gap <= blocks <= size + gap for blocks in used[:-1])
    assert used[-1] <= size + gap


def test_nearly_even_runs_that_are_no_more_than_the_programs_stay_whole() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(900, 1100) for _ in range(30)]
    rows = [(owner, length - 1) for owner, length in enumerate(lengths)]
    pieces, entries, spans = cut(lengths, rows, wanted=32, reach=Reach())
    check(pieces, entries, dict(enumerate(spans)))
    assert {entry[2] for entry in entries} == {1}
    assert pieces.shares is not None
    assert pieces.shares.tolist() == [*range(31), 30, 30]
    parted = cut([*lengths, 2000], [*rows, (30, 1999)], wanted=32, reach=Reach())[1]
    assert max(entry[2] for entry in parted) > 1


@pytest.mark.parametrize("wanted", [1, 2, 5, 33])
def test_uneven_runs_never_make_more_pieces_than_there_is_room_for(wanted: int) -> None:
    """The worst there is: one run holds nearly all, and half of the size would be twice the pieces."""
    for lengths in ([4000, *[1] * 30], [1500, 1500, 1500, *[400] * 9], [600] * 20 + [2000]):
        rows = [(owner, length - 1) for owner, length in enumerate(lengths)]
        pieces, entries, spans = cut(lengths, rows, wanted=wanted, reach=Reach())
        check(pieces, entries, dict(enumerate(spans)))


@pytest.mark.parametrize("seed", range(8))
def test_each_row_is_cut_alone_or_with_others_of_its_sequence_at_a_tiles_beginning_or_end(seed: int) -> None:
    """Where prompts meet in a tile, both are read once for all their rows in it; what lies between them, row by row."""
    rng = random.Random(seed)
    tile_rows = rng.choice([4, 8, 16])
    lengths = [rng.choice([rng.randint(1, 6), rng.randint(20, 300)]) for _ in range(rng.randint(1, 12))]
    rows = [
        (owner, position)
        for owner, length in enumerate(lengths)
        for position in range(length - rng.choice([1, rng.randint(1, min(length, 40))]), length)
    ]
    together: dict[int, list[int]] = {}
    for at in range(0, len(rows), tile_rows):
        tile = range(at, min(at + tile_rows, len(rows)))
        for side, owner in enumerate([rows[tile[0]][0], rows[tile[-1]][0]]):
            mine = [row for row in tile if rows[row][0] == owner]
            if sum(rows[row][1] > 0 for row in mine) >= 4 and mine not in together.values():
                together[at // tile_rows * 2 + side] = mine
    _, alone, spans = cut(lengths, rows, wanted=6, tile_rows=tile_rows, reach=Reach())
    shared = {row for mine in together.values() for row in mine}
    assert {row for row, *_ in alone} == set(range(len(rows))) - shared
    pieces, tiles, _ = cut(lengths, rows, wanted=6, rows_each=tile_rows, tile_rows=tile_rows, reach=Reach())
    check(
        pieces,
        tiles,
        {
            group: (min(spans[row][0] for row in mine), max(spans[row][1] for row in mine))
            for group, mine in together.items()
        },
    )


def test_where_all_rows_are_in_tiles_no_program_has_a_piece_of_a_row() -> None:
    rows = [(owner, position) for owner in range(2) for position in range(36, 40)]
    pieces, alone, _ = cut([40, 40], rows, wanted=6, tile_rows=TILE, reach=Reach())
    assert alone == []
    assert pieces.shares is not None
    assert pieces.shares.tolist() == [0] * 7


def test_padding_is_nobody_to_share_a_tile_with() -> None:
    lengths = [100, 100, 100]
    rows = [(owner, 99) for owner in range(3)]
    args = {"wanted": 6, "tile_rows": TILE, "reach": Reach(), "width": 12}
    assert {row for row, *_ in cut(lengths, rows, **args)[1]} == set(range(12))
    assert not cut(lengths, rows, rows_each=TILE, **args)[1]


def test_a_run_cut_by_its_own_length_is_cut_alike_whatever_the_others_are() -> None:
    """And a long one into no more pieces than every run may have."""
    rng = random.Random(0)
    own = [1, 200, 256, 257, 700, 5000]
    cuts = set()
    for _ in range(6):
        others = [rng.randint(1, 1500) for _ in range(rng.randint(0, 12))]
        lengths = own + others
        rows = [(owner, length - 1) for owner, length in enumerate(lengths)]
        rng.shuffle(rows)
        pieces, entries, spans = cut(lengths, rows, wanted=None, reach=Reach())
        check(pieces, entries, dict(enumerate(spans)))
        cuts.add(tuple(sorted(entry[4:7] for entry in map(tuple, entries) if entry[4] < len(own))))
    assert len(cuts) == 1
    assert max(Counter(owner for owner, *_ in cuts.pop()).values()) == 8


def test_long_pieces_of_tiles_come_first() -> None:
    lengths = [30, 900, 31, 800, 29]
    rows = [(owner, length - 1 - back) for owner, length in enumerate(lengths) for back in range(TILE)]
    _, entries, _ = cut(lengths, rows, wanted=4, rows_each=TILE, tile_rows=TILE, reach=Reach())
    sizes = [last - first for *_, first, last, _ in entries]
    assert min(sizes[:2]) > max(sizes[-3:])


def test_a_step_is_cut_once_for_all_its_layers() -> None:
    pool = plain_pool(40, kv_heads=1, k_dim=16)
    step = build_step(pool, [list(range(40))], [(0, 39)])
    args = {"wanted": 2, "rows_each": 1, "tile_rows": 1, "block": BLOCK, "num_kv_heads": 1}
    assert pieces_of(step, Reach(), **args) is pieces_of(step, Reach(), **args)
