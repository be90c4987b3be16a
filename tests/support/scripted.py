"""A torch-free executor that answers from a script, and clients around it. For every test that needs no model.

The executor keeps the whole contract of engine/executor.py: cells are shared by reference, a step claims one cell a
token, tokens may be named -1, draws are answered in order of choice. On top of it a test can freeze a step, fail one,
and read what was asked.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from heapq import heappop, heappush

import numpy as np

from engine.client import InProcessClient
from engine.errors import SessionsExhausted, StepFailed
from engine.executor import Cells
from engine.loop import EngineLoop
from engine.scheduler import SchedulerLimits
from engine.types import Batch, Chunk, ChunkOutput, EngineInfo, SamplingParams, StepOutput, TokenLogprobs

Answer = Callable[[tuple[int, ...], tuple[int, ...], int], int]
"""(prompt, generated so far, seed of the choice) -> the next token."""

GATE_TIMEOUT_S = 20.0
"""A test that waits longer than this for the other thread has failed."""


def count_up(prompt: tuple[int, ...], generated: tuple[int, ...], seed: int) -> int:
    """After (5, 6) come 7, 8, 9, ..."""
    return (prompt + generated)[-1] + 1


def scripted_hidden(token: int, position: int) -> tuple[float, float, float]:
    """The hidden state of a token at a position."""
    return (1.0 + token % 7, float(position), 1.0)


def from_script(answers: Mapping[Sequence[int], Sequence[int]], *, then: Answer = count_up) -> Answer:
    """Prompt -> its whole answer. Other prompts, and what follows an answer's end, are up to `then`."""
    script = {tuple(prompt): tuple(answer) for prompt, answer in answers.items()}

    def answer(prompt: tuple[int, ...], generated: tuple[int, ...], seed: int) -> int:
        tokens = script.get(prompt, ())
        return tokens[len(generated)] if len(generated) < len(tokens) else then(prompt, generated, seed)

    return answer


@dataclass
class ScriptedSession:
    """What the executor knows of one session."""

    params: SamplingParams
    seed: int
    prompt: tuple[int, ...]
    generated: list[int]
    """Drawn by this session or given at its opening: what -1 is read from."""
    cells: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """tokens[i] is in cells[i]."""


@dataclass
class ScriptedInFlight:
    batch: Batch
    output: StepOutput
    error: Exception | None = None

    @property
    def forwards(self) -> tuple[tuple[str, int, int], ...]:
        return (("forward_others", self.batch.num_tokens, self.batch.num_tokens),)


class ScriptedExecutor:
    """Implements `Executor`. Counters and gates may be used from any thread, the rest from the engine's alone."""

    def __init__(
        self,
        answer: Answer = count_up,
        *,
        cells: int = 4096,
        max_sessions: int = 64,
        max_session_tokens: int = 4096,
        overlaps: bool = False,
    ) -> None:
        self.answer = answer
        self.overlaps = overlaps
        self.logprob_of: Callable[[int], float] = lambda token: -1.0
        """What a drawn or given token had."""
        self.total_cells = cells
        self.max_sessions = max_sessions
        self.max_session_tokens = max_session_tokens
        self.padding_rows = 0
        self.sessions: dict[int, ScriptedSession] = {}
        self.opened = 0
        """Sessions opened or cloned since the start."""
        self.closed = 0
        self.launches = 0
        self.batches: list[Batch] = []
        """Every batch that was launched, in order."""
        self.keeps_batches = True
        """Off for those that run for so long that the list would be what grows."""
        self.written: dict[int, int] = {}
        """Cell -> the token it holds, for cells that somebody holds."""
        self._owners: Counter[int] = Counter()  # cell -> how often it is held
        self._free = list(range(cells))  # a heap
        self._failures: dict[int, Exception] = {}  # launch number, from 1
        self._session_failures: dict[tuple[int, ...], str] = {}  # prompt
        self._poison: set[tuple[int, ...]] = set()  # prompts
        self._gate = threading.Condition()
        self._permits: int | None = None  # None: open
        self._waiting = False

    # --- what tests ask ---------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Freeze the next collect until `release`."""
        with self._gate:
            self._permits = 0

    def release(self, steps: int | None = None) -> None:
        """Let `steps` collects pass and freeze the one behind them; None lets all pass."""
        with self._gate:
            self._permits = steps
            self._gate.notify_all()

    def wait_held(self) -> None:
        """Return once the engine thread stands in a frozen collect. From asyncio: `await asyncio.to_thread(...)`."""
        with self._gate:
            if not self._gate.wait_for(lambda: self._waiting and self._permits == 0, GATE_TIMEOUT_S):
                raise TimeoutError("no step was frozen")

    def fail_step(self, number: int, error: Exception | None = None) -> None:
        """Launch `number`, counted from 1 since the executor's start, fails in its collect, with StepFailed by default.

        Any other error is one that nobody handles: it ends the engine.
        """
        self._failures[number] = StepFailed("a scripted failure") if error is None else error

    def heal(self) -> None:
        """No step fails any more but by what `fail_session` said."""
        self._failures.clear()
        self._poison.clear()

    def fail_steps_with(self, *prompts: Sequence[int]) -> None:
        """Every step in which a session of one of these prompts draws fails in its collect, with all that are in it."""
        self._poison |= {tuple(prompt) for prompt in prompts}

    def fail_session(self, prompt: Sequence[int], error: str = "a scripted failure") -> None:
        """Sessions of this prompt fail with their next step; the others in it stand."""
        self._session_failures[tuple(prompt)] = error

    @property
    def session_cells(self) -> int:
        """Cells that open sessions hold; what is kept for prompts to come is not among them."""
        return len({cell for session in self.sessions.values() for cell in session.cells})

    # --- Executor ---------------------------------------------------------------------------------------------------

    @property
    def free_cells(self) -> int:
        return len(self._free)

    def method_calls(self) -> tuple[tuple[str, int], ...]:
        return (("forward_others", self.launches),)

    def open_session(
        self,
        params: SamplingParams,
        *,
        seed: int,
        prompt: Sequence[int],
        generated: Sequence[int] = (),
        prefix: Cells | None = None,
    ) -> int:
        if len(self.sessions) == self.max_sessions:
            raise SessionsExhausted(f"all {self.max_sessions} sessions are open")
        self.opened += 1
        session = self.sessions[self.opened] = ScriptedSession(params, seed, tuple(prompt), list(generated))
        if prefix is not None:
            session.cells = prefix.tolist()
            session.tokens = [self.written[cell] for cell in session.cells]
            assert session.tokens == [*prompt, *generated][: len(session.cells)], "another prompt's cells"
            self._hold(session.cells)
        return self.opened

    def clone_session(
        self,
        source: int,
        upto: int,
        params: SamplingParams,
        *,
        seed: int,
        prompt: Sequence[int],
        generated: Sequence[int] = (),
    ) -> int:
        origin = self.sessions[source]
        assert 0 <= upto <= len(origin.cells), (upto, len(origin.cells))
        clone = self.sessions[self.open_session(params, seed=seed, prompt=prompt, generated=generated)]
        clone.cells, clone.tokens = origin.cells[:upto], origin.tokens[:upto]
        self._hold(clone.cells)
        return self.opened

    def close_session(self, session_id: int) -> None:
        session = self.sessions.pop(session_id, None)
        if session is None:
            return
        self.closed += 1
        self._let_go(session.cells)

    def cells_of(self, session_id: int, start: int, stop: int) -> Cells:
        cells = self.sessions[session_id].cells
        assert 0 <= start <= stop <= len(cells), (start, stop, len(cells))
        return np.array(cells[start:stop], np.int32)

    def cell_references(self) -> Cells:
        return np.array([self._owners[cell] for cell in range(self.total_cells)], np.int32)

    def rebase_session(self, session_id: int, cells: Cells) -> None:
        session, others = self.sessions[session_id], cells.tolist()
        own = session.cells[: len(others)]
        assert [self.written[cell] for cell in others] == session.tokens[: len(others)], "cells of other tokens"
        assert own[-1] == others[-1] or self._owners[own[-1]] == 1, "somebody else goes on from these cells"
        self._hold(others)
        session.cells[: len(others)] = others
        self._let_go(own)

    def hold_cells(self, cells: Cells) -> None:
        self._hold(cells.tolist())

    def release_cells(self, cells: Cells) -> None:
        self._let_go(cells.tolist())

    def launch(self, batch: Batch) -> ScriptedInFlight:
        if batch.num_tokens > self.free_cells:
            raise StepFailed(f"a {batch.num_tokens}-token step does not fit: {self.free_cells} cells free")
        self.launches += 1
        if self.keeps_batches:
            self.batches.append(batch)
        output = StepOutput(tuple(self._run(chunk) for chunk in batch.chunks))
        error = self._failures.pop(self.launches, None)
        if any(chunk.draws and self.sessions[chunk.session_id].prompt in self._poison for chunk in batch.chunks):
            error = StepFailed("a poisoned step")
        return ScriptedInFlight(batch, output, error)

    def collect(self, in_flight: ScriptedInFlight) -> StepOutput:
        self._pass_gate()
        if in_flight.error is not None:
            raise in_flight.error
        return in_flight.output

    def _run(self, chunk: Chunk) -> ChunkOutput:
        session = self.sessions[chunk.session_id]
        end = chunk.position + len(chunk.tokens)
        if end > self.max_session_tokens:
            return ChunkOutput(chunk.session_id, error=f"{end} tokens pass the limit of {self.max_session_tokens}")
        assert chunk.position == len(session.tokens), "a chunk starts where its session ends"
        last = session.generated[-1] if session.generated else -1  # none where the step that drew it failed
        tokens = [last if token == -1 else token for token in chunk.tokens]
        cells = self._claim(len(tokens))
        session.tokens += tokens
        session.cells += cells
        self.written.update(zip(cells, tokens, strict=True))
        error = self._session_failures.get(session.prompt)
        if error is not None:
            return ChunkOutput(chunk.session_id, error=error)
        generated = tuple(session.tokens[len(session.prompt) :])
        draws = chunk.draws if chunk.wanted_rows != "none" else 0
        drawn = tuple(self.answer(session.prompt, generated, session.seed + draw) for draw in range(draws))
        session.generated += drawn[:1]
        return ChunkOutput(
            chunk.session_id,
            token_ids=drawn,
            logprobs=self._logprobs(drawn, session.params.logprobs),
            prompt_logprobs=self._prompt_logprobs(chunk, session) if chunk.wanted_rows == "all" else None,
            pooled=self._pooled(chunk) if chunk.pooling is not None else None,
        )

    def _claim(self, count: int) -> list[int]:
        """The `count` lowest free cells."""
        cells = [heappop(self._free) for _ in range(count)]
        self._owners.update(cells)
        return cells

    def _hold(self, cells: Sequence[int]) -> None:
        assert all(self._owners[cell] for cell in cells), "a free cell cannot be shared"
        self._owners.update(cells)

    def _let_go(self, cells: Sequence[int]) -> None:
        for cell in cells:
            self._owners[cell] -= 1
            assert self._owners[cell] >= 0, "a cell was let go more often than it was held"
            if not self._owners[cell]:
                del self._owners[cell], self.written[cell]
                heappush(self._free, cell)

    def _logprobs(self, tokens: Sequence[int], alternatives: int | None) -> tuple[TokenLogprobs, ...] | None:
        """The alternatives are the token itself and the ids behind it, each 1 less likely."""
        if alternatives is None:
            return None
        return tuple(
            TokenLogprobs(token, own, tuple((token + rank, own - rank) for rank in range(alternatives)))
            for token, own in ((token, self.logprob_of(token)) for token in tokens)
        )

    def _prompt_logprobs(self, chunk: Chunk, session: ScriptedSession) -> tuple[TokenLogprobs, ...] | None:
        following = [*chunk.tokens[1:], *([chunk.following_token] if chunk.following_token >= 0 else [])]
        return self._logprobs(following, session.params.prompt_logprobs)

    def _pooled(self, chunk: Chunk) -> bytes:
        rows = [
            np.array(scripted_hidden(token, chunk.position + i), np.float32) for i, token in enumerate(chunk.tokens)
        ]
        return (rows[-1] if chunk.pooling == "last" else reduce(np.add, rows)).tobytes()

    def _pass_gate(self) -> None:
        with self._gate:
            self._waiting = True
            self._gate.notify_all()
            passed = self._gate.wait_for(lambda: self._permits is None or self._permits > 0, GATE_TIMEOUT_S)
            self._waiting = False
            if not passed:
                raise TimeoutError("a frozen step was never released")
            if self._permits is not None:
                self._permits -= 1


def scripted_info(**changes: object) -> EngineInfo:
    """A model of 1,000 ids and 512 positions; `changes` name fields of EngineInfo."""
    values: dict[str, object] = {
        "model": "scripted",
        "architecture": "ScriptedForCausalLM",
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 512,
        "vocab_size": 1000,
        "kv_cells": 4096,
        "max_num_seqs": 8,
        "max_waiting": 8,
        "widths": (),
        "eos_token_ids": (0,),
        "pooling": "last",
        "embedding_size": 3,
        "tokenizer_dir": None,
        "created_s": 1_700_000_000,
    }
    return EngineInfo(**(values | changes))  # type: ignore[arg-type]


def scripted_loop(executor: ScriptedExecutor, info: EngineInfo) -> EngineLoop:
    limits = SchedulerLimits(max_num_seqs=info.max_num_seqs, prefill_budget=512, mixed_budget=512, prefill_chunk=128)
    return EngineLoop(executor, limits)


def scripted_client(executor: ScriptedExecutor | None = None, **info_changes: object) -> InProcessClient:
    """An in-process client, not started; `info_changes` as in `scripted_info`."""
    executor = ScriptedExecutor() if executor is None else executor
    info = scripted_info(**({"kv_cells": executor.total_cells} | info_changes))
    return InProcessClient(lambda progress: (scripted_loop(executor, info), info))
