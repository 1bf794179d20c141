"""The contract of a GPU: the whole of what the cache may ask of a device runtime.

    device = open_device("cuda:0")
    pool = device.allocate(1 << 30)
    stream = device.stream()
    stream.copy([Copy(pool, address_of(payload), len(payload))])
    event = stream.record()
    finished(event, 5.0)

Addresses are plain integers, of the device or of the host. Copies are asynchronous: until an event recorded after them
is done, both ends belong to the device. Whatever fails (no driver, no such device, no CuPy, no memory, a copy) raises
`DeviceError`, nothing else. All methods are safe to call from any thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

__all__ = ["Copy", "Device", "DeviceBlock", "DeviceMemory", "Event", "Stream", "address_of", "finished", "open_device"]

_SPINS = 20
_FIRST_NAP_S, _LONGEST_NAP_S = 20e-6, 1e-3


class Copy(NamedTuple):
    """`nbytes` bytes from address `source` to address `target`, each on the device or on the host."""

    target: int
    source: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device in bytes: what is free, what there is, and what was allocated through this door."""

    free_bytes: int
    total_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """Bytes on a device, for whoever has kernels: ``torch.as_tensor(block, device=block.device)``.

    Attributes
    ----------
    device
        Its name in this process, such as ``cuda:0``.
    address, nbytes
        Where they lie in device memory.
    owner
        What keeps the memory mapped: it stays so as long as this object lives, its content as long as the lease.
    """

    device: str
    address: int
    nbytes: int
    owner: object = None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The bytes as a one-dimensional uint8 array (CUDA Array Interface, version 3). Nothing is pending on them."""
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "strides": None}


class Event(Protocol):
    """A mark in a stream."""

    def done(self) -> bool:
        """Say whether everything before it on its stream is over. Does not wait. Raises `DeviceError` if it failed."""


class Stream(Protocol):
    """A queue of copies, which run in their order and beside those of other streams."""

    @property
    def handle(self) -> int:
        """The runtime's own handle (`cudaStream_t`), for kernels that are to run on this stream."""

    def copy(self, copies: Sequence[Copy]) -> None:
        """Queue copies. Does not wait where host memory is page-locked.

        When it raises, those before the one that failed may be under way.
        """

    def record(self) -> Event:
        """Return an event that is done when everything queued so far is over."""

    def wait_for(self, event: Event) -> None:
        """Let what is queued from now on begin after an event, of this or another stream of the device."""

    def close(self) -> None:
        """Give the stream up when all of it is over. Idempotent."""


class Device(Protocol):
    """One GPU."""

    @property
    def name(self) -> str:
        """Its name in this process, such as ``cuda:0``."""

    @property
    def bus_id(self) -> str:
        """Its PCI bus id, such as ``0000:3B:00.0``: the same in every process, whatever devices they can see."""

    def memory(self) -> DeviceMemory:
        """Report memory."""

    def allocate(self, nbytes: int) -> int:
        """Return the address of so many bytes of device memory, which can be shared by `export`. Blocks."""

    def free(self, address: int) -> None:
        """Give memory back that `allocate` returned. Blocks until the device is idle."""

    def pin(self, address: int, nbytes: int) -> None:
        """Page-lock host memory, which stays mapped until `unpin`, for the device. Blocks for some 0.1 s per GB."""

    def unpin(self, address: int) -> None:
        """Undo `pin`."""

    def stream(self) -> Stream:
        """Return a new stream that does not wait for the default one."""

    def export(self, address: int) -> bytes:
        """Return a handle by which other processes of this machine can `attach` memory that `allocate` returned."""

    def attach(self, handle: bytes) -> int:
        """Return the address in this process of memory that another process exported."""

    def detach(self, address: int) -> None:
        """Undo `attach`."""


def open_device(name: str) -> Device:
    """Open a GPU by its name, ``cuda:N`` or ``cuda`` (N is 0), or by its PCI bus id.

    Loads CuPy, the one door to the CUDA runtime. Raises `DeviceError` when that is missing, there is no driver or no
    such device.
    """
    from tierkv.storage.cuda import CudaDevice

    return CudaDevice(name)


def address_of(memory: bytes | bytearray | memoryview) -> int:
    """Return the address of a buffer's first byte, valid for as long as the buffer lives."""
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0]) if len(memory) else 0


def finished(event: Event, timeout_s: float) -> bool:
    """Wait for an event, at most `timeout_s` seconds; say whether it is done. Raises as `Event.done`."""
    deadline = time.monotonic() + timeout_s
    nap, spins = _FIRST_NAP_S, 0
    while not event.done():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        spins += 1
        if spins < _SPINS:
            time.sleep(0)
        else:
            time.sleep(min(nap, left))
            nap = min(2 * nap, _LONGEST_NAP_S)
    return True
