"""Where blocks go inside a memory tier: slots of one size share a superblock, empty superblocks go back to the pool.

Models with different block sizes share one arena. A free list per size alone would leave memory stuck with the size
that asked first; here a superblock belongs to one slot size only while it holds a block. This module computes
offsets and touches no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock

from tierkv.errors import BlockTooLarge, ConfigError, InvalidRequest, TierFull
from tierkv.storage.tier import Slot

__all__ = ["AllocatorUsage", "SuperblockAllocator", "default_superblock_bytes", "slot_bytes"]

_PAGE = 4096
_SIZES_KNOWN = 256
_CACHE_LINE = 64
_MIN_SUPERBLOCK = 4 << 20
_MAX_SUPERBLOCK = 64 << 20


def slot_bytes(length: int) -> int:
    """Return the slot size for a payload of `length` bytes.

    Whole 4 KiB pages, so that slots can be registered and copied by DMA. Below a page, powers of two from one cache
    line up: every distinct size occupies a superblock of its own, so there are seven small sizes and not sixty-four.
    """
    if length < 0:
        raise InvalidRequest(f"a block cannot have {length} bytes")
    if length > _PAGE // 2:
        return -(-length // _PAGE) * _PAGE
    return max(_CACHE_LINE, 1 << (length - 1).bit_length() if length else 0)


def default_superblock_bytes(capacity: int) -> int:
    """Choose a superblock size for an arena of `capacity` bytes.

    The largest power of two within a sixteenth of the arena, so that some sixteen block sizes can live side by side,
    but 4 MiB at least and 64 MiB at most: small superblocks waste tails and limit the block size, large ones are slow
    to become empty. An arena below 8 MiB is one superblock.
    """
    if capacity < 2 * _MIN_SUPERBLOCK:
        return capacity // _PAGE * _PAGE
    share = capacity // 16
    return min(_MAX_SUPERBLOCK, max(_MIN_SUPERBLOCK, 1 << (share.bit_length() - 1)))


@dataclass(frozen=True, slots=True)
class AllocatorUsage:
    """Occupancy of an allocator.

    Attributes
    ----------
    capacity_bytes
        Whole superblocks only.
    used_bytes
        Bytes that no allocation can get now: slots in use including their padding, and the tail of each superblock
        in use that is too short for another slot.
    stranded_bytes
        Free slots inside superblocks in use: only blocks of those superblocks' slot sizes can have them.
    superblocks, free_superblocks
        Number of superblocks, and of those that hold nothing and are open to any size.
    slots
        Slots in use.
    """

    capacity_bytes: int
    used_bytes: int
    stranded_bytes: int
    superblocks: int
    free_superblocks: int
    slots: int


@dataclass(slots=True)
class _Superblock:
    start: int
    slot_size: int = 0
    untouched: int = 0
    """Slots from this index on have not been used since the superblock left the pool."""
    returned: list[int] = field(default_factory=list)
    used: set[int] = field(default_factory=set)


class SuperblockAllocator:
    """Allocates slots inside ``[0, capacity)``. Allocation and release are O(1); safe to call from any thread.

    Parameters
    ----------
    capacity
        Bytes to divide. What is left after the last whole superblock is not used.
    superblock_bytes
        Size of a superblock, a multiple of 4096; the largest block that can be stored. None chooses by capacity.

    Raises
    ------
    ConfigError
        The capacity is less than one superblock, or `superblock_bytes` is not a multiple of 4096.
    """

    def __init__(self, capacity: int, superblock_bytes: int | None = None) -> None:
        size = default_superblock_bytes(capacity) if superblock_bytes is None else superblock_bytes
        if size % _PAGE or size < 0:
            raise ConfigError(f"superblock_bytes is {size}", remedy="use a multiple of 4096")
        if size == 0 or capacity < size:
            raise ConfigError(
                f"a capacity of {capacity} bytes is less than one superblock",
                remedy=f"use at least {size or _PAGE} bytes",
            )
        self.superblock_bytes = size
        self.capacity = capacity // size * size
        self._lock = Lock()
        self._superblocks = [_Superblock(start) for start in range(0, self.capacity, size)]
        self._pool = self._superblocks[::-1]
        # Slot size -> superblocks of that size with a free slot, oldest first: filling the oldest leaves the newer ones
        # to run empty.
        self._open: dict[int, dict[int, _Superblock]] = {}
        self._sizes: dict[int, int] = {}
        self._slots = 0
        self._used_bytes = 0

    def slot_size(self, length: int) -> int:
        """Return the size of the slots for `length` bytes. Raises `BlockTooLarge` when that is over a superblock."""
        size = self._sizes.get(length)
        if size is None:
            size = slot_bytes(length)
            if size > self.superblock_bytes:
                raise BlockTooLarge(
                    f"a block of {length} bytes is larger than a superblock of {self.superblock_bytes}",
                    remedy="use fewer tokens per block, or a larger arena or superblock_bytes",
                )
            if len(self._sizes) < _SIZES_KNOWN:
                self._sizes[length] = size
        return size

    def allocate(self, length: int) -> Slot:
        """As `take`, but raises `TierFull` when there is no slot."""
        slot = self.take(length)
        if slot is None:
            raise TierFull(f"no room for a slot of {self.slot_size(length)} bytes", remedy="evict blocks, then retry")
        return slot

    def take(self, length: int) -> Slot | None:
        """Take a slot for `length` bytes; None when none of its size is free and no superblock is empty.

        Raises `BlockTooLarge` when `length` is more than a superblock.
        """
        size = self.slot_size(length)
        with self._lock:
            open_ = self._open.get(size)
            if open_:
                superblock = next(iter(open_.values()))
            elif not self._pool:
                return None
            else:
                superblock = self._assign(size)
                open_ = self._open.setdefault(size, {})
                open_[superblock.start] = superblock
            if superblock.returned:
                offset = superblock.returned.pop()
            else:
                offset = superblock.start + superblock.untouched * size
                superblock.untouched += 1
            superblock.used.add(offset)
            if len(superblock.used) == self.superblock_bytes // size:
                del open_[superblock.start]
            self._slots += 1
            self._used_bytes += size
        return Slot(offset, size)

    def free(self, slot: Slot) -> None:
        """Give a slot back. Raises `InvalidRequest` for a slot that is not in use (a double free, a foreign slot)."""
        with self._lock:
            superblock = self._holding(slot)
            superblock.used.remove(slot.offset)
            superblock.returned.append(slot.offset)
            self._open[slot.size][superblock.start] = superblock
            self._slots -= 1
            self._used_bytes -= slot.size
            if not superblock.used:
                self._reclaim(superblock)

    def neighbours(self, slot: Slot, length: int) -> list[Slot]:
        """Return the slots in use that must be freed before `length` bytes fit where `slot` is.

        Only `slot` when its size is right, else every slot in use in its superblock. Raises `InvalidRequest` when
        `slot` is not in use and `BlockTooLarge` when `length` is more than a superblock.
        """
        size = self.slot_size(length)
        with self._lock:
            superblock = self._holding(slot)
            if size == slot.size:
                return [slot]
            return [Slot(offset, slot.size) for offset in superblock.used]

    def usage(self) -> AllocatorUsage:
        """Report occupancy. Cheap."""
        with self._lock:
            assigned = (len(self._superblocks) - len(self._pool)) * self.superblock_bytes
            return AllocatorUsage(
                capacity_bytes=self.capacity,
                used_bytes=self._used_bytes,
                stranded_bytes=assigned - self._used_bytes,
                superblocks=len(self._superblocks),
                free_superblocks=len(self._pool),
                slots=self._slots,
            )

    def _holding(self, slot: Slot) -> _Superblock:
        if 0 <= slot.offset < self.capacity:
            superblock = self._superblocks[slot.offset // self.superblock_bytes]
            if superblock.slot_size == slot.size and slot.offset in superblock.used:
                return superblock
        raise InvalidRequest(
            f"no slot of {slot.size} bytes is in use at offset {slot.offset}", remedy="free a slot once"
        )

    def _assign(self, size: int) -> _Superblock:
        superblock = self._pool.pop()
        superblock.slot_size = size
        self._used_bytes += self.superblock_bytes % size
        return superblock

    def _reclaim(self, superblock: _Superblock) -> None:
        size = superblock.slot_size
        del self._open[size][superblock.start]
        superblock.slot_size = 0
        superblock.untouched = 0
        superblock.returned.clear()
        self._used_bytes -= self.superblock_bytes % size
        self._pool.append(superblock)
