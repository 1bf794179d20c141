"""The tiers of a daemon on one trace: which tier would have had each block.

Memory tiers (hot, warm) are inclusive: a block that is used is, or is put, in each of them, and each evicts by its own
policy. Below them the cold tier is an LRU of blocks. It is written when a dirty block, one it does not hold, leaves the
warm tier, or earlier: `demote_ahead` is the share of the warm tier that is kept clean by writing its oldest dirty
blocks. Blocks stay there when they are promoted, and are renewed when a request uses them. Every block takes the room
of a full one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

from tierkv.errors import ConfigError
from tierkv.policy import EvictionPolicy, make_policy
from tierkv.replay.trace import Request, Trace

__all__ = ["MemoryPlan", "TierHits", "TierPlan", "Tiers", "replay_tiers"]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A memory tier: its capacity in blocks and its eviction policy."""

    name: str
    capacity: int
    policy: str
    parameters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TierPlan:
    """The tiers of a run.

    Attributes
    ----------
    memory
        Fastest first; the last one is the warm tier.
    cold
        Blocks the cold tier holds; 0 switches it off.
    demote_ahead
        Share of the warm tier that is kept clean.
    """

    memory: tuple[MemoryPlan, ...]
    cold: int
    demote_ahead: float

    def names(self) -> tuple[str, ...]:
        """Names of the tiers, fastest first."""
        return (*(plan.name for plan in self.memory), *(["cold"] if self.cold else []))

    def capacities(self) -> tuple[int, ...]:
        """Blocks the tiers hold, fastest first."""
        return (*(plan.capacity for plan in self.memory), *([self.cold] if self.cold else []))


@dataclass(frozen=True, slots=True)
class TierHits:
    """What the tiers had.

    Attributes
    ----------
    tokens
        For each request, the tokens each tier delivered, fastest first.
    cold_writes
        Blocks written to the cold tier.
    """

    tokens: tuple[tuple[int, ...], ...]
    cold_writes: int


def replay_tiers(
    trace: Trace,
    plan: TierPlan,
    *,
    ends: Sequence[Sequence[int]] | None = None,
    progress: Callable[[int], None] | None = None,
) -> TierHits:
    """Replay a trace; `ends` and `progress` are those of `replay`. Ends concern the memory tiers only.

    Raises `ConfigError` for a tier without room for a block, and for a cold tier smaller than the warm one.
    """
    tiers = Tiers(plan)
    tokens: list[tuple[int, ...]] = []
    for number, request in enumerate(trace.requests):
        if progress is not None and not number % 256:
            progress(number)
        tokens.append(_delivered(trace, request, tiers.holders))
        for block in reversed(request.blocks):
            tiers.use(block)
        if ends is not None:
            for memory in tiers.memory:
                for block in ends[number]:
                    memory.policy.retire(block)
    return TierHits(tuple(tokens), tiers.cold_writes)


def _delivered(trace: Trace, request: Request, holders: Sequence[Container[int]]) -> tuple[int, ...]:
    """Tokens from each tier of the longest run of blocks that some tier has."""
    tokens = [0] * len(holders)
    for depth, block in enumerate(request.blocks):
        for level, holder in enumerate(holders):
            if block in holder:
                tokens[level] += trace.tokens(request, depth + 1) - trace.tokens(request, depth)
                break
        else:
            break
    return tuple(tokens)


class _Memory:
    """One memory tier."""

    def __init__(self, plan: MemoryPlan) -> None:
        self.policy: EvictionPolicy[int] = make_policy(plan.policy, plan.capacity, **plan.parameters)
        self.resident: set[int] = set()
        self._capacity = plan.capacity

    def make_room(self) -> int | None:
        """Evict a block if the tier is full, and return it."""
        if len(self.resident) < self._capacity:
            return None
        victim = next(self.policy.victims())
        self.policy.evict(victim)
        self.resident.remove(victim)
        return victim

    def insert(self, block: int) -> None:
        self.policy.insert(block, 1)
        self.resident.add(block)


class Tiers:
    """What lies where.

    Parameters
    ----------
    plan
        Raises `ConfigError` for one that cannot be.
    left, written
        Called with every block that leaves memory, and with every one that is written to the cold tier.

    Attributes
    ----------
    holders
        Blocks of each tier, the fastest first.
    """

    def __init__(
        self, plan: TierPlan, left: Callable[[int], None] | None = None, written: Callable[[int], None] | None = None
    ) -> None:
        for name, capacity in zip(plan.names(), plan.capacities(), strict=True):
            if capacity < 1:
                raise ConfigError(f"the {name} tier has no room for a block", remedy="raise its capacity")
        if 0 < plan.cold < plan.memory[-1].capacity:
            raise ConfigError(
                "the cold tier is smaller than the warm tier", remedy="raise cold.capacity, or set it to 0"
            )
        self.memory = [_Memory(memory) for memory in plan.memory]
        self.cold_writes = 0
        self._left, self._written = left, written
        self._above = self.memory[:-1]
        self._warm = self.memory[-1]
        self._cold: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._cold_capacity = plan.cold
        self._dirty: OrderedDict[int, None] = OrderedDict()  # in the warm tier only, oldest first
        self._most_dirty = (1.0 - plan.demote_ahead) * plan.memory[-1].capacity
        self.holders: list[Container[int]] = [memory.resident for memory in self.memory]
        if plan.cold:
            self.holders.append(self._cold)

    def use(self, block: int) -> None:
        """Take note that a request used a block: it is, or is put, in every memory tier."""
        for memory in self._above:
            if block in memory.resident:
                memory.policy.touch(block)
            else:
                memory.make_room()
                memory.insert(block)
        if block in self._cold:
            self._cold.move_to_end(block)
        if block in self._warm.resident:
            self._warm.policy.touch(block)
            return
        victim = self._warm.make_room()
        if victim is not None:
            if self._left is not None:
                self._left(victim)
            if victim in self._dirty:
                del self._dirty[victim]
                self._write(victim)
        self._warm.insert(block)
        if self._cold_capacity and block not in self._cold:
            self._dirty[block] = None
            self._write_ahead()

    def _write_ahead(self) -> None:
        while len(self._dirty) > self._most_dirty:
            block, _ = self._dirty.popitem(last=False)
            self._write(block)

    def _write(self, block: int) -> None:
        self.cold_writes += 1
        if self._written is not None:
            self._written(block)
        self._cold[block] = None
        if len(self._cold) > self._cold_capacity:
            lost, _ = self._cold.popitem(last=False)
            if lost in self._warm.resident:
                self._dirty[lost] = None
