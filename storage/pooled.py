"""What the memory tiers have in common: slots handed out by a `SuperblockAllocator`."""

from __future__ import annotations

from typing import Any

from tierkv.storage.superblocks import SuperblockAllocator, slot_bytes
from tierkv.storage.tier import Slot, SlotTier, TierUsage

__all__ = ["PooledTier"]


class PooledTier(SlotTier):
    """A slot tier over one piece of memory divided by `allocator`. Subclasses say where the memory is.

    Parameters
    ----------
    capacity_bytes, superblock_bytes
        As `SuperblockAllocator`; the memory needed is ``allocator.capacity`` bytes.
    """

    def __init__(self, capacity_bytes: int, superblock_bytes: int | None) -> None:
        super().__init__()
        self.allocator = SuperblockAllocator(capacity_bytes, superblock_bytes)

    @property
    def largest_block(self) -> int:
        return self.allocator.superblock_bytes

    def slots_for(self, length: int) -> int:
        superblock = self.allocator.superblock_bytes
        return self.allocator.capacity // superblock * (superblock // slot_bytes(length))

    def slot_size(self, length: int) -> int:
        return self.allocator.slot_size(length)

    def take(self, length: int) -> Slot | None:
        self._check_open()
        return self.allocator.take(length)

    def allocate(self, length: int) -> Slot:
        self._check_open()
        return self.allocator.allocate(length)

    def discard(self, slot: Slot) -> None:
        self._check_open()
        self.allocator.free(slot)

    def neighbours(self, slot: Slot, length: int) -> list[Slot]:
        self._check_open()
        return self.allocator.neighbours(slot, length)

    def usage(self) -> TierUsage:
        self._check_open()
        slots = self.allocator.usage()
        return TierUsage(slots.capacity_bytes, slots.used_bytes, self._payload_bytes, len(self._resident))

    def describe(self) -> dict[str, Any]:
        """As `Tier.describe`; `stranded_bytes` are free, but only for blocks of sizes that are in use already."""
        return {**super().describe(), "stranded_bytes": self.allocator.usage().stranded_bytes}
