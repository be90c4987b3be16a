"""What the products' kernels take of a GPU's shared memory, by compiling them for it: no GPU is needed.

`python -m support.compiled_products 8.9 101376` prints one JSON object for each kernel that the rules choose and that
might not fit: its name, its stages and its bytes. Not under TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from static_graphs.kernels import experts, products
from static_graphs.kernels.shared_memory import Room
from static_graphs.mixtures import tilings_of
from static_graphs.tilings import MIN_ROWS, choose

SHAPES = ((4096, 4096), (151_936, 4096))
ROWS = (2, 17, 33, 65)


def kernels(room: Room, bits: int) -> Iterator[tuple[Any, dict[str, Any], int, int]]:
    """-> (kernel, constants, warps, stages), each once, without those that would fill less than half of the room."""
    is_exact = bits == 32
    common = {"EVEN": True, "UPCAST": is_exact, "PDL": False}
    seen = set()
    for gated in (False, True):
        for rows in ROWS:
            for width, depth in SHAPES:
                tiling = choose(rows, width, depth, gated=gated, bits=bits)
                block_r = max(MIN_ROWS, 1 << (rows - 1).bit_length())
                if tiling is None or (tiling.block_n, tiling.block_k, tiling.stages, block_r, gated) in seen:
                    continue
                seen.add((tiling.block_n, tiling.block_k, tiling.stages, block_r, gated))
                stage_bytes = tiling.stage_bytes(block_r, bits // 8, is_gated=gated)
                blocks = {"BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k, "BLOCK_R": block_r}
                constants = {**common, **blocks, "GATE": int(gated), "FETCH": 0, "EVEN_R": False}
                stages = room.stages(tiling.stages, stage_bytes, is_exact=is_exact)
                if 2 * tiling.stages * stage_bytes < room.shared_bytes:
                    continue
                yield products._multiply_rows, constants, tiling.warps, stages
    for rows in (8, 200, 500, 1024):
        for gated, tiling in zip((True, False), tilings_of(8 * rows, rows, 128, itemsize=bits // 8), strict=True):
            blocks = {"BLOCK_N": tiling.block_n, "BLOCK_K": tiling.block_k, "BLOCK_R": tiling.block_r}
            constants = {**common, **blocks, "GATE": int(gated), "TOP_K": 8}
            stage_bytes = tiling.stage_bytes(bits // 8, is_gated=gated)
            stages = room.stages(tiling.stages, stage_bytes, is_exact=is_exact)
            key = (*blocks.values(), tiling.warps, gated)
            if key not in seen and 2 * tiling.stages * stage_bytes >= room.shared_bytes:
                seen.add(key)
                yield experts._multiply_pairs, constants, tiling.warps, stages


def shared_bytes(kernel: Any, constants: dict[str, Any], warps: int, stages: int, capability: int, bits: int) -> int:
    tensors = {name: f"*fp{bits}" if bits == 32 else "*bf16" for name in ("x", "weight", "up", "out", "weights")}
    types = {**tensors, "order": "*i32", "starts": "*i32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    at = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    aligned = {at[name]: [["tt.divisibility", 16]] for name, kind in signature.items() if kind != "constexpr"}
    source = ASTSource(kernel, signature, {at[name]: value for name, value in constants.items()}, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return int(compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options).metadata.shared)


def main() -> None:
    major, minor = map(int, sys.argv[1].split("."))
    room = Room(int(sys.argv[2]), (major, minor))
    for bits in (16, 32):
        for kernel, constants, warps, stages in kernels(room, bits):
            taken = shared_bytes(kernel, constants, warps, stages, 10 * major + minor, bits)
            print(json.dumps({"kernel": kernel.__name__, "constants": constants, "stages": stages, "bytes": taken}))


if __name__ == "__main__":
    main()
