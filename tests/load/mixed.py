"""Minutes of everything at once on one engine: `python -m tests.load.mixed --seconds 600`, from the repository's root.

The real loop, model and pool in this process, turned by hand: random prompts from one token to many chunks, beginnings
that are shared, conversations, choices, every sampling parameter, cancels, bursts and lulls, in a pool too small for
them and over a host tier. What has to hold:

    each answer       its tokens in number, kind and range; log probabilities that are some, and agree with each other
    a repeat          --batch-invariant: bit for bit the first one; else greedy answers part at near-ties only (R32)
    every few steps   the cell table's and the prefix tree's own checks
    each lull         nothing is open, locked or on its way; free and cached cells are all; tokens told = tokens drawn;
                      no graph was captured anew

Ends with 1 where one of these does not, the request printed. `--json FILE` appends the figures as benchmarks.jsonl has
them, `--failures FILE` gets the requests whole. On a CPU a pause between lulls is a matter of steps, not of time, so
that --requests and --seed give nearly the same run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]  # as pytest has them

from cache.figures import figure  # noqa: E402
from engine.build import build_engine  # noqa: E402
from engine.config import EngineConfig, check_request  # noqa: E402
from engine.faults import checked  # noqa: E402
from engine.loop import EngineLoop  # noqa: E402
from engine.types import EngineInfo, GenerateRequest  # noqa: E402
from static_graphs.shapes import SHAPES  # noqa: E402
from support.mixed_requests import Asked, Choice, Mix, judge  # noqa: E402
from support.near_ties import Answer, partings  # noqa: E402

CHECK_STEPS = 100
LULL_S = 300.0
"""An engine that has not come to rest by then does not."""
MOST_WRONG = 10
MEANT = ("repeats compared", "preemptions", "cells evicted", "loaded from the host tier")
"""What a load has to bring about."""


def answer_of(choice: Choice, length: int) -> Answer:
    return Answer(choice.tokens[:length], [each.top[0][1] - each.top[1][1] for each in choice.logprobs[:length]])


@dataclass(frozen=True)
class Rest:
    """What is held at a lull."""

    requests: int
    rss_mb: float
    device_mb: float


class Run:
    """One loop under load, as far as it has come."""

    def __init__(self, loop: EngineLoop, info: EngineInfo, mix: Mix, *, is_invariant: bool) -> None:
        self.loop, self._info, self._mix, self._is_invariant = loop, info, mix, is_invariant
        self._open: dict[str, Asked] = {}
        self._cancels: dict[int, list[tuple[str, int | None]]] = defaultdict(list)  # by step
        self.counts: Counter[str] = Counter()
        self.largest_gap = self.largest_change = 0.0
        """Of the partings; between a greedy token's log probabilities at two times, before its answers part."""
        self.wrong: list[str] = []
        self.failed: list[GenerateRequest] = []
        self.rests: list[Rest] = []
        self._parts: Any = loop
        self._captures = self._captured()
        self._count_evictions()

    @property
    def num_open(self) -> int:
        """Choices."""
        return sum(asked.request.n for asked in self._open.values())

    def submit(self, *, grows: bool = False) -> None:
        self.counts["requests"] += 1
        asked = self._mix.next(f"request {self.counts['requests']}", grows=grows)
        check_request(self._info, asked.request)
        self._open[asked.request.request_id] = asked
        self.loop.submit(asked.request)
        draw = self._mix.draw
        if not asked.is_kept and draw.random() < 0.2:
            index = draw.choice((None, draw.randrange(asked.request.n)))
            self._cancels[self.counts["steps"] + draw.choice((0, 1, 2, draw.randrange(100)))].append(
                (asked.request.request_id, index)
            )

    def turn(self) -> None:
        for name, index in self._cancels.pop(self.counts["steps"], ()):
            if (asked := self._open.get(name)) is not None:
                asked.cancelled |= set(range(asked.request.n)) if index is None else {index}
                self.loop.cancel(name, index)
        for update in self.loop.step():
            self.counts["tokens"] += len(update.token_ids)
            if self._open[update.request_id].take(update):
                self._end(self._open.pop(update.request_id))
        self.counts["steps"] += 1
        if self.counts["steps"] % CHECK_STEPS == 0:
            self.wrong += checked(self.loop)["problems"]

    def lull(self) -> None:
        """Let everything end; nothing may be held then."""
        until = time.monotonic() + LULL_S
        while self.loop.has_work():
            self.turn()
            if time.monotonic() > until:
                self.wrong.append(f"it does not come to rest: {self.loop.stats()}, {list(self._open)[:5]} are open")
                return
        self._cancels.clear()
        self.wrong += self._unbalanced()
        rss, device = (
            psutil.Process().memory_info().rss,
            torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
        )
        self.rests.append(Rest(self.counts["requests"], rss / 1e6, device / 1e6))

    def reset(self) -> None:
        self.counts["cells evicted"] -= self.loop.reset_prefix_cache().freed_cells  # that was no lack of room

    def _end(self, asked: Asked) -> None:
        problems = list(judge(asked, self._info.vocab_size))
        self.counts.update(f"ended: {choice.finish}" for choice in asked.choices)
        if asked.first is not None:
            self.counts["repeats"] += 1
            problems += self._compared(asked.first, asked)
        elif not problems and not asked.cancelled:
            self._mix.keep(asked)
        if problems:
            prompt = asked.request.prompt_token_ids
            self.failed.append(asked.request)
            shown = replace(asked.request, prompt_token_ids=prompt[:12])
            self.wrong.append(f"{'; '.join(problems[:3])} -- {shown}, a prompt of {len(prompt)} tokens")

    def _compared(self, first: Asked, again: Asked) -> Iterable[str]:
        if self._is_invariant:
            if first.told() != again.told():
                tokens = [[each.tokens for each in asked.choices] for asked in (first, again)]
                where = "in log probabilities" if tokens[0] == tokens[1] else f"{tokens[0]} is now {tokens[1]}"
                yield f"it differs from {first.request.request_id}: {where}"
            return
        name, prompt = again.request.request_id, again.request.prompt_token_ids
        for one, other in zip(first.choices, again.choices, strict=True):
            length = min(len(one.tokens), len(other.tokens))
            found = partings({name: prompt}, {name: answer_of(one, length)}, {name: answer_of(other, length)})
            upto = found[0].at if found else length
            pairs = zip(one.logprobs[:upto], other.logprobs[:upto], strict=True)
            self.largest_change = max([self.largest_change, *(abs(a.logprob - b.logprob) for a, b in pairs)])
            for parting in found:
                self.counts["partings"] += 1
                self.largest_gap = max(self.largest_gap, parting.gap)
                if not parting.is_explained:
                    yield f"it parts from {first.request.request_id}: {parting}"

    def _unbalanced(self) -> Iterable[str]:
        """What an engine without work must not hold."""
        yield from checked(self.loop)["problems"]
        report, stats = self.loop.kv_report(), self.loop.stats()
        references = self.loop.executor.cell_references()
        tiers = report.tiers
        expected = {
            "open requests": (len(self._open), 0),
            "running and waiting": (stats.running + stats.waiting, 0),
            "sequences": (self._parts.executor.kv_metrics().num_sequences, 0),
            "leases": (report.tree_leases, 0),
            "cells in use": (stats.cells_used, 0),
            "cells that may be evicted": (report.cells_evictable, report.tree_cells),
            "free and cached cells": (report.cells_free + report.tree_cells, report.cells_total),
            "references to cells": (int(references.sum()), report.tree_cells),
            "references to one cell": (int(references.max(initial=0)), min(1, report.tree_cells)),
            "tokens drawn": (stats.generated_tokens, self.counts["tokens"]),
            "failed steps and rows": (stats.steps_failed + stats.rows_failed, 0),
            "captures": (self._captured(), self._captures),
        }
        if tiers is not None:
            moving = tiers.loads_in_flight + tiers.stores_in_flight + tiers.fetches
            expected["copies and fetches on their way"] = (moving, 0)
            expected["faults of tiers"] = (sum(tier.errors for tier in tiers.tiers), 0)
        for name, (got, right) in expected.items():
            if got != right:
                yield f"at rest, {name}: {got}, not {right}"

    def _captured(self) -> int:
        return getattr(self._parts.executor._forwards, "captures", 0)

    def _count_evictions(self) -> None:
        tree = self._parts._prefixes._tree
        evict = tree.evict

        def counted(num_cells: int) -> int:
            freed: int = evict(num_cells)
            self.counts["cells evicted"] += freed
            return freed

        tree.evict = counted


def drive(run: Run, mix: Mix, args: argparse.Namespace, seqs: int, progress: Progress) -> None:
    """Phases of load, and a lull behind every few of them."""
    draw, started, phases = mix.draw, time.monotonic(), 0
    bar = progress.add_task("", total=args.requests or args.seconds)

    def is_over() -> bool:
        done = run.counts["requests"] if args.requests else time.monotonic() - started
        told = f"{run.counts['requests']} requests, {run.counts['tokens']} tokens, {run.counts['repeats']} repeats, "
        told += f"{len(run.wrong)} wrong, {run.num_open} open"
        progress.update(bar, completed=done, description=told)
        return done >= (args.requests or args.seconds) or len(run.wrong) >= MOST_WRONG

    while not is_over():
        phases += 1
        target = draw.choice((1, max(1, seqs // 8), seqs // 2, seqs, seqs * 5 // 4))
        grows, eagerness = draw.random() < 0.15, draw.choice((0.1, 0.7, 0.98))
        for _ in range(draw.randint(20, args.phase_steps)):
            while run.num_open < target and draw.random() < eagerness and not is_over():
                run.submit(grows=grows)
            if draw.random() < 0.003:
                run.reset()
            run.turn()
        if phases % 4 == 0:
            run.lull()
            if phases % 8 == 4:
                run.reset()  # what comes back now comes from the host tier
    run.lull()


def told(run: Run, args: argparse.Namespace, device: torch.device, wall_s: float) -> list[dict[str, Any]]:
    """The figures."""
    counts, stats, tiers = run.counts, run.loop.stats(), run.loop.kv_report().tiers
    rests = run.rests[len(run.rests) // 5 :]  # what comes before is its first allocations
    slope = 0.0
    if len(rests) > 2:
        slope = float(np.polyfit([each.requests for each in rests], [each.rss_mb for each in rests], 1)[0]) * 10_000
    host = tiers.tiers[0] if tiers is not None else None
    rows: list[tuple[str, float, str]] = [
        ("requests", counts["requests"], "requests"),
        ("tokens drawn", counts["tokens"], "tokens"),
        ("prompt tokens run", stats.prompt_tokens, "tokens"),
        ("repeats compared", counts["repeats"], "answers"),
        ("partings", counts["partings"], "answers"),
        ("largest gap at a parting", run.largest_gap, "nats"),
        ("largest change of a log probability", run.largest_change, "nats"),
        ("wrong", len(run.wrong), "findings"),
        ("lulls", len(run.rests), "lulls"),
        ("preemptions", stats.preemptions, "preemptions"),
        ("cells evicted", counts["cells evicted"], "cells"),
        ("loaded from the host tier", 0 if tiers is None else tiers.loaded_tokens, "tokens"),
        ("stored in the host tier", 0 if host is None else host.stored_bytes / 1e6, "MB"),
        ("evicted from the host tier", 0 if host is None else dict(host.counts).get("evicted", 0), "chunks"),
        ("RSS slope", slope, "MB/10k requests"),
    ]
    case = f"{'batch-invariant' if args.batch_invariant else 'default'}, {wall_s:.0f} s, {args.model or args.shape}"
    return [figure("mixed load", f"{case}: {name}", value, unit, device) for name, value, unit in rows]


def config_of(args: argparse.Namespace, folder: Path) -> EngineConfig:
    is_cuda = args.device == "cuda"
    if args.model is None:
        shape = SHAPES[args.shape] | {"initializer_range": args.spread}
        shape |= {"num_hidden_layers": args.layers} if args.layers is not None else {}
        (folder / "config.json").write_text(json.dumps(shape))
    return EngineConfig(
        args.model or str(folder),
        device=args.device,
        dtype="bfloat16" if is_cuda else "auto",
        load_format="dummy" if args.model is None else "auto",
        max_model_len=args.longest + args.new + args.longest // 20,
        max_num_seqs=args.seqs,
        kv_cells=args.kv_cells,
        kv_host_gib=args.host_mib / 1024 if args.host_mib else None,
        batch_invariant=args.batch_invariant,
        generation_config="none",
    )


def main(argv: list[str] | None = None) -> int:
    has_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m tests.load.mixed", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="of load; its end comes on top")
    parser.add_argument("--requests", type=int, help="instead of --seconds")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_cuda else "cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="0.6b", help="with random weights")
    parser.add_argument("--layers", type=int, help="of the shape (default: all)")
    parser.add_argument("--spread", type=float, default=0.02, help="of the shape's random weights")
    parser.add_argument("--model", help="a folder with weights, instead of a shape")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--longest", type=int, default=6000, help="tokens of a prompt, about")
    parser.add_argument("--new", type=int, default=200, help="tokens of an answer, at most")
    parser.add_argument("--seqs", type=int, default=128, help="sequences that run at once")
    parser.add_argument("--kv-cells", type=int, default=16_384)
    parser.add_argument("--host-mib", type=float, default=1024.0, help="of the host tier; 0: none")
    parser.add_argument("--phase-steps", type=int, default=200, help="of a phase of the load, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    parser.add_argument("--failures", type=Path, help="append the requests of wrong answers to this file, whole")
    args = parser.parse_args(argv)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console) as progress:
        bar = progress.add_task("loading")
        loop, info = build_engine(
            config_of(args, Path(folder)),
            lambda what, done, of: progress.update(bar, description=what, completed=done, total=of),
        )
        progress.remove_task(bar)
        mix = Mix(args.seed, info, args.longest, args.new, is_invariant=args.batch_invariant)
        run = Run(loop, info, mix, is_invariant=args.batch_invariant)
        started = time.monotonic()
        try:
            drive(run, mix, args, info.max_num_seqs, progress)
        except Exception as error:
            console.print_exception()
            run.wrong.append(f"it broke: {type(error).__name__}: {error}")
    wall_s, stats = time.monotonic() - started, loop.stats()
    print(f"{run.counts['steps']} turns, {stats.steps} steps, {stats.padding_rows} padding rows; {dict(run.counts)}")
    print(f"calls: {', '.join(f'{name} {count}' for name, count in stats.method_calls if count)}")
    for when, rest in zip(("first", "last"), (run.rests[0], run.rests[-1]) if run.rests else (), strict=False):
        print(
            f"{when} lull, {rest.requests} requests: RSS {rest.rss_mb:.1f} MB, torch on device {rest.device_mb:.1f} MB"
        )
    figures = told(run, args, torch.device(args.device), wall_s)
    lines = [json.dumps(each) for each in figures]
    print("\n".join(lines))
    for path, content in ((args.json, lines), (args.failures, [repr(request) for request in run.failed])):
        if path is not None:
            with path.open("a") as out:
                out.writelines(f"{line}\n" for line in content)
    for each in figures:
        if not each["value"] and each["case"].endswith(MEANT):
            print(f"NOT SHOWN: {each['case']} is 0, so that the load was not what it is meant to be")
    for problem in run.wrong[:20]:
        print(f"WRONG: {problem}")
    return 1 if run.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
