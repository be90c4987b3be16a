"""The sampler's kernels under Triton's interpreter, against the host's sampler: the same ids, to the last one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton: pip install triton")
if torch.cuda.is_available():
    pytest.skip("the kernels run compiled here, in tests/gpu/test_gpu_sampling.py", allow_module_level=True)

from static_graphs.kernels.logprobs import sum_of_exp
from static_graphs.kernels.sampling import Parts, SamplerTiling, argmax_rows, draw
from static_graphs.sampler import Route, SampleInputs, sample

TILING = SamplerTiling(block=256, settle_block=512, set_aside=200)
"""Several parts a row, several blocks of what is set aside, and more to set aside than there is room for."""

PLAIN, GREEDY = (1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0)
KINDS = [
    GREEDY,
    PLAIN,
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.6, 0.0),
    (1.0, 40, 0.9, 0.0),
    (0.8, 30, 0.95, 0.05),
    (1.0, 0, 1.0, 0.1),
    (2.5, 0, 0.98, 0.0),
]
"""temperature, top_k, top_p, min_p."""


@pytest.fixture(autouse=True)
def device_arithmetic() -> Iterator[None]:
    """A device divides by zero and lets integers wrap without a word, as numpy has to be told."""
    with np.errstate(all="ignore"):
        yield


def inputs_of(kinds: list[tuple[float, int, float, float]], first: int = 0) -> tuple[SampleInputs, list[np.ndarray]]:
    columns = [np.array(column) for column in zip(*kinds, strict=True)]
    arrays = [columns[0].astype(float), columns[1].astype(np.int64), columns[2].astype(float), columns[3].astype(float)]
    rows = torch.arange(first, first + len(kinds))
    seeds = rows * 0x5851F42D4C957F2D  # wraps: seeds of all 64 bits
    return SampleInputs(*map(torch.from_numpy, arrays), seeds, rows + 2**33), arrays


def check(logits: Tensor, kinds: list[tuple[float, int, float, float]], tiling: SamplerTiling = TILING) -> Tensor:
    """Draw by kernel and on the host, all rows in one call."""
    inputs, arrays = inputs_of(kinds)
    route = Route.of(*arrays, vocab_size=logits.shape[1])
    expected = sample(logits, inputs, route)
    ids = draw(logits, inputs, has_cuts=route.has_top_k or route.has_top_p, tiling=tiling)
    assert ids.tolist() == expected.tolist()
    return ids


def random_logits(rows: int, vocab_size: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("vocab_size", [1, 2, 17, 256, 300, 5000])
@pytest.mark.parametrize("rows", [1, 9])
def test_the_argmax_is_the_lowest_id_of_the_largest(rows: int, vocab_size: int) -> None:
    logits = random_logits(rows, vocab_size).round()
    assert argmax_rows(logits, TILING)[0].tolist() == logits.argmax(-1).tolist()


def test_nan_is_the_largest_and_minus_zero_is_zero() -> None:
    logits = random_logits(6, 700)
    logits[0, [300, 500]] = torch.nan
    logits[1] = -torch.inf
    logits[2] = torch.nan
    logits[3, 650] = torch.inf
    logits[4] = -1.0
    logits[4, [9, 600]] = torch.tensor([-0.0, 0.0])
    logits[5, 77] = -torch.nan
    assert argmax_rows(logits, TILING)[0].tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("vocab_size", [1, 2, 17, 257, 1000])
def test_rows_of_all_kinds_in_one_call_draw_what_the_host_draws(vocab_size: int) -> None:
    check(random_logits(len(KINDS), vocab_size, seed=vocab_size), KINDS)


@pytest.mark.parametrize("kind", KINDS[1:], ids=lambda kind: "-".join(map(str, kind)))
def test_a_call_of_one_kind_draws_what_the_host_draws(kind: tuple[float, int, float, float]) -> None:
    check(random_logits(3, 600, seed=3), [kind] * 3)


def test_ties_at_a_cut_keep_the_lower_ids() -> None:
    flat = torch.zeros(6, 600)
    flat[3:] = random_logits(3, 600).round()
    ids = check(flat, [(1.0, 5, 1.0, 0.0), (1.0, 0, 0.01, 0.0), (1.0, 40, 0.5, 0.0)] * 2)
    assert ids[0] < 5
    assert ids[1] < 6
    assert ids[2] < 20


def test_the_ends_of_every_range_are_served() -> None:
    """k of 1 and of the vocabulary and past it, p of nothing and almost nothing, min_p of 1, the lowest temperature."""
    kinds = [
        (1.0, 1, 1.0, 0.0),
        (1.0, 300, 0.9, 0.0),
        (1.0, 299, 1.0, 0.0),
        (1.0, 301, 1.0, 0.0),
        (1.0, 0, 0.0, 0.0),
        (1.0, 0, 1e-12, 0.0),
        (1.0, 0, 1.0 - 1e-12, 0.0),
        (1.0, 0, 0.9, 1.0),
        (1e-5, 7, 0.9, 0.0),
        (9e-6, 7, 0.9, 0.0),
        (1e-5, 0, 1.0, 0.0),
        (100.0, 20, 0.9, 0.0),
    ]
    check(random_logits(len(kinds), 300, seed=5), kinds)


def test_a_masked_token_is_never_drawn() -> None:
    logits = torch.full((len(KINDS), 600), -torch.inf)
    logits[:, [7, 550]] = torch.tensor([0.0, -0.5])
    assert set(check(logits, KINDS).tolist()) <= {7, 550}


def test_a_row_that_is_not_finite_gives_what_is_not_and_leaves_its_neighbours_alone() -> None:
    kinds = [PLAIN, (1.0, 0, 0.9, 0.0), (1.0, 20, 0.9, 0.0), (1.0, 0, 1.0, 0.1), PLAIN, PLAIN]
    logits = random_logits(6, 600)
    logits[:4, 400] = torch.nan
    logits[4, 300] = torch.inf
    ids = check(logits, kinds).tolist()
    assert ids[:5] == [400, 400, 400, 400, 300]
    assert check(torch.full((2, 600), -torch.inf), [PLAIN, (1.0, 0, 0.9, 0.0)]).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_logits_of_other_precisions_and_strides(dtype: torch.dtype) -> None:
    logits = random_logits(8, 900).to(dtype)[::2, 100:700]
    check(logits, KINDS[1:5])


@pytest.mark.parametrize("change", [{"block": 1024}, {"set_aside": 16}, {"set_aside": 4096, "settle_block": 256}])
def test_one_part_or_many_set_aside_or_not_makes_no_difference(change: dict[str, int]) -> None:
    logits = random_logits(3, 700, seed=9)
    check(logits, [(1.0, 60, 0.9, 0.0), (1.0, 0, 0.9, 0.0), (0.4, 0, 0.9, 0.0)], dataclasses.replace(TILING, **change))


def test_more_than_can_be_ranked_is_searched() -> None:
    """Among what was set aside, ties at both cuts included, and in the whole row where it is more than that."""
    logits = random_logits(2, 800, seed=7, spread=0.4)
    logits[1] = (logits[1] * 4).round() / 4
    for kind in ((1.0, 600, 0.9, 0.0), (1.0, 0, 0.8, 0.7)):
        check(logits, [kind] * 2, dataclasses.replace(TILING, set_aside=4096))
        check(logits, [kind] * 2, dataclasses.replace(TILING, set_aside=520))


def test_few_tokens_far_above_all_others_leave_a_cut_among_the_others() -> None:
    logits = random_logits(4, 900, seed=8, spread=1.0)
    logits[:, [5, 800]] += torch.tensor([[30.0], [30.0], [300.0], [1e30]])
    check(logits, [(1.0, 40, 1.0, 0.0), (1.0, 40, 1.0 - 1e-9, 0.0), (1.0, 40, 1.0, 0.0), (1.0, 40, 0.9, 0.0)])


def test_little_more_is_set_aside_than_is_kept() -> None:
    """Else a draw is right and slow. In half of these rows all of a part is masked, and in one most of all parts."""
    logits = random_logits(6, 4000, seed=4)
    logits[1::2, 256:1024] = -torch.inf
    logits[2, 20:] = -torch.inf
    kinds = (
        [(1.0, 50, 0.9, 0.0), (0.1, 50, 1.0, 0.0), (1.0, 50, 0.9, 0.0)]
        + [(1.0, 0, 0.9, 0.0)] * 2
        + [(0.5, 0, 0.9, 0.0)]
    )
    inputs, _ = inputs_of(kinds)
    parts = Parts(logits, TILING)
    ids = torch.empty(6, dtype=torch.int64)
    parts.survey(inputs)
    parts.bound(inputs, ids)
    parts.sift(inputs, True)
    for row, (temperature, top_k, top_p, _) in enumerate(kinds):
        probs = (logits[row] / temperature).softmax(-1).sort(descending=True).values
        kept = top_k or int((probs.cumsum(-1) < top_p).sum()) + 1
        assert min(kept, 20 if row == 2 else kept) <= parts.num_aside[row] <= 4 * kept


def test_no_rows_are_no_ids() -> None:
    inputs, _ = inputs_of(KINDS)
    nothing = draw(torch.empty(0, 50), inputs.rows(slice(0, 0)), has_cuts=True)
    assert nothing.tolist() == argmax_rows(torch.empty(0, 50))[0].tolist() == []


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_any_mix_of_rows_sizes_and_tilings_draws_what_the_host_draws(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, vocab_size = int(rng.integers(1, 10)), int(rng.choice([1, 3, 100, 1025, 3001]))
    logits = random_logits(rows, vocab_size, seed, spread=float(rng.choice([0.1, 1, 3, 10])))
    if rng.random() < 0.4:
        logits = logits.round()
    if rng.random() < 0.3:
        logits[:, ::3] = -torch.inf
    if rng.random() < 0.3:
        logits[:, : vocab_size // 50 + 1] += 12
    kinds = zip(
        rng.choice([0.0, 0.1, 0.7, 1.0, 1.5, 5.0], rows).tolist(),
        rng.choice([0, 0, 1, 5, 50, 300, vocab_size, vocab_size + 10], rows).tolist(),
        rng.choice([1.0, 1.0, 0.95, 0.9, 0.5, 0.05, 0.0, 1e-9], rows).tolist(),
        rng.choice([0.0, 0.0, 0.0, 0.01, 0.1, 1.0], rows).tolist(),
        strict=True,
    )
    tiling = SamplerTiling(
        block=int(rng.choice([256, 1024])),
        settle_block=int(rng.choice([64, 512])),
        set_aside=int(rng.choice([16, 400, 5000])),
    )
    check(logits, list(kinds), tiling)


@pytest.mark.parametrize("vocab_size", [1, 300, 2048, 5001])
def test_the_sum_below_logprobs_is_the_hosts_and_of_no_other_row(vocab_size: int) -> None:
    logits = random_logits(7, vocab_size)
    logits[2, :-1] = -torch.inf
    logits[3, vocab_size // 2] = torch.nan
    peak = logits.amax(1, keepdim=True)
    sums = sum_of_exp(logits, peak)
    torch.testing.assert_close(sums, (logits - peak).exp().sum(1, keepdim=True), rtol=1e-5, atol=0, equal_nan=True)
    for some in ([0], [5], [6, 4, 2], [1, 1, 0, 6, 5, 4]):
        assert torch.equal(sum_of_exp(logits[some], peak[some]), sums[some])
