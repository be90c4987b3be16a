"""Lowers the layers of a loaded model to fewer kernels, where it can prove what they compute; leaves all else alone.

There is no model here. A layer's parts are known by what they *do*: every part is run on random rows, and it is
replaced only where the fused form gives the same. What a layer does with its parts is read off one recorded run,
bit for bit: which tensor went where, and which sums were taken.

    decoder layer   x -> norm -> attention -> (+ x) -> norm -> mlp -> (+)    the sum and the norm behind it: one kernel
    attention       q, k, v merged to one weight; head norms, rotation and the cells' store: one kernel
    mlp             down(act(gate) * up): gate and up merged, or one kernel with the activation
    mixture         a router and experts, each expert an mlp over its own rows (mixtures.py)
    norm            RMSNorm: one kernel
    head            a linear layer over few rows

Merged weights are one storage of which the module's own parameters become views: no second copy, and the module still
computes what it did. A fused attention or layer serves calls that carry a `CellStep`; any other call runs the
module's own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from cache.step import CellStep
from static_graphs.binding import CELLS, CELLS_PROBE, Asked, BoundLayer, Probe, use_attention
from static_graphs.fused_layers import Flow, FusedAttention, FusedLayer, FusedMlp
from static_graphs.kernels.norms import RmsNorm, rms_norm
from static_graphs.kernels.products import product
from static_graphs.likeness import ACTIVATIONS, ROWS, SCALES, close, random_rows, same
from static_graphs.mixtures import FusedMixture, find_experts, find_mixtures
from static_graphs.proof import own_logits, prove
from static_graphs.tilings import RULE, Product, Tilings

if TYPE_CHECKING:
    from static_graphs.model import LoadedModel

_NORM_NAMES = ("eps", "variance_epsilon")


@dataclass(slots=True)
class Fused:
    """What `fuse` replaced, by number, and why it left what it left."""

    norms: int = 0
    attentions: int = 0
    mlps: int = 0
    experts: int = 0
    mixtures: int = 0
    layers: int = 0
    has_head: bool = False
    left: dict[str, str] = field(default_factory=dict)
    """Module path -> reason; of a kind of module the first one."""
    products: set[Product] = field(default_factory=set)
    """What the fused parts multiply by."""

    def __str__(self) -> str:
        done = f"{self.layers} layers, {self.attentions} attentions, {self.mlps} MLPs, {self.norms} norms"
        if self.experts:
            done += f", {self.mixtures} mixtures, {self.experts} modules of experts"
        return f"fused {done}{', head' if self.has_head else ''}; left: {self.left or 'nothing'}"


def fuse(model: LoadedModel, tilings: Tilings = RULE) -> Fused:
    """Replace what is recognised, then prove the whole model again. Engine thread, before any capture.

    tilings: how the fused parts cut their products.
    Raises UnsupportedModel where the fused model is not the module's own any more (which no part's trial showed).
    """
    report = Fused()
    replacing: dict[nn.Module, Callable[..., Any]] = {}
    with torch.no_grad():
        use_attention(model.module, CELLS_PROBE)
        try:
            calls = _record(model)
            norms = _find_norms(model)
            mlps: dict[nn.Module, FusedMlp | FusedMixture] = {**_find_mlps(model, report, tilings)}
            experts = find_experts(model, calls, report.left)
            mixtures = find_mixtures(model, calls, experts, report.left, tilings)
            mlps.update(mixtures)
            attentions = _find_attentions(model, calls, norms, report, tilings)
            layers = _find_layers(model, calls, norms, attentions, mlps, report)
        finally:
            use_attention(model.module, CELLS)
        own = own_logits(model)
    flow = Flow()
    for part, norm in norms.items():
        replacing[part] = _norm_forward(norm)
    for part, mlp in mlps.items():
        replacing[part] = _mlp_forward(mlp)
    for part, of_rows in experts.items():
        replacing[part] = of_rows.forward
    for part, attention in attentions.items():
        replacing[part] = _attention_forward(part, attention)
    for part, layer in layers.items():
        layer.flow = flow
        reader, layer.following = _reader(calls[part].output, calls, norms, layers)
        if reader is not None:
            replacing[reader] = _norm_forward(norms[reader], flow)
        replacing[part] = _layer_forward(part, layer)
    head = model.module.get_output_embeddings()
    if _is_plain(head, model.dtype) and head.bias is None:
        replacing[head] = _head_forward(head, tilings)
        width, depth = head.weight.shape
        report.products.add(Product(width, depth, is_whole=True))
        report.has_head = True
    for part, forward in replacing.items():
        part.forward = forward
    report.norms, report.mlps = len(norms), len(mlps) - len(mixtures)
    report.experts, report.mixtures = len(experts), len(mixtures)
    report.attentions, report.layers = len(attentions), len(layers)
    report.products.update(*(mlp.products for mlp in mlps.values()))
    report.products.update(*(attention.products for attention in attentions.values()))
    prove(model, own)
    return report


@dataclass(slots=True, eq=False)
class Call:
    """One call of a module in the recorded run."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    asked: Asked | None = None
    """What an attention module asked of attention."""


def _record(model: LoadedModel) -> dict[nn.Module, Call]:
    """Run the body once over random-looking tokens and note every module's call. Modules called twice are left out."""
    calls: dict[nn.Module, Call] = {}
    twice: set[nn.Module] = set()

    def note(part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if part in calls:
            twice.add(part)
        calls[part] = Call(args, kwargs, output)

    hooks = [part.register_forward_hook(note, with_kwargs=True) for part in model.body.modules()]
    tokens = torch.arange(3, 3 + ROWS, device=model.device)[None] * 7 % model.vocab_size
    positions = torch.arange(5, 5 + ROWS, device=model.device)[None]
    probe = Probe()
    try:
        model.body(input_ids=tokens, position_ids=positions, use_cache=False, step=probe)
    finally:
        for hook in hooks:
            hook.remove()
    for part, asked in probe.asked.items():
        if part in calls and part not in probe.again:
            calls[part].asked = asked
    return {part: call for part, call in calls.items() if part not in twice}


def _find_norms(model: LoadedModel) -> dict[nn.Module, RmsNorm]:
    """Every module that computes an RMSNorm over its weight's width."""
    found = {part: _norm_of(part, model.dtype) for part in model.body.modules()}
    return {part: norm for part, norm in found.items() if norm is not None}


def _norm_forward(norm: RmsNorm, flow: Flow | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        normed = flow.take(x) if flow is not None else None
        if normed is None:
            normed = rms_norm(x.reshape(-1, x.shape[-1]), norm)
        return normed.view(x.shape)

    return forward


def _norm_of(part: nn.Module, dtype: torch.dtype) -> RmsNorm | None:
    parameters = dict(part.named_parameters())
    eps = next((getattr(part, name) for name in _NORM_NAMES if isinstance(getattr(part, name, None), float)), None)
    if parameters.keys() != {"weight"} or eps is None or any(True for _ in part.children()):
        return None
    weight = parameters["weight"]
    if weight.dim() != 1 or weight.dtype != dtype:
        return None
    for offset in (0.0, 1.0):

        def expected(x: torch.Tensor, offset: float = offset) -> torch.Tensor:
            x = x.float()
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight.float() + offset)

        if same(part, expected, len(weight), dtype, weight.device):
            return RmsNorm(weight.data, eps, offset)
    return None


def _find_mlps(model: LoadedModel, report: Fused, tilings: Tilings) -> dict[nn.Module, FusedMlp]:
    """Every module of gate, up and down projections that is down(act(gate) * up)."""
    mlps: dict[nn.Module, FusedMlp] = {}
    for name, part in model.body.named_modules():
        children = _with_weights(part)
        apart = children.keys() == {"gate_proj", "up_proj", "down_proj"}
        if not apart and children.keys() != {"gate_up_proj", "down_proj"}:
            continue
        merging = [children[key] for key in (("gate_proj", "up_proj") if apart else ("gate_up_proj",))]
        if not all(_is_plain(child, model.dtype) and child.bias is None for child in children.values()):
            report.left.setdefault(type(part).__name__, f"{name}: not plain linear layers without bias")
            continue
        down = children["down_proj"].weight
        for activation, act in ACTIVATIONS.items():

            def expected(x: torch.Tensor, act: Any = act, merging: Any = merging, down: Any = down) -> torch.Tensor:
                both = torch.cat([functional.linear(x, child.weight) for child in merging], -1).float()
                gate, up = both.chunk(2, -1)
                return functional.linear((act(gate) * up).to(x.dtype), down)

            if same(part, expected, down.shape[0], model.dtype, model.device):
                mlps[part] = FusedMlp(_merge(merging), down.data, activation, tilings)
                break
        else:
            report.left.setdefault(type(part).__name__, f"{name}: it is not down(act(gate) * up)")
    return mlps


def _mlp_forward(mlp: FusedMlp | FusedMixture) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        parts = mlp(x.reshape(-1, x.shape[-1]))
        out = parts[0] if len(parts) == 1 else parts.sum(0).to(x.dtype)
        return out.view(x.shape)

    return forward


def _find_attentions(
    model: LoadedModel,
    calls: dict[nn.Module, Call],
    norms: dict[nn.Module, RmsNorm],
    report: Fused,
    tilings: Tilings,
) -> dict[nn.Module, FusedAttention]:
    """Every attention module of merged projections, optional head norms, rotation by halves and one output."""
    found: dict[nn.Module, FusedAttention] = {}
    for name, part in model.body.named_modules():
        bound = getattr(part, "cell_layer", None)
        if not isinstance(bound, BoundLayer):
            continue
        reason, attention = _attention_of(model, part, bound, calls.get(part), norms, tilings)
        if attention is None:
            report.left.setdefault(type(part).__name__, f"{name}: {reason}")
        else:
            found[part] = attention
    return found


def _attention_of(
    model: LoadedModel,
    part: nn.Module,
    bound: BoundLayer,
    call: Call | None,
    norms: dict[nn.Module, RmsNorm],
    tilings: Tilings,
) -> tuple[str, FusedAttention | None]:
    """(why not, None), or the fused attention."""
    children = _with_weights(part)
    head_norms = [children.pop(key, None) for key in ("q_norm", "k_norm")]
    apart = children.keys() == {"q_proj", "k_proj", "v_proj", "o_proj"}
    if not apart and children.keys() != {"qkv_proj", "o_proj"}:
        return "it has other parts than projections and head norms", None
    if not all(_is_plain(child, model.dtype) for child in children.values()):
        return "its projections are not plain linear layers", None
    if (head_norms[0] is None) != (head_norms[1] is None):
        return "only one of query and key has a norm", None
    query_norm, key_norm = (norms.get(norm) if norm is not None else None for norm in head_norms)
    if head_norms[0] is not None and (query_norm is None or key_norm is None or query_norm.eps != key_norm.eps):
        return "its head norms are no RMSNorms of one eps", None
    out = children["o_proj"]
    merging = [children[key] for key in (("q_proj", "k_proj", "v_proj") if apart else ("qkv_proj",))]
    if out.bias is not None or len({child.bias is None for child in merging}) > 1:
        return "its output has a bias, or only some of its inputs have", None
    layer = model.geometry.layers[bound.layer]
    if call is None or call.asked is None or layer.k_dim != layer.v_dim or layer.k_dim % 2:
        return "it was not seen to attend once, or its keys and values differ in width", None
    rotation = call.kwargs.get("position_embeddings")
    if not isinstance(rotation, tuple) or len(rotation) != 2 or rotation[0].shape[-1] % 2:
        return "no rotation reaches it as position_embeddings", None
    heads = call.asked.query.shape[1]
    if sum(child.weight.shape[0] for child in merging) != (heads + 2 * layer.num_kv_heads) * layer.k_dim or any(
        norm is not None and len(norm.weight) != layer.k_dim for norm in (query_norm, key_norm)
    ):
        return "its heads are not the projections' columns", None

    def seen(x: torch.Tensor) -> list[torch.Tensor]:
        both = torch.cat([functional.linear(x, child.weight, child.bias) for child in merging], -1).float()
        shares = [heads, layer.num_kv_heads, layer.num_kv_heads]
        q, k, v = torch.split(both.view(*x.shape[:-1], -1, layer.k_dim), shares, -2)
        if query_norm is not None and key_norm is not None:
            q, k = (_plain_norm(of, norm) for of, norm in ((q, query_norm), (k, key_norm)))
        return [_turned(q, *rotation), _turned(k, *rotation), v]

    options: dict[str, Any] | None = None
    for scale in SCALES:
        x = random_rows((1, ROWS, merging[0].weight.shape[1]), scale, model.dtype, model.device)
        if call.args or "hidden_states" not in call.kwargs:
            return "it is not called by keywords", None
        probe = Probe()
        output = part(**{**call.kwargs, "hidden_states": x, "step": probe})
        asked = probe.asked.get(part)
        if asked is None or part in probe.again:
            return "it does not always attend once", None
        given = [t.transpose(1, 2) for t in (asked.query, asked.key, asked.value)]
        if not all(close(found, wanted) for found, wanted in zip(given, seen(x), strict=True)):
            return "its queries, keys or values are not projections, normed and rotated by halves", None
        if not torch.equal(output[0], out(asked.answer.flatten(2))):
            return "its output is not the projection of what it attended", None
        now = {"scale": asked.scale, "softcap": asked.softcap, "sinks": asked.sinks}
        if options is not None and any(options[key] is not now[key] and options[key] != now[key] for key in now):
            return "how it attends depends on its input", None
        options = now
    assert options is not None
    merged_bias = None if merging[0].bias is None else torch.cat([child.bias.data for child in merging])
    weights = _merge(merging), merged_bias, out.weight.data
    return "", FusedAttention(bound, *weights, query_norm, key_norm, options, tilings)


def _attention_forward(part: nn.Module, attention: FusedAttention) -> Callable[..., Any]:
    own = part.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        step, rotation = kwargs.get("step"), kwargs.get("position_embeddings")
        if not isinstance(step, CellStep) or args or rotation is None:
            return own(*args, **kwargs)
        hidden = kwargs["hidden_states"]
        parts = attention(hidden[0], rotation, step)
        out = parts[0] if len(parts) == 1 else parts.sum(0).to(hidden.dtype)
        return out[None], None

    return forward


def _find_layers(
    model: LoadedModel,
    calls: dict[nn.Module, Call],
    norms: dict[nn.Module, RmsNorm],
    attentions: dict[nn.Module, FusedAttention],
    mlps: dict[nn.Module, FusedMlp | FusedMixture],
    report: Fused,
) -> dict[nn.Module, FusedLayer]:
    """Every layer that is two norms, an attention and something, each added to what came in."""
    found: dict[nn.Module, FusedLayer] = {}
    for name, part in model.body.named_modules():
        children = list(_with_weights(part).values())
        if any(child in attentions for child in children):
            layer = _layer_of(children, part, calls, norms, attentions, mlps)
            if isinstance(layer, str):
                report.left.setdefault(type(part).__name__, f"{name}: {layer}")
            else:
                found[part] = layer
    return found


def _reader(
    output: torch.Tensor,
    calls: dict[nn.Module, Call],
    norms: dict[nn.Module, RmsNorm],
    layers: dict[nn.Module, FusedLayer],
) -> tuple[nn.Module | None, RmsNorm | None]:
    """The norm that reads a layer's output: a fused layer's first, or (the module of) one that stands alone."""
    for part, layer in layers.items():
        if _given(calls[part]) is output:
            return None, layer.first
    for part, norm in norms.items():
        if part in calls and _given(calls[part]) is output:
            return part, norm
    return None, None


def _layer_of(
    children: list[nn.Module],
    part: nn.Module,
    calls: dict[nn.Module, Call],
    norms: dict[nn.Module, RmsNorm],
    attentions: dict[nn.Module, FusedAttention],
    mlps: dict[nn.Module, FusedMlp | FusedMixture],
) -> FusedLayer | str:
    """The fused layer, or why it is none: what the recorded run did with the parts' inputs and outputs."""
    if len(children) != 4 or not all(child in calls for child in (part, *children)):
        return "it has other parts than two norms, an attention and an MLP, each called once"
    attention = next(child for child in children if child in attentions)
    pair = [child for child in children if child in norms]
    rest = [child for child in children if child not in norms and child is not attention]
    if len(pair) != 2 or len(rest) != 1:
        return "its norms are no RMSNorms"
    (mlp,) = rest
    call = calls[part]
    hidden = _given(call)
    first, second = sorted(pair, key=lambda norm: _given(calls[norm]) is not hidden)
    attended = calls[attention].output
    made = [calls[mlp].output, call.output, calls[first].output, calls[second].output]
    if not isinstance(attended, tuple) or not all(isinstance(tensor, torch.Tensor) for tensor in [hidden, *made]):
        return "it returns more than its hidden rows"
    if _given(calls[first]) is not hidden or calls[attention].kwargs.get("hidden_states") is not made[2]:
        return "its attention does not read the norm of what comes in"
    if calls[attention].kwargs.get("position_embeddings") is not call.kwargs.get("position_embeddings"):
        return "it rotates by other frequencies than it is given"
    middle = hidden + attended[0]
    if not torch.equal(_given(calls[second]), middle) or _given(calls[mlp]) is not made[3]:
        return "its second norm does not read the sum of what came in and what was attended"
    if not torch.equal(call.output, middle + made[0]) or len(calls[mlp].args) + len(calls[mlp].kwargs) != 1:
        return "it does not add its MLP's output, alone, to what came before it"
    inner: Callable[[torch.Tensor], torch.Tensor] = mlps[mlp] if mlp in mlps else _whole(mlp)
    return FusedLayer(norms[first], attentions[attention], norms[second], inner)


def _whole(mlp: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A part that is left as it is, over rows."""

    def run(rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = mlp(rows[None])
        return out

    return run


def _layer_forward(part: nn.Module, layer: FusedLayer) -> Callable[..., Any]:
    own = part.forward

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        step, rotation = kwargs.get("step"), kwargs.get("position_embeddings")
        if not isinstance(step, CellStep) or args or rotation is None:
            return own(hidden_states, *args, **kwargs)
        return layer(hidden_states, rotation, step)

    return forward


def _head_forward(head: Any, tilings: Tilings) -> Callable[[torch.Tensor], torch.Tensor]:
    own = head.forward
    weight = head.weight.data

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        tiling = tilings.choose(rows.shape[0], *weight.shape)
        if tiling is None or tiling.parts > 1:
            out: torch.Tensor = own(x)
            return out
        return product(rows, weight, tiling)[0].view(*x.shape[:-1], -1)

    return forward


def _with_weights(part: nn.Module) -> dict[str, Any]:
    """Children that hold parameters, by name; one without any (an activation) is no obstacle."""
    return {name: child for name, child in part.named_children() if any(True for _ in child.parameters())}


def _is_plain(part: nn.Module, dtype: torch.dtype) -> bool:
    return type(part) is nn.Linear and part.weight.dtype == dtype and part.weight.is_contiguous()


def _merge(linears: list[Any]) -> torch.Tensor:
    """One weight [sum of N, K] of which each layer's own becomes a view."""
    if len(linears) == 1:
        weight: torch.Tensor = linears[0].weight.data
        return weight
    merged = torch.cat([linear.weight.data for linear in linears])
    at = 0
    for linear in linears:
        size = linear.weight.shape[0]
        linear.weight.data = merged[at : at + size]
        at += size
    if merged.is_cuda:
        # What the apart weights left is too small for the next merged one: kept, it would add up to the model again.
        torch.cuda.empty_cache()
    return merged


def _given(call: Call) -> Any:
    """The one input of a norm, an MLP or a layer."""
    return call.args[0] if call.args else call.kwargs.get("hidden_states", next(iter(call.kwargs.values()), None))


def _plain_norm(x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * (norm.weight.float() + norm.offset)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [1, W, heads, D], cos and sin [1, W, rotated]."""
    rotated = cos.shape[-1]
    turning, rest = x[..., :rotated], x[..., rotated:]
    low, high = turning.chunk(2, -1)
    turned = turning * cos[:, :, None].float() + torch.cat([-high, low], -1) * sin[:, :, None].float()
    return torch.cat([turned, rest], -1)
