"""From the cold tier to a device, planes first: right, or not at all; and whose fault it was."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conformance.tier_suite import block, key_of, meta_of
from tests.storage.cold_store import OpenCold, opener
from tests.storage.fake_cuda import FakeDevice
from tierkv.errors import BodyMismatch, CorruptBlock, DeviceError, NotFound
from tierkv.kernels.planes import merge_planes
from tierkv.spec import DTYPE_BYTES, BlockLayout
from tierkv.storage.cold import ColdTier
from tierkv.storage.container import pack, unpack_planes_into
from tierkv.storage.device import Device, DeviceBlock, open_device
from tierkv.storage.device_decode import PlaneLoader, merge_on_device, planes_room
from tierkv.storage.hot import DeviceHotTier
from tierkv.storage.landing import device_sums
from tierkv.storage.tier import BlockMeta, checksum

LAYOUT = BlockLayout("bfloat16", (2, 2, 64, 3, 16), 2)
DTYPES = {"float8_e4m3": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


def payload_of(layout: BlockLayout, seed: int = 0) -> bytes:
    """Numbers such as KV is made of, so that planes shrink."""
    numbers = np.random.default_rng(seed).normal(size=layout.shape).astype(np.float32)
    if layout.dtype == "bfloat16":
        return (numbers.view("<u4") >> 16).astype("<u2").tobytes()
    return numbers.astype("<f4").tobytes()[: layout.nbytes]


def bytes_at(found: DeviceBlock) -> torch.Tensor:
    """The stand-in's memory, as a tensor on the CPU."""
    array = np.ctypeslib.as_array((ctypes.c_uint8 * found.nbytes).from_address(found.address))
    return torch.from_numpy(array)


def merge_in_fake(planes: DeviceBlock, payload: DeviceBlock, layout: BlockLayout) -> None:
    dtype = DTYPES.get(layout.dtype) or getattr(torch, layout.dtype)
    target = bytes_at(payload).view(dtype).view(1, *layout.shape)
    merge_planes([bytes_at(planes)], target, order="NHD" if layout.token_axis == 2 else "HND")


def sums_in_fake(blocks: Sequence[DeviceBlock]) -> list[int | None]:
    return [checksum(ctypes.string_at(found.address, found.nbytes)) for found in blocks]


class Bench:
    def __init__(self, cold: ColdTier, device: Device) -> None:
        fake = isinstance(device, FakeDevice)
        self.cold = cold
        self.device = device
        self.hot = DeviceHotTier(4 << 20, device=device, superblock_bytes=1 << 20)
        sums = sums_in_fake if fake else device_sums()
        assert sums is not None
        self.loader = PlaneLoader(
            self.hot, cold, LAYOUT.nbytes, merge=merge_in_fake if fake else merge_on_device, sums=sums
        )

    def put(self, payload: bytes, layout: BlockLayout | None = LAYOUT, codec: str = "bx1") -> BlockMeta:
        meta = meta_of(payload, layout=layout, codec=codec)
        self.cold.put(key_of(1), payload, meta)
        return meta

    def read(self, slot_bytes: int = LAYOUT.nbytes) -> bytes | None:
        slot = self.hot.allocate(slot_bytes)
        meta = self.loader.load(key_of(1), slot)
        if meta is None:
            return None
        out = bytearray(meta.length)
        self.hot.read(slot, memoryview(out))
        return bytes(out)


@pytest.fixture
def open_cold(tmp_path: Path) -> Iterator[OpenCold]:
    yield from opener(tmp_path / "cold")


@pytest.fixture(params=["fake", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def bench(request: pytest.FixtureRequest, open_cold: OpenCold) -> Iterator[Bench]:
    device: Device
    if request.param == "fake":
        device = FakeDevice()
    else:
        try:
            device = open_device(request.param)
        except DeviceError as error:
            pytest.skip(str(error))
    bench = Bench(open_cold(), device)
    yield bench
    bench.loader.close()
    bench.hot.close()
    if isinstance(device, FakeDevice):
        assert device.faults == []
        assert (device.pinned, device.allocated) == ({}, {})


@pytest.mark.parametrize(
    "layout",
    [
        LAYOUT,
        BlockLayout("bfloat16", (2, 2, 3, 64, 16), 3),
        BlockLayout("float32", (1, 1, 64, 1, 48), 2),
        BlockLayout("float8_e4m3", (2, 2, 64, 3, 16), 2),
        BlockLayout("float16", (1, 2, 1, 2, 8), 2),
    ],
)
def test_a_block_is_merged_where_it_is_read(bench: Bench, layout: BlockLayout) -> None:
    payload = payload_of(layout)
    if layout.dtype == "float16":
        payload = np.frombuffer(payload_of(BlockLayout("float32", layout.shape, 2)), "<f4").astype("<f2").tobytes()
    meta = bench.put(payload, layout)
    slot = bench.hot.allocate(len(payload))
    assert bench.loader.load(key_of(1), slot) == bench.cold.meta(key_of(1))
    assert meta.length == len(payload)
    out = bytearray(len(payload))
    bench.hot.read(slot, memoryview(out))
    assert out == payload


@pytest.mark.parametrize(
    ("layout", "codec"),
    [(LAYOUT, "raw"), (LAYOUT, "eq3"), (None, "bx1"), (BlockLayout("bfloat16", (LAYOUT.nbytes // 2,), 0), "bx1")],
)
def test_what_has_no_planes_to_merge_is_to_be_read_whole(bench: Bench, layout: BlockLayout | None, codec: str) -> None:
    bench.put(payload_of(LAYOUT), layout, codec)
    assert bench.read() is None
    assert bench.cold.has(key_of(1))


def test_a_block_larger_than_was_said_is_to_be_read_whole(bench: Bench) -> None:
    layout = BlockLayout("bfloat16", (8, 2, 64, 3, 16), 2)
    bench.put(payload_of(layout), layout)
    assert bench.read(layout.nbytes) is None


def test_a_block_that_is_not_there_is_not_found(bench: Bench) -> None:
    with pytest.raises(NotFound):
        bench.read()


def test_what_is_damaged_on_the_disk_is_corrupt_and_gone(bench: Bench, tmp_path: Path) -> None:
    payload = payload_of(LAYOUT)
    container = bytes(pack(payload, LAYOUT, "bx1", checksum(payload)))
    bench.put(payload)
    bench.cold.flush()
    for path in (tmp_path / "cold").glob("segment-*.lmdb"):
        found = path.read_bytes().find(container[-512:])
        if found >= 0:
            with path.open("r+b") as file:
                file.seek(found + 100)
                file.write(bytes(container[-512 + 100] ^ byte for byte in b"\x55"))
    with pytest.raises(CorruptBlock) as caught:
        bench.read()
    assert caught.value.cause != "transfer"
    assert not bench.cold.has(key_of(1))
    bench.put(payload)
    assert bench.read() == payload


def test_a_block_that_was_stored_wrong_is_corrupt_and_gone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    payload = payload_of(LAYOUT)
    with monkeypatch.context() as patched:
        patched.setattr("tierkv.storage.container._check_payload", lambda *_: None)
        bench.cold.put(key_of(1), payload, meta_of(payload, layout=LAYOUT, codec="bx1")._replace(checksum=1))
    with pytest.raises(CorruptBlock) as caught:
        bench.read()
    assert caught.value.cause != "transfer"
    assert not bench.cold.has(key_of(1))


def test_what_changes_on_its_way_is_corrupt_and_stays_on_the_disk(bench: Bench) -> None:
    if not isinstance(bench.device, FakeDevice):
        pytest.skip("a GPU does not change bytes when asked to")
    payload = payload_of(LAYOUT)
    bench.put(payload)
    bench.device.spoil = 1
    with pytest.raises(CorruptBlock) as caught:
        bench.read()
    assert caught.value.cause == "transfer"
    assert bench.read() == payload


def test_a_kernel_that_fails_is_a_device_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such instruction")

    payload = payload_of(LAYOUT)
    bench.put(payload)
    with monkeypatch.context() as patched:
        patched.setattr(bench.loader, "_merge", fail)
        with pytest.raises(DeviceError, match="no such instruction"):
            bench.read()
    assert bench.read() == payload


def test_a_copy_that_hangs_ends_the_loader_and_frees_nothing_under_it(open_cold: OpenCold) -> None:
    device = FakeDevice()
    bench = Bench(open_cold(), device)
    bench.put(payload_of(LAYOUT))
    bench.hot.pool.patience_s = 0.05
    device.hold()
    with pytest.raises(DeviceError, match="does not end"):
        bench.read()
    with pytest.raises(DeviceError, match="not used any more"):
        bench.read()
    bench.loader.close()
    assert device.faults == []
    assert device.unfinished


def test_a_device_without_room_says_so_and_keeps_nothing_locked(open_cold: OpenCold) -> None:
    device = FakeDevice()
    device.fail("allocate", after=1)
    with pytest.raises(DeviceError, match="refuses allocate"):
        Bench(open_cold(), device)
    assert device.pinned == {}


@given(
    dtype=st.sampled_from(sorted(set(DTYPE_BYTES) - {"uint8"})),
    shape=st.tuples(*[st.integers(1, 5)] * 5),
    axis=st.sampled_from([2, 3]),
)
@settings(max_examples=40)
def test_planes_of_any_shape_fit_the_room_they_are_given(dtype: str, shape: tuple[int, ...], axis: int) -> None:
    layout = BlockLayout(dtype, shape, axis)
    payload = block(1, layout.nbytes)
    container = pack(payload, layout, "bx1", checksum(payload))
    assert unpack_planes_into(container, memoryview(bytearray(planes_room(layout.nbytes)))) is not None


def test_the_cold_tier_still_refuses_a_buffer_too_small(open_cold: OpenCold) -> None:
    cold = open_cold()
    payload = payload_of(LAYOUT)
    cold.put(key_of(1), payload, meta_of(payload, layout=LAYOUT, codec="bx1"))
    with pytest.raises(BodyMismatch):
        cold.read_into(key_of(1), memoryview(bytearray(10)))
    assert cold.read_planes(key_of(1), memoryview(bytearray(10))) is None
    assert cold.has(key_of(1))
