"""`tierkv insight`: why prompts were not cached, as tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from tierkv.client import connect
from tierkv.errors import ConfigError
from tierkv.insight.live import CAUSES, LONGEST_S

__all__ = ["ask_insight", "parse_last", "print_insight"]

_LAST = re.compile(r"(?P<number>\d{1,6}(?:\.\d{1,6})?)\s*(?P<unit>s|min|m|h|d)")
_UNITS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def ask_insight(url: str, window_s: float | None = None) -> dict[str, Any]:
    """Ask a daemon, about all since its start or a window. Raises what it answers, or `Unavailable`."""
    with connect(url) as cache:
        return cache.insight(window_s)


def parse_last(text: str) -> float:
    """Read how long a window is, such as 1h; return seconds. Raises `ConfigError`."""
    match = _LAST.fullmatch(text.strip())
    seconds = float(match["number"]) * _UNITS[match["unit"]] if match else 0.0
    if not 0 < seconds <= LONGEST_S:
        raise ConfigError(f"--last cannot be {text!r}", remedy="give a time such as 15min or 1h, at most 24h")
    return seconds


def print_insight(found: Mapping[str, Any], console: Console) -> None:
    """Print what a daemon said: what was lost and why, where prompts leave their templates, what room would give."""
    if not found["enabled"]:
        console.print("This daemon does not look into requests: insight.enabled is false.")
        return
    since = datetime.fromtimestamp(found["since"]).isoformat(" ", "seconds")
    hit = _share(sum(found["hit_tokens"].values()), found["requested_tokens"])
    asked = f"{found['requests']:,} requests for {found['requested_tokens']:,} tokens since {since}, {hit} hit"
    console.print(asked + (f"; {found['dropped']:,} not looked into" if found["dropped"] else ""))
    _causes(found, console)
    _templates(found, console)
    _regret(found, console)
    _room(found["whatif"], console)
    if found["window_s"] is not None:
        console.print(
            "Templates, what other capacities would give, and audits are told since the start: without --last."
        )
    for tenant, row in found["tenants"].items():
        verdicts = row["audits"]["audits"] if row["audits"] else {}
        bad = sum(verdicts.values()) - verdicts.get("ok", 0)
        if verdicts:
            style = "bold red" if bad else ""
            console.print(f"audits of {tenant}: {verdicts['ok']:,} ok, {bad:,} not", style=style, markup=False)


def _causes(found: Mapping[str, Any], console: Console) -> None:
    table = Table("lost, because", title="why tokens were not served")
    for column in ("tokens", "of requested", "prefill", "price"):
        table.add_column(column, justify="right")
    lost, seconds, price = found["lost_tokens"], found["lost_s"], found["lost_price"] or {}
    for cause in sorted(lost, key=lost.__getitem__, reverse=True):
        table.add_row(
            CAUSES.get(cause, cause),
            f"{lost[cause]:,}",
            _share(lost[cause], found["requested_tokens"]),
            f"{seconds[cause]:,.1f} s" if cause in seconds else "-",
            f"{price[cause]:,.2f}" if cause in price else "-",
        )
    if table.row_count:
        console.print(table)


def _templates(found: Mapping[str, Any], console: Console) -> None:
    table = Table("template", "tenant", "trunk", title="templates: beginnings that prompts share")
    for column in ("requests", "hit rate", "diverged", "evicted"):
        table.add_column(column, justify="right")
    table.add_column("leave early")
    for row in found["templates"]:
        asked, lost = row["requested_tokens"], row["lost_tokens"]
        points = (f"{point['share']:.0%} at token {point['token']:,}" for point in row["divergences"][:3])
        table.add_row(
            row["label"] or row["id"],
            row["tenant"],
            f"{row['start']:,} to {row['end']:,}",
            f"{row['requests']:,}",
            _share(sum(row["hit_tokens"].values()), asked),
            _share(lost.get("diverged", 0), asked),
            _share(lost.get("evicted", 0) + lost.get("not_demoted_in_time", 0), asked),
            ", ".join(points),
        )
    if table.row_count:
        console.print(table)


def _regret(found: Mapping[str, Any], console: Console) -> None:
    table = Table("tenant", "tier", title="regret: evicted, and wanted again")
    for column in ("tokens", "gone for good", "within a minute", "an hour"):
        table.add_column(column, justify="right")
    for tenant, row in found["tenants"].items():
        for tier, regret in row["regret"].items():
            within = regret["within"]
            minute = within.get("1min", 0)
            hour = minute + within.get("10min", 0) + within.get("1h", 0)
            table.add_row(
                tenant, tier, f"{regret['tokens']:,}", f"{regret['lost_tokens']:,}", f"{minute:,}", f"{hour:,}"
            )
    if table.row_count:
        console.print(table)


def _room(estimates: Mapping[str, Any] | None, console: Console) -> None:
    if estimates is None:
        return
    table = Table("tier", title="hit rate in blocks that other capacities would have had")
    factors = sorted({rate["factor"] for rate in estimates["rates"]})
    for factor in factors:
        table.add_column("as it is" if factor == 1 else f"{factor:g} times", justify="right")
    for tier in dict.fromkeys(rate["tier"] for rate in estimates["rates"]):
        rates = {rate["factor"]: rate["hit_rate"] for rate in estimates["rates"] if rate["tier"] == tier}
        table.add_row(tier, *(f"{rates[factor]:.1%}" for factor in factors))
    console.print(table)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"
