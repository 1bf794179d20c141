"""A plan as tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tierkv.insight.plan.knee import Curve, cheapest, curves, knee
from tierkv.insight.plan.points import Figure, Plan

__all__ = ["disk_name", "print_plan", "sentences", "size"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(number: int) -> str:
    """Return bytes in the largest unit that leaves at least 1, such as `1.5 TiB`."""
    value, unit = float(number), 0
    while value >= 1024 and unit + 1 < len(_UNITS):
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {_UNITS[unit]}"


def disk_name(disk_bytes: int) -> str:
    """Return how a disk is called in a title."""
    return f"{size(disk_bytes)} of disk" if disk_bytes else "no disk"


def print_plan(plan: Plan, console: Console) -> None:
    """Print the traffic, a table for each disk and policy, and what follows from them."""
    base = plan.baseline
    console.print(
        f"{base.requests:,} requests in {base.span_s / 3600:.2f} h, {base.prompt_tokens:,} prompt tokens, "
        f"{size(base.total_bytes)} of distinct KV; "
        + (f"{plan.samples} samples, ± two standard errors" if plan.samples else "all blocks"),
        soft_wrap=True,
    )
    console.print(
        f"without a cache: time to first token {base.ttft_mean_s:.3f} s on average, {base.ttft_p95_s:.3f} s at p95"
        + (f", {base.cost_per_hour:,.2f} an hour" if base.cost_per_hour is not None else "")
        + f"; a cache that never evicts hits {base.ideal_hit_rate:.3f}",
        soft_wrap=True,
    )
    for curve in curves(plan):
        console.print(_table(curve))
    for sentence in sentences(plan):
        console.print(sentence, soft_wrap=True)


def sentences(plan: Plan) -> Iterator[str]:
    """Yield where more memory stops paying, and what is cheapest."""
    for curve in curves(plan):
        bend = knee(curve)
        if bend.more is None:
            found = f"more than {size(bend.at.setup.ram_bytes)} of memory may still pay: ask about larger sizes"
        else:
            times = "twice" if bend.factor == 2 else f"{bend.factor:.3g} times"
            found = (
                f"the knee is at {size(bend.at.setup.ram_bytes)} of memory (hit rate {bend.at.hit_rate.value:.3f}); "
                f"{times} this memory brings {bend.hit_rate_gain:+.3f} hit rate "
                f"and {-100 * bend.ttft_cut:+.1f} % time to first token"
            )
        yield f"{curve.policy}, {disk_name(curve.disk_bytes)}: {found}"
    best = cheapest(plan.points)
    if best is not None and best.cost_per_hour is not None:
        yield (
            f"cheapest: {best.setup.policy} with {size(best.setup.ram_bytes)} of memory and "
            f"{disk_name(best.setup.disk_bytes)}, {best.cost_per_hour.value:,.2f} an hour"
        )


def _table(curve: Curve) -> Table:
    first = curve.points[0]
    priced = first.cost_per_hour is not None
    headings = ["memory", "hit rate", "of it memory", "TTFT mean, s", "p50", "p95", *(["an hour"] if priced else [])]
    title = f"{curve.policy}, {disk_name(curve.disk_bytes)}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for point in curve.points:
        cells = [_cell(point.hit_rate), _cell(point.ram_hit_rate)]
        cells += [_cell(point.ttft_mean_s), f"{point.ttft_p50_s.value:.3f}", f"{point.ttft_p95_s.value:.3f}"]
        if point.cost_per_hour is not None:
            cells.append(f"{point.cost_per_hour.value:,.2f}")
        table.add_row(size(point.setup.ram_bytes), *cells)
    return table


def _cell(figure: Figure) -> str:
    return f"{figure.value:.3f}" + (f" ±{figure.error:.3f}" if figure.error else "")
