"""Copies to and from a device: nothing is given back that one may still touch, whatever fails."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conformance.tier_suite import block
from tests.storage.fake_cuda import FakeDevice
from tierkv.errors import DeviceError
from tierkv.storage.device import address_of
from tierkv.storage.device_pool import BUFFER_BYTES, DevicePool
from tierkv.storage.pinning import PinnedArena

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    device = FakeDevice()
    yield device
    assert device.faults == []


@pytest.fixture
def pool(device: FakeDevice) -> DevicePool:
    pool = DevicePool.allocate(device, 32 * MIB)
    pool.patience_s = 0.05
    return pool


def arena(nbytes: int = MIB) -> memoryview:
    """Page-aligned memory, as a segment's is."""
    return memoryview(mmap.mmap(-1, nbytes))


def content(pool: DevicePool, offset: int, nbytes: int) -> bytes:
    out = bytearray(nbytes)
    pool.copy_out([(offset, memoryview(out))])
    return bytes(out)


def test_copies_are_made_behind_the_callers_back(device: FakeDevice, pool: DevicePool) -> None:
    device.hold()
    transfer = pool.copy_in([(0, b"a" * 100), (4096, b"b" * 100)])
    assert len(device.unfinished) == 2
    assert device.content(pool.address, 100) == bytes(100)
    device.let_go()
    transfer.wait()
    assert (content(pool, 0, 100), content(pool, 4096, 100)) == (b"a" * 100, b"b" * 100)


def test_the_next_payload_is_prepared_while_the_last_is_copied(device: FakeDevice, pool: DevicePool) -> None:
    device.hold()
    under_way: list[int] = []

    def payloads() -> Iterator[tuple[int, bytes]]:
        for number in range(2):
            under_way.append(len(device.unfinished))
            yield number * 4096, b"x" * 10

    transfer = pool.copy_in(payloads())
    assert under_way == [0, 1]
    device.let_go()
    transfer.wait()


def test_an_arena_is_copied_from_directly(device: FakeDevice, pool: DevicePool) -> None:
    memory = arena()
    memory[8192:8200] = b"directly"
    pool.copies_from(memory)
    assert pool.pinned_bytes == 0
    device.hold()
    transfer = pool.copy_in([(0, memory[8192:8200])])
    assert [copy.source for copy in device.unfinished] == [address_of(memory) + 8192]
    device.let_go()
    transfer.wait()
    assert content(pool, 0, 8) == b"directly"
    assert pool.pinned_bytes == MIB
    pool.close()
    assert device.pinned == device.allocated == {}


def test_a_device_never_writes_to_an_arena(device: FakeDevice, pool: DevicePool) -> None:
    memory = arena()
    pool.copies_from(memory)
    pool.copy_in([(0, b"z" * 8192)]).wait()
    device.hold()
    with pytest.raises(DeviceError, match="has not ended"):
        pool.copy_out([(0, memory[:8192])])
    start = address_of(memory)
    assert all(not start <= copy.target < start + MIB for copy in device.unfinished)


def test_an_arena_is_locked_piece_by_piece_when_it_is_used(device: FakeDevice) -> None:
    memory = arena(64 * KIB)
    start = address_of(memory)
    pinned = PinnedArena(device, memory, piece_bytes=16 * KIB)
    assert pinned.parts(start + 20 * KIB, 4 * KIB) == [(start + 20 * KIB, 4 * KIB)]
    assert device.pinned == {start + 16 * KIB: 16 * KIB}
    crossing = pinned.parts(start + 12 * KIB, 24 * KIB)
    assert crossing == [(start + 12 * KIB, 4 * KIB), (start + 16 * KIB, 16 * KIB), (start + 32 * KIB, 4 * KIB)]
    assert pinned.pinned_bytes == 48 * KIB
    assert device.calls.count("pin") == 3
    assert pinned.parts(start + 60 * KIB, 8 * KIB) is None
    assert pinned.parts(start - 8, 16) is None
    pinned.close()
    assert device.pinned == {}
    assert pinned.parts(start, 4) is None
    pinned.close()


def test_a_piece_that_cannot_be_locked_is_copied_through_buffers(device: FakeDevice, pool: DevicePool) -> None:
    memory = arena()
    memory[:4] = b"slow"
    pool.copies_from(memory)
    device.fail("pin")
    pool.copy_in([(0, memory[:4])]).wait()
    pool.copy_in([(64, memory[:4])]).wait()
    assert content(pool, 64, 4) == b"slow"
    assert pool.pinned_bytes == 0


@pytest.mark.parametrize("failing", ["copy", "record"])
def test_a_batch_that_fails_half_way_is_over_when_it_says_so(
    device: FakeDevice, pool: DevicePool, failing: str
) -> None:
    device.fail(failing, after=3)
    with pytest.raises(DeviceError, match=f"refuses {failing}"):
        pool.copy_in([(number * 4096, b"x" * 10) for number in range(8)])
    assert device.unfinished == []
    assert not pool.lost
    pool.copy_in([(0, b"again")]).wait()
    assert content(pool, 0, 5) == b"again"


def test_a_batch_whose_source_fails_is_over_when_it_says_so(device: FakeDevice, pool: DevicePool) -> None:
    def payloads() -> Iterator[tuple[int, bytes]]:
        yield 0, b"x" * 10
        raise LookupError("no more")

    with pytest.raises(LookupError):
        pool.copy_in(payloads())
    assert device.unfinished == []
    assert not pool.lost


def test_a_copy_that_never_ends_is_given_up_and_nothing_it_may_touch_is_used_again(
    device: FakeDevice, pool: DevicePool
) -> None:
    memory = arena()
    pool.copies_from(memory)
    device.hold()
    with pytest.raises(DeviceError, match=r"a copy has not ended in 0\.05 seconds"):
        pool.copy_in([(0, memory[:4096])]).wait()
    assert pool.lost
    queued = device.calls.count("copy")
    for use in (lambda: pool.copy_in([(0, b"x")]), lambda: content(pool, 0, 1)):
        with pytest.raises(DeviceError, match="not used any more"):
            use()
    assert device.calls.count("copy") == queued
    pool.close()
    assert not {"free", "unpin"} & set(device.calls)


def test_a_copy_that_fails_on_its_way_ends_the_pool(device: FakeDevice, pool: DevicePool) -> None:
    device.hold()
    transfer = pool.copy_in([(0, b"x")])
    device.break_down()
    with pytest.raises(DeviceError, match="fallen off the bus"):
        transfer.wait()
    assert "fallen off the bus" in pool.lost
    pool.close()
    assert "free" not in device.calls


def test_a_transfer_under_way_keeps_the_memory(device: FakeDevice, pool: DevicePool) -> None:
    device.hold()
    transfer = pool.copy_in([(0, b"x")])
    pool.close()
    assert not {"free", "unpin"} & set(device.calls)
    device.let_go()
    transfer.wait()


def test_memory_that_others_may_have_attached_is_not_freed(device: FakeDevice, pool: DevicePool) -> None:
    pool.copy_in([(5, b"shared")]).wait()
    handle = pool.export()
    assert len(handle) == 64
    other = FakeDevice()
    attached = DevicePool.attach(other, handle, pool.nbytes)
    assert content(attached, 5, 6) == b"shared"
    pool.close()
    attached.close()
    assert "free" not in device.calls
    assert other.content(attached.address + 5, 6) == b"shared"
    assert "detach" not in other.calls
    del attached
    assert other.calls[-1] == "detach"
    assert other.faults == []


def test_a_pool_has_its_own_pages(device: FakeDevice) -> None:
    DevicePool.allocate(device, 3 * MIB)
    assert list(device.allocated.values()) == [4 * MIB]


def test_threads_have_streams_of_their_own(device: FakeDevice, pool: DevicePool) -> None:
    def work(number: int) -> bool:
        payload = block(number, 3 * BUFFER_BYTES // 2)
        for _ in range(4):
            pool.copy_in([(number * 2 * BUFFER_BYTES, payload)]).wait()
            if content(pool, number * 2 * BUFFER_BYTES, len(payload)) != payload:
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
    assert len(device.streams) <= 4


@given(
    blocks=st.lists(st.tuples(st.integers(0, 60 * KIB), st.booleans()), min_size=1, max_size=12),
    fails_after=st.integers(0, 40),
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_copied_from_wherever_arrives_or_says_so(blocks: list[tuple[int, bool]], fails_after: int) -> None:
    device = FakeDevice()
    pool = DevicePool.allocate(device, MIB)
    memory = arena()
    pool.copies_from(memory, piece_bytes=32 * KIB)
    payloads = [block(number, nbytes) for number, (nbytes, _) in enumerate(blocks)]
    items = []
    for number, (payload, (_, in_arena)) in enumerate(zip(payloads, blocks, strict=True)):
        source = memory[number * 64 * KIB : number * 64 * KIB + len(payload)] if in_arena else memoryview(payload)
        if in_arena:
            source[:] = payload
        items.append((number * 64 * KIB, source))
    device.fail("copy", after=fails_after)
    try:
        pool.copy_in(items).wait()
    except DeviceError:
        assert device.unfinished == []
        pool.copy_in(items).wait()
    device.fail("copy", times=0)
    for (offset, _), payload in zip(items, payloads, strict=True):
        assert content(pool, offset, len(payload)) == payload
    pool.close()
    assert device.faults == []
    assert device.pinned == device.allocated == {}
