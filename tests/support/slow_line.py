"""engine.waiting as a list that is searched: the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SlowLine:
    """Sessions with `request.priority`, `request.client`, `arrival`, `index`, `draws` and `cached_tokens`."""

    waiting: list[tuple[Any, bool]] = field(default_factory=list)
    """(session, whether it had run before it came)."""
    turns: dict[tuple[int, str], int] = field(default_factory=dict)
    """By priority and client."""

    def add(self, session: Any) -> None:
        ran = session.cached_tokens is not None
        priority, client = session.request.priority, session.request.client
        if not ran and client not in self._clients(priority):
            self.turns[priority, client] = max(self.turns.get((priority, client), 0), self._fewest(priority))
        self.waiting.append((session, ran))

    def discard(self, session: Any) -> None:
        for entry in self.waiting:
            if entry[0] is session:
                self.waiting.remove(entry)
                self._forget(session.request.priority)
                return

    def take(self, session: Any) -> None:
        if (session, False) in self.waiting:
            self.turns[session.request.priority, session.request.client] += session.draws
        self.discard(session)

    def order(self) -> list[Any]:
        left, turns = list(self.waiting), dict(self.turns)
        found = []
        while left:
            entry = min(left, key=lambda entry: self._rank(entry, left, turns))
            left.remove(entry)
            session, ran = entry
            if not ran:
                turns[session.request.priority, session.request.client] += session.draws
            found.append(session)
        return found

    def _rank(self, entry: tuple[Any, bool], left: list[tuple[Any, bool]], turns: dict[tuple[int, str], int]) -> Any:
        session, ran = entry
        priority, client = session.request.priority, session.request.client
        place = (session.arrival, session.index)
        if ran:
            return priority, 0, 0, place, place
        own = [s for s, r in left if not r and (s.request.priority, s.request.client) == (priority, client)]
        first = min((s.arrival, s.index) for s in own)
        return priority, 1, turns[priority, client], first, place

    def _clients(self, priority: int) -> set[str]:
        return {s.request.client for s, ran in self.waiting if not ran and s.request.priority == priority}

    def _fewest(self, priority: int) -> int:
        return min((self.turns[priority, client] for client in self._clients(priority)), default=0)

    def _forget(self, priority: int) -> None:
        """Turns are remembered of those who wait, and of those who had more than the fewest of them."""
        here, fewest = self._clients(priority), self._fewest(priority)
        has_any = any(s.request.priority == priority for s, _ in self.waiting)
        for known, client in list(self.turns):
            if known == priority and client not in here and not (has_any and self.turns[known, client] > fewest):
                del self.turns[known, client]
