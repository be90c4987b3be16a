"""Who waits for a place, and whose turn is next: by priority, then in turns between clients, then by arrival.

Pure bookkeeping, engine thread only. A turn is one choice (a session's `draws`). Within a priority:

    1. sessions that ran before (preempted ones, forks), by arrival: what they had computed was paid for
    2. the others: the client that has had the fewest turns, and of equals the one whose first session came first

A client that comes to a queue where others wait begins with the fewest turns that any of them has had: it is neither
behind for what they had while it was away, nor before those who are next. Turns are remembered while anybody waits.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from engine.sessions import Session


class WaitingLine:
    """Iterating gives the order in which the sessions would be admitted, if none came, left or ran again.

    Those that were given may be taken meanwhile.
    """

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}
        self._num_sessions = 0
        self._stems: set[Session] = set()
        """Those that stood for several choices when they came."""

    def __iter__(self) -> Iterator[Session]:
        for priority in sorted(self._classes):
            yield from self._classes[priority].in_order()

    def __len__(self) -> int:
        return self._num_sessions

    @property
    def num_choices(self) -> int:
        """Draws of all that wait. A preempted stem's first draws may come while it waits, so stems are asked."""
        return self._num_sessions + sum(session.draws - 1 for session in self._stems)

    def add(self, session: Session) -> None:
        self._classes.setdefault(session.request.priority, _Class()).add(session)
        self._num_sessions += 1
        if session.draws > 1:
            self._stems.add(session)

    def discard(self, session: Session) -> None:
        """It leaves without a turn. Ignored when it does not wait."""
        one = self._classes.get(session.request.priority)
        if one is not None and one.discard(session):
            self._left(session)

    def take(self, session: Session) -> None:
        """It is admitted: its client has had its turns."""
        one = self._classes[session.request.priority]
        one.charge(session)
        if one.discard(session):
            self._left(session)

    def _left(self, session: Session) -> None:
        self._num_sessions -= 1
        self._stems.discard(session)
        if self._classes[session.request.priority].is_empty:
            del self._classes[session.request.priority]


@dataclass(slots=True)
class _Class:
    """One priority's."""

    again: list[Session] = field(default_factory=list)
    """Ran before; by arrival."""
    by_client: dict[str, list[Session]] = field(default_factory=dict)
    """By arrival; no client without a session."""
    turns: dict[str, int] = field(default_factory=dict)
    """Of every client that waits, and of those that had more than the first in line when they left."""

    @property
    def is_empty(self) -> bool:
        return not (self.again or self.by_client)

    def in_order(self) -> Iterator[Session]:
        yield from list(self.again)
        by_client = {name: list(waiting) for name, waiting in self.by_client.items()}
        line = [(self.turns[name], _place(waiting[0]), name, 0) for name, waiting in by_client.items()]
        heapify(line)
        while line:
            turns, _, name, number = heappop(line)
            waiting = by_client[name]
            yield waiting[number]
            if number + 1 < len(waiting):
                heappush(line, (turns + waiting[number].draws, _place(waiting[number + 1]), name, number + 1))

    def add(self, session: Session) -> None:
        if session.cached_tokens is not None:
            insort(self.again, session, key=_place)
            return
        name = session.request.client
        if name not in self.by_client:
            self.turns[name] = max(self.turns.get(name, 0), self._fewest())
            self.by_client[name] = []
        insort(self.by_client[name], session, key=_place)

    def charge(self, session: Session) -> None:
        if session not in self.again:
            self.turns[session.request.client] += session.draws

    def discard(self, session: Session) -> bool:
        """Whether it was here."""
        if session in self.again:
            self.again.remove(session)
            return True
        name = session.request.client
        waiting = self.by_client.get(name, [])
        if session not in waiting:
            return False
        waiting.remove(session)
        if not waiting:
            del self.by_client[name]
            fewest = self._fewest()
            self.turns = {n: turns for n, turns in self.turns.items() if n in self.by_client or turns > fewest}
        return True

    def _fewest(self) -> int:
        """Of the clients that wait; 0 where none does."""
        return min((self.turns[name] for name in self.by_client), default=0)


def _place(session: Session) -> tuple[int, int]:
    return session.arrival, session.index
