"""Which model is served, under which names, by which version of this program, and how much it has to do."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, fields
from importlib import metadata
from typing import Any

from fastapi import APIRouter, Request

from engine.types import EngineInfo
from server import embeddings, errors, schemas
from server.fields import MAX_LOGPROBS
from server.serving import Serving

router = APIRouter(tags=["models"])
_PRIVATE = {"api_key", "api_key_file", "kv_redis_secret_file", "ssl_keyfile"}
"""Options that /server_info leaves out."""


def version() -> str:
    """Of the installed distribution; a source tree that was never installed has none."""
    try:
        return metadata.version("cellserve")
    except metadata.PackageNotFoundError:
        return "0+source"


@router.get("/version", operation_id="version")
async def show_version() -> dict[str, str]:
    return {"version": version()}


@router.get("/v1/models", operation_id="list_models")
async def list_models(request: Request) -> dict[str, Any]:
    serving: Serving = request.app.state.serving
    return {"object": "list", "data": [_card(serving, name) for name in serving.served_names]}


# A path parameter: hub ids hold a slash.
@router.get("/v1/models/{model:path}", operation_id="retrieve_model")
async def retrieve_model(request: Request, model: str) -> dict[str, Any]:
    serving: Serving = request.app.state.serving
    if model not in serving.served_names:
        raise errors.model_not_found(model, serving.served_names)
    return _card(serving, model)


@router.get("/load", operation_id="load")
async def load(request: Request) -> dict[str, int]:
    """Choices that run or wait, for balancers that ask rather than scrape."""
    serving: Serving = request.app.state.serving
    elsewhere = serving.admission.in_all[0] - serving.admission.in_use
    return {"server_load": serving.client.num_outstanding + elsewhere}


@router.get("/server_info", operation_id="server_info")
async def server_info(request: Request) -> dict[str, Any]:
    """What runs here and how it was set up. No key, and no path that the user did not give."""
    serving: Serving = request.app.state.serving
    sequences, queued_tokens = serving.admission.in_all
    engine = asdict(serving.client.info)
    del engine["tokenizer_dir"]
    return {
        "system_fingerprint": serving.fingerprint,
        "versions": versions(),
        "config": serving.settings.model_dump(mode="json", exclude=_PRIVATE),
        "has_api_keys": bool(serving.settings.api_key or serving.settings.api_key_file),
        "engine": engine,
        "admission": {
            "sequences": sequences,
            "max_sequences": serving.admission.capacity,
            "queued_tokens": queued_tokens,
            "max_queued_tokens": serving.admission.max_queued_tokens,
        },
        "stats": asdict(serving.client.stats),
    }


def versions() -> dict[str, str]:
    """Of this program, Python and the libraries that decide what comes out; those that are installed."""
    found = {"cellserve": version(), "python": platform.python_version()}
    for name in ("torch", "transformers", "tokenizers", "triton", "fastapi", "uvicorn", "pydantic"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def fingerprint(info: EngineInfo) -> str:
    """Changes when answers may: with the model's name and shape, the precision, the device's kind or the version."""
    precision = (info.dtype, info.kv_dtype)
    parts = (version(), info.model, info.architecture, *precision, info.vocab_size, info.device.partition(":")[0])
    return "fp_" + hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _card(serving: Serving, name: str) -> dict[str, Any]:
    info = serving.client.info
    return {
        "id": name,
        "object": "model",
        "created": info.created_s,
        "owned_by": "cellserve",
        "max_model_len": info.max_model_len,
        "defaults": effective_defaults(info),
        "defaults_of_model": sorted(name for name, value in asdict(info.defaults).items() if value is not None),
        "limits": {
            "n": 1 if info.is_single else info.max_num_seqs,
            "logprobs": MAX_LOGPROBS,
            "embedding_inputs": embeddings.MAX_INPUTS,
            "body_bytes": serving.settings.max_body_bytes,
        },
        "features": {
            "text": serving.text.has_tokenizer,
            "chat": serving.text.chat_template is not None,
            "structured_outputs": info.has_grammars,
            "embeddings": info.pooling is not None,
        },
        "embedding": info.pooling
        and {"pooling": info.pooling, "dimensions": info.embedding_size, "matryoshka": info.matryoshka},
    }


def effective_defaults(info: EngineInfo) -> dict[str, float | int]:
    """What holds where a request names nothing. max_tokens: of completions; a chat's is what the context leaves."""
    params = schemas.sampling_defaults(info)
    names = (field.name for field in fields(info.defaults))
    return {"max_tokens": schemas.DEFAULT_MAX_TOKENS} | {name: getattr(params, name) for name in names}


def told_defaults(info: EngineInfo) -> str:
    """The same in one line, for a start to say: each that the model's own files set is marked."""
    own = asdict(info.defaults)
    return ", ".join(
        f"{name} {value:g}{' (the model)' if own.get(name) is not None else ''}"
        for name, value in effective_defaults(info).items()
    )
