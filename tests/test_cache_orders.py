"""R26: three sequences that share cells fork, write, are cut and end in every order there is, one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cache.cells import CellTable
from cache.geometry import CacheFull
from support.slow_cells import SlowCells

CAPACITY, PAGE_CELLS = 5, 2
SCRIPTS = {
    # Steps of each sequence, in its own order. A fork of what is gone, or empty, begins empty.
    "a": (("fork", None, 0), ("write", 3), ("end",)),
    "b": (("fork", "a", 2), ("write", 2), ("end",)),
    "c": (("fork", "b", None), ("cut", 1), ("write", 1)),
}


def orders(left: Counter[str]) -> Iterator[tuple[str, ...]]:
    """Of all steps, every order in which each sequence keeps its own."""
    if not left.total():
        yield ()
    for name in sorted(name for name, count in left.items() if count):
        for rest in orders(left - Counter((name,))):
            yield (name, *rest)


class Both:
    """The table, and the oracle that is told the same."""

    def __init__(self) -> None:
        self._table = CellTable(CAPACITY, len(SCRIPTS), page_cells=PAGE_CELLS)
        self._slow = SlowCells(CAPACITY, len(SCRIPTS))
        self._ids: dict[str, int] = {}
        self.num_full = 0

    def step(self, name: str, verb: str, *arguments: object) -> None:
        table, slow, seq = self._table, self._slow, self._ids.get(name, -1)
        if verb == "fork":
            parent, upto = arguments
            source = self._ids.get(str(parent), -1)
            is_empty = source < 0 or not slow.pos(source)
            self._ids[name] = slow.seq_new() if is_empty else slow.seq_clone(source, upto)  # type: ignore[arg-type]
            made = table.seq_new() if is_empty else table.seq_clone(source, upto)  # type: ignore[arg-type]
            assert made == self._ids[name]
        elif verb == "write":
            self._write([seq] * int(str(arguments[0])))
        elif verb == "cut":
            position = max(0, slow.pos(seq) - int(str(arguments[0])))
            table.rewind(seq, position)
            slow.rewind(seq, position)
        else:
            table.seq_rm(self._ids.pop(name))
            slow.seq_rm(seq)
        assert {each: table.cells_of(each).tolist() for each in slow.lists} == slow.lists
        assert (table.free_cells, table.used_end) == (slow.free_cells, slow.used_end)

    def _write(self, ids: list[int]) -> None:
        try:
            expected = self._slow.place(ids)
        except CacheFull:
            self.num_full += 1
            assert self._table.free_cells < len(ids)
        else:
            assert self._table.place(self._table.admit(ids)).cells.tolist() == expected

    def end(self) -> None:
        self._table.check_integrity()
        for name in [*self._ids]:
            self.step(name, "end")
        self._table.check_integrity()
        assert self._table.free_cells == CAPACITY


def test_r26_every_order_of_three_sequences_that_share_leaves_the_cells_that_it_must() -> None:
    all_orders = [*orders(Counter({name: len(steps) for name, steps in SCRIPTS.items()}))]
    assert len(all_orders) == 1680
    num_full = 0
    for order in all_orders:
        both, left = Both(), {name: iter(steps) for name, steps in SCRIPTS.items()}
        for name in order:
            both.step(name, *next(left[name]))
        both.end()
        num_full += both.num_full
    assert num_full > 0, "in some of them the cells run out"
