"""Caches of sampled keys instead of blocks, for asking what other capacities would have found.

A key that stands for a span of `w` blocks takes the room of `w`, so a miniature has the capacity of the cache it stands
for and evicts by the same policy. The rules are those of the replays: a request finds the longest run of resident
blocks from its first, then uses all of its blocks from the last to the first.

Waldspurger, Saemundsson, Ahmad, Park: "Cache modeling and optimization using miniature simulations", USENIX ATC 2017.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeAlias

from tierkv.policy.base import EvictionPolicy, K

__all__ = ["MiniatureCache", "MiniatureDisk", "Sample", "use_both"]

Sample: TypeAlias = Sequence[tuple[K, int]]
"""Of one request: key and width in blocks of each sampled block, the first one first."""


class MiniatureCache(Generic[K]):
    """A memory tier in miniature. Not safe for use by several threads.

    Parameters
    ----------
    capacity
        Blocks, at least 1, each counted with the width of its span.
    policy
        A fresh policy for that capacity.
    """

    __slots__ = ("_held", "_policy", "_widths", "capacity")

    def __init__(self, capacity: int, policy: EvictionPolicy[K]) -> None:
        self.capacity = capacity
        self._policy = policy
        self._widths: dict[K, int] = {}
        self._held = 0

    def __len__(self) -> int:
        return len(self._widths)

    def __contains__(self, key: K) -> bool:
        return key in self._widths

    def run(self, sample: Sample[K]) -> int:
        """Return how many of the sampled blocks, from the first, are all there."""
        widths = self._widths
        count = 0
        for key, _ in sample:
            if key not in widths:
                break
            count += 1
        return count

    def use(self, key: K, width: int) -> Sequence[K] | None:
        """Use a block: None if it was there, otherwise it is now, and the keys that had to go are returned."""
        widths, policy = self._widths, self._policy
        if key in widths:
            policy.touch(key)
            return None
        held = self._held + width
        gone: list[K] = []
        while held > self.capacity and widths:
            victim = next(policy.victims())
            policy.evict(victim)
            held -= widths.pop(victim)
            gone.append(victim)
        policy.insert(key, width)
        widths[key] = width
        self._held = held
        return gone


class MiniatureDisk(Generic[K]):
    """The cold tier below a memory tier in miniature: least recently used, written when blocks leave memory.

    Parameters
    ----------
    capacity
        Blocks, at least as many as memory holds.
    above
        The memory tier.
    demote_ahead
        Share of the memory tier that is kept clean by writing its oldest dirty blocks early.
    """

    __slots__ = ("_above", "_capacity", "_dirty", "_dirty_held", "_held", "_most_dirty", "_widths")

    def __init__(self, capacity: int, above: MiniatureCache[K], demote_ahead: float) -> None:
        self._capacity = capacity
        self._above = above
        self._widths: OrderedDict[K, int] = OrderedDict()  # oldest first
        self._held = 0
        self._dirty: OrderedDict[K, int] = OrderedDict()  # in memory only, oldest first
        self._dirty_held = 0
        self._most_dirty = (1.0 - demote_ahead) * above.capacity

    def __len__(self) -> int:
        return len(self._widths)

    def run(self, sample: Sample[K]) -> int:
        """Return how many of the sampled blocks, from the first, are all in memory or here."""
        here, above = self._widths, self._above
        count = 0
        for key, _ in sample:
            if key not in here and key not in above:
                break
            count += 1
        return count

    def follow(self, key: K, width: int, gone: Sequence[K] | None) -> None:
        """Note that memory used a block; `gone` is what its `use` returned."""
        here = self._widths
        known = key in here
        if known:
            here.move_to_end(key)
        if gone is None:
            return
        dirty = self._dirty
        for victim in gone:
            its_width = dirty.pop(victim, 0)
            if its_width:
                self._dirty_held -= its_width
                self._write(victim, its_width)
        if not known:
            dirty[key] = width
            self._dirty_held += width
        while self._dirty_held > self._most_dirty:
            oldest, its_width = dirty.popitem(last=False)
            self._dirty_held -= its_width
            self._write(oldest, its_width)

    def _write(self, key: K, width: int) -> None:
        here = self._widths
        here[key] = width
        self._held += width
        while self._held > self._capacity:
            lost, its_width = here.popitem(last=False)
            self._held -= its_width
            if lost in self._above:
                self._dirty[lost] = its_width
                self._dirty_held += its_width


def use_both(memory: MiniatureCache[K], disks: Sequence[MiniatureDisk[K]], sample: Sample[K]) -> None:
    """Use the sampled blocks of a request in a memory tier and in each of some disks that it could have below it."""
    for key, width in reversed(sample):
        gone = memory.use(key, width)
        for disk in disks:
            disk.follow(key, width, gone)
