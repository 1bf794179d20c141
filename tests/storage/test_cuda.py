"""The door to the CUDA runtime, over a stand-in for CuPy's wrapper of it: which calls it makes, on which device.

Nothing here shows that a GPU does what is asked of it; the tests marked `gpu` do.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tierkv.errors import DeviceError
from tierkv.storage.cuda import CudaDevice
from tierkv.storage.device import Copy, address_of, finished, open_device
from tierkv.storage.device_pool import DevicePool

BUS_IDS = ("0000:17:00.0", "0000:3B:00.0")


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError{status}")
        self.status = status


class Runtime(ModuleType):
    """Keeps calls with the current device of their thread. `status`: what the next call of a name ends with."""

    streamNonBlocking, eventDisableTiming, memcpyDefault = 1, 2, 4  # noqa: N815

    def __init__(self) -> None:
        super().__init__("cupy.cuda.runtime")
        self.calls: list[tuple[str, int, tuple[Any, ...]]] = []
        self.status: dict[str, int] = {}
        self.here = threading.local()

    def getDevice(self) -> int:  # noqa: N802
        return getattr(self.here, "device", 0)

    def setDevice(self, index: int) -> None:  # noqa: N802
        self.here.device = index

    def getDeviceCount(self) -> int:  # noqa: N802
        self._end("getDeviceCount")
        return len(BUS_IDS)

    def deviceGetPCIBusId(self, index: int) -> str:  # noqa: N802
        return BUS_IDS[index]

    def deviceGetByPCIBusId(self, bus_id: str) -> int:  # noqa: N802
        if bus_id not in BUS_IDS:
            raise CUDARuntimeError(10)
        return BUS_IDS.index(bus_id)

    def memGetInfo(self) -> tuple[int, int]:  # noqa: N802
        self._end("memGetInfo")
        return 60, 100

    def eventQuery(self, event: int) -> int:  # noqa: N802
        return self.status.pop("eventQuery", 0)

    def ipcGetMemHandle(self, address: int) -> bytes:  # noqa: N802
        return address.to_bytes(64, "little")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any) -> int:
            self._end(name)
            self.calls.append((name, self.getDevice(), args))
            return 0x1000 * len(self.calls)

        return call

    def named(self, name: str) -> list[tuple[int, tuple[Any, ...]]]:
        return [(device, args) for called, device, args in self.calls if called == name]

    def _end(self, name: str) -> None:
        status = self.status.pop(name, 0)
        if status:
            raise CUDARuntimeError(status)


class Driver(ModuleType):
    """`used`: whether the thread has a context."""

    used = True

    def ctxGetCurrent(self) -> int:  # noqa: N802
        return int(self.used)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    cuda = ModuleType("cupy.cuda")
    runtime = Runtime()
    cuda.runtime, cuda.driver = runtime, Driver("cupy.cuda.driver")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    yield runtime
    assert runtime.status == {}


@pytest.mark.parametrize(
    ("name", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("0000:17:00.0", 0), ("0000:3B:00.0", 1)]
)
def test_a_device_has_a_name_here_and_one_everywhere(runtime: Runtime, name: str, index: int) -> None:
    device = CudaDevice(name)
    assert (device.name, device.index, device.bus_id) == (f"cuda:{index}", index, BUS_IDS[index])


@pytest.mark.parametrize("name", ["cuda:2", "0000:99:00.0"])
def test_a_device_that_is_not_there_is_an_error(runtime: Runtime, name: str) -> None:
    with pytest.raises(DeviceError, match=name):
        open_device(name)


def test_a_missing_driver_is_an_error_with_a_remedy(runtime: Runtime) -> None:
    runtime.status["getDeviceCount"] = 35
    with pytest.raises(DeviceError, match="cudaError35") as caught:
        open_device("cuda:0")
    assert "nvidia-smi" in caught.value.remedy


def test_a_missing_cupy_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match="needs CuPy") as caught:
        open_device("cuda:0")
    assert "pip install" in caught.value.remedy


def test_memory_is_counted(runtime: Runtime) -> None:
    device = CudaDevice("cuda:1")
    address = device.allocate(1 << 20)
    assert runtime.named("malloc") == [(1, (1 << 20,))]
    assert device.memory().held_bytes == 1 << 20
    assert (device.memory().free_bytes, device.memory().total_bytes) == (60, 100)
    device.free(address)
    assert device.memory().held_bytes == 0


def test_a_full_device_says_what_to_do(runtime: Runtime) -> None:
    runtime.status["malloc"] = 2
    with pytest.raises(DeviceError, match="cuda:0 refuses 64 MiB") as caught:
        CudaDevice("cuda:0").allocate(64 << 20)
    assert "hot.capacity" in caught.value.remedy


@pytest.mark.parametrize("used", [True, False])
def test_calls_are_made_on_the_device_and_the_callers_is_put_back(runtime: Runtime, used: bool) -> None:
    sys.modules["cupy.cuda"].driver.used = used  # type: ignore[attr-defined]
    device = CudaDevice("cuda:1")
    assert runtime.getDevice() == 0
    device.pin(4096, 8192)
    assert runtime.named("hostRegister") == [(1, (4096, 8192, 1))]
    assert runtime.getDevice() == (0 if used else 1)  # a thread that has no device yet gets no other one set up


def test_the_callers_device_is_put_back_after_a_failure(runtime: Runtime) -> None:
    device = CudaDevice("cuda:1")
    runtime.status["hostUnregister"] = 1
    with pytest.raises(DeviceError, match="cuda:1 cannot unlock"):
        device.unpin(4096)
    assert runtime.getDevice() == 0


def test_copies_are_queued_in_their_order_on_one_stream(runtime: Runtime) -> None:
    device = CudaDevice("cuda:1")
    stream = device.stream()
    assert runtime.named("streamCreateWithFlags") == [(1, (1,))]
    stream.copy([Copy(1, 2, 3), Copy(4, 5, 6)])
    assert runtime.named("memcpyAsync") == [(1, (1, 2, 3, 4, stream.handle)), (1, (4, 5, 6, 4, stream.handle))]
    event = stream.record()
    assert [args[1] for _, args in runtime.named("eventRecord")] == [stream.handle]
    other = device.stream()
    other.wait_for(event)
    assert [args[0] for _, args in runtime.named("streamWaitEvent")] == [other.handle]
    stream.close()
    stream.close()
    assert [args for _, args in runtime.named("streamDestroy")] == [(stream.handle,)]
    del event
    assert len(runtime.named("eventDestroy")) == 1


def test_an_event_is_done_under_way_or_failed(runtime: Runtime) -> None:
    event = CudaDevice("cuda:0").stream().record()
    assert event.done()
    runtime.status["eventQuery"] = 600
    assert not event.done()
    runtime.status["eventQuery"] = 719
    with pytest.raises(DeviceError, match="CUDA error 719"):
        event.done()
    runtime.status["eventQuery"] = 600
    assert finished(event, 10.0)


def test_memory_of_another_process_is_attached_for_as_long_as_it_is_used(runtime: Runtime) -> None:
    device = CudaDevice("cuda:0")
    handle = device.export(0x5000)
    assert len(handle) == 64
    pool = DevicePool.attach(device, handle, 1 << 20)
    assert runtime.named("ipcOpenMemHandle") == [(0, (handle,))]
    block = pool.block(4096, 100)
    del pool
    assert not runtime.named("ipcCloseMemHandle")
    address = block.address - 4096
    del block
    assert runtime.named("ipcCloseMemHandle") == [(0, (address,))]


@pytest.mark.gpu
def test_bytes_go_to_a_gpu_and_come_back() -> None:
    try:
        device = open_device("cuda:0")
    except DeviceError as error:
        pytest.skip(str(error))
    pool = DevicePool.allocate(device, 8 << 20)
    payload = bytes(range(256)) * 4096
    pool.copies_from(memoryview(bytearray(1 << 20)))
    transfer = pool.copy_in([(1 << 20, payload)])
    transfer.wait()
    out = memoryview(bytearray(len(payload)))
    pool.copy_out([(1 << 20, out)])
    assert out == payload
    assert device.memory().held_bytes == 8 << 20
    assert address_of(out) != 0
    pool.close()
    assert device.memory().held_bytes == 0
