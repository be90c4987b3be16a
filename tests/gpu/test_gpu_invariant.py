"""R31 and G16: one unique output a prompt, to the last bit of its logprobs, in a load that changes all the time.

Probes are asked again and again, alone and among up to 255 others; their prompts are cut, begin with what is cached or
not, and are preempted in a pool that is too small. What a step holds besides is drawn at random.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from engine.build import build_engine
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.loop import EngineLoop
from engine.types import GenerateRequest, SamplingParams, Update
from static_graphs.shapes import SHAPES

pytestmark = pytest.mark.gpu

VOCAB = 151_936
NEW_TOKENS = 8
CONCURRENT = (1, 9, 60, 120, 250, 250, 250)
"""Requests that a phase of the load holds."""
PHASE_STEPS = 25
POOL_CELLS = 4000
"""A fraction of what 250 requests need."""


def tokens(seed: int, count: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB) for _ in range(count))


STEM = tokens(0, 511)
PROBES: dict[str, tuple[tuple[int, ...], SamplingParams]] = {
    "single": (tokens(1, 37), SamplingParams(logprobs=3)),
    "mixed, one token": (tokens(2, 1), SamplingParams(logprobs=0, top_p=0.9)),
    "mixed, of several chunks": (tokens(3, 300), SamplingParams(logprobs=5, top_k=40, presence_penalty=0.5)),
    "mixed, prompt logprobs": (tokens(4, 70), SamplingParams(logprobs=2, prompt_logprobs=2, min_p=0.01)),
    "prefix of 511": ((*STEM, 5), SamplingParams(logprobs=1)),
    "prefix of 300": ((*STEM[:300], *tokens(5, 45)), SamplingParams(logprobs=1, frequency_penalty=0.2)),
    "prefix of 1": ((*STEM[:1], *tokens(6, 20)), SamplingParams(logprobs=1, logit_bias=((9, 1.5),))),
}
TEMPERATURES = (0.0, 0.7)


@dataclass
class Load:
    """A loop under it, and what came of each probe."""

    loop: EngineLoop
    samples: int
    """Of each probe at each temperature."""
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    outputs: dict[tuple[str, float], Counter[object]] = field(default_factory=lambda: defaultdict(Counter))
    cached: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    _said: dict[str, list[Update]] = field(default_factory=dict)
    _open: set[tuple[str, int]] = field(default_factory=set)

    def run(self) -> None:
        """Until every sample of every probe is there."""
        asked = [(name, at) for name in PROBES for at in TEMPERATURES for _ in range(self.samples)]
        self.rng.shuffle(asked)
        steps = number = target = 0
        while asked or self.loop.has_work():
            if steps % PHASE_STEPS == 0:
                target = self.rng.choice(CONCURRENT)
                if self.rng.random() < 0.05:
                    number += self._squeeze(number)
            if self.rng.random() < 0.07:
                self.loop.reset_prefix_cache()
            while asked and len(self._open) < target and self.rng.random() < 0.95:
                number += 1
                if self.rng.random() < 0.25:
                    self._submit(self._neighbour(f"neighbour {number}"))
                else:
                    name, temperature = asked.pop()
                    self._submit(probe(f"{name}/{temperature}/{number}", name, temperature))
            for update in self.loop.step():
                self._take(update)
            steps += 1

    def _submit(self, request: GenerateRequest) -> None:
        self.loop.submit(request)
        self._open |= {(request.request_id, choice) for choice in range(request.n)}

    def _squeeze(self, number: int) -> int:
        """Requests that are let in because they are short, and grow beyond the pool together; -> how many."""
        for each in range(60):
            self._submit(GenerateRequest(f"squeeze {number + each}", tokens(each, 5), max_new_tokens=80))
        return 60

    def _neighbour(self, request_id: str) -> GenerateRequest:
        rng = self.rng
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.5, 1.0)),
            top_p=rng.choice((1.0, 0.8)),
            top_k=rng.choice((0, 0, 5, 900)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
            logprobs=rng.choice((None, 8)),
        )
        prompt = STEM[: rng.randint(1, 511)] if rng.random() < 0.3 else tokens(rng.randrange(999), rng.randint(1, 600))
        count = rng.choice((1, 1, 3))
        return GenerateRequest(request_id, prompt, n=count, sampling=params, max_new_tokens=rng.choice((2, 15, 60)))

    def _take(self, update: Update) -> None:
        assert update.error is None, update.error
        said = self._said.setdefault(update.request_id, [])
        said.append(update)
        if update.finish is None:
            return
        self._open.discard((update.request_id, update.index))
        name, _, rest = update.request_id.partition("/")
        if name in PROBES:
            self.outputs[name, float(rest.partition("/")[0])][output(said)] += 1
            self.cached[name][next(each.cached_tokens for each in said if each.cached_tokens is not None)] += 1


def probe(request_id: str, name: str, temperature: float) -> GenerateRequest:
    prompt, params = PROBES[name]
    return GenerateRequest(
        request_id, prompt, sampling=replace(params, temperature=temperature, seed=11), max_new_tokens=NEW_TOKENS
    )


def output(said: list[Update]) -> object:
    """Tokens, and every number that was told of them."""
    ids = tuple(token_id for update in said for token_id in update.token_ids)
    values = [value for update in said for value in update.logprobs or ()]
    values += [value for update in said for value in update.prompt_logprobs or () if value is not None]
    return ids, tuple((value.token_id, value.logprob, value.top) for value in values)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A quarter of a 0.6b's layers or less: true products and a true vocabulary, of random weights."""
    folder: Path = tmp_path_factory.mktemp("model")
    shape = {**SHAPES["0.6b"], "num_hidden_layers": 4, "initializer_range": 0.05}
    (folder / "config.json").write_text(json.dumps(shape))
    return str(folder)


def loaded(model: str, samples: int, **options: object) -> Load:
    config = EngineConfig(
        model,
        device="cuda",
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=1024,
        kv_cells=POOL_CELLS,
        generation_config="none",
        **options,  # type: ignore[arg-type]
    )
    load = Load(build_engine(config, lambda *_: None)[0], samples)
    load.run()
    return load


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("samples", "options"),
    [
        (250, {}),
        (12, {"widths": (64,)}),
        (6, {"enforce_eager": True}),
        (12, {"overlap": False, "kv_cache_dtype": "fp8"}),
    ],
    ids=["256 rows", "64 rows", "eager", "FP8 cells"],
)
def test_r31_g16_every_sample_of_a_prompt_is_the_same_to_the_last_bit(
    model: str, samples: int, options: dict[str, object]
) -> None:
    load = loaded(model, samples, batch_invariant=True, **options)
    assert {key: sum(found.values()) for key, found in load.outputs.items()} == {
        (name, at): samples for name in PROBES for at in TEMPERATURES
    }
    assert {key: len(found) for key, found in load.outputs.items() if len(found) != 1} == {}
    stats = load.loop.stats()
    assert (stats.cells_used, stats.rows_failed) == (0, 0)
    assert len(stats.method_calls) == 1
    if samples >= 250:  # the load was what it is meant to be
        assert stats.preemptions > 0
        assert all(len(load.cached[name]) > 1 for name in ("prefix of 511", "prefix of 300", "single"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two layers of 128 experts of true size."""
    folder: Path = tmp_path_factory.mktemp("mixture")
    shape = {**SHAPES["30b-a3b"], "num_hidden_layers": 2, "initializer_range": 0.05}
    (folder / "config.json").write_text(json.dumps(shape))
    return str(folder)


def test_r31_of_a_mixture_of_experts_too(mixture: str) -> None:
    samples = 8
    load = loaded(mixture, samples, batch_invariant=True, widths=(128,))
    assert {sum(found.values()) for found in load.outputs.values()} == {samples}
    assert {key: len(found) for key, found in load.outputs.items() if len(found) != 1} == {}


def test_r31_of_a_mixture_is_refused_where_transformers_computes_it(mixture: str) -> None:
    with pytest.raises(ConfigError, match="mixture of experts that enforce_eager leaves to transformers"):
        loaded(mixture, 1, batch_invariant=True, enforce_eager=True)


def test_r31_how_many_outputs_there_are_by_default_is_told(model: str) -> None:
    """Rounding differs with a step's width there, which is no fault: nothing is asserted of it but that all ran."""
    load = loaded(model, 16, widths=(1, 32, 256))
    counts = {f"{name} at {at:g}": len(found) for (name, at), found in sorted(load.outputs.items())}
    print(f"unique outputs among 16 samples each, by default: {counts}")
    assert sum(sum(found.values()) for found in load.outputs.values()) == 16 * len(PROBES) * len(TEMPERATURES)


def test_a_rows_logprobs_are_the_same_beside_any_others() -> None:
    from static_graphs.sampler import raw_logprobs

    logits = torch.randn(255, VOCAB, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    ids = torch.arange(255, device="cuda")
    whole = raw_logprobs(logits, ids, 4)
    expected = torch.log_softmax(logits.double(), 1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(whole.chosen.double(), expected, rtol=0, atol=1e-5)
    for rows in (1, 2, 7, 64, 200):
        some = torch.randperm(255, device="cuda")[:rows]
        part = raw_logprobs(logits[some], ids[some], 2)
        assert torch.equal(part.chosen, whole.chosen[some])
        assert torch.equal(part.top, whole.top[some, :2])
