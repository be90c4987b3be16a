"""What runs in the next step: decodes first, then prompts in turns, both as far as budgets and cells allow.

Pure bookkeeping over sessions: no clock, no executor, no tokens' values. Engine thread only. The rules are DESIGN D10
and executor spec SCH-*; it differs from that scheduler in holding sessions instead of queued tasks, so that budgets may
change from step to step and a preempted session is simply waiting again, and in cutting what does not fit a step, where
that scheduler skips it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.sessions import Session
from engine.waiting import WaitingLine

DECODE_HEADROOM_CELLS = 16
"""Left free for each running session when another is admitted: admitting at the last cell would preempt at once."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Budgets of one step, in tokens."""

    max_num_seqs: int
    """Sequences that run at once, forks that are still to come included."""
    prefill_budget: int
    """Tokens of a step in which nothing decodes."""
    mixed_budget: int
    """Tokens of a step in which something decodes: small enough that inter-token latency holds."""
    prefill_chunk: int
    """What one session has in one turn of the rotation, be it in one step or in several."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "prefill_budget", "mixed_budget", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.mixed_budget <= self.max_num_seqs:  # SCH-12: neither class starves the other
            raise ConfigError(
                f"mixed_budget is {self.mixed_budget}: a step beside decodes must hold {self.max_num_seqs} of them "
                f"(max_num_seqs) and a prompt's token, so it must be at least {self.max_num_seqs + 1}"
            )


@dataclass(slots=True)  # not frozen: as engine.types.Update
class Take:
    """`count` tokens of one session."""

    session: Session
    count: int


class Scheduler:
    """Every live session is either waiting (no cells) or running (has a sequence in the executor)."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self._waiting = WaitingLine()
        self._running: list[Session] = []  # in order of admission
        self._rotation: deque[Session] = deque()  # running sessions that still prefill, next to be served first
        self._in_turn: Session | None = None  # the first of them, when a step ended in the middle of its turn
        self._turn_left = 0  # tokens that it has still to get then
        self._suspect: Session | None = None  # the running one, if it has not got through yet
        self._is_suspects_turn = False  # as the last step was given out, while one runs

    @property
    def is_empty(self) -> bool:
        return not (len(self._waiting) or self._running)

    @property
    def num_waiting(self) -> int:
        """Choices that wait, those of unforked stems included."""
        return self._waiting.num_choices

    @property
    def num_running(self) -> int:
        return sum(session.draws for session in self._running)

    def sessions(self) -> Iterable[Session]:
        return (*self._running, *self._waiting)

    def add_waiting(self, session: Session) -> None:
        self._waiting.add(session)

    def add_running(self, session: Session) -> None:
        """A session that has a sequence already: a fork."""
        self._running.append(session)
        if session.is_suspect:
            self._suspect = session
        elif not session.is_decoding:  # a suspect runs alone until it has drawn, and decodes from then on
            self._rotation.append(session)

    def remove(self, session: Session) -> None:
        """Forget a finished session wherever it is."""
        self._waiting.discard(session)
        if session is self._suspect:
            self._suspect = None
        if session is self._in_turn:
            self._in_turn = None  # should it come back, it begins anew at the tail
        for place in (self._running, self._rotation):
            if session in place:
                place.remove(session)

    def admissible(
        self,
        free_cells: Callable[[], int],
        *,
        must_wait: Callable[[Session], bool] = lambda session: False,
        shared_tokens: Callable[[Session], int] = lambda session: 0,
    ) -> Iterator[Session]:
        """The waiting sessions that may run now, one by one: always the next in line of those that need not wait.

        must_wait: a running session is computing what this one begins with; those behind it may run meanwhile.
        shared_tokens: of this session, the tokens whose cells running ones hold anyway.
        Optimistic: its tokens must fit beside what running prompts still need, not its whole budget of new ones.
        The caller opens each and calls `admit`, or `remove`, before it asks for the next. What has run must not move
        on in between: what it needs is summed up once.
        """
        if not len(self._waiting):
            return
        places = self.limits.max_num_seqs - self.num_running
        if places < 1:
            return  # most steps of a busy server: nobody's turn is worked out for nothing
        promised: int | None = None
        free = free_cells()
        line, passed = iter(self._waiting), 0  # passed: the most draws of any that must wait
        while places > 0 and (session := next(line, None)) is not None:
            if session.is_suspect and self._running_suspect is not None:
                continue
            if session.num_in_flight or session.draws > places:
                return
            if must_wait(session):
                passed = max(session.draws, passed)
                continue
            if promised is None:
                promised = sum(_promised_cells(other) for other in self._running)
            missing = promised + len(session.tokens) - free
            if missing > 0 and shared_tokens(session) < missing:
                return
            yield session
            free = free_cells()
            is_admitted = bool(self._running) and self._running[-1] is session
            if is_admitted:
                places -= session.draws
                promised += _promised_cells(session)
            if not is_admitted or passed > places:  # its client has had no turn, or one passed over may hold others up
                line, passed = iter(self._waiting), 0

    @property
    def _running_suspect(self) -> Session | None:
        """At most one at a time: each is to be tried alone."""
        if self._suspect is not None and not self._suspect.is_suspect:
            self._suspect = None  # it got through
        return self._suspect

    def admit(self, session: Session) -> None:
        """The executor holds a sequence for it now."""
        self._waiting.take(session)
        self.add_running(session)

    def must_preempt(self, free_cells: int) -> bool:
        """Not every decode has a cell, or nothing that could run has one."""
        if free_cells >= len(self._running):
            return False
        runnable = [session for session in self._running if session.remaining > 0]
        decodes = sum(session.is_decoding for session in runnable)
        return bool(runnable) and free_cells < max(decodes, 1)

    def send_back(self, session: Session) -> None:
        """Make a running session a waiting one. The caller closes its sequence."""
        self.remove(session)
        self.add_waiting(session)

    def preempt(self) -> Session:
        """Make the running session that came last of the least urgent a waiting one. The caller closes its sequence."""
        victim = max((s for s in self._running if s.remaining > 0), key=_rank)
        self.send_back(victim)
        return victim

    def next_takes(self, free_cells: int) -> list[Take]:
        """Decodes in order of admission, then prompts in the order taken (SCH-8). The caller runs all of it.

        A suspect goes alone, in every other step while others run: there may be many, one behind another.
        """
        suspect = self._running_suspect
        if suspect is None:
            return self._takes(free_cells)
        count = min(suspect.remaining, self.limits.prefill_budget, free_cells)
        alone = [Take(suspect, count)] if count else []
        self._is_suspects_turn = not self._is_suspects_turn
        if self._is_suspects_turn:
            return alone or self._takes(free_cells, suspect)
        return self._takes(free_cells, suspect) or alone

    def _takes(self, free_cells: int, without: Session | None = None) -> list[Take]:
        decodes = [session for session in self._running if session.is_decoding and session is not without]
        decodes = decodes[: min(self.limits.mixed_budget, free_cells)]
        budget = self.limits.mixed_budget - len(decodes) if decodes else self.limits.prefill_budget
        return [Take(session, 1) for session in decodes] + self._prefill_takes(budget, free_cells - len(decodes))

    def _prefill_takes(self, budget: int, free_cells: int) -> list[Take]:
        """Turns of `prefill_chunk` tokens over the rotation until the budget, the cells or the prompts end (SCH-5..7).

        Who has had a turn goes to the tail; whom the budget or the cells cut stays first, with the rest of the turn. A
        session's turns of one step are one take.
        """
        left = {s: s.remaining for s in self._rotation if s.remaining > 0 and not s.is_decoding}
        self._rotation = deque(left)
        counts: dict[Session, int] = {}
        room = min(budget, free_cells)
        while self._rotation and room > 0:
            session = self._rotation[0]
            turn = self._turn_left if session is self._in_turn else self.limits.prefill_chunk
            count = min(turn, left[session], room)
            counts[session] = counts.get(session, 0) + count
            left[session] -= count
            room -= count
            self._in_turn = None
            if left[session] == 0:
                self._rotation.popleft()
            elif count == turn:
                self._rotation.rotate(-1)
            else:
                self._in_turn, self._turn_left = session, turn - count
        return [Take(session, count) for session, count in counts.items()]


def _promised_cells(session: Session) -> int:
    """Of a running session: what is left free for it when another is admitted."""
    return max(session.remaining, DECODE_HEADROOM_CELLS)


def _rank(session: Session) -> tuple[int, int, int]:
    """Lower runs sooner and is preempted later."""
    return session.request.priority, session.arrival, session.index
