"""What the load-time trace and proof find out about a model, and what they refuse (DESIGN D1)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from cache.geometry import LayerGeometry, Reach
from static_graphs.binding import Trace, TracedMask, _trace_attention, _trace_mask
from static_graphs.head import body_path, head_of
from static_graphs.load_errors import UnsupportedModel
from static_graphs.loading import random_module
from static_graphs.model import bind_model, model_from_config
from static_graphs.proof import row_errors
from static_graphs.tiny_config import tiny_config
from support.tiny_models import CHUNK, WINDOW, longrope, tiny

CPU = torch.device("cpu")


def reaches(model_type: str, **changes: Any) -> list[Reach]:
    return [layer.reach for layer in model_from_config(tiny(model_type, **changes)).geometry.layers]


# -- Reach


def test_a_window_that_only_the_mask_has_is_found() -> None:
    assert reaches("qwen2_moe") == [Reach("window", WINDOW), Reach()]


def test_a_mask_that_no_layer_uses_does_not_matter() -> None:
    """Qwen2-MoE without windows still makes a mask with a window of 0."""
    assert reaches("qwen2_moe", use_sliding_window=False) == [Reach(), Reach()]


def test_a_chunk_is_found_and_is_no_window() -> None:
    assert reaches("llama4_text") == [Reach("chunk", CHUNK), Reach()]


@pytest.mark.parametrize("size", [1, 2, 7, 4096])
def test_masks_are_known_by_what_they_let_through(size: int) -> None:
    chunked = chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.long))
    window = sliding_window_causal_mask_function(size)
    assert _trace_mask(1, 8, 8, causal_mask_function).reach == Reach()
    assert _trace_mask(1, 8, 8, window, local_size=size).reach == Reach("window", size)
    assert _trace_mask(1, 8, 8, chunked, local_size=size).reach == Reach("window" if size == 1 else "chunk", size)


@pytest.mark.parametrize(
    ("function", "local_size"),
    [
        (bidirectional_mask_function, None),
        (causal_mask_function, 7),
        (sliding_window_causal_mask_function(7), None),
        (sliding_window_causal_mask_function(7), 8),
        (sliding_window_causal_mask_function(8), 7),
        (chunked_causal_mask_function(7, torch.ones(1, dtype=torch.long)), 7),
    ],
)
def test_a_mask_that_is_not_what_it_says_has_no_reach(function: Any, local_size: int | None) -> None:
    assert _trace_mask(1, 8, 8, function, local_size=local_size).reach is None


# -- What one layer asks for


def call(mask: object = TracedMask(Reach(), "plainly causal", 4), *, keys: int = 4, **keywords: Any) -> Trace:
    """One attention call of 4 rows, 4 query heads of 8, 2 key and value heads of 8 and 6."""
    config = SimpleNamespace(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    config.attention_dropout, config.attention_bias = 0.0, False
    layer = LlamaAttention(config, 0)  # type: ignore[arg-type]
    trace = Trace({id(layer): "layers.0.attn"})
    rows = torch.zeros(1, 4, 4, 8), torch.zeros(1, 2, keys, 8), torch.zeros(1, 2, keys, 6)
    _trace_attention(layer, *rows, mask, scaling=0.5, **{"step": trace, **keywords})
    return trace


def test_key_and_value_widths_are_told_apart() -> None:
    assert call().calls[0].layer == LayerGeometry(2, 8, 6)


def test_keywords_that_are_honoured_or_say_nothing_pass() -> None:
    call(
        softcap=30.0,
        s_aux=torch.zeros(4),
        dropout=0.0,
        is_causal=True,
        position_ids=torch.zeros(1, 4),
        block_indices=None,
    )


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"block_indices": torch.zeros(1)}, "asks its attention for block_indices"),
        ({"indices": torch.zeros(1), "position_bias": torch.zeros(1)}, "asks its attention for indices, position_bias"),
        ({"dropout": 0.1}, "dropout 0.1"),
        ({"is_causal": False}, "bidirectional"),
        ({"sliding_window": 7}, "asks for a window of 7, but its mask is plainly causal"),
        ({"step": None}, "LlamaAttention does not hand the keywords of the model's call"),
        ({"mask": None}, "under no mask"),
        ({"mask": torch.zeros(1, 1, 4, 4)}, "a mask of its own making"),
        ({"keys": 5}, "5 keys in a step of 4 tokens"),
    ],
)
def test_what_cells_cannot_give_is_refused_by_name(keywords: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        call(**keywords)


def test_window_and_mask_must_agree() -> None:
    mask = TracedMask(Reach("window", 5), "a window of 5", 4)
    assert call(mask, sliding_window=5).calls[0].layer.reach == Reach("window", 5)
    assert call(mask).calls[0].layer.reach == Reach("window", 5)
    with pytest.raises(UnsupportedModel, match="a window of 6, but its mask is a window of 5"):
        call(mask, sliding_window=6)


def test_a_traced_mask_may_be_sliced_whole_and_not_cut() -> None:
    mask = TracedMask(Reach(), "plainly causal", 8)
    assert mask[:, :, :, :8] is mask
    with pytest.raises(UnsupportedModel, match="cuts its attention mask"):
        mask[:, :, :, :7]


# -- Whole models


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bert", "neither causal nor"),
        ("roberta", "neither causal nor"),
        ("lfm2_moe", "conv layers"),
        ("recurrent_gemma", "(linear_attention|recurrent) layers"),
        ("diffllama", "attends twice in one step"),
        ("nemotron", "does not hand the keywords"),
        ("deepseek_v32", "(indexed|sparse)_attention layers"),
        ("bart", "encoder-decoder"),
        ("gemma3", "multimodal"),
        ("rwkv", "no layer called the attention interface"),
    ],
)
def test_a_model_that_cells_cannot_serve_is_refused_by_name(model_type: str, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason) as refusal:
        model_from_config(tiny_config(model_type))
    assert "cannot be served" in str(refusal.value)


def test_layers_that_share_keys_and_values_have_their_donors_id() -> None:
    """CELL-24, GEO-5."""
    model = model_from_config(tiny_config("gemma3n_text"))
    bound = [layer.self_attn.cell_layer.layer for layer in model.module.model.layers]
    assert len(model.geometry.layers) == 2
    assert sorted(set(bound)) == [0, 1]
    assert len(bound) == 4


def test_latent_attention_stores_wider_keys_than_values() -> None:
    model = model_from_config(tiny_config("deepseek_v3"))
    assert model.geometry.layers[0] == LayerGeometry(4, 12, 6)


def test_experts_run_as_grouped_products() -> None:
    assert model_from_config(tiny("qwen3_moe")).module.config._experts_implementation == "grouped_mm"


class _Leaky(torch.nn.Module):
    """A feed-forward part that looks at the row before."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(rows + rows.roll(1, dims=1))


def test_a_layer_that_mixes_rows_outside_attention_is_found_by_the_proof() -> None:
    module = random_module(tiny("llama"), device=CPU, dtype=torch.float32, seed=0)
    module.model.layers[1].mlp = _Leaky(module.model.layers[1].mlp)
    with pytest.raises(UnsupportedModel, match="depend on more than their own sequence's cells"):
        bind_model(module)


def test_the_proof_holds_in_sixteen_bits() -> None:
    model = model_from_config(tiny("qwen3_moe"), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.logits(torch.zeros(2, 32, dtype=torch.bfloat16)).shape == (2, 64)


# -- Rotary frequencies


def test_dynamic_ntk_is_refused_above_its_original_length() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config = tiny("llama", max_position_embeddings=32, rope_parameters=rope)
    model = model_from_config(config)
    assert model.max_model_len == 32
    assert float(row_errors(model, ((9, 6), (4, 1))).max()) < 1e-5
    longer = tiny("llama", max_position_embeddings=32, rope_parameters=rope)
    module = random_module(longer, device=CPU, dtype=torch.float32, seed=0)
    module.config.max_position_embeddings = 64  # what the config says grew, the length the frequencies are for did not
    with pytest.raises(UnsupportedModel, match="at most 32"):
        bind_model(module)


@pytest.mark.parametrize(("max_model_len", "factor"), [(16, 1.0), (17, 3.0), (64, 3.0)])
def test_longrope_takes_the_long_set_only_past_the_original_length(max_model_len: int, factor: float) -> None:
    config = tiny("phi3", **longrope(original=16, longest=64))
    model = model_from_config(config, max_model_len=max_model_len)
    assert float(model.module.model.rotary_emb.inv_freq[0]) == pytest.approx(1.0 / factor)


# -- Head


@pytest.mark.parametrize("model_type", ["granite", "gemma2", "cohere", "opt", "gpt2", "llama4_text", "minicpm3"])
def test_body_then_head_is_the_whole_forward(model_type: str) -> None:
    """Logits scaling, final softcap, logit scale, a body inside a wrapper, a body by another name."""
    module = random_module(tiny_config(model_type), device=CPU, dtype=torch.float32, seed=1)
    ids = torch.tensor([[3, 9, 4, 7]])
    path = body_path(module, CPU)
    with torch.no_grad():
        whole = module(ids, use_cache=False).logits
        output = module.get_submodule(path)(ids, use_cache=False)
        head = head_of(module, path, type(output))
        rows = output.last_hidden_state[:, [2, 0]]
        assert torch.allclose(head(inputs_embeds=rows, use_cache=False).logits, whole[:, [2, 0]], atol=1e-5)
    assert {id(weight) for weight in head.parameters()} <= {id(weight) for weight in module.parameters()}
    assert module.get_submodule(path) is not head.get_submodule(path), "the model itself keeps its body"
