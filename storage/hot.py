"""The hot tier: a pool of blocks on a GPU, or in ordinary memory where there is none."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from tierkv.errors import DeviceError
from tierkv.storage.device import Device, DeviceBlock, open_device
from tierkv.storage.device_pool import DevicePool, Transfer
from tierkv.storage.landing import Sums
from tierkv.storage.pooled import PooledTier
from tierkv.storage.shm import SharedSegment
from tierkv.storage.tier import Buffer, Slot, checksum

__all__ = ["DeviceHotTier", "HotTier", "make_hot_tier"]

log = logging.getLogger(__name__)

BATCH_BYTES = 32 << 20
_DRIVER = Path("/proc/driver/nvidia/version")


def make_hot_tier(
    capacity_bytes: int,
    *,
    device: str,
    segment_path: str | os.PathLike[str],
    superblock_bytes: int | None = None,
) -> HotTier | DeviceHotTier:
    """Make a hot tier. Blocks while its memory is allocated.

    Parameters
    ----------
    capacity_bytes, superblock_bytes
        As `SuperblockAllocator`.
    device
        ``cpu``, ``cuda:N``, or ``auto``: the first GPU if there is one that can be used, else the CPU.
    segment_path
        File of the pool when it is on the CPU.

    Raises
    ------
    DeviceError
        There is no such device, or it refuses the allocation.
    ConfigError, StoreInUse, StorageFull, ForeignStore, StorageError
        As `SuperblockAllocator` and `SharedSegment`.
    """
    gpu = _resolve(device)
    if gpu is None:
        return HotTier(capacity_bytes, segment_path=segment_path, superblock_bytes=superblock_bytes)
    return DeviceHotTier(capacity_bytes, device=gpu, superblock_bytes=superblock_bytes)


class HotTier(PooledTier):
    """Slots inside a `SharedSegment`, which local clients can map like the warm arena.

    Parameters and errors as `make_hot_tier`.
    """

    name: ClassVar[str] = "hot"

    def __init__(
        self, capacity_bytes: int, *, segment_path: str | os.PathLike[str], superblock_bytes: int | None = None
    ) -> None:
        super().__init__(capacity_bytes, superblock_bytes)
        self._segment = SharedSegment(segment_path, self.allocator.capacity)

    @property
    def path(self) -> Path:
        """File that clients map."""
        return self._segment.path

    @property
    def generation(self) -> int:
        """Random number of this run of the pool's file."""
        return self._segment.generation

    @property
    def data_offset(self) -> int:
        """Where slot offset 0 lies in the file, in bytes."""
        return self._segment.data_offset

    def view(self, slot: Slot, length: int) -> memoryview:
        self._check_fits(slot, length)
        return self._segment.data[slot.offset : slot.offset + length]

    def describe(self) -> dict[str, Any]:
        """As `PooledTier.describe`, and on which device."""
        return {**super().describe(), "device": "cpu"}

    def close(self) -> None:
        """Unlink the pool. Views handed out stay readable; clients keep their mapping of a file that is gone."""
        super().close()
        self._segment.close()


class DeviceHotTier(PooledTier):
    """Slots in the memory of a GPU. The CPU cannot address them: `write` and `read` copy.

    Parameters
    ----------
    capacity_bytes, superblock_bytes
        As `SuperblockAllocator`.
    device
        Where.

    Attributes
    ----------
    batch_bytes
        How much is worth copying at once.
    pool
        The memory.

    Raises `DeviceError` when the device refuses the memory, and `ConfigError`.
    """

    name: ClassVar[str] = "hot"
    batch_bytes: ClassVar[int] = BATCH_BYTES

    def __init__(self, capacity_bytes: int, *, device: Device, superblock_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes, superblock_bytes)
        self.pool = DevicePool.allocate(device, self.allocator.capacity)
        self._sums: Sums | None = None

    @property
    def addressable(self) -> bool:
        return False

    @property
    def usable(self) -> bool:
        """Whether it copies: False for good after a copy that failed on its way, or never ended."""
        return not self.pool.lost

    def view(self, slot: Slot, length: int) -> memoryview:
        self._check_fits(slot, length)
        raise DeviceError(
            f"memory of {self.pool.device.name} has no address on the CPU", remedy="use write, read or device_block"
        )

    def device_block(self, slot: Slot, length: int) -> DeviceBlock:
        """Return the first `length` bytes of a slot where they lie, valid until the slot is given back."""
        self._check_fits(slot, length)
        return self.pool.block(slot.offset, length)

    def verify_landings(self, sums: Sums) -> bool:
        """Sum blocks on the device after each batch from now on, if `sums` is right about a sample. Blocks.

        Returns whether it is.
        """
        sample = bytes(range(256)) * 16
        slot = self.allocate(len(sample))
        try:
            self.write(slot, sample)
            found = list(sums([self.device_block(slot, len(sample))]))
            right = found == [checksum(sample)]
            why = "" if right else "the sum of a sample is wrong"
        except Exception as error:  # whatever a compiler or a driver may raise
            right, why = False, str(error)
        finally:
            self.discard(slot)
        if right:
            self._sums = sums
        else:
            log.warning("blocks are not verified again on %s: %s", self.pool.device.name, why)
        return right

    def landed(self, items: Sequence[tuple[Slot, int]]) -> Sequence[int | None]:
        """Return the XXH3-64 of the first so many bytes of slots, summed on the device; None if it is not. Blocks."""
        unknown = [None] * len(items)
        if self._sums is None:
            return unknown
        try:
            return self._sums([self.device_block(slot, length) for slot, length in items])
        except Exception as error:  # the host has verified them already: no reason to have no hot tier
            log.warning("blocks are not verified again on %s any more: %s", self.pool.device.name, error)
            self._sums = None
            return unknown

    def copy_in(self, items: Iterable[tuple[Slot, Buffer]]) -> Transfer:
        """Begin to fill slots. See `DevicePool.copy_in`; raises `DeviceError` and what `items` raises."""
        return self.pool.copy_in(self._placed(items))

    def write(self, slot: Slot, payload: Buffer) -> None:
        self.copy_in([(slot, payload)]).wait()

    def read(self, slot: Slot, out: memoryview) -> None:
        self._check_fits(slot, len(out))
        self.pool.copy_out([(slot.offset, out)])

    def describe(self) -> dict[str, Any]:
        """As `PooledTier.describe`; on which device, what of the host's memory it copies from by itself, and whether it
        has been given up."""
        return {
            **super().describe(),
            "device": self.pool.device.name,
            "pinned_bytes": self.pool.pinned_bytes,
            "lost": self.pool.lost,
        }

    def close(self) -> None:
        """Give the pool up, see `DevicePool.close`."""
        super().close()
        self.pool.close()

    def _placed(self, items: Iterable[tuple[Slot, Buffer]]) -> Iterable[tuple[int, Buffer]]:
        for slot, payload in items:
            self._check_fits(slot, len(payload))
            yield slot.offset, payload


def _resolve(name: str) -> Device | None:
    if name == "cpu":
        return None
    if name != "auto":
        return open_device(name)
    try:
        return open_device("cuda")
    except DeviceError as error:
        if _DRIVER.exists():
            log.warning("the hot tier lies in ordinary memory: %s", error)
        return None
