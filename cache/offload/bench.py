"""`python -m cache.offload.bench`: the way between pool and host memory beside the link, and the index of a large tier.

    link    pinned copies of a chunk's size, each way, alone and at once: what no transfer can beat
    move    whole chunks of scattered cells through the staging rings, each way, as a part of that link
    index   keys and look-ups among many chunks, and the memory they take
    policy  what part of a trace's chunks a tier has, beside one that evicts the least recently used

Prints one JSON object a line, in the form that benchmarks.jsonl collects. On a CPU the link is a copy in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cache.factory import cache_factory
from cache.figures import Figure, figure
from cache.geometry import CacheConfig, Geometry, LayerGeometry
from cache.offload.chunks import Namespace, chunks_of, geometry_record
from cache.offload.groups import Groups
from cache.offload.host import HostSlab
from cache.offload.policy import LeastRecent, conversations, documents, hit_rate
from cache.offload.residents import Residents
from cache.offload.transfers import Transfers

REPEATS = 5
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes a second of pinned copies as large as a chunk, many of them back to back."""

    up: float
    """Host to device."""
    down: float
    both: float
    """Sum of both directions at once."""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("cache.offload.bench: this torch sees no CUDA device: use --device cpu", file=sys.stderr)
        return 2
    geometry = Geometry((LayerGeometry(args.heads, args.head_dim, args.head_dim),) * args.layers)
    for case in args.cases.split(","):
        records = {"move": move, "index": index, "policy": policy}[case](geometry, device, args)
        for record in records:
            print(json.dumps(record), flush=True)
    return 0


# --- link and move ----------------------------------------------------------------------------------------------------


def move(geometry: Geometry, device: torch.device, args: argparse.Namespace) -> Iterator[Figure]:
    """Link and transfers in turn, so that both are of one machine in one state."""
    dtype = torch.bfloat16
    groups = Groups.of(geometry, dtype, args.chunk_tokens)
    cells = args.chunks * args.chunk_tokens
    cache = cache_factory().build(
        "batched", geometry, CacheConfig(cells, min(512, cells), dtype, initial_cells=cells), device
    )
    transfers = Transfers(cache.pool, groups, device, ring_slots=args.slots)
    slab = HostSlab(transfers.chunk_bytes, args.chunks * transfers.chunk_bytes, pinned=device.type == "cuda")
    chunks = chunks_of(_namespace(geometry), np.arange(cells), args.chunk_tokens)
    host = [memory for chunk in chunks if (memory := slab.reserve(chunk)) is not None]
    held = cache.claim_cells(cells)  # backs them with memory
    rows = np.random.default_rng(0).permutation(held).reshape(args.chunks, args.chunk_tokens)
    moved = args.chunks * transfers.chunk_bytes
    shape = f"{args.chunk_tokens}-token chunks of {transfers.chunk_bytes >> 10} KiB, {args.chunks} of them"
    try:
        link = measure_link(transfers.chunk_bytes, device, args.chunks)
        for name, rate in (("up", link.up), ("down", link.down), ("both ways", link.both)):
            yield figure("link", f"pinned copies {name}, {shape}", rate / GIB, "GiB/s", device)

        def store() -> None:
            _all(transfers, lambda n: transfers.store(rows[n], host[n], gathered=_nothing, done=_nothing), args.chunks)

        def load() -> None:
            _all(transfers, lambda n: transfers.load(host[n], rows[n], done=_nothing), args.chunks)

        for name, work, ceiling in (("store", store, link.down), ("load", load, link.up)):
            seconds = _median_s(work, device)
            yield figure("move", f"{name}, {shape}", moved / seconds / GIB, "GiB/s", device, floor=ceiling / GIB)
            part = 100 * moved / seconds / ceiling
            yield figure("move", f"{name}, part of the link", part, "%", device, floor=100.0)
        half = args.chunks // 2
        both_s = _median_s(lambda: _both(transfers, rows, host, half), device)
        part = 100 * 2 * half * transfers.chunk_bytes / both_s / link.both
        yield figure("move", "both ways at once, part of the link", part, "%", device, floor=100.0)
        yield figure("move", "host time a chunk, load", 1e6 * _enqueue_s(transfers, rows, host), "us", device)
    finally:
        transfers.close()
        cache.close()


def measure_link(size: int, device: torch.device, count: int) -> Link:
    """Of copies of `size` bytes between `count` pinned places and as many on the device."""
    is_cuda = device.type == "cuda"
    host = torch.zeros(count, size, dtype=torch.uint8, pin_memory=is_cuda)
    there = torch.zeros(count, size, dtype=torch.uint8, device=device)
    streams = [torch.cuda.Stream(device) for _ in range(2)] if is_cuda else []  # type: ignore[no-untyped-call]

    def copy(targets: torch.Tensor, sources: torch.Tensor, stream: int, first: int, last: int) -> None:
        with torch.cuda.stream(streams[stream]) if is_cuda else _here():
            for number in range(first, last):
                targets[number].copy_(sources[number], non_blocking=True)

    def both() -> None:
        for number in range(count // 2):
            copy(there, host, 0, number, number + 1)
            copy(host, there, 1, count // 2 + number, count // 2 + number + 1)

    up_s = _median_s(lambda: copy(there, host, 0, 0, count), device)
    down_s = _median_s(lambda: copy(host, there, 1, 0, count), device)
    both_s = _median_s(both, device)
    return Link(count * size / up_s, count * size / down_s, 2 * (count // 2) * size / both_s)


def _all(transfers: Transfers, begin: Callable[[int], bool], count: int) -> None:
    """Begin all of them as soon as there is a ring slot, and wait until nothing is under way."""
    number = 0
    while number < count or transfers.in_flight:
        while number < count and begin(number):
            number += 1
        transfers.poll()


def _both(transfers: Transfers, rows: np.ndarray, host: Sequence[torch.Tensor], half: int) -> None:
    """The first half of the chunks goes up while the second half goes down."""
    loaded = stored = 0
    while loaded < half or stored < half or transfers.in_flight:
        while loaded < half and transfers.load(host[loaded], rows[loaded], done=_nothing):
            loaded += 1
        at = half + stored
        while stored < half and transfers.store(rows[at], host[at], gathered=_nothing, done=_nothing):
            stored += 1
            at += 1
        transfers.poll()


def _enqueue_s(transfers: Transfers, rows: np.ndarray, host: Sequence[torch.Tensor]) -> float:
    """What loading takes of the engine thread, a chunk. On a CPU that is the copy itself too."""
    batch = min(transfers.batch_size, len(host))
    times = []
    for first in range(0, len(host) - batch + 1, batch):
        started = time.perf_counter()
        for number in range(first, first + batch):
            assert transfers.load(host[number], rows[number], done=_nothing)
        transfers.flush()
        times.append((time.perf_counter() - started) / batch)
        while transfers.in_flight:
            transfers.poll()
    return statistics.median(times)


def _median_s(work: Callable[[], None], device: torch.device) -> float:
    times = []
    for repeat in range(REPEATS + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if repeat:  # the first one warms up
            times.append(time.perf_counter() - started)
    return statistics.median(times)


class _here:  # noqa: N801  stands where `torch.cuda.stream` does
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _nothing() -> None:
    pass


# --- index ------------------------------------------------------------------------------------------------------------


def index(geometry: Geometry, device: torch.device, args: argparse.Namespace) -> Iterator[Figure]:
    """A host tier of `--entries` chunks whose bytes are none: what finding a chunk costs, and keeping it findable."""
    cpu = torch.device("cpu")
    space, path_chunks = _namespace(geometry), 1000
    slab = HostSlab(1, args.entries * 256)
    rng = np.random.default_rng(0)
    asked: list[np.ndarray] = []
    kept, before = 0, _resident_bytes()
    while kept < args.entries:
        tokens = rng.integers(0, 1 << 17, min(path_chunks, args.entries - kept) * args.chunk_tokens)
        for chunk in chunks_of(space, tokens, args.chunk_tokens):
            assert slab.reserve(chunk) is not None
            slab.publish(chunk)
            kept += 1
        if kept % (16 * path_chunks) == path_chunks or not asked:
            asked.append(tokens)
    case = f"{args.entries} chunks of {args.chunk_tokens} tokens"
    yield figure("index", f"memory a chunk, {case}", (_resident_bytes() - before) / args.entries, "bytes", cpu)
    # The processor's time: of other work on the machine an index knows nothing.
    key_s, look_s, total = 0.0, 0.0, 0
    for tokens in asked:
        started = time.thread_time()
        chunks = chunks_of(space, tokens, args.chunk_tokens)
        keyed = time.thread_time()
        assert slab.leading(chunks) == len(chunks)
        key_s, look_s = key_s + keyed - started, look_s + time.thread_time() - keyed
        total += len(chunks)
    yield figure("index", f"key of a chunk, {case}", 1e6 * key_s / total, "us", cpu)
    yield figure("index", f"look-up of a chunk, {case}", 1e6 * look_s / total, "us", cpu)


def policy(geometry: Geometry, device: torch.device, args: argparse.Namespace) -> Iterator[Figure]:
    """Of 1,000 chunks, in any tier: neither bytes nor geometry matter."""
    capacity, cpu = 1000, torch.device("cpu")
    both = zip(documents(0, args.trace), conversations(0, args.trace), strict=True)
    traces = {
        "documents by Zipf, 30 % one-time prompts": documents(0, args.trace),
        "documents by Zipf, 60 % one-time prompts": documents(0, args.trace, scanned=0.6),
        "60 conversations at once": conversations(0, args.trace),
        "200 conversations at once": conversations(0, args.trace, users=200),
        "documents and conversations in turn": [path for pair in both for path in pair],
    }
    for name, trace in traces.items():
        ours, peer = (100 * hit_rate(kind(), trace, capacity) for kind in (Residents, LeastRecent))
        case = f"chunks found, {name}, {capacity} chunks"
        yield figure("policy", case, ours, "%", cpu, peer="least recently used", peer_value=peer)


def _resident_bytes() -> int:
    """Of this process."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError as error:
        raise SystemExit("cache.offload.bench: the index case reads /proc, which is only on Linux") from error


def _namespace(geometry: Geometry) -> Namespace:
    return Namespace("bench", "bfloat16", geometry_record(geometry), "none")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cache.offload.bench", description="time the tiers below the pool")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", default="move,index,policy")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8, help="K/V heads of a layer")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--chunk-tokens", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=128, help="moved in each direction")
    parser.add_argument("--slots", type=int, help="of each staging ring (default: what a server takes)")
    parser.add_argument("--entries", type=int, default=1_000_000, help="of the index")
    parser.add_argument("--trace", type=int, default=6000, help="prompts of each trace of the policy case")
    return parser


if __name__ == "__main__":
    sys.exit(main())
