"""The hot tier: a paged pool as one torch tensor, on a GPU or in ordinary memory by the same code."""

from __future__ import annotations

import os
from pathlib import Path
from threading import local
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from tierkv.errors import DependencyMissing, DeviceError, InvalidRequest
from tierkv.storage.pooled import PooledTier
from tierkv.storage.shm import SharedSegment
from tierkv.storage.tier import Buffer, Slot

if TYPE_CHECKING:
    import torch

__all__ = ["HotTier"]

_STAGING_BYTES = 8 << 20


class HotTier(PooledTier):
    """Slots inside one flat uint8 tensor. Creating one blocks while its memory is allocated.

    On the CPU the tensor lies in a `SharedSegment`, so that local clients can map it like the warm arena. On a GPU
    `view` is not possible; `write` and `read` (and so `put` and `read_into`) copy through pinned memory.

    Parameters
    ----------
    capacity_bytes
        Size of the pool in bytes, rounded down to whole superblocks.
    device
        ``cpu``, ``cuda:N``, or ``auto``: the current CUDA device if there is one, else the CPU.
    segment_path
        File of the pool when it is on the CPU; not used on a GPU.
    superblock_bytes
        See `SuperblockAllocator`; None chooses by capacity.

    Raises
    ------
    DependencyMissing
        torch is not installed.
    DeviceError
        There is no such device, or it refuses the allocation.
    ConfigError, StoreInUse, StorageFull, ForeignStore, StorageError
        As `SuperblockAllocator` and `SharedSegment`.
    """

    name: ClassVar[str] = "hot"

    def __init__(
        self,
        capacity_bytes: int,
        *,
        device: str,
        segment_path: str | os.PathLike[str],
        superblock_bytes: int | None = None,
    ) -> None:
        try:
            import torch
        except ImportError as error:
            raise DependencyMissing("the hot tier needs torch", remedy="pip install 'tierkv-cache[gpu]'") from error
        self.device = _resolve(device)
        super().__init__(capacity_bytes, superblock_bytes)
        self._torch = torch
        self._staging = local()
        self._segment: SharedSegment | None = None
        if self.device.type == "cpu":
            self._segment = SharedSegment(segment_path, self.allocator.capacity)
            # A slice of its own: the tensor keeps it, and so the mapping, alive after close().
            self._pool = torch.frombuffer(self._segment.data[:], dtype=torch.uint8)
        else:
            try:
                self._pool = torch.empty(self.allocator.capacity, dtype=torch.uint8, device=self.device)
            except RuntimeError as error:
                raise DeviceError(
                    f"{self.device} refuses a pool of {self.allocator.capacity >> 20} MiB: {error}",
                    remedy="configure a smaller hot capacity, or leave the engine less memory",
                ) from error

    @property
    def addressable(self) -> bool:
        return self._segment is not None

    @property
    def path(self) -> Path | None:
        """File that clients map, None on a GPU."""
        return self._segment.path if self._segment else None

    @property
    def generation(self) -> int:
        """Random number of this run of the pool's file, 0 on a GPU."""
        return self._segment.generation if self._segment else 0

    @property
    def data_offset(self) -> int:
        """Where slot offset 0 lies in the file, in bytes."""
        return self._segment.data_offset if self._segment else 0

    def tensor(self, slot: Slot, length: int) -> torch.Tensor:
        """Return the first `length` bytes of a slot as uint8 on `device`, valid until the slot is given back."""
        self._check_fits(slot, length)
        return self._pool[slot.offset : slot.offset + length]

    def pages(self, slot_size: int) -> torch.Tensor:
        """Return the pool as pages of one slot size, for gather and scatter kernels.

        Returns
        -------
        torch.Tensor
            uint8 view ``[superblocks, slots per superblock, slot_size]`` on `device`; a slot of that size is
            ``pages[offset // superblock_bytes, offset % superblock_bytes // slot_size]``. Superblocks that belong to
            another size show as garbage: touch only pages of slots you hold.
        """
        self._check_open()
        superblock = self.allocator.superblock_bytes
        if not 0 < slot_size <= superblock:
            raise InvalidRequest(f"a superblock of {superblock} bytes has no pages of {slot_size}")
        shape = (self.allocator.capacity // superblock, superblock // slot_size, slot_size)
        return self._pool.as_strided(shape, (superblock, slot_size, 1))

    def view(self, slot: Slot, length: int) -> memoryview:
        self._check_fits(slot, length)
        if self._segment is None:
            raise DeviceError(f"memory of {self.device} has no address on the CPU", remedy="use write, read or tensor")
        return self._segment.data[slot.offset : slot.offset + length]

    def write(self, slot: Slot, payload: Buffer) -> None:
        if self._segment is not None:
            return super().write(slot, payload)
        target = self.tensor(slot, len(payload))
        source = np.frombuffer(payload, np.uint8)
        staging = self._pinned()
        for start in range(0, len(source), _STAGING_BYTES):
            part = source[start : start + _STAGING_BYTES]
            staging.numpy()[: len(part)] = part
            target[start : start + len(part)].copy_(staging[: len(part)])

    def read(self, slot: Slot, out: memoryview) -> None:
        if self._segment is not None:
            return super().read(slot, out)
        source = self.tensor(slot, len(out))
        target = np.frombuffer(out, np.uint8)
        staging = self._pinned()
        for start in range(0, len(target), _STAGING_BYTES):
            part = target[start : start + _STAGING_BYTES]
            staging[: len(part)].copy_(source[start : start + len(part)])
            part[:] = staging.numpy()[: len(part)]

    def close(self) -> None:
        """Give the pool up. Views and tensors handed out stay readable for as long as they live."""
        super().close()
        self._pool = self._torch.empty(0, dtype=self._torch.uint8)
        if self._segment is not None:
            self._segment.close()

    def _pinned(self) -> torch.Tensor:
        # One per thread: copies of different threads run at the same time.
        buffer: torch.Tensor | None = getattr(self._staging, "buffer", None)
        if buffer is None:
            buffer = self._torch.empty(_STAGING_BYTES, dtype=self._torch.uint8, pin_memory=True)
            self._staging.buffer = buffer
        return buffer


def _resolve(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"unknown device {name!r}", remedy="use cpu, cuda:N or auto") from error
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"the hot tier cannot live on {name!r}", remedy="use cpu, cuda:N or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(
            f"there is no device {name!r}", remedy=f"{torch.cuda.device_count()} CUDA devices are visible"
        )
    return device
