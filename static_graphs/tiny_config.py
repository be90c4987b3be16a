"""Tiny configs of any model type, made from the defaults of its config class. For the sweep."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING

from static_graphs.refusals import refuse_by_config

# Sizes by the names that configs use for them. Only names that the class itself has are set.
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "dff"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("expert_ffn_hidden_size", "intermediate_size_mlp"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "kv_channels", "global_head_dim"), 8),
    "rotary_dim": 4,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 128),
    "sliding_window": 5,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "attention_chunk_size": 6,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_shared_experts", "n_shared_experts"), 1),
    "first_k_dense_replace": 1,
    "initializer_range": 0.4,
    "type_vocab_size": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Latent attention: keys of 8 + 4, values of 6.
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 12,
    "v_head_dim": 6,
    # Per-layer embeddings and shared K/V (Gemma 3n, Gemma 4).
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
    "num_kv_shared_layers": 2,
    "laurel_rank": 8,
}
# Names whose default None means "derived" or "off", which the sweep wants on.
_SET_FROM_NONE = frozenset(
    {
        *("sliding_window", "num_key_value_heads", "head_dim", "n_inner", "moe_intermediate_size"),
        *("num_experts_per_tok", "n_routed_experts", "n_shared_experts", "n_group", "topk_group"),
    }
)
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_PER_TYPE: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48},
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 4},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A config of `model_type` with 4 layers of every kind it mixes, windows of 5 and chunks of 6.

    Raises UnsupportedModel where the class's own default is refused: what it mixes need not be built then.
    """
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    refuse_by_config(default)
    written = default.to_dict()
    given = {
        name: size
        for name, size in _SIZES.items()
        if name in written
        and not isinstance(written[name], list | dict)
        and (written[name] is not None or name in _SET_FROM_NONE)
    }
    for name in ("layer_types", "mlp_layer_types"):
        kinds = list(dict.fromkeys(getattr(default, name, None) or []))
        if len(kinds) > 1:
            given[name] = (kinds * 4)[:4]
    if "qk_rope_head_dim" in given:
        # Latent attention: one key and value a head, and head_dim is the rotary part where it is not derived.
        given.update({"num_key_value_heads": 4} if "num_key_value_heads" in given else {})
        given.pop("head_dim", None)
    return config_class(**{**given, **_PER_TYPE.get(model_type, {}), **changes})
