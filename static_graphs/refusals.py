"""Models that are refused for what their config says, before anything runs, each by name."""

from __future__ import annotations

from typing import Any

from static_graphs.load_errors import UnsupportedModel

ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})


def refuse_by_config(config: Any) -> None:
    """Raise UnsupportedModel where K/V cells cannot hold what the model keeps of a sequence."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel("it is an encoder-decoder: its rows attend to a second sequence")
    text = config.get_text_config()
    if text is not config:
        raise UnsupportedModel("it is multimodal: only a model of text alone is served")
    kinds = set(getattr(text, "layer_types", None) or []) - ATTENTION_KINDS
    if kinds:
        raise UnsupportedModel(f"it has {', '.join(sorted(kinds))} layers: what they keep of a sequence is no K/V cell")
    if getattr(text, "is_decoder", True) is False:
        raise UnsupportedModel("its config says is_decoder false: it is bidirectional")
