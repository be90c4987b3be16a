"""What stores and transfers count, as the reports that leave the engine. Asks no tier."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

from cache.offload.host import HostSlab
from cache.offload.objects import ObjectStores
from cache.offload.tiers import Guarded
from cache.offload.transfers import Moved, Transfers
from engine.types import ObjectGroupReport, TierReport


def object_groups(transfers: Transfers) -> tuple[ObjectGroupReport, ...]:
    groups = transfers.groups
    return tuple(
        ObjectGroupReport(
            layers=tuple(
                sorted({layer for index in group.kernel_groups for layer in groups.kernel_groups[index].layers})
            ),
            window_chunks=group.window_chunks,
            object_bytes=transfers.object_bytes(group.index),
        )
        for group in groups.object_groups
    )


def tier_reports(objects: ObjectStores, loaded: Moved, stored: Moved) -> tuple[TierReport, ...]:
    """The object groups' shares of each tier together. Host memory's traffic is the way between it and the pool."""
    shares = [[_host_share(store.host), *map(_tier_share, store.tiers)] for store in objects.stores]
    host, *below = (functools.reduce(_together, of_one_tier) for of_one_tier in zip(*shares, strict=True))
    moved = {"loaded_bytes": loaded.size, "stored_bytes": stored.size}
    return (replace(host, **moved, load_s=loaded.seconds, store_s=stored.seconds), *below)


def _host_share(host: HostSlab) -> TierReport:
    status = host.status()
    return TierReport(
        name=status.name,
        capacity_bytes=status.capacity_bytes,
        used_bytes=status.used_bytes,
        entries=status.objects,
        held=status.holds,
        hits=host.hits,
        misses=host.misses,
        errors=host.counts["tokens"],
        counts=tuple(sorted(host.counts.items())),
    )


def _tier_share(guarded: Guarded) -> TierReport:
    status, traffic = guarded.tier.status(), guarded.traffic()
    return TierReport(
        name=status.name,
        capacity_bytes=status.capacity_bytes,
        used_bytes=status.used_bytes,
        entries=status.objects,
        breaker=guarded.breaker.state,
        chunk_s=guarded.pace.load_s,
        hits=traffic.hits,
        misses=traffic.misses,
        errors=traffic.errors,
        loaded_bytes=traffic.loaded_bytes,
        stored_bytes=traffic.stored_bytes,
        load_s=traffic.load_s,
        store_s=traffic.store_s,
        counts=tuple(sorted(guarded.counts.items())),
    )


def _together(one: TierReport, other: TierReport) -> TierReport:
    """Sums, of what both know where not of counts; the worse of two breakers."""
    counts = Counter(dict(one.counts)) + Counter(dict(other.counts))
    sums = {
        name: getattr(one, name) + getattr(other, name)
        for name in ("held", "hits", "misses", "errors", "loaded_bytes", "stored_bytes", "load_s", "store_s")
    }
    for name in ("capacity_bytes", "used_bytes", "entries", "chunk_s"):
        both = (getattr(one, name), getattr(other, name))
        sums[name] = None if None in both else sum(both)
    worse = max(one.breaker, other.breaker, key=("closed", "half-open", "open").index)
    return TierReport(name=one.name, breaker=worse, counts=tuple(sorted(counts.items())), **sums)
