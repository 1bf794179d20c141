"""One cache, one policy, one trace: how many prompt tokens would have been found.

A request hits the longest run of resident blocks from its first, counted before it changes anything. Then it uses all
of its blocks, the last first: a resident block is touched, another one is inserted, after one block was evicted if the
cache is full. The partial block at the end of a prompt is a block like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tierkv.policy import EvictionPolicy
from tierkv.replay.trace import Trace

__all__ = ["ideal_hit_tokens", "replay"]

Ends = Sequence[Sequence[int]]


def replay(
    trace: Trace,
    policy: EvictionPolicy[int],
    capacity: int,
    *,
    ends: Ends | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Return the hit tokens of a cache of `capacity` blocks (at least 1).

    Parameters
    ----------
    policy
        A fresh policy of the same capacity; afterwards it holds the last state.
    ends
        For each request the blocks to retire after it, as `session_ends` finds them.
    progress
        Called now and then with the number of requests done.
    """
    resident: set[int] = set()
    insert, touch, evict, victims, retire = policy.insert, policy.touch, policy.evict, policy.victims, policy.retire
    hit_tokens = 0
    for number, request in enumerate(trace.requests):
        if progress is not None and not number % 256:
            progress(number)
        blocks = request.blocks
        hit_tokens += trace.hit_tokens(request, resident)
        for block in reversed(blocks):
            if block in resident:
                touch(block)
                continue
            if len(resident) == capacity:
                victim = next(victims())
                evict(victim)
                resident.remove(victim)
            insert(block, 1)
            resident.add(block)
        if ends is not None:
            for block in ends[number]:
                retire(block)
    return hit_tokens


def ideal_hit_tokens(trace: Trace) -> int:
    """Return the hit tokens of a cache that never evicts."""
    seen: set[int] = set()
    hit_tokens = 0
    for request in trace.requests:
        hit_tokens += trace.hit_tokens(request, seen)
        seen.update(request.blocks)
    return hit_tokens
