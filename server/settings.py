"""Every option of `cellserve serve`: its type, unit, default, range, group and the file that reads it.

One field is one flag, one environment variable and one YAML key: `--max-model-len`, `CELLSERVE_MAX_MODEL_LEN` and
`max_model_len`. Precedence: flag > environment > YAML file (`--config`) > default. A name nobody knows is an error
with a suggestion, wherever it comes from. `load` is the only way in; server/cli.py builds flags and help from here.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml  # type: ignore[import-untyped]
from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from engine.config import (
    DEFAULT_MODEL,
    DEFAULT_MODEL_NAME,
    CacheKind,
    DefaultsChoice,
    EngineConfig,
    KvCacheDtype,
    LoadFormat,
    PoolingChoice,
)
from engine.errors import ConfigError
from engine.logs import LogFormat
from server import tracing
from server.key_limits import KeyLimits
from server.lifecycle import Patience

ENV_PREFIX = "CELLSERVE_"
CONFIG_VARIABLE = f"{ENV_PREFIX}CONFIG"

Group = Literal["model", "cache", "scheduling", "API", "limits"]


@dataclass(frozen=True)
class Option:
    """What the type cannot say of a field."""

    group: Group
    reader: str
    """The file that obeys it."""
    unit: str = ""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _split(value: Any) -> Any:
    """One comma list, or several given one by one, as one list."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        return value
    return [part for item in value for part in (_parts(item) if isinstance(item, str) else [item])]


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_split)]
Widths = Annotated[tuple[int, ...] | None, NoDecode, BeforeValidator(_split)]


class Settings(BaseSettings):
    """Checked and frozen. Cross-checks of the engine's options live with `EngineConfig`."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    model: Annotated[
        str,
        Field(min_length=1, description="a folder, a GGUF file or a hub id; left out, a small default model"),
        Option("model", "engine/build.py"),
    ] = DEFAULT_MODEL
    served_model_name: Annotated[
        Names,
        Field(description="names clients may ask for, instead of MODEL; the first is what answers carry"),
        Option("model", "server/app.py"),
    ] = ()
    device: Annotated[str, Field(description="auto, cpu, cuda or cuda:N"), Option("model", "engine/build.py")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Field(description="of weights and K/V; auto: the checkpoint's on CUDA, float32 on CPU"),
        Option("model", "engine/build.py"),
    ] = "auto"
    load_format: Annotated[
        LoadFormat,
        Field(description="dummy: random weights, nothing is read but the configuration"),
        Option("model", "engine/build.py"),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        Field(ge=1, description="longest prompt and answer together; default: the model's own"),
        Option("model", "engine/build.py", "tokens"),
    ] = None
    seed: Annotated[
        int,
        Field(ge=0, description="of dummy weights; a request without a seed of its own is random"),
        Option("model", "engine/build.py"),
    ] = 0
    pooling: Annotated[
        PoolingChoice,
        Field(description="of embeddings, last or mean hidden state; auto: as the model's files say, else the last"),
        Option("model", "engine/build.py"),
    ] = "auto"
    generation_config: Annotated[
        DefaultsChoice,
        Field(description="auto: the model's own sampling values where a request names none; none: the API's"),
        Option("model", "engine/build.py"),
    ] = "auto"

    kv_cells: Annotated[
        int | None,
        Field(ge=2, description="size of the K/V cache, one cell a token; default: what memory allows"),
        Option("cache", "engine/build.py", "cells"),
    ] = None
    kv_cache_gib: Annotated[
        float | None,
        Field(gt=0, description="the same size by memory; give one of the two"),
        Option("cache", "engine/build.py", "GiB"),
    ] = None
    kv_cache_dtype: Annotated[
        KvCacheDtype,
        Field(description="of K/V; auto: as the weights; fp8 (fp8_e4m3): one byte a number, with the model's scales"),
        Option("cache", "engine/build.py"),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float,
        Field(gt=0, le=1, description="part of the GPU's memory this server may fill"),
        Option("cache", "engine/build.py"),
    ] = 0.9

    cache: Annotated[
        CacheKind,
        Field(description="cells: many sequences over one pool; single: one, its window layers store what they see"),
        Option("cache", "engine/build.py"),
    ] = "cells"
    prefix_cache: Annotated[
        bool,
        Field(description="keep what finished requests computed, and begin with it where a prompt begins the same"),
        Option("cache", "engine/build.py"),
    ] = True
    kv_host_gib: Annotated[
        float | None,
        Field(gt=0, description="host memory for prefixes that leave the K/V cache (not given: they are forgotten)"),
        Option("cache", "engine/tier_setup.py", "GiB"),
    ] = None
    kv_disk: Annotated[
        str | None,
        Field(description="folder of this server's own for prefixes that outlive it; needs the two sizes"),
        Option("cache", "engine/tier_setup.py"),
    ] = None
    kv_disk_gib: Annotated[
        float | None,
        Field(gt=0, description="the most that folder may hold"),
        Option("cache", "engine/tier_setup.py", "GiB"),
    ] = None
    kv_redis: Annotated[
        SecretStr | None,
        Field(description="redis://, rediss:// or unix:// URL for prefixes; needs --kv-host-gib and the redis package"),
        Option("cache", "engine/tier_setup.py"),
    ] = None
    kv_chunk_tokens: Annotated[
        int,
        Field(ge=16, le=256, description="tokens that the tiers keep together: 16, 32, 64, 128 or 256"),
        Option("cache", "engine/tier_setup.py", "tokens"),
    ] = 64
    kv_full_windows: Annotated[
        bool,
        Field(description="tiers keep window layers whole, so that a prefix from there may be cut anywhere"),
        Option("cache", "engine/tier_setup.py"),
    ] = False
    max_num_seqs: Annotated[
        int | None,
        Field(ge=1, description="sequences that run at once (not given: 256, or 1 with --cache single)"),
        Option("scheduling", "engine/build.py", "sequences"),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Field(ge=1, description="tokens of a step while nothing decodes"),
        Option("scheduling", "engine/build.py", "tokens"),
    ] = None
    max_num_mixed_tokens: Annotated[
        int | None,
        Field(
            ge=1,
            description="tokens of a step in which something decodes: few keep inter-token latency, many end a batch "
            "sooner; a prompt has as many in one turn (not given: the widest captured step)",
        ),
        Option("scheduling", "engine/build.py", "tokens"),
    ] = None
    widths: Annotated[
        Widths,
        Field(description="rows of the forward methods, ascending: 1,2,4,8"),
        Option("scheduling", "engine/build.py", "rows"),
    ] = None
    enforce_eager: Annotated[
        bool,
        Field(description="run the model as transformers wrote it: no graphs, no kernels or packed weights of ours"),
        Option("scheduling", "engine/build.py"),
    ] = False
    overlap: Annotated[
        bool,
        Field(description="on CUDA, launch each step before the ids of the one ahead are read; off helps find faults"),
        Option("scheduling", "engine/build.py"),
    ] = True

    host: Annotated[
        str, Field(min_length=1, description="address to listen on; 0.0.0.0: all"), Option("API", "server/run.py")
    ] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="0: one that is free"), Option("API", "server/run.py")] = (
        8000
    )
    api_key: Annotated[
        Secrets,
        Field(description="keys that are let in; none: everybody is"),
        Option("API", "server/guards.py"),
    ] = ()
    api_key_file: Annotated[
        Path | None,
        Field(description="file of more keys, one a line"),
        Option("API", "server/guards.py"),
    ] = None
    cors_origin: Annotated[
        Names,
        Field(description="browser origins that may call; none: no page of another origin"),
        Option("API", "server/guards.py"),
    ] = ()
    access_log: Annotated[
        bool,
        Field(description="one line on stderr for each answer but those of probes"),
        Option("API", "server/guards.py"),
    ] = True
    page: Annotated[
        bool,
        Field(description="show a page with a playground and the engine's life at /; it brings no key and needs none"),
        Option("API", "server/web_page.py"),
    ] = True
    log_format: Annotated[
        LogFormat,
        Field(description="lines of the log on stderr; json: an object a line"),
        Option("API", "engine/logs.py"),
    ] = "text"
    otlp_endpoint: Annotated[
        str | None,
        Field(description="OpenTelemetry collector that gets a span a request, such as http://localhost:4318"),
        Option("API", "server/tracing.py"),
    ] = None
    uds: Annotated[
        Path | None,
        Field(description="listen on a Unix socket at this path instead of an address"),
        Option("API", "server/run.py"),
    ] = None
    ssl_certfile: Annotated[
        Path | None, Field(description="certificate chain: answer over TLS"), Option("API", "server/run.py")
    ] = None
    ssl_keyfile: Annotated[
        Path | None,
        Field(description="private key of --ssl-certfile, where that does not hold it"),
        Option("API", "server/run.py"),
    ] = None
    context_overflow: Annotated[
        Literal["error", "clamp"],
        Field(description="a max_tokens beyond the context is refused, or cut to what fits"),
        Option("API", "server/answers.py"),
    ] = "error"
    tool_call_parser: Annotated[
        Literal["hermes", "llama3_json", "mistral"] | None,
        Field(description="how the model writes calls of tools; by default what its chat template shows"),
        Option("API", "server/chat.py"),
    ] = None
    strict_params: Annotated[
        bool,
        Field(description="refuse fields that nobody knows instead of naming them in x-ignored-params"),
        Option("API", "server/serving.py"),
    ] = False
    enable_force_include_usage: Annotated[
        bool,
        Field(description="end every stream with its usage, asked for or not"),
        Option("API", "server/serving.py"),
    ] = False
    api_workers: Annotated[
        int,
        Field(ge=1, le=64, description="processes that speak HTTP for the one engine; beyond 1 they need its process"),
        Option("API", "server/workers.py", "processes"),
    ] = 1
    in_process: Annotated[
        bool,
        Field(description="run the engine in this process instead of its own"),
        Option("API", "server/cli.py"),
    ] = False

    test_faults: Annotated[
        bool,
        Field(description="for tests: routes under /test that break this server on order; not on a public address"),
        Option("API", "server/faults.py"),
    ] = False

    max_waiting: Annotated[
        int,
        Field(ge=0, description="sequences that may queue beyond those that run, before a refusal"),
        Option("limits", "server/admission.py", "sequences"),
    ] = 256
    max_queued_tokens: Annotated[
        int | None,
        Field(
            ge=1,
            description="prompt tokens that may wait to be run, before a refusal; default: four times the K/V cache, "
            "and 512 for each sequence at least",
        ),
        Option("limits", "server/admission.py", "tokens"),
    ] = None
    overload_status: Annotated[
        Literal[429, 503],
        BeforeValidator(lambda value: int(value) if str(value).isdigit() else value),
        Field(description="status of that refusal"),
        Option("limits", "server/admission.py"),
    ] = 429
    slow_reader_timeout: Annotated[
        float,
        Field(gt=0, description="how long a stream waits for a client that does not read before it is cancelled"),
        Option("limits", "server/streams.py", "s"),
    ] = 30.0
    queue_timeout: Annotated[
        float | None,
        Field(gt=0, description="how long a request may wait for a place before it gets 503"),
        Option("limits", "server/answers.py", "s"),
    ] = None
    request_timeout: Annotated[
        float | None,
        Field(gt=0, description="how long a request may take in all before it gets 504; its own may be shorter"),
        Option("limits", "server/answers.py", "s"),
    ] = None
    step_timeout: Annotated[
        float,
        Field(gt=0, description="silence of an engine at work that ends it; never less than 10 of its slowest steps"),
        Option("limits", "server/lifecycle.py", "s"),
    ] = 120.0
    warm_up_timeout: Annotated[
        float,
        Field(gt=0, description="the same for each of the first 16 steps of an engine, which may compile"),
        Option("limits", "server/lifecycle.py", "s"),
    ] = 600.0
    max_restarts: Annotated[
        int,
        Field(ge=0, description="engines that may follow dead ones within --restart-window before the server ends"),
        Option("limits", "server/lifecycle.py", "engines"),
    ] = 3
    restart_window: Annotated[
        float,
        Field(gt=0, description="how long a death of the engine counts"),
        Option("limits", "server/lifecycle.py", "s"),
    ] = 600.0
    key_requests_per_minute: Annotated[
        int | None,
        Field(ge=1, description="what each API key may ask for"),
        Option("limits", "server/key_limits.py", "requests"),
    ] = None
    key_tokens_per_minute: Annotated[
        int | None,
        Field(ge=1, description="prompt and answer tokens of each API key"),
        Option("limits", "server/key_limits.py", "tokens"),
    ] = None
    key_concurrent: Annotated[
        int | None,
        Field(ge=1, description="requests of each API key at once"),
        Option("limits", "server/key_limits.py", "requests"),
    ] = None
    max_body_bytes: Annotated[
        int, Field(ge=1024, description="longest request body"), Option("limits", "server/guards.py", "bytes")
    ] = 8 * 1024 * 1024
    keep_alive_timeout: Annotated[
        int, Field(ge=1, description="how long an idle connection stays open"), Option("limits", "server/run.py", "s")
    ] = 75
    drain_timeout: Annotated[
        float,
        Field(ge=0, description="how long a stopping server lets requests finish"),
        Option("limits", "server/run.py", "s"),
    ] = 30.0

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
            pooling=self.pooling,
            generation_config=self.generation_config,
            overlap=self.overlap,
            test_faults=self.test_faults,
            prefix_cache=self.prefix_cache,
            kv_host_gib=self.kv_host_gib,
            kv_disk=self.kv_disk,
            kv_disk_gib=self.kv_disk_gib,
            kv_redis=None if self.kv_redis is None else self.kv_redis.get_secret_value(),
            kv_chunk_tokens=self.kv_chunk_tokens,
            kv_full_windows=self.kv_full_windows,
        )


@dataclass(frozen=True)
class Loaded:
    """Settings, and where each value came from: "flag", "environment", the YAML file's name or "default"."""

    settings: Settings
    sources: Mapping[str, str]


def option(field: str) -> Option:
    """The metadata of one field."""
    return next(item for item in Settings.model_fields[field].metadata if isinstance(item, Option))


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


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
