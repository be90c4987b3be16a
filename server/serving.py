"""What every handler shares. A file of its own, so that handlers and the app that includes them can both name it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.client import EngineClient
from server.admission import Admission
from server.metrics import Metrics
from server.settings import Settings
from server.text import Text


@dataclass
class Serving:
    """Reached through `request.app.state.serving`. API routes run only while the engine is ready, so it is there."""

    client: EngineClient
    settings: Settings
    text: Text
    """Built from info.tokenizer_dir once the engine is ready."""
    admission: Admission
    served_names: tuple[str, ...]
    """Names a request may give as its model; the first is what answers carry."""
    metrics: Metrics
