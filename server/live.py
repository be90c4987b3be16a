"""GET /v1/live: what the engine is at, a few times a second, as server-sent events. For the page, and whoever likes.

However many look, the engine is asked once a frame; while nobody looks it is not asked at all. A viewer that reads
slowly misses frames and never queues them. Event-loop thread only.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from engine.client import EngineClient
from engine.errors import EngineUnavailable
from engine.view import View
from server import errors
from server.streams import frame

router = APIRouter(tags=["live"])

PERIOD_S = 0.25
LARGEST_COST = 0.02
"""Part of the engine's time that looking may take: the larger and fuller a pool, the more seldom it is drawn."""
MAX_CODES = 1 << 14
"""Cells that are shown at most: 32 KiB of codes."""
MAX_VIEWERS = 16
"""Whoever comes beyond them is refused: each is a connection that nothing else ends."""


class Live:
    """One for each server. Owns the task that asks, which lives as long as somebody looks."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._viewers: set[_Viewer] = set()
        self._asking: asyncio.Task[None] | None = None

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    def enter(self) -> AsyncGenerator[bytes, None]:
        """Frames until the engine stops or drains. Raises ApiError when too many look already."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise errors.queue_full(f"{MAX_VIEWERS} viewers look already: close one of them", 30.0)
        return self._frames()

    async def _frames(self) -> AsyncGenerator[bytes, None]:
        viewer = _Viewer()
        self._viewers.add(viewer)
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        try:
            while (content := await viewer.next()) is not None:
                yield content
        finally:
            self._viewers.discard(viewer)
            if not self._viewers and self._asking is not None:
                self._asking.cancel()
                self._asking = None

    async def _ask(self) -> None:
        engine = last_step = 0
        try:
            while self._client.phase.name == "ready":
                asked_s = time.monotonic()
                if engine != self._client.lives.ready:
                    engine, last_step = self._client.lives.ready, 0  # another one, which counts its own steps
                view = await self._client.look(max_codes=MAX_CODES, behind_step=last_step)
                if not view.cells.total:
                    break  # it could not be made, and the engine's log says why
                if view.steps:
                    last_step = view.steps[-1].number
                self._show(frame(described(view, time.monotonic())))
                due_s = asked_s + max(PERIOD_S, view.cost_s / LARGEST_COST)
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        except EngineUnavailable:
            pass  # it ended, or is in a step too long to wait for: a viewer may come again
        finally:
            if self._asking is asyncio.current_task():
                self._asking = None
                self._show(None)

    def _show(self, content: bytes | None) -> None:
        for viewer in self._viewers:
            viewer.show(content)


class _Viewer:
    """The newest frame that it has not had; None for the end."""

    def __init__(self) -> None:
        self._content: bytes | None = None
        self._has_news = asyncio.Event()

    def show(self, content: bytes | None) -> None:
        self._content = content
        self._has_news.set()

    async def next(self) -> bytes | None:
        await self._has_news.wait()
        self._has_news.clear()
        return self._content


def described(view: View, at_s: float) -> dict[str, Any]:
    """A frame. at_s: when, on a clock that only rates are made of."""
    cells = asdict(view.cells)
    return {
        "at": round(at_s, 3),
        "cells": {**cells, "codes": base64.b64encode(view.cells.codes).decode("ascii")},
        "sessions": [
            [s.id, s.prompt_tokens, s.cached_tokens, s.computed_tokens, s.generated_tokens, s.is_decoding]
            for s in view.sessions
        ],
        "waiting": view.waiting,
        "steps": [
            {
                "number": step.number,
                "age_ms": round(1000 * step.age_s, 1),
                "ms": round(1000 * step.duration_s, 3),
                "sessions": step.sessions,
                "counts": step.counts,
                "decodes": step.num_decodes,
                "forwards": step.forwards,
            }
            for step in view.steps
        ],
        "tiers": [
            {
                "name": tier.name,
                "capacity_bytes": tier.capacity_bytes,
                "used_bytes": tier.used_bytes,
                "hits": tier.hits,
                "misses": tier.misses,
                "loaded_bytes": tier.loaded_bytes,
                "stored_bytes": tier.stored_bytes,
            }
            for tier in view.tiers
        ],
        "stats": {name: value for name, value in asdict(view.stats).items() if name != "method_calls"},
    }


@router.get("/v1/live", operation_id="live_view")
async def live(request: Request) -> StreamingResponse:
    """Cells, sessions, queue, steps and sums; no token, no text, no caller's name."""
    viewers: Live = request.app.state.live
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(viewers.enter(), headers=headers, media_type="text/event-stream")
