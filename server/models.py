"""Which model is served, under which names, by which version of this program, and how much it has to do."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from fastapi import APIRouter, Request

from server import errors
from server.serving import Serving

router = APIRouter(tags=["models"])


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
    return {"server_load": serving.client.num_outstanding}


def _card(serving: Serving, name: str) -> dict[str, Any]:
    info = serving.client.info
    return {
        "id": name,
        "object": "model",
        "created": info.created_s,
        "owned_by": "cellserve",
        "max_model_len": info.max_model_len,
    }
