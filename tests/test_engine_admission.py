"""DESIGN D10: who is admitted in one turn, against sums over every session."""

import random

from engine.scheduler import DECODE_HEADROOM_CELLS, Scheduler, SchedulerLimits
from engine.sessions import Session
from engine.types import GenerateRequest


class Turns:
    """A scheduler's random life; who may run is worked out from nothing for each session that it admits."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.limits = SchedulerLimits(max_num_seqs=8, prefill_budget=20, mixed_budget=24, prefill_chunk=6)
        self.queue = Scheduler(self.limits)
        self.running, self.num_come, self.free = [], 0, 0
        self.waits, self.shared = set(), {}
        self.seen = dict.fromkeys(("admitted", "not opened", "no places", "no cells", "shared"), 0)

    def come(self):
        n = self.rng.choice((1, 1, 1, 2, 4))
        prompt = (0,) * self.rng.choice((1, 5, 30))
        request = GenerateRequest(
            str(self.num_come),
            prompt,
            n=n,
            max_new_tokens=self.rng.randint(1, 9),
            priority=self.rng.choice((0, 0, 1)),
            client=self.rng.choice("ab"),
        )
        session = Session(request, 0, self.num_come, 0, n, list(prompt))
        session.is_suspect = self.rng.random() < 0.1
        self.shared[session] = self.rng.choice((0, len(prompt) - 1))
        self.queue.add_waiting(session)
        self.num_come += 1

    def next_one(self):
        """The rule as it is said."""
        places = self.limits.max_num_seqs - sum(session.draws for session in self.running)
        for session in self.queue._waiting:
            if session.is_suspect and any(other.is_suspect for other in self.running):
                continue
            if session.num_in_flight or session.draws > places:
                self.seen["no places"] += 1
                return None
            if session in self.waits:
                continue
            promised = sum(max(other.remaining, DECODE_HEADROOM_CELLS) for other in self.running)
            missing = promised + len(session.tokens) - self.free
            self.seen["no cells"] += missing > self.shared[session]
            self.seen["shared"] += 0 < missing <= self.shared[session]
            return session if missing <= self.shared[session] else None
        return None

    def admit(self):
        self.free = self.rng.choice((10**6, self.rng.randint(0, 200)))
        self.waits = {session for session in self.queue._waiting if self.rng.random() < 0.2}
        for session in self.queue.admissible(
            lambda: self.free, must_wait=self.waits.__contains__, shared_tokens=self.shared.__getitem__
        ):
            assert session is self.next_one()
            if self.rng.random() < 0.1:
                self.queue.remove(session)
                self.seen["not opened"] += 1
                continue
            self.queue.admit(session)
            session.executor_id = session.arrival
            session.begin_at(self.rng.choice((0, self.shared[session])))
            self.running.append(session)
            self.free += self.rng.randint(-2, 2)  # as what others have is shared, or is found to be there twice
            self.seen["admitted"] += 1
        assert self.next_one() is None
        assert self.queue.num_running == sum(session.draws for session in self.running)

    def step(self):
        for take in self.queue.next_takes(10**6):
            session = take.session
            if not session.take(take.count).draws:
                continue
            session.is_suspect, session.draws = False, 1
            if session.accept(0) is not None:
                self.queue.remove(session)
                self.running.remove(session)

    def disturb(self):
        if self.running and self.rng.random() < 0.5:
            session = self.queue.preempt()
            session.requeue()
            self.running.remove(session)
        elif self.running:
            session = self.rng.choice(self.running)
            self.queue.remove(session)
            self.running.remove(session)


def test_d10_who_is_admitted_is_who_the_rule_names_when_everything_is_summed_up_anew():
    seen = dict.fromkeys(Turns(0).seen, 0)
    for seed in range(150):
        turns = Turns(seed)
        for _ in range(30):
            for _ in range(turns.rng.randint(0, 4)):
                turns.come()
            turns.admit()
            turns.step()
            if turns.rng.random() < 0.2:
                turns.disturb()
        seen = {name: count + turns.seen[name] for name, count in seen.items()}
    assert min(seen.values()) > 40, seen
