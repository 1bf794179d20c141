"""From the cold tier to a GPU with half of the decoding done there.

The processor undoes the Huffman coding, byte planes cross the bus, a kernel merges them in the block's slot, and the
sum of what it made is taken where it lies. A block that is not right there is read again by the processor alone, which
finds out whether it was damaged on the disk or on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from tierkv.errors import CorruptBlock, DeviceError
from tierkv.spec import BlockLayout
from tierkv.storage.codecs.bx1 import Bx1
from tierkv.storage.cold import ColdTier
from tierkv.storage.device import Copy, DeviceBlock, finished
from tierkv.storage.hot import DeviceHotTier
from tierkv.storage.landing import Sums
from tierkv.storage.pinning import PinnedBuffer
from tierkv.storage.tier import BlockMeta, Slot

__all__ = ["Merge", "PlaneLoader", "merge_on_device", "planes_room"]

_CODEC = Bx1()

Merge = Callable[[DeviceBlock, DeviceBlock, BlockLayout], None]
"""Merges the planes in the first block into the payload, of that layout, in the second one."""


def planes_room(length: int) -> int:
    """Return how many bytes hold the planes of any payload of `length`: one token has as many peaks as values."""
    return 2 * length + 64


class PlaneLoader:
    """Fills slots of a hot tier on a GPU. Loads one block at a time; others wait.

    Parameters
    ----------
    hot, cold
        Where to, and where from.
    largest_bytes
        Payloads that are larger are not loaded. Twice as much is allocated on the device, and page-locked on the host.
    merge, sums
        What works on the device: `merge_on_device` and `tierkv.storage.landing.device_sums`.

    Raises
    ------
    DeviceError
        The device refuses the memory.
    """

    def __init__(self, hot: DeviceHotTier, cold: ColdTier, largest_bytes: int, *, merge: Merge, sums: Sums) -> None:
        self._hot, self._cold = hot, cold
        self._merge, self._sums = merge, sums
        self._device = device = hot.pool.device
        self._nbytes = planes_room(largest_bytes)
        self._lock = Lock()
        self._lost = False
        self._buffer = PinnedBuffer(device, self._nbytes)
        try:
            self._room = device.allocate(self._nbytes)
        except DeviceError:
            self._buffer.close()
            raise
        self._stream = device.stream()

    def load(self, key: bytes, slot: Slot) -> BlockMeta | None:
        """Fill a slot with a verified block that the caller may then publish. Blocks.

        Returns None for a block without planes, or too large: read it whole. Unless this returns the block's meta, the
        slot holds garbage. Nothing is under way in the slot when it ends, well or badly.

        Raises
        ------
        NotFound
            The cold tier does not have it.
        CorruptBlock
            It is damaged in the cold tier, and gone from there; or, with the cause ``transfer``, on its way only.
        DeviceError
            A copy or a kernel has failed.
        """
        with self._lock:
            if self._lost:
                raise DeviceError(f"{self._device.name} is not used any more", remedy="look at the driver's log")
            found = self._cold.read_planes(key, self._buffer.data)
            if found is None or not _mergeable(found[1]) or found[0].length > slot.size:
                return None
            meta, layout = found
            nbytes = _CODEC.planes_nbytes(layout)
            self._send(nbytes)
            block = self._hot.device_block(slot, meta.length)
            try:
                self._merge(DeviceBlock(self._device.name, self._room, nbytes), block, layout)
                (arrived,) = self._sums([block])
            except Exception as error:  # whatever a compiler or a driver may raise
                raise DeviceError(f"planes cannot be merged on {self._device.name}: {error}") from error
        if arrived == meta.checksum:
            return meta
        self._cold.read_into(key, memoryview(bytearray(meta.length)))  # raises if it is the disk's fault
        raise CorruptBlock("a block has changed on its way to the device", cause="transfer", remedy="read it again")

    def close(self) -> None:
        """Give everything back. Memory that a copy may still touch stays with the process."""
        with self._lock:
            lost, self._lost = self._lost, True
        if not lost:
            self._stream.close()
            self._buffer.close()
            self._device.free(self._room)

    def _send(self, nbytes: int) -> None:
        try:
            self._stream.copy([Copy(self._room, self._buffer.address, nbytes)])
            over = finished(self._stream.record(), self._hot.pool.patience_s)
        except DeviceError:
            self._lost = True
            raise
        if not over:
            self._lost = True
            raise DeviceError(f"a copy to {self._device.name} does not end", remedy="look at the driver's log")


def _mergeable(layout: BlockLayout) -> bool:
    """Say whether a payload is what kernels know: ``[layers, 1 or 2, ...]`` with tokens and heads, in either order."""
    return len(layout.shape) == 5 and layout.shape[1] in (1, 2) and layout.token_axis in (2, 3)


def merge_on_device(planes: DeviceBlock, payload: DeviceBlock, layout: BlockLayout) -> None:
    """Merge by `tierkv.kernels.planes`, on the current stream. See `Merge`; does not wait."""
    import torch

    from tierkv.kernels.paged_caches import PayloadOrder
    from tierkv.kernels.planes import merge_planes

    dtypes = {"float8_e4m3": "float8_e4m3fn"}
    dtype = getattr(torch, dtypes.get(layout.dtype, layout.dtype))
    order: PayloadOrder = "NHD" if layout.token_axis == 2 else "HND"
    target = torch.as_tensor(payload, device=payload.device).view(dtype).view(1, *layout.shape)
    merge_planes([torch.as_tensor(planes, device=planes.device)], target, order=order)
