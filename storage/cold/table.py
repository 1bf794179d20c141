"""Which block lies where, who is reading, and what was used lately: the cold tier's memory of itself.

One lock, held for moments only. A reader finds its block and enters the block's segment in one step; whoever empties a
segment first takes its blocks out of the table, so that nobody new can enter, then waits until the last one has left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
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
        self._entries: dict[bytes, bytes] = {}  # the one whose last use is longest ago first
        self._segments: dict[int, Segment] = {}
        self._payload_in: dict[int, int] = {}
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
            blocks = list(self._entries.items())
        return sorted(blocks, key=lambda block: record.place(block[1]))

    def keys_by_use(self, most: int | None = None) -> list[bytes]:
        """Return all keys, or the first `most`, those whose last use (or storing, if there was none) is longest ago."""
        with self._changed:
            return list(islice(self._entries, most))

    def payload_in(self, segment: Segment) -> int:
        """Return the sum of the payload lengths of a segment's blocks."""
        return self._payload_in[segment.sequence]

    def lying_in(self, segment: Segment) -> list[bytes]:
        """Return the keys of a segment's blocks. Looks at every block there is."""
        prefix = record.sequence_prefix(segment.sequence)
        with self._changed:
            return [key for key, entry in self._entries.items() if entry.startswith(prefix)]

    def register(self, segment: Segment) -> None:
        """Make a segment's sequence number known, before any of its blocks is published."""
        with self._changed:
            self._segments[segment.sequence] = segment
            self._payload_in[segment.sequence] = 0

    def publish(self, segment: Segment, blocks: Iterable[tuple[bytes, bytes]]) -> dict[Segment, list[int]]:
        """Enter blocks that lie in `segment`; return the places they had before, ordinals by segment.

        New blocks count as used now; what is known of the use of others stays.
        """
        superseded: dict[Segment, list[int]] = {}
        with self._changed:
            entries, length = self._entries, record.length
            payload = count = 0
            for key, entry in blocks:
                before = entries.get(key)
                if before is not None:
                    old, ordinal = self._leave_segment(before)
                    superseded.setdefault(old, []).append(ordinal)
                entries[key] = entry
                payload += length(entry)
                count += 1
            self.payload_bytes += payload
            self._payload_in[segment.sequence] += payload
            segment.blocks += count
        return superseded

    def remove(self, key: bytes, entry: bytes | None = None) -> tuple[Segment, int] | None:
        """Take a block out (only if it is still `entry`, when given); return where it lay, None if it was not there."""
        with self._changed:
            found = self._entries.get(key)
            if found is None or (entry is not None and found is not entry):
                return None
            return self._leave_segment(self._entries.pop(key))

    def withdraw(self, segment: Segment, keys: Iterable[bytes]) -> list[bytes]:
        """Take all of a segment's blocks out, wait until its last reader has left, return the keys that were there."""
        gone = []
        with self._changed:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None and record.place(entry)[0] == segment.sequence:
                    self._leave_segment(self._entries.pop(key))
                    gone.append(key)
            self._segments.pop(segment.sequence, None)
            self._payload_in.pop(segment.sequence, None)
            self._changed.wait_for(lambda: segment.readers == 0)
        return gone

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note that blocks were used, the least recent use first."""
        with self._changed:
            for key in keys:
                entry = self._entries.pop(key, None)
                if entry is not None:
                    self._entries[key] = entry

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
            self._segments.clear()
            self._payload_in.clear()
            self.payload_bytes = 0
            self._changed.wait_for(lambda: not any(segment.readers for segment in segments))

    def _leave_segment(self, entry: bytes) -> tuple[Segment, int]:
        """Count a block out of the segment it lies in; return its place."""
        sequence, ordinal = record.place(entry)
        segment = self._segments[sequence]
        segment.blocks -= 1
        self.payload_bytes -= record.length(entry)
        self._payload_in[sequence] -= record.length(entry)
        return segment, ordinal

    def _leave(self, segment: Segment) -> None:
        with self._changed:
            segment.readers -= 1
            if segment.readers == 0:
                self._changed.notify_all()
