"""K/V in FP8 (--kv-cache-dtype fp8): what is drawn from it, how much fits, whose scales hold, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cache.geometry import FP8, UNSCALED, Geometry, InvalidGeometry, KvScales, LayerGeometry
from engine.build import build_engine
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelError
from engine.loop import EngineLoop
from engine.types import EngineInfo, GenerateRequest, SamplingParams, Update
from static_graphs.model import model_from_config
from support.model_folder import write_folder
from support.packed_runs import PackedRun
from support.poison import poison_free_cells
from support.tiny_models import tiny
from support.toy_decoder import ToyDecoder
from support.toy_executor import RandomLife, generate, toy_executor

PROMPTS = [(1,), (4, 5, 6), (9, 3, 27, 3, 14, 8, 30), tuple(range(3, 23))]
SCALES = KvScales(0.05, 0.02)
PROMPT = tuple(range(100)) * 3
MIB = 1 / 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_folder(tmp_path_factory.mktemp("model"))


def build(model: str, **options: object) -> tuple[EngineLoop, EngineInfo]:
    sizes = {"device": "cpu", "max_num_seqs": 2, "kv_cells": 512, "kv_cache_dtype": "fp8"}
    return build_engine(EngineConfig(model, **(sizes | options)), lambda *_: None)


def ask(loop: EngineLoop, name: str) -> tuple[int, list[int]]:
    """-> prompt tokens that were there, tokens drawn."""
    sampling = SamplingParams(temperature=0.0)
    loop.submit(GenerateRequest(name, PROMPT, sampling=sampling, max_new_tokens=4))
    updates: list[Update] = []
    while loop.has_work():
        updates += loop.step()
    assert updates[-1].finish == "length"
    return updates[0].cached_tokens or 0, [token for update in updates for token in update.token_ids]


def scales_of(loop: EngineLoop) -> tuple[KvScales, ...]:
    pool = loop.executor.cache_control.pool
    assert {each.dtype for each in (*pool.keys, *pool.values)} == {FP8}
    return pool.scales


# -- What is drawn


@pytest.mark.parametrize("scales", [UNSCALED, SCALES], ids=["as it is", "scaled"])
def test_tokens_are_those_of_a_decoder_whose_k_and_v_are_rounded(scales: KvScales) -> None:
    """The oracle rounds K and V of a whole sequence and attends it plainly."""
    model = ToyDecoder(fp8=scales)
    expected = [model.continuation(prompt, 30) for prompt in PROMPTS]
    assert generate(toy_executor(model, kv_dtype=FP8), PROMPTS, 30) == expected
    assert expected != [ToyDecoder().continuation(prompt, 30) for prompt in PROMPTS], "the rounding shows"
    single = toy_executor(model, kv_dtype=FP8, cache_kind="single", max_sessions=1, widths=(1, 2), max_dynamic=32)
    assert [generate(single, [prompt], 30)[0] for prompt in PROMPTS] == expected


@pytest.mark.parametrize("seed", range(4))
def test_clones_rewinds_and_cancels_at_random_leave_each_session_its_own_tokens(seed: int) -> None:
    model = ToyDecoder(fp8=SCALES)
    executor = toy_executor(model, kv_dtype=FP8)
    life = RandomLife(executor, model, seed, behind_each=lambda: poison_free_cells(executor.cache_control))
    life.run(30)
    assert executor.free_cells == executor.total_cells


@pytest.mark.parametrize("seed", range(3))
def test_where_full_precision_is_sure_fp8_draws_the_same_token(seed: int) -> None:
    """Fed what full precision drew, so that one difference is not the cause of the next."""
    model = ToyDecoder(seed=seed)
    tokens = [*PROMPTS[3], *model.continuation(PROMPTS[3], 40)]
    full = model.logits(model.plain_hidden(tokens))
    run = PackedRun(model, seed, kv_dtype=FP8)
    sequence = run.open()
    rows = [run.step([(sequence, token) for token in tokens[:20]])]
    rounded = torch.cat(rows + [run.step([(sequence, token)]) for token in tokens[20:]])
    best = full.topk(2).values
    is_sure = best[:, 0] - best[:, 1] > 1.0  # of logits up to 25
    assert is_sure.sum() > len(tokens) / 2
    assert torch.equal(full.argmax(1)[is_sure], rounded.argmax(1)[is_sure])
    assert (full - rounded).norm() < 0.08 * full.norm()


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gemma3_text"])
def test_logits_of_a_model_move_by_a_tenth_at_most(model_type: str) -> None:
    """Caps and windows among them. Of random weights, whose logits nothing has trained to be robust."""
    model = model_from_config(tiny(model_type), seed=1)

    def logits(kv_dtype: torch.dtype) -> torch.Tensor:
        run = PackedRun(model, 0, kv_dtype=kv_dtype)
        a, b = run.open(), run.open()
        prompts = [(a, 7 * i % 60 + 2) for i in range(30)] + [(b, 5 * i % 60 + 1) for i in range(9)]
        return torch.cat([run.step(prompts, 64), *[run.step([(a, 3 + i), (b, 50 - i)]) for i in range(6)]])

    full, rounded = logits(torch.float32), logits(FP8)
    assert 0 < (full - rounded).norm() < 0.1 * full.norm()


def test_a_prompt_that_is_reused_gives_the_tokens_of_one_that_is_computed(model: str) -> None:
    loop, _ = build(model)
    cold = ask(loop, "cold")
    assert ask(loop, "again") == (299, cold[1])


# -- How much fits


def test_the_same_memory_holds_as_many_cells_more_as_a_number_is_shorter(model: str) -> None:
    size = {"kv_cells": None, "kv_cache_gib": MIB}
    _, full = build(model, kv_cache_dtype="auto", **size)
    _, fp8 = build(model, kv_cache_dtype="fp8_e4m3", **size)
    assert (full.kv_dtype, fp8.kv_dtype) == ("float32", "fp8")
    assert (full.kv_cells + 1) * 4 == fp8.kv_cells + 1


# -- Tiers


def test_tiers_bring_back_what_was_computed_and_nothing_that_is_stored_otherwise(model: str, tmp_path: Path) -> None:
    tiers = {"kv_host_gib": 4 * MIB, "kv_disk": str(tmp_path), "kv_disk_gib": 8 * MIB}

    def closed(loop: EngineLoop) -> None:
        for store in loop._prefixes._tiers._objects.stores:
            store.close(10)

    first, _ = build(model, **tiers)
    cold = ask(first, "cold")
    first.reset_prefix_cache()
    assert ask(first, "from host") == (256, cold[1])
    closed(first)
    second, _ = build(model, **tiers)
    assert ask(second, "from disk") == (256, cold[1])
    closed(second)
    other, _ = build(model, kv_cache_dtype="auto", **tiers)
    assert ask(other, "in full precision")[0] == 0
    closed(other)


def test_k_v_of_other_scales_is_other_k_v() -> None:
    layers = (LayerGeometry(1, 4, 4),) * 2
    plain, scaled = Geometry(layers), Geometry(layers, (KvScales(0.5, 0.25), UNSCALED))
    assert plain.record_in(FP8) == "float8_e4m3fn"
    assert scaled.record_in(FP8) == "float8_e4m3fn times 0.5/0.25,1.0/1.0"
    assert scaled.record_in(torch.bfloat16) == "bfloat16"


# -- Whose scales hold


def with_tensors(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> str:
    """A model on disk that brings these besides its weights."""
    path = write_folder(folder)
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | config))
    return path


def test_the_checkpoints_scales_hold_where_it_has_some(tmp_path: Path) -> None:
    """In every place where vLLM finds them."""
    at = "model.layers.{}.self_attn.{}".format
    tensors = {
        at(0, "k_scale"): torch.tensor(0.5),
        at(0, "v_scale"): torch.tensor([0.25]),
        at(1, "kv_scale"): torch.tensor(2.0, dtype=torch.bfloat16),
    }
    loop, _ = build(with_tensors(tmp_path / "a", tensors))
    assert scales_of(loop) == (KvScales(0.5, 0.25), KvScales(2.0, 2.0))
    tensors = {
        at(1, "k_proj.k_scale"): torch.tensor(0.5),
        at(1, "v_proj.v_scale"): torch.tensor(0.125),
        at(0, "attn.v_scale"): torch.tensor(4.0),
    }
    loop, _ = build(with_tensors(tmp_path / "b", tensors))
    assert scales_of(loop) == (KvScales(1.0, 4.0), KvScales(0.5, 0.125))


def test_scales_mean_nothing_to_k_v_in_full_precision(tmp_path: Path, model: str) -> None:
    names = [f"model.layers.{layer}.self_attn.{side}_scale" for layer in range(2) for side in "kv"]
    path = with_tensors(tmp_path, {name: torch.tensor(0.5) for name in names})
    scaled, plain = build(path, kv_cache_dtype="auto")[0], build(model, kv_cache_dtype="auto")[0]
    assert ask(scaled, "a") == ask(plain, "b")


def test_a_checkpoint_without_scales_is_stored_as_it_is(model: str) -> None:
    assert scales_of(build(model)[0]) == (UNSCALED, UNSCALED)


def test_a_checkpoint_that_is_quantised_in_its_k_v_alone_is_served(tmp_path: Path) -> None:
    """As llm-compressor writes one; its weights are plain."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    quantisation = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    tensors = {"model.layers.0.self_attn.k_scale": torch.tensor([0.5])}
    path = with_tensors(tmp_path, tensors, quantization_config=quantisation)
    assert scales_of(build(path)[0]) == (KvScales(0.5, 1.0), UNSCALED)
    assert build(path, kv_cache_dtype="auto")[1].kv_dtype == "float32"


@pytest.mark.parametrize(
    ("name", "scale", "words"),
    [
        ("model.layers.0.self_attn.k_scale", torch.tensor([0.5, 0.25]), r"k_scale of shape \[2\]: one number is read"),
        ("model.layers.0.self_attn.k_scale", torch.tensor(0.0), "the key scale is 0.0: it must be above 0"),
        ("model.layers.0.self_attn.v_scale", torch.tensor(torch.nan), "the value scale is nan: it must be above 0"),
        ("model.layers.7.self_attn.k_scale", torch.tensor(1.0), "no attention module model.layers.7.self_attn"),
    ],
)
def test_a_scale_that_cannot_hold_is_refused_by_name(
    tmp_path: Path, name: str, scale: torch.Tensor, words: str
) -> None:
    path = with_tensors(tmp_path, {name: scale})
    with pytest.raises(ModelError, match=words):
        build(path)
    build(path, kv_cache_dtype="auto")


def test_scales_that_were_made_for_another_kind_of_k_v_are_refused(tmp_path: Path) -> None:
    quantisation = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "int"}}
    with pytest.raises(ModelError, match="scales for K/V in 8-bit int, which do not fit FP8"):
        build(with_tensors(tmp_path, {}, quantization_config=quantisation))


# -- What is refused


def test_another_fp8_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp8_e5m2': it must be auto or fp8, which is fp8_e4m3"):
        EngineConfig("m", kv_cache_dtype="fp8_e5m2")


def test_a_geometry_has_scales_for_all_layers_or_for_none() -> None:
    with pytest.raises(InvalidGeometry, match="there are 1 scales for 2 layers"):
        Geometry((LayerGeometry(1, 4, 4),) * 2, (UNSCALED,))
