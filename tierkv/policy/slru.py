"""Segmented LRU with a ghost list.

Blocks used once wait in probation, blocks used again in a protected part of limited size; eviction takes probation
first, so that a scan of new prompts cannot push out shared prefixes. A block that comes back soon after it was evicted
(its ghost is younger than `ghost` capacities of evictions) goes straight to the protected part.

Karedla, Love, Wherry: "Caching strategies to improve disk system performance", IEEE Computer 27(3), 1994.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import ClassVar

from tierkv.policy.base import EvictionPolicy, K

__all__ = ["SLRU"]


class SLRU(EvictionPolicy[K]):
    """Segmented LRU.

    Parameters
    ----------
    capacity
        Size of the tier.
    protected
        Part of the capacity that is protected.
    ghost
        How many capacities of evictions a ghost is remembered for.
    """

    name = "slru"
    parameters: ClassVar[Mapping[str, tuple[float, float]]] = {"protected": (0.0, 1.0), "ghost": (0.0, 16.0)}

    def __init__(self, capacity: int, protected: float = 0.3, ghost: float = 2.0) -> None:
        self._protected_share = protected
        self._ghost_factor = ghost
        self._probation: OrderedDict[K, int] = OrderedDict()
        self._protected: OrderedDict[K, int] = OrderedDict()
        self._protected_size = 0
        # key -> value of `_evicted` when it left; insertion order is age
        self._ghosts: OrderedDict[K, int] = OrderedDict()
        self._evicted = 0
        self.resize(capacity)

    def resize(self, capacity: int) -> None:
        self._protected_limit = int(self._protected_share * capacity)
        self._ghost_limit = int(self._ghost_factor * capacity)
        self._limit_protected()

    def insert(self, key: K, size: int) -> None:
        if key in self._protected or key in self._probation:
            self.refresh(key)
            return
        born = self._ghosts.pop(key, None)
        if born is not None and self._evicted - born <= self._ghost_limit:
            self._protect(key, size)
        else:
            self._probation[key] = size

    def touch(self, key: K) -> None:
        if key in self._protected:
            self._protected.move_to_end(key)
        elif key in self._probation:
            self._protect(key, self._probation.pop(key))

    def refresh(self, key: K) -> None:
        if key in self._protected:
            self._protected.move_to_end(key)
        elif key in self._probation:
            self._probation.move_to_end(key)

    def retire(self, key: K) -> None:
        size = self._protected.pop(key, None)
        if size is not None:
            self._protected_size -= size
            self._probation[key] = size
        if key in self._probation:
            self._probation.move_to_end(key, last=False)

    def evict(self, key: K) -> None:
        size = self._probation.pop(key, None)
        if size is None:
            self._protected_size -= self._protected.pop(key, 0)
            return
        self._ghosts[key] = self._evicted
        self._evicted += size
        while self._ghosts and self._evicted - next(iter(self._ghosts.values())) > self._ghost_limit:
            self._ghosts.popitem(last=False)

    def remove(self, key: K) -> None:
        if self._probation.pop(key, None) is None:
            self._protected_size -= self._protected.pop(key, 0)

    def victims(self) -> Iterator[K]:
        yield from self._probation
        yield from self._protected

    def __contains__(self, key: object) -> bool:
        return key in self._probation or key in self._protected

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def _protect(self, key: K, size: int) -> None:
        self._protected[key] = size
        self._protected_size += size
        self._limit_protected()

    def _limit_protected(self) -> None:
        while self._protected_size > self._protected_limit:
            oldest, its_size = self._protected.popitem(last=False)
            self._protected_size -= its_size
            self._probation[oldest] = its_size
