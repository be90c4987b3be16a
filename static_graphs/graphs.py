"""How anything here becomes a CUDA graph: run until nothing is left to compile, then captured. Engine thread only."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

WARMUP_RUNS = 2
"""Eager runs before a capture: Triton compiles and cuBLAS takes its workspace outside the graph."""

T = TypeVar("T")


def captured(run: Callable[[], T], memory: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """-> the graph of `run`, and what it returned, which each replay writes again.

    memory: of torch.cuda.graph_pool_handle, shared by graphs that never run at once; None: its own.
    """
    for _ in range(WARMUP_RUNS):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
        result = run()
    return graph, result


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """Keep the collector from freeing device memory in the middle of a capture."""
    gc.collect()
    gc.freeze()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        gc.unfreeze()
