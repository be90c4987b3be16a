"""Draws the pool: which cell is whose, for someone who looks. Reads what the prefix cache knows; changes nothing.

    free | kept by the tree | claimed by a step in flight or a load | a session's own | shared by sessions

Every held cell is visited once however many sessions share it, so a look costs what the pool holds, not what it would
hold without sharing. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cache.radix import Lease, Node, RadixTree
from engine.executor import Executor
from engine.sessions import Session
from engine.view import CLAIMED, FIRST_SESSION, FREE, KEPT, SHARED, CellMap


def draw(executor: Executor[Any], tree: RadixTree, leases: Mapping[Session, Lease], max_codes: int) -> CellMap:
    """leases: of every open session; the order of their codes. max_codes: cells shown at most."""
    references = executor.cell_references()
    codes: npt.NDArray[np.uint16] = np.full(references.size, FREE, np.uint16)
    codes[references > 0] = CLAIMED
    in_tree = [node.cells for node in tree.nodes()]
    if in_tree:
        cells = np.concatenate(in_tree)
        codes[cells] = KEPT
        references[cells] -= 1  # what is left are sessions
    seen: set[int] = set()
    for index, (session, lease) in enumerate(leases.items()):
        assert session.executor_id is not None
        node: Node | None = lease.node
        while node is not None and id(node) not in seen:
            seen.add(id(node))
            codes[node.cells] = FIRST_SESSION + index
            node = node.parent
        if session.num_settled > lease.length:
            own = executor.cells_of(session.executor_id, lease.length, session.num_settled)
            codes[own] = FIRST_SESSION + index
    is_session = codes >= FIRST_SESSION
    is_shared = is_session & (references > 1)
    codes[is_shared] |= SHARED
    stride = -(-codes.size // max_codes)
    held = np.flatnonzero(codes)
    shown = codes[: held[-1] + 1 if held.size else 0 : stride]
    num_shared = int(np.count_nonzero(is_shared))
    return CellMap(
        total=codes.size,
        stride=stride,
        codes=shown.astype("<u2").tobytes(),
        kept=int(np.count_nonzero(codes == KEPT)),
        claimed=int(np.count_nonzero(codes == CLAIMED)),
        private=int(np.count_nonzero(is_session)) - num_shared,
        shared=num_shared,
    )
