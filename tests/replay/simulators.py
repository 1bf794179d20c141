"""Slow, obvious simulators, and traces to feed them. A cache is a list, the next victim first."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from tierkv.policy import EvictionPolicy, make_policy
from tierkv.replay.trace import Request, Trace

BLOCK = 4  # tokens


def tokens_of(request: Request, depth: int) -> int:
    last = depth == len(request.blocks) - 1
    return request.tokens - BLOCK * (len(request.blocks) - 1) if last else BLOCK


def hit_tokens(request: Request, held: Sequence[int] | set[int]) -> int:
    hits = 0
    for depth, block in enumerate(request.blocks):
        if block not in held:
            break
        hits += tokens_of(request, depth)
    return hits


def slow_lru(trace: Trace, capacity: int, ends: Sequence[Sequence[int]] | None = None) -> int:
    cache: list[int] = []
    hits = 0
    for number, request in enumerate(trace.requests):
        hits += hit_tokens(request, cache)
        for block in request.blocks[::-1]:
            if block in cache:
                cache.remove(block)
            elif len(cache) == capacity:
                cache.pop(0)
            cache.append(block)
        for block in ends[number] if ends is not None else ():
            if block in cache:
                cache.remove(block)
                cache.insert(0, block)
    return hits


def slow_ideal(trace: Trace) -> int:
    seen: set[int] = set()
    hits = 0
    for request in trace.requests:
        hits += hit_tokens(request, seen)
        seen |= set(request.blocks)
    return hits


def slow_belady(trace: Trace, capacity: int) -> int:
    cache: dict[int, int] = {}  # block -> depth
    hits = 0
    for number, request in enumerate(trace.requests):
        hits += hit_tokens(request, set(cache))
        cache.update({block: depth for depth, block in enumerate(request.blocks)})
        while len(cache) > capacity:
            cache.pop(max(cache, key=lambda block: (next_use(trace, block, number), cache[block])))
    return hits


def next_use(trace: Trace, block: int, now: int) -> float:
    for number in range(now + 1, len(trace.requests)):
        if block in trace.requests[number].blocks:
            return number
    return float("inf")


def slow_two_tiers(trace: Trace, warm: int, policy: str, cold: int, clean: float) -> tuple[int, int, int]:
    """A policy over LRU: hit tokens of the warm tier, hit tokens of the cold tier, blocks written to it."""
    upper: EvictionPolicy[int] = make_policy(policy, warm)
    lower: list[int] = []
    dirty: list[int] = []
    hits = [0, 0]
    writes = 0

    def write(block: int) -> None:
        nonlocal writes
        writes += 1
        lower.append(block)
        if len(lower) > cold:
            lost = lower.pop(0)
            if lost in upper:
                dirty.append(lost)

    for request in trace.requests:
        for depth, block in enumerate(request.blocks):
            if block not in upper and block not in lower:
                break
            hits[0 if block in upper else 1] += tokens_of(request, depth)
        for block in request.blocks[::-1]:
            if block in lower:
                lower.remove(block)
                lower.append(block)
            if block in upper:
                upper.touch(block)
                continue
            if len(upper) == warm:
                victim = next(upper.victims())
                upper.evict(victim)
                if victim in dirty:
                    dirty.remove(victim)
                    write(victim)
            upper.insert(block, 1)
            if block not in lower:
                dirty.append(block)
            while len(dirty) > (1 - clean) * warm:
                write(dirty.pop(0))
    return hits[0], hits[1], writes


def generated_trace(seed: int, sessions: int = 60, system_prompts: int = 3) -> Trace:
    """Conversations with shared system prompts that take turns; every prompt is the last one and something new."""
    choose = random.Random(seed)
    fresh = iter(range(10**9))
    prompts = [[next(fresh) for _ in range(choose.randint(1, 6))] for _ in range(system_prompts)]
    chains = {session: choose.choice(prompts).copy() for session in range(sessions)}
    requests = []
    waiting = list(range(10, sessions))
    talking = list(range(10))
    while talking:
        session = choose.choice(talking)
        chains[session] += [next(fresh) for _ in range(choose.randint(1, 4))]
        partial = choose.randint(1, BLOCK - 1)
        blocks = (*chains[session], next(fresh))
        requests.append(Request(len(requests), BLOCK * (len(blocks) - 1) + partial, blocks, session))
        if choose.random() < 0.3:
            talking.remove(session)
            if waiting:
                talking.append(waiting.pop(0))
    return Trace(tuple(requests), BLOCK)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Any requests whose chains are paths in a small tree: block b's parent is (b - 1) // 2."""
    requests = []
    for leaf, last in draw(st.lists(st.tuples(st.integers(0, 30), st.integers(1, BLOCK)), min_size=1, max_size=25)):
        path = [leaf]
        while path[0]:
            path.insert(0, (path[0] - 1) // 2)
        requests.append(Request(0, BLOCK * (len(path) - 1) + last, tuple(path)))
    return Trace(tuple(requests), BLOCK)
