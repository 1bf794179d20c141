"""The result of a replay as tables."""

from __future__ import annotations

from rich.console import Console, Group
from rich.table import Table

from tierkv.replay.costs import Worth
from tierkv.replay.run import Outcome, TiersOutcome

__all__ = ["print_outcome"]

_GB = 1e9


def print_outcome(outcome: Outcome, label: str, console: Console) -> None:
    """Print what was found beside what could have been; `label` names the policy or the configuration."""
    console.print(
        f"{outcome.requests:,} requests, {outcome.prompt_tokens:,} prompt tokens, "
        f"cache of {outcome.capacity_blocks:,} blocks, {outcome.refs_per_s:,.0f} block references/s"
    )
    console.print(_hits(outcome, label))
    if outcome.detail is not None:
        console.print(Group(_times(outcome.detail.worth), _sums(outcome.detail)))


def _hits(outcome: Outcome, label: str) -> Table:
    table = Table("", "hit tokens", "hit rate")
    for column in table.columns[1:]:
        column.justify = "right"

    def row(name: str, tokens: int) -> None:
        table.add_row(name, f"{tokens:,}", f"{outcome.rate(tokens):.4f}")

    row(label, outcome.hit_tokens)
    for tier in outcome.detail.tiers if outcome.detail is not None else ():
        row(f"  from {tier.name} ({tier.capacity_blocks:,} blocks)", tier.hit_tokens)
    row("Belady: knows the future", outcome.belady_hit_tokens)
    row("ideal: never evicts", outcome.ideal_hit_tokens)
    return table


def _times(worth: Worth) -> Table:
    table = Table("time to first token, s", "mean", "p50", "p95")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, times in (("without the cache", worth.uncached), ("with it", worth.cached)):
        table.add_row(name, f"{times.mean:.3f}", f"{times.p50:.3f}", f"{times.p95:.3f}")
    return table


def _sums(detail: TiersOutcome) -> str:
    return (
        f"prefill saved {detail.worth.prefill_saved_s:,.0f} s, spent on loads {detail.worth.load_s:,.0f} s; "
        f"written to disk {detail.disk_written_bytes / _GB:,.1f} GB before compression"
    )
