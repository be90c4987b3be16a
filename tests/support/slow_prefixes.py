"""A prefix tree of one dict, one token at a time: slow, and plain enough to be right. The oracle of `cache.radix`."""

from __future__ import annotations

from collections.abc import Iterator

Prefix = tuple[str | None, tuple[int, ...]]
"""A salt, and one or more tokens from a sequence's start."""


class SlowPrefixes:
    """Each prefix has the cell of its last token, and the time of its last release."""

    def __init__(self) -> None:
        self.cells: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.leases: list[Prefix] = []
        self._now = 0

    def longest(self, salt: str | None, tokens: tuple[int, ...]) -> int:
        length = 0
        while length < len(tokens) and (salt, tokens[: length + 1]) in self.cells:
            length += 1
        return length

    def cells_of(self, lease: Prefix) -> list[int]:
        return [self.cells[prefix] for prefix in _up_to(lease)]

    def locked(self) -> set[Prefix]:
        return {prefix for lease in self.leases for prefix in _up_to(lease)}

    def extend(self, lease: Prefix, tokens: tuple[int, ...], cells: list[int]) -> Prefix:
        """cells: of all tokens."""
        longer = (lease[0], tokens)
        for prefix, cell in zip(_up_to(longer), cells, strict=True):
            self.cells.setdefault(prefix, cell)
            self.used.setdefault(prefix, 0)
        self.leases[self.leases.index(lease)] = longer
        return longer

    def release(self, lease: Prefix) -> None:
        self.leases.remove(lease)
        self._now += 1
        self.used.update((prefix, self._now) for prefix in _up_to(lease))

    def evict(self, num: int) -> list[int]:
        """The cells that go, by going through everything for each."""
        gone: list[int] = []
        while len(gone) < num:
            locked = self.locked()
            inner = {(salt, tokens[:-1]) for salt, tokens in self.cells}
            idle = [prefix for prefix in self.cells if prefix not in locked and prefix not in inner]
            if not idle:
                break
            oldest = min(idle, key=lambda prefix: self.used[prefix])
            gone.append(self.cells.pop(oldest))
            del self.used[oldest]
        return gone


def _up_to(prefix: Prefix) -> Iterator[Prefix]:
    salt, tokens = prefix
    return ((salt, tokens[:end]) for end in range(1, len(tokens) + 1))
