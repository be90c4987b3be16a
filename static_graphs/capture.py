"""forward_N as CUDA graphs: the body of every static width captured once, widest first, in one memory pool.

A graph reads its tokens, positions and step from fixed addresses, so one capture serves any mix of sequences and is
never taken again: the pool grows in place (DESIGN D4). Heads and draws have a ladder of their own (captured_heads.py).
Engine thread only; every launch is on the stream that is current when `capture` is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch

from cache.step import CellStep
from static_graphs.ahead import run_at_once
from static_graphs.captured_heads import ROWS, CapturedHeads, rehearse_draws
from static_graphs.forwards import Forwards, Model, Scores
from static_graphs.graphs import captured, frozen_garbage
from static_graphs.kernels.compilations import compilations
from static_graphs.methods import Method, StepSlice
from static_graphs.taps import Taps
from static_graphs.tilings import kernel_rows


class CapturedForwards(Forwards):
    """A method table whose static methods replay graphs. Until `capture` has run it serves eagerly."""

    def __init__(
        self,
        model: Model,
        methods: Sequence[Method],
        device: torch.device,
        *,
        min_selected_rows: int = 1,
        taps: Taps | None = None,
        head_rows: int | None = None,
        has_full_step: bool = False,
    ) -> None:
        """head_rows: of every head, as in `Forwards`; None: a ladder.
        has_full_step: capture the dynamic method too, for steps of exactly as many rows as it takes.
        """
        super().__init__(model, methods, min_selected_rows=min_selected_rows, taps=taps, head_rows=head_rows)
        self._ladder = ROWS if head_rows is None else (head_rows,)
        self._widths = [method.max_tokens for method in reversed(methods) if method.is_static or has_full_step]
        widest = max(self._widths, default=1)
        self._tokens = torch.zeros(widest, dtype=torch.int64, device=device)  # [widest]
        self._positions = torch.zeros(widest, dtype=torch.int64, device=device)  # [widest]
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by width
        self._hidden: dict[int, torch.Tensor] = {}  # [W, hidden], written by each replay
        self._heads: CapturedHeads | None = None
        self.captures = 0
        """Bodies and heads captured since the start: stays at the number of widths and of a head's row counts."""

    @torch.inference_mode()
    def capture(
        self,
        prepared_step: Callable[[int], AbstractContextManager[CellStep]],
        progress: Callable[[str, int, int], None],
        rehearsals: Sequence[Callable[[], object]] = (),
    ) -> None:
        """Capture every static method, and every head.

        prepared_step(width): a context that prepares a step of that many rows at the addresses that serving uses,
        and takes it back. rehearsals: launch what serving will beside the graphs, on any thread; they run, once, where
        kernels have to be compiled.
        """
        total = len(self._widths) + sum(rows <= max(self._widths) for rows in self._ladder)
        memory = torch.cuda.graph_pool_handle()
        with frozen_garbage():
            for done, width in enumerate(self._widths):
                progress("capturing graphs", done, total)
                with compilations() as compiled, prepared_step(width) as step:
                    tokens, positions = self._tokens[:width], self._positions[:width]
                    run = partial(self._run_body, tokens, positions, step)
                    self._graphs[width], self._hidden[width] = captured(run, memory)
                    self.captures += 1
                if done == 0 and compiled and self._taps is None:
                    progress("compiling kernels", 0, 1)
                    self._compile_ahead(prepared_step, rehearsals)
            heads = CapturedHeads(self.model, self._hidden[self._widths[0]], memory, self._ladder)
            for done, rows in enumerate(reversed(heads.rows), len(self._widths)):
                progress("capturing graphs", done, total)
                heads.capture(rows)
                self.captures += 1
            self._heads = heads
            progress("capturing graphs", total, total)

    def _compile_ahead(
        self,
        prepared_step: Callable[[int], AbstractContextManager[CellStep]],
        rehearsals: Sequence[Callable[[], object]],
    ) -> None:
        """Launch the rehearsals and what the other captures will, several at once. Behind the widest body's capture."""
        hidden = self._hidden[self._widths[0]]
        jobs = list(rehearsals)
        for has_cuts in (True, False):  # before the bodies, for these take longest
            jobs.append(partial(rehearse_draws, self.model, hidden[:1], has_cuts))
        for width in _one_a_kernel(self._widths[1:]):
            with prepared_step(width) as step:
                # Its tensors stay where they are, and whatever step they hold by then is one that can be run.
                jobs.append(partial(self.model.hidden, self._tokens[:width], self._positions[:width], step))
        jobs += [partial(self.model.logits, hidden[:rows]) for rows in _one_a_kernel(self._ladder)]
        run_at_once(jobs, hidden.device)

    def graph(self, width: int) -> torch.cuda.CUDAGraph:
        """The captured body of a width, for whoever times it."""
        return self._graphs[width]

    def _body(
        self, step_slice: StepSlice, tokens: torch.Tensor, positions: torch.Tensor, step: CellStep
    ) -> torch.Tensor:
        graph = self._graphs.get(step_slice.width)
        if graph is None:
            return super()._body(step_slice, tokens, positions, step)
        width, length = step_slice.width, step_slice.length
        self._tokens[:length].copy_(tokens)
        self._positions[:length].copy_(positions)
        if length < width:  # every entry is rewritten: a stale one would be another step's (PAD-3)
            self._tokens[length:width].zero_()
            self._positions[length:width].zero_()
        graph.replay()
        return self._hidden[width]

    def _scores(self, hidden: torch.Tensor, selected: torch.Tensor, rows: int, name: str) -> Scores:
        scores = None if self._heads is None else self._heads.run(hidden, selected)
        if scores is None:
            return super()._scores(hidden, selected, rows, name)
        self._check_logits(scores.logits, len(selected), name)
        return scores.first(rows)


def _one_a_kernel(row_counts: Sequence[int]) -> list[int]:
    """Of those that one kernel serves, one."""
    chosen = {kernel_rows(rows): rows for rows in row_counts}
    return [rows for kernel, rows in chosen.items() if kernel is not None]
