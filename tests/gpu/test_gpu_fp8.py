"""K/V in FP8 on a GPU: what the kernels read and write, captured graphs, growth, rings, and the way through the tiers.

Numbers are compared as bytes: torch compares FP8 nowhere.
"""

from __future__ import annotations

import random
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cache.attend import attend, reference
from cache.attend import store as store_rows
from cache.factory import cache_factory
from cache.geometry import FP8, UNSCALED, CacheConfig, Geometry, KvScales, LayerGeometry, Reach
from cache.offload.groups import Groups
from cache.offload.transfers import Transfers
from cache.pool import CudaPool
from engine.build import build_engine
from engine.config import EngineConfig
from engine.types import GenerateRequest, SamplingParams
from static_graphs.model import model_from_config
from support.model_folder import write_folder
from support.packed_runs import PackedRun
from support.poison import poison_free_cells
from support.steps import build_step, plain_pool, random_cells, random_rows
from support.tiny_models import tiny
from support.toy_decoder import ToyDecoder
from support.toy_executor import RandomLife, generate, toy_executor

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
REACHES = [Reach(), Reach("window", 40), Reach("chunk", 256)]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SCALES = KvScales(0.05, 0.02)
PROMPTS = [(1,), (4, 5, 6), (9, 3, 27, 3, 14, 8, 30), tuple(range(3, 23))]
MIB = 1 / 1024


@pytest.fixture(autouse=True)
def _full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def raw(stored: torch.Tensor) -> torch.Tensor:
    return stored.view(torch.uint8)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# -- Reading


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(
    ("heads", "dims"),
    [((32, 8), (128, 128)), ((9, 3), (64, 64)), ((8, 8), (96, 96)), ((4, 2), (256, 256)), ((16, 1), (192, 128))],
    ids=str,
)
def test_the_kernels_equal_the_mask_over_what_the_cells_stand_for(
    heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> None:
    """Decodes, chunks, forks, padding and every reach, with and without a cap and sinks, scaled and not."""
    from cache.attend import triton_cells

    for seed, num_pieces, scales in ((0, None, UNSCALED), (1, 4, KvScales(0.5, 0.3)), (2, None, KvScales(1.7, 1.9))):
        rng = random.Random(seed)
        pool = plain_pool(4000, kv_heads=heads[1], k_dim=dims[0], v_dim=dims[1], dtype=FP8, device="cuda")
        cells = random_cells(rng, 4000, sequences=5, longest=600)
        rows = random_rows(rng, cells, longest_chunk=60)
        step = build_step(pool, cells, rows, reaches=REACHES, width=len(rows) + 5, page_cells=64, device="cuda")
        query = torch.randn(step.width, heads[0], dims[0], device="cuda").to(dtype)
        full = pool.keys[0].float() * scales.key, pool.values[0].float() * scales.value
        for reach in REACHES:
            for extras in (dict[str, Any](), {"softcap": 3.0}, {"sinks": torch.randn(heads[0], device="cuda")}):
                out = triton_cells.attend_cells(
                    query,
                    pool.keys[0],
                    pool.values[0],
                    step,
                    reach=reach,
                    scale=0.1,
                    num_pieces=num_pieces,
                    scales=scales,
                    **extras,
                )
                expected = reference.attend_cells(query, *full, step, reach=reach, scale=0.1, **extras)
                torch.testing.assert_close(out, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("width", [1, 256])
def test_every_number_that_fp8_has_is_read_as_it_is(width: int, dtype: torch.dtype) -> None:
    """A row that sees one cell gets that cell's value, whatever the score. Decodes and tiles of a chunk."""
    every = torch.arange(256, dtype=torch.uint8, device="cuda")
    every[every % 128 == 127] = 0  # the two NaN
    pool = plain_pool(300, kv_heads=1, k_dim=64, dtype=FP8, device="cuda")
    raw(pool.values[0])[1:].copy_(every.repeat(75).view(300, 1, 64))
    reach = Reach("window", 1)
    step = build_step(pool, [list(range(300))], [(0, p) for p in range(width)], reaches=[reach], device="cuda")
    query = torch.randn(width, 4, 64, device="cuda").to(dtype)
    from cache.attend import triton_cells

    out = triton_cells.attend_cells(query, pool.keys[0], pool.values[0], step, reach=reach, scale=0.1)
    expected = pool.values[0][1 : 1 + width].to(dtype).expand(width, 4, 64)
    assert torch.equal(out, expected)


def test_nan_in_cells_nobody_reads_never_leaks() -> None:
    pool = plain_pool(300, kv_heads=2, k_dim=64, dtype=FP8, device="cuda")
    cells = [list(range(10, 200)), [250, 240, 245]]
    owned = torch.zeros(301, dtype=torch.bool, device="cuda")
    owned[torch.tensor([cell + 1 for own in cells for cell in own], device="cuda")] = True
    for stored in (pool.keys[0], pool.values[0]):
        raw(stored)[~owned] = 0x7F
    step = build_step(pool, cells, [(1, 2), *((0, p) for p in range(100, 190))], width=96, device="cuda")
    query = torch.randn(96, 4, 64, device="cuda", dtype=torch.bfloat16)
    key = torch.randn(96, 2, 64, device="cuda", dtype=torch.bfloat16)
    assert attend(query, key, key, 0, step, reach=Reach(), scale=0.1).isfinite().all()


# -- Writing


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.03, 5.0])
def test_rows_are_stored_as_on_the_cpu_and_cut_to_the_range(scale: float, dtype: torch.dtype) -> None:
    """Bytes alike, but for a NaN, which two bytes stand for."""
    new = (torch.randn(64, 2, 64) * 200).to(dtype)
    new[0, 0, :4] = torch.tensor([6e4, -6e4, torch.inf, torch.nan])
    rows = torch.randperm(99)[:64]
    mine, theirs = torch.zeros(99, 2, 64, device="cuda").to(FP8), torch.zeros(99, 2, 64).to(FP8)
    store_rows(mine, rows.cuda(), new.cuda(), scale)
    store_rows(theirs, rows, new, scale)
    alike = raw(mine).cpu() == raw(theirs)
    assert (alike | mine.cpu().float().isnan() & theirs.float().isnan()).all()
    assert mine.float()[rows[0].item(), 0, :4].tolist()[:3] == [448.0, -448.0, 448.0]
    assert int(mine.float().isnan().sum()) == 1


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scales", [UNSCALED, KvScales(0.03, 5.0)], ids=["as it is", "scaled"])
def test_the_fused_write_stores_what_the_plain_one_does(scales: KvScales, dtype: torch.dtype, has_norm: bool) -> None:
    """Values alike. A key may lie so near the middle between two numbers that the order of adding decides."""
    from static_graphs.kernels.norms import RmsNorm
    from static_graphs.kernels.rotary import rotate_and_store

    width, heads, kv_heads, dim = 40, 8, 4, 128
    parts = (torch.randn(1, width, (heads + 2 * kv_heads) * dim, device="cuda") * 100).to(dtype)
    parts[0, 0, heads * dim : heads * dim + 3] = torch.tensor([6e4, -6e4, 1.0], dtype=dtype)
    parts[0, 1, -4:] = torch.tensor([6e4, -6e4, torch.inf, torch.nan], dtype=dtype)
    norms = [RmsNorm(torch.rand(dim, device="cuda") + 0.5, 1e-6, 0.0) for _ in range(2)] if has_norm else [None, None]
    cos, sin = (torch.full((width, dim), each, device="cuda") for each in (0.6, 0.8))
    keys, values = (torch.zeros(99, kv_heads, dim, device="cuda").to(FP8) for _ in range(2))
    rows = torch.randperm(99, device="cuda")[:width]
    rotate_and_store(
        parts, cos.to(dtype), sin.to(dtype), keys, values, rows, query_norm=norms[0], key_norm=norms[1], scales=scales
    )
    _, k, v = parts[0].float().view(width, -1, dim).split([heads, kv_heads, kv_heads], 1)
    if norms[1] is not None:
        k = torch.nn.functional.rms_norm(k, (dim,), norms[1].weight, 1e-6)
    low, high = k.chunk(2, -1)
    c, s = cos.to(dtype).float()[:, None], sin.to(dtype).float()[:, None]
    k = k * c + torch.cat([-high, low], -1) * s
    expected_keys, expected_values = torch.zeros_like(keys), torch.zeros_like(values)
    store_rows(expected_keys, rows, k, scales.key)
    store_rows(expected_values, rows, v, scales.value)
    assert torch.equal(raw(values), raw(expected_values))
    found, expected = keys.float(), expected_keys.float()
    assert float((found != expected).float().mean()) < 1e-2
    torch.testing.assert_close(found, expected, rtol=1 / 8, atol=2**-9)  # the next number of FP8 at most
    assert not keys.float().isnan().any()


# -- Whole steps


@pytest.mark.parametrize("scales", [UNSCALED, SCALES], ids=["as it is", "scaled"])
def test_captured_graphs_draw_the_eager_tokens_across_growth(scales: KvScales) -> None:
    """And those of the single cache, whose rings are in FP8 too."""
    drawn = []
    for captures in (True, False):
        executor = toy_executor(
            ToyDecoder("cuda", fp8=scales), kv_dtype=FP8, capacity_cells=65_535, captures_static_methods=captures
        )
        drawn += [generate(executor, PROMPTS, 30), generate(executor, PROMPTS, 30)]
        assert {each.dtype for each in executor.cache_control.pool.keys} == {FP8}
        executor.close()
    single = toy_executor(
        ToyDecoder("cuda", fp8=scales), kv_dtype=FP8, cache_kind="single", max_sessions=1, widths=(1, 2), max_dynamic=32
    )
    drawn.append([generate(single, [prompt], 30)[0] for prompt in PROMPTS])
    single.close()
    assert drawn[1:] == drawn[:1] * 4


def test_random_schedules_draw_what_each_session_draws_alone_and_read_no_freed_cell() -> None:
    """The oracle rounds K and V as cells do; on this device, so that sums round alike."""
    model = ToyDecoder("cuda", fp8=SCALES)
    executor = toy_executor(model, kv_dtype=FP8, initial_capacity=255)
    generate(executor, PROMPTS[:1], 1)  # maps the whole pool, so that all of it can be poisoned
    for seed in range(10):
        RandomLife(executor, model, seed, behind_each=lambda: poison_free_cells(executor.cache_control)).run(20)
    assert executor.free_cells == executor.total_cells
    executor.close()


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fused_model_gives_the_unfused_ones_logits(model_type: str, dtype: torch.dtype) -> None:
    """A number that lies between two of FP8 may fall either way: in 16 bits a few in a hundred do."""
    from static_graphs.fuse import fuse

    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.05}
    config = tiny(model_type, **sizes)
    steps = [([(0, t) for t in range(40)] + [(1, t) for t in range(7)], 64), ([(0, 9), (1, 3)], 2), ([(1, 5)], 1)]

    def run(fused: bool, kv_dtype: torch.dtype | None) -> torch.Tensor:
        model = model_from_config(config, device="cuda", dtype=dtype, seed=3)
        if fused:
            fuse(model)
        run = PackedRun(model, seed=0, kv_dtype=kv_dtype)
        opened = [run.open(), run.open()]
        return torch.cat([run.step([(opened[s], t) for s, t in rows], width) for rows, width in steps])

    own, found, full = run(False, FP8), run(True, FP8), run(False, None)
    assert relative(found, own) < (2e-3 if dtype == torch.float32 else 5e-2)
    assert 0 < relative(found, full) < 0.1


# -- The pool


def test_growth_keeps_what_is_stored() -> None:
    geometry = Geometry((LayerGeometry(8, 128, 128), LayerGeometry(2, 64, 64)), (SCALES, UNSCALED))
    with closing(CudaPool(geometry, CacheConfig(1 << 16, 64, FP8, initial_cells=512), CUDA)) as pool:
        assert pool.scales == geometry.scales
        pool.ensure_cells(512)
        before = []
        for each in (*pool.keys, *pool.values):
            raw(each)[:513].random_(0, 256)
            before.append(raw(each)[:513].clone())
        pool.ensure_cells(1 << 16)
        pool.wait_idle()
        for each, old in zip((*pool.keys, *pool.values), before, strict=True):
            assert torch.equal(raw(each)[:513], old)
            raw(each)[-1].fill_(5)
        granule = 2 << 20  # each of the four tensors ends in one, for its scratch row
        assert pool.allocated_bytes <= (1 << 16) * geometry.bytes_per_cell(FP8) + 4 * granule


def test_rings_in_fp8_read_what_flat_cells_would() -> None:
    geometry = Geometry((LayerGeometry(2, 64, 64), LayerGeometry(2, 64, 64, Reach("window", 40))), (SCALES, SCALES))
    config = CacheConfig(4096, 16, FP8, initial_cells=64, max_sequences=8)
    with (
        closing(cache_factory().build("single", geometry, config, CUDA)) as rings,
        closing(cache_factory().build("batched", geometry, config, CUDA)) as flat,
    ):
        assert rings.pool.keys[1].shape[0] < 64
        for cache in (rings, flat):
            cache.seq_new()
        for tokens in (16, 1, 7, 16, 16, 16, 1, 3, 16):
            steps = []
            for cache in (rings, flat):
                cache.declare_step([0] * tokens)
                steps.append(cache.prepare_step(16))
            for index, layer in enumerate(geometry.layers):
                query, key, value = (torch.randn(16, h, 64, device="cuda") for h in (4, 2, 2))
                one, other = (attend(query, key, value, index, step, reach=layer.reach, scale=0.2) for step in steps)
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
            for cache in (rings, flat):
                cache.commit_step()


def test_bytes_are_the_same_through_pinned_memory() -> None:
    geometry = Geometry((LayerGeometry(2, 8, 8), LayerGeometry(1, 9, 5), LayerGeometry(8, 128, 128)))
    with closing(CudaPool(geometry, CacheConfig(64, 8, FP8, initial_cells=64), CUDA)) as pool:
        pool.ensure_cells(64)
        for each in (*pool.keys, *pool.values):
            raw(each).random_(0, 256)
        transfers = Transfers(pool, Groups.of(geometry, FP8, 16), CUDA)
        host = torch.zeros(transfers.chunk_bytes, dtype=torch.uint8, pin_memory=True)
        source, target = np.arange(0, 32, 2), np.arange(32, 48)
        expected = [raw(each)[source + 1].clone() for each in (*pool.keys, *pool.values)]
        assert transfers.store(source, host, gathered=lambda: None, done=lambda: None)
        while transfers.in_flight:
            transfers.poll()
        assert transfers.load(host, target, done=lambda: None)
        while transfers.in_flight:
            transfers.poll()
        for each, before in zip((*pool.keys, *pool.values), expected, strict=True):
            assert torch.equal(raw(each)[target + 1], before)
        transfers.close()


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["fused and captured", "eager"])
def test_an_engine_holds_more_cells_and_finds_in_host_memory_what_left_the_device(
    enforce_eager: bool, tmp_path: Path
) -> None:
    model = write_folder(tmp_path)
    prompt = tuple(range(100)) * 3
    options = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 4, "widths": (1, 4, 64)}
    cells = {}
    for kv_cache_dtype in ("auto", "fp8"):
        config = EngineConfig(
            model,
            kv_cache_gib=4 * MIB,
            kv_host_gib=4 * MIB,
            kv_cache_dtype=kv_cache_dtype,
            enforce_eager=enforce_eager,
            **options,
        )
        loop, info = build_engine(config, lambda *_: None)
        cells[kv_cache_dtype] = info.kv_cells + 1
        answers = []
        for name in ("cold", "again"):
            sampling = SamplingParams(temperature=0.0)
            loop.submit(GenerateRequest(name, prompt, sampling=sampling, max_new_tokens=8))
            updates = []
            until_s = time.monotonic() + 60
            while loop.has_work():
                updates += loop.step()
                assert time.monotonic() < until_s
            assert updates[-1].finish == "length", updates[-1].error
            answers.append((updates[0].cached_tokens or 0, [t for update in updates for t in update.token_ids]))
            loop.reset_prefix_cache()
        assert (answers[0][0], answers[1][0]) == (0, 256)
        assert answers[0][1][0] == answers[1][1][0]
        loop.executor.close()
    assert cells["fp8"] == 2 * cells["auto"]
