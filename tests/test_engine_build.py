"""What a built engine says of itself. The rest of engine/build.py is held by the tests that serve a model with it."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch

from cache.geometry import Geometry, LayerGeometry
from engine.build import CPU_PREFILL, CPU_WIDTHS, CUDA_PREFILL, CUDA_WIDTHS, _kv_cells, _limits, build_engine
from engine.config import EngineConfig
from engine.scheduler import SchedulerLimits
from engine.thread import import_engine
from support.tiny_models import tiny_llama
from support.tiny_tokenizer import write_byte_level


def test_4_2_the_vocabulary_is_the_tokenizers_and_not_the_models_padded_rows(tmp_path: Path) -> None:
    tokenizer = write_byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    tiny_llama(architectures=["LlamaForCausalLM"], vocab_size=tokenizer.vocab_size + 50).save_pretrained(tmp_path)
    config = EngineConfig(str(tmp_path), device="cpu", load_format="dummy", kv_cells=64, max_num_seqs=2)
    _, info = build_engine(config, lambda text, done, of: None)
    assert info.vocab_size == tokenizer.vocab_size


@pytest.mark.parametrize("collects", [True, False])
def test_collections_are_behind_the_imports_as_they_were_before(collects: bool) -> None:
    try:
        gc.enable() if collects else gc.disable()
        import_engine()
        assert gc.isenabled() == collects
    finally:
        gc.enable()


def test_memory_for_more_cells_than_can_be_addressed_gives_as_many_as_can() -> None:
    two_bytes_each_side = Geometry((LayerGeometry(1, 1, 1),))
    config = EngineConfig("m", kv_cache_gib=16.0)
    assert _kv_cells(config, two_bytes_each_side, torch.bfloat16, torch.device("cpu")) == 2**31 - 2


def test_a_step_beside_decodes_is_the_widest_captured_one_and_a_turn_is_as_long() -> None:
    assert _limits(EngineConfig("m"), CUDA_WIDTHS, CUDA_PREFILL) == SchedulerLimits(256, 8192, 1024, 1024)
    few = EngineConfig("m", max_num_seqs=16)
    assert _limits(few, CPU_WIDTHS, CPU_PREFILL) == SchedulerLimits(16, 512, 256, 256)
    narrow = EngineConfig("m", max_num_mixed_tokens=257)
    assert _limits(narrow, CUDA_WIDTHS, CUDA_PREFILL) == SchedulerLimits(256, 8192, 257, 257)


def test_prompts_go_on_beside_more_decodes_than_a_captured_step_holds() -> None:
    assert _limits(EngineConfig("m", max_num_seqs=2000), CUDA_WIDTHS, CUDA_PREFILL).mixed_budget == 2000 + 256


def test_the_models_own_sampling_values_are_the_defaults_unless_told_otherwise(tmp_path: Path) -> None:
    tiny_llama(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 7}))
    found = {}
    for choice in ("auto", "none"):
        config = EngineConfig(
            str(tmp_path), device="cpu", load_format="dummy", kv_cells=64, max_num_seqs=2, generation_config=choice
        )
        _, info = build_engine(config, lambda text, done, of: None)
        found[choice] = (info.defaults.temperature, info.defaults.top_k)
    assert found == {"auto": (0.25, 7), "none": (None, None)}
