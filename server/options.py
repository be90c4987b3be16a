"""The table of options: each one's type, unit, default, range, group and the file that reads it.

One field is one flag, one environment variable and one YAML key: `--max-model-len`, `CELLSERVE_MAX_MODEL_LEN` and
`max_model_len`. Where values come from and what they mean together: server/settings.py. server/cli.py builds flags and
help from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from engine.config import DEFAULT_MODEL, CacheKind, DefaultsChoice, KvCacheDtype, LoadFormat, PoolingChoice
from engine.logs import LogFormat

ENV_PREFIX = "CELLSERVE_"

Group = Literal["model", "cache", "scheduling", "API", "limits"]


@dataclass(frozen=True)
class Option:
    """What the type cannot say of a field."""

    group: Group
    reader: str
    """The file that obeys it."""
    unit: str = ""


def option(field: str) -> Option:
    """The metadata of one field."""
    return next(item for item in Options.model_fields[field].metadata if isinstance(item, Option))


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


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


class Options(BaseSettings):
    """Their table. Each is checked by itself; what they mean together is `Settings`'."""

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
    kv_redis_secret_file: Annotated[
        Path | None,
        Field(description="file of a secret that K/V in Redis is signed with, where others may write too"),
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
        Field(
            ge=1,
            description="sequences that run at once (not given: 256, or 1 with --cache single; with --batch-invariant "
            "fewer than a step's rows)",
        ),
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
    batch_invariant: Annotated[
        bool,
        Field(
            description="on CUDA, a request's tokens and logprobs are the same whatever runs beside it: every step is "
            "padded to one width (--widths, 256 where not given)"
        ),
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
