"""The warm tier: one shared-memory arena in CPU RAM, mapped by local engines and readable in place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from tierkv.storage.directory import DirectoryWriter, Place, directory_bytes
from tierkv.storage.pooled import PooledTier
from tierkv.storage.shm import SharedSegment
from tierkv.storage.tier import BlockMeta, Slot

__all__ = ["WarmTier"]


class WarmTier(PooledTier):
    """Slots inside a `SharedSegment`, and behind them the directory by which others read without asking.

    Creating one blocks while its memory is allocated.

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
        slots = self.allocator.capacity
        self.directory_bytes = directory_bytes(slots)
        self._segment = SharedSegment(segment_path, slots + self.directory_bytes)
        self._directory = DirectoryWriter(self._segment.data[slots:])

    @property
    def path(self) -> Path:
        """File that clients map."""
        return self._segment.path

    @property
    def generation(self) -> int:
        """Random number of this run of the arena; clients compare it when they map."""
        return self._segment.generation

    def shared(self) -> tuple[memoryview, memoryview]:
        """Return the memory of the slots and that of the directory, as others map it."""
        data = self._segment.data
        return data[: self.allocator.capacity], data[self.allocator.capacity :]

    @property
    def directory_offset(self) -> int:
        """Where the directory begins, in bytes from slot offset 0; it is `directory_bytes` long."""
        return self.allocator.capacity

    @property
    def data_offset(self) -> int:
        """Where slot offset 0 lies in the file, in bytes."""
        return self._segment.data_offset

    def view(self, slot: Slot, length: int) -> memoryview:
        self._check_fits(slot, length)
        return self._segment.data[slot.offset : slot.offset + length]

    def _listed(self, key: bytes, slot: Slot, meta: BlockMeta) -> None:
        self._directory.insert(key, Place(slot.offset, meta.length, meta.checksum))

    def _unlisted(self, key: bytes) -> None:
        self._directory.remove(key)

    def close(self) -> None:
        """Unlink the arena. Views handed out stay readable; clients keep their mapping of a file that is gone."""
        super().close()
        self._segment.close()
