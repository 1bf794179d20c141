"""The contract of an eviction policy: in which order one memory tier gives up its blocks.

A policy orders keys; it owns no bytes and takes no locks (the cache calls it under its own). Sizes are in any one unit,
bytes in a tier, blocks in a replay. A request inserts and touches its blocks from the last to the first, so that a
chain loses its tail before its head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

__all__ = ["EvictionPolicy"]


class EvictionPolicy(ABC):
    """Eviction order of one tier of `capacity` units. Every operation is O(1)."""

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, capacity: int) -> None: ...

    @abstractmethod
    def insert(self, key: bytes, size: int) -> None:
        """Take in a block that has become resident; renew one that is known."""

    @abstractmethod
    def touch(self, key: bytes) -> None:
        """Note that a request used a resident block. Unknown keys are ignored."""

    @abstractmethod
    def refresh(self, key: bytes) -> None:
        """Renew a block's recency without counting it as another use. Unknown keys are ignored."""

    @abstractmethod
    def evict(self, key: bytes) -> None:
        """Forget a block that was evicted to make room; a policy may remember its ghost."""

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """Forget a block that left for another reason. Unknown keys are ignored."""

    @abstractmethod
    def victims(self) -> Iterator[bytes]:
        """Yield keys in eviction order. Any other call ends the iterator's validity."""

    @abstractmethod
    def __len__(self) -> int: ...
