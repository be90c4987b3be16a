"""Forwards: padding, selection and counts (PAD-6, EXE-4, EXE-13..15), with a model that notes what it is given."""

import pytest
import torch

from cache.step import CellStep
from static_graphs.captured_heads import CapturedHeads
from static_graphs.forwards import Forwards
from static_graphs.methods import method_table, plan_slices

VOCAB = 8


class Notes:
    """`Model` whose hidden row is the row's number, and whose logits name the row they come from."""

    vocab_size = VOCAB

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.head_rows = 0

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, step: CellStep) -> torch.Tensor:
        self.tokens, self.positions = tokens.tolist(), positions.tolist()
        return torch.arange(len(tokens))[:, None].float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.head_rows = len(hidden)
        return hidden.expand(-1, VOCAB)


def run(model, tokens, selected, **options):
    forwards = Forwards(model, method_table((1, 4), 8), **options)
    (only,) = plan_slices(len(tokens), forwards.methods)
    rows = None if selected is None else torch.tensor(selected)
    at = torch.arange(5, 5 + len(tokens))
    scores = forwards.run(only, torch.tensor(tokens), at, None, rows)
    return forwards, None if scores is None else scores.logits


def test_pad_6_padding_runs_id_0_at_position_0():
    model = Notes()
    forwards, _ = run(model, [7, 6], [1])
    assert (model.tokens, model.positions) == ([7, 6, 0, 0], [5, 6, 0, 0])
    assert forwards.padding_rows == 2


def test_exe_14_logits_answer_the_selected_rows_in_their_order_with_repeats():
    _, logits = run(Notes(), [7, 6, 5], [2, 0, 2])
    assert logits[:, 0].tolist() == [2, 0, 2]


@pytest.mark.parametrize(("tokens", "head_rows"), [([1, 2, 3], 1), ([1] * 5, 3)])
def test_exe_14_only_behind_forward_others_the_head_runs_on_more_rows_than_were_asked_for(tokens, head_rows):
    """A static method's rows are padded by the rule; the design gathers them before the head instead (D6)."""
    model = Notes()
    _, logits = run(model, tokens, [1], min_selected_rows=3)
    assert (model.head_rows, logits.shape) == (head_rows, (1, VOCAB))


@pytest.mark.parametrize("selected", [[1], [2, 0, 1, 1], [0, 1, 2, 3, 3], [3] * 9])
def test_where_heads_have_fixed_rows_they_run_on_those_as_often_as_it_takes(selected):
    seen = []
    model = Notes()
    head = model.logits
    model.logits = lambda hidden: seen.append(len(hidden)) or head(hidden)
    _, logits = run(model, [1, 2, 3, 4], selected, head_rows=4)
    assert seen == [4] * -(-len(selected) // 4)
    assert logits[:, 0].tolist() == selected


def test_captured_heads_are_of_the_rows_they_are_told():
    hidden = torch.zeros(48, 2)
    assert CapturedHeads(Notes(), hidden, None).rows == (1, 2, 4, 8, 16, 32)
    assert CapturedHeads(Notes(), hidden, None, (48,)).rows == (48,)


def test_exe_15_a_forward_without_selected_rows_runs_no_head():
    model = Notes()
    _, logits = run(model, [7, 6], None)
    assert (logits, model.head_rows) == (None, 0)


def test_exe_15_logits_of_another_shape_are_refused():
    model = Notes()
    model.logits = lambda hidden: hidden
    with pytest.raises(ValueError, match=r"forward_4 gave logits \[2, 1\]: \[2, 8\] were expected"):
        run(model, [7, 6], [0, 1])
