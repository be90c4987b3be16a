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
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from transformers import AutoModelForCausalLM

from engine.build import build_engine
from engine.config import DEFAULT_MODEL, EngineConfig
from engine.errors import CellserveError
from engine.loop import EngineLoop
from engine.types import EngineInfo, GenerateRequest, SamplingParams
from static_graphs.loading import load_config, locate

PREFILL_ROWS = 512
MAX_PASSES = 20
PASSES_S = 5.0
"""Seconds after which no further pass of one row count begins."""
Json = dict[str, str | float | None]


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
        """New tokens a second if matrix products were all there is. The head runs on a prompt's last row alone."""
        body_part = 1 - self.head_flops_per_row / self.flops_per_row
        prefill_s = work.prompt_tokens * self.pass_s[PREFILL_ROWS] / PREFILL_ROWS * body_part
        decode_rows = work.new_tokens - len(work.requests)
        return work.new_tokens / (prefill_s + decode_rows / work.streams * self.pass_s[work.streams])


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    console = Console(stderr=True)
    if args.threads:
        torch.set_num_threads(args.threads)
    streams = args.streams or (256 if args.requests == "nano" else 32)
    config = EngineConfig(model=args.model, device=args.device, dtype=args.dtype, max_num_seqs=streams)
    try:
        with console.status("starting") as status:
            loop, info = build_engine(config, lambda text, done, of: status.update(text))
    except CellserveError as error:
        console.print(f"bench: {error}", style="red", markup=False)
        return 2
    work = nano(info.vocab_size) if args.requests == "nano" else fixed(args.requests, streams, info.vocab_size)
    work = Workload(work.case, work.requests, min(streams, len(work.requests)))
    measured = _run_repeats(loop, work, args.repeat, console)
    with console.status("measuring the ceilings"):
        ceilings = measure_ceilings(info, torch.device(info.device), (1, 32, PREFILL_ROWS, work.streams))
    for record in _records(info, work, measured, ceilings, args.peer):
        print(json.dumps(record))
    return 0


def fixed(num_requests: int, streams: int, vocab_size: int) -> Workload:
    """Requests of 128 random prompt tokens and 64 new tokens each."""
    rng = random.Random(0)
    requests = tuple((tuple(rng.choices(range(vocab_size), k=128)), 64) for _ in range(num_requests))
    return Workload(f"{num_requests} x 128 in, 64 out, {streams} streams", requests, streams)


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
            measured.append(work.new_tokens / run_workload(loop, work, f"run-{number}", advance))
    return measured


def _records(
    info: EngineInfo, work: Workload, measured: Sequence[float], ceilings: Ceilings, peers: Sequence[tuple[str, float]]
) -> list[Json]:
    common: Json = {
        "machine": _machine(torch.device(info.device)),
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }

    def record(bench: str, case: str, value: float, unit: str, floor: float | None = None) -> Json:
        named: Json = {"bench": bench, "case": f"{Path(info.model).name} {info.dtype}: {case}"}
        figures: Json = {"value": _rounded(value), "unit": unit, "floor": floor and _rounded(floor)}
        return named | figures | {"peer": None, "peer_value": None} | common

    records = [record("ceiling", "weights read at 1 row", ceilings.read_gb_s(), "GB/s")]
    for rows in sorted(set(ceilings.pass_s) - {1}):
        records.append(record("ceiling", f"products at {rows} rows", ceilings.gflops(rows), "GFLOP/s"))
    ours = record("engine", work.case, statistics.median(measured), "output tok/s", ceilings.floor_tok_s(work))
    return records + ([ours | {"peer": name, "peer_value": value} for name, value in peers] or [ours])


def _rounded(value: float) -> float:
    """Four digits: more would be noise."""
    return float(f"{value:.4g}")


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), cpu)
    except OSError:
        pass  # not Linux: the platform's own word stands
    return f"{cpu}, {torch.get_num_threads()} torch threads"


def _commit() -> str | None:
    """Of this source tree, with a + where files differ from it; None outside a git tree."""
    described = subprocess.run(
        ("git", "describe", "--always", "--dirty=+", "--exclude=*"),
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.bench", description="time the engine without HTTP")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="folder, GGUF file or hub id (default: the small model)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--streams", type=int, help="requests that run at once (default: 32; 256 for nano)")
    parser.add_argument("--requests", type=_requests, default=64, help="how many, or nano for its 256 mixed ones")
    parser.add_argument("--repeat", type=int, default=3, help="runs, of which the median counts (default: 3)")
    parser.add_argument("--threads", type=int, help="of torch (default: its own choice)")
    parser.add_argument(
        "--peer", type=_peer, action="append", default=[], metavar="NAME=VALUE", help="another engine's tok/s here"
    )
    return parser


def _requests(text: str) -> int | str:
    return text if text == "nano" else int(text)


def _peer(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    return name, float(value)


if __name__ == "__main__":
    sys.exit(main())
