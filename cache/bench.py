"""What the cell cache costs the host: `python -m cache.bench` prints one JSON line, times in microseconds a step.

A step is declare, prepare and commit. On CUDA that is host time too: the upload is asynchronous.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

from cache.cell_cache import CellCache
from cache.cells import I32
from cache.geometry import CacheConfig, Geometry, LayerGeometry, Reach

# One K/V element a layer: the table's cost does not depend on the bytes.
GEOMETRY = Geometry((LayerGeometry(1, 1, 1), LayerGeometry(1, 1, 1, Reach("window", 1024))))


def filled_cache(device: torch.device, capacity: int, num_sequences: int, length: int) -> tuple[CellCache, I32]:
    """A cache with `num_sequences` sequences of `length` positions, and their ids."""
    config = CacheConfig(capacity, max_write=max(512, num_sequences), kv_dtype=torch.float32)
    cache = CellCache(GEOMETRY, config, device)
    seq_ids: I32 = np.array([cache.seq_new() for _ in range(num_sequences)], np.int32)
    for seq in seq_ids.tolist():
        for start in range(0, length, config.max_write):
            run_step(cache, np.full(min(config.max_write, length - start), seq, np.int32))
    return cache, seq_ids


def fragment(cache: CellCache, seq_ids: I32, num_holes: int) -> None:
    """Leave the only free cells as holes, scattered one by one over the whole pool."""
    filler, holes = cache.seq_new(), cache.seq_new()
    while cache.free_cells:
        num = min(512, cache.free_cells)
        owners = np.full(num, filler, np.int32)
        owners[:: max(1, cache.capacity_cells // num_holes)] = holes
        run_step(cache, owners)
    cache.seq_rm(holes)


def run_step(cache: CellCache, owners: I32) -> None:
    cache.declare_step(owners)
    cache.prepare_step(owners.size)
    cache.commit_step()


def time_steps(cache: CellCache, owners: I32, steps: int) -> dict[str, float]:
    """Median and 99th percentile of `steps` steps; pauses of other processes show in the second."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        run_step(cache, owners)
        times.append((time.perf_counter() - start) * 1e6)
    return {"p50": round(statistics.median(times), 1), "p99": round(float(np.percentile(times, 99)), 1)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m cache.bench", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cells", type=int, default=1 << 20)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args(arguments)

    cache, seq_ids = filled_cache(torch.device(options.device), options.cells, options.sequences, options.length)
    results: dict[str, object] = {"decode": time_steps(cache, seq_ids, options.steps)}
    results["prefill_512"] = time_steps(cache, np.full(512, seq_ids[0], np.int32), min(options.steps, 100))
    steps = 100
    fragment(cache, seq_ids, 2 * steps * options.sequences)
    results["decode_fragmented"] = time_steps(cache, seq_ids, min(steps, cache.free_cells // options.sequences))
    start = time.perf_counter()
    clone = cache.seq_clone(int(seq_ids[0]))
    results["clone"] = {"cells": cache.pos(clone), "us": round((time.perf_counter() - start) * 1e6, 1)}
    cache.close()
    fields = {name: getattr(options, name) for name in ("device", "cells", "sequences", "length")}
    print(json.dumps(fields | {"us_per_step": results}))


if __name__ == "__main__":
    main()
