"""Which way a matrix product of few rows is computed: by one of our kernels, cut so or so, or by cuBLAS (None).

What was measured on this device (tune.py) comes first; of all else a rule decides. Needs no triton: what is known of
tilings is also asked where kernels are never launched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

MIN_ROWS = 16
"""Rows of the smallest matrix instruction: fewer are padded, at no cost."""
MAX_ROWS = 64
"""Rows from which on cuBLAS is faster: the products begin to wait for the matrix units instead of the weights."""
NARROW = 1024
"""Columns so few that cuBLAS leaves most of the device idle: there ours win up to twice as many rows."""
PROGRAMS = 264
"""Two a multiprocessor of an H200: as many parts as give no more programs than run at once."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one product is cut. is_dot False: one row, by multiplying and adding, without the matrix units."""

    block_n: int
    block_k: int
    parts: int = 1
    warps: int = 4
    stages: int = 4
    is_dot: bool = True
    fetch: int = 256
    """Elements of each weight row that a program asks for before its input is there. A power of two, 64 or more."""

    def stage_bytes(self, block_r: int, itemsize: int, *, is_gated: bool) -> int:
        """Shared memory of a stage: a block of each weight and one of block_r rows."""
        return itemsize * self.block_k * (self.block_n * (2 if is_gated else 1) + block_r)


class Product(NamedTuple):
    """What rows are multiplied by: a weight [width, depth], or two of them."""

    width: int
    depth: int
    is_gated: bool = False
    is_whole: bool = False
    """Its reader takes no parts."""


class Measured(NamedTuple):
    """What a measured choice is of: up to `rows` rows [rows, depth] by a weight [width, depth], or gated by two."""

    width: int
    depth: int
    gated: bool
    rows: int
    """A bucket."""


@dataclass(frozen=True, slots=True)
class Tilings:
    """The choices that one model's products are computed by. Without measured ones: the rule's."""

    measured: Mapping[Measured, Tiling | None] = field(default_factory=dict)

    def choose(self, rows: int, width: int, depth: int, *, gated: bool = False, bits: int = 16) -> Tiling | None:
        """As the rule below."""
        key = Measured(width, depth, gated, bucket(rows))
        return self.measured[key] if key in self.measured else choose(rows, width, depth, gated=gated, bits=bits)

    @property
    def record(self) -> str:
        """Equal for equal choices: sums are of the same order only then. "" of the rule's alone."""
        choices = sorted((key, str(tiling)) for key, tiling in self.measured.items())
        return blake2b(str(choices).encode(), digest_size=8).hexdigest() if choices else ""


RULE = Tilings()


def bucket(rows: int) -> int:
    """The rows that a kernel computes for so many, on which its time depends; one row has a kernel of its own."""
    return 1 if rows == 1 else max(MIN_ROWS, 1 << (rows - 1).bit_length())


def kernel_rows(rows: int) -> tuple[int, bool] | None:
    """Equal for numbers of rows that have the same kernel compute their products. None: cuBLAS computes all of them."""
    return None if rows > 2 * MAX_ROWS else (bucket(rows), rows == bucket(rows))


def shared_bytes(tiling: Tiling, rows: int, *, gated: bool = False) -> int:
    """Shared memory that a program takes for weights of 16 bits, without what it sums up in at its end (less)."""
    if not tiling.is_dot:
        return 0
    return tiling.stages * tiling.stage_bytes(max(MIN_ROWS, bucket(rows)), 2, is_gated=gated)


def choose(rows: int, width: int, depth: int, *, gated: bool = False, bits: int = 16) -> Tiling | None:
    """For x [rows, depth] by a weight [width, depth]; gated: by two of them. None: cuBLAS. The same in all of a bucket.

    bits: of a weight. float32 has no exact matrix unit: many rows wait for arithmetic there, however few the columns.
    Measured on an H200 over the shapes of an 8B and a 0.6B model: of 20 tilings the best one's time, or 5 % more.
    """
    most_rows = MAX_ROWS if gated or width > NARROW or bits > 16 else 2 * MAX_ROWS
    if rows > most_rows or depth < 64 or width < 64:
        return None
    if rows == 1:
        block_k = 1024 if depth % 1024 == 0 else 512
        return Tiling(2 if gated or width <= 4096 else 4, block_k, is_dot=False)
    if gated:
        return Tiling(64, 64) if rows > 16 else Tiling(64, 128)
    if width > 64 * PROGRAMS:
        return Tiling(64, 128, stages=3)
    parts = 1
    limit = PROGRAMS if rows <= 16 else PROGRAMS // 2
    while width // 64 * parts * 2 <= limit and depth % (256 * parts) == 0:
        parts *= 2
    return Tiling(64, 128, parts, stages=4 if rows <= MAX_ROWS else 3)
