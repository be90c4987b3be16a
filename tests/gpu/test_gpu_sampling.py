"""The sampler on a CUDA device: the CPU's draws, no waiting before collect, capturable."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.sampling import Sampled, Sampler
from engine.types import SamplingParams
from static_graphs.sampler import Route, SampleInputs, sample, sample_argmax, sample_rows

V = 5003

KINDS = {
    "greedy": SamplingParams(temperature=0),
    "plain": SamplingParams(),
    "top_k": SamplingParams(top_k=50, top_p=0.9),
    "top_p": SamplingParams(top_p=0.8),
    "large_top_k": SamplingParams(top_k=900, top_p=0.9, min_p=0.01),
    "min_p": SamplingParams(min_p=0.05, logprobs=3),
    "penalties": SamplingParams(top_p=0.9, frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.2),
    "masks": SamplingParams(
        logit_bias=((3, 4.0), (4, -100.0)), bad_words=((5,), (3, 6)), stop_token_ids=(7,), min_tokens=50, logprobs=2
    ),
    "allowed": SamplingParams(allowed_token_ids=(1, 2, 3)),
}


def table(rows: int) -> Tensor:
    """bf16, so that ties are common."""
    return (torch.randn(rows, V, generator=torch.Generator().manual_seed(1)) * 3).bfloat16()


def step(sampler: Sampler, logits: Tensor, position: int) -> Sampled:
    slots = np.arange(len(KINDS))
    return sampler.sample(logits, slots, np.full(len(KINDS), position), np.zeros(len(KINDS), np.int64))


def opened(device: str) -> Sampler:
    sampler = Sampler(V, torch.device(device), 16)
    for slot, params in enumerate(KINDS.values()):
        sampler.open(slot, params, seed=slot, prompt=[1, 2, 3], generated=[9, 9])
    return sampler


@contextmanager
def no_waiting() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_gpu_draws_what_a_cpu_draws() -> None:
    """exp and log1p may differ in the last bit between the two, so a near-tie in 450 draws may fall otherwise."""
    host, device = opened("cpu"), opened("cuda")
    different = 0
    for position in range(5, 55):
        logits = table(len(KINDS)).roll(position, dims=1)
        ours = step(device, logits.cuda(), position).collect()
        theirs = step(host, logits, position).collect()
        different += sum(one[0] != other[0] for one, other in zip(ours, theirs, strict=True))
    assert different <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_vocabulary_is_cut_and_drawn_as_on_a_cpu(dtype: torch.dtype) -> None:
    """Flat rows keep more than is set aside, peaked ones a handful; bf16 puts hundreds of ties at a cut."""
    rows, vocab_size = 24, 151_936
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(2)) * 3
    logits[::3] *= 0.01
    logits[1::3, :40] += 12
    logits[21], logits[22, 70_000] = -torch.inf, torch.nan
    kinds = [(0, 0, 1, 0), (1, 0, 1, 0), (0.8, 50, 0.9, 0), (1, 0, 0.9, 0), (1, 30_000, 0.99, 0), (1.2, 0, 0.99, 0.02)]
    columns = [np.array(column) for column in zip(*(kinds[row // 3 % 6] for row in range(rows)), strict=True)]
    arrays = [column.astype(np.int64 if index == 1 else np.float64) for index, column in enumerate(columns)]
    seeds = torch.arange(rows)
    inputs = SampleInputs(*map(torch.from_numpy, arrays), seeds, seeds + 1000)
    on_device = SampleInputs(*(getattr(inputs, field.name).cuda() for field in dataclasses.fields(inputs)))
    route = Route.of(*arrays, vocab_size=vocab_size)
    ours = sample(logits.to(dtype).cuda(), on_device, route).cpu()
    theirs = sample(logits.to(dtype), inputs, route)
    assert ours[[21, 22]].tolist() == [0, 70_000]
    assert (ours != theirs).sum() <= 1


def test_nothing_waits_for_the_device_before_collect() -> None:
    sampler = opened("cuda")
    logits = table(len(KINDS)).cuda()
    step(sampler, logits, 5).collect()
    with no_waiting():
        launched = [step(sampler, logits, position) for position in range(6, 16)]
    assert all(0 <= token_id < V for one in launched for token_id, _ in one.collect())


@pytest.mark.parametrize("kind", ["plain", "top_k", "top_p", "large_top_k", "min_p"])
def test_a_captured_draw_repeats_the_eager_one_and_ignores_its_neighbours(kind: str) -> None:
    params, rows = KINDS[kind], 7
    arrays = (
        np.full(rows, params.temperature),
        np.full(rows, params.top_k),
        np.full(rows, params.top_p),
        np.full(rows, params.min_p),
    )
    route = Route.of(*arrays, vocab_size=V)
    positions = torch.arange(rows, device="cuda")
    inputs = SampleInputs(*(torch.from_numpy(a).cuda() for a in arrays), positions.clone(), positions)
    logits = table(rows).cuda()
    eager = sample(logits, inputs, route)
    for row in range(rows):
        one = torch.tensor([row], device="cuda")
        assert sample(logits[one], inputs.rows(one), route).item() == eager[row].item()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        sample(logits, inputs, route)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sample(logits, inputs, route)
    graph.replay()
    assert torch.equal(captured, eager)
    positions += 100
    graph.replay()
    assert torch.equal(captured, sample(logits, inputs, route))
    assert not torch.equal(captured, eager)


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(5, 150_000, device="cuda", dtype=torch.bfloat16)
    logits[:, torch.tensor([70_001, 90_000, 149_999], device="cuda")] = 3.0
    params = torch.tensor([[0.0, 1, 0, 0.5]], device="cuda").expand(5, -1)
    assert sample_argmax(logits).tolist() == sample_rows(logits, params).tolist() == [70_001] * 5
