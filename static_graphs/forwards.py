"""Run slices of a packed step through the method table: pad to the width, run the body, select rows, run the head.

The same code on every device; a CUDA table replaces the eager body by captured ones. All methods are one model at
different widths: its weights exist once. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from cache.step import CellStep
from static_graphs.methods import Method, StepSlice
from static_graphs.sampler import Prepared
from static_graphs.taps import Taps


class Model(Protocol):
    """What a forward needs of a model; static_graphs/model.py has the real one."""

    @property
    def vocab_size(self) -> int: ...

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, step: CellStep) -> torch.Tensor:
        """tokens, positions: [W] i64 -> [W, hidden]. Writes the rows' K/V."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, V]."""
        ...


@dataclass(frozen=True, slots=True)
class Scores:
    """What the head makes of R rows. Captured heads write the same memory again with the next forward."""

    logits: torch.Tensor  # [R, V]
    prepared: Prepared | None = None
    """Of these logits, where the head is captured."""

    def first(self, rows: int) -> Scores:
        """Of the first `rows` rows."""
        return Scores(self.logits[:rows], None if self.prepared is None else self.prepared.first(rows))


class Forwards:
    """forward_1 .. forward_N and forward_others over one model, with a count of calls each."""

    def __init__(
        self,
        model: Model,
        methods: Sequence[Method],
        *,
        min_selected_rows: int = 1,
        taps: Taps | None = None,
        head_rows: int | None = None,
    ) -> None:
        """min_selected_rows: fewest rows the head runs on behind the dynamic method (EXE-4). taps: set on `model`.
        head_rows: the head runs on so many rows and never on others, as often as it takes; None: on what is selected.
        """
        self.model = model
        self.methods = tuple(methods)
        self._min_selected_rows = min_selected_rows
        self._taps = taps
        self._head_rows = head_rows
        self.forget_calls()

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def calls(self) -> tuple[tuple[str, int], ...]:
        """(method, calls) of every method, narrowest first (RAW-6)."""
        return tuple((method.name, count) for method, count in zip(self.methods, self._calls, strict=True))

    def forget_calls(self) -> None:
        """What has run so far was for nobody: counts begin again."""
        self.padding_rows = 0
        self._calls = [0] * len(self.methods)

    @torch.inference_mode()
    def run(
        self,
        step_slice: StepSlice,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        step: CellStep,
        selected: torch.Tensor | None,
        on_hidden: Callable[[torch.Tensor], None] | None = None,
    ) -> Scores | None:
        """One forward.

        tokens, positions: [length] i64 of the slice's real tokens; step: prepared for step_slice.width rows.
        selected: [R] i64 rows of the slice, any order, repeats allowed; None when no logits are wanted: the head then
        does not run at all. on_hidden: called with the body's output [width, hidden], behind the final norm, padding
        rows included; the next forward may overwrite it.
        -> of the R rows. Raises ValueError when the model's logits are of another shape.
        """
        hidden = self._body(step_slice, tokens, positions, step)
        self._calls[step_slice.method] += 1
        self.padding_rows += step_slice.width - step_slice.length
        if on_hidden is not None:
            on_hidden(hidden)
        if selected is None:
            return None
        rows = len(selected)
        method = self.methods[step_slice.method]
        if not method.is_static and rows < self._min_selected_rows:
            selected = torch.cat((selected, selected[-1:].expand(self._min_selected_rows - rows)))
        if self._head_rows is None or rows <= self._head_rows:
            return self._scores(hidden, selected, rows, method.name)
        parts = [  # copied: a captured head writes the same memory again
            self._scores(hidden, some, len(some), method.name).logits.clone()
            for some in torch.split(selected, self._head_rows)
        ]
        return Scores(torch.cat(parts))

    def taps(self, width: int) -> torch.Tensor | None:
        """[width, k * hidden] of the last forward, padding rows included; overwritten by the next one."""
        return None if self._taps is None else self._taps.rows(width)

    def close(self) -> None:
        """Let go of the model. Nothing may run any more."""
        if self._taps is not None:
            self._taps.close()

    def _body(
        self, step_slice: StepSlice, tokens: torch.Tensor, positions: torch.Tensor, step: CellStep
    ) -> torch.Tensor:
        """-> [width, hidden]. Padding rows run id 0 at position 0 (PAD-6); their K/V goes to the scratch row."""
        padding = step_slice.width - step_slice.length
        if padding:
            tokens = torch.nn.functional.pad(tokens, (0, padding))
            positions = torch.nn.functional.pad(positions, (0, padding))
        return self._run_body(tokens, positions, step)

    def _scores(self, hidden: torch.Tensor, selected: torch.Tensor, rows: int, name: str) -> Scores:
        """The head over `selected` rows of hidden, of which the first `rows` count. name: of the method that ran."""
        if self._head_rows is not None:
            selected = torch.cat((selected, selected[-1:].expand(self._head_rows - len(selected))))
        logits = self.model.logits(hidden.index_select(0, selected))
        self._check_logits(logits, len(selected), name)
        return Scores(logits[:rows])

    def _check_logits(self, logits: torch.Tensor, rows: int, name: str) -> None:
        expected = (rows, self.vocab_size)
        if logits.shape != expected:  # ids drawn from it would be of other rows, or of no token (EXE-15)
            raise ValueError(f"{name} gave logits {list(logits.shape)}: {list(expected)} were expected")

    def _run_body(self, tokens: torch.Tensor, positions: torch.Tensor, step: CellStep) -> torch.Tensor:
        """The model's body, its tapped layers heard."""
        with nullcontext() if self._taps is None else self._taps.recording():
            return self.model.hidden(tokens, positions, step)
