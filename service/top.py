"""`tierkv top`: the daemon's stats, live: what it holds, and what it did in the last seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tierkv.client import connect
from tierkv.errors import Unavailable
from tierkv.service.status import in_units

__all__ = ["frame", "show"]

Stats = Mapping[str, Any]
_WINDOW_S = 10.0
_NOTHING = {"uptime_s": 0.0, "counters": {}, "tenants": {}}


def show(url: str, interval_s: float, console: Console, *, once: bool) -> None:
    """Print one frame, or draw a new one every `interval_s` seconds until interrupted.

    A daemon that goes away is waited for. Without a terminal there is one frame. Raises what connecting raises.
    """
    with connect(url) as cache:
        latest: Stats = cache.stats()
        if once or not console.is_terminal:
            console.print(frame(url, _NOTHING, latest))
            return
        window = [latest]
        with Live(frame(url, _NOTHING, latest), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                try:
                    latest = cache.stats()
                except Unavailable as error:
                    live.update(Group(frame(url, window[0], window[-1]), Text(str(error), "bold red")), refresh=True)
                    continue
                if latest["generation"] != window[-1]["generation"]:  # another run, its counters began anew
                    window.clear()
                window.append(latest)
                while len(window) > 2 and latest["uptime_s"] - window[1]["uptime_s"] >= _WINDOW_S:
                    del window[0]
                before = window[0] if len(window) > 1 else _NOTHING
                live.update(frame(url, before, latest), refresh=True)


def frame(url: str, before: Stats, now: Stats) -> RenderableType:
    """Draw what happened between two answers of `/v1/stats`; `before` without any uptime means since the start."""
    passed_s = max(now["uptime_s"] - before["uptime_s"], 1e-3)
    done = _Difference(before["counters"], now["counters"])
    asked = done["requested_tokens"]
    since = f"last {passed_s:.0f} s" if before["uptime_s"] else "since the start"
    return Group(
        Text.assemble((f"tierkv {url}", "bold"), f"  up {_age(now['uptime_s'])}, {since}"),
        _tiers(now, done, asked),
        Text(
            f"{done['acquires'] / passed_s:,.1f} requests/s, {asked / passed_s:,.0f} tokens/s asked for, "
            f"{_share(sum(done.labelled('hit_tokens').values()), asked)} hit; "
            f"{in_units(int(done['stored_bytes'] / passed_s))}/s stored"
        ),
        Text(
            f"loads {now['loads']['queued']} queued, {in_units(now['loads']['running_bytes'])} running; "
            f"{_moved(done, 'promoted_bytes', passed_s)} promoted, {_moved(done, 'demoted_bytes', passed_s)} demoted; "
            f"{_share(done['hidden_seconds'], done['load_seconds'])} of load time hidden by prefetching"
        ),
        Text("leases " + ", ".join(f"{count} {kind}" for kind, count in now["leases"].items())),
        _tenants(before, now, passed_s),
        *(Text(trouble, "bold red") for trouble in _troubles(now)),
    )


class _Difference:
    """What counters grew by."""

    def __init__(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        self._before = before
        self._now = now

    def __getitem__(self, name: str) -> float:
        return float(self._now[name] - self._before.get(name, 0))

    def labelled(self, name: str) -> dict[str, float]:
        earlier = self._before.get(name, {})
        return {label: count - earlier.get(label, 0) for label, count in self._now[name].items()}


def _tiers(now: Stats, done: _Difference, asked: float) -> Table:
    table = Table("tier", "used", "")
    for column in ("capacity", "blocks", "dirty", "hit rate"):
        table.add_column(column, justify="right")
    hits = done.labelled("hit_tokens")
    for name, usage in now["tiers"].items():
        used, capacity = usage["used_bytes"], usage["capacity_bytes"]
        table.add_row(
            name,
            in_units(used),
            ProgressBar(total=capacity, completed=used, width=20),
            in_units(capacity),
            f"{usage['blocks']:,}",
            in_units(now["dirty_bytes"][name]) if name in now["dirty_bytes"] else "",
            _share(hits.get(name, 0), asked),
        )
    return table


def _tenants(before: Stats, now: Stats, passed_s: float) -> Table:
    tiers = list(now["tiers"])
    table = Table("tenant", "weight", *tiers)
    table.add_column("tokens/s", justify="right")
    table.add_column("hit rate", justify="right")
    for name, tenant in sorted(now["tenants"].items()):
        done = _Difference(before["tenants"].get(name, {}), tenant)
        table.add_row(
            name,
            f"{tenant['weight']:g}",
            *(in_units(tenant["used_bytes"].get(tier, 0)) for tier in tiers),
            f"{done['requested_tokens'] / passed_s:,.0f}",
            _share(sum(done.labelled("hit_tokens").values()), done["requested_tokens"]),
        )
    return table


def _troubles(now: Stats) -> list[str]:
    """Return what an operator should look into, since the start of the daemon."""
    counters = now["counters"]
    told = [
        f"{sum(counters[name].values()):,} {what}: {', '.join(f'{n:,} {label}' for label, n in counters[name].items())}"
        for name, what in (
            ("corrupt_blocks", "corrupt blocks found and removed"),
            ("refused_demotions", "blocks the cold tier would not take"),
            ("expired_leases", "leases ended by their deadline"),
        )
        if counters[name]
    ]
    return [*told, *now["tiers"].get("cold", {}).get("findings", [])[-3:]]


def _moved(done: _Difference, name: str, passed_s: float) -> str:
    return f"{in_units(int(sum(done.labelled(name).values()) / passed_s))}/s"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _age(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
