"""What orchestrators, load balancers and scrapers ask. Reads state; touches no queue of requests and no device.

/live     the process answers
/ready    it takes requests: 503 with what is going on while it loads, drains or is down
/health   it makes progress: 503 while it loads, when the engine is dead, or when work waits and nothing moves
/ping     the same under the name that some platforms call
/metrics  Prometheus text
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from engine.errors import EngineUnavailable
from server import errors
from server.lifecycle import Lifecycle
from server.metrics import CONTENT_TYPE, Metrics
from server.serving import Serving
from server.siblings import Siblings

SCRAPE_WAIT_S = 0.25
"""How long a scrape waits for the engine to say where K/V is."""

router = APIRouter(tags=["probes"])


@router.get("/live", operation_id="live")
@router.head("/live", include_in_schema=False)
async def live() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/ready", operation_id="ready")
@router.head("/ready", include_in_schema=False)
async def ready(request: Request) -> Response:
    lifecycle: Lifecycle = request.app.state.lifecycle
    refusal = lifecycle.refusal()
    if refusal is None:
        return JSONResponse({"phase": "ready"})
    return _unwell(refusal, lifecycle.progress())


@router.get("/health", operation_id="health")
@router.head("/health", include_in_schema=False)
@router.get("/ping", operation_id="ping")
@router.head("/ping", include_in_schema=False)
async def health(request: Request) -> Response:
    lifecycle: Lifecycle = request.app.state.lifecycle
    if lifecycle.is_stalled():
        return _unwell(errors.engine_unavailable("requests are waiting, but no step has finished for too long"), {})
    refusal = lifecycle.refusal()
    if refusal is None or refusal.code == "draining":
        return JSONResponse({"status": "ok"})
    return _unwell(refusal, lifecycle.progress())


@router.get("/metrics", operation_id="metrics")
@router.head("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    books: Metrics = request.app.state.metrics
    serving: Serving | None = getattr(request.app.state, "serving", None)
    if serving is not None:
        with contextlib.suppress(EngineUnavailable, TimeoutError):
            # A long step must not keep a scraper: the numbers of the last one stand.
            async with asyncio.timeout(SCRAPE_WAIT_S):
                books.kv_seen(await serving.client.kv_report())
    siblings: Siblings = request.app.state.siblings
    return Response(books.render(await siblings.sums()), media_type=CONTENT_TYPE)


def _unwell(error: errors.ApiError, more: dict[str, Any]) -> Response:
    """The usual error, with the fields of a start beside it. The connection stays: a probe will ask again."""
    headers = {name: value for name, value in error.headers.items() if name != "Connection"}
    return JSONResponse({**more, **error.body()}, status_code=error.status, headers=headers)
