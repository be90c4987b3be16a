"""Which answers are being made, by every name a client may know them under, and the way to end one from outside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from fastapi import APIRouter, Request

from engine.types import FinishReason
from server import errors
from server.admission import Reservation
from server.generation import Times, Usage
from server.metrics import Metrics

router = APIRouter(tags=["requests"])


class InEngine(Protocol):
    """A request on its way through the engine: `Generation`, or `EmbeddingJob`."""

    usage: Usage

    @property
    def finish_reasons(self) -> list[FinishReason]:
        """Of its parts, in their order; what has not ended counts as cancelled."""
        ...

    def submit(self, metrics: Metrics, reservation: Reservation, arrived_s: float, client: str) -> None:
        """Hand it to the engine, or be refused. From then on it owns the reservation, and must be closed."""
        ...

    def times(self) -> Times: ...

    def cancel(self) -> None: ...

    def when_closed(self, call: Callable[[], None]) -> None: ...


class Running:
    """Event-loop thread only. A name may stand for several requests: a caller's own X-Request-Id need not be unique."""

    def __init__(self) -> None:
        self._by_name: dict[str, list[tuple[InEngine, str | None]]] = {}

    def enter(self, generation: InEngine, names: tuple[str, ...], key: str | None) -> None:
        """Until `generation` is closed. key: whose request it is; None where there are no keys."""
        entry = (generation, key)
        for name in set(names):
            self._by_name.setdefault(name, []).append(entry)
            generation.when_closed(partial(self._leave, name, entry))

    def cancel(self, name: str, key: str | None) -> bool:
        """End what runs under this name and belongs to this key; whether there was anything."""
        found = [generation for generation, owner in self._by_name.get(name, ()) if owner == key]
        for generation in found:
            generation.cancel()
        return bool(found)

    def _leave(self, name: str, entry: tuple[InEngine, str | None]) -> None:
        entries = self._by_name[name]
        entries.remove(entry)
        if not entries:
            del self._by_name[name]


@router.delete("/v1/requests/{request_id}", operation_id="cancel_request")
async def cancel_request(request: Request, request_id: str) -> dict[str, object]:
    """End a request by its X-Request-Id or by the id of its answer. Whoever waits for it is told that it was."""
    key: str | None = request.state.key
    is_here = request.app.state.serving.running.cancel(request_id, key)
    # Two requests may have one name, and each its own process.
    if not await request.app.state.siblings.cancel(request_id, key) and not is_here:
        raise errors.request_not_found(request_id)
    return {"id": request_id, "object": "request", "cancelled": True}
