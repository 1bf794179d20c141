"""Memory of a GPU that blocks are copied into and out of, on streams of its own.

Nothing that a copy may still touch is ever given back: a copy ends, well or badly, before those who asked for it hear
of it. One that fails on its way, or does not end within `COPY_PATIENCE_S`, makes the pool *lost*: it copies nothing any
more, so that nobody writes where the copy that hangs may still read or write, and its memory stays with the process.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator
from threading import Lock

import numpy as np

from tierkv.errors import DeviceError
from tierkv.storage.device import Copy, Device, DeviceBlock, Event, Stream, address_of, finished
from tierkv.storage.pinning import PIECE_BYTES, PinnedArena, PinnedBuffer
from tierkv.storage.tier import Buffer

__all__ = ["DevicePool", "Transfer"]

log = logging.getLogger(__name__)

COPY_PATIENCE_S = 5.0
BUFFER_BYTES = 4 << 20
_GRAIN = 2 << 20
"""cudaMalloc's own: what is smaller shares its pages, and an exported handle would be of all that is in them."""


class _Lane:
    """A stream with two buffers in turn: while the device copies one, the processor copies the other."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.stream: Stream = device.stream()
        self._buffers: list[tuple[PinnedBuffer, Event | None]] = []
        self._next = 0

    def buffer(self) -> tuple[int, PinnedBuffer, Event | None]:
        """Return the buffer whose turn it is, its number, and the event of the copy that used it last."""
        number = self._next
        self._next = 1 - number
        if number == len(self._buffers):
            self._buffers.append((PinnedBuffer(self._device, BUFFER_BYTES), None))
        return number, *self._buffers[number]

    def mark(self, number: int) -> Event:
        """Note that what was queued last uses a buffer."""
        event = self.stream.record()
        self._buffers[number] = (self._buffers[number][0], event)
        return event

    def close(self) -> None:
        self.stream.close()
        for buffer, _ in self._buffers:
            buffer.close()


class Transfer:
    """Copies to a pool under way. Until `wait` has returned or raised, both of their ends belong to them.

    Attributes
    ----------
    event
        Done when they are: a stream that reads the blocks can `Stream.wait_for` it.
    """

    def __init__(self, pool: DevicePool, lane: _Lane, event: Event) -> None:
        self._pool = pool
        self._lane: _Lane | None = lane
        self.event = event

    def wait(self) -> None:
        """Wait for all of them. To be called once.

        Raises `DeviceError` when one has failed: none of the blocks counts as copied then. Also when they hang; the
        pool is lost then.
        """
        lane, self._lane = self._lane, None
        if lane is not None:
            self._pool._settle(lane, self.event)


class DevicePool:
    """A stretch of device memory. Safe to use from any thread.

    Parameters
    ----------
    device, address, nbytes
        Where it lies.

    Attributes
    ----------
    patience_s
        Seconds after which a copy hangs.
    """

    def __init__(self, device: Device, address: int, nbytes: int) -> None:
        self.device = device
        self.address = address
        self.nbytes = nbytes
        self.patience_s = COPY_PATIENCE_S
        self._arena: PinnedArena | None = None
        self._idle: list[_Lane] = []
        self._under_way = 0
        self._lock = Lock()
        self._lost = ""
        self._ours = False  # nobody else's: freed by `close`
        self._closed = False

    @classmethod
    def allocate(cls, device: Device, nbytes: int) -> DevicePool:
        """Allocate a pool. Blocks. Raises `DeviceError` when the device refuses the memory."""
        pool = cls(device, device.allocate(-(-nbytes // _GRAIN) * _GRAIN), nbytes)
        pool._ours = True
        return pool

    @classmethod
    def attach(cls, device: Device, handle: bytes, nbytes: int) -> DevicePool:
        """Attach a pool that another process has exported, for as long as this object lives. Raises `DeviceError`."""
        pool = cls(device, device.attach(handle), nbytes)
        weakref.finalize(pool, _detach, device, pool.address).atexit = False
        return pool

    @property
    def lost(self) -> str:
        """Why the pool is not used any more; empty while it is."""
        return self._lost

    @property
    def pinned_bytes(self) -> int:
        """Host memory that the device copies from directly."""
        return self._arena.pinned_bytes if self._arena is not None else 0

    def block(self, offset: int, nbytes: int) -> DeviceBlock:
        """Return a part of the pool, for kernels."""
        return DeviceBlock(self.device.name, self.address + offset, nbytes, self)

    def copies_from(self, memory: memoryview, piece_bytes: int = PIECE_BYTES) -> None:
        """Copy from this memory directly; it is page-locked piece by piece, and stays mapped until `close`."""
        self._arena = PinnedArena(self.device, memory, piece_bytes)

    def export(self) -> bytes:
        """Return the handle by which other processes of this machine can attach the pool. Raises `DeviceError`."""
        handle = self.device.export(self.address)
        self._ours = False
        return handle

    def copy_in(self, items: Iterable[tuple[int, Buffer]]) -> Transfer:
        """Begin to copy payloads to offsets of the pool.

        `items` is drawn from as copies are queued, so what it does for the next payload happens while the device copies
        the last. Payloads outside of `copies_from` are copied through buffers; the others must stay as they are until
        the transfer is over. When this raises, whatever it raises, nothing is under way any more.
        """
        lane = self._take()
        with self._orderly(lane):
            for offset, payload in items:
                self._queue(lane, self.address + offset, payload)
            event = lane.stream.record()
        return Transfer(self, lane, event)

    def copy_out(self, items: Iterable[tuple[int, memoryview]]) -> None:
        """Fill host memory from offsets of the pool, through buffers. Blocks.

        Not directly: the device never writes to memory that somebody else may come to own.
        """
        lane = self._take()
        behind: tuple[memoryview, PinnedBuffer, Event] | None = None
        with self._orderly(lane):
            for offset, out in items:
                for start in range(0, len(out), BUFFER_BYTES):
                    part = out[start : start + BUFFER_BYTES]
                    number, buffer, _ = lane.buffer()
                    lane.stream.copy([Copy(buffer.address, self.address + offset + start, len(part))])
                    event = lane.mark(number)
                    if behind is not None:
                        self._unload(*behind)
                    behind = (part, buffer, event)
            if behind is not None:
                self._unload(*behind)
            event = lane.stream.record()
        self._settle(lane, event)

    def close(self) -> None:
        """Give everything back. Idempotent.

        Memory that other processes may have attached, or that a copy may still touch, stays with the process: freeing
        it under them is undefined.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            lanes, self._idle = self._idle, []
            kept = bool(self._lost or self._under_way)
        if kept:
            return
        try:
            for lane in lanes:
                lane.close()
            if self._arena is not None:
                self._arena.close()
            if self._ours:
                self.device.free(self.address)
        except DeviceError as error:
            log.warning("%s", error)

    def _take(self) -> _Lane:
        with self._lock:
            if self._lost or self._closed:
                raise self._gone()
            self._under_way += 1
            if self._idle:
                return self._idle.pop()
        try:
            return _Lane(self.device)
        except BaseException:
            with self._lock:
                self._under_way -= 1
            raise

    def _gone(self) -> DeviceError:
        return DeviceError(
            f"{self.device.name} is not used any more: {self._lost or 'its pool is closed'}",
            remedy="look at the driver's log, then start anew",
        )

    def _queue(self, lane: _Lane, target: int, payload: Buffer) -> None:
        parts = self._arena.parts(address_of(payload), len(payload)) if self._arena is not None else None
        if parts is not None:
            copies = []
            for source, nbytes in parts:
                copies.append(Copy(target, source, nbytes))
                target += nbytes
            lane.stream.copy(copies)
            return
        data = np.frombuffer(payload, np.uint8)
        for start in range(0, len(data), BUFFER_BYTES):
            part = data[start : start + BUFFER_BYTES]
            number, buffer, used = lane.buffer()
            if used is not None:
                self._finish(used)
            np.frombuffer(buffer.data, np.uint8)[: len(part)] = part
            lane.stream.copy([Copy(target + start, buffer.address, len(part))])
            lane.mark(number)

    def _unload(self, out: memoryview, buffer: PinnedBuffer, event: Event) -> None:
        self._finish(event)
        np.frombuffer(out, np.uint8)[:] = np.frombuffer(buffer.data, np.uint8)[: len(out)]

    def _finish(self, event: Event) -> None:
        try:
            over = finished(event, 0.0 if self._lost else self.patience_s)
        except DeviceError as error:  # what fails on its way, not at once, takes the whole context with it
            self._lose(str(error))
            raise
        if not over:
            self._lose(f"a copy has not ended in {self.patience_s:g} seconds")
            raise self._gone()

    @contextlib.contextmanager
    def _orderly(self, lane: _Lane) -> Iterator[None]:
        """If something fails, let what is under way end first."""
        try:
            yield
        except BaseException:
            try:
                self._settle(lane, lane.stream.record())
            except DeviceError as error:
                self._lose(str(error))
            raise

    def _settle(self, lane: _Lane, event: Event) -> None:
        """Wait for the last event of a lane and give the lane back; not one whose work does not end well."""
        self._finish(event)
        with self._lock:
            self._under_way -= 1
            if not self._closed:
                self._idle.append(lane)
                return
        lane.close()

    def _lose(self, why: str) -> None:
        with self._lock:
            first, self._lost = not self._lost, self._lost or why
        if first:
            log.error("%s is not used any more: %s", self.device.name, why)


def _detach(device: Device, address: int) -> None:
    with contextlib.suppress(DeviceError):
        device.detach(address)
