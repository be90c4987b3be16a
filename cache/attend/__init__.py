"""Attention over a prepared step: store the rows' K/V in the pool, then let each row attend its run (DESIGN D2).

`reference` is the meaning. `cpu_runs` serves on CPU, `triton_cells` on CUDA; triton is
imported only there.
"""

from __future__ import annotations

import torch

from cache.attend import cpu_runs
from cache.geometry import FP8, FP8_MAX, InvalidProgram, KvScales, Reach
from cache.step import CellStep

__all__ = ["attend", "attend_stored", "store"]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    step: CellStep,
    *,
    reach: Reach,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [W, H, Dk], key [W, KV, Dk], value [W, KV, Dv] -> [W, H, Dv] in query's dtype.

    Writes all W rows' K/V to the layer's pool (padding lands in the scratch row), in the pool's dtype, before any row
    reads: a row sees itself and earlier rows of its sequence in the same step. Query head h reads K/V head
    h // (H // KV). Calling it again for the same layer (KV-shared layers) stores the same rows again.

    softcap: scores become cap * tanh(scores * scale / cap).
    sinks: [H] logits, one more softmax column per head that has no value.
    Raises InvalidProgram, before anything is written, when the shapes or the reach disagree with the step.
    """
    if not 0 <= layer < len(step.pool.keys):
        raise InvalidProgram(f"layer {layer} owns no K/V: the pool has {len(step.pool.keys)} layers")
    step = step.rings.get(reach, step)
    keys, values = step.pool.keys[layer], step.pool.values[layer]
    _check_shapes(query, key, value, layer, step, keys, values)
    if reach not in step.runs:
        raise InvalidProgram(f"layer {layer} reads {reach}, but the step was prepared for {sorted(step.runs)}")
    if sinks is not None and sinks.shape != (query.shape[1],):
        raise InvalidProgram(f"layer {layer} has sinks {list(sinks.shape)} for {query.shape[1]} query heads")
    scales = step.pool.scales[layer]
    store(keys, step.write_rows, key, scales.key)
    store(values, step.write_rows, value, scales.value)
    return _read(query, keys, values, scales, step, reach, scale, softcap, sinks)


def attend_stored(
    query: torch.Tensor,
    layer: int,
    step: CellStep,
    *,
    reach: Reach,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attend` where a kernel has stored the rows' K/V already. query [W, H, Dk] -> [W, H, Dv]."""
    step = step.rings.get(reach, step)
    keys, values, scales = step.pool.keys[layer], step.pool.values[layer], step.pool.scales[layer]
    return _read(query, keys, values, scales, step, reach, scale, softcap, sinks)


def store(stored: torch.Tensor, pool_rows: torch.Tensor, new: torch.Tensor, scale: float) -> None:
    """Write new [W, KV, D] into stored [rows, KV, D] at pool_rows [W] i64, in stored's dtype.

    scale: FP8 holds new / scale, cut to its range: what lies beyond would be stored as NaN. A NaN stays one.
    """
    if stored.dtype != FP8:
        stored.index_copy_(0, pool_rows, new.to(stored.dtype))
        return
    if scale != 1.0:
        new = new.float() * (1.0 / scale)
    # index_copy_ knows no FP8, and a byte is a byte.
    as_bytes = new.clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
    stored.view(torch.uint8).index_copy_(0, pool_rows, as_bytes)


def _read(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: KvScales,
    step: CellStep,
    reach: Reach,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    if query.device.type == "cuda":
        from cache.attend import triton_cells

        return triton_cells.attend_cells(
            query, keys, values, step, reach=reach, scale=scale, softcap=softcap, sinks=sinks, scales=scales
        )
    return cpu_runs.attend_cells(
        query, keys, values, step, reach=reach, scale=scale, softcap=softcap, sinks=sinks, scales=scales
    )


def _check_shapes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    step: CellStep,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    for name, rows, stored in (("key", key, keys), ("value", value, values)):
        if rows.shape != (step.width, *stored.shape[1:]):
            raise InvalidProgram(
                f"layer {layer}'s {name} is {list(rows.shape)}: the step has {step.width} rows and the pool stores "
                f"{list(stored.shape[1:])} (heads, width) a cell"
            )
    if query.dim() != 3 or query.shape[0] != step.width or query.shape[2] != keys.shape[2]:
        raise InvalidProgram(
            f"layer {layer}'s query is {list(query.shape)}: expected [{step.width}, heads, {keys.shape[2]}]"
        )
    if query.shape[1] % keys.shape[1] != 0:
        raise InvalidProgram(
            f"layer {layer} has {query.shape[1]} query heads over {keys.shape[1]} K/V heads: not a whole number each"
        )
