"""What other capacities would have given: the estimator, set up for the tiers of a running cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

from tierkv.config import Config, PolicyConfig
from tierkv.core.observing import SeenRequest
from tierkv.core.placement import Placement
from tierkv.core.state import NamespaceInfo
from tierkv.insight.spans import WIDEST, SpanSampler
from tierkv.insight.whatif import FACTORS, DiskQuestion, Estimate, MemoryQuestion, WhatIf, spans_for
from tierkv.policy import EvictionPolicy, make_policy
from tierkv.storage.tier import SlotTier

__all__ = ["Room", "RoomEstimates"]

_LOOK_EVERY = 1024  # requests, at how many blocks fit on disk, and at how much is remembered
_CHANGED = 0.1  # of the cold tier's capacity in blocks: then estimates begin anew
_MOST_ENTRIES = 1 << 18  # keys that are remembered, some 64 MiB with what belongs to them


@dataclass(frozen=True, slots=True)
class RoomEstimates:
    """What is estimated.

    Attributes
    ----------
    since
        When the traffic began that it stands on, in seconds since the epoch.
    block_bytes
        Bytes of a block (of all KV groups) that capacities are counted in.
    mixed
        Blocks of other sizes were among it, and counted as if they were of that size.
    """

    since: float
    block_bytes: int
    mixed: bool
    rates: tuple[Estimate, ...]


class Room:
    """Feeds requests to the estimator. Not safe for use by several threads.

    Its capacities are counted in blocks of the first namespace it sees. The estimator is made with the first request,
    and anew when the cold tier turns out to hold another number of blocks than was thought: how well they compress, and
    what it needs beside them, shows in time.
    """

    def __init__(self, config: Config, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._what_if: WhatIf | None = None
        self._unit: NamespaceInfo | None = None
        self._cold_blocks = 0
        self._cold_full = False
        self._most_in_cold = 0
        self._narrowest = 1
        self._requests = 0
        self._since = 0.0
        self._mixed = False

    def request(self, seen: SeenRequest) -> None:
        """Feed a request."""
        if self._unit is None:
            self._unit = seen.namespace
            self._begin(seen.at)
        elif not self._requests % _LOOK_EVERY:
            cold = self._cold_capacity()
            if self.entries() > _MOST_ENTRIES and self._narrowest < WIDEST:
                self._narrowest *= 2
                self._begin(seen.at)
            elif abs(cold - self._cold_blocks) > _CHANGED * self._cold_blocks:
                self._begin(seen.at)
        self._requests += 1
        self._mixed |= sum(seen.namespace.sizes) != sum(self._unit.sizes)
        if self._what_if is not None:
            self._what_if.request(_Keys(seen))

    def left_cold(self) -> None:
        """Note that the cold tier gave blocks up: it holds as many as fit."""
        self._cold_full = True

    def estimates(self) -> RoomEstimates | None:
        """Return what is estimated so far; None before the first request, and for tiers that hold no block."""
        if self._what_if is None or self._unit is None:
            return None
        return RoomEstimates(self._since, sum(self._unit.sizes), self._mixed, self._what_if.hit_rates())

    def entries(self) -> int:
        """Return how many keys are remembered: what its memory is proportional to."""
        return self._what_if.entries() if self._what_if is not None else 0

    def _begin(self, at: float) -> None:
        self._since, self._mixed = at, False
        self._cold_blocks = self._cold_capacity()
        memory = [
            MemoryQuestion(level.tier.name, self._blocks(level.tier), self._policy(level.tier.name))
            for level in self._placement.memory
        ]
        if any(question.capacity < 1 for question in memory):
            self._what_if = None
            return
        cold = self._placement.cold
        disk = None
        if cold is not None and self._cold_blocks:
            disk = DiskQuestion(cold.name, self._cold_blocks, self._config.warm.demote_ahead)
        self._what_if = WhatIf(memory, disk, sampler=self._sampler(min(question.capacity for question in memory)))

    def _sampler(self, capacity: int) -> SpanSampler:
        """Choose spans for the smallest of the tiers, half of which is asked about, too."""
        return spans_for(max(1, round(min(FACTORS) * capacity)), narrowest=self._narrowest)

    def _policy(self, tier: str) -> Callable[[int], EvictionPolicy[bytes]]:
        chosen: PolicyConfig = self._config.hot.policy if tier == "hot" else self._config.warm.policy
        return lambda capacity: make_policy(chosen.name, capacity, **chosen.parameters)

    def _blocks(self, tier: SlotTier) -> int:
        """How many blocks of all KV groups a memory tier holds."""
        assert self._unit is not None
        return int(1 / sum(1 / max(tier.slots_for(size), 1e-9) for size in self._unit.sizes) + 1e-9)

    def _cold_capacity(self) -> int:
        """How many blocks the cold tier holds: once it is full, as many as it has held, before by how they compress."""
        cold = self._placement.cold
        if cold is None or self._unit is None:
            return 0
        usage = cold.describe()
        stored, payload = usage.get("stored_bytes", 0), usage["payload_bytes"]
        self._most_in_cold = max(self._most_in_cold, payload)
        ratio = payload / stored if stored else 1.0
        held = self._most_in_cold if self._cold_full else int(usage["capacity_bytes"] * ratio)
        return held // sum(self._unit.sizes)


class _Keys(Sequence[bytes]):
    """The storage keys of a request, derived when they are looked at: the estimator looks at few."""

    def __init__(self, seen: SeenRequest) -> None:
        self._seen = seen
        self._known: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._seen.hashes)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        key = self._known.get(index)
        if key is None:
            key = self._known[index] = self._seen.key(index)
        return key
