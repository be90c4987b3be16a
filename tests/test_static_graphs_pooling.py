"""How a model's own files say that it is pooled, and what is refused rather than guessed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.build import build_engine
from engine.config import EngineConfig
from static_graphs.load_errors import ModelLoadError
from static_graphs.pooling import Embedding, matryoshka_sizes, own_pooling
from support.model_folder import write_folder


def describe(folder: Path, *kinds: str, **modes: bool) -> Path:
    """Write what sentence-transformers write beside a model."""
    modules = [
        {"idx": i, "path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for i, kind in enumerate(kinds):
        if kind == "Pooling":
            (folder / f"{i}_Pooling").mkdir(exist_ok=True)
            (folder / f"{i}_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))
    return folder


@pytest.mark.parametrize(
    ("modes", "kind"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
    ],
)
def test_the_models_own_description_is_followed(tmp_path: Path, modes: dict[str, bool], kind: str) -> None:
    assert own_pooling(describe(tmp_path, "Transformer", "Pooling", "Normalize", **modes)).kind == kind


def test_a_decoder_without_a_description_is_pooled_at_its_last_token(tmp_path: Path) -> None:
    assert own_pooling(tmp_path) == Embedding("last")


@pytest.mark.parametrize(
    ("kinds", "modes", "reason"),
    [
        (("Transformer", "Pooling"), {"pooling_mode_cls_token": True}, "cls_token"),
        (("Transformer", "Pooling"), {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "max_tokens"),
        (("Transformer", "Pooling"), {}, "nothing"),
        (("Transformer", "Pooling", "Dense"), {"pooling_mode_mean_tokens": True}, "Dense"),
    ],
)
def test_what_is_not_served_is_named(
    tmp_path: Path, kinds: tuple[str, ...], modes: dict[str, bool], reason: str
) -> None:
    found = own_pooling(describe(tmp_path, *kinds, **modes))
    assert found.kind is None
    assert reason in found.reason


def test_a_description_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"modules\.json"):
        own_pooling(tmp_path)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [({}, None), ({"is_matryoshka": True}, ()), ({"matryoshka_dimensions": [64, 16], "is_matryoshka": True}, (16, 64))],
)
def test_matryoshka_sizes_are_those_of_the_config(config: dict[str, Any], sizes: tuple[int, ...] | None) -> None:
    assert matryoshka_sizes(SimpleNamespace(**config)) == sizes


def test_an_engine_says_how_it_embeds_and_an_option_decides_where_the_model_cannot(tmp_path: Path) -> None:
    model = write_folder(tmp_path, matryoshka_dimensions=[16, 32])
    describe(tmp_path, "Transformer", "Pooling", pooling_mode_cls_token=True)

    def info(**options: Any) -> Any:
        return build_engine(EngineConfig(model=model, device="cpu", kv_cells=64, **options), lambda *_: None)[1]

    own = info()
    assert (own.pooling, own.embedding_size, own.matryoshka) == (None, 64, (16, 32))
    assert "--pooling" in own.no_embeddings
    assert info(pooling="mean").pooling == "mean"
