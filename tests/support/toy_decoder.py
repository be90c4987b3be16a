"""A decoder of a few lines that serves cells, and the same decoder as plain attention over one whole sequence.

Layers see everything and a window of 4 by turns. Weights are seeded and so wide that the largest logit leads clearly:
greedy tokens vary, and are the same on every device and in every mix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from cache.attend import attend, store
from cache.geometry import FP8, Geometry, KvScales, LayerGeometry, Reach
from cache.step import CellStep
from static_graphs.binding import BoundLayer

VOCAB, DIM, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 32, 64, 4, 2, 16, 64
REACHES = (Reach(), Reach("window", 4))


class ToyLayer(nn.Module):
    """Attention and a small MLP over [1, W, DIM], bound as a transformers layer is."""

    def __init__(self, layer: int, reach: Reach, fp8: KvScales | None) -> None:
        super().__init__()
        self.cell_layer = BoundLayer(layer, reach)
        self.fp8 = fp8
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM)
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, hidden: torch.Tensor, step: CellStep | None) -> torch.Tensor:
        """step None: the rows are one whole sequence, from position 0, and nothing is cached."""
        width = hidden.shape[1]
        qkv = self.qkv(_norm(hidden[0])).view(width, HEADS + 2 * KV_HEADS, HEAD_DIM)
        query, key, value = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        layer, reach = self.cell_layer.layer, self.cell_layer.reach
        if step is None:
            if self.fp8 is not None:
                key, value = _rounded(key, self.fp8.key), _rounded(value, self.fp8.value)
            seen = _attend_plainly(query, key, value, reach)
        else:
            seen = attend(query, key, value, layer, step, reach=reach, scale=HEAD_DIM**-0.5)
        hidden = hidden + self.out(seen.reshape(1, width, -1))
        return hidden + self.down(torch.relu(self.up(_norm(hidden))))


class ToyBody(nn.Module):
    def __init__(self, num_layers: int, fp8: KvScales | None) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(CONTEXT, DIM)
        self.layers = nn.ModuleList(ToyLayer(layer, REACHES[layer % 2], fp8) for layer in range(num_layers))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, step: CellStep | None) -> torch.Tensor:
        hidden = (self.tokens(tokens) + self.positions(positions))[None]
        for layer in self.layers:
            hidden = layer(hidden, step)
        return _norm(hidden[0])


class ToyDecoder:
    """`engine.create.ServedModel`, with the eager continuation of one sequence as its oracle.

    fp8: every layer's scales for K/V in FP8, which the oracle then rounds as cells do.
    """

    vocab_size = VOCAB
    max_model_len = CONTEXT

    def __init__(self, device: str = "cpu", *, num_layers: int = 2, seed: int = 0, fp8: KvScales | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.body = ToyBody(num_layers, fp8)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        with torch.no_grad():
            for weight in (*self.body.parameters(), *self.head.parameters()):
                weight.normal_(0.0, 1.0 if weight.shape[0] in (VOCAB, CONTEXT) else 0.2, generator=generator)
                weight.requires_grad_(False)
        self.device = torch.device(device)
        self.dtype = torch.float32
        self.body.to(self.device)
        self.head.to(self.device)
        self.geometry = Geometry(
            tuple(LayerGeometry(KV_HEADS, HEAD_DIM, HEAD_DIM, layer.cell_layer.reach) for layer in self.body.layers),
            () if fp8 is None else (fp8,) * num_layers,
        )
        self.fail_on: int | None = None
        """A token whose forward raises."""
        self._known: dict[tuple[int, ...], int] = {}

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, step: CellStep) -> torch.Tensor:
        if self.fail_on is not None and (tokens == self.fail_on).any():
            raise RuntimeError(f"token {self.fail_on} broke the model")
        return self.body(tokens, positions, step)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)

    @torch.no_grad()
    def plain_hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        """[T, DIM] of one sequence, without cells."""
        ids = torch.tensor(tokens, device=self.device)
        return self.body(ids, torch.arange(len(tokens), device=self.device), None)

    def next_token(self, tokens: Sequence[int]) -> int:
        """Greedy, by plain attention over the whole sequence."""
        tokens = tuple(tokens)
        if tokens not in self._known:
            with torch.no_grad():
                self._known[tokens] = int(self.head(self.plain_hidden(tokens)[-1]).argmax())
        return self._known[tokens]

    def continuation(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.next_token(tokens))
        return tokens[len(prompt) :]


def _rounded(new: torch.Tensor, scale: float) -> torch.Tensor:
    """[T, KV, D] as it is read back from cells in FP8."""
    stored = torch.empty(new.shape, dtype=FP8, device=new.device)
    store(stored, torch.arange(len(new), device=new.device), new, scale)
    return stored.float() * scale


def _norm(hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.layer_norm(hidden, (DIM,))


def _attend_plainly(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, reach: Reach) -> torch.Tensor:
    """query [T, H, D], key and value [T, KV, D] -> [T, H, D]."""
    at = torch.arange(query.shape[0], device=query.device)
    distance = at[:, None] - at[None, :]
    sees = (distance >= 0) & (distance < (reach.size or CONTEXT))
    key, value = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (key, value))
    scores = torch.einsum("thd,shd->hts", query, key) * HEAD_DIM**-0.5
    return torch.einsum("hts,shd->thd", scores.masked_fill(~sees, -torch.inf).softmax(-1), value)
