"""The warm tier: one shared-memory arena in CPU RAM, mapped by local engines and readable in place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from tierkv.storage.pooled import PooledTier
from tierkv.storage.shm import SharedSegment
from tierkv.storage.tier import Slot

__all__ = ["WarmTier"]


class WarmTier(PooledTier):
    """Slots inside a `SharedSegment`. Creating one blocks while its memory is allocated.

    Parameters
    ----------
    capacity_bytes
        Size of the arena in bytes, rounded down to whole superblocks.
    segment_path
        File of the arena, normally in /dev/shm. Only one process can own it.
    superblock_bytes
        See `SuperblockAllocator`; None chooses by capacity.

    Raises
    ------
    ConfigError, StoreInUse, StorageFull, ForeignStore, StorageError
        As `SuperblockAllocator` and `SharedSegment`.
    """

    name: ClassVar[str] = "warm"

    def __init__(
        self, capacity_bytes: int, *, segment_path: str | os.PathLike[str], superblock_bytes: int | None = None
    ) -> None:
        super().__init__(capacity_bytes, superblock_bytes)
        self._segment = SharedSegment(segment_path, self.allocator.capacity)

    @property
    def path(self) -> Path:
        """File that clients map."""
        return self._segment.path

    @property
    def generation(self) -> int:
        """Random number of this run of the arena; clients compare it when they map."""
        return self._segment.generation

    @property
    def data_offset(self) -> int:
        """Where slot offset 0 lies in the file, in bytes."""
        return self._segment.data_offset

    def view(self, slot: Slot, length: int) -> memoryview:
        self._check_fits(slot, length)
        return self._segment.data[slot.offset : slot.offset + length]

    def close(self) -> None:
        """Unlink the arena. Views handed out stay readable; clients keep their mapping of a file that is gone."""
        super().close()
        self._segment.close()
