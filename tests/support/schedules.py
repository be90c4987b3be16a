"""Random schedules over one model, compared with what transformers itself makes of the same prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from static_graphs.loading import random_module
from static_graphs.model import LoadedModel
from support.packed_runs import PackedRun

PROMPT_LENGTHS = (11, 3, 14, 7, 1, 9)
NEW_TOKENS = 4
MAX_CHUNK = 6
SEED = 5


@dataclass(frozen=True)
class Reference:
    """What transformers itself makes of the prompts."""

    prompts: list[list[int]]
    generated: list[list[int]]
    logits: list[torch.Tensor]  # per prompt [len(prompt) + NEW_TOKENS - 1, V]


def reference(config: Any, lengths: Sequence[int] = PROMPT_LENGTHS, device: str = "cpu") -> Reference:
    module = random_module(config, device=torch.device(device), dtype=torch.float32, seed=SEED)
    draw = random.Random(SEED)
    prompts = [[draw.randrange(config.vocab_size) for _ in range(length)] for length in lengths]
    generated, logits = [], []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt], device=device)
            whole = module.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
            )
            generated.append(whole[0, len(prompt) :].tolist())
            logits.append(module(whole[:, :-1], use_cache=False).logits[0])
    return Reference(prompts, generated, logits)


def run_schedule(run: PackedRun, expected: Reference, seed: int, tolerance: float) -> str | None:
    """Serve some of the prompts by a random schedule; the first difference in words, or None."""
    draw = random.Random(seed)
    chosen = draw.sample(range(len(expected.prompts)), draw.randint(1, 4))
    opened = {index: run.open() for index in chosen}
    tokens = {index: list(expected.prompts[index]) for index in chosen}
    done = dict.fromkeys(chosen, 0)
    while tokens:
        active = draw.sample(list(tokens), draw.randint(1, len(tokens)))
        take = {index: draw.randint(1, min(MAX_CHUNK, len(tokens[index]) - done[index])) for index in active}
        # Which sequence each row belongs to, in any interleaving; a sequence's own rows stay in order.
        owners = [index for index in active for _ in range(take[index])]
        draw.shuffle(owners)
        rows = []
        at = {index: done[index] for index in active}
        for index in owners:
            rows.append((index, at[index]))
            at[index] += 1
        packed = [(opened[index], tokens[index][position]) for index, position in rows]
        logits = run.step(packed, width=len(rows) + draw.randint(0, 3))
        for row, (index, position) in zip(logits, rows, strict=True):
            own = expected.logits[index][position]
            error = float((row - own).abs().max()) / max(1.0, float(own.abs().max()))
            if not error <= tolerance:
                return f"schedule {seed}: prompt {index} position {position} is off by {error:.2g}"
            if position == len(tokens[index]) - 1:
                tokens[index].append(int(row.argmax()))
        done = {index: done[index] + take.get(index, 0) for index in tokens}
        for index in [index for index in tokens if len(tokens[index]) == len(expected.prompts[index]) + NEW_TOKENS]:
            generated = tokens.pop(index)[len(expected.prompts[index]) :]
            run.close(opened[index])
            if generated != expected.generated[index]:
                return f"schedule {seed}: prompt {index} gave {generated}, not {expected.generated[index]}"
    return None


def differences(
    model: LoadedModel,
    expected: Reference,
    schedules: int,
    run_type: type[PackedRun] = PackedRun,
    tolerance: float = 1e-5,
) -> list[str]:
    """One line for every schedule that went wrong.

    tolerance: of a logit, as a share of the largest of its row (which counts as at least 1).
    """
    run = run_type(model, SEED)
    found = []
    for seed in range(schedules):
        difference = run_schedule(run, expected, seed, tolerance)
        if difference is not None:
            found.append(difference)
            run = run_type(model, SEED)  # sequences of the broken schedule are still open
    return found
