"""Attention over cells on CPU: the serving path, equal to `reference` within float rounding.

Rows are served in two ways, planned once per step and reach and reused by every layer:

- *Blocks*: neighbouring rows of one sequence (a prefill chunk). Their cells are one slice of the pool, or gathered
  once, and go through scaled_dot_product_attention with an explicit mask.
- *Bags*: everything shorter, above all decodes. Scores are dot products sampled where a row meets its own cells
  (sampled_addmm), outputs are weighted sums of rows of the pool (embedding_bag). Neither copies K or V: gathering 32
  rows' cells costs twice as long as both together.

A bag's rows are padded to its longest with a repeated cell of the same run, scored -inf. So a weight of zero never
meets a cell that the row may not see, and what lies there (NaN included) cannot leak.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from cache.geometry import UNSCALED, KvScales, Reach
from cache.step import CellStep

BLOCK_ROWS = 128
"""Most rows of a block: early rows of a long chunk then skip the cells that only later rows see."""
MIN_BLOCK_ROWS = 16
"""Fewest rows for which a block's fixed cost is below that of bags."""
BAG_WASTE = 2048
"""Padded cells a bag may hold. A second bag costs as much as visiting about this many cells."""
BAG_DTYPES = (torch.float32, torch.float64)
"""What sampled_addmm computes in."""

with warnings.catch_warnings():
    # Said once a process, about an API that exists since 1.12 (and, by older releases, about checks that are off).
    # Here nobody else's filters turn it into an error.
    warnings.filterwarnings("ignore", message="Sparse")
    torch.sparse_csr_tensor([0, 0], [], [], (1, 1), check_invariants=False)


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows of one sequence."""

    rows: slice
    cells: slice | torch.Tensor  # pool rows of the union of the rows' runs, L of them: a slice, or [L] i64
    bias: torch.Tensor  # [rows, L]: 0 where the row sees the cell, -inf elsewhere


@dataclass(frozen=True, slots=True)
class Bag:
    """Rows of any sequences, padded to the longest run among them, L cells."""

    rows: torch.Tensor  # [n] i64
    columns: torch.Tensor  # [n * H * L] i64: (pool row, K/V head) flattened
    offsets: torch.Tensor  # [n * H] i64: where each row and head's columns begin
    pattern: torch.Tensor  # sparse CSR [n * H, pool rows * KV] of zeros over `columns`
    bias: torch.Tensor | None  # [n, 1, L]: -inf where padded; None without padding


@dataclass(frozen=True, slots=True)
class Plan:
    blocks: tuple[Block, ...]
    bags: tuple[Bag, ...]


def attend_cells(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: CellStep,
    *,
    reach: Reach,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: KvScales = UNSCALED,
) -> torch.Tensor:
    """query [W, H, Dk], keys [rows, KV, Dk], values [rows, KV, Dv], sinks [H] -> [W, H, Dv] in query's dtype.

    scales: what is stored stands for itself times these.
    """
    scale *= scales.key
    key = (__name__, reach, query.shape[1], query.dtype, keys.dtype, keys.shape)
    plan = step.plans.get(key)
    if not isinstance(plan, Plan):
        plan = step.plans[key] = plan_rows(step, reach, query.shape[1], query.dtype, keys)
    if sinks is not None:
        sinks = sinks.to(torch.promote_types(query.dtype, torch.float32))
    if not plan.blocks and len(plan.bags) == 1 and scales.value == 1.0:
        return _attend_bag(query, keys, values, plan.bags[0], scale, softcap, sinks)
    out = query.new_empty(*query.shape[:2], values.shape[2])
    for block in plan.blocks:
        out[block.rows] = _attend_block(query[block.rows], keys, values, block, scale, softcap, sinks)
    for bag in plan.bags:
        out[bag.rows] = _attend_bag(query[bag.rows], keys, values, bag, scale, softcap, sinks)
    return out if scales.value == 1.0 else out.mul_(scales.value)


def _attend_bag(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bag: Bag,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query [n, H, Dk] -> [n, H, Dv]."""
    num_rows, num_heads, k_dim = query.shape
    flat_query, flat_keys = query.reshape(-1, k_dim), keys.reshape(-1, k_dim)
    sampled = torch.sparse.sampled_addmm(bag.pattern, flat_query, flat_keys.t(), beta=0.0, alpha=scale)
    scores = sampled.values().view(num_rows, num_heads, -1)
    weights = _softmax(scores, bag.bias, softcap, None if sinks is None else sinks[:, None])
    return F.embedding_bag(
        bag.columns,
        values.reshape(-1, values.shape[2]),
        bag.offsets,
        mode="sum",
        per_sample_weights=weights.reshape(-1),
    ).view(num_rows, num_heads, -1)


def _attend_block(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block: Block,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query [n, H, Dk] -> [n, H, Dv]."""
    q = query.transpose(0, 1)  # [H, n, Dk]
    if isinstance(block.cells, slice):
        k, v = keys[block.cells], values[block.cells]
    else:
        # index_select copies whole rows: twice as fast as keys[cells].
        k, v = keys.index_select(0, block.cells), values.index_select(0, block.cells)
    k, v = k.transpose(0, 1), v.transpose(0, 1)  # [KV, L, D]
    if softcap is None and sinks is None:
        k, v = k.to(q.dtype), v.to(q.dtype)
        out = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=block.bias, scale=scale, enable_gqa=q.shape[0] != k.shape[0]
        )[0]
        return out.transpose(0, 1)
    exact = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(exact).reshape(k.shape[0], -1, k.shape[2])  # [KV, (H // KV) * n, Dk]
    scores = (grouped @ k.to(exact).transpose(1, 2) * scale).view(*q.shape[:2], -1)  # [H, n, L]
    weights = _softmax(scores, block.bias.to(exact), softcap, None if sinks is None else sinks[:, None, None])
    out = weights.reshape(k.shape[0], -1, k.shape[1]) @ v.to(exact)
    return out.view(*q.shape[:2], -1).transpose(0, 1).to(query.dtype)


def _softmax(
    scores: torch.Tensor, bias: torch.Tensor | None, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention weights over the last axis of scaled scores; `sinks` takes its share and is dropped."""
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if sinks is None:
        return torch.softmax(scores, -1)
    with_sinks = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    return torch.softmax(with_sinks, -1)[..., :-1]


def plan_rows(step: CellStep, reach: Reach, num_heads: int, dtype: torch.dtype, keys: torch.Tensor) -> Plan:
    """Cut the step's rows into blocks and bags. Reads the step's tensors on the host."""
    cells = _CellLists(step, reach)
    use_bags = dtype in BAG_DTYPES and dtype == keys.dtype
    blocks: list[Block] = []
    short: list[np.ndarray] = []
    for rows in cells.segments():
        if use_bags and rows.stop - rows.start < MIN_BLOCK_ROWS:
            short.append(np.arange(rows.start, rows.stop))
            continue
        for first in range(rows.start, rows.stop, BLOCK_ROWS):
            blocks.append(_plan_block(cells, slice(first, min(first + BLOCK_ROWS, rows.stop)), dtype))
    bags: list[Bag] = []
    if short:
        group = num_heads // keys.shape[1]
        kv_head = np.arange(num_heads) // group
        for rows_of_bag in _cut_bags(cells.ends - cells.starts, np.concatenate(short)):
            bags.append(_plan_bag(cells, rows_of_bag, kv_head, dtype, keys))
    return Plan(tuple(blocks), tuple(bags))


class _CellLists:
    """The step's runs on the host: row r reads positions starts[r] .. ends[r] - 1 of table row owners[r]."""

    def __init__(self, step: CellStep, reach: Reach) -> None:
        run = step.runs[reach]
        self.starts = run.start.numpy().astype(np.int64)
        self.ends = self.starts + run.count.numpy()
        self.owners = step.table_row.numpy()
        self._page_table = step.page_table.numpy()
        self._pages = step.pages.numpy()

    def pool_rows(self, owners: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """i64 pool row of each (owner, position), broadcast."""
        page_cells = self._pages.shape[1]
        pages = self._page_table[owners, positions // page_cells]
        rows: np.ndarray = self._pages[pages, positions % page_cells].astype(np.int64)
        return rows

    def segments(self) -> Iterator[slice]:
        """Maximal stretches of rows of one owner whose runs end one after the other (or together)."""
        advance = np.diff(self.ends)
        cuts = (np.diff(self.owners) != 0) | (advance < 0) | (advance > 1)
        edges = [0, *(np.flatnonzero(cuts) + 1).tolist(), len(self.ends)]
        return (slice(first, last) for first, last in itertools.pairwise(edges))


def _plan_block(cells: _CellLists, rows: slice, dtype: torch.dtype) -> Block:
    starts, ends = cells.starts[rows, None], cells.ends[rows, None]
    positions = np.arange(starts.min(), ends.max())
    pool_rows = cells.pool_rows(cells.owners[rows.start], positions)
    visible = (positions >= starts) & (positions < ends)  # [n, L]
    bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(torch.from_numpy(~visible), float("-inf"))
    if (np.diff(pool_rows) == 1).all():
        return Block(rows, slice(int(pool_rows[0]), int(pool_rows[-1]) + 1), bias)
    return Block(rows, torch.from_numpy(pool_rows), bias)


def _cut_bags(counts: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
    """Rows grouped so that no group pads more than BAG_WASTE cells; one group keeps the rows' order."""
    longest_first = rows[np.argsort(-counts[rows], kind="stable")]
    bags: list[np.ndarray] = []
    while len(longest_first):
        waste = np.cumsum(counts[longest_first[0]] - counts[longest_first])
        fits = int(np.searchsorted(waste, BAG_WASTE, side="right"))
        bags.append(np.sort(longest_first[:fits]))
        longest_first = longest_first[fits:]
    return bags


def _plan_bag(cells: _CellLists, rows: np.ndarray, kv_head: np.ndarray, dtype: torch.dtype, keys: torch.Tensor) -> Bag:
    ends = cells.ends[rows, None]
    positions = cells.starts[rows, None] + np.arange((cells.ends - cells.starts)[rows].max())  # [n, L]
    padded = positions >= ends
    pool_rows = cells.pool_rows(cells.owners[rows, None], np.minimum(positions, ends - 1))
    num_kv_heads, length, num_bags = keys.shape[1], positions.shape[1], len(rows) * len(kv_head)
    columns = torch.from_numpy((pool_rows[:, None, :] * num_kv_heads + kv_head[:, None]).reshape(-1))
    edges = torch.arange(0, (num_bags + 1) * length, length)
    pattern = torch.sparse_csr_tensor(
        edges,
        columns,
        torch.zeros(len(columns), dtype=dtype),
        (num_bags, keys.shape[0] * num_kv_heads),
        check_invariants=False,
    )
    bias = torch.zeros(padded.shape, dtype=dtype).masked_fill_(torch.from_numpy(padded), float("-inf"))
    return Bag(torch.from_numpy(rows), columns, edges[:-1], pattern, bias[:, None] if padded.any() else None)
