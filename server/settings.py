"""What `cellserve serve` was told: the options of server/options.py, where each came from, and what they mean together.

Precedence: flag > environment > YAML file (`--config`) > default. A name nobody knows is an error with a suggestion,
wherever it comes from. `load` is the only way in.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from pydantic import ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource

from engine.config import DEFAULT_MODEL, DEFAULT_MODEL_NAME, EngineConfig
from engine.errors import ConfigError
from server import tracing
from server.key_limits import KeyLimits
from server.lifecycle import Patience
from server.options import ENV_PREFIX, Options, flag_name

CONFIG_VARIABLE = f"{ENV_PREFIX}CONFIG"


class Settings(Options):
    """Checked and frozen. Cross-checks of the engine's options live with `EngineConfig`."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *others: Any, **more: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """`load` joins the sources itself, to know where each value came from."""
        return (init_settings,)

    def names(self) -> tuple[str, ...]:
        """What clients may call the model; never empty."""
        return self.served_model_name or (DEFAULT_MODEL_NAME if self.model == DEFAULT_MODEL else self.model,)

    def keys(self) -> tuple[str, ...]:
        """Keys of the options and of the file, which is read now. Raises ConfigError."""
        keys = [secret.get_secret_value() for secret in self.api_key]
        if self.api_key_file is not None:
            try:
                lines = self.api_key_file.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"--api-key-file {self.api_key_file} cannot be read: {_reason(error)}") from error
            in_file = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
            if not in_file:
                raise ConfigError(f"--api-key-file {self.api_key_file} holds no key: nobody would be kept out")
            keys += in_file
        return tuple(keys)

    def patience(self) -> Patience:
        return Patience(self.step_timeout, self.warm_up_timeout, self.max_restarts, self.restart_window)

    @property
    def is_open(self) -> bool:
        """Whether others than this machine's users may reach the server, and nobody is asked for a key."""
        has_keys = bool(self.api_key) or self.api_key_file is not None
        return self.uds is None and not has_keys and not _is_loopback(self.host)

    def key_limits(self) -> KeyLimits:
        """Of one API process: each gets an equal part, for a key's connections spread evenly over them."""
        limits = (self.key_requests_per_minute, self.key_tokens_per_minute, self.key_concurrent)
        return KeyLimits(*(None if limit is None else limit // self.api_workers for limit in limits))

    def check(self) -> None:
        """Raise ConfigError for options that do not go together, or for files that do not hold what they should."""
        self.to_engine_config()
        if not self.keys() and not self.key_limits().is_off:
            raise ConfigError("limits of keys are given but no key: give --api-key or --api-key-file")
        if self.test_faults and self.uds is None and not _is_loopback(self.host):
            raise ConfigError(
                f"--test-faults lets whoever reaches this server break it, and --host {self.host} is no loopback "
                "address: use --host 127.0.0.1 or --uds"
            )
        self._check_workers()
        if self.otlp_endpoint is not None:
            tracing.check(self.otlp_endpoint)
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("--ssl-keyfile is given without --ssl-certfile")
        if self.ssl_certfile is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
            except OSError as error:  # ssl.SSLError is one
                reason = error.strerror or str(error)
                raise ConfigError(f"--ssl-certfile {self.ssl_certfile} cannot be used: {reason}") from error

    def _check_workers(self) -> None:
        if self.api_workers == 1:
            return
        if self.in_process:
            raise ConfigError(
                f"--api-workers is {self.api_workers}, but --in-process puts the engine into one of them: use either"
            )
        for name in ("key_requests_per_minute", "key_tokens_per_minute", "key_concurrent"):
            limit = getattr(self, name)
            if limit is not None and limit < self.api_workers:
                raise ConfigError(
                    f"{flag_name(name)} is {limit}, which {self.api_workers} API workers cannot share: each gets an "
                    f"equal part, so give at least {self.api_workers}"
                )

    def to_engine_config(self) -> EngineConfig:
        """The engine's part. Raises ConfigError for options that do not go together."""
        return EngineConfig(
            model=self.model,
            log_format=self.log_format,
            device=self.device,
            dtype=self.dtype,
            load_format=self.load_format,
            seed=self.seed,
            max_model_len=self.max_model_len,
            cache=self.cache,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_mixed_tokens=self.max_num_mixed_tokens,
            max_waiting=self.max_waiting,
            kv_cells=self.kv_cells,
            kv_cache_gib=self.kv_cache_gib,
            kv_cache_dtype=self.kv_cache_dtype,
            gpu_memory_utilization=self.gpu_memory_utilization,
            widths=self.widths,
            enforce_eager=self.enforce_eager,
            batch_invariant=self.batch_invariant,
            pooling=self.pooling,
            generation_config=self.generation_config,
            overlap=self.overlap,
            test_faults=self.test_faults,
            prefix_cache=self.prefix_cache,
            kv_host_gib=self.kv_host_gib,
            kv_disk=self.kv_disk,
            kv_disk_gib=self.kv_disk_gib,
            kv_redis=None if self.kv_redis is None else self.kv_redis.get_secret_value(),
            kv_redis_secret_file=None if self.kv_redis_secret_file is None else str(self.kv_redis_secret_file),
            kv_chunk_tokens=self.kv_chunk_tokens,
            kv_full_windows=self.kv_full_windows,
        )


@dataclass(frozen=True)
class Loaded:
    """Settings, and where each value came from: "flag", "environment", the YAML file's name or "default"."""

    settings: Settings
    sources: Mapping[str, str]


def suggest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean X?", or nothing when no name is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def load(flags: Mapping[str, Any] | None = None, config_file: str | None = None) -> Loaded:
    """Join the sources, check all of it, or raise ConfigError naming the option, its source and what would be valid.

    flags: field -> text as typed. config_file: of --config; else CELLSERVE_CONFIG names it, else there is none.
    """
    flags = flags or {}
    _check_environment()
    config_file = config_file or os.environ.get(CONFIG_VARIABLE)
    layers = {
        **({config_file: _read_yaml(Path(config_file))} if config_file else {}),
        "environment": EnvSettingsSource(Settings)(),
        "flag": dict(flags),
    }
    values: dict[str, Any] = {}
    sources = dict.fromkeys(Settings.model_fields, "default")
    for source, layer in layers.items():
        for field, value in layer.items():
            values[field] = value
            sources[field] = source
    try:
        settings = Settings(**values)
    except ValidationError as error:
        raise ConfigError(_describe(error, sources)) from error
    if values.get("api_key") and not settings.api_key:
        # As `--api-key "$KEY"` gives it where KEY is not set.
        raise ConfigError(f"{_name('api_key', sources)} holds no key: nobody would be kept out")
    settings.check()
    return Loaded(settings, sources)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {_reason(error)}") from error
    except yaml.YAMLError as error:
        # Not the parser's own words: they repeat the line, which may hold a key.
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" in line {mark.line + 1}, column {mark.column + 1}"
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise ConfigError(f"--config {path} is not YAML{place}: {problem}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold keys and values, as in `max_model_len: 4096`")
    for key in content:
        if key not in Settings.model_fields:
            raise ConfigError(f"{path}: unknown key {key}{suggest(str(key), Settings.model_fields)}")
    return {key: value for key, value in content.items() if value is not None}


def _check_environment() -> None:
    known = {ENV_PREFIX + field.upper() for field in Settings.model_fields} | {CONFIG_VARIABLE}
    for variable in os.environ:
        if variable.upper().startswith(ENV_PREFIX) and variable.upper() not in known:
            raise ConfigError(f"unknown environment variable {variable}{suggest(variable, known)}")


def _describe(error: ValidationError, sources: Mapping[str, str]) -> str:
    """The first problem, in the words of the source it came from."""
    problem = error.errors(include_url=False)[0]
    field = str(problem["loc"][0])
    name = _name(field, sources)
    # A secret's value stays out of messages.
    value = "" if field in ("api_key", "kv_redis") else f" is {problem['input']!r}"
    text = problem["msg"]
    return f"{name}{value}: {text[:1].lower()}{text[1:]}"


def _name(field: str, sources: Mapping[str, str]) -> str:
    """What a user calls it, where its value came from."""
    source = sources[field]
    if source == "flag":
        return "MODEL" if field == "model" else flag_name(field)
    return ENV_PREFIX + field.upper() if source == "environment" else f"{source}: {field}"


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else "it is not UTF-8 text"


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
