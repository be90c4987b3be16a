"""DESIGN D10, D13: who is admitted in one turn, and from whom it takes its prefix, against looks at every session."""

import random

import pytest

from engine.beginnings import Beginnings
from engine.scheduler import DECODE_HEADROOM_CELLS, Scheduler, SchedulerLimits
from engine.sessions import Session
from engine.types import GenerateRequest
from support.looped import Engine
from support.scripted import ScriptedExecutor


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


class Everybody(Beginnings):
    """Looks at every open session with the same salt."""

    def alike(self, node, tokens):
        return (session for session in self._beginnings if session.request.cache_salt == node.salt)


class Recorded(ScriptedExecutor):
    """Knows what ran when."""

    def __init__(self, **options):
        super().__init__(lambda prompt, generated, seed: (len(prompt) + len(generated) + seed) % 3, **options)
        self.steps = []

    def launch(self, batch):
        self.steps.append(batch)
        return super().launch(batch)


def life_of(seed, overlaps, looks_at_everybody):
    """What ran and what was said in a life of prompts that begin alike, at several places."""
    rng = random.Random(seed)
    executor = Recorded(cells=rng.choice((250, 4000)), overlaps=overlaps)
    engine = Engine(executor, seqs=8, budget=48, chunk=rng.choice((8, 24)))
    if looks_at_everybody:
        engine.loop._prefixes._open, engine.loop._prefixes._computing = Everybody(1), Everybody(1)
    texts = [[rng.randrange(3) for _ in range(80)] for _ in range(2)]
    for number in range(40):
        text = rng.choice(texts)
        prompt = text[: rng.randint(1, len(text))] + [rng.randrange(3) for _ in range(rng.choice((0, 1, 30)))]
        engine.submit(
            str(number),
            prompt,
            max_new_tokens=rng.choice((1, 5, 60)),
            n=rng.choice((1, 1, 1, 3)),
            cache_salt=rng.choice((None, None, None, "a")),
            sampling={"seed": 0, "prompt_logprobs": 0 if rng.random() < 0.15 else None},
        )
        if rng.random() < 0.2:  # an answer, perhaps a fork's, becomes part of a prompt
            choice = rng.randrange(3)
            texts[0] = [*prompt, *((len(prompt) + i + choice) % 3 for i in range(20))]
        for _ in range(rng.choice((0, 0, 1, 3))):
            engine.step()
        if rng.random() < 0.1:
            engine.loop.cancel(str(rng.randint(0, number)))
    engine.run()
    assert engine.holds_nothing()
    assert not engine.loop._prefixes._open._sessions
    assert not engine.loop._prefixes._computing._sessions
    return executor.steps, engine.updates, engine.loop.stats().preemptions


@pytest.mark.parametrize("overlaps", [False, True], ids=["back-to-back", "overlapped"])
def test_pfx_7_whom_a_session_waits_for_and_takes_from_is_found_as_by_looking_at_everybody(overlaps):
    preemptions = 0
    for seed in range(16):
        steps, updates, preempted = life_of(seed, overlaps, looks_at_everybody=False)
        assert (steps, updates, preempted) == life_of(seed, overlaps, looks_at_everybody=True)
        preemptions += preempted
    assert preemptions > 20
