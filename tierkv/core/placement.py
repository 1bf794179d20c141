"""Placement: which block lies in which tier, and who has to leave when there is no room.

Levels number the tiers from the fastest (0) down. Memory tiers come first, then at most one byte tier, the cold one. A
block is *dirty* in a memory tier while no slower tier of this machine holds it: evicting it there would lose it. The
shared tier has the level after those; blocks come from it, and nothing that leaves this machine's tiers relies on it.
All access happens under the engine's lock; nothing here copies, hashes or writes bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tierkv.core.fairness import FairOrder
from tierkv.core.index import Entry, Index
from tierkv.core.ledger import Ledger
from tierkv.core.tenants import Tenants
from tierkv.policy import EvictionPolicy
from tierkv.storage.tier import Slot, SlotTier, SupportsRecency, Tier

__all__ = ["MemoryLevel", "MemoryTier", "Placement"]


@dataclass(frozen=True, slots=True)
class MemoryTier:
    """A memory tier with what the configuration says about it.

    Attributes
    ----------
    make_policy
        Makes an eviction policy for a part of the tier of so many bytes.
    demote_ahead
        Share of the tier that is kept free or clean by demoting its oldest dirty blocks before room is needed.
    """

    tier: SlotTier
    make_policy: Callable[[int], EvictionPolicy[bytes]]
    demote_ahead: float


@dataclass(slots=True)
class MemoryLevel:
    """A memory tier at work.

    Attributes
    ----------
    order
        Whose block leaves next.
    dirty, dirty_bytes
        Blocks no slower tier holds, oldest first.
    pressed
        Somebody found no room: demote whatever the allowance says.
    """

    tier: SlotTier
    order: FairOrder
    demote_ahead: float
    dirty: OrderedDict[bytes, Entry] = field(default_factory=OrderedDict)
    pressed: bool = False
    dirty_bytes: int = 0


class Placement:
    """Tiers, their eviction orders, and who lies where.

    Parameters
    ----------
    memory
        Memory tiers, fastest first; at least one.
    cold
        The byte tier below them, or None.
    """

    def __init__(
        self, memory: Sequence[MemoryTier], cold: Tier | None, index: Index, ledger: Ledger, tenants: Tenants
    ) -> None:
        self.memory = [
            MemoryLevel(
                m.tier,
                FairOrder(m.tier.name, m.tier.usage().capacity_bytes, m.make_policy, tenants.rules_of),
                m.demote_ahead,
            )
            for m in memory
        ]
        self.cold = cold
        self.cold_level = len(self.memory) if cold is not None else -1
        self.names = [m.tier.name for m in self.memory] + ([cold.name] if cold is not None else [])
        self._last = len(self.names) - 1
        self.shared_level = len(self.names)
        self.names.append("shared")
        self._index = index
        self._ledger = ledger

    def allocate(self, level: int, length: int, tenant: bytes, *, lossy: bool = False) -> Slot | None:
        """Take a slot for a tenant, evicting others by policy; None when all that could leave is pinned or dirty.

        `lossy` allows the eviction of dirty blocks, counted as lost. The slot counts as the tenant's until `discard`,
        or until the block that `settle` publishes in it leaves.
        """
        memory = self.memory[level]
        while not memory.order.within_quota(tenant, length):
            left = self._evict_for(level, length, [tenant], lossy)
            for free in left:
                memory.tier.discard(free)
            if not left:
                memory.pressed = True
                return None
        slot = memory.tier.take(length)
        while slot is None:
            left = self._evict_for(level, length, memory.order.losers(tenant), lossy)
            if not left:
                memory.pressed = True
                return None
            if len(left) == 1 and left[0].size == memory.tier.slot_size(length):
                slot = left[0]
            else:
                for free in left:
                    memory.tier.discard(free)
                slot = memory.tier.take(length)
        memory.order.take(tenant, slot.size)
        return slot

    def discard(self, level: int, slot: Slot, tenant: bytes) -> None:
        """Give back a slot that was allocated and never settled."""
        self.disown(level, slot, tenant)
        self.memory[level].tier.discard(slot)

    def disown(self, level: int, slot: Slot, tenant: bytes) -> None:
        """Count a slot out of a tenant's; it is given back to its tier later."""
        self.memory[level].order.give(tenant, slot.size)

    def settle(self, entry: Entry, level: int, slot: Slot) -> None:
        """Publish a written slot as `entry`'s copy in a memory tier. Its place in the eviction order comes later."""
        self.memory[level].tier.publish(entry.key, slot, entry.meta)
        entry.levels |= 1 << level
        self.update_dirty(entry)

    def enlist(self, entry: Entry, level: int) -> None:
        """Give a settled block its place in the eviction order: from now on it may be evicted."""
        if entry.levels >> level & 1:
            self.memory[level].order.insert(entry)

    def mark_cold(self, entry: Entry, checksum: int) -> None:
        """Note that the cold tier holds the block, and gives back bytes of this checksum."""
        entry.levels |= 1 << self.cold_level
        entry.cold_checksum = checksum
        self.update_dirty(entry)

    def lost_level(self, entry: Entry, level: int, reason: str) -> None:
        """Note that a tier no longer holds the block; unpublish it if that was the last one of this machine.

        When the last exact copy of a lossily stored block goes, what the cold tier gives back becomes the block.
        """
        entry.levels &= ~(1 << level)
        self.update_dirty(entry)
        if not entry.levels:
            self._index.drop(entry)
            self._ledger.removed(entry, reason)
        elif entry.fastest() == self.cold_level:
            if entry.cold_checksum != entry.meta.checksum:
                entry.meta = entry.meta._replace(checksum=entry.cold_checksum)
            self._index.rest(entry)

    def let_go(self, entry: Entry, reason: str) -> bool:
        """Unpublish a block in every tier, now.

        Returns whether the cold tier still holds its bytes: the caller deletes them without the lock, then takes the
        key out of the index's `purging`.
        """
        self._index.drop(entry)
        for level in range(len(self.memory)):
            self._take_out(entry, level)
        in_cold = self.cold is not None and bool(entry.levels >> self.cold_level & 1)
        if in_cold:
            self._index.purging.add(entry.key)
        entry.levels = 0
        self.update_dirty(entry)
        self._ledger.removed(entry, reason)
        return in_cold

    def damaged(self, entry: Entry, level: int, cause: str) -> None:
        """Count a copy that failed verification and remove it; copies in other tiers are verified on their own."""
        if not entry.levels >> level & 1:
            return
        self._ledger.corrupt(entry, self.names[level], cause)
        self._take_out(entry, level)
        self.lost_level(entry, level, "corrupt")

    def unpin(self, entry: Entry) -> None:
        """Drop one pin."""
        entry.pins -= 1
        if entry.pins:
            return
        if entry.withdrawn:
            for tier, slot in entry.withdrawn:
                tier.discard(slot)
            entry.withdrawn = None
        self._index.rest(entry)

    def touch(self, entry: Entry, *, again: bool) -> None:
        """Tell the orders of the tiers holding the block that a request used it (`again`), or renew its recency."""
        for level, memory in enumerate(self.memory):
            if entry.levels >> level & 1:
                (memory.order.touch if again else memory.order.refresh)(entry)

    def retire(self, entry: Entry) -> None:
        """Make a block the next to leave memory: nobody will ask for it again."""
        for level, memory in enumerate(self.memory):
            if entry.levels >> level & 1:
                memory.order.retire(entry)

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

    def used_by_tenant(self) -> dict[bytes, dict[str, int]]:
        """Return the bytes each tenant has in each memory tier."""
        used: dict[bytes, dict[str, int]] = {}
        for memory in self.memory:
            for tenant, nbytes in memory.order.used().items():
                used.setdefault(tenant, {})[memory.tier.name] = nbytes
        return used

    def _take_out(self, entry: Entry, level: int) -> None:
        """Remove a memory copy from its tier; a slot that is pinned is given back with the last pin."""
        if level >= len(self.memory) or not entry.levels >> level & 1:
            return
        memory = self.memory[level]
        memory.order.remove(entry)
        slot = memory.tier.withdraw(entry.key)
        entry.levels &= ~(1 << level)
        if slot is None:
            return
        memory.order.give(entry.meta.tenant, slot.size)
        if entry.pins:
            entry.withdrawn = [*(entry.withdrawn or ()), (memory.tier, slot)]
        else:
            memory.tier.discard(slot)

    def _evict_for(self, level: int, length: int, losers: Sequence[bytes], lossy: bool) -> list[Slot]:
        """Evict the first block in eviction order whose leaving helps `length` bytes; return the slots that it left.

        They belong to the caller now; none when nothing may leave. Blocks of the tenants `losers` leave, the first
        tenant's first. Room for another slot size may need a whole superblock: one that only losers have blocks in if
        there is one, else any that one of them has.
        """
        memory = self.memory[level]
        size = memory.tier.slot_size(length)
        for mixed in (False, True):
            narrowed = False
            for key in self._in_order(memory, losers):
                entry = self._index.awake(key)
                if entry is None or not self._may_leave(entry, level, lossy):
                    continue
                slot = memory.tier.slot(key)
                if slot is None:
                    continue
                if slot.size == size:
                    return [self._evict(entry, level)]
                leaving: list[Entry] = []
                for neighbour in memory.tier.neighbours(slot, length):
                    entry = self._index.awake(memory.tier.key_at(neighbour) or b"")
                    if entry is None or not self._may_leave(entry, level, lossy):
                        break
                    if not mixed and entry.meta.tenant not in losers:
                        narrowed = True
                        break
                    leaving.append(entry)
                else:
                    return [self._evict(entry, level) for entry in leaving]
            if not narrowed:
                break
        return []

    @staticmethod
    def _in_order(memory: MemoryLevel, losers: Sequence[bytes]) -> Iterator[bytes]:
        for tenant in losers:
            yield from memory.order.victims(tenant)

    def _may_leave(self, entry: Entry, level: int, lossy: bool) -> bool:
        if entry.pins or lossy:
            return not entry.pins
        if level == self._last:  # a block that a faster tier holds would be dirty there, and come back at once
            return not entry.levels & ((1 << level) - 1)
        return entry.below(level)

    def _evict(self, entry: Entry, level: int) -> Slot:
        memory = self.memory[level]
        slot = memory.tier.withdraw(entry.key)
        assert slot is not None
        memory.order.evict(entry)
        memory.order.give(entry.meta.tenant, slot.size)
        others = entry.levels & ~(1 << level)
        unused = entry.arrival is not None and not others & ((1 << len(self.memory)) - 1)
        self._ledger.evicted(entry, memory.tier.name, unused=unused, last=not others)
        if unused:
            entry.arrival = None
        self.lost_level(entry, level, "evicted" if level == self._last else "not_demoted_in_time")
        return slot
