"""The books: what happened to requests and tokens, as Prometheus families, and all that a scrape is told.

Owns one registry, so that two servers in a process do not share counters. Handlers report here; the engine's numbers
are made in server/engine_metrics.py, and several processes' are added in server/metric_sums.py. Names under `vllm:` are
those that boards, gateways and load generators already read; what has no name there is ours, under `cellserve:`.

What always holds: request_success_total over all reasons + choices in flight = choices started;
generation_tokens_total = count of time_to_first_token + count of inter_token_latency.
Event-loop thread only.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from itertools import accumulate
from typing import Concatenate, ParamSpec

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.types import EngineInfo, FinishReason, KvReport
from server.engine_metrics import ENGINE, LABELS, Engine, EngineCollector
from server.metric_sums import Sums, Together, sums_of

log = logging.getLogger("cellserve.server")

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_OF_ONE = frozenset({"process_start_time_seconds", "process_max_fds"})
"""Families that stand for all processes of a server, beside the engine's."""

_FINISHED_REASONS: dict[FinishReason, str] = {
    "stop": "stop",
    "length": "length",
    "cancelled": "abort",
    "failed": "error",
}

# Seconds. The usual buckets of these names, with finer ones below 10 ms where a small model lives.
_TTFT_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_GAP_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_WHOLE_S = (
    *(0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_CHOICES = (1, 2, 5, 10, 20)
_LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_HTTP_S = (0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


_Told = ParamSpec("_Told")


def _harmless(report: Callable[Concatenate[Metrics, _Told], None]) -> Callable[Concatenate[Metrics, _Told], None]:
    """What goes wrong while it is written down is counted, and never reaches the request that it is about (B35)."""

    @wraps(report)
    def write(metrics: Metrics, /, *args: _Told.args, **kwargs: _Told.kwargs) -> None:
        try:
            report(metrics, *args, **kwargs)
        except Exception:
            metrics._write_failed(report.__name__)

    return write


class Metrics:
    """Handlers call it once for each thing that happened; a *choice* is one of a prompt's n answers."""

    def __init__(self, model_name: str, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._engine_collector = EngineCollector(model_name, engine)
        for collector in (ProcessCollector(registry=None), self._engine_collector):
            self._registry.register(collector)
        GCCollector(registry=self._registry)

        values = (model_name, ENGINE)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, LABELS, registry=self._registry).labels(*values)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(name, text, LABELS, buckets=tuple(buckets), registry=self._registry).labels(*values)

        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.")
        self._cached_tokens = counter("vllm:prompt_tokens_cached", "Prompt tokens whose K/V was already there.")
        self._prefix_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._tokens = _TokenCollector(values)
        self._registry.register(self._tokens)
        self._errors = counter("cellserve:metrics_errors", "Events that could not be written down.")
        self._unwritable: set[str] = set()
        self._slow_readers = counter("cellserve:slow_readers_left", "Streams closed because nobody read them.")
        self._choices_started = counter("cellserve:choices_started", "Choices admitted to the engine.")

        self._queue = histogram("vllm:request_queue_time_seconds", "Wait for a place, once a request.", _TTFT_S)
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds", "From its place to the first news, once a request.", _TTFT_S
        )
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token, once a choice.", _TTFT_S)
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean gap of a choice with 2 tokens or more.", _GAP_S
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to end, once a choice.", _WHOLE_S)
        self._decode = histogram("vllm:request_decode_time_seconds", "First token to last, once a choice.", _WHOLE_S)
        self._request_prompt = histogram("vllm:request_prompt_tokens", "Prompt length of a request.", _TOKENS)
        self._request_generated = histogram("vllm:request_generation_tokens", "Tokens of a finished choice.", _TOKENS)
        self._lag = histogram("cellserve:event_loop_lag_seconds", "Delay of a timer, four times a second.", _LAG_S)
        self._request_n = histogram("vllm:request_params_n", "n of a request.", _CHOICES)
        self._request_max = histogram("vllm:request_params_max_tokens", "max_tokens of a request.", _TOKENS)

        finished = Counter(
            "vllm:request_success",
            "Finished choices by reason.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        # All reasons exist from the start: a rate over a series that appears with its first event misses that event.
        self._finished = {reason: finished.labels(*values, name) for reason, name in _FINISHED_REASONS.items()}
        rejected = Counter(
            "vllm:admission_rejections",
            "Requests refused before they ran, by reason.",
            (*LABELS, "reason"),
            registry=self._registry,
        )
        self._rejected: Callable[[str], Counter] = lambda reason: rejected.labels(*values, reason)
        self._http_requests = Counter(
            "http_requests", "Answers by route and status.", ("method", "handler", "status"), registry=self._registry
        )
        self._http_duration = Histogram(
            "http_request_duration_seconds",
            "Request line to last byte.",
            ("method", "handler"),
            buckets=_HTTP_S,
            registry=self._registry,
        )
        self._http_series: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        """By method, handler and status: finding them by their labels takes longer than counting."""

    # What handlers report.

    @_harmless
    def request_started(self, *, prompt_tokens: int, n: int = 1, max_tokens: int | None = None) -> None:
        """One prompt with its n choices was admitted by the engine. Each of the n must reach `finished` once."""
        self._prompt_tokens.inc(prompt_tokens)
        self._choices_started.inc(n)
        self._request_prompt.observe(prompt_tokens)
        self._request_n.observe(n)
        if max_tokens is not None:
            self._request_max.observe(max_tokens)

    @_harmless
    def prompt_looked_up(self, *, prompt_tokens: int, cached_tokens: int) -> None:
        """Once a prompt, when the engine says how much of it was already there."""
        self._prefix_queries.inc(prompt_tokens)
        self._prefix_hits.inc(cached_tokens)
        self._cached_tokens.inc(cached_tokens)

    @_harmless
    def prompt_ran(self, *, queued_s: float, prefill_s: float) -> None:
        """Once a prompt that ran, with its first news: how long it waited, and how long that took from there on."""
        self._queue.observe(queued_s)
        self._prefill.observe(prefill_s)

    @_harmless
    def first_token(self, ttft_s: float) -> None:
        """A choice's first token; counts it."""
        self._tokens.drawn += 1
        self._ttft.observe(ttft_s)

    @_harmless
    def token_gap(self, gap_s: float, tokens: int = 1) -> None:
        """Further tokens of a choice, which came together after gap_s; counts them, an equal share of the gap each."""
        self._tokens.add(gap_s, tokens)

    @_harmless
    def finished(
        self, reason: FinishReason, *, generated_tokens: int, e2e_s: float, decode_s: float | None = None
    ) -> None:
        """A choice ended; once for each that started, also those a client left or a stop string cut.

        decode_s: first token to last; None when there was no token.
        """
        self._finished[reason].inc()
        self._e2e.observe(e2e_s)
        self._request_generated.observe(generated_tokens)
        if decode_s is not None:
            self._decode.observe(decode_s)
            if generated_tokens > 1:
                self._per_token.observe(decode_s / (generated_tokens - 1))

    @_harmless
    def slow_reader_left(self) -> None:
        """A stream's client took nothing for too long, or fell too far behind; its request is cancelled."""
        self._slow_readers.inc()

    @_harmless
    def loop_lagged(self, lag_s: float) -> None:
        """The event loop ran a timer so late."""
        self._lag.observe(lag_s)

    def rejected(self, reason: str) -> None:
        """A request was refused before it ran; reason is the error's code."""
        self._rejected(reason).inc()

    @_harmless
    def http_answered(self, *, method: str, handler: str, status: int, duration_s: float) -> None:
        """handler: the route's template, never the caller's path, which would be a series a visitor."""
        key = (method, handler, status)
        if key not in self._http_series:
            requests = self._http_requests.labels(method, handler, str(status))
            self._http_series[key] = requests, self._http_duration.labels(method, handler)
        requests, duration = self._http_series[key]
        requests.inc()
        duration.observe(duration_s)

    def _write_failed(self, event: str) -> None:
        """Count it, and say so in the log once for each kind of event."""
        self._errors.inc()
        if event not in self._unwritable:
            self._unwritable.add(event)
            log.warning("%s could not be written into the metrics", event, exc_info=True)

    # What a scrape reads.

    def engine_ready(self, info: EngineInfo) -> None:
        """The engine's constants are known."""
        self._engine_collector.info = info

    def kv_seen(self, report: KvReport) -> None:
        """Where K/V was when somebody looked last."""
        self._engine_collector.kv = report

    def render(self, others: Iterable[Sums] = ()) -> bytes:
        """The Prometheus text, of content type `CONTENT_TYPE`. others: `sums` of the server's other processes."""
        return generate_latest(Together(self._registry, self._families_of_one(), others))

    def sums(self) -> Sums:
        """What adds up with other processes' to the figures of the whole server."""
        return sums_of(self._registry, self._families_of_one())

    def _families_of_one(self) -> frozenset[str]:
        """What no sum is made of: the engine's numbers, and a start and limits that stand for all processes."""
        return self._engine_collector.families | _OF_ONE


class _TokenCollector(Collector):
    """What is counted for every token: sums of its own, for the library's take a lock and a search each."""

    def __init__(self, values: tuple[str, ...]) -> None:
        self.drawn = 0
        self._values = values
        self._gap_counts = [0] * (len(_GAP_S) + 1)
        self._gap_sum_s = 0.0

    def add(self, gap_s: float, tokens: int) -> None:
        self.drawn += tokens
        self._gap_counts[bisect_left(_GAP_S, gap_s / tokens)] += tokens
        self._gap_sum_s += gap_s

    def collect(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily("vllm:generation_tokens", "Tokens drawn.", labels=LABELS)
        tokens.add_metric(self._values, self.drawn)
        yield tokens
        name, text = "vllm:inter_token_latency_seconds", "Gap before each token but the first."
        gaps = HistogramMetricFamily(name, text, labels=LABELS)
        bounds = [*map(floatToGoString, _GAP_S), "+Inf"]
        gaps.add_metric(self._values, list(zip(bounds, accumulate(self._gap_counts), strict=True)), self._gap_sum_s)
        yield gaps
