"""OpenTelemetry: a span for each request, sent over OTLP/HTTP. The only file that knows the package, which is an extra.

    POST /v1/chat/completions ─┬ queued ───── prefill ───────── decode ─────────── end
                               arrival        its place         first token        last token

A caller's W3C traceparent makes the span a child of the caller's, which decides whether it is sampled. Spans carry
numbers, reasons and the X-Request-Id: no prompt, no answer, no key. They leave on a thread of the package's own: a
collector that is slow or gone costs spans, never a request. The OTEL_* variables that the package reads hold.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from engine.errors import ConfigError

if TYPE_CHECKING:
    from server.running import InEngine

EXTRA = "pip install 'cellserve[otel]'"
_SEND_S = 5
"""How long a collector may take for a batch."""
_LAST_WORD_S = 3.0
"""How long the spans of an ending server may take."""


def check(endpoint: str) -> None:
    """Raises ConfigError where no span could be sent there."""
    address = urlsplit(endpoint)
    if "@" in address.netloc:
        # It is shown wherever the configuration is.
        raise ConfigError(
            "--otlp-endpoint holds a name or a password: OTEL_EXPORTER_OTLP_HEADERS takes what a collector asks"
        )
    if address.scheme not in ("http", "https") or not address.netloc:
        raise ConfigError(f"--otlp-endpoint {endpoint} must be a URL such as http://localhost:4318")
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"--otlp-endpoint needs a package that is not installed ({error}): {EXTRA}") from error


class Tracer:
    """One for each server. Begins spans; owns the thread that sends them."""

    def __init__(self, endpoint: str, version: str) -> None:
        """endpoint: of the collector; without a path, that of traces is added. Raises ConfigError as `check` does."""
        check(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        url = endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
        resource = Resource.create({"service.name": "cellserve", "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=url, timeout=_SEND_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        self._tracer = self._provider.get_tracer("cellserve", version)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, method: str, request_id: str, headers: Mapping[str, str]) -> RequestSpan:
        """A span from now on. headers: of the request, names in lower case."""
        return RequestSpan(self._tracer, self._propagator.extract(headers), method, request_id)

    async def close(self) -> None:
        """Send what is left, for a moment at most; the process need not wait for a collector that is gone."""
        is_done = threading.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            is_done.set()

        threading.Thread(target=shut_down, name="last spans", daemon=True).start()
        await asyncio.to_thread(is_done.wait, _LAST_WORD_S)


class RequestSpan:
    """One request's. `tell` as often as there is a generation, then `end`, once."""

    def __init__(self, tracer: Any, context: Any, method: str, request_id: str) -> None:
        from opentelemetry.trace import SpanKind

        # Events come with times of the monotonic clock, spans have those of the calendar.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()
        self._method = method
        attributes = {"http.request.method": method, "cellserve.request_id": request_id}
        self._span = tracer.start_span(method, context=context, kind=SpanKind.SERVER, attributes=attributes)

    def tell(self, asked: InEngine) -> None:
        """What became of it in the engine; when it is over."""
        if not self._span.is_recording():
            return
        times, usage = asked.times(), asked.usage
        self._event("queued", times.arrived_s)
        if times.queued_s is not None:
            self._event("prefill", times.arrived_s + times.queued_s)
        if times.first_s is not None:
            self._event("decode", times.first_s)
        self._event("end", times.last_s)
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.response.finish_reasons": asked.finish_reasons,
                "cellserve.cached_tokens": usage.cached_tokens,
            }
        )

    def end(self, route: str, status: int) -> None:
        """route: its template, never the caller's path."""
        from opentelemetry.trace import Status, StatusCode

        self._span.update_name(f"{self._method} {route}")
        self._span.set_attributes({"http.route": route, "http.response.status_code": status})
        if status >= 500:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()

    def _event(self, name: str, at_s: float) -> None:
        self._span.add_event(name, timestamp=self._epoch_ns + int(at_s * 1e9))
