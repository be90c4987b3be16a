"""A transformers model bound to the cell cache: the body and the head as two calls over packed rows.

The module is transformers' own, unmodified. `load_model` reads it (loading.py), fixes its rotary frequencies (rope.py),
binds its attention (binding.py), parts its head from its body (head.py) and proves it on a few tokens (proof.py),
or refuses the model by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cache.geometry import Geometry
from cache.step import CellStep
from static_graphs.binding import bind, use_experts
from static_graphs.head import body_path, head_of
from static_graphs.load_errors import ModelLoadError, UnsupportedModel
from static_graphs.loading import (
    LoadFormat,
    Source,
    default_model,
    end_of_text,
    export_tokenizer,
    generation_defaults,
    load_config,
    load_module,
    locate,
    random_module,
)
from static_graphs.pooling import Embedding, matryoshka_sizes, own_pooling
from static_graphs.proof import prove
from static_graphs.rope import fix_frequencies

__all__ = [
    "LoadedModel",
    "ModelLoadError",
    "UnsupportedModel",
    "default_model",
    "export_tokenizer",
    "load_model",
    "model_from_config",
]


@dataclass(frozen=True)
class LoadedModel:
    """One model, ready to run steps. Engine thread only; calls need inference mode or no_grad around them."""

    module: Any
    """The transformers CausalLM: eval mode, on `device`, its attention bound to cells."""
    body: torch.nn.Module
    """The part of `module` before its head."""
    head: torch.nn.Module
    """`module`'s own forward over hidden rows in place of the body's output. Shares its weights."""
    geometry: Geometry
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    """Columns of the logits."""
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    defaults: Mapping[str, float]
    """Sampling values that the model's generation_config.json writes down, by SamplingParams name."""
    architecture: str
    hidden_size: int
    """Numbers in a hidden state behind the final norm."""
    embedding: Embedding
    """How the model's authors pool a prompt's hidden states."""
    matryoshka: tuple[int, ...] | None
    """Sizes that an embedding may be cut to; (): any; None: it may not."""

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, step: CellStep) -> torch.Tensor:
        """tokens, positions: [W] i64 of the step's rows, padding included -> [W, hidden]. Writes the rows' K/V."""
        rows = self.body(input_ids=tokens[None], position_ids=positions[None], use_cache=False, step=step)
        hidden: torch.Tensor = rows.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden] -> [R, V] as the model's forward returns them, its scaling and softcap included."""
        logits: torch.Tensor = self.head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits


def load_model(
    model: str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "auto",
    load_format: LoadFormat = "auto",
    max_model_len: int | None = None,
    seed: int = 0,
) -> LoadedModel:
    """Load a folder, a GGUF or a hub id and bind it. load_format "dummy": random weights of the true shapes.

    dtype "auto": the checkpoint's on CUDA, float32 on CPU. Raises ModelLoadError; UnsupportedModel where the model
    could not be served right.
    """
    device = torch.device(device)
    chosen = _dtype(dtype)
    source = locate(model, load_format)
    if load_format == "dummy":
        module = random_module(load_config(source), device=device, dtype=chosen, seed=seed)
    else:
        module = load_module(source, device=device, dtype=chosen)
    return _bound(module, source, max_model_len)


def model_from_config(
    config: Any,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    max_model_len: int | None = None,
    seed: int = 0,
) -> LoadedModel:
    """A random model of `config` (which is copied), without a tokenizer."""
    return _bound(random_module(config, device=torch.device(device), dtype=dtype, seed=seed), None, max_model_len)


def bind_model(module: Any, *, max_model_len: int | None = None) -> LoadedModel:
    """Bind a transformers CausalLM that is in memory. It serves cells from then on, and nothing else."""
    return _bound(module.eval(), None, max_model_len)


def _bound(module: Any, source: Source | None, max_model_len: int | None) -> LoadedModel:
    architecture = type(module).__name__
    config = module.config.get_text_config()
    length = _max_model_len(config, max_model_len)
    device = next(module.parameters()).device
    try:
        path = body_path(module, device)
        body = module.get_submodule(path)
        fix_frequencies(module, length)
        use_experts(module)
        geometry, output = bind(module, body, device)
        model = LoadedModel(
            module=module,
            body=body,
            head=head_of(module, path, type(output)),
            geometry=geometry,
            device=device,
            dtype=output.last_hidden_state.dtype,
            vocab_size=module.get_output_embeddings().weight.shape[0],
            max_model_len=length,
            eos_token_ids=_eos_token_ids(module, source),
            defaults={} if source is None else generation_defaults(source),
            architecture=architecture,
            hidden_size=output.last_hidden_state.shape[-1],
            embedding=Embedding("last") if source is None else own_pooling(source.folder),
            matryoshka=matryoshka_sizes(config),
        )
        prove(model)
    except UnsupportedModel as refusal:
        raise UnsupportedModel(f"{architecture} cannot be served: {refusal}") from refusal
    return model


def _dtype(name: torch.dtype | str) -> torch.dtype | None:
    if isinstance(name, torch.dtype):
        return name
    if name == "auto":
        return None
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ModelLoadError(f"dtype is {name!r}: it must be auto, float32, bfloat16 or float16")
    return found


def _max_model_len(config: Any, asked: int | None) -> int:
    own: int | None = getattr(config, "max_position_embeddings", None)
    if asked is None:
        if own is None:
            raise ModelLoadError("the model's config names no longest length: give max_model_len")
        return own
    if asked < 1 or (own is not None and asked > own):
        raise ModelLoadError(f"max_model_len is {asked}: the model has positions for 1 to {own} tokens")
    return asked


def _eos_token_ids(module: Any, source: Source | None) -> tuple[int, ...]:
    """The tokenizer's end and every end that generation_config names (a chat model often has one of each)."""
    end = None if source is None else end_of_text(source)
    found = set() if end is None else {end}
    written = module.generation_config.eos_token_id if module.generation_config is not None else None
    if written is not None:
        found.update(written if isinstance(written, list) else [written])
    return tuple(sorted(found))
