"""Random models small enough for a test, wide enough in their weights that every feature changes the greedy tokens."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, LlamaConfig

ARCHITECTURES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text"),
    *("phi3", "olmo2", "granite", "gpt_neox", "starcoder2", "qwen3_moe"),
)
"""What the matrix runs."""

WINDOW = 5
CHUNK = 6

# Hidden 32 over 4 heads; 0.2 keeps attention scores at a few units: neither flat nor a hard choice.
_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
_HEADS: dict[str, Any] = {**_GROUPED, "head_dim": 8}
_MIXED = ["sliding_attention", "full_attention"]
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

_BY_TYPE: dict[str, dict[str, Any]] = {
    "llama": _HEADS,
    "qwen2": _GROUPED,
    "qwen3": _HEADS,
    "mistral": {**_HEADS, "sliding_window": WINDOW},
    "gemma2": {
        **_HEADS,
        "sliding_window": WINDOW,
        "layer_types": _MIXED,
        "query_pre_attn_scalar": 4,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {**_HEADS, "sliding_window": WINDOW, "layer_types": _MIXED, "query_pre_attn_scalar": 4},
    "phi3": _GROUPED,
    "olmo2": _GROUPED,
    "granite": {**_GROUPED, "attention_multiplier": 0.5, "logits_scaling": 3.0, "residual_multiplier": 0.5},
    "gpt_neox": {"rotary_pct": 0.5},
    "starcoder2": {**_GROUPED, "sliding_window": WINDOW, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "qwen3_moe": {**_HEADS, **_EXPERTS, "decoder_sparse_step": 1},
    # Not in the plain matrix; the faults that it must find need them.
    "gpt_oss": {**_HEADS, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **_GROUPED,
        **_EXPERTS,
        "shared_expert_intermediate_size": 24,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "llama4_text": {
        **_HEADS,
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "attention_chunk_size": CHUNK,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
    },
}


def tiny(model_type: str, **changes: Any) -> Any:
    """A config of two layers, 64 tokens of vocabulary, 256 positions, with no end token."""
    return CONFIG_MAPPING[model_type](**{**_COMMON, **_BY_TYPE[model_type], **changes})


def tiny_llama(**changes: Any) -> LlamaConfig:
    config = tiny("llama", **changes)
    assert isinstance(config, LlamaConfig)
    return config


def longrope(original: int, longest: int) -> dict[str, Any]:
    """What makes a config of 8-wide heads longrope, its short and long frequencies far apart."""
    return {
        "max_position_embeddings": longest,
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.0, 1.0, 1.0],
            "long_factor": [3.0, 5.0, 7.0, 9.0],
            "factor": longest / original,
            "original_max_position_embeddings": original,
        },
    }
