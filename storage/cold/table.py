"""Which block lies where, who is reading, and what was used lately: the cold tier's memory of itself.

One lock, held for moments only. A reader finds its block and enters the block's segment in one step; whoever empties a
segment first takes its blocks out of the table, so that nobody new can enter, then waits until the last one has left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from threading import Condition

from tierkv.storage.cold import record
from tierkv.storage.cold.segment import Segment

__all__ = ["BlockTable"]


class BlockTable:
    """Entries (see `record`) by key. Safe to call from any thread.

    Attributes
    ----------
    payload_bytes
        Sum of the payload lengths of all blocks.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._entries: dict[bytes, bytes] = {}
        self._segments: dict[int, Segment] = {}
        self._touched: dict[bytes, int] = {}
        self._clock = count(1)
        self.payload_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def get(self, key: bytes) -> bytes | None:
        """Return a block's entry."""
        return self._entries.get(key)

    def snapshot(self) -> list[tuple[bytes, bytes]]:
        """Return all keys and entries, in the order they were stored."""
        with self._changed:
            return list(self._entries.items())

    def register(self, segment: Segment) -> None:
        """Make a segment's sequence number known, before any of its blocks is published."""
        with self._changed:
            self._segments[segment.sequence] = segment

    def publish(self, segment: Segment, blocks: Iterable[tuple[bytes, bytes]]) -> dict[Segment, list[int]]:
        """Enter blocks that lie in `segment`; return the places they had before, ordinals by segment."""
        superseded: dict[Segment, list[int]] = {}
        with self._changed:
            for key, entry in blocks:
                if key in self._entries:
                    old, ordinal = self._remove(key)
                    superseded.setdefault(old, []).append(ordinal)
                self._entries[key] = entry
                self.payload_bytes += record.length(entry)
                segment.blocks += 1
        return superseded

    def remove(self, key: bytes, entry: bytes | None = None) -> tuple[Segment, int] | None:
        """Take a block out (only if it is still `entry`, when given); return where it lay, None if it was not there."""
        with self._changed:
            found = self._entries.get(key)
            if found is None or (entry is not None and found is not entry):
                return None
            self._touched.pop(key, None)
            return self._remove(key)

    def withdraw(self, segment: Segment, keys: Iterable[bytes]) -> list[bytes]:
        """Take all of a segment's blocks out, wait until its last reader has left, return the keys that were there."""
        gone = []
        with self._changed:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None and record.place(entry)[0] == segment.sequence:
                    self._remove(key)
                    self._touched.pop(key, None)
                    gone.append(key)
            self._segments.pop(segment.sequence, None)
            self._changed.wait_for(lambda: segment.readers == 0)
        return gone

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note that blocks were used."""
        with self._changed:
            now = next(self._clock)
            for key in keys:
                if key in self._entries:
                    self._touched[key] = now

    def recently_used(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return those of `keys` that were touched since they were stored or carried, the latest first."""
        with self._changed:
            used = [key for key in keys if key in self._touched]
            return sorted(used, key=self._touched.__getitem__, reverse=True)

    def rest(self, keys: Iterable[bytes]) -> None:
        """Forget that blocks were used."""
        with self._changed:
            for key in keys:
                self._touched.pop(key, None)

    @contextmanager
    def reading(self, key: bytes) -> Iterator[tuple[Segment, bytes] | None]:
        """Enter the segment of a block for reading it; gives the segment and the entry, None for an unknown key."""
        with self._changed:
            entry = self._entries.get(key)
            segment = self._segments[record.place(entry)[0]] if entry is not None else None
            if segment is not None:
                segment.readers += 1
        try:
            yield None if segment is None or entry is None else (segment, entry)
        finally:
            if segment is not None:
                self._leave(segment)

    @contextmanager
    def inside(self, segment: Segment) -> Iterator[bool]:
        """Keep a segment from being emptied or closed; gives False when it is about to be."""
        with self._changed:
            known = self._segments.get(segment.sequence) is segment
            if known:
                segment.readers += 1
        try:
            yield known
        finally:
            if known:
                self._leave(segment)

    def clear(self, segments: Sequence[Segment]) -> None:
        """Forget everything and wait until nobody reads any of `segments`."""
        with self._changed:
            self._entries.clear()
            self._touched.clear()
            self._segments.clear()
            self.payload_bytes = 0
            self._changed.wait_for(lambda: not any(segment.readers for segment in segments))

    def _remove(self, key: bytes) -> tuple[Segment, int]:
        entry = self._entries.pop(key)
        sequence, ordinal = record.place(entry)
        segment = self._segments[sequence]
        segment.blocks -= 1
        self.payload_bytes -= record.length(entry)
        return segment, ordinal

    def _leave(self, segment: Segment) -> None:
        with self._changed:
            segment.readers -= 1
            if segment.readers == 0:
                self._changed.notify_all()
