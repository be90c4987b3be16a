"""One product's candidates: which there are, whether each computes the product, how long it takes, which is best."""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from static_graphs.graphs import captured
from static_graphs.kernels.norms import gate_by
from static_graphs.kernels.products import gated_product, product
from static_graphs.kernels.shared_memory import room_of
from static_graphs.tilings import Product, Tiling, bucket, choose, kernel_rows, shared_bytes

WIN = 0.03
"""By how much a candidate must beat the rule's choice: less is noise, and the rule is known everywhere."""
_BLOCKS = (
    Tiling(64, 64),
    Tiling(64, 64, warps=8),
    Tiling(64, 128),
    Tiling(64, 128, stages=3),
    Tiling(64, 256, stages=3),
    Tiling(128, 64, stages=3),
    Tiling(128, 64, warps=8),
    Tiling(128, 128, warps=8, stages=3),
)
_ROW_BLOCKS = tuple(
    Tiling(block_n, block_k, warps=warps, is_dot=False)
    for block_n, block_k, warps in (
        (1, 1024, 4),
        (2, 512, 4),
        (2, 1024, 4),
        (2, 2048, 8),
        (4, 512, 4),
        (4, 1024, 4),
        (4, 1024, 8),
        (8, 512, 8),
    )
)
_PARTS = (1, 2, 4, 8, 16)
_ACTIVATION = "silu"
_REPLAYS = 12
_PASS_KERNELS = 16
"""Products in a captured graph, at least: the events around it cost as much as a short one."""

TimeUs = Callable[[int, Tiling | None], float | None]
"""(rows, tiling) -> microseconds of one product; None: it fails, or computes something else."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a device."""

    shared_bytes: int
    """That one program may have."""
    multiprocessors: int
    l2_bytes: int

    @staticmethod
    def of(device: torch.device) -> Limits:
        """Of a CUDA device."""
        known = torch.cuda.get_device_properties(device)
        return Limits(room_of(device).shared_bytes, known.multi_processor_count, known.L2_cache_size)


@dataclass(frozen=True, slots=True)
class Choice:
    """What is best for one bucket of rows, and what the rule takes there. The times: microseconds."""

    tiling: Tiling | None
    us: float
    rule: Tiling | None
    rule_us: float | None
    """None where the rule's choice does not run here."""


def rule_of(of: Product, rows: int) -> Tiling | None:
    """What is run without a table: a product that must be whole is cuBLAS's where the rule would cut K."""
    tiling = choose(rows, of.width, of.depth, gated=of.is_gated)
    return None if tiling is not None and of.is_whole and tiling.parts > 1 else tiling


def candidates(of: Product, rows: int, limits: Limits) -> list[Tiling | None]:
    """The rule's choice first, cuBLAS among them, and no tiling that does not fit the device."""
    found = dict.fromkeys([rule_of(of, rows), None])
    if bucket(rows) == 1:
        found.update(dict.fromkeys(_cut(of, _ROW_BLOCKS, 16 * limits.multiprocessors)))
    found.update(dict.fromkeys(_cut(of, _BLOCKS, 4 * limits.multiprocessors)))
    return [
        tiling
        for tiling in found
        if tiling is None or shared_bytes(tiling, rows, gated=of.is_gated) <= limits.shared_bytes
    ]


def _cut(of: Product, blocks: Iterable[Tiling], most_programs: int) -> Iterator[Tiling]:
    """Each block with K whole, and in as many parts as give even ones and no more programs than so many."""
    for block in blocks:
        yield block
        programs = -(-of.width // block.block_n)
        for parts in () if of.is_whole else _PARTS[1:]:
            if programs * parts <= most_programs and of.depth % (block.block_k * parts) == 0:
                yield replace(block, parts=parts)


def best(
    of: Product, row_counts: Sequence[int], tilings: Iterable[Tiling | None], time_us: TimeUs, copy_bytes_s: float
) -> Choice:
    """The tiling of least time over `row_counts` (of one bucket), if it beats the rule's by more than WIN; else that.

    A product cut along K leaves [parts, rows, width] of float32 for its reader to add up: their reading, at the
    measured copy bandwidth, counts as the tiling's own time. Whoever wins is timed again beside the rule's, since
    the least of many times is partly luck. Raises RuntimeError where nothing computes the product.
    """

    def cost_us(tiling: Tiling | None) -> float | None:
        total = 0.0
        for rows in row_counts:
            us = time_us(rows, tiling)
            if us is None:
                return None
            parts = tiling.parts if tiling is not None else 1
            total += us + (1e6 * parts * rows * of.width * 4 / copy_bytes_s if parts > 1 else 0.0)
        return total / len(row_counts)

    rule = rule_of(of, row_counts[0])
    costs = {tiling: us for tiling in tilings if (us := cost_us(tiling)) is not None}
    if not costs:
        raise RuntimeError(f"nothing computes {of} of {list(row_counts)} rows as torch does")
    fastest = min(costs, key=costs.__getitem__)
    if rule not in costs:
        return Choice(fastest, costs[fastest], rule, None)
    if fastest != rule and costs[fastest] < (1 - WIN) * costs[rule]:
        again, rule_again = cost_us(fastest), cost_us(rule)
        if again is not None and rule_again is not None and again < (1 - WIN) * rule_again:
            return Choice(fastest, again, rule, rule_again)
    return Choice(rule, costs[rule], rule, costs[rule])


class Trial:
    """One product's random weights on a device: more of them than its L2 cache holds, as in a model's layers."""

    def __init__(
        self,
        of: Product,
        device: torch.device,
        clock_us: Callable[[Callable[[], object]], float],
        *,
        dtype: torch.dtype = torch.bfloat16,
        l2_bytes: int = 0,
    ) -> None:
        """clock_us: microseconds of one call of what it is given, by which every weight is multiplied at least once."""
        self.product = of
        self.clock_us = clock_us
        self.passes = 1
        shape = (2 * of.width if of.is_gated else of.width, of.depth)
        copies = max(1, -(-4 * l2_bytes // (shape[0] * shape[1] * dtype.itemsize)))
        if l2_bytes:
            self.passes = -(-_PASS_KERNELS // copies)
        self.weights = [torch.randn(shape, device=device, dtype=dtype) * 0.02 for _ in range(copies)]
        self.tolerance = 1e-4 if dtype == torch.float32 else 1e-2

    def time_us(self, rows: int, tiling: Tiling | None) -> float | None:
        """As TimeUs."""
        weights = self.weights
        x = torch.randn(rows, self.product.depth, device=weights[0].device, dtype=weights[0].dtype)

        def run() -> None:
            for _ in range(self.passes):
                for weight in weights:
                    multiply(x, weight, self.product, tiling)

        try:
            if tiling is not None and not self._is_right(x, tiling):
                return None
            return self.clock_us(run) / (self.passes * len(weights))
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception:  # a tiling that does not compile or fit raises what triton likes
            return None

    def _is_right(self, x: torch.Tensor, tiling: Tiling) -> bool:
        weight = self.weights[0]
        # What is freed here is what the product writes into: an element that it leaves out is no number.
        out = (tiling.parts, x.shape[0], self.product.width)
        torch.full(out, torch.nan, device=x.device, dtype=torch.float32 if tiling.parts > 1 else x.dtype)
        found = multiply(x, weight, self.product, tiling).float().sum(0)
        wanted = multiply(x, weight, self.product, None).float().sum(0)
        return bool((found - wanted).norm() <= self.tolerance * wanted.norm())


def multiply(x: torch.Tensor, weight: torch.Tensor, of: Product, tiling: Tiling | None) -> torch.Tensor:
    """x [R, K], weight [N or 2 N, K] -> [parts, R, N], as the fused layers compute it."""
    if not of.is_gated:
        return functional.linear(x, weight)[None] if tiling is None else product(x, weight, tiling)
    if tiling is None:
        return gate_by(functional.linear(x, weight), _ACTIVATION)[None]
    return gated_product(x, weight[: of.width], weight[of.width :], _ACTIVATION, tiling)[None]


def graph_us(run: Callable[[], object]) -> float:
    """Median device time of one `run`, replayed from a CUDA graph."""
    graph, _ = captured(run)
    for _ in range(2):
        graph.replay()
    times: list[float] = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times)


Job = tuple[Product, int, Tiling]
"""Product, rows, tiling."""


def kernels_of(jobs: Iterable[Job]) -> list[Job]:
    """One job a kernel: triton compiles one for many sizes."""
    return list({_kernel_of(job): job for job in jobs}.values())


def compile_all(jobs: Sequence[Job], processes: int) -> Iterator[None]:
    """Compile each into triton's cache on disk, many at once; one None a job that is done. CUDA only.

    What fails here fails again where it is timed.
    """
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    with ProcessPoolExecutor(max(1, min(processes, len(jobs))), mp_context=context) as pool:
        try:
            yield from pool.map(_compile, jobs)
        except BrokenProcessPool:
            return  # one was ended from outside: the rest is compiled where it is timed


def default_processes() -> int:
    """Each holds a CUDA context, some 500 MiB of the device."""
    return min(len(os.sched_getaffinity(0)), 16)


def _kernel_of(job: Job) -> tuple[object, ...]:
    """What a kernel is compiled for."""
    of, rows, tiling = job
    part = -(-of.depth // tiling.parts)
    is_even = of.width % tiling.block_n == 0 and part % tiling.block_k == 0
    sizes = tuple(size % 16 == 0 for size in (of.width, of.depth))
    fetch = min(tiling.fetch, 1 << part.bit_length() - 1)
    return replace(tiling, parts=1), tiling.parts > 1, of.is_gated, is_even, sizes, kernel_rows(rows), fetch


def _compile(job: Job) -> None:
    of, rows, tiling = job
    # One row that counts as every row: no memory for a head's weight in each process, and the same kernel.
    try:
        x, row = (torch.zeros(size, of.depth, device="cuda", dtype=torch.bfloat16) for size in (rows, 1))
        multiply(x, row.expand(2 * of.width if of.is_gated else of.width, -1), of, tiling)
        torch.cuda.synchronize()
    except Exception:
        return
