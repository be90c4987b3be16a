"""PLAN-*: how a packed axis is cut into forwards."""

import pytest

from static_graphs.methods import method_table, plan_slices

DENSE = method_table((1, 2, 4, 8), 32)
SPARSE = method_table((1, 4), 32)
STATIC = method_table((1, 4), None)


def cut(total, methods):
    return [(methods[s.method].name, s.length, s.width) for s in plan_slices(total, methods)]


@pytest.mark.parametrize(
    ("methods", "total", "expected"),
    [
        (DENSE, 1, [("forward_1", 1, 1)]),
        (DENSE, 3, [("forward_4", 3, 4)]),
        (DENSE, 7, [("forward_8", 7, 8)]),
        (DENSE, 9, [("forward_others", 9, 9)]),
        (DENSE, 32, [("forward_others", 32, 32)]),
        (DENSE, 40, [("forward_others", 32, 32), ("forward_8", 8, 8)]),
        (DENSE, 33, [("forward_others", 32, 32), ("forward_1", 1, 1)]),
        (SPARSE, 2, [("forward_4", 2, 4)]),
        (SPARSE, 5, [("forward_others", 5, 5)]),
        (STATIC, 9, [("forward_4", 4, 4), ("forward_4", 4, 4), ("forward_1", 1, 1)]),
        (DENSE, 0, []),
        ((), 5, []),
    ],
)
def test_plan_4_each_slice_runs_in_the_narrowest_method_that_holds_it(methods, total, expected):
    """PLAN-2, PLAN-3, T-PLAN."""
    assert cut(total, methods) == expected


def test_plan_1_slices_cover_the_axis_without_gap_or_overlap():
    for total in range(1, 200):
        slices = plan_slices(total, DENSE)
        assert [s.offset for s in slices] == [sum(t.length for t in slices[:i]) for i in range(len(slices))]
        assert sum(s.length for s in slices) == total
        assert all(s.width >= s.length for s in slices)


def test_exe_3_methods_are_sorted_and_the_dynamic_one_is_widest():
    """EXE-1: `forward_{N}` and one `forward_others`."""
    assert [m.name for m in method_table((8, 1, 4), 32)] == ["forward_1", "forward_4", "forward_8", "forward_others"]


@pytest.mark.parametrize(
    ("widths", "dynamic", "words"),
    [((), None, "at least one width"), ((0, 1), None, "forward_0"), ((1, 32), 32, "wider than forward_32")],
)
def test_a_table_that_cannot_serve_is_refused(widths, dynamic, words):
    with pytest.raises(ValueError, match=words):
        method_table(widths, dynamic)
