"""Random models small enough for a test, wide enough that their greedy tokens vary and every feature bites."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig


def tiny_llama(**changes: Any) -> LlamaConfig:
    """Two layers, grouped heads, 64 tokens of vocabulary, 256 positions."""
    given = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaConfig(**{**given, **changes})
