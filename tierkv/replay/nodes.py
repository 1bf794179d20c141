"""Several nodes on one trace, each with tiers of its own, and perhaps one shared tier below all of them.

A request is settled before the next one begins:

1. The router chooses its node.
2. Lookup. From the first block on, each block is taken from the fastest of the node's own tiers that has it, else from
   the shared tier, if that has it; the first block that nobody has ends the prefix.
3. Where speeds are given, the prefix is cut so that loading what is before the cut and computing what is behind it
   takes least time. What is before the cut is the request's hit. A cut never falls among blocks of the node's own.
4. Blocks of the hit that come from the shared tier are renewed there, in their order: it is the order of the loads.
5. All blocks of the request are used in the node's own tiers, the last one first, exactly as in the replay of a single
   machine. So what was loaded and what was computed is the node's own from now on. By the write policy ``demotion``, a
   block that is written to the node's cold tier for this, or without a cold tier leaves its memory, is put into the
   shared tier.
6. By the write policy ``all``, the blocks that the node computed and did not have are put into the shared tier, the
   first one first; by ``hits``, those of the hit for which it is the time. A block that is there is not written again,
   nor renewed.

The partial block at the end of a prompt is a block like any other. What a node holds depends on its own requests only,
never on the shared tier: that one decides what has to be computed, not what stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierkv.errors import ConfigError
from tierkv.replay.link import Link
from tierkv.replay.routing import RoundRobin, Router
from tierkv.replay.shared import SharedBlocks, SharedPlan
from tierkv.replay.tiers import MemoryPlan, TierPlan, Tiers
from tierkv.replay.trace import Request, Trace

__all__ = ["NodesHits", "NodesPlan", "Served", "hit_blocks", "replay_nodes"]


@dataclass(frozen=True, slots=True)
class NodesPlan:
    """Nodes that are all alike.

    Attributes
    ----------
    nodes
        How many.
    local
        The tiers of each.
    shared
        The tier they have in common; None where there is none.
    link
        Each node's way to it; None: everything that is there is loaded.
    """

    nodes: int
    local: TierPlan
    shared: SharedPlan | None = None
    link: Link | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one request.

    Attributes
    ----------
    node
        Where it was sent.
    blocks, tokens
        Of its hit, from each tier: the node's own, the fastest first, and at last the shared one, if there is one.
    asked
        Blocks the node did not have and so asked the shared tier for.
    unpaid_tokens
        Tokens that were there but were computed, because loading them would have taken longer.
    written
        Blocks that were put into the shared tier.
    """

    node: int
    blocks: tuple[int, ...]
    tokens: tuple[int, ...]
    asked: int
    unpaid_tokens: int
    written: int


@dataclass(frozen=True, slots=True)
class NodesHits:
    """What nodes found.

    Attributes
    ----------
    served
        For each request of the trace.
    shared_blocks
        Blocks in the shared tier at the end.
    """

    served: tuple[Served, ...]
    shared_blocks: int


def hit_blocks(
    trace: Trace, *, nodes: int, local_blocks: int, shared_blocks: int | None, policy: str = "lru"
) -> tuple[int, ...]:
    """Return the hit of each request, in blocks, on nodes that take turns and write all they compute to a shared tier.

    What a real cluster should find with the same requests, one after the other, each settled before the next.

    Parameters
    ----------
    nodes
        Request i of the trace goes to node ``i % nodes``.
    local_blocks, shared_blocks
        Blocks in a node's memory, and in the shared tier (0: there is none, None: all).
    policy
        By which a node's memory evicts.
    """
    local = TierPlan((MemoryPlan("warm", local_blocks, policy),), 0, 0.0)
    hits = replay_nodes(trace, NodesPlan(nodes, local, SharedPlan(shared_blocks)), RoundRobin())
    return tuple(sum(served.blocks) for served in hits.served)


def replay_nodes(
    trace: Trace, plan: NodesPlan, router: Router, *, progress: Callable[[int], None] | None = None
) -> NodesHits:
    """Replay a trace on nodes, as the head of this module says.

    Parameters
    ----------
    router
        A new one.
    progress
        Called now and then with the number of requests done.

    Raises `ConfigError` for tiers that cannot be, and unless there is a node.
    """
    if plan.nodes < 1:
        raise ConfigError(f"{plan.nodes} nodes cannot serve anything", remedy="use 1 or more")
    shared = SharedBlocks(plan.shared.capacity) if plan.shared is not None else None
    nodes = [_Node(trace, plan, shared) for _ in range(plan.nodes)]
    own = [node.tiers.holders for node in nodes]
    served = []
    for number, request in enumerate(trace.requests):
        if progress is not None and not number % 256:
            progress(number)
        chosen = router.choose(request, own)
        one = nodes[chosen].serve(request, chosen)
        router.computed(chosen, request.tokens - sum(one.tokens))
        served.append(one)
    return NodesHits(tuple(served), len(shared.held) if shared is not None else 0)


class _Node:
    """One node, and its way to the shared tier."""

    def __init__(self, trace: Trace, plan: NodesPlan, shared: SharedBlocks | None) -> None:
        together = plan.shared is not None
        self.tiers = Tiers(plan.local, self._left if together else None, self._demoted if together else None)
        self._trace = trace
        self._link = plan.link
        self._shared = shared
        self._write = plan.shared.write if plan.shared is not None else None
        self._hits_to_write = plan.shared.hits if plan.shared is not None else 0
        self._holders = [*self.tiers.holders, *([shared.held] if shared is not None else [])]
        self._has_cold = plan.local.cold > 0
        self._uses: dict[int, int] = {}  # in hits; counted for ``hits`` only
        self._written = 0

    def serve(self, request: Request, number: int) -> Served:
        shared, blocks = self._shared, request.blocks
        levels = self._lookup(request)
        hit = len(levels)
        if shared is None:
            for block in reversed(blocks):
                self.tiers.use(block)
            return Served(number, *self._by_tier(request, levels), 0, 0, 0)
        self._written = 0
        lowest = len(self._holders) - 1
        if self._link is not None and lowest in levels:
            upto = [self._trace.tokens(request, depth + 1) for depth in range(hit)]
            hit = self._link.paying([level == lowest for level in levels], upto)
        unpaid = self._trace.tokens(request, len(levels)) - self._trace.tokens(request, hit)
        del levels[hit:]
        for block, level in zip(blocks, levels, strict=False):
            if level == lowest:
                shared.load(block)
        computed = list(blocks[hit:])
        for holder in self.tiers.holders:
            computed = [block for block in computed if block not in holder]
        for block in reversed(blocks):
            self.tiers.use(block)
        if self._write == "all":
            for block in computed:
                self._put(block)
        elif self._write == "hits":
            self._count(blocks[:hit])
        asked = len(computed) + levels.count(lowest)
        return Served(number, *self._by_tier(request, levels), asked, unpaid, self._written)

    def _lookup(self, request: Request) -> list[int]:
        """Return for each block of the prefix that is there which tier has it."""
        levels = []
        for block in request.blocks:
            for level, holder in enumerate(self._holders):
                if block in holder:
                    levels.append(level)
                    break
            else:
                break
        return levels

    def _by_tier(self, request: Request, levels: list[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        blocks = [levels.count(level) for level in range(len(self._holders))]
        tokens = [count * self._trace.block_tokens for count in blocks]
        if levels:  # the last block of a prompt may be a partial one
            tokens[levels[-1]] -= len(levels) * self._trace.block_tokens - self._trace.tokens(request, len(levels))
        return tuple(blocks), tuple(tokens)

    def _count(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            uses = self._uses[block] = self._uses.get(block, 0) + 1
            if uses == self._hits_to_write:
                self._put(block)

    def _left(self, block: int) -> None:
        self._uses.pop(block, None)
        if not self._has_cold:
            self._demoted(block)

    def _demoted(self, block: int) -> None:
        if self._write == "demotion":
            self._put(block)

    def _put(self, block: int) -> None:
        assert self._shared is not None
        self._written += self._shared.store(block)
