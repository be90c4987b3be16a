"""From logits to token ids, on the device that holds the logits. Stateless; knows rows, not sessions.

`sample` is the served draw: temperature -> top_k -> top_p -> min_p -> Gumbel-max, whose noise is a hash of
(seed, position, token id) (`noise.py`). Every filter keeps a prefix of one order: logit descending, ties to the lower
id. Probability mass is counted in integers, so sums are exact in any order and a cut never depends on the batch.
No function here waits for the device, and no shape depends on what the logits hold: only on R, V and `Route`.

`sample_rows` and `sample_argmax` are the seed's contract (SAM-1..SAM-7), where the caller brings the coin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from static_graphs.noise import exponentials, row_keys

GREEDY_BELOW = 1e-5
"""A lower temperature is greedy: dividing by it would overflow float32."""
MAX_CANDIDATES = 256
"""Rows whose top_k is at most this are drawn from their largest logits alone; past it, searching all V is faster."""

_BLOCK = 2**19
"""Logits the host works on at a time, so that its dozen passes over them stay in cache."""
_LIKELY = 128
"""Candidates the host tries before it searches the vocabulary."""
_MASS_ONE = 2.0**40
"""Integer mass of the likeliest token. 2**40 x 262,144 tokens stays below 2**63; a token 28 nats down has mass 0."""


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """One entry a row, on the device of the logits."""

    temperature: Tensor  # [R] f32 or f64; below GREEDY_BELOW is greedy
    top_k: Tensor  # [R] i64; 0 is off
    top_p: Tensor  # [R] f64 in [0, 1]; 1 is off, 0 keeps the top token
    min_p: Tensor  # [R] f32 or f64 in [0, 1]; 0 is off
    seeds: Tensor  # [R] i64, any value
    positions: Tensor  # [R] i64, of the token being drawn

    PACKED: ClassVar = 6
    """Lines of `packed`."""

    @staticmethod
    def packed(
        temperature: NDArray[np.float64],
        top_p: NDArray[np.float64],
        min_p: NDArray[np.float64],
        top_k: NDArray[np.int64],
        seeds: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """[R] each -> i64[PACKED, R], which one copy brings to a device: the first three are bits of f64."""
        floats = np.stack((temperature, top_p, min_p)).view(np.int64)
        return np.concatenate((floats, np.stack((top_k, seeds, positions))))

    @classmethod
    def unpacked(cls, packed: Tensor) -> SampleInputs:
        """Views of i64[PACKED, R]."""
        temperature, top_p, min_p = packed[:3].view(torch.float64).unbind()
        top_k, seeds, positions = packed[3:].unbind()
        return cls(temperature, top_k, top_p, min_p, seeds, positions)

    def rows(self, index: Tensor | slice) -> SampleInputs:
        """index: i64[r] or a slice -> the inputs of those rows."""
        return SampleInputs(**{field.name: getattr(self, field.name)[index] for field in fields(self)})


@dataclass(frozen=True, slots=True)
class Route:
    """What the rows of one call need, decided on the host: constants of a captured call."""

    has_random: bool
    candidates: int
    """Largest logits looked at a row; 0 looks at the whole vocabulary."""
    has_top_k: bool
    has_top_p: bool
    has_min_p: bool

    @classmethod
    def of(
        cls,
        temperature: NDArray[np.float64],
        top_k: NDArray[np.int64],
        top_p: NDArray[np.float64],
        min_p: NDArray[np.float64],
        vocab_size: int,
    ) -> Route:
        """The narrowest route that is right for all of these rows."""
        is_random = temperature >= GREEDY_BELOW
        ks, ps, mins = top_k[is_random], top_p[is_random], min_p[is_random]
        has_top_k = (ks > 0) & (ks < vocab_size)
        candidates = 0
        if ks.size and has_top_k.all() and ks.max() <= MAX_CANDIDATES:
            # Rounded up, so that neighbouring top_k share one captured shape.
            candidates = min(vocab_size, max(16, 1 << int(ks.max() - 1).bit_length()))
        return cls(
            has_random=bool(is_random.any()),
            candidates=candidates,
            has_top_k=bool(has_top_k.any()),
            has_top_p=bool((ps < 1.0).any()),
            has_min_p=bool((mins > 0.0).any()),
        )


def sample(logits: Tensor, inputs: SampleInputs, route: Route) -> Tensor:
    """Draw one token a row.

    logits: [R, V] f32, bf16 or f16, after bias, penalties and masks (-inf is never drawn while anything else is there);
    left as they are. -> i64[R]. A row's id depends on its own logits, inputs and nothing else. A row whose largest
    logit is no finite number, or which holds a NaN, gives the id of `sample_argmax`.
    """
    if not route.has_random:
        return sample_argmax(logits)
    if logits.is_cuda:
        from static_graphs.kernels import sampling

        return sampling.draw(logits, inputs, has_cuts=route.has_top_k or route.has_top_p)
    rows, block = logits.shape[0], max(1, _BLOCK // logits.shape[-1])
    if rows <= block:
        return _sample_block(logits, inputs, route)
    slices = [slice(start, start + block) for start in range(0, rows, block)]
    return torch.cat([_sample_block(logits[some], inputs.rows(some), route) for some in slices])


def _sample_block(logits: Tensor, inputs: SampleInputs, route: Route) -> Tensor:
    """On the host: it looks at what it has computed."""
    logits = logits.to(torch.float32)
    peak = logits.amax(dim=-1, keepdim=True)
    if route.candidates:
        drawn = _draw_from_candidates(logits, peak, inputs, route)
    elif route.has_top_p or route.has_min_p:
        drawn = _draw_likely_first(logits, peak, inputs, route)
    else:
        drawn = _draw_from_all(logits, peak, inputs, route)
    is_settled = (inputs.temperature < GREEDY_BELOW) | ~peak.squeeze(-1).isfinite()
    return torch.where(is_settled, sample_argmax(logits), drawn) if is_settled.any() else drawn


def sample_argmax(logits: Tensor) -> Tensor:
    """logits [R, V] -> i64[R]: the largest logit, ties to the lowest id (SAM-1, SAM-7). NaN is larger than all."""
    if logits.is_cuda:
        from static_graphs.kernels import sampling

        return sampling.argmax_rows(logits)[0]
    return logits.to(torch.float32).argmax(dim=-1)


def marked(ids: Tensor, is_finite: Tensor) -> Tensor:
    """i64[R] drawn ids for the host, as -1 - id where the model's own row is not finite. is_finite: bool[R].

    What a draw makes of such a row depends on its way, so neither the id nor its score would tell.
    """
    return torch.where(is_finite, ids, ~ids)


@dataclass(frozen=True, slots=True)
class Best:
    """What one read of R rows of logits, as the model gave them, tells."""

    ids: Tensor  # [R] i64, as of `sample_argmax`
    is_finite: Tensor  # [R] bool: the largest is a finite number: no NaN, no infinity, not all ruled out
    marked: Tensor  # [R] i64: `marked(ids, is_finite)`

    @classmethod
    def of(cls, logits: Tensor) -> Best:
        if logits.is_cuda:
            from static_graphs.kernels import sampling

            ids, peak = sampling.argmax_rows(logits)
        else:
            ids, peak = sample_argmax(logits), logits.amax(1)
        is_finite = peak.isfinite()
        return cls(ids, is_finite, marked(ids, is_finite))

    def mark(self, drawn: Tensor) -> Tensor:
        """`marked` for ids that were drawn from these rows."""
        return self.marked if drawn is self.ids else marked(drawn, self.is_finite)

    def first(self, rows: int) -> Best:
        """Of the first `rows` rows."""
        return Best(self.ids[:rows], self.is_finite[:rows], self.marked[:rows])


def largest(logits: Tensor, count: int) -> Tensor:
    """logits f32[R, V] -> i64[R, count]: ids of the largest, in order, ties to the lower id, exactly.

    topk alone promises no order among equals, so value and id are joined into one 64-bit key.
    """
    token_ids = torch.arange(logits.shape[-1], device=logits.device)
    keys = _order(logits).to(torch.int64).bitwise_left_shift_(32).sub_(token_ids)
    return keys.topk(count, dim=-1).values.neg_() & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a captured head brings beside its logits, for rows whose logits nothing edits."""

    best: Best
    draw: Callable[[Tensor, bool], Tensor]
    """(i64[SampleInputs.PACKED, R], whether any row has a top_k or top_p) -> i64[R], as `sample` draws."""

    def first(self, rows: int) -> Prepared:
        """Of the first `rows` rows."""
        return Prepared(self.best.first(rows), self.draw)


def keep_prefix(logits: Tensor, weights: Tensor, wanted: Tensor) -> Tensor:
    """The shortest prefix of the order (logit descending, lower id first) whose weight reaches `wanted`.

    weights: i64[R, V] >= 0, equal where logits are equal, unless 0. wanted: i64[R, 1] >= 1. -> bool[R, V].
    Finds the logit at which the prefix ends, 11 + 11 + 10 bits of its order at a time: one histogram of weight a level.
    """
    falling = ~_order(logits)  # ascending is most likely first
    digits = (falling >> 21) + 1024
    rest = wanted
    bins = 2048
    inside: Tensor | None = None
    for shift in (10, 0, None):
        # One bin more collects what earlier levels ruled out.
        histogram = weights.new_zeros((weights.shape[0], bins + 1)).scatter_add_(-1, digits.to(torch.int64), weights)
        running = histogram[:, :bins].cumsum(dim=-1)
        cut = (running < rest).sum(dim=-1, keepdim=True).clamp_(max=bins - 1)
        rest = rest - (running.gather(-1, cut) - histogram.gather(-1, cut))
        inside = digits == cut.to(torch.int32)
        if shift is not None:
            bins = 2048 if shift else 1024
            digits = torch.where(inside, (falling >> shift) & (bins - 1), bins)
    assert inside is not None
    # `inside` is now every token whose logit equals the cut. Each weighs the same: keep as many as the rest needs.
    weight = torch.where(inside, weights, 0).amax(dim=-1, keepdim=True).clamp_(min=1)
    ties = ((rest + weight - 1) // weight).to(torch.int32)
    edge = torch.where(inside, falling, torch.iinfo(torch.int32).min).amax(dim=-1, keepdim=True)
    return (falling < edge) | (inside & (inside.cumsum(dim=-1, dtype=torch.int32) <= ties))


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """float32 log-softmax values of R rows; -inf where the model rules a token out."""

    chosen: Tensor  # [R] f32
    top_ids: Tensor  # [R, k] i64, largest first, ties to the lower id
    top: Tensor  # [R, k] f32


def raw_logprobs(logits: Tensor, chosen_ids: Tensor, k: int) -> RawLogprobs:
    """Log-softmax in float32 of logits [R, V] as the model gave them, for i64[R] chosen ids and the k largest.

    All values of a row take the same two subtractions, so a chosen id that leads has exactly the leader's value.
    A row's values depend on no other row, nor on how many there are: a sum's order is the same for all of them.
    """
    logits = logits.to(torch.float32)
    top_ids = largest(logits, min(k, logits.shape[-1])) if k else chosen_ids.new_empty((chosen_ids.shape[0], 0))
    peak = logits.amax(dim=-1, keepdim=True)
    log_sum = _sum_of_exp(logits, peak).log_()  # >= 0: the peak itself adds 1
    ids = torch.cat((chosen_ids.unsqueeze(-1), top_ids), dim=-1)
    values = (logits.gather(-1, ids) - peak) - log_sum
    return RawLogprobs(chosen=values[:, 0], top_ids=top_ids, top=values[:, 1:])


def _sum_of_exp(logits: Tensor, peak: Tensor) -> Tensor:
    """logits f32[R, V], peak f32[R, 1] -> f32[R, 1]: the sum of exp(logit - peak)."""
    if logits.is_cuda:  # where torch adds up in an order that the number of rows decides
        from static_graphs.kernels.logprobs import sum_of_exp

        return sum_of_exp(logits, peak)
    return (logits - peak).exp_().sum(dim=-1, keepdim=True)


def sample_rows(logits: Tensor, params: Tensor) -> Tensor:
    """The seed's sampler, exact to SAM-1..SAM-5; not the served one.

    logits: [R, V] f32, bf16 or f16. params: f32[R, 4] = temperature, top_p, top_k, coin in [0, 1). -> i64[R].
    Temperature <= 0 is argmax; top_k, where on, overrides top_p.
    """
    logits = logits.to(torch.float32)
    temperature, top_p, top_k, coin = params.to(torch.float64).unsqueeze(-1).unbind(dim=1)  # [R, 1] each
    vocab_size = logits.shape[-1]
    is_greedy = temperature <= 0
    scaled = logits / torch.where(is_greedy, 1.0, temperature).to(torch.float32)
    probs = torch.softmax(scaled, dim=-1)

    # float64 sums: a float32 running sum over a large vocabulary drifts further than a token's own mass.
    running = probs.cumsum(dim=-1, dtype=torch.float64)
    from_all = (running <= coin).sum(dim=-1).clamp_(max=vocab_size - 1)

    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    mass = probs.gather(-1, order).to(torch.float64)
    before = mass.cumsum(dim=-1) - mass
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    has_top_p = ~has_top_k & (top_p > 0) & (top_p < 1)
    ranks = torch.arange(vocab_size, device=logits.device)
    kept = torch.where(has_top_k, ranks < top_k, before <= top_p)  # a prefix of `order`
    running_kept = (mass * kept).cumsum(dim=-1)
    is_hit = kept & (coin * running_kept[:, -1:] < running_kept)
    # The first hit, else the last kept: every rank before the first hit is not one.
    last_kept = kept.sum(dim=-1) - 1
    rank = torch.minimum((~is_hit).cumprod(dim=-1).sum(dim=-1), last_kept)
    from_kept = order.gather(-1, rank.unsqueeze(-1)).squeeze(-1)

    drawn = torch.where((has_top_k | has_top_p).squeeze(-1), from_kept, from_all)
    return torch.where(is_greedy.squeeze(-1), sample_argmax(logits), drawn)


def _draw_from_candidates(logits: Tensor, peak: Tensor, inputs: SampleInputs, route: Route) -> Tensor:
    """Every random row has 1 <= top_k <= route.candidates: its kept tokens are all among its largest logits."""
    token_ids = largest(logits, route.candidates)  # [R, C]
    distance = _distance(logits.gather(-1, token_ids), peak, inputs)
    probs = torch.exp(-distance)
    keep = torch.arange(route.candidates, device=logits.device) < inputs.top_k.unsqueeze(-1)
    if route.has_top_p:
        mass = _mass(probs) * keep
        keep &= mass.cumsum(dim=-1) - mass < _mass_wanted(mass.sum(dim=-1, keepdim=True), inputs)
    if route.has_min_p:
        keep &= distance <= _min_p_distance(inputs)
    return _race_of_candidates(probs, keep, inputs, token_ids)


def _draw_likely_first(logits: Tensor, peak: Tensor, inputs: SampleInputs, route: Route) -> Tensor:
    """What `_draw_from_all` draws, from the largest logits where top_p or min_p ends among them."""
    count = min(_LIKELY, logits.shape[-1])
    token_ids = largest(logits, count)
    distance = _distance(logits.gather(-1, token_ids), peak, inputs)
    probs = torch.exp(-distance)
    keep = distance <= _min_p_distance(inputs)
    if route.has_top_p:
        total = _mass(_distance(logits, peak, inputs).neg_().exp_()).sum(dim=-1, keepdim=True)
        mass = _mass(probs)
        is_off = (inputs.top_p >= 1.0).unsqueeze(-1)
        keep &= is_off | (mass.cumsum(dim=-1) - mass < _mass_wanted(total, inputs))
    # A kept prefix that stops short of the last candidate is the whole of it.
    is_whole = (~keep[:, -1] & (inputs.top_k == 0)) | (inputs.temperature < GREEDY_BELOW)
    drawn = _race_of_candidates(probs, keep, inputs, token_ids)
    others = (~is_whole).nonzero().squeeze(-1)
    if others.numel():
        drawn[others] = _draw_from_all(logits[others], peak[others], inputs.rows(others), route)
    return drawn


def _draw_from_all(logits: Tensor, peak: Tensor, inputs: SampleInputs, route: Route) -> Tensor:
    """Any parameters. Cuts are found by descending the digits of the order, never by sorting."""
    distance = _distance(logits, peak, inputs)
    probs = torch.exp(-distance)
    keep: Tensor | None = None
    if route.has_top_k:
        is_on = (inputs.top_k > 0) & (inputs.top_k < logits.shape[-1])
        wanted = torch.where(is_on, inputs.top_k, logits.shape[-1]).unsqueeze(-1)
        keep = keep_prefix(logits, torch.ones_like(logits, dtype=torch.int64), wanted)
    if route.has_top_p:
        mass = _mass(probs)
        if keep is not None:
            mass *= keep
        total = mass.sum(dim=-1, keepdim=True)
        # Where top_p is off, tokens too unlikely to have any mass stay in.
        nucleus = keep_prefix(logits, mass, _mass_wanted(total, inputs)) | (inputs.top_p >= 1.0).unsqueeze(-1)
        keep = nucleus if keep is None else keep & nucleus
    if route.has_min_p:
        likely = distance <= _min_p_distance(inputs)
        keep = likely if keep is None else keep & likely
    return _race(probs, keep, inputs, torch.arange(logits.shape[-1], device=logits.device, dtype=torch.int32))


def _distance(logits: Tensor, peak: Tensor, inputs: SampleInputs) -> Tensor:
    """How far each token lies below its row's likeliest, after temperature: f32, >= 0, inf where masked."""
    temperature = inputs.temperature.to(torch.float32).unsqueeze(-1)
    return (peak - logits).div_(torch.where(temperature < GREEDY_BELOW, 1.0, temperature))


def _mass(probs: Tensor) -> Tensor:
    return (probs * _MASS_ONE).to(torch.int64)


def _mass_wanted(total: Tensor, inputs: SampleInputs) -> Tensor:
    """total: i64[R, 1] -> i64[R, 1]. A token stays while the mass before it is less than this.

    At least 1, so that the top token always stays.
    """
    wanted = (total.to(torch.float64) * inputs.top_p.to(torch.float64).unsqueeze(-1)).ceil_().to(torch.int64)
    return torch.minimum(wanted, total).clamp_(min=1)


def _min_p_distance(inputs: SampleInputs) -> Tensor:
    """f32[R, 1]: p >= min_p * p_max is distance <= -log(min_p)."""
    return -torch.log(inputs.min_p.to(torch.float32)).unsqueeze(-1)


def _race(probs: Tensor, keep: Tensor | None, inputs: SampleInputs, token_ids: Tensor) -> Tensor:
    """Gumbel-max in its exponential form: each token waits E / p and the first one wins.

    argmin(E / p) = argmax(log p - log E), and -log E is standard Gumbel. -> i64[R], columns of `probs`.
    A token with probability 0 waits forever.
    """
    waits = exponentials(row_keys(inputs.seeds, inputs.positions), token_ids).div_(probs)
    if keep is not None:
        waits.masked_fill_(~keep, torch.inf)
    return waits.argmin(dim=-1)


def _race_of_candidates(probs: Tensor, keep: Tensor, inputs: SampleInputs, token_ids: Tensor) -> Tensor:
    """As `_race`, over i64[R, C] candidates only. -> i64[R] token ids."""
    winners = _race(probs, keep, inputs, token_ids.to(torch.int32))
    return token_ids.gather(-1, winners.unsqueeze(-1)).squeeze(-1)


def _order(logits: Tensor) -> Tensor:
    """f32 -> i32 that compares like the floats do (-0.0 equals 0.0)."""
    bits = (logits + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
