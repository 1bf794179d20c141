"""The one writer of a cold store: fills segments, and empties the oldest to go on when there is no room for more.

Emptying is a second chance: blocks that were used since they were stored are copied into the segment being filled,
the latest used first and at most a quarter of a segment, so every round gains at least three quarters. To leave room
for them the oldest segment is emptied before the filling one is full. A copy is committed before its original goes: a
process killed between the two leaves both, and the next start drops the older.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import lmdb

from tierkv.errors import BlockTooLarge, StorageError, StorageFull, TierKVError
from tierkv.storage.cold import record
from tierkv.storage.cold.damage import DamageLog
from tierkv.storage.cold.datafile import PAGE_BYTES
from tierkv.storage.cold.pool import SegmentPool
from tierkv.storage.cold.segment import Segment, stored_bytes
from tierkv.storage.cold.table import BlockTable
from tierkv.storage.tier import BlockMeta, Buffer

__all__ = ["SegmentWriter", "Write"]

_LARGEST = 4  # a container may take 1/4 of a segment
_OVERHEAD = 4 * PAGE_BYTES  # of a container's header, its pages and its index record, rounded up
_CARRIED = 4  # emptying a segment carries at most 1/4 of it
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
    entry: bytes
    container: memoryview


class SegmentWriter:
    """Changes segments and table together. Not thread-safe: the tier calls it under its writing lock."""

    def __init__(self, pool: SegmentPool, table: BlockTable, damage: DamageLog) -> None:
        self._pool = pool
        self._table = table
        self._damage = damage
        self._evicted: list[bytes] = []
        self._sealed = False

    @property
    def largest_payload(self) -> int:
        """Bytes of the largest payload that fits however badly it codes."""
        return self._pool.segment_bytes // _LARGEST - _OVERHEAD

    def load(self) -> None:
        """Fill the table from the segments' indexes."""
        for segment in list(self._pool.segments):
            if not segment.sequence:
                continue
            blocks: dict[bytes, bytes] = {}
            broken: list[int] = []
            try:
                _read_index(segment, blocks, broken)
                if broken:
                    self._damage.note("index", f"{len(broken)} index records of {segment.path} are damaged; dropped")
                    segment.forget(broken)
            except lmdb.Error as error:
                self._pool.set_aside(segment, "index", f"its index cannot be read: {error}")
                continue
            self._table.register(segment)
            for older, ordinals in self._table.publish(segment, blocks.items()).items():
                older.forget(ordinals)
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
        while todo:
            try:
                stored = self._store_some(todo)
            except (OSError, lmdb.Error) as error:
                refused = error if isinstance(error, StorageError) else _refusal(error)
                failed.extend((write.index, refused) for write in todo)
                break
            todo = todo[stored:]
        return failed

    def forget(self, segment: Segment, ordinal: int) -> None:
        """Make sure that a block taken out of the table stays out after a restart. Raises `StorageError`."""
        try:
            segment.forget([ordinal])
        except (OSError, lmdb.Error) as error:
            raise _refusal(error) from error

    def take_evicted(self) -> list[bytes]:
        """Return the keys dropped by emptying segments since the last call."""
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
        segment = self._segment_for(stored_bytes(len(todo[0].container)))
        room = min(segment.room(), max(segment.size // _TRANSACTION, stored_bytes(len(todo[0].container))))
        batch: list[Write] = []
        for write in todo:
            room -= stored_bytes(len(write.container))
            if room < 0:
                break
            batch.append(write)
        try:
            entries = segment.append([(write.key, write.meta, write.container) for write in batch])
        except lmdb.MapFullError:
            if segment.fresh:
                raise
            return 0
        self._table.publish(segment, zip((write.key for write in batch), entries, strict=True))
        return len(batch)

    def _segment_for(self, needed: int) -> Segment:
        """Return the segment to fill, with room for `needed` bytes."""
        pool = self._pool
        while True:
            filling = pool.filling
            if filling is None:
                self._advance()
                continue
            room = filling.room()
            last_quarter = room < filling.size // _CARRIED
            if last_quarter and pool.spare is None and not pool.may_grow and pool.oldest_sealed is not None:
                self._empty(pool.oldest_sealed, carry_into=filling)
            elif room >= needed:
                return filling
            else:
                self._advance()

    def _advance(self) -> None:
        """Begin the next segment: an empty one, else a new one, else the oldest emptied."""
        pool = self._pool
        while (spare := pool.spare) is None:
            victim = pool.oldest_sealed or pool.filling
            if pool.may_grow or victim is None:
                try:
                    pool.grow()
                    continue
                except StorageFull as error:
                    if victim is None:
                        raise
                    self._damage.note("disk-full", f"the cold store stays smaller than its capacity: {error}")
            self._empty(victim, carry_into=None)
        self._sealed = pool.filling is not None
        pool.begin(spare)
        self._table.register(spare)

    def _empty(self, victim: Segment, carry_into: Segment | None) -> None:
        keys = [row[record.KEY_AT : record.ENTRY_AT] for _, row in victim.records()]
        if carry_into is not None:
            self._carry(victim, keys, carry_into)
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
        """Copy the blocks worth keeping from `victim` to `target`, as far as the budget goes."""
        budget = min(target.room(), self._pool.segment_bytes // _CARRIED)
        worth = self._table.recently_used(keys)
        with victim.values() as container_at:
            chosen: list[_Carried] = []
            for key in worth:
                entry = self._table.get(key)
                if entry is None or record.place(entry)[0] != victim.sequence:
                    continue
                ordinal = record.place(entry)[1]
                container = container_at(ordinal)
                if container is not None and stored_bytes(len(container)) <= budget:
                    budget -= stored_bytes(len(container))
                    chosen.append(_Carried(ordinal, key, entry, container))
            self._copy(chosen, target)

    def _copy(self, chosen: Sequence[_Carried], target: Segment) -> None:
        """Copy blocks, the first if not all fit. Among those copied at once the order of storing is kept."""
        if not chosen:
            return
        in_order = sorted(chosen, key=lambda block: block.ordinal)
        try:
            entries = target.append(
                [(block.key, record.decode_meta(block.entry), block.container) for block in in_order]
            )
        except lmdb.MapFullError:
            if len(chosen) > 1:
                half = len(chosen) // 2
                self._copy(chosen[:half], target)
                self._copy(chosen[half:], target)
            return
        moved = [block.key for block in in_order]
        self._table.publish(target, zip(moved, entries, strict=True))
        self._table.rest(moved)


def _read_index(segment: Segment, blocks: dict[bytes, bytes], broken: list[int]) -> None:
    """Sort a segment's records into whole ones (by key) and broken ones (ordinals)."""
    intact, sequence = record.intact, record.sequence_prefix(segment.sequence)
    for ordinal, row in segment.records():
        if intact(row) and row.startswith(sequence, record.ENTRY_AT):
            blocks[row[record.KEY_AT : record.ENTRY_AT]] = row[record.ENTRY_AT :]
        else:
            broken.append(ordinal)


def _refusal(error: OSError | lmdb.Error) -> StorageError:
    return StorageError(f"the cold store cannot be written: {error}", remedy="check its disk and its directory")
