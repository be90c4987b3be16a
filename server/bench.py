"""`cellserve bench`: load a running server over HTTP and say how it did, in the field's usual names.

Closed loop: `--streams` requests are open at any time. Open loop: requests arrive at `--rate` a second on average
(Poisson), whether or not earlier ones have ended. Prompts are random ids unless `--dataset` names a JSONL file. Tokens
are counted from the server's own `usage`, since one frame may carry several tokens or none.

This file owns the options, the requests and the report; server/bench_client.py sends and measures.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from server.bench_client import BenchError, LoadClient, Outcome, Prompt, Status, run_load

LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
"""Time to first token, time per output token after it, gap between frames, end-to-end latency."""

Summary = dict[str, float | int | None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    target = parser.add_argument_group("server")
    target.add_argument("--url", default="http://127.0.0.1:8000", help="where the server listens")
    target.add_argument("--model", help="the served name (default: the first the server lists)")
    target.add_argument("--api-key", help="sent as a bearer token (default: the first of CELLSERVE_API_KEY)")
    load = parser.add_argument_group("load")
    load.add_argument("--num-requests", type=_positive_int, help="(default: 100, or the dataset's length)")
    load.add_argument(
        "--streams", type=_positive_int, help="requests open at once (default: 8, or no limit with --rate)"
    )
    load.add_argument("--rate", type=_positive_float, help="requests a second on average, arriving at random")
    load.add_argument("--warmup", type=_count, default=1, help="requests before the clock starts (default: 1)")
    load.add_argument(
        "--max-retries", type=_count, default=20, help="tries after a 429 or 503 before giving a request up"
    )
    load.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals")
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--input-tokens", type=_span, default=(128, 128), help="N, or LOW-HIGH for a uniform draw")
    prompts.add_argument("--output-tokens", type=_span, default=(64, 64), help="N, or LOW-HIGH; end of text is ignored")
    prompts.add_argument("--prefix-tokens", type=_count, default=0, help="ids in front of each prompt that all share")
    prompts.add_argument("--vocab-size", type=_positive_int, default=1000, help="random ids are below this")
    prompts.add_argument(
        "--dataset",
        type=Path,
        help='JSONL: {"prompt": text or ids} or {"messages": [...]}, with "output_tokens" at will',
    )
    prompts.add_argument("--temperature", type=float, default=0.0)
    report = parser.add_argument_group("report")
    report.add_argument("--goodput", type=_goodput, default={}, help="e.g. ttft_ms=200,tpot_ms=50: what counts as good")
    report.add_argument("--json", type=Path, metavar="FILE", help="save the figures there too")


def run(args: argparse.Namespace) -> int:
    """0: every request was answered. 1: some failed or were given up. 2: nothing to measure. 130: interrupted."""
    console = Console(stderr=True)
    try:
        if args.json:
            _check_writable(args.json)
        prompts = make_prompts(args)
        outcomes, duration_s, model = asyncio.run(_measure(args, prompts, console))
    except BenchError as error:
        console.print(f"bench: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        return 130
    summary = summarize(outcomes, duration_s, args.goodput)
    _print_report(summary, outcomes, Console())
    if args.json:
        args.json.write_text(json.dumps(_describe(args, model) | summary, indent=2) + "\n")
    return 0 if summary["completed"] == len(outcomes) else 1


def _check_writable(path: Path) -> None:
    """Before a run of minutes, not behind it."""
    try:
        path.open("a").close()
    except OSError as error:
        raise BenchError(f"--json {path} cannot be written: {error.strerror}") from error


def make_prompts(args: argparse.Namespace) -> list[Prompt]:
    """The requests of this run, the same for the same options and seed."""
    rng = random.Random(args.seed)
    if args.dataset is not None:
        return _read_dataset(args.dataset, args.num_requests, args.output_tokens, rng)
    prefix = rng.choices(range(args.vocab_size), k=args.prefix_tokens)
    prompts = []
    for _ in range(args.num_requests or 100):
        ids = rng.choices(range(args.vocab_size), k=rng.randint(*args.input_tokens))
        prompts.append(Prompt({"prompt": prefix + ids}, rng.randint(*args.output_tokens)))
    return prompts


def summarize(outcomes: Sequence[Outcome], duration_s: float, goodput: Mapping[str, float]) -> Summary:
    """The figures of one run. Latencies are of completed requests; None where there is nothing to divide.

    duration_s: from the first request sent to the last one ended. goodput: the most a good request takes, by latency.
    """
    done = [outcome for outcome in outcomes if outcome.status is Status.COMPLETED]
    refusals: Counter[int] = sum((Counter(outcome.refusals) for outcome in outcomes), Counter())
    input_tokens = sum(outcome.input_tokens for outcome in done)
    output_tokens = sum(outcome.output_tokens for outcome in done)
    summary: Summary = {
        "duration": duration_s,
        "completed": len(done),
        "failed": sum(outcome.status is Status.FAILED for outcome in outcomes),
        "given_up": sum(outcome.status is Status.REFUSED for outcome in outcomes),
        "refused_429": refusals[429],
        "refused_503": refusals[503],
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / duration_s,
        "output_throughput": output_tokens / duration_s,
        "total_token_throughput": (input_tokens + output_tokens) / duration_s,
        "request_goodput": None,
    }
    if goodput:
        summary["request_goodput"] = sum(_is_good(outcome, goodput) for outcome in done) / duration_s
    for name in LATENCIES:
        values = sorted(value for outcome in done for value in _latency_ms(outcome, name))
        summary[f"mean_{name}"] = sum(values) / len(values) if values else None
        for label, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99)):
            summary[f"{label}_{name}"] = percentile(values, share) if values else None
    return summary


def percentile(ascending: Sequence[float], share: float) -> float:
    """Linear between the two nearest values, as numpy's default."""
    place = (len(ascending) - 1) * share
    low = int(place)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (ascending[high] - ascending[low]) * (place - low)


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds after the start at which each request is sent; the first at once."""
    rng = random.Random(f"arrivals {seed}")
    arrivals_s = [0.0]
    while len(arrivals_s) < count:
        arrivals_s.append(arrivals_s[-1] + rng.expovariate(rate))
    return arrivals_s


def _latency_ms(outcome: Outcome, name: str) -> Sequence[float]:
    """One value a request, but for itl_ms: one a gap."""
    frames = outcome.frames_s
    if name == "itl_ms":
        return [(after - before) * 1e3 for before, after in itertools.pairwise(frames)]
    if name == "e2el_ms":
        return [(outcome.ended_s - outcome.sent_s) * 1e3]
    if not frames:
        return []
    if name == "ttft_ms":
        return [(frames[0] - outcome.sent_s) * 1e3]
    # A single token has no time per token after the first.
    return [(outcome.ended_s - frames[0]) * 1e3 / (outcome.output_tokens - 1)] if outcome.output_tokens > 1 else []


def _is_good(outcome: Outcome, goodput: Mapping[str, float]) -> bool:
    """Each named latency, averaged over the request where it has several, is within its limit."""
    for name, limit in goodput.items():
        values = _latency_ms(outcome, name)
        if values and sum(values) / len(values) > limit:
            return False
    return True


async def _measure(
    args: argparse.Namespace, prompts: Sequence[Prompt], console: Console
) -> tuple[list[Outcome], float, str]:
    api_key = args.api_key or os.environ.get("CELLSERVE_API_KEY", "").split(",")[0].strip()
    async with LoadClient(args.url, api_key, args.temperature, args.max_retries) as client:
        model = await client.choose_model(args.model)
        for prompt in prompts[: args.warmup]:
            outcome = await client.send(prompt)
            if outcome.status is not Status.COMPLETED:
                raise BenchError(f"the warm-up request was not answered: {outcome.error}")
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("requests", total=len(prompts), rate="")
            tokens = 0

            def show(outcome: Outcome, elapsed_s: float) -> None:
                nonlocal tokens
                tokens += outcome.output_tokens
                progress.update(task, advance=1, rate=f"{tokens / elapsed_s:,.0f} tok/s")

            arrivals_s = poisson_arrivals(args.rate, len(prompts), args.seed) if args.rate else None
            streams = args.streams or (len(prompts) if args.rate else 8)
            outcomes, duration_s = await run_load(client, prompts, streams, arrivals_s, show)
    return outcomes, duration_s, model


def _read_dataset(path: Path, limit: int | None, output_tokens: tuple[int, int], rng: random.Random) -> list[Prompt]:
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise BenchError(f"the dataset cannot be read: {error}") from error
    prompts = []
    for number, line in enumerate(lines[:limit], start=1):
        try:
            row = json.loads(line)
            [kind] = [kind for kind in ("prompt", "messages") if kind in row]
            prompts.append(Prompt({kind: row[kind]}, int(row.get("output_tokens") or rng.randint(*output_tokens))))
        except (ValueError, TypeError) as error:
            raise BenchError(
                f"{path}, row {number}: want an object with either prompt or messages ({error})"
            ) from error
    if not prompts:
        raise BenchError(f"{path} has no rows")
    return prompts


def _describe(args: argparse.Namespace, model: str) -> dict[str, object]:
    """What was run, for whoever reads the saved figures later."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model_id": model,
        "request_rate": args.rate or "inf",
        "max_concurrency": args.streams or (None if args.rate else 8),
        "input_tokens": args.input_tokens,
        "output_tokens": args.output_tokens,
        "prefix_tokens": args.prefix_tokens,
        "dataset": str(args.dataset) if args.dataset else "random",
        "seed": args.seed,
    }


def _print_report(summary: Summary, outcomes: Sequence[Outcome], console: Console) -> None:
    table = Table("figure", "value", box=None, header_style="dim")
    table.columns[1].justify = "right"
    for name, value in summary.items():
        if value is not None:
            table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:,.2f}")
    console.print(table)
    reasons = Counter(outcome.error for outcome in outcomes if outcome.error)
    for reason, count in reasons.most_common(3):
        console.print(f"{count} x {reason}", style="red", markup=False)


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def _span(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    span = (int(low), int(high or low)) if low.isdecimal() and (high or low).isdecimal() else (0, 0)
    if not 1 <= span[0] <= span[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is neither N nor LOW-HIGH with 1 <= LOW <= HIGH")
    return span


def _goodput(text: str) -> dict[str, float]:
    limits = {}
    for part in text.split(","):
        name, _, limit = part.partition("=")
        if name not in LATENCIES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(LATENCIES)}")
        limits[name] = float(limit)
    return limits
