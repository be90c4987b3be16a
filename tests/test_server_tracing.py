"""Spans at an OTLP/HTTP receiver of our own, sent by the real package where it is installed."""

from __future__ import annotations

import http.server
import importlib.util
import queue
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from engine.errors import ConfigError
from server.settings import Settings
from support.live_server import LiveServer, live_server, until
from support.scripted import ScriptedExecutor, scripted_client


def has_package() -> bool:
    try:
        return all(map(importlib.util.find_spec, ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")))
    except ModuleNotFoundError:  # of a parent
        return False


needs_package = pytest.mark.skipif(not has_package(), reason="needs opentelemetry: pip install 'cellserve[otel]'")

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
WAIT_S = 20.0


class Receiver:
    """Takes what an OTLP exporter posts."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.posts: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()

    def span(self) -> Any:
        """The next one, as the protocol's own message; its resource's attributes are in `resource`."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        path, body = self.posts.get(timeout=WAIT_S)
        assert path == "/v1/traces"
        [of_resource] = ExportTraceServiceRequest.FromString(body).resource_spans
        self.resource = attributes(of_resource.resource)
        [scope] = of_resource.scope_spans
        [span] = scope.spans
        return span


def attributes(holder: Any) -> dict[str, Any]:
    def value(of: Any) -> Any:
        kind = of.WhichOneof("value")
        told = getattr(of, kind)
        return [value(each) for each in told.values] if kind == "array_value" else told

    return {each.key: value(each.value) for each in holder.attributes}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            made.posts.put((self.path, body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        made = Receiver(f"http://127.0.0.1:{listening.server_port}")
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        listening.shutdown()
        thread.join()


@pytest.fixture
def executor() -> ScriptedExecutor:
    return ScriptedExecutor()


@pytest.fixture
def server(receiver: Receiver, executor: ScriptedExecutor) -> Iterator[LiveServer]:
    settings = Settings(access_log=False, otlp_endpoint=receiver.url)
    with live_server(scripted_client(executor), settings) as server:
        yield server


@needs_package
def test_a_request_is_a_span_with_its_stations(server: LiveServer, receiver: Receiver) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "n": 2, "user": "mallory"}
    headers = {"X-Request-Id": "job-7"}
    server.http.post("/v1/completions", json=body, headers=headers).raise_for_status()
    span = receiver.span()
    assert receiver.resource["service.name"] == "cellserve"
    assert span.name == "POST /v1/completions"
    told = attributes(span)
    assert told == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "cellserve.request_id": "job-7",
        "cellserve.cached_tokens": 0,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.response.finish_reasons": ["length", "length"],
    }
    assert [event.name for event in span.events] == ["queued", "prefill", "decode", "end"]
    stations = [event.time_unix_nano for event in span.events]
    assert span.start_time_unix_nano <= stations[0]
    assert stations == sorted(stations)
    assert stations[-1] <= span.end_time_unix_nano


@needs_package
def test_embeddings_have_the_stations_of_their_inputs_and_draw_nothing(
    server: LiveServer, receiver: Receiver, executor: ScriptedExecutor
) -> None:
    server.http.post("/v1/embeddings", json={"input": [[5, 6], [5, 6, 7]]}).raise_for_status()
    span = receiver.span()
    told = attributes(span)
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (5, 0)
    assert told["gen_ai.response.finish_reasons"] == ["stop", "stop"]
    assert [event.name for event in span.events] == ["queued", "prefill", "end"]
    stations = [event.time_unix_nano for event in span.events]
    assert [span.start_time_unix_nano, *stations, span.end_time_unix_nano] == sorted(
        [span.start_time_unix_nano, *stations, span.end_time_unix_nano]
    )
    executor.fail_session((9,))
    assert server.http.post("/v1/embeddings", json={"input": [[9]]}).status_code == 500
    assert attributes(receiver.span())["gen_ai.response.finish_reasons"] == ["failed"]


@needs_package
def test_a_callers_trace_goes_on_and_its_sampling_is_obeyed(server: LiveServer, receiver: Receiver) -> None:
    body = {"prompt": [5, 6], "max_tokens": 1}
    for flags in ("00", "01"):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}
        server.http.post("/v1/completions", json=body, headers=headers).raise_for_status()
    span = receiver.span()
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    server.http.post("/v1/completions", json=body, headers={"traceparent": "nonsense"}).raise_for_status()
    span = receiver.span()  # the unsampled one was never sent
    assert span.trace_id.hex() != TRACE
    assert span.parent_span_id == b""


@needs_package
def test_a_refusal_has_a_span_without_stations_and_a_failure_is_an_error(
    server: LiveServer, receiver: Receiver, executor: ScriptedExecutor
) -> None:
    assert server.http.post("/v1/completions", json={"prompt": [5], "max_tokens": -1}).status_code == 400
    span = receiver.span()
    assert list(span.events) == []
    assert attributes(span)["http.response.status_code"] == 400
    assert span.status.code == 0
    executor.fail_session((9, 9))
    assert server.http.post("/v1/completions", json={"prompt": [9, 9]}).status_code == 500
    span = receiver.span()
    assert span.status.code == 2
    assert attributes(span)["gen_ai.response.finish_reasons"] == ["failed"]


@needs_package
def test_a_stream_that_its_client_leaves_ends_its_span(
    server: LiveServer, receiver: Receiver, executor: ScriptedExecutor
) -> None:
    executor.release(3)
    body = {"prompt": [5, 6], "max_tokens": 400, "stream": True}
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")
    with server.http.stream("POST", "/v1/completions", json=body) as stream:
        next(stream.iter_lines())
        executor.wait_held()
    # Before the engine goes on: it could come to the end before the leaving was seen.
    until(lambda: server.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1)
    executor.release()
    told = attributes(receiver.span())
    assert told["http.response.status_code"] == 499
    assert told["gen_ai.response.finish_reasons"] == ["cancelled"]


@needs_package
def test_reading_has_no_span(server: LiveServer, receiver: Receiver) -> None:
    for path in ("/v1/models", "/metrics", "/ready", "/"):
        server.http.get(path)
    server.http.post("/tokenize", json={"prompt": "a"})
    assert receiver.span().name == "POST /tokenize"


@needs_package
def test_the_last_spans_leave_with_the_server(receiver: Receiver) -> None:
    settings = Settings(access_log=False, otlp_endpoint=f"{receiver.url}/v1/traces")
    with live_server(scripted_client(), settings) as server:
        server.http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 1}).raise_for_status()
    assert receiver.span().name == "POST /v1/completions"


@needs_package
def test_a_collector_that_is_gone_costs_no_request() -> None:
    settings = Settings(access_log=False, otlp_endpoint="http://127.0.0.1:9")
    with live_server(scripted_client(), settings) as server:
        for _ in range(20):
            server.http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 1}).raise_for_status()


def test_without_the_package_the_option_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"--otlp-endpoint needs .* pip install 'cellserve\[otel\]'"):
        Settings(otlp_endpoint="http://localhost:4318").check()


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="must be a URL such as"):
        Settings(otlp_endpoint=endpoint).check()
