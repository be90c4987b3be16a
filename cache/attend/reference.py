"""What attention over cells means, as a mask over the pool: slow, obviously right, the oracle of every other path.

A row sees exactly the pool rows of its run. Works on any device and with any mix of dtypes; the softmax is float32 or
wider. A row's scores never touch a cell it does not see, so whatever lies in such a cell (NaN included) cannot leak.
"""

from __future__ import annotations

import torch

from cache.geometry import UNSCALED, KvScales, Reach
from cache.step import CellStep


def visible_rows(step: CellStep, reach: Reach, num_pool_rows: int) -> torch.Tensor:
    """bool [W, num_pool_rows]: which pool rows each row of the step sees."""
    run = step.runs[reach]
    page_cells = step.pages.shape[1]
    mask = torch.zeros(step.width, num_pool_rows, dtype=torch.bool, device=step.pages.device)
    for row in range(step.width):
        first = int(run.start[row])
        positions = torch.arange(first, first + int(run.count[row]), device=step.pages.device)
        page = step.page_table[int(step.table_row[row])][positions // page_cells]
        mask[row, step.pages[page.long(), positions % page_cells].long()] = True
    return mask


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
    exact = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // keys.shape[1]
    mask = visible_rows(step, reach, keys.shape[0])
    out = []
    for row in range(step.width):
        k = (keys[mask[row]].to(exact) * scales.key).repeat_interleave(group, dim=1)  # [count, H, Dk]
        v = (values[mask[row]].to(exact) * scales.value).repeat_interleave(group, dim=1)  # [count, H, Dv]
        scores = torch.einsum("hd,nhd->hn", query[row].to(exact), k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(exact)[:, None]], dim=1)
        weights = torch.softmax(scores, dim=1)[:, : k.shape[0]]
        out.append(torch.einsum("hn,nhd->hd", weights, v))
    return torch.stack(out).to(query.dtype)
