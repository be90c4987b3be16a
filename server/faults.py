"""POST /test/faults and /test/check: faults on order. A server of users has neither these routes nor this code.

Points whose names begin with "api." are of this process, all others of the engine's (engine/faults.py):

    api.tokenizer.raise, api.tokenizer.slow (`s` seconds)    encoding a prompt
    api.detokenizer.raise                                    decoding a token
    api.render.raise                                         writing an answer down
    api.metrics.raise                                        writing the metrics down
    api.loop.block (`s` seconds)                             at once: the event loop stands still
    api.clock.jump (`s` seconds, either way)                 at once: the wall clock of this process
    api.log.full                                             at once: the disk that standard error goes to
    api.descriptors (`times` left)                           at once: no more descriptors can be opened; -1: again
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request

from server import errors
from server.generation import Usage
from server.metrics import Metrics
from server.serving import Serving
from server.text import Text

LATER = frozenset(
    ("api.tokenizer.raise", "api.tokenizer.slow", "api.detokenizer.raise", "api.render.raise", "api.metrics.raise")
)
AT_ONCE = frozenset(("api.loop.block", "api.clock.jump", "api.log.full", "api.descriptors"))

router = APIRouter(tags=["test"], prefix="/test")


class Injected(Exception):
    """What a fault raises."""


@dataclass(slots=True)
class Armed:
    after: int = 0
    times: int = 1
    s: float = 0.0


class ApiFaults:
    """Of one app. Event-loop thread, but for what happens in a thread of the tokenizer's."""

    def __init__(self) -> None:
        self._armed: dict[str, Armed] = {}
        self.fired: Counter[str] = Counter()
        self._clock = time.time

    def arm(self, point: str, **options: Any) -> None:
        """Raises ValueError for a point nobody has, TypeError for an option no fault has."""
        armed = Armed(**options)
        if point in LATER:
            self._armed[point] = armed
        elif point in AT_ONCE:
            self._happen(point, armed)
            self.fired[point] += 1
        else:
            raise ValueError(f"there is no point {point}: there are {', '.join(sorted(LATER | AT_ONCE))}")

    def fit(self, text: Text) -> None:
        """Put hooks around what was made for the engine that is ready now."""
        _around(text, "encode", self._encoding)
        _around(text, "detokenizer", self._detokenizing)

    def fit_for_good(self, metrics: Metrics) -> None:
        """Put hooks around what outlives engines."""
        _around(metrics, "render", self._raising("api.metrics.raise"))
        _around(Usage, "as_dict", self._raising("api.render.raise"))

    def _due(self, point: str) -> Armed | None:
        armed = self._armed.get(point)
        if armed is None:
            return None
        if armed.after > 0:
            armed.after -= 1
            return None
        armed.times -= 1
        if armed.times <= 0:
            del self._armed[point]
        self.fired[point] += 1
        return armed

    def _raising(self, point: str) -> Callable[..., Any]:
        def hook(method: Callable[..., Any], *args: Any, **fields: Any) -> Any:
            if self._due(point):
                raise Injected(point)
            return method(*args, **fields)

        return hook

    def _encoding(self, encode: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        slow = self._due("api.tokenizer.slow")
        if slow is not None:
            time.sleep(slow.s)
        return self._raising("api.tokenizer.raise")(encode, *args, **fields)

    def _detokenizing(self, detokenizer: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        made = detokenizer(*args, **fields)
        _around(made, "push", self._raising("api.detokenizer.raise"))
        return made

    def _happen(self, point: str, armed: Armed) -> None:
        match point:
            case "api.loop.block":
                time.sleep(armed.s)
            case "api.clock.jump":
                clock, shift = self._clock, armed.s
                time.time = lambda: clock() + shift
            case "api.log.full":
                full = os.open("/dev/full", os.O_WRONLY)
                os.dup2(full, 2)
                os.close(full)
            case "api.descriptors":
                _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
                is_open = len(list(Path("/proc/self/fd").iterdir()))
                soft = hard if armed.times < 0 else is_open + armed.times
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _around(part: Any, name: str, hook: Callable[..., Any]) -> None:
    method = getattr(part, name)
    setattr(part, name, lambda *args, **fields: hook(method, *args, **fields))


def mount(app: FastAPI, metrics: Metrics) -> ApiFaults:
    """Give the app the routes, and the hooks that need no loaded engine."""
    faults: ApiFaults = ApiFaults()
    app.state.faults = faults
    faults.fit_for_good(metrics)
    app.include_router(router)
    return faults


@router.post("/faults", operation_id="arm_fault")
async def arm(request: Request) -> dict[str, Any]:
    """{"point": ..., "after": passes let through, "times": passes hit, ...}; {} disarms the engine's."""
    order: dict[str, Any] = await request.json()
    faults: ApiFaults = request.app.state.faults
    serving: Serving = request.app.state.serving
    if str(order.get("point", "")).startswith("api."):
        try:
            faults.arm(**order)
        except (ValueError, TypeError) as error:
            raise errors.invalid_value(str(error), "point") from error
        return {"fired": dict(faults.fired)}
    return await _obeyed(serving, {"do": "arm" if order else "disarm", **order})


@router.get("/check", operation_id="check")
async def check(request: Request) -> dict[str, Any]:
    """What the engine and this process hold, and what is wrong with it."""
    serving: Serving = request.app.state.serving
    told = await _obeyed(serving, {"do": "check"})
    held = {
        "slots": serving.admission.in_use,
        "outstanding": serving.client.num_outstanding,
        "tasks": len(asyncio.all_tasks()),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }
    return {**told, "api": held, "api_fired": dict(request.app.state.faults.fired)}


async def _obeyed(serving: Serving, order: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(await serving.client.inject(json.dumps(order)))
    if "error" in answer:
        raise errors.invalid_value(answer["error"], "point")
    return answer
