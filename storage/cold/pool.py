"""The segments of one store, and the promise that they never take more disk than the cap.

At any time one segment is being filled, the one with the highest sequence number; the others are sealed, or empty and
waiting. Not thread-safe by itself: the tier's writer is the only one to change it.
"""

from __future__ import annotations

import os
from pathlib import Path

from tierkv.errors import ConfigError, StorageFull
from tierkv.storage.cold.damage import DamageLog
from tierkv.storage.cold.datafile import PAGE_BYTES, Unusable
from tierkv.storage.cold.directory import StoreDirectory
from tierkv.storage.cold.segment import Segment, footprint

__all__ = ["SegmentPool", "disk_bytes"]

_MIN_SEGMENTS = 4
_MIN_SEGMENT_BYTES = 1 << 20
_DIRECTORY_BYTES = 64 * 1024  # the directory itself, marker, lock file


class SegmentPool:
    """Open segments within a disk budget.

    Parameters
    ----------
    capacity_bytes
        Most disk the directory may take, everything in it included.
    segment_bytes
        Size of new segments; somewhat less where that lets a whole number of them, at least four, use the capacity up.

    Attributes
    ----------
    segment_bytes
        Size of new segments.
    segments
        Every usable one: the empty ones first, then in the order of filling.
    used_bytes
        Disk taken or promised to segments, and taken by everything else in the directory.
    """

    def __init__(
        self,
        directory: StoreDirectory,
        capacity_bytes: int,
        segment_bytes: int,
        damage: DamageLog,
        *,
        synchronous: bool,
    ) -> None:
        self._directory = directory
        self._capacity = capacity_bytes
        self.segment_bytes = _fitting_size(capacity_bytes, segment_bytes)
        self._synchronous = synchronous
        self._damage = damage
        self._foreign_bytes = _DIRECTORY_BYTES
        self.segments: list[Segment] = []
        for path in directory.strangers():
            self._set_aside(path, "foreign", "it is not part of the store")
        for path in directory.segment_paths():
            self._open(path)
        self.segments.sort(key=lambda segment: segment.sequence)
        while self.segments and self.used_bytes > capacity_bytes:
            self.segments.pop(0).remove()

    @property
    def used_bytes(self) -> int:
        return self._foreign_bytes + sum(footprint(segment.size) for segment in self.segments)

    @property
    def filling(self) -> Segment | None:
        """The segment being filled, if any was begun."""
        return self.segments[-1] if self.segments and self.segments[-1].sequence else None

    @property
    def spare(self) -> Segment | None:
        """An empty segment, if there is one."""
        return self.segments[0] if self.segments and not self.segments[0].sequence else None

    @property
    def oldest_sealed(self) -> Segment | None:
        """The sealed segment that was filled first, if any is sealed."""
        return next((segment for segment in self.segments[:-1] if segment.sequence), None)

    @property
    def may_grow(self) -> bool:
        """Whether one more segment fits the capacity. The disk may still have no room for it."""
        return self.used_bytes + footprint(self.segment_bytes) <= self._capacity

    def grow(self) -> None:
        """Add an empty segment. Raises `StorageFull` or `StorageError`."""
        if not self.may_grow:
            raise StorageFull(
                f"the cold store {self._directory.path} has no room for a segment",
                remedy="move the files that are not its own away, see the findings in its statistics",
            )
        path = self._directory.new_segment_path(segment.path for segment in self.segments)
        self.segments.insert(0, Segment.create(path, self.segment_bytes, synchronous=self._synchronous))

    def begin(self, segment: Segment) -> None:
        """Fill `segment`, which is empty, from now on."""
        segment.begin(self.segments[-1].sequence + 1)
        self.segments.remove(segment)
        self.segments.append(segment)

    def empty(self, segment: Segment) -> None:
        """Forget all that a segment holds; nobody may be reading it. Raises `lmdb.MapFullError` as `Segment.empty`."""
        segment.empty()
        self.segments.remove(segment)
        self.segments.insert(0, segment)

    def discard(self, segment: Segment) -> None:
        """Delete a segment with its files. Nobody may be reading it."""
        self.segments.remove(segment)
        segment.remove()

    def set_aside(self, segment: Segment, cause: str, reason: str) -> None:
        """Close a segment that turned out unusable and leave its file as it is."""
        self.segments.remove(segment)
        segment.close()
        Segment.delete_lock(segment.path)
        self._set_aside(segment.path, cause, reason)

    def close(self) -> None:
        """Close every segment. Nobody may be using them."""
        for segment in self.segments:
            segment.close()

    def _open(self, path: Path) -> None:
        try:
            segment = Segment.open(path, synchronous=self._synchronous)
        except Unusable as error:
            Segment.delete_lock(path)
            if error.cause == "torn":
                # Ours by its databases, and LMDB could die of it: nothing in it can be trusted, and little is missed.
                self._damage.note(error.cause, f"{path} and its blocks are dropped: {error.reason}")
                Segment.delete_files(path)
            else:
                self._set_aside(path, error.cause, error.reason)
            return
        if segment.sequence and any(segment.sequence == other.sequence for other in self.segments):
            segment.close()
            Segment.delete_lock(path)
            self._set_aside(path, "duplicate", "another segment has the same sequence number, one is a copy")
            return
        self.segments.append(segment)

    def _set_aside(self, path: Path, cause: str, reason: str) -> None:
        nbytes = disk_bytes(path)
        self._foreign_bytes += nbytes
        self._damage.note(
            cause,
            f"{path} is not used: {reason}; its {nbytes} bytes count against the capacity until it is moved away",
        )


def disk_bytes(path: Path) -> int:
    """Return the disk a file, or a directory with all that is in it, takes."""
    total = path.lstat().st_blocks * 512
    if path.is_symlink():
        return total
    for folder, folders, files in os.walk(path):
        total += sum(os.lstat(os.path.join(folder, name)).st_blocks * 512 for name in (*folders, *files))
    return total


def _fitting_size(capacity_bytes: int, segment_bytes: int) -> int:
    """Return the largest size up to `segment_bytes` at which a whole number of segments uses the capacity up."""
    available = capacity_bytes - _DIRECTORY_BYTES
    most = available // footprint(_MIN_SEGMENT_BYTES + PAGE_BYTES)
    count = max(_MIN_SEGMENTS, min(most, -(-available // footprint(max(segment_bytes, _MIN_SEGMENT_BYTES)))))
    size = min(segment_bytes, (available // count - footprint(0)) * 256 // 257) // PAGE_BYTES * PAGE_BYTES
    if size < _MIN_SEGMENT_BYTES:
        needed = _MIN_SEGMENTS * footprint(_MIN_SEGMENT_BYTES + PAGE_BYTES) + _DIRECTORY_BYTES
        raise ConfigError(
            f"a cold tier of {capacity_bytes} bytes in segments of {segment_bytes} is too small",
            remedy=f"give it at least {needed} bytes, in segments of at least {_MIN_SEGMENT_BYTES}",
        )
    return size
