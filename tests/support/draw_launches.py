"""Which kernels, in which variants, draws launch on a GPU: a start's rehearsals, and serving. With no GPU.

Run as a program, without TRITON_INTERPRET. The engine's sampler runs on a CPU whose tensors say that they are on a GPU.
Triton binds each launch as it would there, pointers' alignment included, and is told that somebody else takes care of
it: nothing is compiled, nothing runs, and whatever a kernel would have written is 0.

Prints a JSON object: the variants that are `rehearsed`, and by case what is `served`, of each dtype of logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from triton import knobs
from triton.runtime.driver import driver

from engine.sampling import REHEARSED, Sampler, rehearse
from engine.types import SamplingParams
from static_graphs.captured_heads import rehearse_draws
from static_graphs.sampler import Best
from support.kernel_launches import NoDevice

VOCAB = 5003
CPU = torch.device("cpu")
ROWS = (1, 2, 3, 5, 16, 17)

EDITS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "a bias": {"logit_bias": ((3, 4.0), (4, -100.0))},
    "a mask": {"allowed_token_ids": tuple(range(100))},
    "bad words": {"bad_words": ((5,), (3, 6)), "stop_token_ids": (7,), "min_tokens": 50},
}
DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "min_p": {"min_p": 0.1},
    "top_k": {"top_k": 20, "min_p": 0.1},
    "a wide top_k": {"top_k": 900, "top_p": 0.9},
    "top_p": {"top_p": 0.9},
}


class NoEvent:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Head:
    """A model of which nothing but the dtype of its logits counts."""

    vocab_size = VOCAB

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, step: object) -> torch.Tensor:
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), VOCAB, dtype=self.dtype)


def launches_of(run: Callable[[], object]) -> list[str]:
    found = set()

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found.add(" ".join(str(each) for each in (fn.name, *(compile[key] for key in KEY))))
        return True

    knobs.runtime.jit_cache_hook = note
    run()
    return sorted(found)


KEY = ("signature", "constants", "configs", "num_warps")
"""Of what Triton tells its hook, what tells a variant from another."""


def rehearsed(dtype: torch.dtype) -> None:
    """As `create_executor` and `CapturedForwards` have them made."""
    for params in REHEARSED:
        rehearse(params, VOCAB, CPU, dtype)
    for has_cuts in (True, False):
        rehearse_draws(Head(dtype), torch.zeros(1, 8), has_cuts)


def served(rows: int, dtype: torch.dtype, params: SamplingParams) -> None:
    """Two steps of so many rows, whatever was captured left aside; and the prompt's logprobs, if any are asked for."""
    sampler = Sampler(VOCAB, CPU, rows)
    for slot in range(rows):
        sampler.open(slot, params, seed=slot, prompt=[1, 2], generated=[3])
    logits = torch.zeros(rows, VOCAB, dtype=dtype)
    Best.of(logits)
    slots = np.arange(rows)
    for position in (3, 4):
        sampler.sample(logits, slots, np.full(rows, position), np.zeros(rows, np.int64)).collect()
    if params.logprobs is not None:
        sampler.prompt_logprobs(logits, torch.zeros(rows, dtype=torch.int64), params.logprobs)


def main() -> None:
    driver.set_active(NoDevice())
    torch.Tensor.is_cuda = property(lambda _: True)
    torch.empty, torch.empty_like = torch.zeros, torch.zeros_like  # what no kernel fills
    torch.cuda.Event = NoEvent
    answer = {}
    for dtype in (torch.bfloat16, torch.float32):
        cases = {
            f"{rows} rows, {draw}, {edit}, logprobs {logprobs}": SamplingParams(
                **DRAWS[draw], **EDITS[edit], logprobs=logprobs
            )
            for rows in ROWS
            for draw in DRAWS
            for edit in EDITS
            for logprobs in (None, 3)
        }
        answer[str(dtype)] = {
            "rehearsed": launches_of(partial(rehearsed, dtype)),
            "served": {case: launches_of(partial(served, int(case.split()[0]), dtype, cases[case])) for case in cases},
        }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
