"""Raw steps: packed tokens of sequences that the caller owns, straight through the forwards (RAW-1..7).

For whoever drives a model below sessions: a speculative adapter, an embedder, a test. The caller takes sequence ids
from the cache, rewinds and removes them itself, and gives them to no session verb. Engine thread only.

    step      [ t0 t1 t2 | t3 t4 ]        logit_indices  [ 4, -1, 1, 4 ]
    forward 0 offset 0, length 3          logits row 0 -> selected_indices [2]
    forward 1 offset 3, length 2          logits rows 0, 1 -> selected_indices [0, 3]

Nothing here draws by a session's policy or moves what a session will draw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cache.cell_cache import CellCache
from cache.geometry import CacheError
from engine.device import check_device
from engine.errors import StepFailed
from engine.packing import select_rows
from engine.slices import run_slice
from engine.uploads import upload, upload_integers
from static_graphs.forwards import Forwards
from static_graphs.methods import plan_slices
from static_graphs.sampler import sample_argmax, sample_rows


class RawStepError(ValueError):
    """The step cannot be run as it stands; nothing was changed."""


@dataclass(frozen=True, slots=True, eq=False)
class RawStep:
    """T token rows, any interleaving of sequences, and the R logits rows that are asked for."""

    tokens: npt.NDArray[np.int64]  # [T]
    positions: npt.NDArray[np.int64]  # [T] each the next of its sequence
    seq_ids: npt.NDArray[np.int32]  # [T]
    logit_indices: npt.NDArray[np.int64]  # [R] token rows of the step, any order, repeats allowed; -1 = nothing

    def __post_init__(self) -> None:
        for name in ("positions", "seq_ids"):
            if len(getattr(self, name)) != len(self.tokens):
                raise RawStepError(f"a raw step has {len(self.tokens)} tokens and {len(getattr(self, name))} {name}")


@dataclass(frozen=True, slots=True, eq=False)
class RawOutput:
    """What one forward brought. Borrowed: the next forward may overwrite it, so copy what outlives the callback."""

    offset: int
    """Of the forward's first token in the step."""
    length: int
    logits: torch.Tensor  # [r, V], device; r = 0: none of this forward's rows was asked for
    taps: (
        torch.Tensor | None
    )  # [W, k * hidden], device; only rows [0, length) are of real tokens. None: no layer is tapped
    selected_indices: npt.NDArray[np.int64]  # [r] entry of logit_indices that each logits row answers


Consume = Callable[[RawOutput], bool]
"""Called behind each forward, in order; False ends the step there."""


class RawSteps:
    """Runs raw steps on one set of forwards and one cache."""

    def __init__(self, forwards: Forwards, cache: CellCache, device: torch.device, *, max_positions: int) -> None:
        self._forwards = forwards
        self._cache = cache
        self._device = device
        self._max_positions = max_positions
        self._is_running = False

    def execute(self, step: RawStep, consume: Consume) -> bool:
        """Run `step`, as several forwards where it is wider than the widest method. False: `consume` ended it.

        Raises RawStepError with nothing changed, StepFailed when a forward failed, and what `consume` raises. After
        anything but True, forwards that ran have written K/V and hold its cells: the owners in the step must not go
        on from there, but be rewound to where they stood or removed (RAW-4).
        """
        if self._is_running:
            raise RawStepError("a raw step cannot be run from the callback of another")
        self._check(step)
        self._is_running = True
        try:
            return self._run(step, consume)
        finally:
            self._is_running = False

    def argmax_rows(self, logits: torch.Tensor, rows: int) -> list[int]:
        """Greedy ids of the first `rows` rows of logits [r, V]. Waits for the device."""
        _check_rows(logits, rows)
        ids: list[int] = sample_argmax(logits[:rows]).tolist() if rows else []
        return ids

    def sample_rows(self, logits: torch.Tensor, rows: int, params: npt.NDArray[np.float32]) -> list[int]:
        """Ids of the first `rows` rows of logits [r, V], drawn with the caller's coins. Waits for the device.

        params: [rows, 4] = temperature, top_p, top_k, coin in [0, 1) (SAM-1). All rows greedy: argmax alone runs.
        """
        _check_rows(logits, rows)
        if params.shape != (rows, 4):
            raise RawStepError(f"params are {list(params.shape)}: {rows} rows need [{rows}, 4]")
        if not (np.isfinite(params).all() and (params[:, 3] >= 0).all() and (params[:, 3] < 1).all()):
            raise RawStepError("params must be finite, and each coin in [0, 1)")
        if (params[:, 0] <= 0).all():
            return self.argmax_rows(logits, rows)
        ids: list[int] = sample_rows(logits[:rows], torch.from_numpy(params).to(logits.device, torch.float32)).tolist()
        return ids

    def _run(self, step: RawStep, consume: Consume) -> bool:
        tokens, positions = upload_integers(self._device, step.tokens, step.positions)
        wanted = np.asarray(step.logit_indices, np.int64)
        for step_slice in plan_slices(len(step.tokens), self._forwards.methods):
            span = slice(step_slice.offset, step_slice.offset + step_slice.length)
            rows, indices = select_rows(wanted, step_slice.offset, step_slice.length)
            selected = upload(rows, self._device) if len(rows) else None
            try:
                scores = run_slice(
                    self._forwards, self._cache, step_slice, tokens[span], positions[span], step.seq_ids[span], selected
                )
            except Exception as error:  # whatever a model raises
                check_device(self._device, error)
                raise StepFailed(f"forward {span.start}..{span.stop} of a raw step failed: {error}") from error
            if scores is None:
                logits = torch.empty(0, self._forwards.vocab_size, device=self._device)
            else:  # the owner may keep them, and the next forward writes a captured head's again
                logits = scores.logits if scores.prepared is None else scores.logits.clone()
            taps = self._forwards.taps(step_slice.width)
            if not consume(RawOutput(step_slice.offset, step_slice.length, logits, taps, indices)):
                return False
        return True

    def _check(self, step: RawStep) -> None:
        """Everything that can be known before the first forward (RAW-7)."""
        count = len(step.tokens)
        _check_range("token id", step.tokens, 0, self._forwards.vocab_size)
        _check_range("position", step.positions, 0, self._max_positions)
        _check_range("logit index", step.logit_indices, -1, count)
        try:
            self._cache.declare_step(step.seq_ids)  # whole-step admission: no later forward fails for cells
        except CacheError as error:
            raise RawStepError(f"a raw step of {count} tokens is refused: {error}") from error
        expected = self._next_positions(step.seq_ids)
        wrong = np.flatnonzero(step.positions != expected)
        if wrong.size:
            row = int(wrong[0])
            raise RawStepError(
                f"row {row} is at position {step.positions[row]}: "
                f"sequence {step.seq_ids[row]} goes on at {expected[row]}"
            )

    def _next_positions(self, seq_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """[T] where each row of a step must stand: behind what its sequence holds and its earlier rows (CELL-21)."""
        owners, owner_of = np.unique(seq_ids, return_inverse=True)
        held = np.array([self._cache.pos(int(owner)) for owner in owners], np.int64)
        order = np.argsort(owner_of, kind="stable")
        first = np.searchsorted(owner_of[order], np.arange(len(owners)))
        nth = np.empty(len(seq_ids), np.int64)
        nth[order] = np.arange(len(seq_ids)) - first[owner_of[order]]
        return held[owner_of] + nth


def _check_range(name: str, values: npt.NDArray[np.int64], low: int, high: int) -> None:
    outside = np.flatnonzero((values < low) | (values >= high))
    if outside.size:
        entry = int(outside[0])
        raise RawStepError(f"{name} {values[entry]} of entry {entry} is outside [{low}, {high})")


def _check_rows(logits: torch.Tensor, rows: int) -> None:
    if not 0 <= rows <= logits.shape[0]:
        raise RawStepError(f"{rows} rows are asked for of logits with {logits.shape[0]}")
