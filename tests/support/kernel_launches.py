"""Takes what the server launches through Triton's front end for sm_90, with no GPU: types are checked, nothing runs.

Run as a program, without TRITON_INTERPRET. Launchers are called on small tensors, or on large ones that have no memory
(meta). Triton binds each launch as it would on a GPU: types, which integers are 1 or multiples of 16, constants. Then
it asks its cache hook, which compiles the kernel up to TTIR and says that somebody else has taken care of it.

Prints a JSON list, one entry a variant: its `kernel`, the `case` that launched it first, its `flags`, its `error` and
the `lines` of its TTIR.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from cache.attend.triton_cells import attend_cells
from cache.geometry import FP8, UNSCALED, Geometry, KvScales, LayerGeometry, Reach
from cache.offload.groups import Groups
from cache.offload.kernels import copy_rows
from cache.offload.staging import Staging
from static_graphs.kernels.logprobs import sum_of_exp
from static_graphs.kernels.norms import RmsNorm, add_norm, gate_by, rms_norm
from static_graphs.kernels.products import gated_product, product
from static_graphs.kernels.rotary import rotate_and_store
from static_graphs.kernels.sampling import argmax_rows, draw
from static_graphs.mixtures import FusedExperts, FusedMixture
from static_graphs.sampler import SampleInputs
from static_graphs.tilings import choose
from support.steps import build_step, plain_pool

BF16, F32 = torch.bfloat16, torch.float32
TARGET = GPUTarget("cuda", 90, 32)
EVERYTHING = Reach()
Case = Callable[[], object]

variants: dict[str, dict[str, Any]] = {}
"""By all that tells one from another."""


class NoDevice:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class FrontEndPassed(Exception):
    def __init__(self, lines: int) -> None:
        self.lines = lines


def record(case: str, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
    """Triton's cache hook. True: it need not compile the kernel, and launches nothing."""
    kernel = fn.jit_function
    constants = dict(compile["constants"])
    named = {kernel.arg_names[at[0]]: at for at in constants}
    if "PDL" in named:  # which the device decides, and tensors of the host leave out
        constants[named["PDL"]] = True
    key = str((fn.module, fn.name, compile["signature"], constants, compile["configs"]))
    if key not in variants:
        flags = {name: constants[at] for name, at in named.items() if isinstance(constants[at], bool)}
        variant = {"kernel": f"{fn.module}.{fn.name}", "case": case, "flags": flags, "error": None, "lines": 0}
        variants[key] = variant
        options = {name: compile[name] for name in ("num_warps", "num_stages")}
        try:
            source = ASTSource(kernel, compile["signature"], constants, compile["configs"][0])
            variant["lines"] = check_types(source, options)
        except Exception as error:
            variant["error"] = f"{type(error).__name__}: {error}"
    return True


def check_types(source: ASTSource, options: dict[str, Any]) -> int:
    """-> lines of TTIR. Raises what the front end raises."""
    knobs.runtime.add_stages_inspection_hook = only_ttir
    try:
        triton.compile(source, target=TARGET, options=options)
    except FrontEndPassed as passed:
        return passed.lines
    finally:
        knobs.runtime.add_stages_inspection_hook = None
    raise AssertionError("Triton compiled beyond TTIR: its stages are not what this was written for")


def only_ttir(*args: Any) -> tuple[str, str]:
    """Triton's stages hook. Called without arguments too, for what the stages add to a cache's key."""

    def stop(module: Any, _: Any) -> None:
        raise FrontEndPassed(str(module).count("\n"))

    if args:
        stages = args[1]
        assert next(iter(stages)) == "ttir", list(stages)
        stages.update({name: stop for name in list(stages)[1:]})
    return "", ""


# --- attention ----------------------------------------------------------------------------------------------------


def attend(
    rows: int,
    dtype: torch.dtype = BF16,
    *,
    heads: tuple[int, int] = (32, 8),
    dim: int = 128,
    cells: torch.dtype | None = None,
    reach: Reach = EVERYTHING,
    page_cells: int = 1024,
    scales: KvScales = UNSCALED,
    has_sinks: bool = False,
    batch_invariant: bool = False,
    **more: Any,
) -> None:
    """All rows of one sequence."""
    pool = plain_pool(rows, kv_heads=heads[1], k_dim=dim, dtype=cells or dtype)
    step = build_step(
        pool, [list(range(rows))], [(0, row) for row in range(rows)], reaches=[reach], page_cells=page_cells
    )
    step = replace(step, batch_invariant=batch_invariant)
    query = torch.zeros(rows, heads[0], dim, dtype=dtype)
    sinks = torch.zeros(heads[0], dtype=dtype) if has_sinks else None
    options = {"reach": reach, "scale": 0.1, "scales": scales, "sinks": sinks, **more}
    attend_cells(query, pool.keys[0], pool.values[0], step, **options)


ATTENTION: dict[str, Case] = {
    "one row": partial(attend, 1, num_pieces=66),
    "rows": partial(attend, 12, num_pieces=66),
    "tiles": partial(attend, 256, num_pieces=16),
    "one piece": partial(attend, 3, heads=(8, 1), num_pieces=1),
    "a group of many heads": partial(attend, 3, heads=(71, 1), dim=64, num_pieces=66),
    "float32 row": partial(attend, 1, F32, num_pieces=66),
    "float32 tiles": partial(attend, 64, F32, heads=(16, 8), dim=64, num_pieces=16),
    "FP8 cells": partial(attend, 256, cells=FP8, scales=KvScales(0.5, 0.25), num_pieces=66),
    "sinks and a window": partial(
        attend, 256, heads=(64, 8), dim=64, reach=Reach("window", 128), has_sinks=True, num_pieces=66
    ),
    "softcap and wide heads": partial(attend, 256, heads=(16, 8), dim=256, softcap=50.0, num_pieces=66),
    "heads of no power of two": partial(attend, 2, heads=(3, 3), dim=80, num_pieces=66),
    "rows that depend on their own runs alone": partial(attend, 256, batch_invariant=True),
    "small pages": partial(attend, 256, page_cells=16, num_pieces=66),
}


# --- fused layers -------------------------------------------------------------------------------------------------


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def multiply(rows: int, width: int, depth: int, dtype: torch.dtype = BF16) -> None:
    tiling = choose(rows, width, depth)
    assert tiling is not None
    product(meta(rows, depth, dtype=dtype), meta(width, depth, dtype=dtype), tiling)


def multiply_gated(rows: int, width: int, depth: int, activation: str = "silu", dtype: torch.dtype = BF16) -> None:
    tiling = choose(rows, width, depth, gated=True)
    assert tiling is not None
    gate, up = meta(2 * width, depth, dtype=dtype).chunk(2)
    gated_product(meta(rows, depth, dtype=dtype), gate, up, activation, tiling)


def add(rows: int, parts: int, dtype: torch.dtype = BF16, *, has_norm: bool = True, has_bias: bool = False) -> None:
    norm = RmsNorm(meta(4096, dtype=dtype), 1e-6, 1.0) if has_norm else None
    add_norm(
        meta(parts, rows, 4096, dtype=F32 if parts > 1 else dtype),
        meta(rows, 4096, dtype=dtype),
        norm,
        meta(4096, dtype=dtype) if has_bias else None,
    )


def rotate(
    rows: int,
    dtype: torch.dtype = BF16,
    *,
    parts: int = 1,
    dim: int = 128,
    is_plain: bool = True,
    cells: torch.dtype | None = None,
    scales: KvScales = UNSCALED,
) -> None:
    heads, kv_heads = 32, 8
    stored = [meta(1000, kv_heads, dim, dtype=cells or dtype) for _ in range(2)]
    columns = (heads + 2 * kv_heads) * dim
    norm = None if is_plain else RmsNorm(meta(dim, dtype=dtype), 1e-6, 0.0)
    rotate_and_store(
        meta(parts, rows, columns, dtype=F32 if parts > 1 else dtype),
        meta(rows, dim, dtype=dtype),
        meta(rows, dim, dtype=dtype),
        *stored,
        meta(rows, dtype=torch.int64),
        bias=None if is_plain else meta(columns, dtype=dtype),
        query_norm=norm,
        key_norm=norm,
        scales=scales,
    )


LAYERS: dict[str, Case] = {
    "one row's product": partial(multiply, 1, 6144, 4096),
    "one row's product of an odd depth": partial(multiply, 1, 1000, 1000),
    "one row's product in float32": partial(multiply, 1, 4096, 4096, F32),
    "product": partial(multiply, 16, 4096, 4096),
    "product of more rows": partial(multiply, 33, 6144, 4096),
    "product of rows and columns too many": partial(multiply, 5, 1000, 1000),
    "product of a vocabulary": partial(multiply, 8, 128256, 4096),
    "product in float32": partial(multiply, 3, 4096, 4096, F32),
    "one row's gated product": partial(multiply_gated, 1, 14336, 4096),
    "gated product": partial(multiply_gated, 16, 14336, 4096),
    "gated product of more rows by gelu": partial(multiply_gated, 33, 6912, 1152, "gelu_tanh"),
    "gated product in float32": partial(multiply_gated, 3, 3072, 1024, "silu", F32),
    "gate": lambda: gate_by(meta(256, 2 * 14336), "silu"),
    "gate in float32": lambda: gate_by(meta(1, 2 * 6912, dtype=F32), "gelu_tanh"),
    "norm": lambda: rms_norm(meta(7, 4096), RmsNorm(meta(4096), 1e-6, 0.0)),
    "norm of the sum of parts": partial(add, 7, 4),
    "norm of one row's sum": partial(add, 1, 1, has_bias=True),
    "norm of a sum in float32": partial(add, 7, 2, F32),
    "sum": partial(add, 7, 1, has_norm=False),
    "rotate": partial(rotate, 7),
    "rotate and norm the sum of parts": partial(rotate, 7, parts=4, is_plain=False),
    "rotate one row in float32": partial(rotate, 1, F32, dim=80),
    "rotate into FP8 cells": partial(rotate, 7, cells=FP8, scales=KvScales(0.5, 0.25)),
}


def mix(
    rows: int,
    dtype: torch.dtype = BF16,
    *,
    experts: int = 128,
    top_k: int = 8,
    size: tuple[int, int] = (2048, 768),
    activation: str = "silu",
    is_normed: bool = True,
) -> None:
    hidden, inner = size
    of = FusedExperts(
        meta(experts, 2 * inner, hidden, dtype=dtype), meta(experts, hidden, inner, dtype=dtype), activation
    )
    FusedMixture(meta(experts, hidden, dtype=dtype), of, top_k, is_normed)(meta(rows, hidden, dtype=dtype))


MIXTURES: dict[str, Case] = {
    "one row's experts": partial(mix, 1),
    "one row's experts in float32": partial(mix, 1, F32, is_normed=False),
    "one row's experts of odd sizes": partial(mix, 1, experts=5, top_k=3, size=(72, 40), activation="gelu_tanh"),
    "experts of a few rows": partial(mix, 9),
    "experts of 256 rows": partial(mix, 256),
    "experts of 500 rows": partial(mix, 500),
    "experts of 8,192 rows": partial(mix, 8192),
    "one expert a row": partial(mix, 64, experts=16, top_k=1, activation="gelu_tanh"),
    "experts of odd sizes in float32": partial(mix, 9, F32, experts=5, top_k=3, size=(72, 40)),
}


# --- the sampler and offloading -----------------------------------------------------------------------------------


def sample(rows: int, dtype: torch.dtype = BF16, *, has_cuts: bool, vocab_size: int = 128256) -> None:
    temperature, top_p, min_p = (meta(rows, dtype=torch.float64) for _ in range(3))
    top_k, seeds, positions = (meta(rows, dtype=torch.int64) for _ in range(3))
    inputs = SampleInputs(temperature, top_k, top_p, min_p, seeds, positions)
    draw(meta(rows, vocab_size, dtype=dtype), inputs, has_cuts=has_cuts)


def copy(head_dim: int, dtype: torch.dtype, batch: int = 2, *, is_gather: bool) -> None:
    """batch: chunks that the staging has room for, 1 MiB each or less; one is copied, from or to the last place."""
    groups = Groups.of(Geometry((LayerGeometry(8, head_dim, head_dim),)), dtype, 256)
    staging = Staging(groups, torch.device("meta"), max_batch_size=batch)
    pointers, rows = meta(2, dtype=torch.int64), meta(1, 256, dtype=torch.int64)
    copy_rows(staging, groups.kernel_groups[0], pointers, rows, batch - 1, is_gather=is_gather)


OTHERS: dict[str, Case] = {
    "argmax": lambda: argmax_rows(meta(9, 128256)),
    "argmax of one row in float32": lambda: argmax_rows(meta(1, 1000, dtype=F32)),
    "draw": partial(sample, 9, has_cuts=False),
    "draw of one row in float32": partial(sample, 1, F32, has_cuts=False, vocab_size=1000),
    "cut draw": partial(sample, 9, has_cuts=True),
    "cut draw of one row in float32": partial(sample, 1, F32, has_cuts=True, vocab_size=1000),
    "sum of exp": lambda: sum_of_exp(meta(9, 128256, dtype=F32), meta(9, 1, dtype=F32)),
    "sum of one row's exp": lambda: sum_of_exp(meta(1, 1000, dtype=F32), meta(1, 1, dtype=F32)),
    "gather": partial(copy, 128, BF16, is_gather=True),
    "gather from behind 2 ** 31 words": partial(copy, 128, BF16, 1 << 16, is_gather=True),
    "scatter": partial(copy, 128, BF16, is_gather=False),
    "scatter bytes": partial(copy, 7, FP8, is_gather=False),
}


# --- two that must not pass: else nothing was checked ---------------------------------------------------------------


@triton.jit
def pointer_or_number(x, n):
    at = x
    if n > 2:
        at = n
    tl.store(x, at)


@triton.jit
def number_that_widens(x, n):
    total = 0
    for i in range(n):
        total += tl.load(x + i)
    tl.store(x, total)


BROKEN: dict[str, Case] = {
    "a pointer or a number": lambda: pointer_or_number[(1,)](meta(9, dtype=torch.int64), 7),
    "an i32 that becomes an i64": lambda: number_that_widens[(1,)](meta(9, dtype=torch.int64), 7),
}


def main() -> None:
    driver.set_active(NoDevice())
    for case, launch in (ATTENTION | LAYERS | MIXTURES | OTHERS | BROKEN).items():
        knobs.runtime.jit_cache_hook = partial(record, case)
        launch()
    print(json.dumps(list(variants.values())))


if __name__ == "__main__":
    main()
