"""The offline bench: its requests are the ones it names, its floor is the arithmetic it states."""

from __future__ import annotations

import pytest

from engine import bench
from engine.bench import PREFILL_ROWS, Ceilings, Workload


def test_the_nano_draw_is_the_published_one() -> None:
    work = bench.nano(vocab_size=151936)
    assert (work.prompt_tokens, work.new_tokens, len(work.requests)) == (142_827, 133_966, 256)


def test_random_ids_stay_inside_the_vocabulary() -> None:
    for work in (bench.nano(vocab_size=100), bench.fixed(4, 2, vocab_size=100)):
        assert max(token for prompt, _ in work.requests for token in prompt) < 100


def test_the_floor_adds_prefill_and_one_pass_for_each_step_of_decode_rows() -> None:
    """2 requests of 256 prompt tokens: 512 rows of body at half the pass's cost, then 2 rows for 10 steps."""
    work = Workload("", (((0,) * 256, 11), ((0,) * 256, 11)), streams=2)
    ceilings = Ceilings(
        weight_bytes=4_000_000, flops_per_row=2e6, head_flops_per_row=1e6, pass_s={1: 1e-3, 2: 2e-3, PREFILL_ROWS: 0.1}
    )
    assert ceilings.floor_tok_s(work) == pytest.approx(22 / (0.05 + 10 * 2e-3))
    assert ceilings.read_gb_s() == pytest.approx(4.0)
    assert ceilings.gflops(PREFILL_ROWS) == pytest.approx(512 * 2e6 / 0.1 / 1e9)


def test_a_shared_prefix_is_the_same_in_all_requests_and_nothing_else_is() -> None:
    work = bench.fixed(3, 3, vocab_size=10_000, num_in=12, num_out=1, num_shared=8)
    prompts = [prompt for prompt, _ in work.requests]
    assert len({prompt[:8] for prompt in prompts}) == 1
    assert len({prompt[8:] for prompt in prompts}) == 3
    assert {len(prompt) for prompt in prompts} == {12}


def test_where_prompts_are_all_there_is_to_it_their_tokens_count() -> None:
    assert bench.fixed(2, 2, 100, num_in=16, num_out=1).counted_tokens == 32
    assert bench.fixed(2, 2, 100, num_in=16, num_out=3).counted_tokens == 6
