"""What is known of the shared tier without asking it: answers of a moment ago, each with an age.

Knowledge is a hint. A block that is said to be there may have been evicted since: its load fails, and that is known
then. A block that is said not to be there is asked for again soon. All access happens under the engine's lock.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from tierkv.storage.tier import BlockMeta

__all__ = ["Knowledge"]

HELD_S = 60.0
ABSENT_S = 1.0
MOST = 1 << 17


class Knowledge:
    """Which blocks the shared tier has, and which it does not have.

    Parameters
    ----------
    usable
        Whether the tier answers at all: while it does not, nothing of it counts as published.
    """

    def __init__(self, usable: Callable[[], bool]) -> None:
        self._usable = usable
        self._held: OrderedDict[bytes, tuple[float, BlockMeta]] = OrderedDict()
        self._absent: OrderedDict[bytes, float] = OrderedDict()

    def meta(self, key: bytes) -> BlockMeta | None:
        """Return what is known of a block that is there; its checksum is 0, for only its bytes tell that."""
        found = self._held.get(key)
        if found is None or not self._usable():
            return None
        until, meta = found
        if until <= time.monotonic():
            del self._held[key]
            return None
        return meta

    def absent(self, key: bytes) -> bool:
        """Say whether the tier said a moment ago that it does not have a block."""
        until = self._absent.get(key)
        return until is not None and until > time.monotonic()

    def note_held(self, metas: Iterable[tuple[bytes, BlockMeta]]) -> None:
        """Note blocks that are there."""
        until = time.monotonic() + HELD_S
        for key, meta in metas:
            self._absent.pop(key, None)
            self._held.pop(key, None)
            self._held[key] = (until, meta)
        while len(self._held) > MOST:
            self._held.popitem(last=False)

    def note_absent(self, key: bytes) -> None:
        """Note a block that is not there."""
        self._held.pop(key, None)
        self._absent.pop(key, None)
        self._absent[key] = time.monotonic() + ABSENT_S
        while len(self._absent) > MOST:
            self._absent.popitem(last=False)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forget that blocks are there."""
        for key in keys:
            self._held.pop(key, None)

    def forget_all(self, tenant: bytes, namespace: bytes) -> None:
        """Forget all of a tenant's blocks of a namespace."""
        gone = [k for k, (_, meta) in self._held.items() if meta.tenant == tenant and meta.namespace == namespace]
        self.forget(gone)

    def __len__(self) -> int:
        """Blocks that are known to be there."""
        return len(self._held)
