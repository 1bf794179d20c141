"""The hot tier: the tier contract in ordinary memory, on a device, and on a GPU where there is one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.tier_suite import TierConformance, block, key_of, meta_of, read
from tests.storage.fake_cuda import FakeDevice
from tierkv.errors import DeviceError, InvalidRequest, TierFull, Unavailable
from tierkv.storage.device import Device, open_device
from tierkv.storage.hot import DeviceHotTier, HotTier, make_hot_tier
from tierkv.storage.shm import MappedSegment

SUPERBLOCK = 256 << 10


def gpu() -> Device:
    """The first GPU of this machine."""
    try:
        return open_device("cuda:0")
    except DeviceError as error:
        pytest.skip(str(error))


class TestHotTierInMemory(TierConformance):
    def make_tier(self, directory: Path) -> HotTier:
        return HotTier(self.capacity_bytes, segment_path=directory / "pool", superblock_bytes=SUPERBLOCK)


class TestHotTierOnADevice(TierConformance):
    def make_tier(self, directory: Path) -> DeviceHotTier:
        return DeviceHotTier(self.capacity_bytes, device=FakeDevice(), superblock_bytes=SUPERBLOCK)


@pytest.mark.gpu
class TestHotTierOnAGPU(TierConformance):
    def make_tier(self, directory: Path) -> DeviceHotTier:
        return DeviceHotTier(self.capacity_bytes, device=gpu(), superblock_bytes=SUPERBLOCK)


@pytest.fixture(params=["fake", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def hot(request: pytest.FixtureRequest) -> Iterator[DeviceHotTier]:
    device = FakeDevice() if request.param == "fake" else gpu()
    tier = DeviceHotTier(64 << 20, device=device, superblock_bytes=32 << 20)
    yield tier
    tier.close()


def test_device_memory_has_no_view(hot: DeviceHotTier) -> None:
    assert not hot.addressable
    with pytest.raises(DeviceError, match="write, read or device_block"):
        hot.view(hot.allocate(64), 64)


def test_a_slot_is_found_on_the_device(hot: DeviceHotTier) -> None:
    payload = block(1, 5000)
    hot.allocate(5000)
    slot = hot.allocate(5000)
    hot.write(slot, payload)
    found = hot.device_block(slot, 5000)
    assert (found.device, found.nbytes) == ("cuda:0", 5000)
    interface = found.__cuda_array_interface__
    assert (interface["shape"], interface["typestr"], interface["data"]) == ((5000,), "|u1", (found.address, False))
    if isinstance(hot.pool.device, FakeDevice):
        assert hot.pool.device.content(found.address, 5000) == payload
    else:
        torch = pytest.importorskip("torch")
        assert bytes(torch.as_tensor(found, device=found.device).cpu().numpy()) == payload
    with pytest.raises(InvalidRequest):
        hot.device_block(slot, slot.size + 1)


def test_blocks_larger_than_the_buffers_cross_whole(hot: DeviceHotTier) -> None:
    payload = block(1, (20 << 20) + 17)
    hot.put(key_of(1), payload, meta_of(payload))
    assert read(hot, key_of(1)) == payload


def test_a_batch_arrives_whole(hot: DeviceHotTier) -> None:
    payloads = [block(number, 20_000) for number in range(30)]
    slots = [hot.allocate(len(payload)) for payload in payloads]
    hot.copy_in(zip(slots, payloads, strict=True)).wait()
    for slot, payload in zip(slots, payloads, strict=True):
        out = bytearray(len(payload))
        hot.read(slot, memoryview(out))
        assert out == payload


def test_a_batch_that_does_not_fit_its_slot_is_refused(hot: DeviceHotTier) -> None:
    good, small = hot.allocate(5000), hot.allocate(5000)
    with pytest.raises(InvalidRequest):
        hot.copy_in([(good, block(1, 5000)), (small, block(2, small.size + 1))])
    assert hot.usable


def test_a_closed_pool_says_so(hot: DeviceHotTier) -> None:
    slot = hot.allocate(5000)
    hot.close()
    for use in (
        lambda: hot.device_block(slot, 10),
        lambda: hot.view(slot, 10),
        lambda: hot.read(slot, memoryview(bytearray(10))),
        lambda: hot.copy_in([(slot, b"x")]),
    ):
        with pytest.raises((Unavailable, DeviceError)):
            use()


def test_a_device_that_is_full_says_so() -> None:
    with pytest.raises(DeviceError, match="refuses 64 MiB"):
        DeviceHotTier(64 << 20, device=FakeDevice(total_bytes=32 << 20))


def test_it_tells_how_it_is() -> None:
    device = FakeDevice()
    tier = DeviceHotTier(1 << 20, device=device, superblock_bytes=SUPERBLOCK)
    assert {name: tier.describe()[name] for name in ("device", "pinned_bytes", "lost")} == {
        "device": "cuda:0",
        "pinned_bytes": 0,
        "lost": "",
    }
    device.break_down()
    with pytest.raises(DeviceError):
        tier.put(key_of(1), b"x" * 64, meta_of(b"x" * 64))
    assert tier.usage().blocks == 0
    assert not tier.has(key_of(1))
    tier.close()


def test_a_client_maps_a_pool_in_memory_like_the_arena(tmp_path: Path) -> None:
    tier = HotTier(1 << 20, segment_path=tmp_path / "pool")
    assert tier.addressable
    assert tier.path == tmp_path / "pool"
    slot = tier.allocate(5000)
    tier.write(slot, b"\x09" * 5000)
    with MappedSegment(tier.path, generation=tier.generation) as client:
        assert client.data_offset == tier.data_offset
        assert bytes(client.data[slot.offset : slot.offset + 5000]) == b"\x09" * 5000
    tier.close()
    assert not tier.path.exists()


def test_a_full_pool_in_memory_says_so(tmp_path: Path) -> None:
    tier = HotTier(1 << 20, segment_path=tmp_path / "pool")
    for _ in range(tier.slots_for(4096)):
        tier.allocate(4096)
    with pytest.raises(TierFull):
        tier.allocate(4096)
    tier.close()


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "meta", ""])
def test_a_device_that_is_not_there_is_named(tmp_path: Path, device: str) -> None:
    with pytest.raises(DeviceError, match=repr(device)):
        make_hot_tier(1 << 20, device=device, segment_path=tmp_path / "pool")
    assert not (tmp_path / "pool").exists()


def test_auto_takes_a_gpu_only_if_there_is_one(tmp_path: Path) -> None:
    try:
        expected = open_device("cuda:0").name
    except DeviceError:
        expected = "cpu"
    tier = make_hot_tier(1 << 20, device="auto", segment_path=tmp_path / "pool")
    assert tier.describe()["device"] == expected
    tier.close()


def test_a_pool_in_memory_needs_no_gpu_packages(tmp_path: Path) -> None:
    script = """
import sys
for name in ("torch", "cupy", "triton"):
    sys.modules[name] = None
from tierkv.errors import DeviceError
from tierkv.storage.hot import make_hot_tier
make_hot_tier(1 << 20, device="auto", segment_path=sys.argv[1]).close()
try:
    make_hot_tier(1 << 20, device="cuda:0", segment_path=sys.argv[1])
except DeviceError as error:
    print(error.remedy)
"""
    answer = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "pool")], capture_output=True, text=True, check=True
    )
    assert answer.stdout == "pip install 'tierkv-cache[gpu]', or use device: cpu\n"
