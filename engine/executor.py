"""What the loop asks of whatever runs its steps. Torch-free, so that a scripted executor needs no model.

Engine thread only. A session is one sequence in the executor's cache together with how its tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from engine.types import Batch, SamplingParams, StepOutput

Cells = npt.NDArray[np.int32]
"""Numbers of cells, in the order of the positions they hold."""


class InFlight(Protocol):
    """A launched step whose ids may still be on the device."""

    @property
    def batch(self) -> Batch: ...

    @property
    def forwards(self) -> tuple[tuple[str, int, int], ...]:
        """(method, tokens, rows run) of each forward that was launched for it, in order."""
        ...


Launched = TypeVar("Launched", bound=InFlight)


class Executor(Protocol[Launched]):
    """Sessions and steps. Ids of sessions strictly increase and are never reused (SES-1)."""

    @property
    def overlaps(self) -> bool:
        """Whether step t + 1 should be launched before step t is collected."""
        ...

    @property
    def free_cells(self) -> int: ...

    @property
    def total_cells(self) -> int: ...

    @property
    def max_sessions(self) -> int: ...

    @property
    def max_session_tokens(self) -> int:
        """Tokens one session can hold. A chunk past it is refused alone: its output carries an `error`."""
        ...

    @property
    def padding_rows(self) -> int:
        """Rows run that answered nobody, since the start."""
        ...

    def open_session(
        self,
        params: SamplingParams,
        *,
        seed: int,
        prompt: Sequence[int],
        generated: Sequence[int] = (),
        prefix: Cells | None = None,
    ) -> int:
        """A new session. `prompt` and `generated` feed penalties and min_tokens; nothing is computed.

        prefix: cells that hold the K/V of its first tokens and that the caller holds; by default it is empty.
        Raises SessionsExhausted and leaves nothing behind.
        """
        ...

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
        """A new session that shares the first `upto` tokens of `source` by reference.

        Raises SessionsExhausted, or SessionRefused for a source that is not open, holds nothing, less than `upto`, or
        was in a step that failed. Leaves nothing behind.
        """
        ...

    def close_session(self, session_id: int) -> None:
        """Release its cells. Unknown ids are ignored. Safe while a step of the session is in flight."""
        ...

    def cells_of(self, session_id: int, start: int, stop: int) -> Cells:
        """The cells of the session's positions [start, stop), all of which it has."""
        ...

    def cell_references(self) -> Cells:
        """A copy of how often each cell of the pool is held; 0 is free."""
        ...

    def rebase_session(self, session_id: int, cells: Cells) -> None:
        """Let the session begin with `cells`, which hold the same tokens, instead of copies that only it has."""
        ...

    def hold_cells(self, cells: Cells) -> None:
        """Keep cells of a session beyond its end: one more reference each."""
        ...

    def release_cells(self, cells: Cells) -> None:
        """Give back what `hold_cells` took. Safe while a step that reads them is in flight."""
        ...

    def launch(self, batch: Batch) -> Launched:
        """Start one step. Raises StepFailed: its sessions cannot go on, everything else can.

        Whatever is wrong with one session's chunks (no room left, a gap, an id the model does not have, a failed step
        behind it) is an `error` in its outputs: none of them ran, it is as it was, and the rest of the batch stands.
        """
        ...

    def collect(self, in_flight: Launched) -> StepOutput:
        """Wait for the step's ids. Raises StepFailed as `launch` does."""
        ...

    def method_calls(self) -> tuple[tuple[str, int], ...]:
        """(method, calls), narrowest first."""
        ...
