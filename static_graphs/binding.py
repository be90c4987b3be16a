"""Binds a transformers model's attention to the cell cache, and finds out what each of its layers stores and sees.

transformers models ask two registries for code by name: one for attention, one for masks. Three names are ours:

- "cells", for serving. The step arrives as the keyword `step=` of the model's call; what is fixed at load (the layer's
  id and reach) stands on the attention module as `cell_layer`. No mask function goes by this name, so transformers
  builds no mask (which would also wait for the device in every step).
- "cells_trace", for one tiny run at load. Its mask function hands on a `TracedMask` in place of a mask, so that a
  window which a model only puts into its masks is seen; its attention function records what every layer was given.
- "cells_probe", for finding out what a layer's parts compute (fuse.py): it notes what attention was asked and answers
  with random rows. It has no mask function either.

Nothing here is global but the registrations, which hold no state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from cache.attend import attend
from cache.geometry import Geometry, InvalidProgram, LayerGeometry, Reach
from cache.step import CellStep
from static_graphs.load_errors import UnsupportedModel

CELLS = "cells"
CELLS_TRACE = "cells_trace"
CELLS_PROBE = "cells_probe"

TRACE_TOKENS = 8

# Keywords that describe the call, not what attention computes: the packed step says the same in its own way.
_DESCRIPTIVE = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}
)


@dataclass(frozen=True, slots=True)
class BoundLayer:
    """What the load-time trace fixed for one attention module."""

    layer: int
    """The layer's id in the pool. Layers that share K/V have their donor's."""
    reach: Reach


@dataclass(frozen=True, slots=True)
class TracedMask:
    """Stands for a mask [1, 1, W, W] in the trace. A model may slice it, if that leaves it whole.

    Some models make masks that no layer of theirs uses, so a mask that is none of ours is refused where it is used.
    """

    reach: Reach | None
    """None: it is no mask that cells can give; `kind` says what it is."""
    kind: str
    length: int

    def __getitem__(self, index: object) -> TracedMask:
        for part in index if isinstance(index, tuple) else (index,):
            if not isinstance(part, slice) or len(range(*part.indices(self.length))) != self.length:
                raise UnsupportedModel("a layer cuts its attention mask")
        return self


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What one attention module was given in the trace."""

    name: str
    module: Any
    key: torch.Tensor  # [1, KV, W, Dk]; kept, so that a shared key is known by its address
    layer: LayerGeometry


@dataclass(slots=True)
class Trace:
    """Travels as `step=` of the traced run and collects its attention calls, in order."""

    names: dict[int, str]
    """Module name by id(module)."""
    calls: list[LayerCall] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What an attention module asked of attention, and the random answer it got."""

    query: torch.Tensor  # [1, H, W, Dk]
    key: torch.Tensor  # [1, KV, W, Dk]
    value: torch.Tensor  # [1, KV, W, Dv]
    answer: torch.Tensor  # [1, W, H, Dv]
    scale: float
    softcap: float | None
    sinks: torch.Tensor | None


@dataclass(slots=True)
class Probe:
    """Travels as `step=` of a probing call. A module that attends more than once is left out of `asked`."""

    asked: dict[torch.nn.Module, Asked] = field(default_factory=dict)
    again: set[torch.nn.Module] = field(default_factory=set)


def register() -> None:
    """Make the names known to transformers. Idempotent."""
    AttentionInterface.register(CELLS, _serve_attention)
    AttentionInterface.register(CELLS_TRACE, _trace_attention)
    AttentionInterface.register(CELLS_PROBE, _probe_attention)
    AttentionMaskInterface.register(CELLS_TRACE, _trace_mask)


def bind(module: torch.nn.Module, body: torch.nn.Module, device: torch.device) -> tuple[Geometry, Any]:
    """Trace `module`'s layers, note on each attention module what it stores and sees, and leave it set to serve.

    Returns the geometry and the body's output of the traced run (its kind is what counts). Raises UnsupportedModel
    naming the layer and what it asks for that cells do not give.
    """
    register()
    trace = Trace({id(part): name for name, part in module.named_modules()})
    use_attention(module, CELLS_TRACE)
    try:
        with torch.no_grad():
            output = body(
                input_ids=torch.arange(1, 1 + TRACE_TOKENS, device=device)[None],
                position_ids=torch.arange(TRACE_TOKENS, device=device)[None],
                use_cache=False,
                step=trace,
            )
    except UnsupportedModel:
        raise
    except Exception as error:  # whatever a model does with a mask that is none, or with keywords it does not know
        raise UnsupportedModel(f"its layers cannot be traced: {type(error).__name__}: {error}") from error
    if not trace.calls:
        raise UnsupportedModel("no layer called the attention interface with this step: nothing could be cached")
    layers: list[LayerGeometry] = []
    donors: dict[int, tuple[int, LayerGeometry]] = {}
    for call in trace.calls:
        address = call.key.data_ptr()
        if address not in donors:
            donors[address] = (len(layers), call.layer)
            layers.append(call.layer)
        layer_id, donor = donors[address]
        if donor != call.layer:
            raise UnsupportedModel(f"{call.name} shares the K/V of layer {layer_id}, but is {call.layer}, not {donor}")
        call.module.cell_layer = BoundLayer(layer_id, call.layer.reach)
    use_attention(module, CELLS)
    return Geometry(tuple(layers)), output


def use_experts(module: Any) -> None:
    """Run a mixture's experts as grouped products, which a CUDA graph can hold; a loop over them waits for the GPU.

    torch has them for bfloat16 alone on CUDA: other dtypes copy each row's expert weights and run batched products,
    which a graph holds too, at a cost in memory. On CPU grouped products take as long as the loop. A model without the
    choice keeps its loop.
    """
    weight = next(module.parameters())
    is_grouped = weight.device.type == "cpu" or weight.dtype == torch.bfloat16
    if module._can_set_experts_implementation():
        module.set_experts_implementation("grouped_mm" if is_grouped else "batched_mm")


def count_experts(module: torch.nn.Module) -> int:
    """Modules of experts, 0 in a dense model: transformers names them so, however they are run."""
    return sum("Experts" in type(part).__name__ for part in module.modules())


def use_attention(module: torch.nn.Module, name: str) -> None:
    """Choose the attention of `module` and all its parts. transformers keeps the choice on the config objects."""
    for part in module.modules():
        if hasattr(part, "config") and hasattr(part.config, "_attn_implementation"):
            part.config._attn_implementation = name


def _serve_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    *,
    step: CellStep,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """query [1, H, W, Dk], key [1, KV, W, Dk], value [1, KV, W, Dv] -> [1, W, H, Dv]."""
    bound = getattr(module, "cell_layer", None)
    if not isinstance(bound, BoundLayer):
        raise InvalidProgram("an attention module ran that the load-time trace never saw")
    out = attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        bound.layer,
        step,
        reach=bound.reach,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


def _probe_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    *,
    step: Probe,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = torch.randn(1, query.shape[2], query.shape[1], value.shape[3], dtype=torch.float32, device=query.device)
    answer = rows.to(query.dtype)
    if module in step.asked:
        step.again.add(module)
    step.asked[module] = Asked(query, key, value, answer, scale, softcap, s_aux)
    return answer, None


def _trace_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    step: object = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Record the call, or refuse what serving would not honour. Returns zeros [1, W, H, Dv]."""
    if not isinstance(step, Trace):
        raise UnsupportedModel(
            f"{type(module).__name__} does not hand the keywords of the model's call to its attention"
        )
    name = step.names.get(id(module), type(module).__name__)
    if any(call.module is module for call in step.calls):
        raise UnsupportedModel(f"{name} attends twice in one step: its cells would be overwritten")
    if dropout:
        raise UnsupportedModel(f"{name} asks for dropout {dropout}")
    if is_causal is False:
        raise UnsupportedModel(f"{name} is bidirectional: a row would need tokens that come after it")
    unknown = sorted(key for key, given in others.items() if given is not None and key not in _DESCRIPTIVE)
    if unknown:
        raise UnsupportedModel(
            f"{name} asks its attention for {', '.join(unknown)}, which attention over cells does not know"
        )
    if not isinstance(attention_mask, TracedMask):
        kind = "no mask" if attention_mask is None else "a mask of its own making"
        raise UnsupportedModel(f"{name} attends under {kind}: what its rows may see cannot be read off")
    reach = attention_mask.reach
    if reach is None:
        raise UnsupportedModel(f"{name} attends under {attention_mask.kind}")
    if sliding_window is not None and reach != Reach("window", sliding_window):
        raise UnsupportedModel(f"{name} asks for a window of {sliding_window}, but its mask is {attention_mask.kind}")
    if key.shape[2] != query.shape[2]:
        raise UnsupportedModel(f"{name} attends to {key.shape[2]} keys in a step of {query.shape[2]} tokens")
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        raise UnsupportedModel(
            f"{name} has {query.shape[1]}, {key.shape[1]} and {value.shape[1]} query, key and value heads"
        )
    geometry = LayerGeometry(key.shape[1], key.shape[3], value.shape[3], reach)
    step.calls.append(LayerCall(name, module, key, geometry))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _trace_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> TracedMask:
    """The reach whose mask `mask_function` is: tried around every place where masks of that size could differ."""
    if attention_mask is not None:
        return TracedMask(None, "a mask of its own making", q_length)
    candidates = [Reach()]
    if local_size is not None:
        candidates = [Reach("window", local_size), Reach("chunk", local_size)] if local_size > 0 else []
    for reach in candidates:
        query, key = _corners(reach)
        query, key = query.to(device), key.to(device)
        zero = torch.zeros_like(query)
        if torch.equal(mask_function(zero, zero, query, key), _sees(reach, query, key)):
            return TracedMask(reach, _words(reach), q_length)
    size = "" if local_size is None else f" of size {local_size}"
    return TracedMask(None, f"a mask{size} that is neither causal nor a causal window or chunk", q_length)


def _corners(reach: Reach) -> tuple[torch.Tensor, torch.Tensor]:
    """(query, key) positions [n], every pair of the places where masks begin, end or repeat."""
    size = reach.size or 16
    places = sorted({0, 1, 2, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, 3 * size})
    grid = torch.tensor(places)
    pairs = torch.cartesian_prod(grid, grid)
    return pairs[:, 0], pairs[:, 1]


def _sees(reach: Reach, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    causal = key <= query
    match reach.kind:
        case "all":
            return causal
        case "window":
            return causal & (key > query - reach.size)
        case "chunk":
            return causal & (key // reach.size == query // reach.size)


def _words(reach: Reach) -> str:
    return "plainly causal" if reach.kind == "all" else f"a {reach.kind} of {reach.size}"
