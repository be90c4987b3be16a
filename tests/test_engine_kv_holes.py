"""Where a session may begin on a path with holes: against a slow oracle that looks at every window."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cache.geometry import Geometry, InvalidConfig, LayerGeometry, Reach
from cache.offload.groups import Groups
from engine.kv_holes import Holes

CHUNK, CELLS = 16, 400


def groups_of(*windows: int | None, full: bool = False) -> Groups:
    reaches = [Reach() if window is None else Reach("window", window) for window in windows]
    layers = tuple(LayerGeometry(1, 4, 4, reach) for reach in reaches)
    return Groups.of(Geometry(layers), torch.float32, CHUNK, separate=not full, full_windows=full)


def brought(groups: Groups, first: int, last: int) -> list[int]:
    return [first if g.window_chunks is None else max(first, last - g.window_chunks) for g in groups.object_groups]


@pytest.mark.parametrize("windows", [(None, 4), (None, 16, 40), (None, 5, 5, 20), (4,), (24, 8)])
def test_a_prefix_is_usable_where_each_windows_end_is_whole(windows: tuple[int | None, ...]) -> None:
    rng = np.random.default_rng(0)
    groups = groups_of(*windows)
    for _ in range(60):
        holes = Holes(groups, CELLS)
        path = rng.permutation(CELLS)[: 8 * CHUNK].astype(np.int32)
        there = {layer: np.ones(path.size, bool) for layer in range(len(windows))}
        for _ in range(rng.integers(1, 4)):
            first = int(rng.integers(0, 7))
            last = int(rng.integers(first + 1, 9))
            span = slice(first * CHUNK, last * CHUNK)
            if rng.random() < 0.3:
                holes.computed(path[span])
                for each in there.values():
                    each[span] = True
                continue
            begins = brought(groups, first, last)
            holes.loaded(path[span], first, begins)
            for group in groups.object_groups:
                for member in groups.members(group.index):
                    for layer in member.layers:
                        there[layer][span] = member.window is None
                        for chunk in range(begins[group.index], last):
                            there[layer][(chunk + 1) * CHUNK - member.slots_per_chunk : (chunk + 1) * CHUNK] = True
        length = int(rng.integers(0, path.size + 1))
        expected = max(
            end
            for end in range(length + 1)
            if all(there[layer][max(0, end - (w or end)) : end].all() for layer, w in enumerate(windows))
        )
        assert holes.usable(path[:length]) == expected


def test_what_an_object_lacks_is_not_stored_and_full_windows_have_no_holes() -> None:
    groups = groups_of(None, 4)
    holes, cells = Holes(groups, CELLS), np.arange(2 * CHUNK, dtype=np.int32)
    assert not holes.has_any
    holes.loaded(cells, 3, [3, 4])
    assert [holes.can_store(cells[:CHUNK], group) for group in (0, 1)] == [True, False]
    assert [holes.can_store(cells[CHUNK:], group) for group in (0, 1)] == [True, True]
    whole = Holes(groups_of(None, 4, full=True), CELLS)
    whole.loaded(cells, 0, [0])
    assert (whole.has_any, whole.usable(cells)) == (False, cells.size)


def test_more_kinds_of_windows_than_bits_are_refused_by_name() -> None:
    with pytest.raises(InvalidConfig, match=r"33 kinds of windows.*--kv-full-windows"):
        Holes(groups_of(None, *range(1, 34)), CELLS)
