"""The index: every published block, and the tiers it is in.

A block is published while a tier holds it. Blocks in memory, and blocks somebody uses, are *awake*: an `Entry` says
where they are and who holds them. All others lie in the cold tier alone and are *asleep*: the cold tier's own table is
all that is known of them, so that ten million of them cost nothing here. Blocks that are known to lie in the shared
tier are published too; its bit is set for those that no tier of this machine holds. All access happens under the
engine's lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tierkv.core.sharing.knowledge import Knowledge
from tierkv.storage.tier import BlockMeta, Slot, SlotTier, Tier

__all__ = ["Arrival", "Entry", "Index"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a block came into memory that no request has used since: `level` it came from, start and end of the load
    on the monotonic clock (seconds)."""

    level: int
    started: float
    ended: float


@dataclass(slots=True, eq=False)
class Entry:
    """One published block that is awake.

    Attributes
    ----------
    meta
        What the block is. Its checksum is that of the copies in memory while there are any, else the cold tier's.
    levels
        Bit n is set while the tier of level n (0 is the fastest) holds the block. The shared tier's is set alone.
    pins
        Leases and running copies on the block; it stays where it is, and awake, while there are any.
    cold_checksum
        Of the bytes the cold tier gives back; another one than memory's after a lossy codec.
    arrival
        Set by a promotion, cleared by the first request that uses the block: attributes the hit to where it came from.
    owner
        The session that alone has used the block, `tierkv.core.sessions.SHARED`, or None when nobody said.
    uses, used
        Requests that used it since it came into memory, and when one did so last (monotonic seconds).
    withdrawn
        Slots of a block that was deleted under a lease; given back when the last pin goes.
    """

    key: bytes
    meta: BlockMeta
    levels: int = 0
    pins: int = 0
    cold_checksum: int = 0
    arrival: Arrival | None = None
    owner: object = None
    uses: int = 0
    used: float = 0.0
    withdrawn: list[tuple[SlotTier, Slot]] | None = None

    def fastest(self) -> int:
        """Return the lowest level that holds the block."""
        return (self.levels & -self.levels).bit_length() - 1

    def below(self, level: int) -> bool:
        """Say whether a tier slower than `level` holds the block too."""
        return self.levels >> (level + 1) != 0


class Index:
    """Published blocks by storage key.

    Parameters
    ----------
    cold, cold_level
        The tier that blocks asleep lie in, and its level; None if there is none.
    elsewhere, shared_level
        What is known of the shared tier, and its level; None if there is none.

    Attributes
    ----------
    arriving, purging, condemned
        Keys the cold tier may have bytes of that do not count as published: those being put there by a demotion; those
        being deleted from it; those whose deletion failed. A block stored anew under a key that is being deleted is
        not demoted before that is over: the deletion would take it along.
    shared_bit
        The shared tier's bit in `Entry.levels`, 0 if there is none.
    """

    def __init__(
        self, cold: Tier | None, cold_level: int, elsewhere: Knowledge | None = None, shared_level: int = -1
    ) -> None:
        self._awake: dict[bytes, Entry] = {}
        self._cold = cold
        self._cold_bit = 1 << cold_level if cold is not None else 0
        self._elsewhere = elsewhere
        self.shared_bit = 1 << shared_level if elsewhere is not None else 0
        self.arriving: set[bytes] = set()
        self.purging: set[bytes] = set()
        self.condemned: set[bytes] = set()

    def awake(self, key: bytes) -> Entry | None:
        """Return the entry of a block that is awake."""
        return self._awake.get(key)

    def wake(self, key: bytes) -> Entry | None:
        """Return the entry of a published block, waking it if need be: the caller pins it, or calls `rest`."""
        entry = self._awake.get(key)
        if entry is None and self._asleep(key):
            assert self._cold is not None
            meta = self._cold.meta(key)
            if meta is not None:
                entry = self._awake[key] = Entry(key, meta, self._cold_bit, cold_checksum=meta.checksum)
        if entry is None and self._elsewhere is not None:
            meta = self._elsewhere.meta(key)
            if meta is not None:
                entry = self._awake[key] = Entry(key, meta, self.shared_bit)
        return entry

    def rest(self, entry: Entry) -> None:
        """Let a block that no memory tier holds go to sleep, unless somebody uses it."""
        if entry.pins or self._awake.get(entry.key) is not entry:
            return
        if entry.levels and entry.levels in (self._cold_bit, self.shared_bit):
            del self._awake[entry.key]

    def levels(self, key: bytes) -> int:
        """Return in which levels a block lies, as bits; 0 for one that is not published."""
        entry = self._awake.get(key)
        if entry is not None:
            return entry.levels
        if self._asleep(key):
            return self._cold_bit
        return self.shared_bit if self._shared(key) else 0

    def here(self, key: bytes) -> bool:
        """Say whether a tier of this machine holds a block, or is about to."""
        return key in self._awake or self._asleep(key)

    def run(self, keys: Sequence[bytes], start: int, stop: int, mask: int = -1) -> int:
        """Return where the run of published blocks from `start` ends, at most `stop`; only levels of `mask` count."""
        awake = self._awake
        cold, shared = self._cold_bit & mask, self.shared_bit & mask
        for at in range(start, stop):
            entry = awake.get(keys[at])
            if entry is None:
                if not (cold and self._asleep(keys[at])) and not (shared and self._shared(keys[at])):
                    return at
            elif not entry.levels & mask:
                return at
        return stop

    def __contains__(self, key: bytes) -> bool:
        return self.here(key) or self._shared(key)

    def __len__(self) -> int:
        asleep = self._cold.usage().blocks if self._cold is not None else 0
        # Blocks being deleted from the cold tier are few, and counted until they are gone.
        elsewhere = self._cold_bit | self.shared_bit
        return asleep + sum(not entry.levels & elsewhere for entry in self._awake.values())

    def __iter__(self) -> Iterator[Entry]:
        """Yield every block of this machine; those asleep as entries that nobody else knows."""
        yield from (entry for entry in self.all_awake() if entry.levels != self.shared_bit)
        if self._cold is not None:
            for key, meta in self._cold.records():
                if key not in self._awake and not self._hidden(key):
                    yield Entry(key, meta, self._cold_bit, cold_checksum=meta.checksum)

    def all_awake(self) -> list[Entry]:
        """Return the blocks that are awake."""
        return list(self._awake.values())

    def add(self, entry: Entry) -> None:
        """Publish a block."""
        self._awake[entry.key] = entry

    def drop(self, entry: Entry) -> None:
        """Unpublish. An entry that is not (or no longer) the key's own is ignored."""
        if self._awake.get(entry.key) is entry:
            del self._awake[entry.key]

    def _asleep(self, key: bytes) -> bool:
        return self._cold is not None and self._cold.has(key) and not self._hidden(key)

    def _shared(self, key: bytes) -> bool:
        return self._elsewhere is not None and self._elsewhere.meta(key) is not None

    def _hidden(self, key: bytes) -> bool:
        return key in self.arriving or key in self.purging or key in self.condemned
