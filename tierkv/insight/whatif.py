"""What twice the memory would have given: hit rates of other capacities, estimated beside a running cache.

Each capacity in question is a miniature cache that runs the tier's own policy on the same small sample of the block
references (`tierkv.insight.spans`, `tierkv.insight.miniature`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierkv.errors import ConfigError
from tierkv.insight.miniature import MiniatureCache, MiniatureDisk, use_both
from tierkv.insight.spans import WIDEST, SpanSampler
from tierkv.policy import EvictionPolicy

__all__ = ["FACTORS", "DiskQuestion", "Estimate", "MemoryQuestion", "WhatIf", "spans_for"]

FACTORS = (0.5, 1.0, 2.0, 4.0)
"""Capacities asked about, as multiples of the real one."""

_WIDE = 32  # blocks of the widest span of a cache of ordinary size
_SPANS_HELD = 64  # of the widest spans, that the smallest cache has room for at least
_SPANS_OF_LARGE = 2048  # a cache with room for more of them gets wider spans


@dataclass(frozen=True, slots=True)
class MemoryQuestion:
    """A memory tier to ask about.

    Attributes
    ----------
    name
        What the estimates call it.
    capacity
        Blocks the real tier holds, at least 1.
    policy
        Builds its eviction policy for a capacity in blocks.
    """

    name: str
    capacity: int
    policy: Callable[[int], EvictionPolicy[bytes]]


@dataclass(frozen=True, slots=True)
class DiskQuestion:
    """The cold tier below the last memory tier.

    Attributes
    ----------
    name
        What the estimates call it.
    capacity
        Blocks the real tier holds, at least 1.
    demote_ahead
        Share of the memory tier above it that is kept clean, as `warm.demote_ahead` says.
    """

    name: str
    capacity: int
    demote_ahead: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one capacity of one tier would have found, the other tiers being what they are.

    Attributes
    ----------
    tier
        Name of the tier with another capacity.
    factor
        Multiple of the real capacity.
    capacity
        The same in blocks.
    hit_blocks, blocks
        Blocks found and asked for since the beginning, both estimated from the same sample. They only grow: the
        difference of two readings is the traffic between them. A memory tier's are those it would have found alone;
        the cold tier's are those found in it or in memory above it.
    """

    tier: str
    factor: float
    capacity: int
    hit_blocks: int
    blocks: int

    @property
    def hit_rate(self) -> float:
        """Blocks found as a share of those asked for; 0 before the first request."""
        return self.hit_blocks / self.blocks if self.blocks else 0.0


class WhatIf:
    """Estimates the hit rates that tiers would have had with other capacities.

    Feed it the chain of every request. Its memory is bounded by the capacities: a miniature holds at most one key for
    each block of its cache, where every prompt is one block, and usually a tenth of that; `entries` says how many, and
    a sampler with a wider first span needs fewer. `request` works a few microseconds for each capacity, never blocks,
    and is not safe for use by several threads.

    Parameters
    ----------
    memory
        Memory tiers, the fastest first. Each holds what is in those above it.
    disk
        The cold tier below the last of them, if there is one. With less room than the memory above it, it is taken to
        add nothing.
    factors
        Multiples of each tier's capacity.
    sampler
        How requests are sampled; by default spans that suit the capacities, as `spans_for` chooses them.

    Raises
    ------
    ConfigError
        No tier, a tier without room for a block, or a factor that is not positive.
    """

    def __init__(
        self,
        memory: Sequence[MemoryQuestion],
        disk: DiskQuestion | None = None,
        *,
        factors: Sequence[float] = FACTORS,
        sampler: SpanSampler | None = None,
    ) -> None:
        _check(memory, disk, factors)
        self._questions: list[tuple[str, float, int]] = []
        self._finders: list[MiniatureCache[bytes] | MiniatureDisk[bytes]] = []  # one for each question
        base = memory[-1]
        self._above = MiniatureCache(base.capacity, base.policy(base.capacity))
        for tier in memory:
            for factor in factors:
                capacity = self._ask(tier.name, factor, tier.capacity)
                same = tier is base and capacity == base.capacity
                self._finders.append(self._above if same else MiniatureCache(capacity, tier.policy(capacity)))
        if disk is not None:
            for factor in factors:
                capacity = self._ask(disk.name, factor, disk.capacity)
                useless = capacity < base.capacity
                self._finders.append(
                    self._above if useless else MiniatureDisk(capacity, self._above, disk.demote_ahead)
                )
        self._alone = [
            finder for finder in self._finders if isinstance(finder, MiniatureCache) and finder is not self._above
        ]
        self._disks = [finder for finder in self._finders if isinstance(finder, MiniatureDisk)]
        self._hits = [0] * len(self._questions)
        self._blocks = 0
        self._sampler = sampler or spans_for(min(capacity for _, _, capacity in self._questions))

    def _ask(self, name: str, factor: float, capacity: int) -> int:
        scaled = max(1, round(factor * capacity))
        self._questions.append((name, factor, scaled))
        return scaled

    def request(self, keys: Sequence[bytes]) -> None:
        """Note that a request asked for a chain.

        Parameters
        ----------
        keys
            Keys of all its full blocks from the first, evenly distributed bytes such as `tierkv.keys` makes; whether
            they were found does not matter. One call for each prompt, however often it was looked up.
        """
        sample = [(keys[depth], width) for depth, width in self._sampler.sample(keys)]
        stands_for = [0]
        for _, width in sample:
            stands_for.append(stands_for[-1] + width)
        self._blocks += stands_for[-1]
        hits = self._hits
        for number, finder in enumerate(self._finders):
            hits[number] += stands_for[finder.run(sample)]
        backwards = sample[::-1]
        for cache in self._alone:
            use = cache.use
            for key, width in backwards:
                use(key, width)
        use_both(self._above, self._disks, sample)

    def hit_rates(self) -> tuple[Estimate, ...]:
        """Return what each capacity would have found: tiers and factors in the order they were given."""
        return tuple(
            Estimate(name, factor, capacity, hits, self._blocks)
            for (name, factor, capacity), hits in zip(self._questions, self._hits, strict=True)
        )

    def entries(self) -> int:
        """Return the number of keys in all miniatures: what its memory is proportional to."""
        return len(self._above) + sum(map(len, self._alone)) + sum(map(len, self._disks))


def spans_for(smallest: int, *, narrowest: int = 1, byte: int = 0) -> SpanSampler:
    """Choose spans so that a miniature of the smallest capacity (in blocks) is accurate.

    It has room for at least 64 of the widest spans, so a cache of a few hundred blocks is hardly sampled at all. The
    first span is one block, unless `narrowest` says otherwise: where nearly all prompts begin with the same block, the
    choice within a wider one is a single one for all of them. `byte` is that of `SpanSampler`.
    """
    wanted = min(smallest // _SPANS_HELD, max(_WIDE, smallest // _SPANS_OF_LARGE), WIDEST)
    widest = narrowest
    while 2 * widest <= wanted:
        widest *= 2
    return SpanSampler(narrowest, widest, byte=byte)


def _check(memory: Sequence[MemoryQuestion], disk: DiskQuestion | None, factors: Sequence[float]) -> None:
    if not memory:
        raise ConfigError("no memory tier to ask about", remedy="name at least one")
    tiers: list[MemoryQuestion | DiskQuestion] = [*memory, *([disk] if disk is not None else [])]
    for tier in tiers:
        if tier.capacity < 1:
            raise ConfigError(f"the {tier.name} tier has no room for a block", remedy="raise its capacity")
    if not factors or min(factors) <= 0:
        raise ConfigError("capacities are asked about as positive multiples", remedy="use factors such as 2")
