"""Reading warm blocks without asking: find in the arena's directory, copy, verify.

No request, no lease, no lock. What verifies is right however old it is, because a key names its bytes exactly; on any
doubt the caller asks the cache. So that eviction still knows what is used, uses are noted and reported in batches.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from threading import Lock

from tierkv.copying import copy_and_sum
from tierkv.errors import BodyMismatch
from tierkv.keys import block_key
from tierkv.storage.directory import DirectoryReader

__all__ = ["DirectReader", "UseLog"]

_BATCH = 256
_BATCH_S = 1.0


class DirectReader:
    """Reads one tenant's blocks out of a mapped arena. Safe to call from any thread.

    Parameters
    ----------
    slots, directory
        The arena's memory.
    tenant_key
        See `tierkv.keys.tenant_key`.
    """

    def __init__(self, slots: memoryview, directory: memoryview, tenant_key: bytes) -> None:
        self._slots = slots
        self._directory = DirectoryReader(directory)
        self._tenant_key = tenant_key

    def read_into(self, chain_hash: bytes, group: int, out: memoryview) -> bool:
        """Fill the start of `out` with a verified block; say whether it was there. False leaves garbage in `out`.

        Raises `BodyMismatch` when the block does not fit.
        """
        place = self._directory.find(block_key(self._tenant_key, chain_hash, group))
        if place is None or place.offset + place.length > len(self._slots):
            return False
        if place.length > len(out):
            raise BodyMismatch(f"a block of {place.length} bytes does not fit a buffer of {len(out)}")
        source = self._slots[place.offset : place.offset + place.length]
        return copy_and_sum(out[: place.length], source) == place.checksum


class UseLog:
    """Collects uses of blocks and reports them in batches: after 256 of them, or with the first one a second later.

    Parameters
    ----------
    report
        Called with a namespace, a KV group and chain hashes, on the thread whose use filled a batch. Its errors are
        the caller's: recency that is lost is not worth a failed read.
    """

    def __init__(self, report: Callable[[str, int, Sequence[bytes]], None]) -> None:
        self._report = report
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = Lock()
        self._uses: dict[tuple[str, int], list[bytes]] = {}
        self._count = 0
        self._since = 0.0

    def note(self, namespace: str, group: int, chain_hash: bytes) -> None:
        """Note one use."""
        now = time.monotonic()
        if self._pid != os.getpid():  # forked: the lock may be another thread's for ever, and the uses are the parent's
            self._begin()
        with self._lock:
            if not self._count:
                self._since = now
            self._uses.setdefault((namespace, group), []).append(chain_hash)
            self._count += 1
            if self._count < _BATCH and now - self._since < _BATCH_S:
                return
        self.flush()

    def flush(self) -> None:
        """Report what was noted."""
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            uses, self._uses, self._count = self._uses, {}, 0
        for (namespace, group), hashes in uses.items():
            self._report(namespace, group, hashes)
