"""Host memory that a GPU copies from by itself: page-locked pieces of an arena, and buffers for all other memory."""

from __future__ import annotations

import logging
import mmap
from threading import Lock

from tierkv.errors import DeviceError
from tierkv.storage.device import Device, address_of

__all__ = ["PIECE_BYTES", "PinnedArena", "PinnedBuffer"]

log = logging.getLogger(__name__)

PIECE_BYTES = 256 << 20
"""Some 25 ms of page-locking at a time, once: an arena of hundreds of GiB in one call takes a minute, or fails."""


class PinnedArena:
    """Memory that is page-locked piece by piece, each piece when it is first used. Safe to use from any thread.

    Parameters
    ----------
    memory
        What to lock. It stays mapped while this object is open.
    piece_bytes
        The most that is locked in one call; a multiple of 4096.
    """

    def __init__(self, device: Device, memory: memoryview, piece_bytes: int = PIECE_BYTES) -> None:
        self._device = device
        self._memory = memory
        self._start = address_of(memory)
        self._piece_bytes = piece_bytes
        self._pinned: dict[int, bool] = {}
        self._lock = Lock()

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are page-locked now."""
        with self._lock:
            return sum(self._length(piece) for piece, pinned in self._pinned.items() if pinned)

    def parts(self, address: int, nbytes: int) -> list[tuple[int, int]] | None:
        """Cut a stretch of host memory at the borders of pieces, for one copy each can be of one locked piece only.

        Returns address and length of each part; None when not all of it is of this memory, or cannot be locked. Blocks
        while pieces that are used for the first time are locked.
        """
        at, stop = address - self._start, address - self._start + nbytes
        if at < 0 or stop > len(self._memory):
            return None
        parts: list[tuple[int, int]] = []
        while at < stop:
            piece = at // self._piece_bytes
            if not self._pin(piece):
                return None
            length = min(stop, (piece + 1) * self._piece_bytes) - at
            parts.append((self._start + at, length))
            at += length
        return parts

    def close(self) -> None:
        """Unlock everything. The device must be done with it. Idempotent."""
        with self._lock:
            pieces = [piece for piece, pinned in self._pinned.items() if pinned]
            self._pinned = dict.fromkeys(range(-(-len(self._memory) // self._piece_bytes)), False)
            for piece in pieces:
                try:
                    self._device.unpin(self._start + piece * self._piece_bytes)
                except DeviceError as error:
                    log.warning("%s", error)
            self._memory = memoryview(b"")

    def _pin(self, piece: int) -> bool:
        known = self._pinned.get(piece)
        if known is not None:
            return known
        with self._lock:
            if piece not in self._pinned:
                try:
                    self._device.pin(self._start + piece * self._piece_bytes, self._length(piece))
                    self._pinned[piece] = True
                except DeviceError as error:
                    # Asked once: whatever refused it will refuse it again, and asking takes long.
                    self._pinned[piece] = False
                    log.warning("blocks of this piece are copied through a buffer: %s", error)
            return self._pinned[piece]

    def _length(self, piece: int) -> int:
        return min(self._piece_bytes, len(self._memory) - piece * self._piece_bytes)


class PinnedBuffer:
    """Page-locked memory of its own. Creating one blocks.

    Attributes
    ----------
    data, address
        The memory, writable, and where it is.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._map = mmap.mmap(-1, nbytes)
        self.data = memoryview(self._map)
        self.address = address_of(self.data)
        device.pin(self.address, nbytes)

    def close(self) -> None:
        """Unlock it. The device must be done with it."""
        self._device.unpin(self.address)
