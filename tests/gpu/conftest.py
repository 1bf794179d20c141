"""The door to the CUDA runtime: a real one where there is a GPU, and always its stand-in, so that tests cannot rot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.storage.fake_cuda import FakeDevice
from tierkv.errors import DeviceError
from tierkv.storage.device import DeviceBlock, open_device

DEVICES = ["fake", pytest.param("cuda:0", marks=pytest.mark.gpu)]
Content = Callable[[DeviceBlock], bytes]


def gpu() -> Any:
    """The first GPU, for the door and for torch."""
    try:
        door = open_device("cuda:0")
    except DeviceError as error:
        pytest.skip(str(error))
    if not torch.cuda.is_available():
        pytest.skip("torch cannot use the GPU")
    return door


@pytest.fixture(params=DEVICES)
def door(request: pytest.FixtureRequest) -> Iterator[Any]:
    door = FakeDevice() if request.param == "fake" else gpu()
    held = door.memory().held_bytes
    yield door
    assert door.memory().held_bytes == held
    if isinstance(door, FakeDevice):
        assert door.faults == []


@pytest.fixture
def cuda() -> torch.device:
    """A GPU for tests of which nothing is left without one."""
    gpu()
    return torch.device("cuda:0")


@pytest.fixture
def content(door: Any) -> Content:
    return reader(door)


def reader(door: Any) -> Content:
    """Return what reads device memory, as whoever has kernels would."""
    if isinstance(door, FakeDevice):
        return lambda block: door.content(block.address, block.nbytes)
    return lambda block: bytes(torch.as_tensor(block, device=block.device).cpu().numpy())
