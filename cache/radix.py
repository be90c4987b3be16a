"""The prefix tree: which cells hold the K/V of which tokens, long after their sequences have ended (D13).

Owns its nodes, each an edge of tokens and the cells that hold them; holds each of these cells by one reference. Knows
tokens and cell numbers only: no K/V bytes, no sessions, no torch. One thread.

    root of a salt ─┬─ [5 6 7 8]──┬─ [9 9]       tokens 5 6 7 8 9 9 -> cells 0 1 2 3 4 5
                    │  cells 0-3  │  cells 4 5
                    │             └─ [1]
                    └─ [4 4]                     siblings begin with different tokens

A lease is a user's claim on one path from the root: it locks the path's nodes, and a locked node is never evicted. What
nobody has locked is evicted leaf by leaf, least recently used first, so no node outlives the one before it. A lease's
cells beyond its path are its user's alone, until `extend` gives them to the tree.

Salts separate tenants: each has its own root, and no walk leaves it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Protocol

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]
Cells = npt.NDArray[np.int32]


class CellHolder(Protocol):
    """Whose cells they are."""

    def hold_cells(self, cells: Cells) -> None:
        """Take a reference of each cell."""
        ...

    def release_cells(self, cells: Cells) -> None:
        """Give it back."""
        ...


@dataclass(eq=False, slots=True)
class Node:
    """An edge of the tree and the place where it ends. A root's edge is empty."""

    tokens: Tokens  # [n]
    cells: Cells  # [n]
    parent: Node | None
    """None for a root, and for a node that was evicted."""
    salt: str | None
    end: int
    """Tokens from the root to here, its own included."""
    children: dict[int, Node] = field(default_factory=dict)  # by first token
    locks: int = 0
    """Leases on paths through here: as many as on all children together, or more."""
    last_used: int = 0

    @property
    def is_idle_leaf(self) -> bool:
        """May be evicted now."""
        return self.locks == 0 and not self.children and self.parent is not None


@dataclass(eq=False, slots=True)
class Lease:
    """A claim on the path to `node`; the tree moves it on. Ends with `RadixTree.release`, once."""

    node: Node

    @property
    def length(self) -> int:
        """Tokens of the path."""
        return self.node.end


@dataclass(frozen=True, slots=True)
class Match:
    """How much of some tokens the tree has."""

    node: Node
    """The last one that they fill."""
    length: int
    """Tokens that match, those inside an edge behind `node` included."""
    num_locked: int
    """Of them, those that some lease keeps anyway."""


class RadixTree:
    """Longest prefixes by tokens. All token arrays are int64 of one axis; positions count from the root."""

    def __init__(self, holder: CellHolder) -> None:
        self._holder = holder
        self._roots: dict[str | None, Node] = {}
        self._num_held = 0
        self._num_idle = 0
        self._num_shared = 0
        self._num_nodes = 0
        self._clock = count(1)
        # Leaves to evict, least recently used first. An entry is stale when its node is no idle leaf any more, or was
        # used since; the second number keeps nodes from being compared.
        self._idle_leaves: list[tuple[int, int, Node]] = []
        self._entries = count()

    @property
    def num_held(self) -> int:
        """Cells of all nodes."""
        return self._num_held

    @property
    def num_evictable(self) -> int:
        """Cells of nodes that no lease locks: `evict` can let go of them all."""
        return self._num_idle

    @property
    def num_nodes(self) -> int:
        """Without the roots."""
        return self._num_nodes

    @property
    def num_shared(self) -> int:
        """Cells of nodes that two leases or more lock."""
        return self._num_shared

    @property
    def num_leases(self) -> int:
        return sum(root.locks for root in self._roots.values())

    # --- finding ----------------------------------------------------------------------------------------------------

    def match(self, salt: str | None, tokens: Tokens) -> Match:
        """The longest prefix of `tokens` that is here. Changes nothing."""
        root = self._roots.get(salt)
        if root is None:
            return Match(Node(tokens[:0], _NO_CELLS, None, salt, 0), 0, 0)
        node, inside = _walk(root, tokens)
        length, locked = node.end, node
        if inside is not None:
            length, locked = node.end + inside[1], inside[0]
        while locked.locks == 0 and locked.parent is not None:
            locked = locked.parent
        return Match(node, length, min(length, locked.end))

    def found(self, salt: str | None, tokens: Tokens) -> Cells:
        """The cells of the longest prefix of `tokens` that is here. Changes nothing."""
        root = self._roots.get(salt)
        if root is None:
            return _NO_CELLS
        node, inside = _walk(root, tokens)
        cells = _path_cells(node, 0)
        return cells if inside is None else np.concatenate((cells, inside[0].cells[: inside[1]]))

    def cells(self, lease: Lease) -> Cells:
        """The cells of the lease's path, in order."""
        return _path_cells(lease.node, 0)

    def cells_past(self, lease: Lease, tokens: Tokens) -> Cells:
        """What the tree has of `tokens` behind the lease's path: the cells from position `lease.length` on."""
        node, inside = _walk(lease.node, tokens)
        cells = _path_cells(node, lease.length)
        return cells if inside is None else np.concatenate((cells, inside[0].cells[: inside[1]]))

    # --- leases -----------------------------------------------------------------------------------------------------

    def acquire(self, salt: str | None, tokens: Tokens) -> Lease:
        """A lease on the longest prefix of `tokens` that is here, which may be none of them."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(tokens[:0], _NO_CELLS, None, salt, 0)
        return Lease(self._lock(self._reach(root, tokens)))

    def share(self, lease: Lease) -> Lease:
        """Another lease on the same path."""
        return Lease(self._lock(lease.node))

    def extend(self, lease: Lease, tokens: Tokens, cells: Cells) -> None:
        """Make the lease's path `tokens`, whose first `lease.length` are its path already.

        cells: of the positions from `lease.length` on. What the tree lacks of them it holds from here on; where it has
        the tokens, the cells must be its own (`cells_past`), so that each cell has one predecessor everywhere.
        """
        start = lease.length
        assert cells.size == tokens.size - start, (cells.size, tokens.size, start)
        node = self._reach(lease.node, tokens)
        known = node.end - start
        assert np.array_equal(cells[:known], _path_cells(node, start)), "these tokens are here with other cells"
        if node.end < tokens.size:
            node = self._add(node, tokens[node.end :].copy(), cells[known:].copy())
        self._move(lease, node)

    def replace(self, lease: Lease, tokens: Tokens, cells: Cells) -> None:
        """Hold other cells with the same K/V for the positions [lease.length, tokens.size), which must all be here.

        Sequences that have the old cells keep them; the tree lets them go. Nothing may be about to read them by a lease
        alone.
        """
        node = self._reach(lease.node, tokens)
        assert node.end == tokens.size, "the tree lacks some of these tokens"
        assert cells.size == tokens.size - lease.length
        self._holder.hold_cells(cells)
        old = _path_cells(node, lease.length)
        for each in path(node):
            if each.end <= lease.length:
                break
            each.cells = cells[each.end - each.cells.size - lease.length : each.end - lease.length]
        self._holder.release_cells(old)

    def release(self, lease: Lease) -> None:
        """The lease's path was used last now, and may be evicted when nobody else has a lease on it."""
        self._unlock(lease.node)

    # --- letting go -------------------------------------------------------------------------------------------------

    def evict(self, num_cells: int) -> int:
        """Let go of `num_cells` cells, or all that are not locked; -> how many.

        Least recently used leaves first; the last one loses its tail only. They are free when nobody else has them,
        which is so for cells that only came here by `extend` and went out by leases.
        """
        let_go: list[Cells] = []
        left = num_cells
        while left > 0 and (leaf := self._pop_idle_leaf()) is not None:
            taken = min(left, leaf.cells.size)
            let_go.append(leaf.cells[leaf.cells.size - taken :])
            self._trim(leaf, taken)
            left -= taken
        if let_go:
            self._holder.release_cells(np.concatenate(let_go))
        return num_cells - left

    # --- integrity --------------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """All of them, parents first."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self) -> None:
        """AssertionError if two accounts of the same thing differ. Looks at everything: for idle moments and tests."""
        num_held = num_idle = num_shared = num_nodes = 0
        seen: set[int] = set()
        waiting = {id(node) for used, _, node in self._idle_leaves if node.last_used == used}
        for node in self.nodes():
            for first, child in node.children.items():
                assert child.parent is node
                assert first == child.tokens[0]
                assert child.salt == node.salt
                assert child.last_used <= node.last_used or child.locks, "a node was used later than the one before it"
            assert node.locks >= sum(child.locks for child in node.children.values())
            assert node.tokens.size == node.cells.size
            if node.parent is None:
                assert self._roots[node.salt] is node
                assert node.locks or node.children, "an empty root stays behind"
                continue
            assert node.cells.size > 0
            assert node.end == node.parent.end + node.cells.size
            assert not node.is_idle_leaf or id(node) in waiting, "a leaf would never be evicted"
            assert seen.isdisjoint(node.cells.tolist()), "a cell is here twice"
            seen.update(node.cells.tolist())
            num_nodes += 1
            num_held += node.cells.size
            num_idle += 0 if node.locks else node.cells.size
            num_shared += node.cells.size if node.locks > 1 else 0
        assert (num_held, num_idle, num_nodes) == (self._num_held, self._num_idle, self._num_nodes)
        assert num_shared == self._num_shared

    # --- nodes ------------------------------------------------------------------------------------------------------

    def _reach(self, start: Node, tokens: Tokens) -> Node:
        """The node where the tree stops to follow `tokens` behind `start`; made by a split where that is in an edge."""
        node, inside = _walk(start, tokens)
        return node if inside is None else self._split(*inside)

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge behind its first `at` tokens; -> the new node before it. Leases stay where they are: at ends."""
        assert node.parent is not None
        before = Node(
            tokens=node.tokens[:at],
            cells=node.cells[:at],
            parent=node.parent,
            salt=node.salt,
            end=node.end - (node.cells.size - at),
            children={int(node.tokens[at]): node},
            locks=node.locks,
            last_used=node.last_used,
        )
        node.parent.children[int(node.tokens[0])] = before
        node.tokens, node.cells, node.parent = node.tokens[at:], node.cells[at:], before
        self._num_nodes += 1
        return before

    def _add(self, parent: Node, tokens: Tokens, cells: Cells) -> Node:
        self._holder.hold_cells(cells)
        node = Node(tokens, cells, parent, parent.salt, parent.end + tokens.size)
        parent.children[int(tokens[0])] = node
        self._num_nodes += 1
        self._num_held += cells.size
        self._num_idle += cells.size
        return node

    def _trim(self, leaf: Node, num_cells: int) -> None:
        """Drop the last cells of an idle leaf, and the leaf when it has no others. The caller releases them."""
        self._num_held -= num_cells
        self._num_idle -= num_cells
        kept = leaf.cells.size - num_cells
        if kept:
            leaf.tokens, leaf.cells, leaf.end = leaf.tokens[:kept], leaf.cells[:kept], leaf.end - num_cells
            self._offer(leaf)
            return
        parent = leaf.parent
        assert parent is not None
        del parent.children[int(leaf.tokens[0])]
        leaf.parent = None
        self._num_nodes -= 1
        self._settle(parent)

    def _settle(self, node: Node) -> None:
        """`node` lost a lock or a child: it may be a leaf to evict now, or a root that nobody needs."""
        if node.is_idle_leaf:
            self._offer(node)
        elif node.parent is None and not node.locks and not node.children:
            del self._roots[node.salt]

    # --- locks and ages ---------------------------------------------------------------------------------------------

    def _lock(self, node: Node) -> Node:
        for each in path(node):
            self._lock_one(each)
        return node

    def _lock_one(self, node: Node) -> None:
        if node.locks == 0:
            self._num_idle -= node.cells.size
        elif node.locks == 1:
            self._num_shared += node.cells.size
        node.locks += 1

    def _unlock(self, node: Node) -> None:
        now = next(self._clock)
        for each in path(node):
            each.locks -= 1
            each.last_used = now
            if each.locks == 0:
                self._num_idle += each.cells.size
            elif each.locks == 1:
                self._num_shared -= each.cells.size
        self._settle(node)

    def _move(self, lease: Lease, node: Node) -> None:
        """From a node to one below it."""
        old = lease.node
        for each in path(node):
            if each is old:
                break
            self._lock_one(each)
        lease.node = node

    def _offer(self, leaf: Node) -> None:
        heappush(self._idle_leaves, (leaf.last_used, next(self._entries), leaf))
        if len(self._idle_leaves) > 2 * self._num_nodes + 64:
            self._idle_leaves = [entry for entry in self._idle_leaves if _is_due(entry)]
            heapify(self._idle_leaves)

    def _pop_idle_leaf(self) -> Node | None:
        while self._idle_leaves:
            entry = heappop(self._idle_leaves)
            if _is_due(entry):
                return entry[2]
        return None


_NO_CELLS: Cells = np.empty(0, np.int32)


def common_length(a: Tokens, b: Tokens) -> int:
    """How many leading tokens are equal."""
    length = min(a.size, b.size)
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _walk(start: Node, tokens: Tokens) -> tuple[Node, tuple[Node, int] | None]:
    """Follow `tokens`, whose first `start.end` lead to `start`: the last node they fill, and how far they go into the
    edge behind it: (its node, tokens), None when they end at the node or leave the tree there.
    """
    node = start
    while node.end < tokens.size:
        child = node.children.get(int(tokens[node.end]))
        if child is None:
            break
        length = common_length(child.tokens, tokens[node.end :])
        if length < child.tokens.size:
            return node, (child, length)
        node = child
    return node, None


def path(node: Node) -> Iterator[Node]:
    """From the node up to its root."""
    each: Node | None = node
    while each is not None:
        yield each
        each = each.parent


def _path_cells(node: Node, start: int) -> Cells:
    """Cells of the positions [start, node.end), where `start` is the end of a node on the path."""
    parts: list[Cells] = []
    for each in path(node):
        if each.end <= start:
            break
        parts.append(each.cells)
    return np.concatenate(parts[::-1]) if parts else _NO_CELLS


def _is_due(entry: tuple[int, int, Node]) -> bool:
    last_used, _, node = entry
    return node.is_idle_leaf and node.last_used == last_used
