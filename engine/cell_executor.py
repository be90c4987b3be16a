"""Sessions over a cell cache: a batch becomes one or more forwards carrying every chunk's tokens on a single axis.

Owns the sessions' sequences, the table of last tokens and nothing else: cells are the cache's, draws the sampler's.
Engine thread only. A step is checked whole before anything changes; a forward that fails gives its cells back, and
slices that ran before it stay, which is why the loop ends every session of a failed batch (EXE-18).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cache.cell_cache import CellCache
from cache.geometry import CacheFull
from engine.errors import SessionsExhausted, StepFailed
from engine.packing import PackedStep, Slot, pack
from engine.sampling import Sampled, Sampler
from engine.types import Batch, ChunkOutput, SamplingParams, StepOutput, TokenLogprobs
from static_graphs.forwards import Forwards
from static_graphs.methods import plan_slices


@dataclass(frozen=True, slots=True)
class OpenSession:
    """A session's sequence id, which is its sampling slot too, and its policy."""

    sequence: int
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class SlicePart:
    """What one forward of the step was asked for."""

    answers: npt.NDArray[np.int32]  # [R] chunk of each drawn row
    sampled: Sampled


@dataclass(frozen=True, slots=True, eq=False)
class CellInFlight:
    """A launched step."""

    batch: Batch
    parts: tuple[SlicePart, ...]
    prompt_logprobs: dict[int, list[TokenLogprobs]]  # by chunk


class CellExecutor:
    """Runs batches on one model and one cell cache. The executor spec's EXE-*, SES-*, with DESIGN D7 and D8."""

    def __init__(
        self,
        forwards: Forwards,
        cache: CellCache,
        sampler: Sampler,
        *,
        max_sessions: int,
        max_session_tokens: int,
        device: torch.device,
        overlaps: bool = False,
    ) -> None:
        self._forwards = forwards
        self._cache = cache
        self._sampler = sampler
        self._max_sessions = max_sessions
        self._max_session_tokens = max_session_tokens
        self._device = device
        self._overlaps = overlaps
        self._sessions: dict[int, OpenSession] = {}
        self._next_session_id = 1
        self._last_token = torch.zeros(cache.max_sequences, dtype=torch.int64, device=device)  # by sequence id

    @property
    def overlaps(self) -> bool:
        return self._overlaps

    @property
    def free_cells(self) -> int:
        return self._cache.free_cells

    @property
    def total_cells(self) -> int:
        return self._cache.capacity_cells

    @property
    def max_sessions(self) -> int:
        return self._max_sessions

    @property
    def padding_rows(self) -> int:
        return self._forwards.padding_rows

    def method_calls(self) -> tuple[tuple[str, int], ...]:
        return self._forwards.calls()

    # --- sessions ---------------------------------------------------------------------------------------------------

    def open_session(
        self, params: SamplingParams, *, seed: int, prompt: Sequence[int], generated: Sequence[int] = ()
    ) -> int:
        self._check_room()
        return self._publish(self._cache.seq_new(), params, seed, prompt, generated)

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
        self._check_room()
        return self._publish(
            self._cache.seq_clone(self._sessions[source].sequence, upto), params, seed, prompt, generated
        )

    def close_session(self, session_id: int) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._sampler.close(session.sequence)
            self._cache.seq_rm(session.sequence)

    def position(self, session_id: int) -> int:
        """Tokens the session holds."""
        return self._cache.pos(self._sessions[session_id].sequence)

    def _check_room(self) -> None:
        if len(self._sessions) >= self._max_sessions:
            raise SessionsExhausted(f"all {self._max_sessions} sessions are open")

    def _publish(
        self, sequence: int, params: SamplingParams, seed: int, prompt: Sequence[int], generated: Sequence[int]
    ) -> int:
        """Make `sequence` a session; whatever stops that releases the sequence (SES-2)."""
        try:
            self._sampler.open(sequence, params, seed=seed, prompt=prompt, generated=generated)
        except BaseException:
            self._cache.seq_rm(sequence)
            raise
        session_id = self._next_session_id
        self._next_session_id += 1
        self._sessions[session_id] = OpenSession(sequence, params)
        return session_id

    # --- steps ------------------------------------------------------------------------------------------------------

    def execute(self, batch: Batch) -> StepOutput:
        """Launch and collect."""
        return self.collect(self.launch(batch))

    def launch(self, batch: Batch) -> CellInFlight:
        try:
            packed = pack(batch.chunks, self._slot, self._max_session_tokens)
            self._admit(packed)
            for sequence, position in packed.rewinds:
                self._cache.rewind(sequence, position)
            return self._run(batch, packed)
        except torch.AcceleratorError:
            raise  # the device is lost, and the engine with it
        except Exception as error:  # whatever a model raises ends its step, not the engine
            raise StepFailed(f"a step of {batch.num_tokens} tokens failed: {error}") from error

    def collect(self, in_flight: CellInFlight) -> StepOutput:
        token_ids: list[list[int]] = [[] for _ in in_flight.batch.chunks]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in in_flight.batch.chunks]
        for part in in_flight.parts:
            for chunk, (token_id, values) in zip(part.answers.tolist(), part.sampled.collect(), strict=True):
                token_ids[chunk].append(token_id)
                if values is not None:
                    logprobs[chunk].append(values)
        return StepOutput(
            tuple(
                ChunkOutput(
                    session_id=chunk.session_id,
                    token_ids=tuple(token_ids[index]),
                    logprobs=tuple(logprobs[index]) or None,
                    prompt_logprobs=(
                        tuple(in_flight.prompt_logprobs.get(index, ())) if chunk.wanted_rows == "all" else None
                    ),
                )
                for index, chunk in enumerate(in_flight.batch.chunks)
            )
        )

    def _slot(self, session_id: int) -> Slot | None:
        session = self._sessions.get(session_id)
        return None if session is None else Slot(session.sequence, self._cache.pos(session.sequence))

    def _admit(self, packed: PackedStep) -> None:
        """Whole-step admission over all slices, so that no slice fails for cells after another ran."""
        num_tokens, free = len(packed.tokens), self._cache.free_cells
        if num_tokens > free and not packed.rewinds:
            raise CacheFull(f"a {num_tokens}-token step does not fit: {free} cells free of {self.total_cells}")

    def _run(self, batch: Batch, packed: PackedStep) -> CellInFlight:
        tokens = torch.from_numpy(packed.tokens).to(self._device, non_blocking=True)
        positions = torch.from_numpy(packed.positions).to(self._device, non_blocking=True)
        if (packed.tokens < 0).any():
            owners = torch.from_numpy(packed.seq_ids).to(self._device, torch.int64)
            tokens = torch.where(tokens < 0, self._last_token[owners], tokens)
        parts: list[SlicePart] = []
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        for step_slice in plan_slices(len(packed.tokens), self._forwards.methods):
            span = slice(step_slice.offset, step_slice.offset + step_slice.length)
            first, last = np.searchsorted(packed.selected, [span.start, span.stop])
            rows = packed.selected[first:last] - span.start
            selected = torch.from_numpy(rows).to(self._device) if len(rows) else None
            self._cache.declare_step(packed.seq_ids[span])
            step = self._cache.prepare_step(step_slice.width)
            try:
                logits = self._forwards.run(step_slice, tokens[span], positions[span], step, selected)
            except BaseException:
                self._cache.undo_step()
                raise
            self._cache.commit_step()
            if logits is not None:
                part = self._answer(batch, packed, slice(first, last), logits, prompt_logprobs)
                if part is not None:
                    parts.append(part)
        return CellInFlight(batch, tuple(parts), prompt_logprobs)

    def _answer(
        self,
        batch: Batch,
        packed: PackedStep,
        asked: slice,
        logits: torch.Tensor,
        prompt_logprobs: dict[int, list[TokenLogprobs]],
    ) -> SlicePart | None:
        """Draw from the slice's logits [R, V] and note the prompt's log probabilities."""
        answers, draws, rows = packed.answers[asked], packed.draws[asked], packed.selected[asked]
        for chunk_index in np.unique(answers[draws < 0]).tolist():
            chunk = batch.chunks[chunk_index]
            mine = np.flatnonzero((answers == chunk_index) & (draws < 0))
            targets = (*chunk.tokens, chunk.following_token)
            num_top = self._sessions[chunk.session_id].params.prompt_logprobs or 0
            done = prompt_logprobs.setdefault(chunk_index, [])
            wanted = torch.tensor(targets[len(done) + 1 : len(done) + 1 + len(mine)], device=self._device)
            done += self._sampler.prompt_logprobs(logits[torch.from_numpy(mine).to(self._device)], wanted, num_top)
        drawn = np.flatnonzero(draws >= 0)
        if not len(drawn):
            return None
        if len(drawn) < len(draws):
            logits = logits[torch.from_numpy(drawn).to(self._device)]
        owners = packed.seq_ids[rows[drawn]].astype(np.int64)
        choices = draws[drawn].astype(np.int64)
        sampled = self._sampler.sample(logits, owners, packed.positions[rows[drawn]] + 1, choices)
        own = np.flatnonzero(choices == 0)  # a fork's token is its own session's last token, not the stem's
        self._last_token[torch.from_numpy(owners[own]).to(self._device)] = sampled.ids[
            torch.from_numpy(own).to(self._device)
        ]
        return SlicePart(answers[drawn], sampled)
