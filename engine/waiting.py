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
from itertools import chain

from engine.sessions import Session


class WaitingLine:
    """Iterating gives the order in which the sessions would be admitted, if none came, left or ran again."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}

    def __iter__(self) -> Iterator[Session]:
        for priority in sorted(self._classes):
            yield from self._classes[priority].in_order()

    def __len__(self) -> int:
        return sum(one.num_sessions for one in self._classes.values())

    @property
    def num_choices(self) -> int:
        """Draws of all that wait. Not kept: a preempted stem's first draws may come while it waits."""
        return sum(session.draws for one in self._classes.values() for session in one.sessions())

    def add(self, session: Session) -> None:
        self._classes.setdefault(session.request.priority, _Class()).add(session)

    def discard(self, session: Session) -> None:
        """It leaves without a turn. Ignored when it does not wait."""
        one = self._classes.get(session.request.priority)
        if one is not None:
            one.discard(session)
            self._drop_if_empty(session.request.priority)

    def take(self, session: Session) -> None:
        """It is admitted: its client has had its turns."""
        one = self._classes[session.request.priority]
        one.charge(session)
        one.discard(session)
        self._drop_if_empty(session.request.priority)

    def _drop_if_empty(self, priority: int) -> None:
        if not self._classes[priority].num_sessions:
            del self._classes[priority]


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
    def num_sessions(self) -> int:
        return len(self.again) + sum(map(len, self.by_client.values()))

    def sessions(self) -> Iterator[Session]:
        """In no order."""
        return chain(self.again, *self.by_client.values())

    def in_order(self) -> Iterator[Session]:
        yield from list(self.again)
        line = [(self.turns[name], _place(waiting[0]), name, 0) for name, waiting in self.by_client.items()]
        heapify(line)
        while line:
            turns, _, name, number = heappop(line)
            waiting = self.by_client[name]
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

    def discard(self, session: Session) -> None:
        if session in self.again:
            self.again.remove(session)
            return
        name = session.request.client
        waiting = self.by_client.get(name, [])
        if session not in waiting:
            return
        waiting.remove(session)
        if not waiting:
            del self.by_client[name]
            fewest = self._fewest()
            self.turns = {n: turns for n, turns in self.turns.items() if n in self.by_client or turns > fewest}

    def _fewest(self) -> int:
        """Of the clients that wait; 0 where none does."""
        return min((self.turns[name] for name in self.by_client), default=0)


def _place(session: Session) -> tuple[int, int]:
    return session.arrival, session.index
