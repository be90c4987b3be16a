"""The engine's numbers as Prometheus families, made while someone scrapes: its latest snapshot, and where K/V was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.client import EngineLives
from engine.types import EngineInfo, EngineStats, KvReport, TiersReport

LABELS = ("model_name", "engine")
"""Of every family but HTTP's."""
ENGINE = "0"


class Engine(Protocol):
    """The part of the engine client that is read when someone scrapes."""

    @property
    def stats(self) -> EngineStats: ...
    @property
    def lives(self) -> EngineLives: ...


class EngineCollector(Collector):
    """Turns the engine's latest snapshot into families while a scrape asks for it."""

    def __init__(self, model_name: str, engine: Engine) -> None:
        self._values = (model_name, ENGINE)
        self._engine = engine
        self.info: EngineInfo | None = None
        self.kv: KvReport | None = None

    def describe(self) -> list[Metric]:
        return []  # Else registering would collect once, before the engine is there.

    @property
    def families(self) -> frozenset[str]:
        """Names of what is the engine's, and so the same in all of its processes."""
        return frozenset(family.name for family in self.collect()) - {"cellserve:requests_rerun"}

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        used_part = stats.cells_used / stats.cells_total if stats.cells_total else 0.0
        yield self._gauge("vllm:num_requests_running", "Sequences in the running batch.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences waiting for a place.", stats.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Used part of the K/V cells, 0 to 1.", used_part)
        yield self._counter("vllm:num_preemptions", "Sequences put back into the queue.", stats.preemptions)
        yield self._gauge("cellserve:cells_used", "K/V cells of running sequences.", stats.cells_used)
        yield self._gauge("cellserve:cells_cached", "K/V cells kept for prompts to come.", stats.cells_cached)
        yield self._gauge(
            "cellserve:cells_shared",
            "Of the used cells, those that several hold: sequences, copies.",
            stats.cells_shared,
        )
        free = stats.cells_total - stats.cells_used - stats.cells_cached
        yield self._gauge("cellserve:cells_free", "K/V cells that hold nothing.", free)
        yield self._gauge("cellserve:cells", "K/V cells of the pool.", stats.cells_total)
        yield self._counter("cellserve:steps", "Steps run.", stats.steps)
        yield self._counter("cellserve:steps_failed", "Steps that failed on the host.", stats.steps_failed)
        yield self._counter("cellserve:step_time_seconds", "Time spent in steps.", stats.step_time_s)
        yield self._counter("cellserve:rows_failed", "Choices that failed while others stood.", stats.rows_failed)
        lives = self._engine.lives
        yield self._counter("cellserve:engine_restarts", "Engines started behind another one's death.", lives.restarts)
        yield self._counter("cellserve:engine_hung", "Engines ended because nothing moved.", lives.hung)
        yield self._counter(
            "cellserve:requests_rerun", "Requests that ran again on another engine.", lives.requests_rerun
        )
        yield self._counter("cellserve:padding_rows", "Rows run that held no token.", stats.padding_rows)
        yield self._counter("cellserve:engine_prompt_tokens", "Prompt tokens run.", stats.prompt_tokens)
        yield self._counter("cellserve:engine_generated_tokens", "Tokens the engine drew.", stats.generated_tokens)
        calls = CounterMetricFamily("cellserve:method_calls", "Forward calls by method.", labels=(*LABELS, "method"))
        for method, count in stats.method_calls:
            calls.add_metric((*self._values, method), count)
        yield calls
        if self.info is not None:
            yield self._cache_config(self.info)
        if self.kv is not None:
            yield self._gauge("cellserve:prefix_tree_cells", "K/V cells of the prefix tree.", self.kv.tree_cells)
            yield self._gauge("cellserve:prefix_tree_nodes", "Nodes of the prefix tree.", self.kv.tree_nodes)
            if self.kv.tiers is not None:
                yield from self._below(self.kv.tiers)

    def _below(self, tiers: TiersReport) -> Iterator[Metric]:
        """Tiers below the pool: what is on its way, then a series a tier."""
        flying = GaugeMetricFamily("cellserve:kv_in_flight", "K/V on its way.", labels=(*LABELS, "what"))
        for what in ("loads_in_flight", "stores_in_flight", "fetches", "write_backs"):
            flying.add_metric((*self._values, what.removesuffix("_in_flight")), getattr(tiers, what))
        yield flying
        text = "Tokens that the prefix tree lacked when a request was queued."
        yield self._counter("cellserve:kv_lookup_tokens", text, tiers.lookup_tokens)
        yield self._counter("cellserve:kv_loaded_tokens", "Tokens loaded from a tier.", tiers.loaded_tokens)
        yield self._counter("cellserve:kv_wait_seconds", "Time requests waited for a tier.", tiers.wait_s)
        for field, text, kind in _TIER_FAMILIES:
            name = field.removesuffix("_s") + "_seconds" if field.endswith("_s") else field
            family = kind(f"cellserve:kv_tier_{name}", text)
            for tier in tiers.tiers:
                value = getattr(tier, field)
                if value is not None:
                    family.add_metric((*self._values, tier.name), value)
            yield family
        breaker = _tier_gauge("cellserve:kv_tier_breaker_open", "1: the tier is not asked; 0.5: one call tries it.")
        events = CounterMetricFamily(
            "cellserve:kv_tier_events", "What happened in a tier.", labels=(*LABELS, "tier", "event")
        )
        for tier in tiers.tiers:
            breaker.add_metric((*self._values, tier.name), {"closed": 0.0, "half-open": 0.5, "open": 1.0}[tier.breaker])
            for event, count in tier.counts:
                events.add_metric((*self._values, tier.name, event), count)
        yield breaker
        yield events

    def _cache_config(self, info: EngineInfo) -> Metric:
        # Gateways compute the K/V size as block_size x num_gpu_blocks; a block of ours is one cell of one token.
        labels = ("block_size", "num_gpu_blocks", "cache_dtype")
        family = GaugeMetricFamily("vllm:cache_config_info", "Constants of the K/V cache.", labels=(*LABELS, *labels))
        family.add_metric((*self._values, "1", str(info.kv_cells), info.kv_dtype), 1)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._values, value)
        return family


def _tier_gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=(*LABELS, "tier"))


def _tier_counter(name: str, text: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, labels=(*LABELS, "tier"))


_TIER_FAMILIES: tuple[tuple[str, str, Callable[[str, str], GaugeMetricFamily | CounterMetricFamily]], ...] = (
    ("used_bytes", "Bytes a tier keeps.", _tier_gauge),
    ("capacity_bytes", "Bytes a tier may keep.", _tier_gauge),
    ("entries", "Objects a tier keeps.", _tier_gauge),
    ("held", "Objects that something under way keeps from eviction.", _tier_gauge),
    ("hits", "Objects that were wanted and came from the tier.", _tier_counter),
    ("misses", "Objects that were wanted and not in the tier.", _tier_counter),
    ("errors", "Failed or slow calls, and objects that did not verify.", _tier_counter),
    ("loaded_bytes", "Bytes that came up from a tier.", _tier_counter),
    ("stored_bytes", "Bytes that went down to a tier.", _tier_counter),
    ("load_s", "Time of loads, side by side.", _tier_counter),
    ("store_s", "Time of stores, side by side.", _tier_counter),
)
"""Field of TierReport, help, kind."""
