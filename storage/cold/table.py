"""Which block lies where, who is reading, and what was used lately: the cold tier's memory of itself.

One lock, held for moments only. A reader finds its block and enters the block's segment in one step; whoever empties a
segment first takes its blocks out of the table, so that nobody new can enter, then waits until the last one has left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, islice
from threading import Condition

from tierkv.storage.cold import record
from tierkv.storage.cold.families import Families
from tierkv.storage.cold.segment import Segment
from tierkv.storage.tier import BlockMeta

__all__ = ["BlockTable"]


class BlockTable:
    """Entries (see `record`) by key, in about 300 bytes of memory a block at most. Safe to call from any thread.

    Attributes
    ----------
    payload_bytes
        Sum of the payload lengths of all blocks.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._entries: dict[bytes, bytes] = {}  # the one whose last use is longest ago first
        self._families = Families()
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

    def holds(self, keys: Sequence[bytes]) -> int:
        """Return how many of the first of `keys` are there without a gap."""
        entries = self._entries
        for count, key in enumerate(keys):
            if key not in entries:
                return count
        return len(keys)

    def meta(self, key: bytes) -> BlockMeta | None:
        """Return what is known of a block, None for an unknown key."""
        with self._changed:
            entry = self._entries.get(key)
            return self._decode(entry) if entry is not None else None

    def records(self) -> Iterator[tuple[bytes, BlockMeta]]:
        """Yield all keys and what is known of their blocks, in the order they were stored; a snapshot."""
        with self._changed:
            blocks = list(self._entries.items())
            common = self._families.all()
        blocks.sort(key=lambda block: record.place(block[1]))
        return ((key, record.decode_meta(entry, common[record.family(entry)])) for key, entry in blocks)

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

    def payload_by_tenant(self) -> dict[bytes, int]:
        """Return the sums of the payload lengths by tenant; tenants without any are left out."""
        with self._changed:
            return self._families.payload_by_tenant.copy()

    def payload_of(self, tenant: bytes) -> int:
        """Return the sum of the payload lengths of a tenant's blocks."""
        return self._families.payload_by_tenant.get(tenant, 0)

    def keys_of(self, tenant: bytes) -> list[tuple[int, list[bytes]]]:
        """Return a tenant's keys by sequence number, the oldest segment first, in each of them as `keys_by_use`.

        Looks at every block there is, but not under the lock.
        """
        with self._changed:
            names = self._families.of_tenant(tenant)
        if not names:
            return []
        found: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for key in self.keys_by_use():
            entry = self._entries.get(key, b"")
            if record.family(entry) in names:
                found[entry[:4]].append(key)
        return sorted((int.from_bytes(prefix, "little"), keys) for prefix, keys in found.items())

    def register(self, segment: Segment) -> None:
        """Make a segment's sequence number known, before any of its blocks is published."""
        with self._changed:
            self._segments[segment.sequence] = segment
            self._payload_in[segment.sequence] = 0

    def publish(self, segment: Segment, rows: Iterable[bytes]) -> dict[Segment, list[int]]:
        """Enter blocks that lie in `segment` by their records; return the places they had before, ordinals by segment.

        New blocks count as used now; what is known of the use of others stays.
        """
        entries = self._entries
        replaced: list[bytes] = []
        with self._changed:
            for common, family in groupby(rows, record.common):
                name = self._families.name(common)
                payload = count = 0
                for key, entry, length in record.entries(family, name):
                    before = entries.get(key)
                    if before is not None:
                        replaced.append(before)
                    entries[key] = entry
                    payload += length
                    count += 1
                self._families.enter(name, count, payload)
                self.payload_bytes += payload
                self._payload_in[segment.sequence] += payload
                segment.blocks += count
            superseded: dict[Segment, list[int]] = {}
            for before in replaced:
                old, ordinal = self._leave_segment(before)
                superseded.setdefault(old, []).append(ordinal)
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
    def reading(self, key: bytes) -> Iterator[tuple[Segment, bytes, BlockMeta] | None]:
        """Enter the segment of a block for reading it; gives segment, entry and meta, None for an unknown key."""
        with self._changed:
            entry = self._entries.get(key)
            found = None
            if entry is not None:
                found = self._segments[record.place(entry)[0]], entry, self._decode(entry)
                found[0].readers += 1
        try:
            yield found
        finally:
            if found is not None:
                self._leave(found[0])

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
            self._families.clear()
            self._segments.clear()
            self._payload_in.clear()
            self.payload_bytes = 0
            self._changed.wait_for(lambda: not any(segment.readers for segment in segments))

    def _leave_segment(self, entry: bytes) -> tuple[Segment, int]:
        """Count a block out of the segment it lies in; return its place."""
        sequence, ordinal = record.place(entry)
        length = record.length(entry)
        segment = self._segments[sequence]
        segment.blocks -= 1
        self.payload_bytes -= length
        self._payload_in[sequence] -= length
        self._families.leave(record.family(entry), length)
        return segment, ordinal

    def _decode(self, entry: bytes) -> BlockMeta:
        return record.decode_meta(entry, self._families.common(record.family(entry)))

    def _leave(self, segment: Segment) -> None:
        with self._changed:
            segment.readers -= 1
            if segment.readers == 0:
                self._changed.notify_all()
