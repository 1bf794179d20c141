"""Layouts of several nodes as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from tierkv.replay.layouts import LayoutOutcome, LayoutsOutcome, SharedOutcome
from tierkv.replay.link import Link
from tierkv.replay.run import TierOutcome

__all__ = ["print_layouts"]

_GB = 1e9
_DASH = "-"


def _share(used: float | None) -> str:
    return _DASH if used is None else f"{used:.1%}"


_SHARED: dict[str, Callable[[SharedOutcome], str]] = {
    "from the shared tier, GB": lambda shared: f"{shared.loaded_bytes / _GB:,.1f}",
    "to the shared tier, GB": lambda shared: f"{shared.stored_bytes / _GB:,.1f}",
    "lookups there": lambda shared: f"{shared.lookups:,}",
    "  blocks asked for": lambda shared: f"{shared.keys:,}",
    "  quicker computed, tokens": lambda shared: f"{shared.unpaid_tokens:,}",
    "busiest node's link, used": lambda shared: _share(shared.node_link),
    "one such link at the engine, used": lambda shared: _share(shared.engine_link),
}


def print_layouts(outcome: LayoutsOutcome, label: str, link: Link, block_tokens: int, console: Console) -> None:
    """Print the layouts side by side, and the nodes of one that is alone; `label` names the nodes' own tiers."""
    layouts = outcome.layouts
    most = max(layouts, key=lambda layout: len(layout.tiers)).tiers
    capacities = ", ".join(f"{tier.name} {tier.capacity_blocks:,}" for tier in most)
    console.print(
        f"{outcome.requests:,} requests, {outcome.prompt_tokens:,} prompt tokens in {outcome.span_s:,.0f} s\n"
        f"{len(layouts[0].nodes)} nodes of {label}, blocks: {capacities}\n"
        f"{min(layout.refs_per_s for layout in layouts):,.0f} block references/s"
    )
    console.print(_comparison(outcome, [tier.name for tier in most]))
    console.print(f"ideal, one cache that never evicts: {outcome.rate(outcome.ideal_hit_tokens):.4f}")
    if any(layout.shared is not None for layout in layouts):
        console.print(_payoff(link, block_tokens))
    if len(layouts) == 1:
        console.print(_nodes(layouts[0]))


def _comparison(outcome: LayoutsOutcome, tiers: Sequence[str]) -> Table:
    """One column for each layout: there are more figures than layouts."""
    layouts = outcome.layouts
    table = Table("", *(layout.layout for layout in layouts))
    for column in table.columns[1:]:
        column.justify = "right"

    def row(name: str, figure: Callable[[LayoutOutcome], str]) -> None:
        table.add_row(name, *map(figure, layouts))

    row("hit rate", lambda layout: f"{outcome.rate(layout.hit_tokens):.4f}")
    for number, tier in enumerate(tiers):
        table.add_row(f"  from {tier}", *(_rate(outcome, layout.tiers[number : number + 1]) for layout in layouts))
    row("  worst node", lambda layout: f"{min(_rates(layout)):.4f}")
    row("  best node", lambda layout: f"{max(_rates(layout)):.4f}")
    row("busiest node computes, x mean", lambda layout: f"{layout.imbalance:.2f}")
    row("prefill saved, s", lambda layout: f"{layout.prefill_saved_s:,.0f}")
    row("spent on loads, s", lambda layout: f"{layout.load_s:,.0f}")
    if any(layout.shared is not None for layout in layouts):
        for name, figure in _SHARED.items():
            table.add_row(name, *(_DASH if layout.shared is None else figure(layout.shared) for layout in layouts))
    return table


def _rate(outcome: LayoutsOutcome, tier: Sequence[TierOutcome]) -> str:
    return f"{outcome.rate(tier[0].hit_tokens):.4f}" if tier else _DASH


def _rates(layout: LayoutOutcome) -> list[float]:
    return [node.hit_tokens / node.prompt_tokens for node in layout.nodes if node.prompt_tokens]


def _payoff(link: Link, block_tokens: int) -> str:
    run = link.least_run(block_tokens)
    pays = "never pays" if run is None else f"pays from {run} block{'s' if run > 1 else ''} on"
    return (
        f"{block_tokens} tokens: {block_tokens / link.prefill * 1e3:,.1f} ms to compute, "
        f"{link.block_bytes / link.bandwidth * 1e3:,.1f} ms to load and {link.latency * 1e3:g} ms a request\n"
        f"loading {pays}"
    )


def _nodes(layout: LayoutOutcome) -> Table:
    table = Table(
        "node", "requests", "hit rate", *(f"from {tier.name}" for tier in layout.tiers), "loaded, GB", "stored, GB"
    )
    for column in table.columns:
        column.justify = "right"
    for number, node in enumerate(layout.nodes):
        tokens = max(1, node.prompt_tokens)
        table.add_row(
            str(number),
            f"{node.requests:,}",
            f"{node.hit_tokens / tokens:.4f}",
            *(f"{found / tokens:.4f}" for found in node.tier_tokens),
            f"{node.loaded_bytes / _GB:,.1f}",
            f"{node.stored_bytes / _GB:,.1f}",
        )
    return table
