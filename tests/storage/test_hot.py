"""The hot tier: the tier contract on every device there is, and pages as tensors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.tier_suite import TierConformance, block, key_of, meta_of, read
from tierkv.errors import DeviceError, InvalidRequest, Unavailable
from tierkv.storage.hot import HotTier
from tierkv.storage.shm import MappedSegment

torch = pytest.importorskip("torch")
SUPERBLOCK = 256 << 10
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class TestHotTierInMemory(TierConformance):
    def make_tier(self, directory: Path) -> HotTier:
        return HotTier(self.capacity_bytes, device="cpu", segment_path=directory / "pool", superblock_bytes=SUPERBLOCK)


@on_gpu
class TestHotTierOnGPU(TierConformance):
    def make_tier(self, directory: Path) -> HotTier:
        return HotTier(
            self.capacity_bytes, device="cuda:0", segment_path=directory / "pool", superblock_bytes=SUPERBLOCK
        )


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=on_gpu)])
def hot(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HotTier]:
    tier = HotTier(1 << 20, device=request.param, segment_path=tmp_path / "pool", superblock_bytes=SUPERBLOCK)
    yield tier
    tier.close()


def test_a_slot_is_a_tensor_in_place(hot: HotTier) -> None:
    payload = block(1, 5000)
    hot.allocate(5000)
    slot = hot.allocate(5000)
    hot.write(slot, payload)
    tensor = hot.tensor(slot, 5000)
    assert (tensor.dtype, tensor.device) == (torch.uint8, hot.device)
    assert bytes(tensor.cpu().numpy()) == payload
    tensor.view(torch.bfloat16).fill_(1.0)
    out = bytearray(5000)
    hot.read(slot, memoryview(out))
    assert out == b"\x80\x3f" * 2500


def test_pages_find_every_slot_of_their_size(hot: HotTier) -> None:
    length = 20_000
    slots = [hot.allocate(length) for _ in range(30)]
    pages = hot.pages(slots[0].size)
    assert pages.shape == (4, SUPERBLOCK // 20_480, 20_480)
    for number, slot in enumerate(slots):
        hot.write(slot, block(number, length))
    for number, slot in enumerate(slots):
        page = pages[slot.offset // SUPERBLOCK, slot.offset % SUPERBLOCK // slot.size]
        assert bytes(page[:length].cpu().numpy()) == block(number, length)
    for slot_size in (0, SUPERBLOCK + 4096):
        with pytest.raises(InvalidRequest):
            hot.pages(slot_size)


def test_a_closed_pool_says_so(hot: HotTier) -> None:
    slot = hot.allocate(5000)
    tensor = hot.tensor(slot, 5000)
    tensor.fill_(7)
    hot.close()
    for use in (lambda: hot.tensor(slot, 10), lambda: hot.pages(4096), lambda: hot.view(slot, 10)):
        with pytest.raises(Unavailable):
            use()
    assert int(tensor.sum()) == 35_000


@on_gpu
def test_gpu_memory_has_no_view_and_no_file(tmp_path: Path) -> None:
    tier = HotTier(1 << 20, device="cuda:0", segment_path=tmp_path / "pool")
    assert not tier.addressable
    with pytest.raises(DeviceError, match="write, read or tensor"):
        tier.view(tier.allocate(64), 64)
    assert (tier.path, tier.generation, tier.data_offset) == (None, 0, 0)
    assert not (tmp_path / "pool").exists()
    tier.close()


@on_gpu
def test_blocks_larger_than_the_staging_buffer_cross_to_the_gpu(tmp_path: Path) -> None:
    tier = HotTier(64 << 20, device="cuda:0", segment_path=tmp_path / "pool", superblock_bytes=32 << 20)
    payload = block(1, (20 << 20) + 17)
    tier.put(key_of(1), payload, meta_of(payload))
    assert read(tier, key_of(1)) == payload
    tier.close()


def test_a_client_maps_a_pool_in_memory_like_the_arena(tmp_path: Path) -> None:
    tier = HotTier(1 << 20, device="cpu", segment_path=tmp_path / "pool")
    assert tier.addressable
    assert tier.path == tmp_path / "pool"
    slot = tier.allocate(5000)
    tier.tensor(slot, 5000).fill_(9)
    with MappedSegment(tier.path, generation=tier.generation) as client:
        assert client.data_offset == tier.data_offset
        assert bytes(client.data[slot.offset : slot.offset + 5000]) == b"\x09" * 5000
    tier.close()
    assert not tier.path.exists()


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "meta", ""])
def test_a_device_that_is_not_there_is_named(tmp_path: Path, device: str) -> None:
    with pytest.raises(DeviceError, match=repr(device)):
        HotTier(1 << 20, device=device, segment_path=tmp_path / "pool")
    assert not (tmp_path / "pool").exists()


def test_auto_takes_the_gpu_only_if_there_is_one(tmp_path: Path) -> None:
    tier = HotTier(1 << 20, device="auto", segment_path=tmp_path / "pool")
    assert tier.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    tier.close()


def test_torch_is_loaded_by_the_pool_alone_and_missed_with_a_remedy(tmp_path: Path) -> None:
    script = """
import sys
from tierkv.errors import DependencyMissing
from tierkv.storage.hot import HotTier
assert "torch" not in sys.modules
sys.modules["torch"] = None
try:
    HotTier(1 << 20, device="cpu", segment_path=sys.argv[1])
except DependencyMissing as error:
    print(error.remedy)
"""
    answer = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "pool")], capture_output=True, text=True, check=True
    )
    assert answer.stdout == "pip install 'tierkv-cache[gpu]'\n"
