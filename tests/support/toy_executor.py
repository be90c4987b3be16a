"""Executors over the toy decoder, and sessions whose every greedy token is compared with its oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from engine.cell_executor import CellExecutor
from engine.create import create_executor
from engine.executor_options import ExecutorOptions
from engine.grammar import Grammars
from engine.types import Batch, Chunk, SamplingParams
from support.toy_decoder import CONTEXT, VOCAB, ToyDecoder

GREEDY = SamplingParams(temperature=0.0)
METHODS = {
    "dense": {"widths": (1, 2, 4, 8), "max_dynamic": 32},
    "sparse": {"widths": (1, 4), "max_dynamic": 32, "min_selected_rows": 5},
}


def toy_executor(model: ToyDecoder, *, grammars: Grammars | None = None, **changes: object) -> CellExecutor:
    """256 pool rows, scratch included, 16 of them backed at first; `changes` name fields of ExecutorOptions."""
    options = {"capacity_cells": 255, "initial_capacity": 15, "max_sessions": 8, "reserves_cells": False}
    return create_executor(model, ExecutorOptions(**(options | METHODS["dense"] | changes)), grammars=grammars)


def open_greedy(executor: CellExecutor) -> int:
    return executor.open_session(GREEDY, seed=0, prompt=())


def last_row(session: int, tokens: Sequence[int], position: int) -> Chunk:
    """A chunk that draws one token."""
    return Chunk(session, tuple(tokens), position, wanted_rows="last")


def draw(executor: CellExecutor, *chunks: Chunk) -> list[int]:
    """Run one step; the token that each chunk drew, -1 for none."""
    outputs = executor.execute(Batch(chunks)).chunks
    assert [output.error for output in outputs] == [None] * len(chunks)
    return [output.token_ids[0] if output.token_ids else -1 for output in outputs]


def generate(executor: CellExecutor, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy continuations of all prompts at once, one session each; all are closed again."""
    sessions = [open_greedy(executor) for _ in prompts]
    drawn = [[token] for token in draw(executor, *(last_row(s, p, 0) for s, p in zip(sessions, prompts, strict=True)))]
    for step in range(count - 1):
        chunks = [last_row(s, d[-1:], len(p) + step) for s, d, p in zip(sessions, drawn, prompts, strict=True)]
        for tokens, token in zip(drawn, draw(executor, *chunks), strict=True):
            tokens.append(token)
    for session in sessions:
        executor.close_session(session)
    return drawn


class RandomLife:
    """Sessions opened, prefilled in pieces, decoded, cloned, rewound and cancelled at random on one executor.

    A session is its tokens, the first `held` of them in cells. checked: the part of the draws that is compared.
    steps: how often a step is run, beside 8 other operations. behind_each: called after every operation.
    """

    def __init__(
        self,
        executor: CellExecutor,
        model: ToyDecoder,
        seed: int,
        *,
        checked: float = 1.0,
        steps: float = 12.0,
        behind_each: Callable[[], None] = lambda: None,
    ) -> None:
        self.executor = executor
        self.model = model
        self.random = Random(seed)
        self.checked = checked
        self.weights = (3.0, steps, 2.0, 2.0, 1.0)
        self.behind_each = behind_each
        self.tokens: dict[int, list[int]] = {}
        self.held: dict[int, int] = {}
        self.opened = self.closed = self.drawn = 0

    def run(self, operations: int) -> None:
        """That many operations, then everything is closed."""
        verbs = (self.open, self.step, self.clone, self.rewind, self.cancel)
        for _ in range(operations):
            self.random.choices(verbs, weights=self.weights)[0]()
            self.behind_each()
        while self.tokens:
            self.cancel()
        self.behind_each()

    def open(self) -> None:
        if len(self.tokens) < self.executor.max_sessions:
            self._add(open_greedy(self.executor), self._tokens(self.random.choice((1, 3, 7, 20))), 0)

    def clone(self) -> None:
        source = self._any(lambda session: self.held[session] > 0)
        if source is not None and len(self.tokens) < self.executor.max_sessions:
            upto = self.random.randint(1, self.held[source])
            clone = self.executor.clone_session(source, upto, GREEDY, seed=0, prompt=())
            self._add(clone, self.tokens[source][:upto] + self._tokens(self.random.randint(1, 3)), upto)

    def rewind(self) -> None:
        """Its next chunk begins earlier, with the same tokens or others."""
        session = self._any(lambda session: self.held[session] > 0)
        if session is not None:
            position = self.random.randrange(self.held[session])
            self.tokens[session][position + 1 :] = []
            if self.random.random() < 0.5:
                self.tokens[session][position:] = self._tokens(self.random.randint(1, 3))
            self.held[session] = position

    def cancel(self) -> None:
        session = self._any(lambda _: True)
        if session is not None:
            self.executor.close_session(session)
            self.closed += 1
            del self.tokens[session], self.held[session]

    def step(self) -> None:
        """One batch of whatever sessions fit, in any order, prompts whole or in pieces."""
        chunks: list[Chunk] = []
        room = self.executor.free_cells
        for session in self._some():
            start, rest = self.held[session], self.tokens[session][self.held[session] :]
            count = len(rest) if self.random.random() < 0.6 else self.random.randint(1, len(rest))
            if start + len(rest) > CONTEXT - 1 or count > room:
                continue
            room -= count
            is_last = count == len(rest)
            chunks.append(Chunk(session, tuple(rest[:count]), start, wanted_rows="last" if is_last else "none"))
        if not chunks:
            self.cancel()
            return
        for chunk, token in zip(chunks, draw(self.executor, *chunks), strict=True):
            tokens = self.tokens[chunk.session_id]
            self.held[chunk.session_id] += len(chunk.tokens)
            assert self.executor.position(chunk.session_id) == self.held[chunk.session_id]
            if token >= 0:
                self.drawn += 1
                if self.random.random() < self.checked:
                    assert token == self.model.next_token(tokens), f"after {tokens}"
                tokens.append(token)

    def _add(self, session: int, tokens: list[int], held: int) -> None:
        self.opened += 1
        self.tokens[session], self.held[session] = tokens, held

    def _some(self) -> list[int]:
        """At least one session, where there is one, in random order."""
        count = self.random.randint(1, len(self.tokens)) if self.tokens else 0
        return self.random.sample(sorted(self.tokens), count)

    def _any(self, suits: Callable[[int], bool]) -> int | None:
        found = [session for session in self.tokens if suits(session)]
        return self.random.choice(found) if found else None

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(count)]
