"""`python -m static_graphs.bench`: one decode step of a model shape on a CUDA device, beside its floor.

Random weights at true shapes, random K/V in cells that lie apart, `--context` tokens a row. The floor is the bytes a
step must read (every weight once, every row's K/V once) over the copy bandwidth measured in the same run; the products'
floor counts where it is larger. Then one draw of as many rows, its floor one reading of the logits. Prints one JSON
object a line, as benchmarks.jsonl collects them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import AutoConfig

from cache.cell_cache import CellCache
from cache.figures import figure
from cache.geometry import FP8, CacheConfig
from cache.step import CellStep
from static_graphs.capture import CapturedForwards
from static_graphs.methods import method_table, plan_slices
from static_graphs.model import LoadedModel, model_from_config
from static_graphs.sampler import Route, SampleInputs, sample, sample_argmax
from static_graphs.shapes import SHAPES

DRAWS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (1.0, 0, 1.0, 0.0),
    "top_p 0.9": (1.0, 0, 0.9, 0.0),
    "top_k 50 + top_p 0.9": (1.0, 50, 0.9, 0.0),
}
"""By name: temperature, top_k, top_p, min_p of every row."""
COPY_BYTES = 4 << 30
STEPS = 50
FILL_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of this device, measured in this run."""

    copy_bytes_s: float
    """Read plus written."""
    matmul_flops_s: float


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if not torch.cuda.is_available():
        Console(stderr=True).print("static_graphs.bench needs a CUDA device; on a CPU use python -m engine.bench")
        return 2
    device = torch.device("cuda")
    kv_dtype = FP8 if args.kv_cache_dtype == "fp8" else torch.bfloat16
    ceilings = measure_ceilings(device)
    _print("ceiling", "copy", ceilings.copy_bytes_s / 1e9, "GB/s")
    _print("ceiling", "bf16 matmul 8192", ceilings.matmul_flops_s / 1e12, "TFLOP/s")
    for shape in args.shapes.split(","):
        fields = dict(SHAPES[shape])
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        model = model_from_config(config, device=device, dtype=torch.bfloat16, max_model_len=args.context + 64)
        if not args.unfused:
            from static_graphs.fuse import fuse  # needs triton
            from static_graphs.tiling_table import tilings_for

            fuse(model, tilings_for(device, model.dtype))
        for rows in map(int, args.rows.split(",")):
            case = f"{shape} rows={rows} ctx={args.context}" + ("" if args.cells == "in turn" else f" {args.cells}")
            case += "" if kv_dtype == torch.bfloat16 else f" --kv-cache-dtype {args.kv_cache_dtype}"
            with torch.inference_mode():
                body_ms, step_ms = time_decode(model, rows, args.context, args.cells, kv_dtype)
            floor_ms = decode_floor_ms(model, rows, args.context, ceilings, kv_dtype)
            _print("body graph", case, body_ms, "ms", floor_ms)
            _print("decode step", case, step_ms, "ms", floor_ms)
        for rows in map(int, args.rows.split(",")):
            for kind, params in DRAWS.items():
                draw_ms, floor_ms = time_draw(rows, model.vocab_size, params, ceilings)
                _print("sampler", f"{shape} rows={rows} vocabulary={model.vocab_size} {kind}", draw_ms, "ms", floor_ms)
        del model
        torch.cuda.empty_cache()
    return 0


def time_draw(
    rows: int, vocab_size: int, params: tuple[float, int, float, float], ceilings: Ceilings
) -> tuple[float, float]:
    """-> milliseconds of one draw from bfloat16 logits, and of reading them once. params: as in DRAWS."""
    logits = (torch.randn(rows, vocab_size, device="cuda") * 3).to(torch.bfloat16)
    temperature, top_k, top_p, min_p = (np.full(rows, value, np.float64) for value in params)
    route = Route.of(temperature, top_k.astype(np.int64), top_p, min_p, vocab_size)
    inputs = SampleInputs(
        temperature=torch.from_numpy(temperature).cuda(),
        top_k=torch.from_numpy(top_k).to("cuda", torch.int64),
        top_p=torch.from_numpy(top_p).cuda(),
        min_p=torch.from_numpy(min_p).cuda(),
        seeds=torch.arange(rows, device="cuda"),
        positions=torch.arange(rows, device="cuda"),
    )
    return 1e3 * _median_s(lambda: sample(logits, inputs, route), STEPS), 2e3 * logits.numel() / ceilings.copy_bytes_s


def measure_ceilings(device: torch.device) -> Ceilings:
    source = torch.randint(0, 100, (COPY_BYTES // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    copy_s = _median_s(lambda: target.copy_(source), 10)
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    matmul_s = _median_s(lambda: left @ right, 10)
    return Ceilings(2 * COPY_BYTES / copy_s, 2 * 8192**3 / matmul_s)


def decode_floor_ms(
    model: LoadedModel, rows: int, context: int, ceilings: Ceilings, kv_dtype: torch.dtype = torch.bfloat16
) -> float:
    """The larger of bytes over bandwidth and operations over the matrix rate, attention's bytes included."""
    embedding = model.module.get_input_embeddings().weight
    head = model.module.get_output_embeddings().weight
    parameters = sum(p.numel() for p in model.module.parameters())
    read = parameters - (0 if head is embedding else embedding.numel())
    kv_bytes = rows * context * model.geometry.bytes_per_cell(kv_dtype)
    bytes_s = (2 * read + kv_bytes) / ceilings.copy_bytes_s
    return float(1e3 * max(bytes_s, 2 * read * rows / ceilings.matmul_flops_s))


def time_decode(
    model: LoadedModel, rows: int, context: int, order: str = "in turn", kv_dtype: torch.dtype = torch.bfloat16
) -> tuple[float, float]:
    """-> milliseconds of the captured body alone, and of a whole step: prepare, body, head, argmax, commit."""
    device = model.device
    width = max(rows, 1)
    cells = rows * (context + STEPS * 2 + 8)
    config = CacheConfig(cells, max_write=max(width + 1, 512), kv_dtype=kv_dtype, initial_cells=cells)
    cache = CellCache(model.geometry, config, device)
    try:
        forwards = CapturedForwards(model, method_table([width], max(width + 1, 512)), device)
        forwards.capture(lambda _: _one_token_step(cache, width), lambda *_: None)
        sequences = np.array([cache.seq_new() for _ in range(rows)], np.int32)
        _fill(cache, sequences, context, order)
        tokens = torch.randint(0, model.vocab_size, (rows,), device=device)
        positions = torch.full((rows,), context, dtype=torch.int64, device=device)
        selected = torch.arange(rows, device=device)
        (step_slice,) = plan_slices(rows, forwards.methods)

        def decode() -> None:
            cache.declare_step(sequences)
            step = cache.prepare_step(step_slice.width)
            scores = forwards.run(step_slice, tokens, positions, step, selected)
            assert scores is not None
            if scores.prepared is None:
                sample_argmax(scores.logits)
            cache.commit_step()

        decode()
        body_ms = 1e3 * _median_s(forwards.graph(width).replay, STEPS)
        for _ in range(5):
            decode()
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        for _ in range(STEPS):
            decode()
        torch.cuda.synchronize()
        return body_ms, 1e3 * (time.perf_counter() - started_s) / STEPS
    finally:
        torch.cuda.synchronize()
        cache.close()


def _fill(cache: CellCache, sequences: np.ndarray[Any, np.dtype[np.int32]], context: int, order: str) -> None:
    """`context` tokens a sequence, with random K/V, in cells as `order` says.

    in turn: token by token in turn, so that a sequence's cells lie evenly apart; contiguous: side by side; shuffled:
    at random distances.
    """
    owners = np.repeat(sequences, context) if order == "contiguous" else np.tile(sequences, context)
    if order == "shuffled":
        owners = np.random.default_rng(0).permutation(owners)
    for start in range(0, len(owners), cache.config.max_write):
        part = owners[start : start + cache.config.max_write]
        cache.declare_step(part)
        cache.prepare_step(len(part))
        cache.commit_step()
    for side in (*cache.pool.keys, *cache.pool.values):
        for first in range(0, cache.pool.rows, FILL_ROWS):
            rows = side[first : min(first + FILL_ROWS, cache.pool.rows)]
            rows.copy_(torch.randn(rows.shape, dtype=torch.bfloat16, device=rows.device))  # normal_ knows no FP8


@contextmanager
def _one_token_step(cache: CellCache, width: int) -> Iterator[CellStep]:
    sequence = cache.seq_new()
    cache.declare_step([sequence])
    yield cache.prepare_step(width)
    cache.undo_step()
    cache.seq_rm(sequence)


def _median_s(run: Callable[[], object], repeats: int) -> float:
    """Device time of one `run`, by events."""
    for _ in range(3):
        run()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _print(bench: str, case: str, value: float, unit: str, floor: float | None = None) -> None:
    print(json.dumps(figure(bench, case, value, unit, torch.device("cuda"), floor=floor)), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m static_graphs.bench", description="time one decode step on a GPU")
    parser.add_argument("--shapes", default="8b,0.6b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--rows", default="1,8,64,256")
    parser.add_argument("--context", type=int, default=1024, help="tokens each row attends")
    parser.add_argument(
        "--cells", default="in turn", choices=("in turn", "contiguous", "shuffled"), help="how a row's cells lie"
    )
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"), help="what K/V is stored as")
    parser.add_argument("--unfused", action="store_true", help="the model's own kernels, as under --enforce-eager")
    return parser


if __name__ == "__main__":
    sys.exit(main())
