"""The matrix: packed over scattered cells by random schedules, transformers' models give their own greedy tokens.

Each schedule mixes prompts, cuts them into chunks, interleaves their rows, decodes beside prefill and pads to odd
widths. Every logit is compared with the module's eager forward, every token with transformers' own `generate`. The
second half of this file breaks one thing at a time and asserts that the same matrix notices.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cache.step import CellStep
from static_graphs.model import LoadedModel, model_from_config
from static_graphs.rope import fix_frequencies
from support.packed_runs import PackedRun
from support.schedules import SEED, differences, reference
from support.tiny_models import ARCHITECTURES, WINDOW, longrope, tiny


def check(model_type: str, schedules: int) -> None:
    config = tiny(model_type)
    expected = reference(config)
    assert len({token for tokens in expected.generated for token in tokens}) >= 8, "the greedy tokens say too little"
    assert differences(model_from_config(config, seed=SEED), expected, schedules) == []


@pytest.mark.parametrize("model_type", [name for name in ARCHITECTURES if name != "llama"])
def test_any_schedule_gives_transformers_own_tokens(model_type: str) -> None:
    check(model_type, 40)


def test_a_thousand_schedules_give_transformers_own_tokens() -> None:
    check("llama", 1000)


@pytest.mark.full
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_thousand_schedules_on_every_architecture(model_type: str) -> None:
    check(model_type, 1000)


# What the matrix must find. Each serves a model that differs from the reference in one feature alone.

FAULTS = {
    "window one too wide": ("mistral", {"sliding_window": WINDOW + 1}),
    "window one too narrow": ("mistral", {"sliding_window": WINDOW - 1}),
    "window dropped": ("mistral", {"sliding_window": None}),
    "window on the wrong layers": ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"]}),
    "window that only a mask has": ("qwen2_moe", {"use_sliding_window": False}),
    "chunk one too wide": ("llama4_text", {"attention_chunk_size": 7}),
    "attention softcap dropped": ("gemma2", {"attn_logit_softcapping": None}),
    "final softcap dropped": ("gemma2", {"final_logit_softcapping": None}),
    "attention scale": ("gemma2", {"query_pre_attn_scalar": 8}),
    "attention multiplier": ("granite", {"attention_multiplier": 0.35}),
    "logits scaling": ("granite", {"logits_scaling": 1.0}),
}
TRIES = 10


@pytest.mark.parametrize("fault", FAULTS)
def test_the_matrix_finds_a_feature_served_wrong(fault: str) -> None:
    model_type, change = FAULTS[fault]
    expected = reference(tiny(model_type))
    assert differences(model_from_config(tiny(model_type), seed=SEED), expected, TRIES) == []
    assert differences(model_from_config(tiny(model_type, **change), seed=SEED), expected, TRIES) != []


def test_the_matrix_finds_lost_sinks() -> None:
    expected = reference(tiny("gpt_oss"))
    model = model_from_config(tiny("gpt_oss"), seed=SEED)
    assert differences(model, expected, TRIES) == []
    with torch.no_grad():
        for layer in model.module.model.layers:
            layer.self_attn.sinks.fill_(-100.0)
    assert differences(model, expected, TRIES) != []


class OneCellLost(PackedRun):
    """Now and then a cell that somebody holds is overwritten."""

    def placed(self, positions: list[int], step: CellStep) -> list[int]:
        held = int(step.pages[step.page_table[step.table_row[0]][0]][0])
        if max(positions) > 3 and self.random.random() < 0.2:
            self.cache.pool.keys[0][held] = 0.0
        return positions


class OnePositionWrong(PackedRun):
    """Now and then one row is told the position after its own."""

    def placed(self, positions: list[int], step: CellStep) -> list[int]:
        wrong = self.random.randrange(len(positions)) if self.random.random() < 0.2 else None
        return [position + (row == wrong) for row, position in enumerate(positions)]


@pytest.mark.parametrize("run_type", [OneCellLost, OnePositionWrong])
def test_the_matrix_finds_a_step_built_wrong(run_type: type[PackedRun]) -> None:
    expected = reference(tiny("llama"))
    assert differences(model_from_config(tiny("llama"), seed=SEED), expected, TRIES, run_type) != []


def _as_transformers_chooses(model: LoadedModel) -> None:
    """Undo the load's fixing: frequencies by the longest position on the packed axis."""
    model.module.model.rotary_emb.rope_type = "longrope"


@pytest.mark.parametrize(("undo", "is_right"), [(None, True), (_as_transformers_chooses, False)])
def test_a_long_neighbour_changes_no_row_under_longrope(
    undo: Callable[[LoadedModel], None] | None, is_right: bool
) -> None:
    """Prompts past the original length, which transformers runs on the long set; their first chunks are short."""
    config = tiny("phi3", **longrope(original=8, longest=64))
    model = model_from_config(config, seed=SEED)
    if undo is not None:
        undo(model)
    found = differences(model, reference(config, lengths=(11, 14, 9, 12)), TRIES)
    assert (found == []) == is_right


def test_a_model_served_within_the_original_length_keeps_longropes_short_set() -> None:
    config = tiny("phi3", **longrope(original=32, longest=64))
    model = model_from_config(config, seed=SEED, max_model_len=32)
    assert differences(model, reference(config), TRIES) == []
    fix_frequencies(model.module, 64)  # does nothing any more: what was fixed stays
    assert differences(model, reference(config), TRIES) == []
