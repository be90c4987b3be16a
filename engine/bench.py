"""`python -m engine.bench`: the engine without HTTP or text, beside what this machine's matrix products allow.

Runs a fixed set of requests through the loop that serves, and in the same run measures the ceilings with the model's
own weight shapes, so that a figure and its floor are of one machine in one state. Prints one JSON object a line on
standard output, in the form that benchmarks.jsonl collects; progress goes to standard error.

The floor counts matrix products alone: prompt tokens at the 512-row rate, and one pass over all weights for each
step of `streams` decode rows. Attention, sampling and everything else come on top of it in a real run.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from transformers import AutoModelForCausalLM

from cache.figures import Figure, figure
from engine.build import build_engine
from engine.config import DEFAULT_MODEL, EngineConfig
from engine.errors import CellserveError
from engine.loop import EngineLoop
from engine.types import Batch, EngineInfo, GenerateRequest, SamplingParams
from static_graphs.loading import load_config, locate
from static_graphs.shapes import SHAPES, write_config

PREFILL_ROWS = 512
MAX_PASSES = 20
PASSES_S = 5.0
"""Seconds after which no further pass of one row count begins."""
IDLE_STEPS = 60
"""Steps that are timed to find the device's pauses, with a pause before each and without."""
PAUSE_CYCLES = 60_000_000
"""Of the device's clock, about 30 ms."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of the engine."""

    case: str
    requests: tuple[tuple[tuple[int, ...], int], ...]
    """(prompt token ids, new tokens) of each."""
    streams: int
    """Requests that run at once."""

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt, _ in self.requests)

    @property
    def new_tokens(self) -> int:
        return sum(new for _, new in self.requests)

    @property
    def is_prefill(self) -> bool:
        """Whether prompts are all there is to it: then prompt tokens are what counts."""
        return all(new == 1 for _, new in self.requests)

    @property
    def counted_tokens(self) -> int:
        return self.prompt_tokens if self.is_prefill else self.new_tokens


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Seconds of one pass of `rows` rows through every linear weight of the model, the head included."""

    weight_bytes: int
    flops_per_row: float
    head_flops_per_row: float
    pass_s: dict[int, float]
    """By rows."""

    def gflops(self, rows: int) -> float:
        return rows * self.flops_per_row / self.pass_s[rows] / 1e9

    def read_gb_s(self) -> float:
        """Of weights, in a pass of one row."""
        return self.weight_bytes / self.pass_s[1] / 1e9

    def floor_tok_s(self, work: Workload) -> float:
        """Tokens a second if matrix products were all there is. The head runs on a prompt's last row alone."""
        body_part = 1 - self.head_flops_per_row / self.flops_per_row
        prefill_s = work.prompt_tokens * self.pass_s[PREFILL_ROWS] / PREFILL_ROWS * body_part
        decode_rows = work.new_tokens - len(work.requests)
        return work.counted_tokens / (prefill_s + decode_rows / work.streams * self.pass_s[work.streams])


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    console = Console(stderr=True)
    if args.threads:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="cellserve-bench-") as folder:
        try:
            with console.status("starting") as status:
                started_s = time.perf_counter()
                loop, info = build_engine(_config(args, Path(folder)), lambda text, *_: status.update(text))
                start_s = time.perf_counter() - started_s
                gc.collect()
                gc.freeze()  # as the engine process does
        except CellserveError as error:
            console.print(f"bench: {error}", style="red", markup=False)
            return 2
        work = workload(args, info.vocab_size)
        measured = _run_repeats(loop, work, args.repeat, console)
        idle = measure_idle(loop, work, info.device) if args.idle else None
        with console.status("measuring the ceilings"):
            ceilings = measure_ceilings(info, torch.device(info.device), (1, 32, PREFILL_ROWS, work.streams))
    report = Report(info, work, args.shape or Path(info.model).name, ablations(args))
    for record in report.records(measured, ceilings, args.peer, idle, start_s):
        print(json.dumps(record))
    return 0


def workload(args: argparse.Namespace, vocab_size: int) -> Workload:
    streams = _streams(args)
    if args.requests == "nano":
        work = nano(vocab_size)
    else:
        work = fixed(args.requests, streams, vocab_size, args.input, args.output, args.prefix)
    return Workload(work.case, work.requests, min(streams, len(work.requests)))


def ablations(args: argparse.Namespace) -> str:
    """What is not as a server has it by default, as a figure's case says it."""
    mixed = f" --mixed {args.mixed}" if args.mixed else ""
    stored = "" if args.kv_cache_dtype == "auto" else f" --kv-cache-dtype {args.kv_cache_dtype}"
    return mixed + stored + "".join(f" {flag}" for flag, is_on in _flags(args).items() if is_on)


def fixed(
    num_requests: int, streams: int, vocab_size: int, num_in: int = 128, num_out: int = 64, num_shared: int = 0
) -> Workload:
    """Requests of `num_in` random prompt tokens, the first `num_shared` the same in all, and `num_out` new tokens."""
    rng = random.Random(0)
    shared = rng.choices(range(vocab_size), k=num_shared)
    requests = tuple(
        ((*shared, *rng.choices(range(vocab_size), k=num_in - num_shared)), num_out) for _ in range(num_requests)
    )
    shares = f", {num_shared} shared" if num_shared else ""
    return Workload(f"{num_requests} x {num_in} in{shares}, {num_out} out, {streams} streams", requests, streams)


def nano(vocab_size: int) -> Workload:
    """nano-vllm's own draw, so that figures compare: 142,827 tokens in and 133,966 out."""
    rng = random.Random(0)
    prompts = [tuple(rng.randint(0, 10000) % vocab_size for _ in range(rng.randint(100, 1024))) for _ in range(256)]
    requests = tuple((prompt, rng.randint(100, 1024)) for prompt in prompts)
    return Workload("nano: 256 requests, 100-1024 in and out", requests, 256)


def run_workload(loop: EngineLoop, work: Workload, name: str, on_tokens: Callable[[int], None]) -> float:
    """Seconds until every request has all its tokens. name: makes the request ids this run's own.

    It finds no prefix of an earlier run.
    """
    loop.reset_prefix_cache()
    started_s = time.perf_counter()
    for number, (prompt, new_tokens) in enumerate(work.requests):
        greedy = SamplingParams(temperature=0.0)
        loop.submit(GenerateRequest(f"{name}-{number}", prompt, sampling=greedy, max_new_tokens=new_tokens))
    received = 0
    while loop.has_work():
        updates = loop.step()
        failed = next((update for update in updates if update.finish not in (None, "length")), None)
        if failed is not None:
            raise RuntimeError(f"{failed.request_id} ended as {failed.finish}: {failed.error}")
        arrived = sum(len(update.token_ids) for update in updates)
        received += arrived
        on_tokens(arrived)
    duration_s = time.perf_counter() - started_s
    assert received == work.new_tokens, f"{received} tokens came of {work.new_tokens}"
    return duration_s


def measure_idle(loop: EngineLoop, work: Workload, device: str) -> tuple[float, float] | None:
    """(seconds a step for which the device has nothing to do, seconds it works) while every stream decodes. Medians.

    A step launched behind a pause longer than its launch runs without gaps: that is its work. A step whose launch is
    done before the step ahead of it ends finds the device busy and is followed without a gap; one that comes later was
    waited for, by what it took beyond its work. None without a CUDA device.
    """
    if not device.startswith("cuda"):
        return None
    for number, (prompt, _) in enumerate(work.requests[: work.streams]):
        greedy = SamplingParams(temperature=0.0)
        loop.submit(GenerateRequest(f"idle-{number}", prompt[:64], sampling=greedy, max_new_tokens=3 * IDLE_STEPS + 60))
    for _ in range(60):
        loop.step()  # the prompts
    work_s = statistics.median(took_s for took_s, _ in _timed_steps(loop, PAUSE_CYCLES))
    idle_s = [max(took_s - work_s, 0.0) if came_late else 0.0 for took_s, came_late in _timed_steps(loop, 0)]
    while loop.has_work():
        loop.step()
    return statistics.median(idle_s), work_s


def _timed_steps(loop: EngineLoop, pause_cycles: int) -> list[tuple[float, bool]]:
    """Of IDLE_STEPS steps: seconds from the end of the one ahead, or of a pause, and whether that was over before."""

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    steps: list[tuple[torch.cuda.Event, torch.cuda.Event, bool]] = []
    ends = [mark()]
    executor: Any = loop.executor  # whose launches are timed while this lasts
    launch = executor.launch

    def marked(batch: Batch) -> object:
        if pause_cycles:
            torch.cuda._sleep(pause_cycles)  # type: ignore[no-untyped-call]
            ends.append(mark())
        in_flight = launch(batch)
        came_late = bool(ends[-1].query())  # type: ignore[no-untyped-call]
        ends.append(mark())
        steps.append((ends[-2], ends[-1], came_late))
        return in_flight

    executor.launch = marked
    try:
        for _ in range(IDLE_STEPS):
            loop.step()
    finally:
        executor.launch = launch
    torch.cuda.synchronize()
    return [(first.elapsed_time(second) / 1e3, came_late) for first, second, came_late in steps]


def measure_ceilings(info: EngineInfo, device: torch.device, row_counts: Sequence[int]) -> Ceilings:
    """Times products of the model's shapes over random weights as large as the model, so that no cache holds them."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(load_config(locate(info.model, "dummy")))
    shapes = [tuple(part.weight.shape) for part in module.modules() if isinstance(part, nn.Linear)]
    head = module.get_output_embeddings().weight.numel()
    dtype = getattr(torch, info.dtype)
    weights = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
    inputs = {rows: [torch.randn(rows, n_in, device=device, dtype=dtype) for _, n_in in shapes] for rows in row_counts}
    elements = sum(weight.numel() for weight in weights)
    with torch.inference_mode():
        pass_s = {rows: _time_pass(weights, inputs[rows], device) for rows in sorted(inputs)}
    return Ceilings(elements * weights[0].element_size(), 2.0 * elements, 2.0 * head, pass_s)


def _time_pass(weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], device: torch.device) -> float:
    """The fastest of several passes: a ceiling is what the machine can do, not what it did beside other work."""
    times_s: list[float] = []
    # The first pass warms up and does not count.
    while len(times_s) < 2 or (len(times_s) < MAX_PASSES and sum(times_s) < PASSES_S):
        started_s = time.perf_counter()
        for weight, rows in zip(weights, inputs, strict=True):
            nn.functional.linear(rows, weight)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times_s.append(time.perf_counter() - started_s)
    return min(times_s[1:])


def _run_repeats(loop: EngineLoop, work: Workload, repeats: int, console: Console) -> list[float]:
    """Tokens a second of each repeat, after a short run that warms up every width."""
    warm_up = Workload("warm-up", tuple((prompt[:32], 4) for prompt, _ in work.requests[: work.streams]), work.streams)
    run_workload(loop, warm_up, "warm-up", lambda tokens: None)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    measured = []
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        for number in range(repeats):
            task = progress.add_task(f"{work.case}, run {number + 1}", total=work.new_tokens)

            advance = functools.partial(progress.advance, task)
            measured.append(work.counted_tokens / run_workload(loop, work, f"run-{number}", advance))
    return measured


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one run -> objects as benchmarks.jsonl collects them."""

    info: EngineInfo
    work: Workload
    model: str
    ablations: str

    def records(
        self,
        measured: Sequence[float],
        ceilings: Ceilings,
        peers: Sequence[tuple[str, float]],
        idle: tuple[float, float] | None,
        start_s: float,
    ) -> list[Figure]:
        records = [self._record("ceiling", "weights read at 1 row", ceilings.read_gb_s(), "GB/s")]
        for rows in sorted(set(ceilings.pass_s) - {1}):
            records.append(self._record("ceiling", f"products at {rows} rows", ceilings.gflops(rows), "GFLOP/s"))
        records.append(self._record("start-up", "engine, in this process", start_s, "s"))
        if idle is not None:
            records.append(self._record("idle", f"decode, {self.work.streams} streams", idle[0] * 1e6, "us a step"))
            records.append(self._record("work", f"decode, {self.work.streams} streams", idle[1] * 1e3, "ms a step"))
        unit = "prompt tok/s" if self.work.is_prefill else "output tok/s"
        value = statistics.median(measured)
        ours = self._record("engine", self.work.case + self.ablations, value, unit, ceilings.floor_tok_s(self.work))
        return records + ([ours | {"peer": name, "peer_value": value} for name, value in peers] or [ours])

    def _record(self, bench: str, case: str, value: float, unit: str, floor: float | None = None) -> Figure:
        case, device = f"{self.model} {self.info.dtype}: {case}", torch.device(self.info.device)
        return figure(bench, case, value, unit, device, floor=floor)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.bench", description="time the engine without HTTP")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="folder, GGUF file or hub id (default: the small model)")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this published shape instead of a model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", help="(default: bfloat16 with --shape, else float32)")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"), help="what K/V is stored as")
    parser.add_argument("--streams", type=int, help="requests that run at once (default: 32; 256 for nano)")
    parser.add_argument("--requests", type=_requests, default=64, help="how many, or nano for its 256 mixed ones")
    parser.add_argument("--input", type=int, default=128, help="prompt tokens of each (default: 128)")
    parser.add_argument("--output", type=int, default=64, help="new tokens of each; 1 measures prefill (default: 64)")
    parser.add_argument("--prefix", type=int, default=0, help="of the prompt tokens, those that all share (default: 0)")
    parser.add_argument("--mixed", type=int, help="tokens of a step beside decodes (--max-num-mixed-tokens)")
    parser.add_argument("--repeat", type=int, default=3, help="runs, of which the median counts (default: 3)")
    parser.add_argument("--threads", type=int, help="of torch (default: its own choice)")
    parser.add_argument(
        "--peer", type=_peer, action="append", default=[], metavar="NAME=VALUE", help="another engine's tok/s here"
    )
    parser.add_argument("--idle", action="store_true", help="also count the device's pauses between decode steps")
    off = parser.add_argument_group("switched off", "what a part of the engine is worth")
    off.add_argument("--enforce-eager", action="store_true", help="neither captured forwards nor fused kernels")
    off.add_argument("--batch-invariant", action="store_true", help="that rows are computed as their steps suit best")
    off.add_argument("--no-overlap", action="store_true", help="launch a step only when the one before is read")
    off.add_argument("--no-prefix-cache", action="store_true")
    return parser


def _config(args: argparse.Namespace, folder: Path) -> EngineConfig:
    if args.shape:
        write_config(args.shape, folder)
    return EngineConfig(
        model=str(folder) if args.shape else args.model,
        load_format="dummy" if args.shape else "auto",
        device=args.device,
        dtype=args.dtype or ("bfloat16" if args.shape else "float32"),
        kv_cache_dtype=args.kv_cache_dtype,
        max_num_seqs=_streams(args),
        max_num_mixed_tokens=args.mixed,
        enforce_eager=args.enforce_eager,
        batch_invariant=args.batch_invariant,
        overlap=not args.no_overlap,
        prefix_cache=not args.no_prefix_cache,
    )


def _streams(args: argparse.Namespace) -> int:
    return int(args.streams or (256 if args.requests == "nano" else 32))


def _flags(args: argparse.Namespace) -> dict[str, bool]:
    return {
        "--enforce-eager": args.enforce_eager,
        "--batch-invariant": args.batch_invariant,
        "--no-overlap": args.no_overlap,
        "--no-prefix-cache": args.no_prefix_cache,
    }


def _requests(text: str) -> int | str:
    return text if text == "nano" else int(text)


def _peer(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    return name, float(value)


if __name__ == "__main__":
    sys.exit(main())
