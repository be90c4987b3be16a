"""The ASGI application: what the handlers share, which routes there are, and how the engine's life frames theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from server.admission import Admission
from server.metrics import Metrics

if TYPE_CHECKING:
    from engine.client import EngineClient
    from server.settings import Settings
    from server.text import Text


@dataclass
class Serving:
    """What handlers reach through `request.app.state.serving`. API routes run only while the engine is ready."""

    client: EngineClient
    settings: Settings
    text: Text
    """Built from info.tokenizer_dir once the engine is ready."""
    admission: Admission
    served_names: tuple[str, ...]
    """Names a request may give as its model; the first is what answers carry."""
    metrics: Metrics
