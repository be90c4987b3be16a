"""Open sessions by how they began: at which node of the prefix tree, and with which tokens behind it.

    tokens asked for       [ 5 6 7 8 ][ 9 1 4 ...
    the tree has           [ 5 6 7 8 ]
    who shares more began  [ 5 6 ][ 7 8 9 ...          at a node of this path, with the tokens that follow there
                           [ 5 6 7 8 ][ 9 1 2 ...

It can have begun nowhere else: the path that a session was opened with stays in the tree, so of two token lists that
share more than the tree has of one, that path leads through both. Hence a look at the nodes of a path takes the place
of one at every session. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from cache.radix import Node, Tokens, path
from engine.sessions import Session

_Beginning = tuple[Node, bytes]


class Beginnings:
    """Sessions from their opening to their end."""

    def __init__(self, num_tokens: int) -> None:
        """num_tokens: that must follow alike."""
        self._num_tokens = num_tokens
        self._sessions: dict[_Beginning, dict[Session, int]] = {}  # numbered in the order of opening
        self._beginnings: dict[Session, _Beginning] = {}
        self._numbers = count()

    def add(self, session: Session, node: Node, tokens: Tokens) -> None:
        """node: its lease's, just now. tokens: of the session, all that are known.

        Where too few are known behind the node (a fork's), what will follow may be alike to anything.
        """
        beginning = (node, self._following(node, tokens))
        self._beginnings[session] = beginning
        self._sessions.setdefault(beginning, {})[session] = next(self._numbers)

    def discard(self, session: Session) -> None:
        """Ignored when it is not here."""
        beginning = self._beginnings.pop(session, None)
        if beginning is None:
            return
        alike = self._sessions[beginning]
        del alike[session]
        if not alike:
            del self._sessions[beginning]

    def alike(self, node: Node, tokens: Tokens) -> Iterable[Session]:
        """All that may share `num_tokens` more of `tokens` than lead to where they began, and few others.

        node: the last one that `tokens` fill. In the order of their opening.
        """
        found: list[dict[Session, int]] = []
        for each in path(node):
            for following in {self._following(each, tokens), _UNKNOWN}:
                if (sessions := self._sessions.get((each, following))) is not None:
                    found.append(sessions)
        if len(found) == 1:  # a burst of prompts that begin with one token: as many as run
            return found[0]
        numbers = {session: number for sessions in found for session, number in sessions.items()}
        return sorted(numbers, key=numbers.__getitem__)

    def _following(self, node: Node, tokens: Tokens) -> bytes:
        following = tokens[node.end : node.end + self._num_tokens]
        return following.tobytes() if following.size == self._num_tokens else _UNKNOWN


_UNKNOWN = b""
