"""Kernels on memory of the door, in order with its copies. What they compute is tested in tests/kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.conformance.tier_suite import block, key_of, meta_of
from tests.gpu.conftest import gpu
from tierkv.kernels.paged_caches import PagedCaches
from tierkv.kernels.pages import gather_blocks, scatter_blocks
from tierkv.storage.device import Copy, finished
from tierkv.storage.hot import DeviceHotTier
from tierkv.storage.landing import device_sums
from tierkv.storage.pinning import PinnedBuffer
from tierkv.storage.tier import checksum

pytestmark = pytest.mark.gpu

LAYERS, PAGES, TOKENS, HEADS, DIM = 4, 32, 16, 8, 128
SHAPE = (LAYERS, 2, 4 * TOKENS, HEADS, DIM)
NBYTES = 2 * torch.Size(SHAPE).numel()


@pytest.fixture
def hot(cuda: torch.device) -> Iterator[DeviceHotTier]:
    hot = DeviceHotTier(64 << 20, device=gpu())
    yield hot
    hot.close()


@pytest.fixture
def caches(cuda: torch.device) -> list[torch.Tensor]:
    made = {"dtype": torch.bfloat16, "device": cuda}
    return [torch.randn(2, PAGES, TOKENS, HEADS, DIM, **made) for _ in range(LAYERS)]


@pytest.mark.parametrize("length", [241, 1024, 5000, 262_144, 2_097_152 + 8])
def test_sums_on_the_device_are_those_of_the_host(hot: DeviceHotTier, length: int) -> None:
    sums = device_sums()
    assert sums is not None
    assert hot.verify_landings(sums)
    payloads = [block(number, length) for number in range(5)]
    slots = [hot.allocate(length) for _ in payloads]
    hot.copy_in(zip(slots, payloads, strict=True)).wait()
    assert list(hot.landed([(slot, length) for slot in slots])) == [checksum(payload) for payload in payloads]
    hot.write(slots[2], payloads[2][:-1] + bytes([payloads[2][-1] ^ 1]))
    assert hot.landed([(slots[2], length)]) != [checksum(payloads[2])]


def test_engines_pages_are_gathered_into_slots_and_scattered_from_them(
    hot: DeviceHotTier, caches: list[torch.Tensor]
) -> None:
    paged = PagedCaches.of(caches, "2PNHD")
    table = torch.randperm(PAGES)[:8].view(2, 4)
    slots = [hot.allocate(NBYTES) for _ in range(2)]
    rooms = [torch.as_tensor(hot.device_block(slot, NBYTES), device="cuda:0") for slot in slots]
    payloads = [room.view(torch.bfloat16).view(SHAPE) for room in rooms]
    gather_blocks(paged, table, payloads, order="NHD")
    torch.cuda.synchronize()
    expected = [torch.empty(SHAPE, dtype=torch.bfloat16) for _ in slots]
    on_host = PagedCaches.of([cache.cpu() for cache in caches], "2PNHD")
    gather_blocks(on_host, table, expected, order="NHD")
    for slot, payload in zip(slots, expected, strict=True):
        out = bytearray(NBYTES)
        hot.read(slot, memoryview(out))
        assert out == payload.view(torch.uint8).numpy().tobytes()
    fresh = [torch.zeros_like(cache) for cache in caches]
    scatter_blocks(payloads, table, PagedCaches.of(fresh, "2PNHD"), order="NHD")
    for cache, found in zip(caches, fresh, strict=True):
        pages = table.flatten().to(cache.device)
        assert torch.equal(found[:, pages].view(torch.int16), cache[:, pages].view(torch.int16))
        rest = torch.tensor(sorted(set(range(PAGES)) - set(table.flatten().tolist())), device=cache.device)
        assert not found[:, rest].any()


def test_a_kernel_on_the_doors_stream_comes_between_its_copies(hot: DeviceHotTier, caches: list[torch.Tensor]) -> None:
    door = hot.pool.device
    stream = door.stream()
    buffer = PinnedBuffer(door, NBYTES)
    slot = hot.allocate(NBYTES)
    found = hot.device_block(slot, NBYTES)
    payload = torch.as_tensor(found, device="cuda:0").view(torch.bfloat16).view(SHAPE)
    paged, table = PagedCaches.of(caches, "2PNHD"), torch.arange(4)[None]
    torch.cuda.synchronize()
    for turn in range(4):
        caches[0].fill_(turn)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle)):
            gather_blocks(paged, table, [payload], order="NHD")
        stream.copy([Copy(buffer.address, found.address, NBYTES)])
        assert finished(stream.record(), 20.0)
        first = torch.frombuffer(buffer.data, dtype=torch.bfloat16)[: 2 * 4 * TOKENS * HEADS * DIM]
        assert bool((first == turn).all())
    stream.close()
    buffer.close()


def test_a_gpu_writes_payloads_to_page_locked_memory(caches: list[torch.Tensor]) -> None:
    paged, table = PagedCaches.of(caches, "2PNHD"), torch.tensor([[3, 1, 2, -1]])
    out = torch.empty(1, *SHAPE, dtype=torch.bfloat16, pin_memory=True)
    gather_blocks(paged, table, out, order="NHD")
    torch.cuda.synchronize()
    expected = torch.empty(1, *SHAPE, dtype=torch.bfloat16)
    gather_blocks(PagedCaches.of([cache.cpu() for cache in caches], "2PNHD"), table, expected, order="NHD")
    assert torch.equal(out.view(torch.int16), expected.view(torch.int16))


def test_a_tier_full_of_blocks_gives_each_back(hot: DeviceHotTier) -> None:
    payloads = {key_of(number): block(number, 1 << 20) for number in range(40)}
    for key, payload in payloads.items():
        hot.put(key, payload, meta_of(payload))
    for key, payload in payloads.items():
        out = bytearray(len(payload))
        hot.read_into(key, memoryview(out))
        assert out == payload
