"""`python -m static_graphs.tune`: measure on this GPU how a model's products of few rows are best computed; keep it.

Every way to cut each product that the fused model multiplies by, and cuBLAS, are timed by replays of CUDA graphs over
more weights than the L2 cache holds. A way whose result is not torch's is left out. One that cuts K leaves its reader
float32 parts to add up: that reading counts as its time. What beats the rule (tilings.py) by more than 3 % goes into a
file in the user's cache folder, which a server on this kind of GPU reads at its start; elsewhere the rule's choice
does. Prints one JSON object a choice, as benchmarks.jsonl collects them: its time beside the rule's, its floor one
reading of the weights at the copy bandwidth of the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from cache.figures import figure
from static_graphs.load_errors import ModelLoadError
from static_graphs.shapes import SHAPES
from static_graphs.tiling_table import COMMAND, Stamp, UnusableTable, read_table, write_table
from static_graphs.tilings import Measured, Product, Tiling, bucket
from static_graphs.trials import (
    Choice,
    Limits,
    Trial,
    best,
    candidates,
    compile_all,
    default_processes,
    graph_us,
    kernels_of,
)

# What imports transformers is imported where it is used: the processes that compile import this file too.
if TYPE_CHECKING:
    from static_graphs.model import LoadedModel

ROWS = (1, 2, 16, 24, 32, 40, 64, 72, 128)
"""Of every bucket the fewest and the most rows that an engine captures."""
MOST_ROWS = 128
"""Beyond, the products wait for the matrix units: cuBLAS's ground."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    console = Console(stderr=True)
    if args.model is not None and args.shapes is not None:
        parser.error("give a model or --shapes, not both")
    if not torch.cuda.is_available():
        console.print(f"{COMMAND} needs a CUDA device: on a CPU the weights are packed, and nothing is cut by a table")
        return 2
    device = torch.device("cuda")
    try:
        products = set[Product]().union(*(_products_of(model) for model in _models(args, device)))
    except ModelLoadError as error:
        console.print(str(error), markup=False)
        return 1
    if not products:
        console.print("no layer of this model is fused: there is nothing to tune")
        return 1
    tune(products, args.rows, device, processes=args.jobs, console=console)
    return 0


def tune(
    products: Iterable[Product],
    row_counts: Sequence[int],
    device: torch.device,
    *,
    processes: int,
    console: Console,
) -> None:
    """Measure, print and store. What is measured is stored after every product, beside the shapes already there."""
    from static_graphs.bench import measure_ceilings

    stamp, limits = Stamp.of(device), Limits.of(device)
    try:
        choices = read_table(stamp)
    except UnusableTable as error:
        console.print(f"{error}: a new table takes its place", markup=False)
        choices = {}
    buckets = by_bucket(row_counts)
    trials = {(of, most): candidates(of, most, limits) for of in merged(products) for most in buckets}
    jobs = kernels_of(
        (of, rows, tiling)
        for (of, most), tilings in trials.items()
        for tiling in tilings
        if tiling is not None
        for rows in buckets[most]
    )
    gc.collect()  # the model that was asked for its products is held by its own forwards
    torch.cuda.empty_cache()
    copy_bytes_s = measure_ceilings(device).copy_bytes_s
    torch.cuda.empty_cache()
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress, torch.inference_mode():
        compiling = progress.add_task("compile", total=len(jobs))
        timing = progress.add_task("time", total=len(trials))
        for _ in compile_all(jobs, processes):
            progress.advance(compiling)
        for of in dict.fromkeys(of for of, _ in trials):
            trial = Trial(of, device, graph_us, l2_bytes=limits.l2_bytes)
            for most, rows in buckets.items():
                choice = best(of, rows, trials[of, most], trial.time_us, copy_bytes_s)
                choices[Measured(of.width, of.depth, of.is_gated, most)] = choice.tiling
                _print(of, most, choice, device, copy_bytes_s)
                progress.advance(timing)
            del trial
            torch.cuda.empty_cache()
            path = write_table(stamp, choices)
    console.print(f"{len(choices)} choices are in {path}", markup=False, soft_wrap=True)


def by_bucket(row_counts: Iterable[int]) -> dict[int, list[int]]:
    """The bucket's rows -> the row counts to time in it."""
    found: dict[int, list[int]] = {}
    for rows in sorted(set(row_counts)):
        found.setdefault(bucket(rows), []).append(rows)
    return found


def merged(products: Iterable[Product]) -> list[Product]:
    """One of a shape, the widest last. Whole if any of them must be: a choice does not know who reads it."""
    found: dict[tuple[int, int, bool], Product] = {}
    for of in sorted(products):  # False before True: the whole one stays
        found[of[:3]] = of
    return list(found.values())


def _models(args: argparse.Namespace, device: torch.device) -> Iterator[LoadedModel]:
    """Random weights: only their shapes are asked for."""
    from transformers import AutoConfig

    from static_graphs.loading import default_model
    from static_graphs.model import load_model, model_from_config

    if args.shapes is None:
        name = default_model() if args.model is None else args.model
        yield load_model(name, device=device, dtype=torch.bfloat16, load_format="dummy")
        return
    for shape in args.shapes:
        fields = {**SHAPES[shape], "num_hidden_layers": 1}  # its layers are of one shape
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        yield model_from_config(config, device=device, dtype=torch.bfloat16, max_model_len=256)


def _products_of(model: LoadedModel) -> set[Product]:
    from static_graphs.fuse import fuse  # needs triton

    return fuse(model).products


def _print(of: Product, most: int, choice: Choice, device: torch.device, copy_bytes_s: float) -> None:
    weight_bytes = 2 * of.width * of.depth * (2 if of.is_gated else 1)
    line = figure(
        "tune",
        f"{of.width} x {of.depth}{' gated' if of.is_gated else ''}, up to {most} rows: {named(choice.tiling)}",
        choice.us,
        "us",
        device,
        floor=1e6 * weight_bytes / copy_bytes_s,
        peer=f"the rule: {named(choice.rule)}",
        peer_value=choice.rule_us,
    )
    print(json.dumps(line), flush=True)


def named(tiling: Tiling | None) -> str:
    if tiling is None:
        return "cuBLAS"
    kind = f"{tiling.stages} stages" if tiling.is_dot else "without matrix units"
    return f"{tiling.block_n}x{tiling.block_k}, {tiling.parts} parts, {tiling.warps} warps, {kind}"


def _rows(text: str) -> list[int]:
    rows = [int(part) for part in text.split(",")]
    if not all(1 <= each <= MOST_ROWS for each in rows):
        raise argparse.ArgumentTypeError(f"{text}: row counts are from 1 to {MOST_ROWS}; wider products are cuBLAS's")
    return rows


def _shapes(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in SHAPES]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no shape {unknown[0]!r}: give some of {', '.join(SHAPES)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description="measure how products of few rows are best cut here")
    parser.add_argument("model", nargs="?", help="folder, GGUF file or hub id; without it the default model")
    parser.add_argument("--shapes", type=_shapes, help=f"instead of a model: some of {', '.join(SHAPES)}")
    parser.add_argument("--rows", type=_rows, default=list(ROWS), help=f"default {','.join(map(str, ROWS))}")
    parser.add_argument("--jobs", type=int, default=default_processes(), help="processes that compile")
    return parser


if __name__ == "__main__":
    sys.exit(main())
