"""What every handler shares. A file of its own, so that handlers and the app that includes them can both name it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel

from engine.client import EngineClient
from server import extra_fields
from server.admission import Admission
from server.key_limits import Accounts
from server.metrics import Metrics
from server.running import Running
from server.schemas import GenerationBody, StreamOptions
from server.settings import Settings
from server.text import Text

_MAX_SAID = 256
"""Field names that the log has named; a client could make up more of them than anybody wants to read."""

_log = logging.getLogger("cellserve.server")

_Body = TypeVar("_Body", bound=GenerationBody)


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
    fingerprint: str
    """Of what makes the answers: the same on every server that runs the same model in the same way."""
    accounts: Accounts
    running: Running = field(default_factory=Running)
    _said: set[str] = field(default_factory=set)

    def headers_of(self, body: BaseModel) -> dict[str, str]:
        """Refuse fields that cannot be obeyed; name those nobody knows in the headers returned, and once in the log."""
        headers = extra_fields.check(body, is_strict=self.settings.strict_params)
        names = set(filter(None, headers.get("x-ignored-params", "").split(","))) - self._said
        if names and len(self._said) < _MAX_SAID:
            self._said |= names
            _log.warning("fields that nobody knows are ignored: %s", ", ".join(sorted(names)))
        return headers

    def with_usage(self, body: _Body) -> _Body:
        """The body, its stream asked to end with the usage where this server always does that."""
        if not (self.settings.enable_force_include_usage and body.stream):
            return body
        options = body.stream_options or StreamOptions()
        return body.model_copy(update={"stream_options": options.model_copy(update={"include_usage": True})})
