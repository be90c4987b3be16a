"""Where K/V is, for operators: GET /v1/kv/status, and POST /reset_prefix_cache. Behind the key like every API route."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from engine.types import KvReport, TierReport, TiersReport
from server import errors
from server.serving import Serving

router = APIRouter(tags=["cache"])

_RESET_NEVER = {
    "reset_running_requests": "what running requests use cannot be forgotten: cancel them first",
    "reset_external": "what tiers below the pool hold cannot be reset while the server runs: it is keyed by all that "
    "decides its bytes, so nothing else finds it; to give its memory back, stop the server and delete its folder",
}
"""Switches of this route on other servers, which cannot be obeyed here."""


@router.get("/v1/kv/status", operation_id="kv_status")
async def kv_status(request: Request) -> dict[str, Any]:
    """A snapshot between two steps: the pool, the prefix tree, and the tiers below the pool."""
    serving: Serving = request.app.state.serving
    return described(await serving.client.kv_report(), serving)


@router.post("/reset_prefix_cache", operation_id="reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> dict[str, Any]:
    """Forget the prefixes in the pool. Those that running requests use stay, and so does what tiers hold."""
    serving: Serving = request.app.state.serving
    for name, value in request.query_params.items():
        if name not in _RESET_NEVER:
            raise errors.unknown_parameter(name)
        if value.lower() not in ("false", "0"):
            raise errors.unsupported_parameter(_RESET_NEVER[name], name)
    report = await serving.client.kv_report()
    if not report.has_prefix_cache:
        raise errors.invalid_value("there is no prefix cache: the server runs with --no-prefix-cache or --cache single")
    reset = await serving.client.reset_prefix_cache()
    kept_by = [] if report.tiers is None else [tier.name for tier in report.tiers.tiers]
    return {
        "object": "prefix_cache.reset",
        "freed_cells": reset.freed_cells,
        "kept_cells": reset.kept_cells,
        "tiers_kept": kept_by,
    }


def described(report: KvReport, serving: Serving) -> dict[str, Any]:
    """The report as it is shown: bytes, counts, and what they come to."""
    stats = serving.client.stats
    token_s = stats.step_time_s / stats.prompt_tokens if stats.prompt_tokens else None
    return {
        "object": "kv.status",
        "prefix_cache": report.has_prefix_cache,
        "pool": {
            "cells": report.cells_total,
            "free": report.cells_free,
            "evictable": report.cells_evictable,
            "running": report.cells_total - report.cells_free - report.cells_evictable,
        },
        "tree": {"cells": report.tree_cells, "nodes": report.tree_nodes, "leases": report.tree_leases},
        "prefill_tokens_per_s": None if not token_s else round(1 / token_s, 1),
        "below": None if report.tiers is None else _below(report.tiers, token_s),
    }


def _below(tiers: TiersReport, token_s: float | None) -> dict[str, Any]:
    return {
        "namespace": {"digest": tiers.namespace, "record": json.loads(tiers.record)},
        "chunk": {
            "tokens": tiers.chunk_tokens,
            "bytes": tiers.chunk_bytes,
            "bytes_per_token": tiers.chunk_bytes // tiers.chunk_tokens,
        },
        "object_groups": [asdict(group) for group in tiers.object_groups],
        "staging": {"bytes": tiers.staging_bytes, "slots": tiers.staging_slots},
        "in_flight": {
            "loads": tiers.loads_in_flight,
            "stores": tiers.stores_in_flight,
            "fetches": tiers.fetches,
            "write_backs": tiers.write_backs,
        },
        "lookup_tokens": tiers.lookup_tokens,
        "loaded_tokens": tiers.loaded_tokens,
        "wait_s": tiers.wait_s,
        # A tier that reads slower than this makes a prefix later, not sooner: computing it is as fast.
        "break_even_bytes_per_s": None if not token_s else round(tiers.chunk_bytes / tiers.chunk_tokens / token_s),
        "worth_chunk_s": tiers.worth_chunk_s,
        "tiers": [_tier(tier, tiers.worth_chunk_s) for tier in tiers.tiers],
    }


def _tier(tier: TierReport, worth_chunk_s: float | None) -> dict[str, Any]:
    is_slow = tier.chunk_s is not None and worth_chunk_s is not None and tier.chunk_s > worth_chunk_s
    rates = {
        "load_bytes_per_s": round(tier.loaded_bytes / tier.load_s) if tier.load_s else None,
        "store_bytes_per_s": round(tier.stored_bytes / tier.store_s) if tier.store_s else None,
    }
    asked = "no: slower than computing" if is_slow else "yes"
    if tier.breaker != "closed":
        asked = "no: it failed" if tier.breaker == "open" else "one call, to try it"
    return {**asdict(tier), "counts": dict(tier.counts), "asked": asked, **rates}
