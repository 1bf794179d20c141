"""The door to the CUDA runtime does what it says: on real memory, streams and processes, not only in name."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.tier_suite import block
from tests.gpu.conftest import Content
from tests.storage.fake_cuda import FakeDevice
from tierkv.errors import DeviceError
from tierkv.storage.device import Copy, DeviceBlock, address_of, finished, open_device
from tierkv.storage.device_pool import DevicePool
from tierkv.storage.pinning import PinnedArena, PinnedBuffer
from tierkv.storage.shm import SharedSegment

MIB = 1 << 20
PATIENCE_S = 20.0
ROOT = Path(__file__).parents[2]


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[memoryview]:
    """Shared memory, in tmpfs where there is some, as the warm arena lies in."""
    home = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    segment = SharedSegment(home / f"tierkv-{os.getuid()}-{os.getpid()}-test.{time.monotonic_ns()}", 8 * MIB)
    yield segment.data
    segment.close()


def over(stream: Any) -> None:
    assert finished(stream.record(), PATIENCE_S)


def test_memory_is_counted(door: Any) -> None:
    before = door.memory()
    assert 0 < before.free_bytes <= before.total_bytes
    address = door.allocate(64 * MIB)
    assert door.memory().held_bytes == before.held_bytes + 64 * MIB
    assert door.memory().free_bytes <= before.free_bytes
    door.free(address)
    assert door.memory().held_bytes == before.held_bytes


def test_a_device_that_is_full_says_so_and_goes_on(door: Any, content: Content) -> None:
    with pytest.raises(DeviceError) as caught:
        DevicePool.allocate(door, door.memory().total_bytes + (1 << 30))
    assert "refuses" in caught.value.message
    assert caught.value.remedy
    pool = DevicePool.allocate(door, MIB)
    pool.copy_in([(0, b"still there")]).wait()
    assert content(pool.block(0, 11)) == b"still there"
    pool.close()


def test_page_locked_shared_memory_is_copied_from_and_to(door: Any, segment: memoryview) -> None:
    payload = block(1, 4 * MIB)
    segment[: 4 * MIB] = payload
    door.pin(address_of(segment), len(segment))
    with pytest.raises(DeviceError):
        door.pin(address_of(segment), len(segment))
    near = door.allocate(4 * MIB)
    stream = door.stream()
    start = address_of(segment)
    stream.copy([Copy(near, start, 2 * MIB), Copy(near + 2 * MIB, start + 2 * MIB, 2 * MIB)])
    stream.copy([Copy(start + 4 * MIB, near, 4 * MIB)])
    over(stream)
    assert segment[4 * MIB :] == payload
    stream.close()
    door.unpin(address_of(segment))
    door.free(near)


def test_an_arena_is_locked_in_pieces_and_copied_from_across_their_borders(
    door: Any, segment: memoryview, content: Content
) -> None:
    pool = DevicePool.allocate(door, 8 * MIB)
    pool.copies_from(segment, 2 * MIB)
    payload = block(2, 3 * MIB)
    segment[MIB : 4 * MIB] = payload
    pool.copy_in([(4096, segment[MIB : 4 * MIB])]).wait()
    assert pool.pinned_bytes == 4 * MIB
    assert content(pool.block(4096, 3 * MIB)) == payload
    pool.close()
    door.pin(address_of(segment), len(segment))  # nothing of it is locked any more
    door.unpin(address_of(segment))


def test_what_is_not_the_arenas_goes_through_buffers(door: Any, segment: memoryview, content: Content) -> None:
    pool = DevicePool.allocate(door, 32 * MIB)
    pool.copies_from(segment)
    payloads = [block(number, 9 * MIB + number) for number in range(3)]
    offsets = [0, 10 * MIB, 20 * MIB]
    pool.copy_in(zip(offsets, payloads, strict=True)).wait()
    assert pool.pinned_bytes == 0
    outs = [bytearray(len(payload)) for payload in payloads]
    pool.copy_out([(offset, memoryview(out)) for offset, out in zip(offsets, outs, strict=True)])
    assert outs == payloads
    assert [content(pool.block(o, len(p))) for o, p in zip(offsets, payloads, strict=True)] == payloads
    pool.close()


def test_a_stream_waits_for_anothers_event(door: Any) -> None:
    source, target = PinnedBuffer(door, 32 * MIB), PinnedBuffer(door, 32 * MIB)
    near = door.allocate(32 * MIB)
    first, second = door.stream(), door.stream()
    for turn in range(1, 6):
        source.data[:] = bytes([turn]) * len(source.data)
        first.copy([Copy(near, source.address, len(source.data))])
        second.wait_for(first.record())
        second.copy([Copy(target.address, near, len(target.data))])
        over(second)
        assert bytes(target.data) == bytes([turn]) * len(target.data)
    if isinstance(door, FakeDevice):
        door.faults.clear()  # it takes copies for simultaneous that only an event keeps apart
    for stream in (first, second):
        stream.close()
        stream.close()
    for buffer in (source, target):
        buffer.close()
    door.free(near)


def test_an_arena_that_cannot_be_locked_is_copied_through_buffers(door: Any, content: Content) -> None:
    odd = memoryview(bytearray(MIB))
    door.pin(address_of(odd) & -4096, MIB)  # somebody else's lock on the same pages
    arena = PinnedArena(door, odd)
    assert arena.parts(address_of(odd), 4096) is None
    door.unpin(address_of(odd) & -4096)
    pool = DevicePool.allocate(door, MIB)
    pool.copy_in([(0, odd[:4096])]).wait()
    assert content(pool.block(0, 4096)) == bytes(4096)
    pool.close()


def test_two_processes_share_a_pool(door: Any, content: Content) -> None:
    pool = DevicePool.allocate(door, 4 * MIB)
    payload = block(3, 100_000)
    pool.copy_in([(MIB, payload)]).wait()
    handle = pool.export()
    assert len(handle) == 64
    name = "fake" if isinstance(door, FakeDevice) else door.name
    command = [sys.executable, "-m", "tests.gpu.neighbour", name, str(MIB), str(len(payload))]
    for _ in range(2):  # the second one after the first has gone
        done = subprocess.run(command, cwd=ROOT, input=handle.hex(), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert bytes.fromhex(done.stdout.strip()) == payload
        payload = bytes(255 - byte for byte in payload)
        assert content(pool.block(MIB, len(payload))) == payload
    pool.close()
    assert door.memory().held_bytes >= 4 * MIB  # others may still have it
    door.free(pool.address)


def test_a_handle_that_is_none_is_refused(door: Any) -> None:
    with pytest.raises(DeviceError):
        door.attach(b"\1" * 64 if not isinstance(door, FakeDevice) else b"/nowhere 4096".ljust(64, b"\0"))


def test_a_block_is_seen_as_it_is(door: Any, content: Content) -> None:
    pool = DevicePool.allocate(door, MIB)
    pool.copy_in([(512, b"as it is")]).wait()
    found = pool.block(512, 8)
    assert isinstance(found, DeviceBlock)
    assert content(found) == b"as it is"
    pool.close()


@pytest.mark.gpu
def test_a_gpu_is_found_by_its_names(cuda: Any) -> None:
    first = open_device("cuda:0")
    assert open_device("cuda").name == open_device(first.bus_id).name == "cuda:0"
    with pytest.raises(DeviceError, match="no device"):
        open_device("cuda:99")
