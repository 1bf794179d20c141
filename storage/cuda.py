"""The one door to the CUDA runtime: `tierkv.storage.device.Device` on CuPy's thin wrapper of it.

CuPy is loaded when a device is opened, not before. Every call makes its device the thread's current one and puts the
caller's back, except in a thread that has used no device yet: putting device 0 back there would set it up for nothing.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any

from tierkv.errors import DeviceError
from tierkv.storage.device import Copy, DeviceMemory, Event, Stream

__all__ = ["CudaDevice"]

_NAME = re.compile(r"cuda(?::(?P<index>\d{1,3}))?")
_BUS_ID = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]")
_NOT_READY = 600  # cudaErrorNotReady, the one status that CuPy's eventQuery returns of work under way
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device
_CHECK = "check the driver with nvidia-smi, or use device: cpu"


class CudaDevice:
    """A GPU in this process. Raises `DeviceError`, see `tierkv.storage.device.open_device`."""

    def __init__(self, name: str) -> None:
        self._cuda, self._driver = _runtime(name)
        with _explained(f"{name!r} cannot be used"):
            self.index = self._find(name)
            self.bus_id = str(self._cuda.deviceGetPCIBusId(self.index))
        self.name = f"cuda:{self.index}"
        self._held: dict[int, int] = {}
        self._lock = Lock()

    def memory(self) -> DeviceMemory:
        with self._current("cannot say how much memory it has"):
            free, total = self._cuda.memGetInfo()
        with self._lock:
            return DeviceMemory(int(free), int(total), sum(self._held.values()))

    def allocate(self, nbytes: int) -> int:
        with self._current(f"refuses {nbytes >> 20} MiB"):
            address = int(self._cuda.malloc(nbytes))
        with self._lock:
            self._held[address] = nbytes
        return address

    def free(self, address: int) -> None:
        with self._current("cannot free memory"):
            self._cuda.free(address)
        with self._lock:
            del self._held[address]

    def pin(self, address: int, nbytes: int) -> None:
        with self._current(f"cannot page-lock {nbytes >> 20} MiB of host memory"):
            self._cuda.hostRegister(address, nbytes, _PORTABLE)

    def unpin(self, address: int) -> None:
        with self._current("cannot unlock host memory"):
            self._cuda.hostUnregister(address)

    def stream(self) -> Stream:
        return _CudaStream(self)

    def export(self, address: int) -> bytes:
        with self._current("cannot share memory with other processes"):
            return bytes(self._cuda.ipcGetMemHandle(address))

    def attach(self, handle: bytes) -> int:
        with self._current("cannot open memory of another process"):
            return int(self._cuda.ipcOpenMemHandle(handle))

    def detach(self, address: int) -> None:
        with self._current("cannot close memory of another process"):
            self._cuda.ipcCloseMemHandle(address)

    def _find(self, name: str) -> int:
        if _BUS_ID.fullmatch(name):
            return int(self._cuda.deviceGetByPCIBusId(name))
        match = _NAME.fullmatch(name)
        assert match is not None
        index, count = int(match["index"] or 0), int(self._cuda.getDeviceCount())
        if index >= count:
            raise DeviceError(f"there is no device {name!r}", remedy=f"{count} CUDA devices are visible")
        return index

    @contextlib.contextmanager
    def _current(self, failure: str) -> Iterator[None]:
        """Make calls on this device; what fails in them is explained."""
        with _explained(f"{self.name} {failure}"):
            before = int(self._cuda.getDevice())
            if before == self.index:
                yield
                return
            used = bool(self._driver.ctxGetCurrent())
            self._cuda.setDevice(self.index)
            try:
                yield
            finally:
                if used:
                    self._cuda.setDevice(before)


class _CudaStream:
    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._cuda = cuda = device._cuda
        with device._current("gives no stream"):
            self.handle = int(cuda.streamCreateWithFlags(cuda.streamNonBlocking))
        # Destroying does not wait: the runtime gives the stream up when its work is over.
        self.close = weakref.finalize(self, _destroy, device, cuda.streamDestroy, self.handle)
        self.close.atexit = False

    def copy(self, copies: Sequence[Copy]) -> None:
        cuda, handle, kind = self._cuda, self.handle, self._cuda.memcpyDefault
        with self._device._current("refuses a copy"):
            for target, source, nbytes in copies:
                cuda.memcpyAsync(target, source, nbytes, kind, handle)

    def record(self) -> Event:
        return _CudaEvent(self._device, self.handle)

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        with self._device._current("refuses to wait for an event"):
            self._cuda.streamWaitEvent(self.handle, event.handle)


class _CudaEvent:
    def __init__(self, device: CudaDevice, stream: int) -> None:
        self._device = device
        cuda = device._cuda
        with device._current("gives no event"):
            self.handle = int(cuda.eventCreateWithFlags(cuda.eventDisableTiming))
            weakref.finalize(self, _destroy, device, cuda.eventDestroy, self.handle).atexit = False
            cuda.eventRecord(self.handle, stream)

    def done(self) -> bool:
        with self._device._current("cannot say whether copies are over"):
            status = int(self._device._cuda.eventQuery(self.handle))
        if status in (0, _NOT_READY):
            return status == 0
        name = self._device.name
        raise DeviceError(f"copies on {name} have failed with CUDA error {status}", remedy="look at the driver's log")


def _destroy(device: CudaDevice, destroy: Any, handle: int) -> None:
    with contextlib.suppress(DeviceError), device._current("cannot clean up"):
        destroy(handle)


def _runtime(name: str) -> tuple[Any, Any]:
    """Load CuPy and return its wrappers of the runtime and of the driver."""
    if not (_NAME.fullmatch(name) or _BUS_ID.fullmatch(name)):
        raise DeviceError(f"unknown device {name!r}", remedy="use cpu, cuda:N or auto")
    try:
        from cupy.cuda import driver, runtime
    except ImportError as error:  # CuPy's own errors of a broken installation are ImportErrors, too
        raise DeviceError(
            f"{name!r} needs CuPy: {error}", remedy="pip install 'tierkv-cache[gpu]', or use device: cpu"
        ) from error
    return runtime, driver


@contextlib.contextmanager
def _explained(failure: str) -> Iterator[None]:
    """Turn what CuPy raises, all of it RuntimeErrors, into `DeviceError`."""
    try:
        yield
    except DeviceError:
        raise
    except RuntimeError as error:
        full = getattr(error, "status", None) == _OUT_OF_MEMORY
        remedy = "configure a smaller hot.capacity, or leave the engine less memory" if full else _CHECK
        raise DeviceError(f"{failure}: {error}", remedy=remedy) from error
