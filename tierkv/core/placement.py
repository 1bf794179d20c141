"""Placement: which block lies in which tier, and who has to leave when there is no room.

Levels number the tiers from the fastest (0) down. Memory tiers come first; at most one byte tier, the cold one, is
last. A block is *dirty* in a memory tier while no slower tier holds it: evicting it there would lose it. All access
happens under the engine's lock; nothing here copies, hashes or writes bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tierkv.core.counters import Counters
from tierkv.core.index import Entry, Index
from tierkv.errors import TierFull
from tierkv.policy import EvictionPolicy
from tierkv.storage.tier import Slot, SlotTier, SupportsRecency, Tier

__all__ = ["MemoryLevel", "Placement"]


@dataclass(slots=True)
class MemoryLevel:
    """A memory tier with what decides about it.

    Attributes
    ----------
    demote_ahead
        Share of the tier that is kept free or clean by demoting its oldest dirty blocks before room is needed.
    pressed
        Somebody found no room: demote whatever the allowance says.
    dirty, dirty_bytes
        Blocks no slower tier holds, oldest first.
    """

    tier: SlotTier
    policy: EvictionPolicy
    demote_ahead: float
    dirty: OrderedDict[bytes, Entry] = field(default_factory=OrderedDict)
    pressed: bool = False
    dirty_bytes: int = 0


class Placement:
    """Tiers, policies and residency.

    Parameters
    ----------
    memory
        Memory tiers, fastest first; at least one.
    cold
        The byte tier below them, or None.

    Attributes
    ----------
    purging
        Keys of blocks that were let go and whose bytes are being deleted from the cold tier. A block stored anew under
        such a key is not demoted before that is over: the deletion would take it along.
    """

    def __init__(self, memory: Sequence[MemoryLevel], cold: Tier | None, index: Index, counters: Counters) -> None:
        self.memory = list(memory)
        self.cold = cold
        self.cold_level = len(self.memory) if cold is not None else -1
        self.names = [m.tier.name for m in self.memory] + ([cold.name] if cold is not None else [])
        self._last = len(self.names) - 1
        self._index = index
        self._counters = counters
        self.purging: set[bytes] = set()

    def allocate(self, level: int, length: int, *, lossy: bool = False) -> Slot | None:
        """Take a slot, evicting others by policy; None when all that could leave is pinned or dirty.

        `lossy` allows the eviction of dirty blocks, counted as lost.
        """
        tier = self.memory[level].tier
        while True:
            try:
                return tier.allocate(length)
            except TierFull:
                if not self._evict_for(level, length, lossy):
                    self.memory[level].pressed = True
                    return None

    def settle(self, entry: Entry, level: int, slot: Slot) -> None:
        """Publish a written slot as `entry`'s copy in a memory tier. Its place in the eviction order comes later."""
        self.memory[level].tier.publish(entry.key, slot, entry.meta)
        entry.levels |= 1 << level
        self.update_dirty(entry)

    def enlist(self, entry: Entry, level: int) -> None:
        """Give a settled block its place in the eviction order: from now on it may be evicted."""
        if entry.levels >> level & 1:
            self.memory[level].policy.insert(entry.key, entry.meta.length)

    def mark_cold(self, entry: Entry, checksum: int) -> None:
        """Note that the cold tier holds the block, and gives back bytes of this checksum."""
        entry.levels |= 1 << self.cold_level
        entry.cold_checksum = checksum
        self.update_dirty(entry)

    def lost_level(self, entry: Entry, level: int, reason: str) -> None:
        """Note that a tier no longer holds the block; unpublish it if that was the last one.

        When the last exact copy of a lossily stored block goes, what the cold tier gives back becomes the block.
        """
        entry.levels &= ~(1 << level)
        self.update_dirty(entry)
        if not entry.levels:
            self._index.drop(entry)
            self._counters.lost_blocks[reason] += 1
        elif entry.fastest() == self.cold_level and entry.cold_checksum != entry.meta.checksum:
            entry.meta = replace(entry.meta, checksum=entry.cold_checksum)

    def let_go(self, entry: Entry, reason: str) -> bool:
        """Unpublish a block in every tier, now.

        Returns whether the cold tier still holds its bytes: the caller deletes them without the lock, then takes the
        key out of `purging`.
        """
        self._index.drop(entry)
        for level in range(len(self.memory)):
            self._take_out(entry, level)
        in_cold = bool(entry.levels)
        if in_cold:
            self.purging.add(entry.key)
        entry.levels = 0
        self.update_dirty(entry)
        self._counters.lost_blocks[reason] += 1
        return in_cold

    def damaged(self, entry: Entry, level: int, cause: str) -> None:
        """Count a copy that failed verification and remove it; copies in other tiers are verified on their own."""
        if not entry.levels >> level & 1:
            return
        self._counters.corrupt_blocks[f"{self.names[level]}/{cause}"] += 1
        self._take_out(entry, level)
        self.lost_level(entry, level, "corrupt")

    def _take_out(self, entry: Entry, level: int) -> None:
        """Remove a memory copy from its tier; a slot that is pinned is given back with the last pin."""
        if level >= len(self.memory) or not entry.levels >> level & 1:
            return
        memory = self.memory[level]
        memory.policy.remove(entry.key)
        slot = memory.tier.withdraw(entry.key)
        entry.levels &= ~(1 << level)
        if slot is not None and entry.pins:
            entry.withdrawn.append((memory.tier, slot))
        elif slot is not None:
            memory.tier.discard(slot)

    def unpin(self, entry: Entry) -> None:
        """Drop one pin."""
        entry.pins -= 1
        if not entry.pins and entry.withdrawn:
            for tier, slot in entry.withdrawn:
                tier.discard(slot)
            entry.withdrawn.clear()

    def touch(self, entry: Entry, *, again: bool) -> None:
        """Tell the policies of the tiers holding the block that a request used it (`again`), or renew its recency."""
        for level, memory in enumerate(self.memory):
            if entry.levels >> level & 1:
                (memory.policy.touch if again else memory.policy.refresh)(entry.key)

    def touch_cold(self, keys: Sequence[bytes]) -> None:
        """Tell the cold tier that a request used these blocks, oldest use first."""
        cold = self.cold
        if cold is not None and isinstance(cold, SupportsRecency):
            cold.touch(keys)

    def update_dirty(self, entry: Entry) -> None:
        """Bring the dirty lists in line with where a block lies."""
        for level, memory in enumerate(self.memory):
            dirty = level < self._last and bool(entry.levels >> level & 1) and not entry.below(level)
            if dirty and entry.key not in memory.dirty:
                memory.dirty[entry.key] = entry
                memory.dirty_bytes += entry.meta.length
            elif not dirty and memory.dirty.get(entry.key) is entry:
                del memory.dirty[entry.key]
                memory.dirty_bytes -= entry.meta.length

    def overdue(self, level: int) -> bool:
        """Say whether a tier holds more dirty bytes than `demote_ahead` allows, or somebody waits for room in it."""
        memory = self.memory[level]
        if memory.pressed and memory.dirty:
            return True
        return memory.dirty_bytes > (1.0 - memory.demote_ahead) * memory.tier.usage().capacity_bytes

    def _evict_for(self, level: int, length: int, lossy: bool) -> bool:
        """Evict the first block in eviction order whose leaving helps `length` bytes; say whether there was one."""
        memory = self.memory[level]
        for key in memory.policy.victims():
            slot = memory.tier.slot(key)
            if slot is None:
                continue
            leaving: list[Entry] = []
            for neighbour in memory.tier.neighbours(slot, length):
                entry = self._index.get(memory.tier.key_at(neighbour) or b"")
                if entry is None or not self._may_leave(entry, level, lossy):
                    break
                leaving.append(entry)
            else:
                for entry in leaving:
                    self._evict(entry, level)
                return True
        return False

    def _may_leave(self, entry: Entry, level: int, lossy: bool) -> bool:
        return not entry.pins and (lossy or level == self._last or entry.below(level))

    def _evict(self, entry: Entry, level: int) -> None:
        memory = self.memory[level]
        memory.tier.delete(entry.key)
        memory.policy.evict(entry.key)
        self._counters.evicted_blocks[memory.tier.name] += 1
        self.lost_level(entry, level, "evicted" if level == self._last else "not_demoted_in_time")
