"""Lines of the log, as text or as JSON, alike in every process of a server; and which request a line is about.

The one place that knows how a record is written. Torch-free, and in this package because the API processes and the
engine's both write. To standard error, a line a record; standard output holds only what was asked for.

    text   2026-11-30 10:01:55,641 WARNING engine.loop: choice 0 failed: ... [job-7]
    json   {"time": "2026-11-30T10:01:55.641Z", "level": "warning", "logger": "engine.loop", "process": "engine",
            "pid": 4711, "message": "choice 0 failed: ...", "request_id": "job-7"}

A record is about `request_id`'s request, or the one that its `extra={"request_id": ...}` names. Its `extra={"fields":
{...}}` are keys of the JSON; text has them in its message. Nobody logs prompts, answers, keys or queries: what does not
come in cannot go out.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]
ProcessName = Literal["api", "engine"]

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The X-Request-Id of the HTTP request that this task answers."""

_OURS = ("cellserve", "server", "engine", "cache", "static_graphs")
"""These are heard from INFO on, everybody else from WARNING on."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

_log = logging.getLogger("cellserve.server")


def configure(log_format: LogFormat, process: ProcessName) -> None:
    """Once in a process's life, before it says anything."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(process) if log_format == "json" else TextLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.INFO)


def is_json() -> bool:
    """Whether this process writes JSON."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


def tell(text: str, level: int = logging.INFO) -> None:
    """News for whoever started the server: a bare line for a person, a record for a machine."""
    if is_json():
        _log.log(level, "%s", text)
    else:
        print(f"cellserve: {text}", file=sys.stderr, flush=True)


class TextLines(logging.Formatter):
    """For people. A record without a traceback is one line, whatever a caller has put into its message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        about = _request_of(record)
        if about is not None and about not in record.message:
            record.message = f"{record.message} [{about}]"
        # A line break in it would forge a line of the log, an escape sequence what a terminal shows.
        record.message = _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), record.message)
        return super().formatMessage(record)


class JsonLines(logging.Formatter):
    """For machines: one object a line, ASCII."""

    def __init__(self, process: ProcessName) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "pid": record.process,
            "message": record.getMessage(),
        }
        about = _request_of(record)
        if about is not None:
            line["request_id"] = about
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _request_of(record: logging.LogRecord) -> str | None:
    named: str | None = getattr(record, "request_id", None)
    return named if named is not None else request_id.get()
