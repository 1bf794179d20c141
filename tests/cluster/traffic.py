"""Requests to two nodes while something happens to them: who was served what, how fast, and whether it was right."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Literal, Self

import numpy as np

from tests.cache.support import BLOCK_TOKENS, make_spec, payload, write
from tests.cluster.node import PROBE_S, Node
from tests.servers.process import wait_until
from tierkv.cache import Cache, Chain
from tierkv.errors import TierKVError
from tierkv.spec import KVSpec

__all__ = ["BLOCKS", "BOUND_S", "PREFILL_TOKENS_PER_S", "RECOMPUTE_S", "Served", "Summary", "Traffic", "summary"]

BLOCKS = 8
PREFILL_TOKENS_PER_S = 200.0
RECOMPUTE_S = BLOCKS * BLOCK_TOKENS / PREFILL_TOKENS_PER_S
BOUND_S = 1.1 * RECOMPUTE_S + PROBE_S
"""What an acquire with a known prefill rate takes at most, but for what the machine itself takes."""

_WAIT_S = 30.0  # so that whoever waits for something that never comes is seen to
_BEHIND = 4  # cycles of the other node: what it stored is in the shared tier by then
_PACE_S = 0.03

Kind = Literal["new", "other", "own"]


@dataclass(frozen=True, slots=True)
class Served:
    """One request.

    Attributes
    ----------
    kind
        A prompt that nobody has seen (``new``), one that the other node has stored (``other``), or this one (``own``).
    asked
        When, in monotonic seconds.
    acquire_s
        How long the acquire took.
    hit_blocks, wrong_blocks
        Of `BLOCKS`; and those among them with other bytes than were stored.
    failure
        The error of the request, empty for none.
    """

    node: str
    kind: Kind
    asked: float
    acquire_s: float
    hit_blocks: int
    wrong_blocks: int
    failure: str


@dataclass(frozen=True, slots=True)
class Summary:
    """Some requests together. Rates are parts of the blocks that were asked for; times are of acquires, in seconds."""

    requests: int
    wrong_blocks: int
    failed: int
    other_hit_rate: float
    own_hit_rate: float
    median_s: float
    worst_s: float


def summary(served: Iterable[Served]) -> Summary:
    """Sum requests up. Rates of what was not asked for are 0."""
    served = list(served)

    def rate(kind: Kind) -> float:
        hits = [one.hit_blocks for one in served if one.kind == kind]
        return sum(hits) / (BLOCKS * len(hits)) if hits else 0.0

    times = [one.acquire_s for one in served] or [0.0]
    return Summary(
        len(served),
        sum(one.wrong_blocks for one in served),
        sum(bool(one.failure) for one in served),
        rate("other"),
        rate("own"),
        median(times),
        max(times),
    )


class Traffic:
    """Requests to every node, one at a time on each, from when the context is entered until it is left.

    Each node takes turns: a new prompt, which it computes and stores; one that the other has stored a little before;
    and one of its own from a little before. What is missing of any of them is stored.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._spec = make_spec()
        self._stored = [0] * len(nodes)
        self._served: list[Served] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(at,)) for at in range(len(nodes))]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def since(self, moment: float, until: float = float("inf")) -> list[Served]:
        """Return the requests that were asked between two moments, in monotonic seconds."""
        return [one for one in list(self._served) if moment <= one.asked < until]

    def for_seconds(self, seconds: float) -> None:
        """Let requests come for a while."""
        self._stop.wait(seconds)

    def until_shared(self, requests: int = 6) -> float:
        """Wait until each node has had so many hits of the other's blocks in a row; return when that began."""
        called = time.monotonic()
        row: list[Served] = []

        def shared() -> bool:
            others = [one for one in self.since(called) if one.kind == "other"]
            row[:] = [one for node in self._nodes for one in [o for o in others if o.node == node.name][-requests:]]
            return len(row) == requests * len(self._nodes) and all(one.hit_blocks == BLOCKS for one in row)

        wait_until(shared, "sharing")
        return min(one.asked for one in row)

    def _work(self, me: int) -> None:
        other = (me + 1) % len(self._nodes)
        with self._nodes[me].connect(self._spec) as cache:
            while not self._stop.is_set():
                number = self._stored[me]
                self._ask(cache, me, "new", me, number)
                self._stored[me] = number + 1
                if self._stored[other] > _BEHIND:
                    self._ask(cache, me, "other", other, self._stored[other] - 1 - _BEHIND)
                if number > _BEHIND:
                    self._ask(cache, me, "own", me, number - _BEHIND)
                self._stop.wait(_PACE_S)

    def _ask(self, cache: Cache, me: int, kind: Kind, whose: int, number: int) -> None:
        first = (len(self._nodes) * number + whose) * BLOCKS * BLOCK_TOKENS
        chain = Chain.of(self._spec, np.arange(first, first + BLOCKS * BLOCK_TOKENS))
        asked, took, hit, wrong, failure = time.monotonic(), 0.0, 0, 0, ""
        try:
            with cache.acquire(chain, wait_s=_WAIT_S, prefill_tokens_per_s=PREFILL_TOKENS_PER_S) as read:
                took = time.monotonic() - asked
                hit = read.hit_blocks
                wrong = sum(bytes(read.view(ref.index)) != payload(self._spec, chain, ref.index) for ref in read.blocks)
            if hit < BLOCKS:
                _store(cache, self._spec, chain, hit)
        except TierKVError as error:
            failure = f"{type(error).__name__}: {error}"
        self._served.append(Served(self._nodes[me].name, kind, asked, took, hit, wrong, failure))


def _store(cache: Cache, spec: KVSpec, chain: Chain, start: int) -> None:
    with cache.reserve(chain, start=start) as lease:
        write(lease, spec, chain)
        lease.commit()
