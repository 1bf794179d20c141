"""`tierkv inspect`: what a daemon holds, or what lies in the cold store of one that is not running."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tierkv.client import connect
from tierkv.config import Config
from tierkv.core.build import cold_path, read_secret
from tierkv.core.tenants import Tenants
from tierkv.errors import InvalidRequest, NotFound
from tierkv.service.status import in_units
from tierkv.sources import Sources
from tierkv.storage.cold.inspection import inspect_store

__all__ = ["clear", "inspect_daemon", "inspect_files", "print_daemon", "print_store"]

_SHORTEST_PREFIX = 8


def inspect_daemon(url: str) -> dict[str, Any]:
    """Ask a daemon for its namespaces, tenants and cold segments. Raises what the daemon answers, or `Unavailable`."""
    with connect(url) as cache:
        stats = cache.stats()
        cold = stats["tiers"].get("cold", {})
        return {
            "namespaces": cache.namespaces(),
            "tenants": stats["tenants"],
            "segments": cold.get("segments", []),
            "findings": cold.get("findings", []),
        }


def inspect_files(config: Path | None, state_dir: Path | None) -> dict[str, Any]:
    """Read the cold store of a configuration, or of a state directory. Changes nothing.

    Tenants are known by an id; those that the configuration names, and `default`, are shown by their names. Raises
    `ConfigError`, and what `inspect_store` raises.
    """
    settings = Sources(config, os.environ if config else {}, {"state_dir": state_dir}).read().config
    if settings.state_dir is None and settings.cold.path is None:
        raise InvalidRequest("there is nothing to inspect", remedy="give a daemon's URL, --state-dir, or --config")
    report = asdict(inspect_store(cold_path(settings)))
    names = _names(settings)
    report["payload_by_tenant"] = {names.get(tenant, tenant): n for tenant, n in report["payload_by_tenant"].items()}
    return report


def clear(url: str, namespace: str, tenant: str) -> tuple[str, int]:
    """Unpublish a tenant's blocks of a namespace, given whole or by its first digits; return its name and how many.

    Raises `NotFound` for a namespace that is not registered, `InvalidRequest` for digits that several begin with.
    """
    with connect(url, tenant=tenant) as cache:
        found = [known["namespace"] for known in cache.namespaces() if known["namespace"].startswith(namespace)]
        if not found:
            raise NotFound(f"no namespace {namespace!r} is registered", remedy="list them with tierkv inspect")
        if len(found) > 1 or len(namespace) < _SHORTEST_PREFIX:
            raise InvalidRequest(
                f"{namespace!r} does not name one namespace", remedy=f"give more digits, at least {_SHORTEST_PREFIX}"
            )
        return found[0], cache.clear(found[0])


def print_daemon(found: Mapping[str, Any], console: Console) -> None:
    """Print what `inspect_daemon` found."""
    _table(
        console,
        ("namespace", "model", "block tokens", "block bytes"),
        (
            (n["namespace"][:16], n["model"], str(n["block_tokens"]), ", ".join(map(str, n["block_bytes"])))
            for n in found["namespaces"]
        ),
        "no namespace was registered since the start",
    )
    tiers = sorted({tier for tenant in found["tenants"].values() for tier in tenant["used_bytes"]})
    _table(
        console,
        ("tenant", "weight", "scope", *tiers, "stored"),
        (
            (
                name,
                f"{tenant['weight']:g}",
                tenant["scope"],
                *(_of_quota(tenant, tier) for tier in tiers),
                in_units(tenant["stored_bytes"]),
            )
            for name, tenant in found["tenants"].items()
        ),
        "no tenant has asked for anything yet",
    )
    _table(
        console,
        ("segment", "size", "sequence", "state", "blocks"),
        (
            (s["name"], in_units(s["size"]), str(s["sequence"]), s["state"], f"{s['blocks']:,}")
            for s in found["segments"]
        ),
        "there is no cold tier, or nothing in it",
    )
    for finding in found["findings"]:
        console.print(finding, style="bold red", markup=False, soft_wrap=True)


def print_store(found: Mapping[str, Any], console: Console) -> None:
    """Print what `inspect_files` found."""
    console.print(f"cold store {found['path']}", markup=False, highlight=False, soft_wrap=True)
    _table(
        console,
        ("segment", "size", "sequence", "synced", "blocks", "payload"),
        (
            (
                s["name"],
                in_units(s["size"]),
                str(s["sequence"]),
                "yes" if s["clean"] else "no",
                f"{s['blocks']:,}",
                in_units(s["payload_bytes"]),
            )
            for s in found["segments"]
        ),
        "no segments",
    )
    _table(
        console,
        ("namespace", "blocks", "payload"),
        (
            (name[:16], f"{found['blocks_by_namespace'][name]:,}", in_units(nbytes))
            for name, nbytes in found["payload_by_namespace"].items()
        ),
        "no blocks",
    )
    _table(
        console,
        ("tenant", "payload"),
        ((name, in_units(nbytes)) for name, nbytes in found["payload_by_tenant"].items()),
        "",
    )
    for segment in found["segments"]:
        if segment["damage"]:
            console.print(f"{segment['name']}: {segment['damage']}", style="bold red", markup=False, soft_wrap=True)
        elif segment["broken_records"]:
            told = f"{segment['name']}: {segment['broken_records']} index records are broken; a start drops them"
            console.print(told, style="bold red", markup=False, soft_wrap=True)


def _names(settings: Config) -> dict[str, str]:
    """Return tenant names by id, as far as they can be told."""
    path = settings.secret or (settings.state_dir / "secret" if settings.state_dir is not None else None)
    if path is None or not path.exists():
        return {}
    tenants = Tenants(read_secret(path), {}, len(settings.tenants) + 1)
    return {tenants.named(name).id.hex(): name for name in {"default", *settings.tenants}}


def _of_quota(tenant: Mapping[str, Any], tier: str) -> str:
    used, quota = tenant["used_bytes"].get(tier, 0), tenant["quotas"].get(tier)
    return in_units(used) + (f" of {in_units(quota)}" if quota is not None else "")


def _table(console: Console, columns: Iterable[str], rows: Iterable[tuple[str, ...]], empty: str) -> None:
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    if table.row_count:
        console.print(table)
    elif empty:
        console.print(empty)
