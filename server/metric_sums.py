"""Figures of several API processes as those of one server: what each has counted, added to what one of them exposes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

Sums = dict[str, float]
"""Value by family, sample and labels, as `_key` writes them."""


def added(all_sums: Iterable[Sums]) -> Sums:
    total: Sums = {}
    for sums in all_sums:
        for key, value in sums.items():
            total[key] = total.get(key, 0.0) + value
    return total


def sums_of(registry: CollectorRegistry, of_one: frozenset[str]) -> Sums:
    """What adds up with other processes'. of_one: families that do not."""
    return {
        _key(family, sample): sample.value
        for family in registry.collect()
        if family.name not in of_one
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


class Together(CollectorRegistry):
    """One process's families with other processes' sums added."""

    def __init__(self, registry: CollectorRegistry, of_one: frozenset[str], others: Iterable[Sums]) -> None:
        super().__init__()
        self._one = registry
        self._of_one = of_one
        self._sums = added(others)

    def collect(self) -> Iterator[Metric]:
        missing: dict[str, list[Sample]] = {}
        families = list(self._one.collect())
        known = {_key(family, sample) for family in families for sample in family.samples}
        for key, value in self._sums.items():
            if key not in known:
                name, sample, labels = json.loads(key)
                missing.setdefault(name, []).append(Sample(sample, dict(labels), value))
        for family in families:
            if family.name not in self._of_one:
                summed = [
                    sample._replace(value=sample.value + self._sums.get(_key(family, sample), 0.0))
                    for sample in family.samples
                ]
                family.samples = summed + missing.get(family.name, [])
            yield family


def _key(family: Metric, sample: Sample) -> str:
    return json.dumps([family.name, sample.name, sorted(sample.labels.items())])
