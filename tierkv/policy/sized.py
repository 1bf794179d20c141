"""A queue of keys that knows the sum of their sizes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic

from tierkv.policy.base import K

__all__ = ["SizedQueue"]


class SizedQueue(Generic[K]):
    """Keys from the oldest to the newest, each once. Every operation is O(1).

    Attributes
    ----------
    size
        Sum of the sizes.
    """

    __slots__ = ("_sizes", "size")

    def __init__(self) -> None:
        self._sizes: OrderedDict[K, int] = OrderedDict()
        self.size = 0

    def push(self, key: K, size: int) -> None:
        """Add a key that is not in the queue, as the newest."""
        self._sizes[key] = size
        self.size += size

    def pop(self, key: K) -> int | None:
        """Take a key out; return its size, None if it was not there."""
        size = self._sizes.pop(key, None)
        if size is not None:
            self.size -= size
        return size

    def pop_oldest(self) -> tuple[K, int]:
        """Take the oldest key out; return it and its size."""
        key, size = self._sizes.popitem(last=False)
        self.size -= size
        return key, size

    def renew(self, key: K) -> None:
        """Make a key of the queue the newest."""
        self._sizes.move_to_end(key)

    def oldest(self) -> K:
        """Return the oldest key of a queue that is not empty."""
        return next(iter(self._sizes))

    def items(self) -> Iterator[tuple[K, int]]:
        """Yield keys and sizes, the oldest first."""
        return iter(self._sizes.items())

    def __iter__(self) -> Iterator[K]:
        return iter(self._sizes)

    def __reversed__(self) -> Iterator[K]:
        return reversed(self._sizes)

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)
