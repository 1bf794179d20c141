"""What `tierkv replay --nodes` does: read a trace, replay it in every layout, print them side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tierkv.errors import ConfigError
from tierkv.replay.command import checked_config, checked_policy, policy_label, progress_bar, tier_plan
from tierkv.replay.costs import Costs
from tierkv.replay.layouts import LAYOUTS, Routing, run_layouts
from tierkv.replay.layouts_report import print_layouts
from tierkv.replay.link import Link, parse_bytes
from tierkv.replay.run import capacity_in_blocks
from tierkv.replay.shared import SharedPlan, parse_write
from tierkv.replay.tiers import MemoryPlan, TierPlan
from tierkv.replay.trace import Trace, read_trace

__all__ = ["Cluster", "Own", "own_policy", "own_tiers", "refuse_without_nodes", "run_cluster"]

_BX1 = 1.5
"""By what factor the codec of the cold and the shared tier shrinks bfloat16."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes and what joins them, as options give it; None where one is left out.

    Attributes
    ----------
    layouts
        Names of `LAYOUTS`; none: all.
    seed, spread
        Those of `Routing`.
    shared, shared_blocks
        Capacity of the shared tier: a share of the trace's distinct blocks, 50 % of them by default, or blocks.
    write
        ``all`` (the default), ``demotion``, or ``hits:N``.
    link
        Bytes per second between a node and the shared tier, as text with a unit: ``10Gbit`` by default.
    latency_ms
        Milliseconds that a request waits for its first byte from there; 1 by default.
    block_bytes
        Bytes of a block there, as text with a unit; by default what codec `bx1` leaves of bfloat16.
    """

    nodes: int
    layouts: tuple[str, ...]
    seed: int | None
    spread: float | None
    shared: str | None
    shared_blocks: int | None
    write: str | None
    link: str | None
    latency_ms: float | None
    block_bytes: str | None

    def routing(self) -> Routing:
        """Return how requests find their node."""
        return Routing(self.seed) if self.spread is None else Routing(self.seed, self.spread)

    def plan(self, trace: Trace) -> SharedPlan:
        """Return the shared tier."""
        capacity = self.shared_blocks
        if capacity is None:
            capacity = capacity_in_blocks(trace, self.shared or "50%", "--shared-blocks")
        return SharedPlan(capacity, *parse_write(self.write or "all"))

    def way(self, trace: Trace, costs: Costs) -> Link:
        """Return the link to the shared tier."""
        bandwidth = parse_bytes(self.link or "10Gbit", "--link")
        if self.block_bytes is None:
            block_bytes = int(trace.block_tokens * costs.bytes_per_token / _BX1)
        else:
            block_bytes = parse_bytes(self.block_bytes, "--block-bytes")
        return Link(bandwidth, (1.0 if self.latency_ms is None else self.latency_ms) / 1e3, block_bytes, costs.prefill)

    def check(self) -> None:
        """Raise `ConfigError` for what is wrong without regard to a trace."""
        for layout in self.layouts:
            if layout not in LAYOUTS:
                raise ConfigError(f"unknown layout {layout!r}", remedy=f"use one of {', '.join(LAYOUTS)}")
        if self.shared is not None and self.shared_blocks is not None:
            raise ConfigError("--shared and --shared-blocks exclude each other", remedy="leave one of them out")
        parse_write(self.write or "all")


@dataclass(frozen=True, slots=True)
class Own:
    """A node's own tiers: a label for the table, and how many blocks of a trace they hold."""

    label: str
    plan: Callable[[Trace], TierPlan]


def own_policy(
    policy: str | None, parameters: Mapping[str, float], share: str | None, capacity_blocks: int | None
) -> Own:
    """Give each node one memory tier, by the options of a replay of one policy. Raises `ConfigError`."""
    name = checked_policy(policy, parameters, share, capacity_blocks)

    def plan(trace: Trace) -> TierPlan:
        capacity = capacity_blocks or capacity_in_blocks(trace, share or "5%")
        return TierPlan((MemoryPlan("warm", capacity, name, parameters),), 0, 0.0)

    return Own(policy_label(name, parameters), plan)


def own_tiers(config: Path, unused: Iterable[object], bytes_per_token: int) -> Own:
    """Give each node the tiers of a configuration. Raises `ConfigError`, also if an `unused` option is given."""
    settings = checked_config(config, unused)
    return Own(config.name, lambda trace: tier_plan(settings, trace.block_tokens * bytes_per_token))


def refuse_without_nodes(options: Iterable[object]) -> None:
    """Raise `ConfigError` if one of the options is given that are about several nodes."""
    if any(option is not None for option in options):
        raise ConfigError("one machine has no layout and no shared tier", remedy="say how many with --nodes")


def run_cluster(
    path: Path, block_tokens: int, cluster: Cluster, own: Own, costs: Costs, *, end_hints: bool, as_json: bool
) -> None:
    """Replay the trace and print a table, or one line of JSON. Raises `ConfigError`."""
    if end_hints:  # a session that is everywhere ends nowhere in particular
        raise ConfigError("--nodes and --end-hints exclude each other", remedy="leave one of them out")
    cluster.check()
    trace = read_trace(path, block_tokens)
    layouts = cluster.layouts or LAYOUTS
    link = cluster.way(trace, costs)
    with progress_bar(len(layouts) * len(trace.requests)) as progress:
        outcome = run_layouts(
            trace,
            layouts,
            cluster.nodes,
            own.plan(trace),
            cluster.plan(trace),
            link,
            costs,
            cluster.routing(),
            progress=progress,
        )
    if as_json:
        sys.stdout.write(json.dumps(outcome.as_json()) + "\n")
    else:
        print_layouts(outcome, own.label, link, block_tokens, Console())
