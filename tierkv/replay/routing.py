"""Which node gets a request.

A router of the last kind knows at every moment what each node holds, as one that follows the nodes' events nearly does.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Container, Sequence

from tierkv.replay.trace import Request

__all__ = ["AtRandom", "LongestPrefix", "RoundRobin", "Router"]

Holders = Sequence[Container[int]]

_HALF_LIFE_MS = 60_000.0
_LEAST = 0.1
"""Part of a prompt that its prefix must be to draw it: a beginning that all prompts share would draw them all."""


class Router(ABC):
    """Sends requests to nodes. It has a state: use a new one for each replay."""

    @abstractmethod
    def choose(self, request: Request, nodes: Sequence[Holders]) -> int:
        """Return the number of a node, from what the tiers of each hold."""

    def computed(self, node: int, tokens: int) -> None:
        """Hear how many tokens of the last request its node had to compute."""


class RoundRobin(Router):
    """One node after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: Request, nodes: Sequence[Holders]) -> int:
        node = self._next % len(nodes)
        self._next = node + 1
        return node


class AtRandom(Router):
    """Any node, by a seed."""

    def __init__(self, seed: int) -> None:
        self._choose = random.Random(seed)

    def choose(self, request: Request, nodes: Sequence[Holders]) -> int:
        return self._choose.randrange(len(nodes))


class LongestPrefix(Router):
    """The node that holds the longest prefix; of equals the least loaded, then the first.

    A prefix of less than a tenth of the prompt counts as none. A node's load is the tokens it had to compute, each
    counting half after every minute.

    Parameters
    ----------
    nodes
        How many there are.
    spread
        A node whose load is more than so many times the mean is passed over.
    """

    def __init__(self, nodes: int, spread: float = 2.0) -> None:
        self._spread = spread
        self._load = [0.0] * nodes
        self._now = 0.0

    def choose(self, request: Request, nodes: Sequence[Holders]) -> int:
        left = 0.5 ** ((request.timestamp - self._now) / _HALF_LIFE_MS)
        self._now = request.timestamp
        self._load = load = [left * tokens for tokens in self._load]
        most = max(self._spread * sum(load) / len(load), min(load))  # rounding may put the mean below them all
        least = _LEAST * len(request.blocks)

        def merit(node: int) -> tuple[int, float, int]:
            run = _run(request.blocks, nodes[node])
            return run if run >= least else 0, -load[node], -node

        return max((node for node in range(len(nodes)) if load[node] <= most), key=merit)

    def computed(self, node: int, tokens: int) -> None:
        self._load[node] += tokens


def _run(blocks: Sequence[int], holders: Holders) -> int:
    """Return how many of the first blocks some tier has."""
    run = 0
    for block in blocks:
        for holder in holders:
            if block in holder:
                break
        else:
            return run
        run += 1
    return run
