"""Rounds of requests over one engine, each with the device out of memory at another step; what each request must get.

The device is the caller's: tests/gpu has the real one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from engine.faults import Faults, checked
from support.looped import Engine
from support.toy_decoder import VOCAB, ToyDecoder
from support.toy_executor import toy_executor

POINTS = ("upload.oom", "forward.oom", "sampler.oom")
"""By turns: before anything was launched, and behind the forward."""
NUM_REQUESTS = 30
Answers = dict[tuple[str, int], tuple[tuple[int, ...], str]]
"""(name, choice) -> its tokens, and how it ended."""


@dataclass(frozen=True)
class Asked:
    name: str
    prompt: tuple[int, ...]
    fields: dict[str, Any]


@dataclass
class Rounds:
    """What came of all of them."""

    wrong: list[str] = field(default_factory=list)
    """Everything that must not be, in words."""
    told: int = 0
    """Choices that ended with an error."""


class ToyRounds:
    """One engine of the toy decoder, which lives through every round; its graphs are captured once."""

    def __init__(self, device: str) -> None:
        executor = toy_executor(ToyDecoder(device), captures_static_methods=True, overlaps=True)
        self.engine = Engine(executor, seqs=4, budget=24, chunk=8)
        self.faults = Faults()
        self.faults.fit(self.engine.loop)
        rng = Random(12)
        self.asked = [
            Asked(
                f"{number}",
                tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))),
                {
                    "n": 2 if number % 10 == 7 else 1,
                    "max_new_tokens": rng.randint(15, 40),
                    "sampling": {"temperature": float(number % 2), "seed": number},
                },
            )
            for number in range(NUM_REQUESTS)
        ]

    def round(self) -> Answers:
        """All requests at once, to the end of the last one. Raises AssertionError when it does not come to an end."""
        self.engine.updates.clear()
        for asked in self.asked:
            fields = asked.fields | {"sampling": dict(asked.fields["sampling"])}
            self.engine.submit(asked.name, asked.prompt, **fields)
        self.engine.run()
        return {
            (asked.name, choice): (
                tuple(self.engine.tokens(asked.name, choice)),
                self.engine.finish(asked.name, choice),
            )
            for asked in self.asked
            for choice in range(asked.fields["n"])
        }

    def steps(self) -> int:
        return self.engine.loop.stats().steps

    def without_memory_at(self, steps: range, expected: Answers) -> Rounds:
        """A round for each of `steps`, at which it fails (from 1); expected: of a round without."""
        found = Rounds()
        for step in steps:
            point = POINTS[step % len(POINTS)]
            before = self.faults.fired.get(point, 0)
            self.faults.arm(point, after=step - 1)
            answers = self.round()
            if self.faults.fired.get(point, 0) != before + 1:
                found.wrong.append(f"{point} at step {step} did not fire: the round was over before")
            self.faults.disarm()
            for choice, (tokens, end) in answers.items():
                found.told += end == "failed"
                whole, whole_end = expected[choice]
                if end == "failed":
                    is_right = tokens == whole[: len(tokens)] and bool(self._error(choice))
                else:
                    is_right = (tokens, end) == (whole, whole_end)
                if not is_right:
                    (asked,) = [each for each in self.asked if each.name == choice[0]]
                    found.wrong.append(
                        f"{point} at step {step}: choice {choice[1]} of {asked}\n  expected {whole} ({whole_end})\n"
                        f"  got      {tokens} ({end}) {self._error(choice)}"
                    )
            found.wrong += [f"{point} at step {step}: {problem}" for problem in checked(self.engine.loop)["problems"]]
            self.engine.loop.reset_prefix_cache()
            free, total = self.engine.executor.free_cells, self.engine.executor.total_cells
            if free != total:
                found.wrong.append(f"{point} at step {step}: {free} of {total} cells came back")
        return found

    def _error(self, choice: tuple[str, int]) -> str:
        return self.engine.of(*choice)[-1].error or ""
