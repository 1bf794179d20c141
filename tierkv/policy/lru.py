"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from tierkv.policy.base import EvictionPolicy

__all__ = ["LRU"]


class LRU(EvictionPolicy):
    """Evicts the block whose last use is longest ago."""

    name = "lru"

    def __init__(self, capacity: int) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def insert(self, key: bytes, size: int) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def touch(self, key: bytes) -> None:
        if key in self._order:
            self._order.move_to_end(key)

    refresh = touch

    def remove(self, key: bytes) -> None:
        self._order.pop(key, None)

    evict = remove

    def victims(self) -> Iterator[bytes]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)
