"""DESIGN D10, SCH-5..7, SCH-12: turns of prompts in random schedules, against a rotation that gives token by token."""

import random
from collections import Counter

import pytest

from engine.scheduler import Scheduler, SchedulerLimits
from engine.sessions import Session
from engine.types import GenerateRequest


class Line:
    """The rule as it is said, one token at a time: the first gets tokens until its turn or its prompt is over."""

    def __init__(self, turn):
        self.turn, self.had = turn, 0
        self.waiting = []

    def add(self, session):
        self.waiting.append(session)

    def leave(self, session):
        if self.waiting and session is self.waiting[0]:
            self.had = 0
        if session in self.waiting:
            self.waiting.remove(session)

    def give(self, room):
        """Tokens by session, in the order of their first ones."""
        for session in [s for s in self.waiting if s.is_decoding]:
            self.leave(session)
        given = Counter()
        for _ in range(room):
            if not self.waiting:
                break
            first = self.waiting[0]
            given[first] += 1
            self.had += 1
            if given[first] == first.remaining:
                self.leave(first)
            elif self.had == self.turn:
                self.had = 0
                self.waiting.append(self.waiting.pop(0))
        return list(given.items())


class Life:
    """Sessions that come, draw, are forked, cancelled, preempted and suspected; every step is compared."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        seqs = self.rng.randint(1, 6)
        self.limits = SchedulerLimits(
            max_num_seqs=seqs,
            prefill_budget=self.rng.randint(1, 24),
            mixed_budget=seqs + self.rng.randint(1, 12),
            prefill_chunk=self.rng.randint(1, 16),
        )
        self.queue, self.line = Scheduler(self.limits), Line(self.limits.prefill_chunk)
        self.running, self.had_behind = [], {}
        self.num_come = self.num_cut = self.num_back = 0

    def come(self):
        prompt = self.rng.choice((1, 2, 5, 30, 90))
        n = self.rng.choice((1, 1, 1, 2)) if self.limits.max_num_seqs > 1 else 1
        request = GenerateRequest(str(self.num_come), (0,) * prompt, n=n, max_new_tokens=self.rng.randint(1, 12))
        self.queue.add_waiting(Session(request, 0, self.num_come, 0, n, [0] * prompt))
        self.num_come += 1

    def admit(self):
        for session in self.queue.admissible(lambda: 10**6):
            self.queue.admit(session)
            session.executor_id = session.arrival
            self.running.append(session)
            if not (session.is_suspect or session.is_decoding):
                self.line.add(session)
                self.had_behind[session] = Counter()

    def drop(self, session):
        self.running.remove(session)
        self.line.leave(session)
        self.had_behind.pop(session, None)

    def disturb(self):
        if not self.running:
            return
        kind, session = self.rng.choice(("cancel", "preempt", "preempt", "suspect")), self.rng.choice(self.running)
        if kind == "cancel":
            self.queue.remove(session)
        elif kind == "preempt":
            session = self.queue.preempt()
            session.requeue()
        else:
            session.suspect()
            self.queue.send_back(session)
        self.num_back += kind != "cancel"
        self.drop(session)

    def step(self):
        free = self.rng.choice((10**6, 10**6, self.rng.randint(0, 20)))
        takes = [(take.session, take.count) for take in self.queue.next_takes(free)]
        if not (len(takes) == 1 and takes[0][0].is_suspect):
            self.compare(takes, free)
        for session, count in takes:
            if session.take(count).draws:
                self.draw(session)

    def compare(self, takes, free):
        """With the rule; and that nobody has more than one turn while another waits for its own."""
        decodes = [s for s in self.running if s.is_decoding and not s.is_suspect][:free]
        budget = self.limits.mixed_budget if decodes else self.limits.prefill_budget
        room = min(budget, free) - len(decodes)
        prefilling = [s for s in self.running if not (s.is_decoding or s.is_suspect)]
        prefills = takes[len(decodes) :]
        assert sum(count for _, count in prefills) == min(room, sum(s.remaining for s in prefilling))
        assert takes == [(session, 1) for session in decodes] + self.line.give(room)
        self.num_cut += self.line.had > 0
        for session, behind in self.had_behind.items():
            if session in dict(prefills):
                behind.clear()
            elif session in self.line.waiting:
                behind.update(dict(prefills))
                assert max(behind.values(), default=0) <= self.limits.prefill_chunk

    def draw(self, session):
        """The host's part: a stem's further choices begin to decode, and who is done leaves."""
        session.is_suspect = False
        forks, session.draws = session.draws - 1, 1
        for index in range(1, forks + 1):
            held = session.num_computed
            fork = Session(session.request, index, session.arrival, 0, 1, [*session.tokens])
            fork.num_computed, fork.num_in_flight, fork.executor_id = held, 1, session.arrival
            if fork.accept(0) is None:
                self.queue.add_running(fork)
                self.running.append(fork)
        if session.accept(0) is not None:
            self.queue.remove(session)
            self.drop(session)


@pytest.mark.parametrize("disturbed", [0.0, 0.15])
def test_sch_5_random_schedules_give_what_a_rotation_token_by_token_gives(disturbed):
    """SCH-6, SCH-7, SCH-12: every step is full while prompts are left, and nobody starves."""
    num_cut = num_back = 0
    for seed in range(150):
        life = Life(seed)
        for _ in range(60):
            while life.rng.random() < 0.3:
                life.come()
            if life.rng.random() < disturbed:
                life.disturb()
            life.admit()
            life.step()
        while not life.queue.is_empty:
            life.admit()
            life.step()
        assert (life.running, life.line.waiting) == ([], [])
        num_cut, num_back = num_cut + life.num_cut, num_back + life.num_back
    assert num_cut > 1000
    assert (num_back > 300) == (disturbed > 0)


def test_sch_6_a_short_prompt_waits_for_one_turn_of_a_long_one():
    """As the server's defaults are: a turn is as long as a step beside decodes."""
    queue = Scheduler(SchedulerLimits(max_num_seqs=256, prefill_budget=8192, mixed_budget=1024, prefill_chunk=1024))

    def come(arrival, prompt):
        request = GenerateRequest(str(arrival), (0,) * prompt, max_new_tokens=100)
        queue.add_running(Session(request, 0, arrival, 0, 1, [0] * prompt, executor_id=arrival))

    def step():
        takes = queue.next_takes(10**6)
        for take in takes:
            if take.session.take(take.count).draws:
                take.session.accept(0)
        return [(take.session.arrival, take.count) for take in takes if take.session.num_generated < 2]

    for arrival in range(64):
        come(arrival, 1)
    step()
    step()
    come(100, 100_000)
    assert step() == [(100, 960)]
    come(200, 500)
    come(300, 1000)
    assert step() == [(100, 64), (200, 500), (300, 396)]
    assert step() == [(300, 604), (100, 355)]
