"""The one writer of a cold store: fills segments, and empties one to go on when there is no room for more.

It follows LRU as closely as whole segments allow. The blocks whose last use is longest ago, a sixteenth of all, are
*stale*; emptied is the segment with the least else in it, and what is not stale is copied into the segment being
filled, the latest used first. To leave room for it, that happens before the filling segment is full, but never before
an eighth of it was new: so every round makes progress. Where nothing was used again the oldest segment is all stale and
goes without a copy. A copy is committed before its original goes: a process killed between the two leaves both, and the
next start drops the older.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import lmdb

from tierkv.errors import BlockTooLarge, StorageError, StorageFull, TierKVError
from tierkv.storage.cold import record
from tierkv.storage.cold.damage import DamageLog
from tierkv.storage.cold.datafile import PAGE_BYTES, Unusable
from tierkv.storage.cold.pool import SegmentPool
from tierkv.storage.cold.segment import Segment, is_damage, stored_bytes
from tierkv.storage.cold.table import BlockTable
from tierkv.storage.tier import BlockMeta, Buffer

__all__ = ["SegmentWriter", "Write"]

_LARGEST = 4  # a container may take 1/4 of a segment
_OVERHEAD = 4 * PAGE_BYTES  # of a container's header, its pages and its index record, rounded up
_STALE = 16  # 1/16 of all blocks may go: fewer, and segments are emptied for little; more, and what goes is too young
_NEW = 8  # at least 1/8 of what a segment takes is new, the rest may be carried from others
_AHEAD = 4  # the last 1/4 of a segment is for carried blocks; what is free in it need not be adjacent
_TRANSACTION = 8  # one transaction writes at most 1/8 of a segment, or one container


@dataclass(frozen=True, slots=True)
class Write:
    """A container to store; `index` is its place in the caller's batch."""

    index: int
    key: bytes
    meta: BlockMeta
    container: Buffer


@dataclass(frozen=True, slots=True)
class _Carried:
    ordinal: int
    key: bytes
    meta: BlockMeta
    container: memoryview


@dataclass(frozen=True, slots=True)
class _Next:
    """While `filling` is filled: the segment to empty next, and the bytes of `filling` kept for what it will carry."""

    filling: Segment
    victim: Segment
    ahead: int


class SegmentWriter:
    """Changes segments and table together. Not thread-safe: the tier calls it under its writing lock."""

    def __init__(self, pool: SegmentPool, table: BlockTable, damage: DamageLog) -> None:
        self._pool = pool
        self._table = table
        self._damage = damage
        self._evicted: list[bytes] = []
        self._sealed = False
        self._next: _Next | None = None

    @property
    def largest_payload(self) -> int:
        """Bytes of the largest payload that fits however badly it codes."""
        return self._pool.segment_bytes // _LARGEST - _OVERHEAD

    def load(self) -> None:
        """Fill the table from the segments' indexes."""
        for segment in list(self._pool.segments):
            if not segment.sequence:
                continue
            try:
                rows, broken = record.sift(segment.records(), segment.sequence)
                if broken:
                    self._damage.note("index", f"{len(broken)} index records of {segment.path} are damaged; dropped")
                    segment.forget(broken)
            except (lmdb.Error, Unusable, struct.error) as error:
                self._pool.set_aside(segment, "index", f"its index cannot be read: {error}")
                continue
            self._table.register(segment)
            for older, ordinals in self._table.publish(segment, rows).items():
                self.forget(older, ordinals)
        for segment in self._pool.segments:
            segment.settle()

    def store(self, writes: Sequence[Write]) -> list[tuple[int, TierKVError]]:
        """Store containers; return the batch index and the error of each that could not be."""
        failed: list[tuple[int, TierKVError]] = []
        todo = []
        for write in writes:
            if stored_bytes(len(write.container)) > self._pool.segment_bytes // _LARGEST:
                failed.append((write.index, self._too_large(write)))
            elif write.key not in self._table:
                todo.append(write)
        may_drop = len(self._pool.segments) + 1  # all there are, and not one new one after the other
        while todo:
            try:
                stored = self._store_some(todo)
            except (OSError, lmdb.Error, Unusable) as error:
                filling = self._pool.filling
                if filling is not None and is_damage(error) and may_drop:
                    may_drop -= 1
                    self._drop(filling, error)
                    continue
                refused = error if isinstance(error, StorageError) else _refusal(error)
                failed.extend((write.index, refused) for write in todo)
                break
            todo = todo[stored:]
        return failed

    def forget(self, segment: Segment, ordinals: Sequence[int]) -> None:
        """Make sure that blocks taken out of the table stay out after a restart. Raises `StorageError`.

        A segment that has no room even for this, or is damaged, is dropped.
        """
        try:
            segment.forget(ordinals)
        except (OSError, lmdb.Error, Unusable) as error:
            if not is_damage(error) and not isinstance(error, lmdb.MapFullError):
                raise _refusal(error) from error
            self._drop(segment, error)

    def trim(self, tenant: bytes, payload_bytes: int, sequence: int, keys: Sequence[bytes]) -> int:
        """Evict blocks in the order of `keys`, as long as their tenant has more than `payload_bytes`; return how many.

        Those that do not lie in the segment filled as `sequence` any more stay. Raises as `forget`.
        """
        lies_there = record.sequence_prefix(sequence)
        places: list[tuple[Segment, int]] = []
        for key in keys:
            if self._table.payload_of(tenant) <= payload_bytes:
                break
            entry = self._table.get(key)
            if entry is not None and entry.startswith(lies_there) and (place := self._table.remove(key, entry)):
                self._evicted.append(key)
                places.append(place)
        if places:
            self.forget(places[0][0], [ordinal for _, ordinal in places])
        return len(places)

    def examine(self, segment: Segment) -> None:
        """Drop a segment whose structure turns out to be damaged. Blocks on reads."""
        try:
            segment.check_trees()
        except (OSError, Unusable) as error:
            self._drop(segment, error)

    def take_evicted(self) -> list[bytes]:
        """Return the keys that were evicted since the last call: trimmed, or dropped with their segments."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def take_sealed(self) -> bool:
        """Say whether a segment was sealed since the last call."""
        sealed, self._sealed = self._sealed, False
        return sealed

    def _too_large(self, write: Write) -> BlockTooLarge:
        return BlockTooLarge(
            f"a block of {write.meta.length} bytes ({len(write.container)} coded) does not fit the cold tier",
            remedy=f"make segments at least {_LARGEST} times as large; they have {self._pool.segment_bytes} bytes",
        )

    def _store_some(self, todo: Sequence[Write]) -> int:
        """Store the first few of `todo` in one transaction; return how many, 0 when the segment turned out full."""
        needed = stored_bytes(len(todo[0].container))
        segment, room = self._segment_for(needed)
        room = min(room, max(segment.size // _TRANSACTION, needed))
        batch: list[Write] = []
        for write in todo:
            room -= stored_bytes(len(write.container))
            if room < 0:
                break
            batch.append(write)
        try:
            rows = segment.append([(write.key, write.meta, write.container) for write in batch])
        except lmdb.MapFullError:
            if segment.fresh:
                raise Unusable("torn", "it is empty and has no room: it has lost count of its pages") from None
            return 0
        self._table.publish(segment, rows)
        return len(batch)

    def _segment_for(self, needed: int) -> tuple[Segment, int]:
        """Return the segment to fill, and how many bytes it may take before this is asked again: at least `needed`."""
        pool = self._pool
        while True:
            filling = pool.filling
            if filling is None:
                self._advance()
                continue
            room = filling.room()
            if pool.spare is not None or pool.may_grow or pool.oldest_sealed is None:
                if room >= needed:
                    return filling, room
                self._advance()
                continue
            victim, ahead = self._next_victim(filling, room, needed)
            if room >= needed + ahead:
                return filling, room - ahead
            self._empty(victim)

    def _next_victim(self, filling: Segment, room: int, needed: int) -> tuple[Segment, int]:
        """Return the segment to empty next, and how much of the filling one to leave for what it will carry, in bytes.

        Decided once per filling segment: what is to be carried would not fit if another one were chosen in the end.
        """
        planned = self._next
        if planned is None or planned.filling is not filling or planned.victim not in self._pool.segments[:-1]:
            victim, share = self._choose_victim()
            carried = max(int(share * victim.size), filling.size // _AHEAD)
            planned = _Next(filling, victim, max(0, min(carried, room - max(room // _NEW, needed))))
            self._next = planned
        return planned.victim, planned.ahead

    def _choose_victim(self) -> tuple[Segment, float]:
        """Return the sealed segment with the least in it that is not stale, and the share that this is of its payload.

        There must be a sealed one.
        """
        sealed = [segment for segment in self._pool.segments[:-1] if segment.sequence]
        worth = {segment.sequence: self._table.payload_in(segment) for segment in sealed}
        for key in self._table.keys_by_use(self._stale(len(self._table))):
            entry = self._table.get(key)
            if entry is not None and (sequence := record.place(entry)[0]) in worth:
                worth[sequence] -= record.length(entry)
        victim = min(sealed, key=lambda segment: worth[segment.sequence])
        return victim, worth[victim.sequence] / max(1, self._table.payload_in(victim))

    def _stale(self, blocks: int) -> int:
        """Return how many of `blocks` are stale; at least a segment's worth, so that nothing is copied needlessly."""
        oldest = self._pool.oldest_sealed
        return max(blocks // _STALE, oldest.blocks if oldest is not None else 0)

    def _advance(self) -> None:
        """Begin the next segment: an empty one, else a new one, else the oldest emptied."""
        pool = self._pool
        while (spare := pool.spare) is None:
            victim = pool.filling
            if pool.may_grow or victim is None:
                try:
                    pool.grow()
                    continue
                except StorageFull as error:
                    if victim is None:
                        raise
                    self._damage.note("disk-full", f"the cold store stays smaller than its capacity: {error}")
            self._empty(self._choose_victim()[0] if pool.oldest_sealed is not None else victim)
        try:
            pool.begin(spare)
        except (lmdb.Error, Unusable) as error:
            # An empty segment without room has lost count of its pages.
            if not is_damage(error) and not isinstance(error, lmdb.MapFullError):
                raise
            self._drop(spare, error)
            return
        self._sealed = len(pool.segments) > 1
        self._table.register(spare)

    def _drop(self, segment: Segment, error: Exception) -> None:
        """Give up a segment that LMDB must not be let near any more, with all its blocks."""
        keys = self._table.lying_in(segment)
        cause = error.cause if isinstance(error, Unusable) else "torn"
        self._damage.note(cause, f"{segment.path} and its {len(keys)} blocks are dropped: {error}")
        self._evicted += self._table.withdraw(segment, keys)
        self._pool.discard(segment)

    def _empty(self, victim: Segment) -> None:
        try:
            victim.check_trees()
        except (OSError, Unusable) as error:
            self._drop(victim, error)
            return
        keys = [record.key(row) for _, row in victim.records()]
        target = self._pool.filling
        if target is not None and target is not victim:
            self._carry(victim, keys, target)
        self._evicted += self._table.withdraw(victim, keys)
        if victim.size == self._pool.segment_bytes:
            try:
                self._pool.empty(victim)
            except lmdb.MapFullError:
                pass
            else:
                return
        self._pool.discard(victim)

    def _carry(self, victim: Segment, keys: Sequence[bytes], target: Segment) -> None:
        """Copy what is not stale of `victim`, which has held `keys`, to `target`, as far as there is room."""
        room = target.room()
        by_use = self._table.keys_by_use()
        worth = set(keys).difference(by_use[: self._stale(len(by_use))])
        lies_there = record.sequence_prefix(victim.sequence)
        with victim.values() as container_at:
            chosen: list[_Carried] = []
            for key in filter(worth.__contains__, reversed(by_use)):
                entry = self._table.get(key)
                meta = self._table.meta(key)
                if entry is None or meta is None or not entry.startswith(lies_there):
                    continue
                ordinal = record.place(entry)[1]
                container = container_at(ordinal)
                if container is not None and stored_bytes(len(container)) <= room:
                    room -= stored_bytes(len(container))
                    chosen.append(_Carried(ordinal, key, meta, container))
            self._copy(chosen, target)

    def _copy(self, chosen: Sequence[_Carried], target: Segment) -> None:
        """Copy blocks, the first if not all fit. Among those copied at once the order of storing is kept."""
        if not chosen:
            return
        in_order = sorted(chosen, key=lambda block: block.ordinal)
        try:
            rows = target.append([(block.key, block.meta, block.container) for block in in_order])
        except lmdb.MapFullError:
            if len(chosen) > 1:
                half = len(chosen) // 2
                self._copy(chosen[:half], target)
                self._copy(chosen[half:], target)
            return
        self._table.publish(target, rows)


def _refusal(error: Exception) -> StorageError:
    return StorageError(f"the cold store cannot be written: {error}", remedy="check its disk and its directory")
