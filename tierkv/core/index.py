"""The index: every published block, and the tiers it is in.

A block is published exactly while it has an `Entry` here. Entries are created by commits and by the reload of the cold
tier; they end when the last tier lets the block go. All access happens under the engine's lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tierkv.storage.tier import BlockMeta, Slot, SlotTier

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
    """One published block.

    Attributes
    ----------
    meta
        What the block is. Its checksum is that of the copies in memory while there are any, else the cold tier's.
    levels
        Bit n is set while the tier of level n (0 is the fastest) holds the block.
    pins
        Read leases and running copies on the block; it stays where it is while there are any.
    cold_checksum
        Of the bytes the cold tier gives back; another one than memory's after a lossy codec.
    arrival
        Set by a promotion, cleared by the first request that uses the block: attributes the hit to where it came from.
    withdrawn
        Slots of a block that was deleted under a lease; given back when the last pin goes.
    """

    key: bytes
    meta: BlockMeta
    levels: int = 0
    pins: int = 0
    cold_checksum: int = 0
    arrival: Arrival | None = None
    withdrawn: list[tuple[SlotTier, Slot]] = field(default_factory=list)

    def fastest(self) -> int:
        """Return the lowest level that holds the block."""
        return (self.levels & -self.levels).bit_length() - 1

    def below(self, level: int) -> bool:
        """Say whether a tier slower than `level` holds the block too."""
        return self.levels >> (level + 1) != 0


class Index:
    """Published blocks by storage key."""

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def add(self, entry: Entry) -> None:
        self._entries[entry.key] = entry

    def drop(self, entry: Entry) -> None:
        """Unpublish. An entry that is not (or no longer) the key's own is ignored."""
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
