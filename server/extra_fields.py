"""Fields that no body of ours has: those of other servers are refused by name, those that nobody knows are reported."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from server import errors
from server.schemas import ChatBody, GenerationBody

_MAX_REPORTED = 16

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # Fields that other servers know and this one cannot obey -> the values that ask for nothing, beside null.
    **{"suffix": ("",), "prompt_embeds": (), "logprobs_mode": ()},
    **{"use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,)},
    **{"json_schema": (), "regex": (), "ebnf": (), "grammar": ("",)},
    **{"guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": ()},
    **{"guided_decoding_backend": (), "guided_whitespace_pattern": (), "structural_tag": (), "stop_regex": ([],)},
    **{"logits_processors": ([],), "no_stop_trim": (False,), "repetition_detection": (), "kv_transfer_params": ({},)},
    **{"typical_p": (1,), "tfs_z": (1,), "top_a": (0,), "mirostat": (0,), "xtc_probability": (0,)},
    **{"dry_multiplier": (0,), "dynatemp_range": (0,), "vllm_xargs": ({},), "custom_logit_processor": ()},
    **{"logprob_token_ids": ([],), "thinking_token_budget": (-1,), "watermarking": (False,), "stream_interval": (1,)},
    **{"routed_experts_prompt_start": (0,), "return_token_offsets": (False,), "ec_transfer_params": ({},)},
}

_SUCCESSORS = {
    # Fields of older servers, and of others -> where what they ask for is written here.
    **{f"guided_{form}": f"structured_outputs.{form}" for form in ("json", "regex", "choice", "grammar")},
    **{"json_schema": "structured_outputs.json", "regex": "structured_outputs.regex"},
    **{"ebnf": "structured_outputs.grammar", "grammar": "structured_outputs.grammar"},
}

_NEUTRAL_IN_CHAT: dict[str, tuple[Any, ...]] = {
    **{"functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],), "audio": ()},
    **{"prediction": (), "reasoning_effort": (), "verbosity": (), "store": (False,), "web_search_options": ()},
    **{
        "service_tier": ("auto", "default"),
        "documents": ([],),
        "chat_template": (),
        "continue_final_message": (False,),
    },
    **{"mm_processor_kwargs": ({},), "echo": (False,), "best_of": (1,), "include_reasoning": (True, False)},
    **{"return_prompt_text": (False,), "media_io_kwargs": ({},)},
}

_NEUTRAL_ELSEWHERE: dict[str, tuple[Any, ...]] = {
    "normalize": (True,),
    "input_type": ("",),
    "embed_dtype": ("float32",),
}
"""Of embeddings: they always have length 1, and one kind of input."""


def check(body: BaseModel, *, is_strict: bool = False) -> dict[str, str]:
    """Refuse fields that ask for what this server cannot do; name those nobody knows in the headers returned.

    is_strict: refuse those too.
    """
    known = _NEUTRAL if isinstance(body, GenerationBody) else _NEUTRAL_ELSEWHERE
    if isinstance(body, ChatBody):
        known = _NEUTRAL | _NEUTRAL_IN_CHAT
    ignored = []
    for name, value in (body.model_extra or {}).items():
        if name not in known:
            if is_strict:
                raise errors.unknown_parameter(name)
            ignored.append(name)
        elif value is not None and value not in known[name]:
            use = f"not a field of this server: use {_SUCCESSORS[name]}" if name in _SUCCESSORS else None
            raise errors.unsupported_parameter(f"{name} is {use or 'not supported with this value'}", name)
    if not ignored:
        return {}
    # A caller's names go into a header: keep it short and free of anything but visible ASCII.
    names = ["".join(c if "!" <= c <= "~" and c != "," else "?" for c in name[:64]) for name in ignored[:_MAX_REPORTED]]
    return {"x-ignored-params": ",".join(names)}
