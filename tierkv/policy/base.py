"""The contract of an eviction policy: in which order one memory tier gives up its blocks.

A policy orders keys; it owns no bytes and takes no locks (the cache calls it under its own). Sizes are in any one unit,
bytes in a tier, blocks in a replay. A request inserts and touches its blocks from the last to the first, so that a
chain loses its tail before its head.

The owner of the tier decides when somebody has to leave. It asks `victims` who should, takes the first that may, and
says so with `evict`; what it cannot evict (a pinned block) it skips.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from typing import ClassVar, Generic, TypeVar

__all__ = ["EvictionPolicy"]

K = TypeVar("K", bound=Hashable)


class EvictionPolicy(ABC, Generic[K]):
    """Eviction order of one tier of `capacity` units, its keys anything hashable.

    Every operation is O(1), amortised; `resize` is O(n). A policy may remember the keys of evicted blocks (ghosts), and
    knows them again by equality: a key of a block that comes back has to equal the one it left under. Ghosts keep
    their keys alive, at most those of a few capacities of evictions.

    Attributes
    ----------
    name
        What the policy is called in a configuration.
    parameters
        Keyword arguments of the constructor besides `capacity`: the smallest and the largest value of each.
    """

    name: ClassVar[str]
    parameters: ClassVar[Mapping[str, tuple[float, float]]] = {}

    @abstractmethod
    def __init__(self, capacity: int) -> None: ...

    @abstractmethod
    def insert(self, key: K, size: int) -> None:
        """Take in a block that has become resident; renew one that is known."""

    @abstractmethod
    def touch(self, key: K) -> None:
        """Note that a request used a resident block. Unknown keys are ignored."""

    @abstractmethod
    def refresh(self, key: K) -> None:
        """Renew a block's recency without counting it as another use. Unknown keys are ignored."""

    @abstractmethod
    def retire(self, key: K) -> None:
        """Note that nobody will ask for a block again. Unknown keys are ignored.

        It becomes the next victim, before everything else and before those retired earlier (so retire a chain from its
        head to its tail), until it is touched, refreshed or inserted anew.
        """

    @abstractmethod
    def evict(self, key: K) -> None:
        """Forget a block that was evicted to make room; a policy may remember its ghost. Unknown keys are ignored."""

    @abstractmethod
    def remove(self, key: K) -> None:
        """Forget a block that left for another reason. Unknown keys are ignored."""

    @abstractmethod
    def resize(self, capacity: int) -> None:
        """Adapt to another size of the tier. The order of the blocks stays; nothing is evicted here."""

    @abstractmethod
    def victims(self) -> Iterator[K]:
        """Yield every key, the next victim first. Any other call ends the iterator's validity.

        Looking for a victim may use up second chances; asked again, the policy names the same victim first.
        """

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...
