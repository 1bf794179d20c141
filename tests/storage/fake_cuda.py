"""A device that does what a GPU does, in ordinary memory and when the test says so.

It stands behind the door of `tierkv.storage.device`. Its addresses are real ones, so copies are real copies, made when
an event is asked for, at the earliest: `hold` keeps back those that touch what the test is about. What a GPU's runtime
would not notice, it does: host memory that is not page-locked, and two unfinished copies of which one writes what the
other reads or writes. `faults` says what it noticed.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import RLock

from tierkv.errors import DeviceError
from tierkv.storage.device import Copy, DeviceMemory, address_of

__all__ = ["FakeDevice"]

BUS_ID = "0000:FA:CE.0"


@dataclass(eq=False)
class _Step:
    """A copy, a mark, or waiting for a mark of another stream."""

    copy: Copy | None = None
    awaited: FakeEvent | None = None
    done: bool = False


class FakeEvent:
    def __init__(self, stream: FakeStream, step: _Step) -> None:
        self._stream = stream
        self._step = step

    def done(self) -> bool:
        return self._stream.device.run(self._stream, self._step)


@dataclass(eq=False)
class FakeStream:
    device: FakeDevice
    handle: int
    steps: deque[_Step] = field(default_factory=deque)
    closed: bool = False

    def copy(self, copies: Sequence[Copy]) -> None:
        for copy in copies:
            self.device.called("copy")
            self.device.queue(self, _Step(copy=copy))

    def record(self) -> FakeEvent:
        self.device.called("record")
        return FakeEvent(self, self.device.queue(self, _Step()))

    def wait_for(self, event: FakeEvent) -> None:
        self.device.queue(self, _Step(awaited=event))

    def close(self) -> None:
        self.closed = True


class FakeDevice:
    """See the module. One per process.

    Attributes
    ----------
    calls
        What was asked of it, in order, by name.
    faults
        What was done wrong.
    spoil
        The number of the copy, counted from the next as 1, whose bytes change on their way.
    pinned, allocated, attached
        Host memory, device memory, and that of other processes: address to bytes.
    """

    name = "cuda:0"
    bus_id = BUS_ID

    def __init__(self, total_bytes: int = 1 << 30) -> None:
        self.calls: list[str] = []
        self.faults: list[str] = []
        self.pinned: dict[int, int] = {}
        self.allocated: dict[int, int] = {}
        self.attached: dict[int, int] = {}
        self.streams: list[FakeStream] = []
        self.spoil = 0
        self._total = total_bytes
        self._maps: dict[int, tuple[mmap.mmap, int]] = {}
        self._failing: dict[str, deque[DeviceError | None]] = {}
        self._held = False
        self._broken = ""
        self._handles = itertools.count(1)
        self._lock = RLock()

    # What the test says.

    def fail(self, call: str, *, after: int = 0, times: int = 1) -> None:
        """Let the next calls of a kind fail, `after` so many that succeed."""
        error = DeviceError(f"{self.name} refuses {call}", remedy="this is a test")
        self._failing[call] = deque([None] * after + [error] * times)

    def hold(self) -> None:
        """Finish no copy from now on."""
        self._held = True

    def let_go(self) -> None:
        """Finish copies again."""
        self._held = False

    def break_down(self) -> None:
        """Let everything under way fail, and all that comes."""
        self._broken = f"{self.name} has fallen off the bus"

    @property
    def unfinished(self) -> list[Copy]:
        """Copies that are under way."""
        with self._lock:
            return [step.copy for stream in self.streams for step in stream.steps if step.copy is not None]

    # The door.

    def memory(self) -> DeviceMemory:
        held = sum(self.allocated.values())
        return DeviceMemory(self._total - held, self._total, held)

    def allocate(self, nbytes: int) -> int:
        self.called("allocate")
        if nbytes > self.memory().free_bytes:
            raise DeviceError(f"{self.name} refuses {nbytes >> 20} MiB", remedy="ask for less")
        descriptor = os.memfd_create("fake-cuda")
        os.ftruncate(descriptor, nbytes)
        return self._map(descriptor, nbytes, self.allocated)

    def free(self, address: int) -> None:
        self.called("free")
        self._check_idle(address, self.allocated.pop(address), "freed")
        del self._maps[address]  # the mapping goes with its last view

    def pin(self, address: int, nbytes: int) -> None:
        self.called("pin")
        if any(address < start + size and start < address + nbytes for start, size in self.pinned.items()):
            raise DeviceError("this memory is page-locked already")
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        self.called("unpin")
        self._check_idle(address, self.pinned.pop(address), "unlocked")

    def stream(self) -> FakeStream:
        self.called("stream")
        stream = FakeStream(self, next(self._handles))
        self.streams.append(stream)
        return stream

    def export(self, address: int) -> bytes:
        self.called("export")
        return f"/proc/{os.getpid()}/fd/{self._maps[address][1]} {self.allocated[address]}".encode().ljust(64, b"\0")

    def attach(self, handle: bytes) -> int:
        self.called("attach")
        path, _, nbytes = handle.rstrip(b"\0").decode().partition(" ")
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            raise DeviceError(f"{self.name} cannot open memory of another process: {error}") from None
        return self._map(descriptor, int(nbytes), self.attached)

    def detach(self, address: int) -> None:
        self.called("detach")
        self._check_idle(address, self.attached.pop(address), "detached")
        del self._maps[address]

    # The machinery.

    def called(self, call: str) -> None:
        with self._lock:
            self.calls.append(call)
            if self._broken:
                raise DeviceError(self._broken)
            failing = self._failing.get(call)
            error = failing.popleft() if failing else None
            if error is not None:
                raise error

    def queue(self, stream: FakeStream, step: _Step) -> _Step:
        with self._lock:
            if step.copy is not None:
                self._inspect(stream, step.copy)
            stream.steps.append(step)
            return step

    def run(self, stream: FakeStream, upto: _Step) -> bool:
        """Carry a stream's steps out, as far as they may be, up to one; say whether that is done."""
        with self._lock:
            if self._broken:
                raise DeviceError(self._broken)
            while not upto.done and not self._held:
                step = stream.steps[0]
                if step.awaited is not None and not step.awaited.done():
                    return False
                if step.copy is not None:
                    ctypes.memmove(step.copy.target, step.copy.source, step.copy.nbytes)
                    self.spoil -= 1
                    if not self.spoil:
                        ctypes.memset(step.copy.target + step.copy.nbytes // 2, 0x5A, 3)
                step.done = True
                stream.steps.popleft()
            return upto.done

    def content(self, address: int, nbytes: int) -> bytes:
        """Return what device memory holds."""
        return ctypes.string_at(address, nbytes)

    def _map(self, descriptor: int, nbytes: int, known: dict[int, int]) -> int:
        mapping = mmap.mmap(descriptor, nbytes)
        address = address_of(memoryview(mapping))
        self._maps[address] = (mapping, descriptor)
        known[address] = nbytes
        return address

    def _inspect(self, stream: FakeStream, copy: Copy) -> None:
        for address in (copy.target, copy.source):
            if not any(
                _within(address, copy.nbytes, memory) for memory in (self.allocated, self.attached, self.pinned)
            ):
                self.faults.append(f"memory that is neither the device's nor page-locked: {copy}")
        for other in self.streams:
            for step in other.steps if other is not stream else ():
                if step.copy is not None and _conflict(step.copy, copy):
                    self.faults.append(f"{copy} while {step.copy} is under way")

    def _check_idle(self, address: int, nbytes: int, what: str) -> None:
        for copy in self.unfinished:
            if _overlap(address, nbytes, copy.source, copy.nbytes) or _overlap(
                address, nbytes, copy.target, copy.nbytes
            ):
                self.faults.append(f"memory is {what} under {copy}")


def _within(address: int, nbytes: int, memory: dict[int, int]) -> bool:
    return any(start <= address and address + nbytes <= start + size for start, size in list(memory.items()))


def _overlap(one: int, nbytes: int, other: int, length: int) -> bool:
    return one < other + length and other < one + nbytes


def _conflict(one: Copy, other: Copy) -> bool:
    return (
        _overlap(one.target, one.nbytes, other.target, other.nbytes)
        or _overlap(one.target, one.nbytes, other.source, other.nbytes)
        or _overlap(one.source, one.nbytes, other.target, other.nbytes)
    )
