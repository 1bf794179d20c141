"""Belady's rule: what a cache that knew the future would have found.

It evicts the block whose next use is farthest, blocks without one first, and of equals the deepest, so that a chain
loses its tail first. A new block may be the one that goes. For single blocks of one size this is optimal; for prefixes
it is the usual yardstick.

Belady: "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
"""

from __future__ import annotations

import heapq

from tierkv.replay.trace import Trace

__all__ = ["belady_hit_tokens"]


def belady_hit_tokens(trace: Trace, capacity: int) -> int:
    """Return the hit tokens of a cache of `capacity` blocks that knows all requests to come."""
    # Every use pushes a new entry; one whose next use is no longer the block's is skipped when it comes up.
    farthest: list[tuple[int, int, int]] = []
    resident: dict[int, int] = {}
    hit_tokens = 0
    for request, next_uses in zip(trace.requests, _next_uses(trace), strict=True):
        blocks = request.blocks
        hit_tokens += trace.hit_tokens(request, resident)
        for depth, (block, next_use) in enumerate(zip(blocks, next_uses, strict=True)):
            resident[block] = next_use
            heapq.heappush(farthest, (-next_use, -depth, block))
        while len(resident) > capacity:
            next_use, _, victim = heapq.heappop(farthest)
            if resident.get(victim) == -next_use:
                del resident[victim]
    return hit_tokens


def _next_uses(trace: Trace) -> list[list[int]]:
    """Return for every block of every request the number of the next request that uses it."""
    never = len(trace.requests)
    upcoming: dict[int, int] = {}
    found: list[list[int]] = []
    for number in range(len(trace.requests) - 1, -1, -1):
        blocks = trace.requests[number].blocks
        found.append([upcoming.get(block, never) for block in blocks])
        upcoming.update(dict.fromkeys(blocks, number))
    found.reverse()
    return found
