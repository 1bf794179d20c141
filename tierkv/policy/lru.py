"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from tierkv.policy.base import EvictionPolicy, K

__all__ = ["LRU"]


class LRU(EvictionPolicy[K]):
    """Evicts the block whose last use is longest ago."""

    name = "lru"

    def __init__(self, capacity: int) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def insert(self, key: K, size: int) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def touch(self, key: K) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    refresh = touch

    def retire(self, key: K) -> None:
        if key in self._order:
            self._order.move_to_end(key, last=False)

    def remove(self, key: K) -> None:
        self._order.pop(key, None)

    evict = remove

    def resize(self, capacity: int) -> None:
        pass

    def victims(self) -> Iterator[K]:
        return iter(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)
