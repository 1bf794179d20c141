"""ARC: adaptive replacement cache.

Two LRU lists, of blocks used once and of blocks used again, share the tier. A target for the first one's size says
which of them gives up a block, and ghosts of both move that target: a block that comes back soon after it was evicted
makes the list larger that it was evicted from.

Megiddo, Modha: "ARC: a self-tuning, low overhead replacement cache", FAST 2003. There a victim is chosen knowing which
block it makes room for, here before that is known, so the target moves one eviction later. Sizes are counted in units,
not in blocks. Retired blocks leave no ghosts.
"""

from __future__ import annotations

from collections.abc import Iterator

from tierkv.policy.base import EvictionPolicy, K
from tierkv.policy.sized import SizedQueue

__all__ = ["ARC"]


class ARC(EvictionPolicy[K]):
    """Balances recency against frequency by itself."""

    name = "arc"

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = 0.0  # size of `_once`
        self._once: SizedQueue[K] = SizedQueue()
        self._again: SizedQueue[K] = SizedQueue()
        self._once_ghosts: SizedQueue[K] = SizedQueue()
        self._again_ghosts: SizedQueue[K] = SizedQueue()
        self._retired: SizedQueue[K] = SizedQueue()

    def resize(self, capacity: int) -> None:
        self._capacity = capacity
        self._target = min(self._target, capacity)
        self._limit_ghosts()

    def insert(self, key: K, size: int) -> None:
        if key in self:
            self.refresh(key)
        elif key in self._once_ghosts:
            step = max(1.0, self._again_ghosts.size / self._once_ghosts.size)
            self._target = min(self._capacity, self._target + step * size)
            self._once_ghosts.pop(key)
            self._again.push(key, size)
        elif key in self._again_ghosts:
            step = max(1.0, self._once_ghosts.size / self._again_ghosts.size)
            self._target = max(0.0, self._target - step * size)
            self._again_ghosts.pop(key)
            self._again.push(key, size)
        else:
            self._once.push(key, size)
        self._limit_ghosts()

    def touch(self, key: K) -> None:
        if key in self._again:
            self._again.renew(key)
        elif (size := self._once.pop(key)) is not None or (size := self._retired.pop(key)) is not None:
            self._again.push(key, size)

    def refresh(self, key: K) -> None:
        if key in self._again:
            self._again.renew(key)
        elif key in self._once:
            self._once.renew(key)
        elif (size := self._retired.pop(key)) is not None:
            self._once.push(key, size)

    def retire(self, key: K) -> None:
        for queue in (self._once, self._again, self._retired):
            if (size := queue.pop(key)) is not None:
                self._retired.push(key, size)
                return

    def evict(self, key: K) -> None:
        if (size := self._once.pop(key)) is not None:
            self._once_ghosts.push(key, size)
        elif (size := self._again.pop(key)) is not None:
            self._again_ghosts.push(key, size)
        else:
            self._retired.pop(key)
        self._limit_ghosts()

    def remove(self, key: K) -> None:
        for queue in (self._once, self._again, self._retired):
            queue.pop(key)

    def victims(self) -> Iterator[K]:
        yield from reversed(self._retired)
        again = iter(self._again)
        left = self._once.size
        for key, size in self._once.items():
            if left <= self._target:
                yield from again
            yield key
            left -= size
        yield from again

    def __contains__(self, key: object) -> bool:
        return key in self._once or key in self._again or key in self._retired

    def __len__(self) -> int:
        return len(self._once) + len(self._again) + len(self._retired)

    def _limit_ghosts(self) -> None:
        """Remember blocks used once up to one capacity, all blocks up to two, residents included."""
        once, ghosts = self._once.size, self._once_ghosts
        while ghosts and once + ghosts.size > self._capacity:
            ghosts.pop_oldest()
        known = once + self._again.size + ghosts.size
        while self._again_ghosts and known + self._again_ghosts.size > 2 * self._capacity:
            self._again_ghosts.pop_oldest()
