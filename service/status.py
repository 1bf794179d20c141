"""`tierkv status`: the stats as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ByteSize
from rich.console import Console
from rich.table import Table

__all__ = ["in_units", "print_status"]


def print_status(stats: Mapping[str, Any]) -> None:
    """Print occupancy, hits and leases of `Cache.stats`."""
    counters = stats["counters"]
    tiers = Table(title=f"tiers after {stats['uptime_s']:.0f} s")
    for column in ("tier", "blocks", "payload", "in use", "capacity", "hit tokens"):
        tiers.add_column(column, justify="left" if column == "tier" else "right")
    for name, usage in stats["tiers"].items():
        tiers.add_row(
            name,
            f"{usage['blocks']:,}",
            in_units(usage["payload_bytes"]),
            in_units(usage["used_bytes"]),
            in_units(usage["capacity_bytes"]),
            f"{counters['hit_tokens'].get(name, 0):,}",
        )
    console = Console()
    console.print(tiers)
    hit, asked = sum(counters["hit_tokens"].values()), counters["requested_tokens"]
    share = f"{hit / asked:.1%}" if asked else "-"
    console.print(f"hit rate {share} ({hit:,} of {asked:,} tokens), {stats['published_blocks']:,} blocks published")
    console.print(f"leases {stats['leases']['read']} read, {stats['leases']['write']} write")
    shared = stats.get("shared")
    if shared:
        _print_shared(shared, counters["hit_tokens"].get("shared", 0), console)
    corrupt = sum(counters["corrupt_blocks"].values())
    if corrupt:
        console.print(f"{corrupt} corrupt blocks found and removed: {counters['corrupt_blocks']}", style="bold red")
    for finding in stats["tiers"].get("cold", {}).get("findings", []):
        console.print(f"cold tier: {finding}", style="bold red", markup=False, soft_wrap=True)


def _print_shared(shared: Mapping[str, Any], hit_tokens: int, console: Console) -> None:
    answers = shared["state"] == "closed"
    state = shared["last_error"] or shared["state"]
    if answers:
        state = "full" if shared["full"] else "answers"
    console.print(
        f"shared: {shared['kind']}, {state}; {hit_tokens:,} hit tokens, "
        f"{shared['uploaded_blocks']:,} blocks written, {shared['waiting_blocks']:,} waiting",
        style="" if answers else "bold red",
        markup=False,
        soft_wrap=True,
    )
    failures = sum(shared["failures"].values())
    if answers and failures:
        told = f"shared: {failures:,} calls have come to nothing, the last: {shared['last_error']}"
        console.print(told, style="yellow", markup=False, soft_wrap=True)
    for warning in shared["warnings"]:
        console.print(f"shared: {warning}", style="yellow", markup=False, soft_wrap=True)


def in_units(count: int) -> str:
    """Binary units, as in the configuration."""
    return ByteSize(count).human_readable(separator=" ")
