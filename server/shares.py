"""What each API process of one server has admitted, in memory that all of them see: so their bounds are one bound.

A process writes its own two numbers and reads the others', without a lock: two that admit in the same microsecond may
together pass a bound by what one of them took.

    slots file   [ sequences, prompt tokens that wait ] a process, int64
"""

from __future__ import annotations

import mmap
from pathlib import Path

_FIELDS = 2
_ITEM_BYTES = 8


def make(path: Path, processes: int) -> None:
    """The file, before any of them opens it."""
    path.write_bytes(bytes(processes * _FIELDS * _ITEM_BYTES))


class Share:
    """One process's place in the file."""

    def __init__(self, path: Path, number: int) -> None:
        """number: of the process, from 0. Its own numbers are 0 from here on, whatever a dead one left."""
        with path.open("r+b") as file:
            self._items = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._own = number * _FIELDS
        self.tell(0, 0)

    def tell(self, slots: int, tokens: int) -> None:
        self._items[self._own], self._items[self._own + 1] = slots, tokens

    def others(self) -> tuple[int, int]:
        """(sequences, prompt tokens that wait) of all other processes."""
        slots = sum(self._items[::_FIELDS]) - self._items[self._own]
        return slots, sum(self._items[1::_FIELDS]) - self._items[self._own + 1]
