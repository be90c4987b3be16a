"""A random Llama on disk: small, and initialised so wide that its greedy tokens vary."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def write_folder(folder: Path, *, std: float = 0.4, **changes: object) -> str:
    """Write config and weights (no tokenizer) into `folder`; `changes` name fields of LlamaConfig. -> its path."""
    sizes: dict[str, object] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": std,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**(sizes | changes))).save_pretrained(folder)
    return str(folder)
