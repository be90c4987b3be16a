"""Options: four sources, one precedence, and no name that is silently ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import DEFAULT_MODEL_NAME, EngineConfig
from engine.errors import ConfigError
from server.options import ENV_PREFIX, option
from server.settings import Settings, load

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in (*Settings.model_fields, "config"):
        monkeypatch.delenv(ENV_PREFIX + field.upper(), raising=False)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text("port: 1003\nmax_num_seqs: 3\nseed: 3\nwidths: [1, 3]\n")
    return path


def refusal(flags: dict[str, object] | None = None, config_file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(flags, str(config_file) if config_file else None)
    return str(caught.value)


def test_flag_beats_environment_beats_file_beats_default(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELLSERVE_PORT", "1002")
    monkeypatch.setenv("CELLSERVE_SEED", "2")
    loaded = load({"port": "1001"}, str(config_file))
    values = loaded.settings
    assert (values.port, values.seed, values.max_num_seqs, values.host) == (1001, 2, 3, "127.0.0.1")
    assert [loaded.sources[field] for field in ("port", "seed", "max_num_seqs", "host")] == [
        "flag",
        "environment",
        str(config_file),
        "default",
    ]


def test_the_file_may_be_named_by_the_environment(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELLSERVE_CONFIG", str(config_file))
    assert load().settings.port == 1003


def test_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELLSERVE_MAX_MODEL_LEN", "")
    assert load().settings.max_model_len is None


@pytest.mark.parametrize(("flag", "environment"), [(["1,2", "4"], "1,2,4"), (["1", "2", "4"], " 1, 2,4 ,")])
def test_lists_come_by_comma_or_one_by_one(flag: list[str], environment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load({"widths": flag}).settings.widths == (1, 2, 4)
    monkeypatch.setenv("CELLSERVE_WIDTHS", environment)
    assert load().settings.widths == (1, 2, 4)


def test_names_default_to_the_model() -> None:
    assert load().settings.names() == (DEFAULT_MODEL_NAME,)
    assert load({"model": "acme/tiny"}).settings.names() == ("acme/tiny",)
    assert load({"served_model_name": ["a", "b"]}).settings.names() == ("a", "b")


@pytest.mark.parametrize(("flags", "words"), [
    ({"port": "99999"}, "--port is '99999': input should be less than or equal to 65535"),
    ({"port": "http"}, "--port is 'http': input should be a valid integer"),
    ({"max_num_seqs": "0"}, "--max-num-seqs is '0': input should be greater than or equal to 1"),
    ({"gpu_memory_utilization": "1.5"}, "--gpu-memory-utilization is '1.5'"),
    ({"dtype": "fp8"}, "'auto', 'float32', 'bfloat16' or 'float16'"),
    ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype is 'fp8_e5m2': input should be 'auto', 'fp8' or 'fp8_e4m3'"),
    ({"overload_status": "500"}, "--overload-status is 500: input should be 429 or 503"),
    ({"widths": ["1,x"]}, "--widths is 'x'"),
    ({"model": ""}, "MODEL is ''"),
    ({"device": "tpu"}, "device is 'tpu': it must be auto, cpu, cuda or cuda:N"),
    ({"widths": ["4,2"]}, "they must be positive, ascending and different"),
    ({"kv_cells": "64", "kv_cache_gib": "1"}, "two names for one size"),
])  # fmt: skip
def test_a_bad_value_names_the_option_and_what_would_be_valid(flags: dict[str, object], words: str) -> None:
    assert words in refusal(flags)


def test_a_bad_value_is_told_in_the_words_of_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("port: many\n")
    assert refusal(config_file=path).startswith(f"{path}: port is 'many'")
    monkeypatch.setenv("CELLSERVE_PORT", "few")
    assert refusal(config_file=path).startswith("CELLSERVE_PORT is 'few'")


def test_an_unknown_variable_is_an_error_with_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELLSERVE_MAX_MODEL_LENGTH", "5")
    assert refusal() == (
        "unknown environment variable CELLSERVE_MAX_MODEL_LENGTH; did you mean CELLSERVE_MAX_MODEL_LEN?"
    )


@pytest.mark.parametrize(("text", "words"), [
    ("max_model_length: 5\n", "unknown key max_model_length; did you mean max_model_len?"),
    ("max-model-len: 5\n", "unknown key max-model-len; did you mean max_model_len?"),
    ("- port\n", "must hold keys and values"),
    ("port: [\n", "is not YAML"),
])  # fmt: skip
def test_a_bad_file_is_told(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    assert words in refusal(config_file=path)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert refusal(config_file=tmp_path / "none.yaml").endswith("cannot be read: No such file or directory")


def test_keys_come_from_options_and_file_and_are_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nbeta\n\n gamma \n")
    loaded = load({"api_key": ["alpha"], "api_key_file": str(path)})
    assert loaded.settings.keys() == ("alpha", "beta", "gamma")
    assert "alpha" not in repr(loaded)


def test_a_key_file_without_a_key_is_an_error_not_an_open_door(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# nothing yet\n")
    assert "holds no key" in refusal({"api_key_file": str(path)})
    assert "cannot be read" in refusal({"api_key_file": str(tmp_path / "none")})


def test_every_engine_option_reaches_the_engine() -> None:
    flags = {
        "model": "acme/tiny",
        "device": "cpu",
        "dtype": "bfloat16",
        "load_format": "dummy",
        "seed": "7",
        "max_model_len": "100",
        "max_num_seqs": "8",
        "max_num_batched_tokens": "64",
        "max_num_mixed_tokens": "32",
        "max_waiting": "9",
        "kv_cells": "512",
        "kv_cache_dtype": "fp8",
        "gpu_memory_utilization": "0.5",
        "widths": ["1,2"],
        "enforce_eager": True,
        "prefix_cache": False,
    }
    config = load(flags).settings.to_engine_config()
    assert config == EngineConfig(
        model="acme/tiny",
        device="cpu",
        dtype="bfloat16",
        load_format="dummy",
        seed=7,
        max_model_len=100,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_num_mixed_tokens=32,
        max_waiting=9,
        kv_cells=512,
        kv_cache_dtype="fp8",
        gpu_memory_utilization=0.5,
        widths=(1, 2),
        enforce_eager=True,
        prefix_cache=False,
    )
    tiers = {"kv_host_gib": "2", "kv_disk": "/kv", "kv_disk_gib": "9", "kv_redis": "unix:///r", "kv_chunk_tokens": "32"}
    config = load(tiers).settings.to_engine_config()
    assert (config.kv_host_gib, config.kv_disk, config.kv_disk_gib) == (2.0, "/kv", 9.0)
    assert (config.kv_redis, config.kv_chunk_tokens) == ("unix:///r", 32)
    assert load({"kv_cache_gib": "1.5"}).settings.to_engine_config().kv_cache_gib == 1.5
    assert set(EngineConfig.__slots__) <= set(Settings.model_fields), "an engine option that nobody can set"


@pytest.mark.parametrize("field", Settings.model_fields)
def test_every_option_is_described_and_read_by_a_file_that_exists(field: str) -> None:
    assert Settings.model_fields[field].description
    assert (ROOT / option(field).reader).is_file()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"key_concurrent": "2"}, "limits of keys are given but no key: give --api-key or --api-key-file"),
        ({"ssl_keyfile": "k.pem"}, "--ssl-keyfile is given without --ssl-certfile"),
        ({"ssl_certfile": "none.pem"}, "--ssl-certfile none.pem cannot be used: No such file or directory"),
        ({"context_overflow": "cut"}, "--context-overflow is 'cut'"),
        ({"queue_timeout": "0"}, "--queue-timeout is '0'"),
    ],
)
def test_what_does_not_go_together_or_is_not_there_is_told_before_a_start(flags: dict[str, object], words: str) -> None:
    assert words in refusal(flags)
