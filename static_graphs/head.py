"""Splits a causal language model into its body and its head, both by the model's own code.

`module.forward` is body, then head: linear, bias, scaling, softcap, whatever the model does to its logits. The head
alone is the same forward with the body replaced by a stand-in that hands on hidden rows.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from static_graphs.load_errors import UnsupportedModel


def body_path(module: torch.nn.Module, device: torch.device) -> str:
    """The path of the first submodule that `module.forward` calls, which is the model without its head.

    Found by calling it: `base_model_prefix` names a wrapper in some models and nothing in others.
    """
    hooks = [part.register_forward_pre_hook(_stop) for part in module.modules() if part is not module]
    try:
        module(input_ids=torch.ones(1, 1, dtype=torch.long, device=device), use_cache=False)
    except _FirstCall as call:
        return str(next(name for name, part in module.named_modules() if part is call.part))
    finally:
        for hook in hooks:
            hook.remove()
    raise UnsupportedModel("its forward calls no part of it")


def head_of(module: torch.nn.Module, path: str, output: type[Any]) -> torch.nn.Module:
    """`module` over hidden rows: called with `inputs_embeds=` [1, R, hidden]. Shares every weight.

    output: the class of the body's output. Only the modules on the way to the body are copied, and those not deeply.
    """
    first, _, rest = path.partition(".")
    head = copy.copy(module)
    inner = head_of(module.get_submodule(first), rest, output) if rest else _GivenHidden(output)
    head._modules = {**module._modules, first: inner}
    return head


class _GivenHidden(torch.nn.Module):
    """Stands where the body stood: hands on the hidden rows it is given, as the body's own kind of output."""

    def __init__(self, output: type[Any]) -> None:
        super().__init__()
        self.output = output

    def forward(self, *_: object, inputs_embeds: torch.Tensor, **__: object) -> Any:
        return self.output(last_hidden_state=inputs_embeds)


class _FirstCall(Exception):
    def __init__(self, part: torch.nn.Module) -> None:
        self.part = part


def _stop(part: torch.nn.Module, _: object) -> None:
    raise _FirstCall(part)
