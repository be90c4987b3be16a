"""Tiers under random traffic against a model: what holds between any two steps, and the tokens of a bare decoder.

Arrivals, clones, rewinds, preemptions, evictions, cancels, resets of the pool and faults, in any order, over too few
cells and too few host slots; NaN in every cell that nobody holds, and in what a window's tail leaves out. The oracle of
tokens is the decoder run on each request alone.
"""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest

from support.tier_chunks import FakeTier
from support.tiered import GREEDY, LaggingStream, Tiered, tokens
from support.toy_decoder import CONTEXT, VOCAB, ToyDecoder

SIGNS = {"gone": "fault", "full": "no room", "corrupt": "checksum", "slow": "from the tier", "lost": "missed"}
"""Fault of the tier -> what its books show of it."""
FAULTS = tuple(SIGNS)


@pytest.fixture(scope="module")
def model() -> ToyDecoder:
    return ToyDecoder()


class Traffic:
    """Random requests of a few conversations, and what each of their choices must draw."""

    def __init__(self, model: ToyDecoder, seed: int, *, overlaps: bool, cells: int = 90, tails: bool = True) -> None:
        self.rng = random.Random(seed)
        self.tier = FakeTier()
        self.engine = Tiered(
            model, self.tier, slots=5, cells=cells, seqs=5, tails=tails, stream=LaggingStream, overlaps=overlaps
        )
        self.happened: Counter[str] = Counter()
        self._model = model
        self._texts = [tokens(1000 + seed, 17), tokens(2000 + seed, 50)]
        self._last = self._texts[1]
        self._expected: dict[str, list[int]] = {}
        self._stops: dict[str, int] = {}

    def arrive(self) -> None:
        if self.rng.random() < 0.2:  # a quiet moment, behind which whatever comes again comes from a tier
            while self.engine.loop.has_work() and self.tier.is_open:
                self.step()
        if self.rng.random() < 0.5:
            self.engine.forget_pool()
        name, n = str(len(self._expected)), self.rng.choice((1, 1, 1, 3))
        # Half of them branch off what was asked last, which a tier may just have restored for the sake of its end.
        text = self._last if self.rng.random() < 0.5 else self.rng.choice((*self._texts[:2], *self._texts[-2:]))
        self._last, text = text, text[: self.rng.choice((20, 34, 41, 48))]
        prompt = [*text, *tokens(self.rng.randrange(50), self.rng.randint(1, 4))]
        new = self.rng.randint(1, min(14, CONTEXT - len(prompt)))
        while not self._is_clear(prompt, new):
            prompt[-1] = (prompt[-1] + 1) % VOCAB
        drawn = self._model.continuation(prompt, new)
        sampling: dict[str, object] = dict(GREEDY)
        if self.rng.random() < 0.4:  # it stops where a row of the next step may have been launched already
            stop = self.rng.choice(drawn)
            drawn = drawn[: drawn.index(stop) + 1]
            sampling["stop_token_ids"] = (stop,)
        self._expected[name] = drawn
        self._texts.append([*prompt, *drawn])
        priority, salt = self.rng.randint(0, 1), self.rng.choice((*5 * [None], "tenant"))
        self.engine.submit(name, prompt, max_new_tokens=new, sampling=sampling, n=n, priority=priority, cache_salt=salt)
        self.happened["clones"] += n - 1

    def _is_clear(self, prompt: list[int], new: int) -> bool:
        """Whether each token leads so clearly that the width of a forward cannot decide between two."""
        text = [*prompt, *self._model.continuation(prompt, new - 1)]
        best, second = self._model.logits(self._model.plain_hidden(text)[len(prompt) - 1 :]).topk(2).values.T
        return bool((best - second > 1e-3).all())

    def step(self) -> None:
        self.engine.step()
        self.engine.check()

    def disturb(self) -> None:
        match self.rng.choice(("cancel", "fault", "heal", "heal")):
            case "cancel":
                self.engine.loop.cancel(str(self.rng.randrange(max(1, len(self._expected)))))
            case "fault":
                self.fault(self.rng.choice(FAULTS))
            case "heal":
                self.heal()

    def fault(self, kind: str) -> None:
        self.happened[kind] += 1
        match kind:
            case "gone":
                self.tier.fault = "gone"
            case "full":
                self.tier.is_full = True
            case "corrupt":
                self.tier.corrupt_all()
            case "slow":
                self.tier.hold()
            case "lost":
                self.tier.lose_all()

    def heal(self) -> None:
        self.tier.fault, self.tier.is_full = None, False
        self.tier.release()

    def finish(self) -> None:
        """Run out, and compare every choice with what the decoder alone draws."""
        self.heal()
        while self.engine.loop.has_work():
            self.step()
        for name, drawn in self._expected.items():
            for index in range(1 + max(update.index for update in self.engine.updates if update.request_id == name)):
                got, finish = self.engine.tokens(name, index), self.engine.finish(name, index)
                assert finish in ("stop", "length", "cancelled"), "no request fails because of a tier"
                assert got == (drawn[: len(got)] if finish == "cancelled" else drawn), (name, index)
        below = self.engine.loop.kv_report().tiers
        assert below is not None
        host, fake = below.tiers
        self.happened["preemptions"] += self.engine.loop.stats().preemptions
        self.happened["loaded"] += below.loaded_tokens
        self.happened["evicted from host"] += dict(host.counts).get("evicted", 0)
        self.happened["from the tier"] += fake.hits
        self.happened["missed"] += fake.misses
        self.happened.update(dict(fake.counts))
        self.engine.close()


@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "overlapped"])
def test_any_traffic_over_any_fault_draws_what_the_decoder_alone_draws(model: ToyDecoder, overlaps: bool) -> None:
    happened: Counter[str] = Counter()
    for seed in range(4):
        traffic = Traffic(model, seed, overlaps=overlaps)
        for _ in range(30):
            traffic.arrive()
            for _ in range(traffic.rng.randint(0, 5)):
                traffic.step()
            if traffic.rng.random() < 0.4:
                traffic.disturb()
        traffic.finish()
        happened += traffic.happened
    wanted = {"clones", "preemptions", "loaded", "evicted from host", "from the tier"}
    assert wanted <= happened.keys(), f"the traffic is too tame: {happened}"


@pytest.mark.full
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "overlapped"])
def test_any_traffic_over_many_seeds(model: ToyDecoder, seed: int, overlaps: bool) -> None:
    traffic = Traffic(model, 100 + seed, overlaps=overlaps, cells=80 + seed)
    for _ in range(60):
        traffic.arrive()
        for _ in range(traffic.rng.randint(0, 6)):
            traffic.step()
        if traffic.rng.random() < 0.4:
            traffic.disturb()
    traffic.finish()


@pytest.mark.full
@pytest.mark.parametrize("kind", FAULTS)
def test_soak_in_which_a_tier_is_faulty_half_of_the_time(model: ToyDecoder, kind: str) -> None:
    """One kind of fault, on and off for hundreds of requests: nothing piles up, no token changes, hits go on."""
    traffic = Traffic(model, FAULTS.index(kind), overlaps=True)
    threads = threading.active_count()
    for number in range(400):
        if number % 40 == 20:
            traffic.fault(kind)
        elif number % 40 == 0:
            traffic.heal()
        traffic.arrive()
        for _ in range(traffic.rng.randint(1, 6)):
            traffic.step()
    assert threading.active_count() == threads
    traffic.finish()
    assert traffic.happened[SIGNS[kind]] > 0, f"the fault was never met: {traffic.happened}"
