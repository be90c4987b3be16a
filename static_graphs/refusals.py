"""Models that are refused for what their config says, before anything runs, each by name."""

from __future__ import annotations

from typing import Any

from static_graphs.load_errors import UnsupportedModel

ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
_KINDS_OF_LAYERS = ("layer_types", "layers_block_type")


def refuse_by_config(config: Any) -> None:
    """Raise UnsupportedModel where K/V cells cannot hold what the model keeps of a sequence."""
    reason = _reason(config)
    if reason is not None:
        raise UnsupportedModel(f"{config.model_type} cannot be served: {reason}")


def _reason(config: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, whose rows attend to a second sequence"
    text = config.get_text_config()
    if text is not config:
        return "it is multimodal, and only a model of text alone is served"
    kinds = {kind for name in _KINDS_OF_LAYERS for kind in getattr(config, name, None) or []} - ATTENTION_KINDS
    if kinds:
        return f"it has {', '.join(sorted(kinds))} layers, and what they keep of a sequence is no K/V cell"
    return None
