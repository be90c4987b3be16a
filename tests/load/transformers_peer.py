"""`python -m tests.load.transformers_peer`: transformers' own continuous batching on the draw of engine.bench's nano.

A peer to hold ours against: what the library that models come from does by itself with the same requests, greedy, no
end of sequence, random weights of a shape in bf16. Its attention is torch's, as there is without flash-attn: one
product of all rows of a step with the K/V of all its requests under a mask, so the work of a step grows with the square
of the requests in it. Its steps are CUDA graphs, its cache holds all requests at once, and prefixes are not looked for,
for the draw has none. `--set` changes any of this.

Prints one figure in the form of benchmarks.jsonl on standard output, everything else on standard error. Only generated
tokens count. A run that is stopped at its limit says so in its case, and is mostly prompts where the limit is short.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from cache.figures import figure
from engine.bench import Workload, nano
from static_graphs.shapes import SHAPES

POLL_S = 0.05
"""Between two looks at what has come; a run's end is seen this late at most."""
STEP_TOKENS = 2048
"""Rows of a step at most. The mask is this times all cells of the cache: past 2^31 elements with 8,192, the default."""
WARM_UP_LIMIT_S = 60.0
TINY = SHAPES["0.6b"] | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}


@dataclass(frozen=True, slots=True)
class Result:
    """One run, as far as it came."""

    tokens: int
    finished: int
    """Requests with all their tokens."""
    duration_s: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    console = Console(stderr=True, highlight=False)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: this torch sees no CUDA device; --device cpu --shape tiny works here")
    console.print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    shape = TINY if args.shape == "tiny" else SHAPES[args.shape]
    work = draw(args.requests, shape["vocab_size"])
    settings = choose(work, device, dict(args.set))
    console.print(str(settings), markup=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    started_s = time.perf_counter()
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("starting", total=work.new_tokens)
        model = random_model(shape, device)
        with serving(model, settings) as manager:
            short = tuple((prompt[:32], 4) for prompt, _ in work.requests)
            warm_up = run(manager, short, "warm-up", WARM_UP_LIMIT_S, lambda tokens: None)
            if warm_up.finished < len(short):
                raise RuntimeError(f"{warm_up.finished} of {len(short)} short requests done in {WARM_UP_LIMIT_S:.0f} s")
            console.print(f"started in {time.perf_counter() - started_s:.1f} s")
            progress.reset(task, description=work.case)
            result = run(
                manager, work.requests, "run", args.limit_s, lambda tokens: progress.update(task, completed=tokens)
            )
            # The figure first: the manager may take its time to stop.
            how = described(model, manager.continuous_batching_config, dict(args.set))
            case = f"{args.shape} bfloat16: {work.case}; {how}{ended(result, work)}"
            value = result.tokens / result.duration_s
            record = figure("transformers continuous batching", case, value, "output tok/s", device)
            print(json.dumps(record), flush=True)
            told = f"{result.tokens} tokens, {result.finished} requests finished, {result.duration_s:.1f} s"
            console.print(told)
    return 0


def draw(num_requests: int, vocab_size: int) -> Workload:
    """The first of nano's requests."""
    whole = nano(vocab_size)
    if num_requests >= len(whole.requests):
        return whole
    return Workload(f"{num_requests} of {whole.case}", whole.requests[:num_requests], num_requests)


def choose(work: Workload, device: torch.device, given: dict[str, Any]) -> dict[str, Any]:
    """Settings of ContinuousBatchingConfig: what suits this work, then what was given.

    Raises SystemExit where the installed transformers has no setting of a given name.
    """
    known = {field.name for field in fields(ContinuousBatchingConfig)}
    if unknown := sorted(given.keys() - known):
        raise SystemExit(f"--set {unknown[0]}: transformers {transformers.__version__} has {', '.join(sorted(known))}")
    page = given.get("page_size") or given.get("block_size") or 256
    pages = sum(math.ceil((len(prompt) + new) / page) for prompt, new in work.requests)
    suits = {
        "max_batch_tokens": STEP_TOKENS,
        "max_requests_per_batch": work.streams,
        # Below 15 % of free blocks it admits requests one by one.
        "num_blocks": math.ceil(pages / 0.8) + 1,
        "allow_block_sharing": False,
        "use_cuda_graph": device.type == "cuda",
        # Else it would fetch flash attention where the package `kernels` is installed.
        "auto_switch_to_flash": False,
    }
    return {name: value for name, value in (suits | given).items() if name in known}


def described(model: Any, chosen: ContinuousBatchingConfig, given: dict[str, Any]) -> str:
    """What a case says of how the library ran. chosen: as the manager has it once it has started."""
    graphs = "CUDA graphs" if any(chosen.cuda_graph_booleans) else "no CUDA graphs"
    steps = f"steps of {chosen.max_batch_tokens} rows and {chosen.max_requests_per_batch} requests at most"
    told = {"use_cuda_graph", "max_batch_tokens", "max_requests_per_batch"}
    more = "".join(f", {name}={json.dumps(value)}" for name, value in sorted(given.items()) if name not in told)
    return f"transformers {transformers.__version__}, {model.config._attn_implementation}, {graphs}, {steps}{more}"


def ended(result: Result, work: Workload) -> str:
    """What a case says of a run that did not finish."""
    if result.finished == len(work.requests):
        return ""
    return f" (of {len(work.requests)} requests, stopped at {result.duration_s:.0f} s)"


def random_model(shape: dict[str, Any], device: torch.device) -> Any:
    with tempfile.TemporaryDirectory(prefix="cellserve-peer-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    # Without that setting, sdpa by its plain name is what is switched to flash attention where `kernels` is installed.
    has_switch = any(field.name == "auto_switch_to_flash" for field in fields(ContinuousBatchingConfig))
    attention = "sdpa" if has_switch else "paged|sdpa"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    return model.eval()


@contextmanager
def serving(model: Any, settings: dict[str, Any]) -> Iterator[Any]:
    """A started ContinuousBatchingManager, its largest graph captured."""
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(**settings),
    )
    manager.warmup()
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(block=True, timeout=10, hard_stop=True)
        manager.destroy()


def run(
    manager: Any,
    requests: Sequence[tuple[tuple[int, ...], int]],
    name: str,
    limit_s: float,
    on_tokens: Callable[[int], None],
) -> Result:
    """All requests at once, until they are done or the limit has passed. on_tokens: gets how many have come so far.

    Raises RuntimeError where a request fails or ends with another number of tokens than it asked for, or the manager's
    thread dies.
    """
    wanted = {f"{name}-{number}": new for number, (_, new) in enumerate(requests)}
    received = dict.fromkeys(wanted, 0)
    finished = 0
    started_s = time.perf_counter()
    for (prompt, new), request_id in zip(requests, wanted, strict=True):
        manager.add_request(list(prompt), request_id=request_id, max_new_tokens=new, streaming=True)
    while finished < len(wanted) and time.perf_counter() - started_s < limit_s:
        # Waiting for the queue instead would wake this thread for each token, in the generation's way.
        time.sleep(POLL_S)
        is_running = manager.is_running()
        while (output := manager.get_result(timeout=0)) is not None:
            if output.error is not None:
                raise RuntimeError(f"{output.request_id} failed: {output.error}")
            received[output.request_id] = len(output.generated_tokens)
            if output.is_finished():
                _check(output, wanted[output.request_id])
                finished += 1
        on_tokens(sum(received.values()))
        if not is_running and finished < len(wanted):
            raise RuntimeError(f"the manager's thread ended with {finished} of {len(wanted)} requests finished")
    return Result(sum(received.values()), finished, time.perf_counter() - started_s)


def _check(output: Any, wanted: int) -> None:
    if len(output.generated_tokens) != wanted:
        raise RuntimeError(f"{output.request_id} ended with {len(output.generated_tokens)} tokens of {wanted}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.load.transformers_peer", description="time transformers' continuous batching"
    )
    parser.add_argument("--shape", choices=(*SHAPES, "tiny"), default="0.6b", help="(default: 0.6b; tiny: for a CPU)")
    parser.add_argument("--requests", type=_count, default=256, help="the first of the draw's (default: all 256)")
    parser.add_argument("--limit-s", type=float, default=60.0, help="seconds until the run is stopped (default: 60)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--set", type=_setting, action="append", default=[], metavar="NAME=JSON", help="of ContinuousBatchingConfig"
    )
    return parser


def _count(text: str) -> int:
    if not 1 <= (count := int(text)) <= 256:
        raise argparse.ArgumentTypeError(f"{count}: the draw has 256 requests, give 1 to 256")
    return count


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text}: not NAME=JSON, as use_cuda_graph=false is") from error


if __name__ == "__main__":
    sys.exit(main())
