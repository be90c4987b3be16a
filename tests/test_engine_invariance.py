"""R31's mode without a device: what it asks of options, and the proof that a start makes. On a device: tests/gpu."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cache.cell_cache import CellCache
from cache.geometry import CacheConfig, Geometry, LayerGeometry
from cache.step import CellStep
from engine.build import CUDA_PREFILL, CUDA_WIDTHS, _limits, _widths, build_engine
from engine.config import EngineConfig
from engine.create import create_executor
from engine.errors import ConfigError, ModelError
from engine.executor_options import ExecutorOptions, derive
from engine.invariance import prove_invariant
from engine.scheduler import SchedulerLimits
from static_graphs.binding import count_experts
from static_graphs.forwards import Forwards
from static_graphs.methods import method_table
from static_graphs.tiny_config import tiny_config
from support.toy_decoder import ToyDecoder

CPU = torch.device("cpu")


def fixed(**options: object) -> EngineConfig:
    return EngineConfig("m", batch_invariant=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "width", "sequences"),
    [
        (fixed(), 256, 255),
        (fixed(widths=(64,)), 64, 63),
        (fixed(widths=(512,)), 512, 256),
        (fixed(widths=(64,), max_num_seqs=9), 64, 9),
        (fixed(max_num_batched_tokens=256, max_num_mixed_tokens=256), 256, 255),
    ],
)
def test_every_step_is_one_width_and_holds_all_decodes_and_a_prompts_token(
    config: EngineConfig, width: int, sequences: int
) -> None:
    assert _widths(config, CUDA_WIDTHS, 10_000) == (width,)
    assert _limits(config, (width,), CUDA_PREFILL) == SchedulerLimits(sequences, width, width, width)


def test_without_it_steps_are_as_wide_as_what_they_hold() -> None:
    assert EngineConfig("m").fixed_width is None
    assert EngineConfig("m", widths=(64,)).num_seqs == 256


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"widths": (1, 2, 4)},
            r"widths are \(1, 2, 4\): with batch_invariant every step has one, so give one, e.g. 256",
        ),
        ({"widths": (1,)}, "batch_invariant needs at least 2 rows"),
        ({"device": "cpu"}, "batch_invariant needs a CUDA device, and device is 'cpu': leave out either"),
        ({"cache": "single"}, "not made for the single cache: use --cache cells"),
        ({"max_num_seqs": 256}, "a step is 256 rows .* so give at most 255, or a width of 257"),
        ({"max_num_batched_tokens": 512}, "max_num_batched_tokens is 512: .* every step is 256 rows"),
        ({"max_num_mixed_tokens": 64}, "max_num_mixed_tokens is 64: .* so leave it out"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fixed(**options)


def test_a_pool_of_fewer_cells_than_a_step_has_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"256 rows, but the K/V pool has 100 cells: .* --kv-cells 256"):
        _widths(fixed(), CUDA_WIDTHS, 100)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it is served: tests/gpu/test_gpu_invariant.py")
def test_a_machine_without_a_device_refuses_it_before_the_model_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="batch_invariant needs a CUDA device, and this torch sees none"):
        build_engine(EngineConfig(str(tmp_path / "nothing"), batch_invariant=True), lambda *_: None)


def test_an_executor_of_several_methods_or_on_a_host_is_refused() -> None:
    options = ExecutorOptions(capacity_cells=64, widths=(8,), max_session_tokens=9, batch_invariant=True)
    assert derive(options, context=64, dtype=torch.float32).cache.batch_invariant
    with pytest.raises(ConfigError, match="needs a CUDA device: this model is on cpu"):
        create_executor(ToyDecoder(), options)
    for changes in ({"widths": (4, 8)}, {"max_dynamic": 32}, {"cache_kind": "single"}):
        several = ExecutorOptions(**({"capacity_cells": 64, "widths": (8,), "batch_invariant": True} | changes))
        with pytest.raises(ConfigError, match="one static method and the batched cache"):
            derive(several, context=64, dtype=torch.float32)


def test_mixtures_of_experts_are_known_from_dense_models() -> None:
    kinds = ("llama", "qwen3", "gemma2", "mixtral", "qwen3_moe", "gpt_oss")
    with torch.device("meta"):
        found = [count_experts(AutoModelForCausalLM.from_config(tiny_config(kind))) for kind in kinds]
    assert found == [0, 0, 0, 4, 4, 4]


class Sums:
    """Hidden states that the row alone decides, but for what `shift` adds by the row's place."""

    vocab_size = 5

    def __init__(self, shift: float, dtype: torch.dtype) -> None:
        self.shift, self.dtype = shift, dtype

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, step: CellStep) -> torch.Tensor:
        places = torch.arange(len(tokens)) // 4
        return (tokens / 64 + positions + self.shift * places)[:, None].to(self.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.expand(-1, self.vocab_size).contiguous()


def prove(model: Sums, longest: int) -> tuple[CellCache, Forwards]:
    geometry = Geometry((LayerGeometry(1, 4, 4),))
    cache = CellCache(geometry, CacheConfig(16, 8, torch.float32, max_sequences=1, batch_invariant=True), CPU)
    forwards = Forwards(model, method_table((8,), None), head_rows=8)
    prove_invariant(forwards, cache, CPU, longest=longest)
    return cache, forwards


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("longest", [1, 2, 8, 100])
def test_rows_that_are_the_same_wherever_they_stand_are_proven_and_leave_nothing(
    dtype: torch.dtype, longest: int
) -> None:
    cache, forwards = prove(Sums(0.0, dtype), longest)
    assert cache.metrics().free_cells == 16
    assert (forwards.calls(), forwards.padding_rows) == ((("forward_8", 0),), 0), "metrics tell of what was served"


def test_a_last_bit_that_depends_on_a_rows_place_ends_the_start() -> None:
    with pytest.raises(ModelError, match=r"with batch_invariant: [1-7] of 8 rows have other logits where .* cut at 1"):
        prove(Sums(2.0**-18, torch.float32), 8)


def test_rows_that_are_no_numbers_are_the_same_too() -> None:
    cache, _ = prove(Sums(float("nan"), torch.float32), 8)
    assert cache.metrics().num_sequences == 0
