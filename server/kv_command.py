"""`cellserve kv status`: where a running server's K/V is, as tables. The numbers are those of GET /v1/kv/status."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

EXIT_FAILED = 1
_TIMEOUT_S = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["status"], help="what to show")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the server listens")
    parser.add_argument("--api-key", help="sent as a bearer token (default: the first of CELLSERVE_API_KEY)")
    parser.add_argument("--json", action="store_true", help="print the answer as it is")


def run(args: argparse.Namespace) -> int:
    """0, or 1 when the server cannot be asked or a tier of it is given up for now."""
    key = args.api_key or os.environ.get("CELLSERVE_API_KEY", "").partition(",")[0]
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{args.url.rstrip('/')}/v1/kv/status", headers=headers, timeout=_TIMEOUT_S)
        status = answer.json()
        if answer.status_code != httpx.codes.OK:
            return _fail(status["error"]["message"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        return _fail(f"no answer from {args.url}: {error or type(error).__name__}")
    if args.json:
        print(json.dumps(status, indent=2))
    else:
        show(status, Console(width=None if sys.stdout.isatty() else 160))
    below = status["below"]
    is_well = below is None or all(tier["breaker"] == "closed" for tier in below["tiers"])
    return 0 if is_well else EXIT_FAILED


def show(status: dict[str, Any], console: Console) -> None:
    """As tables."""
    pool, tree, below = status["pool"], status["tree"], status["below"]
    summary = Table(box=None, show_header=False)
    summary.add_row("pool", f"{pool['cells']} cells: {pool['running']} running, {pool['free']} free")
    prefixes = f"{tree['cells']} cells in {tree['nodes']} nodes, {pool['evictable']} of them evictable"
    summary.add_row("prefix tree", prefixes if status["prefix_cache"] else "off")
    if below is None:
        summary.add_row("below the pool", "nothing (--kv-host-gib, --kv-disk, --kv-redis)")
        console.print(summary)
        return
    chunk, flying = below["chunk"], below["in_flight"]
    summary.add_row("namespace", below["namespace"]["digest"])
    groups = len(below["object_groups"])
    summary.add_row("chunk", f"{chunk['tokens']} tokens, {_size(chunk['bytes'])}, objects: {groups}")
    summary.add_row("staging", f"{_size(below['staging']['bytes'])}, {below['staging']['slots']} slots each way")
    summary.add_row(
        "in flight",
        f"{flying['loads']} loads, {flying['stores']} stores, {flying['fetches']} sessions waiting, "
        f"{flying['write_backs']} to copy down",
    )
    summary.add_row("loaded", f"{below['loaded_tokens']} of {below['lookup_tokens']} tokens looked for")
    if below["break_even_bytes_per_s"] is not None:
        summary.add_row("break-even", f"{_size(below['break_even_bytes_per_s'])}/s")
    if below["worth_chunk_s"] is not None:
        summary.add_row("worth waiting for", f"{1e3 * below['worth_chunk_s']:.3g} ms a chunk")
    console.print(summary)
    names = (
        "tier",
        "used",
        "capacity",
        "objects",
        "held",
        "hits",
        "misses",
        "errors",
        "load",
        "store",
        "a chunk",
        "asked",
    )
    table = Table(*names, box=None, header_style="bold")
    for tier in below["tiers"]:
        counts = (tier[name] for name in ("entries", "held", "hits", "misses", "errors"))
        rates = (tier["load_bytes_per_s"], tier["store_bytes_per_s"])
        table.add_row(
            tier["name"],
            _size(tier["used_bytes"]),
            _size(tier["capacity_bytes"]),
            *("-" if count is None else str(count) for count in counts),
            *("-" if rate is None else f"{_size(rate)}/s" for rate in rates),
            "-" if tier["chunk_s"] is None else f"{1e3 * tier['chunk_s']:.3g} ms",
            tier["asked"],
        )
    console.print(table)


def _size(count: int | None) -> str:
    if count is None:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def _fail(message: str) -> int:
    Console(stderr=True).print(f"kv: {message}", style="red", markup=False, soft_wrap=True)
    return EXIT_FAILED
