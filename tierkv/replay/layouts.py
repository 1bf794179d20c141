"""Nodes laid out in several ways, side by side: what each layout finds, moves and saves.

private
    Requests take turns at the nodes, or go anywhere by a seed. Nodes share nothing.
routed
    A request goes to the node with the longest prefix of it. Nodes share nothing.
shared
    As private, with one shared tier below all nodes.
both
    As routed, with one shared tier below all nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tierkv.errors import InvalidRequest
from tierkv.replay.costs import Costs
from tierkv.replay.link import Link
from tierkv.replay.nodes import NodesHits, NodesPlan, Served, replay_nodes
from tierkv.replay.routing import AtRandom, LongestPrefix, RoundRobin, Router
from tierkv.replay.run import TierOutcome
from tierkv.replay.shared import SharedPlan
from tierkv.replay.single import ideal_hit_tokens
from tierkv.replay.tiers import TierPlan
from tierkv.replay.trace import Request, Trace

__all__ = ["LAYOUTS", "LayoutOutcome", "LayoutsOutcome", "NodeOutcome", "Routing", "SharedOutcome", "run_layouts"]

LAYOUTS = ("private", "routed", "shared", "both")


@dataclass(frozen=True, slots=True)
class Routing:
    """How requests find their node.

    Attributes
    ----------
    seed
        Of layouts without a router: any node, by this seed; None: nodes take turns.
    spread
        Of layouts with a router: a node with more than so many times the mean load is passed over.
    """

    seed: int | None = None
    spread: float = 2.0

    def start(self, layout: str, nodes: int) -> Router:
        """Return the router of a layout."""
        if layout in ("routed", "both"):
            return LongestPrefix(nodes, self.spread)
        return RoundRobin() if self.seed is None else AtRandom(self.seed)


@dataclass(frozen=True, slots=True)
class NodeOutcome:
    """What one node did.

    Attributes
    ----------
    tier_tokens
        Hit tokens from each tier.
    loaded_bytes, stored_bytes
        From the shared tier and to it.
    """

    requests: int
    prompt_tokens: int
    hit_tokens: int
    tier_tokens: tuple[int, ...]
    loaded_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class SharedOutcome:
    """What the shared tier did.

    Attributes
    ----------
    blocks
        In it at the end.
    loaded_bytes, stored_bytes
        To the nodes and from them.
    lookups, keys
        Requests that asked it what is there, and for how many blocks.
    unpaid_tokens
        Were there, but quicker computed than loaded.
    node_link, engine_link
        Mean use of the busiest node's link, and of one such link at the engine, in the busier direction, as a share of
        its bandwidth; more than 1 is impossible: it takes more links. None where all requests arrive at once.
    """

    blocks: int
    loaded_bytes: int
    stored_bytes: int
    lookups: int
    keys: int
    unpaid_tokens: int
    node_link: float | None
    engine_link: float | None


@dataclass(frozen=True, slots=True)
class LayoutOutcome:
    """What one layout came to.

    Attributes
    ----------
    tiers
        The fastest first; capacities are those of one node.
    prefill_saved_s, load_s
        Seconds of prefill saved, and seconds of loads spent instead, over all nodes.
    imbalance
        Tokens that the busiest node had to compute, as a multiple of the mean.
    """

    layout: str
    hit_tokens: int
    tiers: tuple[TierOutcome, ...]
    nodes: tuple[NodeOutcome, ...]
    shared: SharedOutcome | None
    prefill_saved_s: float
    load_s: float
    imbalance: float
    refs_per_s: float


@dataclass(frozen=True, slots=True)
class LayoutsOutcome:
    """The result of a replay on several nodes."""

    requests: int
    prompt_tokens: int
    ideal_hit_tokens: int
    span_s: float
    layouts: tuple[LayoutOutcome, ...]

    def rate(self, tokens: int) -> float:
        """Return tokens as a share of all prompt tokens."""
        return tokens / self.prompt_tokens

    def as_json(self) -> dict[str, Any]:
        """Return what `tierkv replay --nodes N --json` prints."""
        figures = asdict(self)
        for layout in figures["layouts"]:
            layout["hit_rate"] = self.rate(layout["hit_tokens"])
            for tier in layout["tiers"]:
                tier["hit_rate"] = self.rate(tier["hit_tokens"])
            for node in layout["nodes"]:
                node["hit_rate"] = node["hit_tokens"] / max(1, node["prompt_tokens"])
        return figures


def run_layouts(
    trace: Trace,
    layouts: Sequence[str],
    nodes: int,
    local: TierPlan,
    shared: SharedPlan,
    link: Link,
    costs: Costs,
    routing: Routing,
    *,
    progress: Callable[[int], None] | None = None,
) -> LayoutsOutcome:
    """Replay a trace in each of some `LAYOUTS`; `progress` counts the requests of all of them.

    Raises `ConfigError` for impossible tiers, `InvalidRequest` for an empty trace.
    """
    if not trace.references():
        raise InvalidRequest("the trace has no blocks", remedy="give a trace with at least one prompt")
    span_s = (trace.requests[-1].timestamp - trace.requests[0].timestamp) / 1000
    found = []
    for done, layout in enumerate(layouts):
        plan = NodesPlan(nodes, local, shared if layout in ("shared", "both") else None, link)
        begin = time.perf_counter()
        hits = replay_nodes(
            trace, plan, routing.start(layout, nodes), progress=_after(done * len(trace.requests), progress)
        )
        seconds = time.perf_counter() - begin
        found.append(_outcome(trace, layout, plan, hits, link, costs, span_s, seconds))
    return LayoutsOutcome(len(trace.requests), trace.prompt_tokens(), ideal_hit_tokens(trace), span_s, tuple(found))


def _after(before: int, progress: Callable[[int], None] | None) -> Callable[[int], None] | None:
    return None if progress is None else lambda done: progress(before + done)


def _outcome(
    trace: Trace,
    layout: str,
    plan: NodesPlan,
    hits: NodesHits,
    link: Link,
    costs: Costs,
    span_s: float,
    seconds: float,
) -> LayoutOutcome:
    theirs: list[list[tuple[Request, Served]]] = [[] for _ in range(plan.nodes)]
    for request, served in zip(trace.requests, hits.served, strict=True):
        theirs[served.node].append((request, served))
    nodes = tuple(_node(requests, plan, link) for requests in theirs)
    computed = [node.prompt_tokens - node.hit_tokens for node in nodes]
    hit_tokens = sum(node.hit_tokens for node in nodes)
    by_tier = [sum(tokens) for tokens in zip(*(node.tier_tokens for node in nodes), strict=True)]
    names, capacities = plan.local.names(), plan.local.capacities()
    load_s = sum(
        tokens * costs.bytes_per_token / costs.bandwidths[name] for name, tokens in zip(names, by_tier, strict=False)
    )
    shared = None
    if plan.shared is not None:
        names = (*names, "shared")
        capacities = (*capacities, trace.unique_blocks() if plan.shared.capacity is None else plan.shared.capacity)
        load_s += sum(link.seconds(served.blocks[-1]) for served in hits.served)
        shared = _shared(hits, nodes, link, span_s)
    return LayoutOutcome(
        layout=layout,
        hit_tokens=hit_tokens,
        tiers=tuple(map(TierOutcome, names, capacities, by_tier)),
        nodes=nodes,
        shared=shared,
        prefill_saved_s=hit_tokens / costs.prefill,
        load_s=load_s,
        imbalance=max(computed) * len(nodes) / sum(computed) if any(computed) else 1.0,
        refs_per_s=trace.references() / seconds,
    )


def _node(mine: Sequence[tuple[Request, Served]], plan: NodesPlan, link: Link) -> NodeOutcome:
    tiers = len(plan.local.names()) + (plan.shared is not None)
    by_tier = tuple(sum(served.tokens[tier] for _, served in mine) for tier in range(tiers))
    loaded = sum(served.blocks[-1] for _, served in mine) if plan.shared is not None else 0
    return NodeOutcome(
        requests=len(mine),
        prompt_tokens=sum(request.tokens for request, _ in mine),
        hit_tokens=sum(by_tier),
        tier_tokens=by_tier,
        loaded_bytes=loaded * link.block_bytes,
        stored_bytes=sum(served.written for _, served in mine) * link.block_bytes,
    )


def _shared(hits: NodesHits, nodes: Sequence[NodeOutcome], link: Link, span_s: float) -> SharedOutcome:
    loaded = sum(node.loaded_bytes for node in nodes)
    stored = sum(node.stored_bytes for node in nodes)
    most = max(max(node.loaded_bytes, node.stored_bytes) for node in nodes)
    able = span_s * link.bandwidth
    return SharedOutcome(
        blocks=hits.shared_blocks,
        loaded_bytes=loaded,
        stored_bytes=stored,
        lookups=sum(served.asked > 0 for served in hits.served),
        keys=sum(served.asked for served in hits.served),
        unpaid_tokens=sum(served.unpaid_tokens for served in hits.served),
        node_link=most / able if able else None,
        engine_link=max(loaded, stored) / able if able else None,
    )
