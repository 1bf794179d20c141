"""Segmented LRU that finds its parameters by itself.

How much of a tier should be protected depends on the traffic and on the tier's size: most of it where it holds little
more than one long session, nothing where it holds nearly all that will be used again. So a sample of the blocks, one
in sixteen, is also kept in miniature caches (of keys, with a sixteenth of the capacity), one for each of some settings;
now and then the policy takes over the setting that had most hits lately.

Waldspurger, Saemundsson, Ahmad, Park: "Cache modeling and optimization using miniature simulations", USENIX ATC 2017.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Generic

from tierkv.policy.base import K
from tierkv.policy.slru import SLRU

__all__ = ["AdaptiveSLRU"]

# Protected share and ghost factor; the first one is LRU. A miniature's work is the price of each.
_SETTINGS = ((0.0, 2.0), (0.3, 2.0), (0.6, 2.0), (0.9, 2.0), (0.9, 4.0))
_FIRST = 1
_ONE_IN = 16  # blocks are sampled
_REVIEWS = 4  # for each capacity of sampled uses
_MEMORY = 0.97  # what a hit counts after as many uses as the capacity holds blocks
_MARGIN = 1.02  # by what factor another setting has to be better
_EVIDENCE = 8  # and by how many hits of sampled blocks: in a small tier a few are an accident
# A block is sampled if its scattered hash is small; the factor is odd and near 2**32 / golden ratio, so that numbers in
# a row are not sampled in a row.
_SCATTER, _MASK = 0x9E3779B1, 0xFFFFFFFF
_SAMPLED = (_MASK + 1) // _ONE_IN


class AdaptiveSLRU(SLRU[K]):
    """SLRU with the protected share and the ghost list that would have had most hits lately."""

    name = "aslru"
    parameters: ClassVar[Mapping[str, tuple[float, float]]] = {}

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._best = _FIRST
        self._miniatures: list[_Miniature[K]] = [
            _Miniature(capacity // _ONE_IN, protected, ghost) for protected, ghost in _SETTINGS
        ]
        self._used = 0  # units of sampled uses since the last review
        super().__init__(capacity, *_SETTINGS[_FIRST])

    def resize(self, capacity: int) -> None:
        self._capacity = capacity
        for miniature in self._miniatures:
            miniature.resize(capacity // _ONE_IN)
        super().resize(capacity)

    def insert(self, key: K, size: int) -> None:
        if hash(key) * _SCATTER & _MASK < _SAMPLED and key not in self:
            self._sample(key, size)
        super().insert(key, size)

    def touch(self, key: K) -> None:
        if hash(key) * _SCATTER & _MASK < _SAMPLED:
            size = self._protected.get(key) or self._probation.get(key)
            if size:
                self._sample(key, size)
        super().touch(key)

    def retire(self, key: K) -> None:
        if hash(key) * _SCATTER & _MASK < _SAMPLED:
            for miniature in self._miniatures:
                miniature.policy.retire(key)
        super().retire(key)

    def remove(self, key: K) -> None:
        if hash(key) * _SCATTER & _MASK < _SAMPLED:
            for miniature in self._miniatures:
                miniature.remove(key)
        super().remove(key)

    def _sample(self, key: K, size: int) -> None:
        for miniature in self._miniatures:
            miniature.use(key, size)
        self._used += size
        if self._used * _REVIEWS * _ONE_IN >= self._capacity:
            self._used = 0
            self._review(size)

    def _review(self, size: int) -> None:
        hits = [miniature.hits for miniature in self._miniatures]
        most = max(hits)
        if most > max(_MARGIN * hits[self._best], hits[self._best] + _EVIDENCE * size):
            self._best = hits.index(most)
            self._protected_share, self._ghost_factor = _SETTINGS[self._best]
            super().resize(self._capacity)
        for miniature in self._miniatures:
            miniature.hits *= _MEMORY ** (1 / _REVIEWS)


class _Miniature(Generic[K]):
    """What one setting would hold of the sampled blocks.

    Attributes
    ----------
    hits
        Units used that were there, older ones counting less.
    """

    __slots__ = ("_capacity", "_held", "_sizes", "hits", "policy")

    def __init__(self, capacity: int, protected: float, ghost: float) -> None:
        self.policy: SLRU[K] = SLRU(capacity, protected, ghost)
        self.hits = 0.0
        self._capacity = capacity
        self._sizes: dict[K, int] = {}
        self._held = 0

    def use(self, key: K, size: int) -> None:
        if key in self._sizes:
            self.hits += size
            self.policy.touch(key)
            return
        self._evict(self._capacity - size)
        self.policy.insert(key, size)
        self._sizes[key] = size
        self._held += size

    def remove(self, key: K) -> None:
        self._held -= self._sizes.pop(key, 0)
        self.policy.remove(key)

    def resize(self, capacity: int) -> None:
        self._capacity = capacity
        self.policy.resize(capacity)
        self._evict(capacity)

    def _evict(self, allowed: int) -> None:
        while self._held > allowed and self._sizes:
            victim = next(self.policy.victims())
            self.policy.evict(victim)
            self._held -= self._sizes.pop(victim)
