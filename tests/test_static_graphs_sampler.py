from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from static_graphs.noise import exponentials, row_keys
from static_graphs.sampler import (
    Route,
    SampleInputs,
    keep_prefix,
    largest,
    raw_logprobs,
    sample,
    sample_argmax,
    sample_rows,
)
from support import sampling_oracle


def random_logits(*shape: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def served(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: Tensor | int = 0,
    positions: Tensor | int = 0,
    whole: bool = False,
) -> Tensor:
    """One draw a row, all rows alike; `whole` forbids the shortcut over the largest logits."""
    rows, vocab_size = logits.shape
    arrays = (
        np.full(rows, temperature),
        np.full(rows, top_k, np.int64),
        np.full(rows, top_p),
        np.full(rows, min_p),
    )
    route = Route.of(*arrays, vocab_size=vocab_size)
    if whole:
        # A top_k of V keeps everything but makes a row ineligible for candidates.
        arrays[1][arrays[1] == 0] = vocab_size
        route = dataclasses.replace(route, candidates=0, has_top_k=True)
    seeds = torch.as_tensor(seeds).expand(rows)
    positions = torch.as_tensor(positions).expand(rows)
    return sample(logits, SampleInputs(*map(torch.from_numpy, arrays), seeds, positions), route)


def repeated(row: Tensor, draws: int, **params: float) -> np.ndarray:
    """Counts of each id over `draws` positions of one row."""
    ids = served(row.expand(draws, -1), positions=torch.arange(draws), **params)
    return np.bincount(ids.numpy(), minlength=row.shape[-1])


# --- the seed's contract: sample_rows, sample_argmax


def coin_rows(*rows: tuple[float, float, float, float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sam_1_temperature_zero_is_the_lowest_id_of_the_largest_logit_whatever_the_coin(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]] * 3, dtype=dtype)
    params = coin_rows((0, 0.1, 1, 0.0), (0, 1, 0, 0.999), (-1, 1, 3, 0.5))
    assert sample_rows(logits, params).tolist() == [1, 1, 1]
    assert sample_argmax(logits).tolist() == [1, 1, 1]


def test_sam_2_top_k_overrides_top_p_and_a_top_k_of_the_vocabulary_is_off() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 2)
    # p = .3 alone would keep id 0 only; k = 4 of 4 is off, so p = .3 counts.
    assert sample_rows(logits, coin_rows((1, 0.3, 3, 0.99), (1, 0.3, 4, 0.99))).tolist() == [2, 0]


def test_sam_3_ties_go_to_the_lower_id_and_top_p_keeps_the_token_that_crosses_it() -> None:
    flat = torch.zeros(1, 8)
    assert [sample_rows(flat, coin_rows((1, 0, 2, coin))).item() for coin in (0.0, 0.49, 0.51, 0.99)] == [0, 0, 1, 1]
    # Masses before: 0, .125, .25, .375: at p = .25 the token with exactly .25 before it stays.
    assert sample_rows(flat, coin_rows((1, 0.25, 0, 0.999))).item() == 2
    assert sample_rows(flat, coin_rows((1, 0.26, 0, 0.999))).item() == 2


def test_sam_4_the_full_distribution_runs_in_token_order_and_ends_at_the_last_token() -> None:
    logits = torch.tensor([[0.25, 0.5, 0.25]]).log()
    ids = [sample_rows(logits, coin_rows((1, 1, 0, coin))).item() for coin in (0.0, 0.2, 0.3, 0.7, 0.8)]
    assert ids == [0, 0, 1, 1, 2]
    one = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    assert sample_rows(one, coin_rows((1, 1, 0, 1 - 2**-24))).item() in (0, 2)  # clamped to V - 1, never past it


POLICIES = {
    "full": (0.8, 1.0, 0.0),
    "top_k": (1.2, 1.0, 4.0),
    "k_beats_p": (1.0, 0.3, 7.0),
    "top_p": (0.7, 0.85, 0.0),
    "small_top_p": (1.5, 0.2, 0.0),
    "greedy": (0.0, 1.0, 0.0),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_t_sam_fixed_coins_agree_with_the_scalar_oracle(policy: str) -> None:
    logits = random_logits(6, 50)
    coins = (0.02, 0.21, 0.43, 0.57, 0.78, 0.96)
    ids = sample_rows(logits, coin_rows(*((*POLICIES[policy], coin) for coin in coins)))
    oracle = [
        sampling_oracle.sample_row(row, *POLICIES[policy], coin)
        for row, coin in zip(logits.tolist(), coins, strict=True)
    ]
    assert min(choice.gap for choice in oracle) > 1e-5
    assert ids.tolist() == [choice.token_id for choice in oracle]


def test_sam_5_rows_are_independent_of_their_neighbours() -> None:
    logits = random_logits(6, 50).bfloat16()
    params = coin_rows(*((*policy, 0.61) for policy in POLICIES.values()))
    alone = [sample_rows(logits[row : row + 1], params[row : row + 1]).item() for row in range(6)]
    assert sample_rows(logits, params).tolist() == alone
    order = [3, 0, 5, 5, 2]
    assert sample_rows(logits[order], params[order]).tolist() == [alone[row] for row in order]


def test_sam_large_vocabularies_agree_with_the_oracle_except_at_a_boundary() -> None:
    rows = 36
    logits = random_logits(rows, 32_000, seed=1)
    coins = torch.rand(rows, generator=torch.Generator().manual_seed(2)).tolist()
    policies = [list(POLICIES.values())[row % 5] for row in range(rows)]
    ids = sample_rows(logits, coin_rows(*((*policy, coin) for policy, coin in zip(policies, coins, strict=True))))
    excused = 0
    for row, token_id in enumerate(ids.tolist()):
        coin = float(np.float32(coins[row]))
        choice = sampling_oracle.sample_row(logits[row].tolist(), *policies[row], coin)
        if token_id != choice.token_id:
            assert choice.gap <= 1e-5
            excused += 1
    assert excused <= 2


@pytest.mark.parametrize("policy", ["full", "top_k", "top_p"])
def test_t_sam_frequencies_of_4000_coins_follow_the_distribution(policy: str) -> None:
    logits = random_logits(1, 20, spread=1.0)
    coins = torch.rand(4000, generator=torch.Generator().manual_seed(3)).tolist()
    ids = sample_rows(logits.expand(4000, -1), coin_rows(*((*POLICIES[policy], coin) for coin in coins)))
    seen = np.bincount(ids.numpy(), minlength=20) / 4000
    temperature, top_p, top_k = POLICIES[policy]
    due = sampling_oracle.distribution(logits[0].tolist(), temperature, int(top_k), top_p)
    assert np.abs(seen - due).max() < 0.03


# --- the served sampler: what it draws


FILTERS: dict[str, dict[str, float]] = {
    "plain": {},
    "cool": {"temperature": 0.5},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "top_k_then_top_p": {"temperature": 1.3, "top_k": 12, "top_p": 0.7},
    "all": {"temperature": 1.5, "top_k": 20, "top_p": 0.95, "min_p": 0.05},
}


@pytest.mark.parametrize("whole", [False, True], ids=["shortcut", "whole"])
@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_composed_filters_and_never_leave_them(name: str, whole: bool) -> None:
    """4.3: temperature, then top_k, then top_p of what is left, then min_p."""
    row = random_logits(50, seed=5, spread=1.5)
    due = sampling_oracle.distribution(row.tolist(), **FILTERS[name])
    counts = repeated(row, 4000, whole=whole, **FILTERS[name])
    assert counts[due == 0].sum() == 0
    assert np.abs(counts / 4000 - due).max() < 0.03
    assert sampling_oracle.chi_square_excess(counts, due) < 4


@pytest.mark.parametrize("params", list(FILTERS.values())[1:], ids=list(FILTERS)[1:])
def test_the_shortcut_over_the_largest_logits_draws_what_the_whole_vocabulary_draws(params: dict[str, float]) -> None:
    logits = random_logits(64, 3000, seed=6, spread=2.0)
    logits[32:, ::5] += 9  # the first half has long tails, the second short ones
    logits = torch.cat((logits, logits.bfloat16().float()))
    positions = torch.arange(128)
    assert torch.equal(
        served(logits, positions=positions, **params), served(logits, positions=positions, whole=True, **params)
    )


def test_temperature_zero_and_below_1e_5_is_the_lowest_id_of_the_largest_logit() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0]]).expand(50, -1)
    for temperature in (0.0, 9e-6):
        assert served(logits, temperature=temperature, positions=torch.arange(50)).unique().tolist() == [1]


def test_the_lowest_temperature_that_draws_stays_finite() -> None:
    logits = torch.tensor([[0.0, 30.0, -30.0, 29.0]]).expand(200, -1)
    assert served(logits, temperature=1e-5, positions=torch.arange(200)).unique().tolist() == [1]


def test_top_p_zero_draws_the_top_token_only() -> None:
    row = torch.tensor([0.0, 1.0, 1.0, 0.5])
    for whole in (False, True):
        assert repeated(row, 300, top_p=0.0, whole=whole).tolist() == [0, 300, 0, 0]


def test_min_p_one_draws_only_what_equals_the_top_token() -> None:
    counts = repeated(torch.tensor([0.0, 1.0, 1.0, 0.999]), 300, min_p=1.0)
    assert counts[0] == counts[3] == 0
    assert counts[1] > 100
    assert counts[2] > 100


@pytest.mark.parametrize("whole", [False, True], ids=["shortcut", "whole"])
def test_ties_at_a_cut_keep_the_lower_ids_exactly(whole: bool) -> None:
    flat = torch.zeros(1000)
    assert set(np.flatnonzero(repeated(flat, 400, top_k=5, whole=whole))) == set(range(5))
    counts = repeated(flat, 1000, top_p=0.05, whole=whole)
    assert set(np.flatnonzero(counts)) == set(range(50))


def test_a_masked_token_is_never_drawn_and_a_lone_one_always_is() -> None:
    row = torch.full((300,), -torch.inf)
    row[[7, 250]] = torch.tensor([0.0, -3.0])
    counts = repeated(row, 2000)
    assert counts[7] + counts[250] == 2000
    assert counts[250] > 20
    row[250] = -torch.inf
    for params in FILTERS.values():
        assert repeated(row, 100, **params)[7] == 100


@pytest.mark.parametrize("broken", [torch.nan, -torch.inf])
def test_a_row_without_a_usable_logit_still_draws_an_id_of_the_vocabulary(broken: float) -> None:
    row = torch.full((1, 40), broken)
    for params in ({}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}):
        assert 0 <= served(row, **params).item() < 40


def test_low_precision_logits_draw_as_their_float32_values_do() -> None:
    logits = random_logits(40, 500).bfloat16()
    positions = torch.arange(40)
    assert torch.equal(served(logits, positions=positions), served(logits.float(), positions=positions))


# --- the served sampler: what a draw depends on


@pytest.mark.parametrize("params", FILTERS.values(), ids=FILTERS)
def test_x_9_a_draw_depends_on_its_own_row_only(params: dict[str, float]) -> None:
    """Alone, in any place of any batch, in any order: the same id for the same (seed, position)."""
    logits = random_logits(24, 1001, seed=8, spread=2.0)
    seeds = torch.arange(24) * 7 - 50
    positions = torch.arange(24) * 3
    together = served(logits, seeds=seeds, positions=positions, **params)
    for order in ([5], [5, 6], [23, 5, 0], list(range(23, -1, -1)), [5] * 9, list(range(3, 20))):
        some = served(logits[order], seeds=seeds[order], positions=positions[order], **params)
        assert some.tolist() == together[order].tolist()


def test_x_9_a_batch_too_large_for_one_block_draws_as_its_rows_do_alone() -> None:
    logits = random_logits(24, 50_000, seed=12)
    logits[::2, :30] += 12
    rows = torch.arange(24)
    together = served(logits, seeds=rows, positions=rows, top_p=0.6)
    for row in (0, 1, 10, 11, 23):
        assert served(logits[row : row + 1], seeds=row, positions=row, top_p=0.6).item() == together[row]


def test_x_9_rows_of_different_kinds_share_a_call_without_changing_each_other() -> None:
    logits = random_logits(len(FILTERS) + 1, 400, seed=9)
    kinds = [*FILTERS.values(), {"temperature": 0.0}]
    table = [{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | kind for kind in kinds]
    arrays = [np.array([row[name] for row in table]) for name in ("temperature", "top_k", "top_p", "min_p")]
    route = Route.of(*arrays, vocab_size=400)
    rows = torch.arange(len(kinds))
    mixed = sample(logits, SampleInputs(*map(torch.from_numpy, arrays), rows, rows), route)
    alone = [served(logits[row : row + 1], seeds=row, positions=row, **kind).item() for row, kind in enumerate(kinds)]
    assert mixed.tolist() == alone


SEEDS = (0, 1, 2, 3, -1, -2, 2**31, 2**32, 2**63 - 1, -(2**63))


@pytest.mark.parametrize("seed", SEEDS)
def test_x_9_every_seed_gives_usable_draws(seed: int) -> None:
    """X-9, SAM-10: seed 0 must not be a fixed point."""
    row = random_logits(30, seed=10, spread=1.0)
    due = sampling_oracle.distribution(row.tolist())
    assert sampling_oracle.chi_square_excess(repeated(row, 3000, seeds=seed), due) < 4
    first = served(torch.zeros(1, 1000), seeds=seed).item()
    assert 0 <= first < 1000


def test_x_9_neighbouring_seeds_and_positions_are_independent() -> None:
    """On a flat vocabulary of 100, two independent streams agree in 1 draw of 100."""
    flat = torch.zeros(1500, 100)
    positions = torch.arange(1500)
    streams = [served(flat, seeds=seed, positions=positions + shift) for seed in SEEDS for shift in (0, 1)]
    for index, one in enumerate(streams):
        for other in streams[index + 1 :]:
            assert (one == other).float().mean().item() < 0.022
    # And choice j's first draws: seeds 0, 1, 2 ... at one position.
    firsts = np.bincount(served(flat, seeds=positions, positions=5).numpy(), minlength=100)
    assert sampling_oracle.chi_square_excess(firsts, np.full(100, 0.01)) < 4


def test_the_noise_is_unit_exponential_and_never_zero_or_infinite() -> None:
    keys = row_keys(torch.arange(40), torch.arange(40) % 3)
    waits = exponentials(keys, torch.arange(50_000, dtype=torch.int32))
    assert 0 < waits.min().item() < 1e-4
    assert 12 < waits.max().item() < 17
    assert waits.mean().item() == pytest.approx(1, abs=0.004)
    assert waits.var().item() == pytest.approx(1, abs=0.015)
    bins = np.histogram(torch.exp(-waits[:8]).numpy(), bins=64, range=(0, 1))[0]
    assert sampling_oracle.chi_square_excess(bins, np.full(64, 1 / 64)) < 4
    rows = np.corrcoef(waits[:12].numpy())
    assert np.abs(rows - np.eye(12)).max() < 0.02
    assert abs(np.corrcoef(waits[0, :-1], waits[0, 1:])[0, 1]) < 0.02


def test_the_noise_of_a_token_does_not_depend_on_which_others_are_asked_for() -> None:
    keys = row_keys(torch.tensor([3, -9]), torch.tensor([0, 2**40]))
    everything = exponentials(keys, torch.arange(1003, dtype=torch.int32))
    some = torch.tensor([[5, 1002, 0], [77, 5, 6]], dtype=torch.int32)
    assert torch.equal(exponentials(keys, some), everything.gather(1, some.long()))


def test_the_noise_is_the_same_on_every_machine() -> None:
    """A draw survives restarts and versions: these keys are part of the contract of `seed`."""
    keys = row_keys(torch.tensor([0, 1, -1, 2**63 - 1]), torch.tensor([0, 1, 2, 3]))
    assert keys.tolist() == [5197578548964807871, 6791897765849424158, -4781302686461524836, 4191327408494676315]
    draws = served(torch.zeros(4, 100_000), seeds=torch.tensor([0, 1, -1, 2**63 - 1]), positions=torch.arange(4))
    assert draws.tolist() == [64816, 45970, 91847, 88025]


# --- the two selections everything rests on


@pytest.mark.parametrize("make_ties", [False, True])
def test_largest_is_the_stable_order(make_ties: bool) -> None:
    logits = random_logits(5, 700)
    logits[0, :3] = torch.tensor([0.0, -0.0, 0.0])
    logits[1, 100:] = -torch.inf
    if make_ties:
        logits = logits.round()
    expected = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    assert torch.equal(largest(logits, 150), expected[:, :150])


@pytest.mark.parametrize("make_ties", [False, True])
def test_keep_prefix_is_the_shortest_prefix_that_reaches_the_weight(make_ties: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = random_logits(60, 333, seed=11)
    if make_ties:
        logits = (logits / 3).round()
    weights = torch.exp(logits).mul(1000).long()
    totals = weights.sum(-1, keepdim=True)
    wanted = (torch.rand(60, 1, generator=generator, dtype=torch.float64) * totals).long().clamp(min=1)
    wanted[0], wanted[1] = 1, totals[1]
    kept = keep_prefix(logits, weights, wanted)
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    ordered = weights.gather(-1, order)
    expected = torch.zeros_like(kept).scatter_(-1, order, ordered.cumsum(-1) - ordered < wanted)
    # Tokens of weight 0 behind the end may stay where the whole weight is wanted: they are never drawn.
    assert torch.equal(kept & (weights > 0), expected & (weights > 0))


# --- raw logprobs


def test_raw_logprobs_are_the_log_softmax_and_a_leader_equals_the_top_exactly() -> None:
    logits = random_logits(20, 2000).bfloat16()
    ids = sample_argmax(logits)
    raw = raw_logprobs(logits, ids, 5)
    reference = torch.log_softmax(logits.double(), dim=-1)
    torch.testing.assert_close(raw.top.double(), reference.gather(-1, raw.top_ids), rtol=0, atol=1e-5)
    assert torch.equal(raw.chosen, raw.top[:, 0])
    assert torch.equal(ids, raw.top_ids[:, 0])
    assert (raw.top <= 0).all()
    assert raw_logprobs(logits, ids, 0).top.shape == (20, 0)
    assert raw_logprobs(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64), 20).top_ids.tolist() == [[0, 1, 2]]
