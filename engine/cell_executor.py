"""Sessions over a cell cache: a batch becomes one or more forwards carrying every chunk's tokens on a single axis.

Owns the sessions' sequences, the table of last tokens and nothing else: cells are the cache's, draws the sampler's.
Engine thread only. A step is checked whole before anything changes; a forward that fails gives its cells back, and
slices that ran before it stay, which is why the sessions of a failed step never run again (EXE-18).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cache.cell_cache import CacheMetrics, CellCache
from cache.geometry import CacheFull
from engine.device import check_device
from engine.errors import SessionRefused, SessionsExhausted, StepFailed
from engine.executor import Cells
from engine.packing import PackedStep, PackLimits, Slot, pack, select_rows
from engine.pooling import PooledStep
from engine.raw_steps import Consume, RawStep, RawSteps
from engine.sampling import Sampled, Sampler
from engine.slices import run_slice
from engine.types import Batch, ChunkOutput, SamplingParams, StepOutput, TokenLogprobs
from engine.uploads import upload, upload_integers
from static_graphs.additional import AdditionalMethods
from static_graphs.forwards import Forwards, Model, Scores
from static_graphs.methods import plan_slices


@dataclass(slots=True)
class OpenSession:
    """A session's sequence id, which is its sampling slot too, and its policy."""

    sequence: int
    params: SamplingParams
    is_poisoned: bool = False
    """A step that it was in failed: what it holds is in doubt, and it can only be closed."""


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
    refusals: dict[int, str]  # by session: it alone did not run
    forwards: tuple[tuple[str, int, int], ...]
    pooled: PooledStep


class CellExecutor:
    """Runs batches on one model and one cell cache. The executor spec's EXE-*, SES-*, RAW-*, with DESIGN D7 and D8.

    engine/create.py makes one. All methods are one model, so its weights exist once (EXE-8). `forwards`, `cache` and
    `sampler` are its own from here on, but for a raw step's owner, who rewinds and removes sequences of his own.
    """

    def __init__(
        self,
        forwards: Forwards,
        cache: CellCache,
        sampler: Sampler,
        additional: AdditionalMethods,
        *,
        max_sessions: int,
        max_session_tokens: int,
        device: torch.device,
        overlaps: bool = False,
    ) -> None:
        self._forwards = forwards
        self._cache = cache
        self._sampler = sampler
        self._additional = additional
        self._raw = RawSteps(forwards, cache, device, max_positions=max_session_tokens)
        self._max_sessions = max_sessions
        self._limits = PackLimits(max_session_tokens, forwards.vocab_size)
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
    def max_session_tokens(self) -> int:
        return self._limits.max_session_tokens

    @property
    def vocab_size(self) -> int:
        return self._forwards.vocab_size

    @property
    def preferred_batch_tokens(self) -> int:
        """Tokens of the widest forward. A wider batch runs as several."""
        return self._forwards.methods[-1].max_tokens

    @property
    def samples_on_device(self) -> bool:
        """Whether ids are drawn where the logits are, off the host."""
        return self._device.type != "cpu"

    @property
    def padding_rows(self) -> int:
        return self._forwards.padding_rows

    @property
    def model(self) -> Model:
        return self._forwards.model

    @property
    def cache_control(self) -> CellCache:
        """For owners of raw steps: their sequences' verbs. Sessions' sequences are not theirs."""
        return self._cache

    def kv_metrics(self) -> CacheMetrics:
        return self._cache.metrics()

    def method_calls(self) -> tuple[tuple[str, int], ...]:
        return self._forwards.calls()

    def close(self) -> None:
        """Release the pool and let go of the model. Nothing may run any more."""
        self._forwards.close()
        self._cache.close()

    # --- sessions ---------------------------------------------------------------------------------------------------

    def open_session(
        self,
        params: SamplingParams,
        *,
        seed: int,
        prompt: Sequence[int],
        generated: Sequence[int] = (),
        prefix: Cells | None = None,
    ) -> int:
        self._check_room()
        if prefix is None or not prefix.size:
            return self._publish(self._cache.seq_new(), 0, params, seed, prompt, generated)
        return self._publish(self._cache.seq_from(prefix), prefix.size, params, seed, prompt, generated)

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
        session = self._sessions.get(source)
        if session is None:
            raise SessionRefused(f"session {source} is not open: it cannot be cloned")
        if session.is_poisoned:
            raise SessionRefused(f"session {source} cannot be cloned: a step of it failed")
        held = self._cache.pos(session.sequence)
        if held == 0 or not 0 <= upto <= held:
            raise SessionRefused(f"session {source} holds {held} tokens: its first {upto} cannot be cloned")
        clone = self._cache.seq_clone(session.sequence, upto)
        return self._publish(clone, upto, params, seed, prompt, generated)

    def set_sampling(
        self,
        session_id: int,
        params: SamplingParams,
        *,
        seed: int | None,
        prompt: Sequence[int],
        generated: Sequence[int] = (),
    ) -> None:
        """Draw by another policy from here on, as if the session had been opened with it (SES-5).

        A draw is random by seed and position alone, so there is no state of earlier draws to begin anew: the same seed
        gives the same tokens again wherever the session stands again. None: nobody can repeat it. Unknown sessions are
        ignored. Raises ValueError for a policy that cannot be served; the one in force then stays.
        """
        session = self._sessions.get(session_id)
        if session is None:
            return
        seed = secrets.randbits(62) if seed is None else seed
        self._sampler.check(params, seed=seed, prompt_length=len(prompt))
        self._sampler.close(session.sequence)
        self._sampler.open(session.sequence, params, seed=seed, prompt=prompt, generated=generated)
        session.params = params

    def close_session(self, session_id: int) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._sampler.close(session.sequence)
            self._cache.seq_rm(session.sequence)

    def cells_of(self, session_id: int, start: int, stop: int) -> Cells:
        return self._cache.cells_of(self._sessions[session_id].sequence, start, stop)

    def cell_references(self) -> Cells:
        return self._cache.references()

    def rebase_session(self, session_id: int, cells: Cells) -> None:
        self._cache.rebase(self._sessions[session_id].sequence, cells)

    def hold_cells(self, cells: Cells) -> None:
        self._cache.hold_cells(cells)

    def release_cells(self, cells: Cells) -> None:
        self._cache.release_cells(cells)

    def position(self, session_id: int) -> int:
        """Tokens the session holds."""
        return self._cache.pos(self._sessions[session_id].sequence)

    def _check_room(self) -> None:
        if len(self._sessions) >= self._max_sessions:
            raise SessionsExhausted(f"all {self._max_sessions} sessions are open")

    def _publish(
        self,
        sequence: int,
        position: int,
        params: SamplingParams,
        seed: int,
        prompt: Sequence[int],
        generated: Sequence[int],
    ) -> int:
        """Make `sequence` a session; whatever stops that releases the sequence (SES-2)."""
        try:
            assert self._cache.pos(sequence) == position, "the cache did not give the sequence that was asked for"
            self._sampler.open(sequence, params, seed=seed, prompt=prompt, generated=generated)
        except BaseException as error:
            if isinstance(error, Exception):
                check_device(self._device, error)
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
            packed = self._pack(batch)
        except Exception as error:  # nothing was changed: every session is as it was
            raise StepFailed(f"a step of {batch.num_tokens} tokens was refused: {error}") from error
        try:
            self._rewind(packed)
            return self._run(batch, packed)
        except Exception as error:  # whatever a model raises ends its step, not the engine
            check_device(self._device, error)
            self._poison(batch)
            raise StepFailed(f"a step of {batch.num_tokens} tokens failed: {error}") from error

    def collect(self, in_flight: CellInFlight) -> StepOutput:
        token_ids: list[list[int]] = [[] for _ in in_flight.batch.chunks]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in in_flight.batch.chunks]
        pooled = in_flight.pooled.collect()
        refused = {session: ChunkOutput(session, error=error) for session, error in in_flight.refusals.items()}
        for part in in_flight.parts:
            drawn = part.sampled.collect()
            for row in part.sampled.not_finite:
                session = in_flight.batch.chunks[part.answers[row]].session_id
                error = "the model's scores for the next token are not finite"
                refused[session] = ChunkOutput(session, error=error, error_code="not_finite")
            for row, error in part.sampled.errors.items():
                session = in_flight.batch.chunks[part.answers[row]].session_id
                refused[session] = ChunkOutput(session, error=error, error_code="grammar_refused")
            for chunk, (token_id, values) in zip(part.answers.tolist(), drawn, strict=True):
                token_ids[chunk].append(token_id)
                if values is not None:
                    logprobs[chunk].append(values)
        return StepOutput(
            tuple(
                refused.get(chunk.session_id)
                or ChunkOutput(
                    chunk.session_id,
                    tuple(token_ids[index]),
                    tuple(logprobs[index]) or None,
                    tuple(in_flight.prompt_logprobs.get(index, ())) if chunk.wanted_rows == "all" else None,
                    pooled.get(index),
                )
                for index, chunk in enumerate(in_flight.batch.chunks)
            )
        )

    def _pack(self, batch: Batch) -> PackedStep:
        """Check everything that can be known before anything changes. Poisoned sessions are refused one by one."""
        poisoned = {
            chunk.session_id: f"session {chunk.session_id} cannot go on: a step of it failed"
            for chunk in batch.chunks
            if (session := self._sessions.get(chunk.session_id)) is not None and session.is_poisoned
        }
        packed = pack(batch.chunks, self._slots(), self._limits, poisoned)
        if not packed.rewinds:  # what a rewind frees depends on who shares it: that is known behind it
            self._check_cells(packed)
        return packed

    def _slots(self) -> Callable[[int], Slot | None]:
        """Where each session stands before this step."""
        lengths, sessions = self._cache.lengths(), self._sessions

        def slot_of(session_id: int) -> Slot | None:
            session = sessions.get(session_id)
            return None if session is None else Slot(session.sequence, lengths[session.sequence])

        return slot_of

    def _rewind(self, packed: PackedStep) -> None:
        for sequence, position in packed.rewinds:
            self._cache.rewind(sequence, position)
        self._check_cells(packed)

    def _check_cells(self, packed: PackedStep) -> None:
        """Whole-step admission over all slices, so that no slice fails for cells after another ran."""
        free = self._cache.free_cells
        if packed.num_tokens > free:
            raise CacheFull(f"a {packed.num_tokens}-token step does not fit: {free} cells free of {self.total_cells}")

    def _poison(self, batch: Batch) -> None:
        """Some of the step may have run: none of its sessions may go on from there (D8, RUN-15)."""
        for chunk in batch.chunks:
            if (session := self._sessions.get(chunk.session_id)) is not None:  # one that is not open was refused
                session.is_poisoned = True

    def _run(self, batch: Batch, packed: PackedStep) -> CellInFlight:
        slices = plan_slices(packed.num_tokens, self._forwards.methods)
        picks = [select_rows(packed.selected, each.offset, each.length) for each in slices]
        nothing = np.empty(0, np.int64)  # where every chunk was refused there is no slice
        rows = np.concatenate([nothing, *(rows for rows, _ in picks)])
        owners = packed.seq_ids[packed.selected[np.concatenate([nothing, *(asked for _, asked in picks)])]]
        tokens, positions, sequences, selected, drawn_by = upload_integers(
            self._device, packed.tokens, packed.positions, packed.seq_ids, rows, owners
        )
        if (packed.tokens < 0).any():
            tokens = torch.where(tokens < 0, self._last_token[sequences], tokens)
        parts: list[SlicePart] = []
        ran: list[tuple[str, int, int]] = []
        pooled = PooledStep(packed)
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        first_row = 0
        for step_slice, (_, asked) in zip(slices, picks, strict=True):
            span = slice(step_slice.offset, step_slice.offset + step_slice.length)
            mine = slice(first_row, first_row + len(asked))
            first_row = mine.stop
            scores = run_slice(
                self._forwards,
                self._cache,
                step_slice,
                tokens[span],
                positions[span],
                packed.seq_ids[span],
                selected[mine] if len(asked) else None,
                pooled.take(step_slice),
            )
            ran.append((self._forwards.methods[step_slice.method].name, step_slice.length, step_slice.width))
            if scores is not None:
                part = self._answer(batch, packed, asked, scores, drawn_by[mine], prompt_logprobs)
                if part is not None:
                    parts.append(part)
        return CellInFlight(batch, tuple(parts), prompt_logprobs, dict(packed.refusals), tuple(ran), pooled)

    def _answer(
        self,
        batch: Batch,
        packed: PackedStep,
        asked: npt.NDArray[np.int64],
        scores: Scores,
        owners: torch.Tensor,
        prompt_logprobs: dict[int, list[TokenLogprobs]],
    ) -> SlicePart | None:
        """Draw from the slice's scores of R rows, which answer `packed.selected[asked]`; note the prompt's logprobs.

        owners: [R] i64, device, the sequence of each.
        """
        answers, draws, rows = packed.answers[asked], packed.draws[asked], packed.selected[asked]
        logits, prepared = scores.logits, scores.prepared
        for chunk_index in np.unique(answers[draws < 0]).tolist():
            chunk = batch.chunks[chunk_index]
            mine = np.flatnonzero((answers == chunk_index) & (draws < 0))
            targets = (*chunk.tokens, chunk.following_token)
            num_top = self._sessions[chunk.session_id].params.prompt_logprobs or 0
            done = prompt_logprobs.setdefault(chunk_index, [])
            wanted = np.array(targets[len(done) + 1 : len(done) + 1 + len(mine)], np.int64)
            at, wanted_ids = upload_integers(self._device, mine, wanted)
            done += self._sampler.prompt_logprobs(logits[at], wanted_ids, num_top)
        drawn = np.flatnonzero(draws >= 0)
        if not len(drawn):
            return None
        if len(drawn) < len(draws):
            at = upload(drawn, self._device)
            logits, owners, prepared = logits[at], owners[at], None
        slots = packed.seq_ids[rows[drawn]].astype(np.int64)
        choices = draws[drawn].astype(np.int64)
        fed = packed.tokens[rows[drawn]]
        sampled = self._sampler.sample(logits, slots, packed.positions[rows[drawn]] + 1, choices, fed, prepared)
        ids = sampled.ids
        if choices.any():  # a fork's token is its own session's last token, not the stem's
            own = upload(np.flatnonzero(choices == 0), self._device)
            owners, ids = owners[own], ids[own]
        self._last_token.index_copy_(0, owners, ids)
        return SlicePart(answers[drawn], sampled)

    # --- below sessions ---------------------------------------------------------------------------------------------

    def execute_raw(self, step: RawStep, consume: Consume) -> bool:
        """Tokens of sequences that the caller took from `cache_control`, past all sessions (`RawSteps.execute`)."""
        return self._raw.execute(step, consume)

    def argmax_rows(self, logits: torch.Tensor, rows: int) -> list[int]:
        """Greedy ids of the first `rows` rows; no policy, no session moves (RAW-5)."""
        return self._raw.argmax_rows(logits, rows)

    def sample_rows(self, logits: torch.Tensor, rows: int, params: npt.NDArray[np.float32]) -> list[int]:
        """Ids drawn with the caller's coins: params [rows, 4] (RAW-5)."""
        return self._raw.sample_rows(logits, rows, params)

    def run_additional(self, name: str) -> None:
        """Run one of the additional methods given at creation. Raises KeyError for another name."""
        self._additional.call(name)
