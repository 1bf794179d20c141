"""S3-FIFO: three queues, in which a hit only counts.

New blocks wait in a small queue; who is used there moves on to the main queue, the others leave and are remembered as
ghosts. A block that comes back while its ghost is known goes straight to the main queue. There the oldest gets another
round for each use, up to three.

Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache eviction", SOSP 2023. Retired blocks leave no
ghosts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from tierkv.policy.base import EvictionPolicy, K
from tierkv.policy.sized import SizedQueue

__all__ = ["S3FIFO"]

_MOST_USES = 3


class S3FIFO(EvictionPolicy[K]):
    """FIFO queues with second chances.

    Parameters
    ----------
    capacity
        Size of the tier.
    small
        Part of the capacity for blocks that were not used again yet.
    ghost
        How many capacities of evicted blocks are remembered.
    """

    name = "s3fifo"
    parameters: ClassVar[Mapping[str, tuple[float, float]]] = {"small": (0.0, 1.0), "ghost": (0.0, 16.0)}

    def __init__(self, capacity: int, small: float = 0.1, ghost: float = 1.0) -> None:
        self._small_share = small
        self._ghost_factor = ghost
        self._small: SizedQueue[K] = SizedQueue()
        self._main: SizedQueue[K] = SizedQueue()
        self._ghosts: SizedQueue[K] = SizedQueue()
        self._retired: SizedQueue[K] = SizedQueue()
        self._uses: dict[K, int] = {}
        self.resize(capacity)

    def resize(self, capacity: int) -> None:
        self._small_limit = int(self._small_share * capacity)
        self._ghost_limit = int(self._ghost_factor * capacity)
        self._limit_ghosts()

    def insert(self, key: K, size: int) -> None:
        if key in self._uses:
            self.refresh(key)
            return
        self._uses[key] = 0
        (self._small if self._ghosts.pop(key) is None else self._main).push(key, size)

    def touch(self, key: K) -> None:
        uses = self._uses.get(key)
        if uses is None:
            return
        if uses < _MOST_USES:
            self._uses[key] = uses + 1
        self.refresh(key)

    def refresh(self, key: K) -> None:
        if (size := self._retired.pop(key)) is not None:
            self._small.push(key, size)

    def retire(self, key: K) -> None:
        for queue in (self._small, self._main, self._retired):
            if (size := queue.pop(key)) is not None:
                self._retired.push(key, size)
                self._uses[key] = 0
                return

    def evict(self, key: K) -> None:
        self._uses.pop(key, None)
        if (size := self._small.pop(key)) is not None:
            self._ghosts.push(key, size)
            self._limit_ghosts()
        elif self._main.pop(key) is None:
            self._retired.pop(key)

    def remove(self, key: K) -> None:
        self._uses.pop(key, None)
        for queue in (self._small, self._main, self._retired):
            queue.pop(key)

    def victims(self) -> Iterator[K]:
        yield from reversed(self._retired)
        self._give_chances()
        queues = (self._small, self._main) if self._takes_small() else (self._main, self._small)
        for queue in queues:
            for uses in range(_MOST_USES + 1):
                yield from (key for key in queue if self._uses[key] == uses)

    def __contains__(self, key: object) -> bool:
        return key in self._uses

    def __len__(self) -> int:
        return len(self._uses)

    def _takes_small(self) -> bool:
        return bool(self._small) and (self._small.size > self._small_limit or not self._main)

    def _give_chances(self) -> None:
        """Move used blocks on until the oldest of the queue that has to give one up was not used."""
        while self._small or self._main:
            queue = self._small if self._takes_small() else self._main
            uses = self._uses[queue.oldest()]
            if not uses:
                return
            key, size = queue.pop_oldest()
            self._uses[key] = 0 if queue is self._small else uses - 1
            self._main.push(key, size)

    def _limit_ghosts(self) -> None:
        while self._ghosts.size > self._ghost_limit:
            self._ghosts.pop_oldest()
