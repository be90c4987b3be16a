"""`python -m engine.kv_bench`: what reuse of prefixes is worth, and what it costs where there is none.

    move     chunks between the pool and host memory as a part of the link      (cache/offload/bench.py)
    index    finding one of a million chunks                                    (cache/offload/bench.py)
    policy   what is evicted first: hits beside one that evicts the oldest      (cache/offload/bench.py)
    repeat   first token of a long prompt: cold, from the tree, from host memory
    chat     a conversation: tokens that each turn computes
    shared   requests that begin alike, beside the same ones without reuse
    fresh    requests that share nothing, beside the same ones without reuse and tiers
    working  prompts of three pools asked again in turn, beside the same ones without tiers

Whatever is compared was run in turn in the same process, over the same model and pool. Prints one JSON object a line,
in the form that benchmarks.jsonl collects: `peer_value` is what `value` is compared with, in the same unit.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console

from cache.figures import Figure, figure
from cache.offload import bench as offload_bench
from engine.build import build_engine
from engine.config import DEFAULT_MODEL, EngineConfig
from engine.errors import CellserveError
from engine.loop import EngineLoop
from engine.types import GenerateRequest, SamplingParams
from static_graphs.shapes import SHAPES, write_config

GIB = 1 << 30
ENGINE_CASES = ("repeat", "chat", "shared", "fresh", "working")
OFFLOAD_CASES = ("move", "index", "policy")
CASES = (*OFFLOAD_CASES, *ENGINE_CASES)
GREEDY = SamplingParams(temperature=0.0)

Prompt = tuple[int, ...]


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    console = Console(stderr=True)
    cases = args.cases.split(",")
    if strange := set(cases) - set(CASES):
        console.print(f"kv_bench: no case {', '.join(sorted(strange))}; there are {', '.join(CASES)}", style="red")
        return 2
    for name in OFFLOAD_CASES:
        if name in cases:
            console.print(name)
            options = ["--device", args.device, "--cases", name, "--chunks", str(args.chunks)]
            if offload_bench.main([*options, "--entries", str(args.entries), "--trace", str(args.trace)]):
                return 2
    if set(cases) & set(ENGINE_CASES):
        return _run_engine(args, [case for case in cases if case in ENGINE_CASES], console)
    return 0


def _run_engine(args: argparse.Namespace, cases: Sequence[str], console: Console) -> int:
    with tempfile.TemporaryDirectory(prefix="cellserve-bench-") as folder:
        try:
            with console.status("starting") as status:
                loop, info = build_engine(_config(args, Path(folder)), lambda text, *_: status.update(text))
        except CellserveError as error:
            console.print(f"kv_bench: {error}", style="red", markup=False)
            return 2
    bench = Bench(loop, info.vocab_size, args.shape or Path(info.model).name, torch.device(info.device), args)
    bench.ask(bench.prompt(min(64, args.prompt)), 2)  # warms up
    for case in cases:
        console.print(case)
        records: Iterator[Figure] = getattr(bench, case)()
        for record in records:
            print(json.dumps(record), flush=True)
    return 0


def _config(args: argparse.Namespace, folder: Path) -> EngineConfig:
    """A pool that holds what the cases run at once, and host memory for a prompt and some more."""
    if args.shape:
        write_config(args.shape, folder)
    room = max(args.prompt + 256, args.requests * (args.prefix + args.fresh_prompt + args.new_tokens + 16))
    if args.cases == "working":  # nothing else has to fit
        room = args.requests * (args.working_prompt + args.new_tokens + 16)
    return EngineConfig(
        model=str(folder) if args.shape else args.model,
        load_format="dummy" if args.shape or args.dummy else "auto",
        device=args.device,
        dtype=args.dtype or ("bfloat16" if args.shape else "float32"),
        max_num_seqs=args.requests,
        kv_cells=room,
        kv_host_gib=args.host_gib,
        widths=None if args.device == "cpu" else (1, 2, 4, 8, 16, 32, 64),
        max_num_batched_tokens=args.batched_tokens,
    )


class Bench:
    """One engine and the runs on it. Request ids and prompts are new at every call."""

    def __init__(
        self, loop: EngineLoop, vocab_size: int, model: str, device: torch.device, args: argparse.Namespace
    ) -> None:
        self.loop = loop
        self._vocab_size = vocab_size
        self._model = model
        self._device = device
        self._args = args
        self._rng = random.Random(0)
        self._asked = 0

    # --- cases --------------------------------------------------------------------------------------------------------

    def repeat(self) -> Iterator[Figure]:
        """First token of the same prompt, three times over, `--repeat` prompts."""
        cold, tree, host, found = [], [], [], 0
        for _ in range(self._args.repeat):
            prompt = self.prompt(self._args.prompt)
            self.loop.reset_prefix_cache()
            cold.append(self.ask(prompt, 2)[0])
            tree.append(self.ask(prompt, 2)[0])
            self.loop.reset_prefix_cache()
            seconds, found, _ = self.ask(prompt, 2)
            host.append(seconds)
        case, cold_ms = f"first token of {self._args.prompt} tokens", 1e3 * statistics.median(cold)
        yield self._figure("kv repeat", f"{case}, cold", cold_ms, "ms")
        for name, times in (("the pool", tree), (f"host memory, {found} tokens", host)):
            ms = 1e3 * statistics.median(times)
            yield self._figure("kv repeat", f"{case}, from {name}", ms, "ms", peer="cold", peer_value=cold_ms)
            yield self._figure("kv repeat", f"{case}, from {name}: times sooner", cold_ms / ms, "x")
        below = self.loop.kv_report().tiers
        assert below is not None
        host_tier = below.tiers[0]
        yield self._figure(
            "kv repeat", "load, by the device's clock", _rate(host_tier.loaded_bytes, host_tier.load_s), "GiB/s"
        )

    def chat(self) -> Iterator[Figure]:
        """Turns of `--turn` new tokens behind all that was said: what each computes, and its first token."""
        self.loop.reset_prefix_cache()
        said: list[int] = []
        computed, seconds = [], []
        for _ in range(self._args.turns):
            said += self.prompt(self._args.turn)
            before = self.loop.stats().prompt_tokens
            first_s, _, answer = self.ask(tuple(said), self._args.new_tokens)
            computed.append(self.loop.stats().prompt_tokens - before)
            seconds.append(first_s)
            said += answer
        case = f"{self._args.turns} turns of {self._args.turn} + {self._args.new_tokens} tokens"
        whole = len(said) - self._args.new_tokens
        name = f"prompt tokens computed in the last turn, {case}"
        yield self._figure("kv chat", name, computed[-1], "tokens", peer="without reuse", peer_value=whole)
        first_ms, last_ms = 1e3 * seconds[0], 1e3 * seconds[-1]
        name = f"first token of the last turn, {case}"
        yield self._figure("kv chat", name, last_ms, "ms", peer="first turn", peer_value=first_ms)

    def shared(self) -> Iterator[Figure]:
        """`--requests` that share `--prefix` tokens, with reuse and without."""
        prefix = self.prompt(self._args.prefix)
        prompts = [prefix + self.prompt(self._args.fresh_prompt) for _ in range(self._args.requests)]
        case = f"{len(prompts)} requests, {len(prefix)} shared and {self._args.fresh_prompt} own tokens"
        yield from self._side_by_side("kv shared", case, lambda: prompts)

    def fresh(self) -> Iterator[Figure]:
        """`--requests` of `--fresh-prompt` tokens that nobody has asked before, with reuse and tiers and without."""
        case = f"{self._args.requests} requests of {self._args.fresh_prompt} own tokens"
        length = self._args.fresh_prompt
        yield from self._side_by_side(
            "kv fresh", case, lambda: [self.prompt(length) for _ in range(self._args.requests)]
        )

    def working(self) -> Iterator[Figure]:
        """Prompts that take three pools, `--requests` at a time: asked again in the same order, none is in the pool."""
        length, cells = self._args.working_prompt, self.loop.kv_report().cells_total
        prompts = [self.prompt(length) for _ in range(-(-3 * cells // length))]
        plain, rates, firsts = self.loop.without_tiers(), list[float](), list[float]()
        for loop in (self.loop, plain):
            loop.reset_prefix_cache()
            self._in_turn(loop, prompts)
            seconds, first = self._in_turn(loop, prompts)
            rates.append(len(prompts) / seconds)
            firsts.append(1e3 * statistics.median(first))
            loop.reset_prefix_cache()
        case = f"{len(prompts)} prompts of {length} tokens again, three times the pool of {cells} cells"
        unit = "requests per CPU s" if self._device.type == "cpu" else "requests/s"
        yield self._figure("kv working", case, rates[0], unit, peer="without tiers", peer_value=rates[1])
        yield self._figure("kv working", f"{case}: times as many", rates[0] / rates[1], "x")
        case = f"first token, {case}"
        yield self._figure("kv working", case, firsts[0], "ms", peer="without tiers", peer_value=firsts[1])

    def _side_by_side(self, bench: str, case: str, prompts: Callable[[], list[Prompt]]) -> Iterator[Figure]:
        """In turn with and without reuse; the part that each pair of runs differs by is what counts."""
        plain = self.loop.without_prefixes()
        rates: list[tuple[float, float]] = []
        for number in range(self._args.pairs + 1):
            asked = prompts()
            tokens = len(asked) * self._args.new_tokens
            runs = {}
            for loop in (self.loop, plain) if number % 2 else (plain, self.loop):
                self.loop.reset_prefix_cache()
                runs[loop is plain] = tokens / self._run(loop, asked)
            if number:  # the first pair warms up
                rates.append((runs[False], runs[True]))
        ours, peer = (statistics.median(side) for side in zip(*rates, strict=True))
        case = f"{case}, {self._args.new_tokens} new"
        unit = "output tok per CPU s" if self._device.type == "cpu" else "output tok/s"
        yield self._figure(bench, case, ours, unit, peer="--no-prefix-cache", peer_value=peer)
        parts = [100 * (ours / peer - 1) for ours, peer in rates]
        yield self._figure(bench, f"{case}: gain, median of {len(parts)} pairs", statistics.median(parts), "%")

    # --- runs ---------------------------------------------------------------------------------------------------------

    def prompt(self, length: int) -> Prompt:
        """Random ids, new ones at every call."""
        return tuple(self._rng.choices(range(self._vocab_size), k=length))

    def ask(self, prompt: Prompt, new_tokens: int) -> tuple[float, int, list[int]]:
        """-> seconds to the first token, prompt tokens that were there, the tokens drawn.

        Returns when nothing is under way any more, copies to tiers included.
        """
        started = time.perf_counter()
        self._submit(self.loop, prompt, new_tokens)
        first_s, cached, drawn = 0.0, 0, list[int]()
        while self.loop.has_work():
            for update in self.loop.step():
                assert update.finish in (None, "length"), update.error
                if update.token_ids and not drawn:
                    first_s = time.perf_counter() - started
                cached = cached if update.cached_tokens is None else update.cached_tokens
                drawn += update.token_ids
        assert len(drawn) == new_tokens
        return first_s, cached, drawn

    def _run(self, loop: EngineLoop, prompts: Sequence[Prompt]) -> float:
        """Seconds until the last token. Copies that are still under way then belong to nobody's answer.

        On a CPU the processor's own, all threads together: of other work on the machine they know nothing.
        """
        started = self._clock()
        for prompt in prompts:
            self._submit(loop, prompt, self._args.new_tokens)
        left, ended_s = len(prompts), 0.0
        while loop.has_work():
            left -= sum(update.finish is not None for update in loop.step())
            if not left and not ended_s:
                ended_s = self._clock() - started
        return ended_s

    def _in_turn(self, loop: EngineLoop, prompts: Sequence[Prompt]) -> tuple[float, list[float]]:
        """`--requests` at a time -> seconds for all, and of each to its first token. Seconds as `_run` has them."""
        started, waiting, is_open, firsts = self._clock(), deque(prompts), set[str](), dict[str, float]()
        submitted: dict[str, float] = {}
        while waiting or is_open:
            while waiting and len(is_open) < self._args.requests:
                name = self._submit(loop, waiting.popleft(), self._args.new_tokens)
                is_open.add(name)
                submitted[name] = self._clock()
            for update in loop.step():
                if update.token_ids:
                    firsts.setdefault(update.request_id, self._clock() - submitted[update.request_id])
                if update.finish is not None:
                    is_open.remove(update.request_id)
        seconds = self._clock() - started
        while loop.has_work():
            loop.step()
        return seconds, list(firsts.values())

    def _clock(self) -> float:
        return time.process_time() if self._device.type == "cpu" else time.perf_counter()

    def _submit(self, loop: EngineLoop, prompt: Prompt, new_tokens: int) -> str:
        self._asked += 1
        name = f"bench-{self._asked}"
        loop.submit(GenerateRequest(name, prompt, sampling=GREEDY, max_new_tokens=new_tokens))
        return name

    def _figure(
        self,
        bench: str,
        case: str,
        value: float,
        unit: str,
        *,
        peer: str | None = None,
        peer_value: float | None = None,
    ) -> Figure:
        return figure(bench, f"{self._model}: {case}", value, unit, self._device, peer=peer, peer_value=peer_value)


def _rate(size: int, seconds: float) -> float:
    return size / seconds / GIB if seconds else 0.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine.kv_bench", description="time the reuse of prefixes")
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="folder, GGUF file or hub id (default: the small model)")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this published shape instead of a model")
    parser.add_argument("--dummy", action="store_true", help="random weights of --model's shape")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", help="(default: bfloat16 with --shape, else float32)")
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of the repeated prompt")
    parser.add_argument("--repeat", type=int, default=3, help="repeated prompts, of which the median counts")
    parser.add_argument("--turns", type=int, default=8, help="of the chat")
    parser.add_argument("--turn", type=int, default=48, help="new prompt tokens of each turn")
    parser.add_argument("--requests", type=int, default=8, help="of the shared and fresh workloads, all at once")
    parser.add_argument("--prefix", type=int, default=512, help="tokens that the shared workload begins with")
    parser.add_argument("--fresh-prompt", type=int, default=64, help="prompt tokens that nobody shares")
    parser.add_argument("--working-prompt", type=int, default=256, help="tokens of each of the working case")
    parser.add_argument("--new-tokens", type=int, default=16, help="of each request and turn")
    parser.add_argument("--pairs", type=int, default=5, help="runs with and without reuse, side by side")
    parser.add_argument("--host-gib", type=float, default=0.5, help="of the tier below the pool")
    parser.add_argument("--batched-tokens", type=int, help="of a step while nothing decodes")
    parser.add_argument("--chunks", type=int, default=64, help="of the move case")
    parser.add_argument("--entries", type=int, default=1_000_000, help="of the index case")
    parser.add_argument("--trace", type=int, default=6000, help="prompts of each trace of the policy case")
    return parser


if __name__ == "__main__":
    sys.exit(main())
