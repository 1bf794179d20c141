"""A daemon whose hot tier lies on a device, and engines that read it there: one copy for all of them.

The device is a stand-in on both sides; what it exports is real memory that the other process maps.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tierkv
from tests.service.daemon import SPEC, Daemon, chain, payload, read_back, running, store
from tests.storage.fake_cuda import BUS_ID, FakeDevice
from tierkv import aio
from tierkv.cache import Cache, Chain, ReadLease
from tierkv.client.remote import RemoteCache
from tierkv.errors import DeviceError, InvalidRequest, LeaseLost

TIERS = {
    "hot": {"capacity": "4MiB", "device": "cuda:0"},
    "warm": {"capacity": "16MiB"},
    "cold": {"capacity": "64MiB", "segment": "16MiB"},
}
WITH_DEVICE = """
from tests.storage.fake_cuda import FakeDevice
import tierkv.core.build, tierkv.storage.hot
tierkv.storage.hot.open_device = lambda name: FakeDevice()
tierkv.core.build.device_sums = lambda: None
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running(TIERS, before=WITH_DEVICE) as daemon:
        yield daemon


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """The device as this process sees it."""
    device = FakeDevice()
    opened: list[str] = []

    def open_device(bus_id: str) -> FakeDevice:
        opened.append(bus_id)
        return device

    monkeypatch.setattr("tierkv.client.planes.open_device", open_device)
    yield device
    assert set(opened) <= {BUS_ID}
    assert device.faults == []


@pytest.fixture
def cache(daemon: Daemon, device: FakeDevice) -> Iterator[Cache]:
    with tierkv.connect(daemon.url, on_device=True) as cache:
        cache.register(SPEC)
        yield cache


def promoted(cache: Cache, seed: int, blocks: int = 8) -> Chain:
    """A chain that is stored and on the device."""
    of = chain(blocks, seed=seed)
    assert store(cache, of) == blocks
    assert cache.prefetch(of).wait(20.0).state == "done"
    assert set(cache.lookup(of).tiers) == {"hot"}
    return of


def in_place(device: FakeDevice, read: ReadLease, of: Chain) -> int:
    """Compare the blocks of a lease on the device; return how many are there."""
    found = [(ref.index, read.device_view(ref.index)) for ref in read.blocks]
    there = [(index, block) for index, block in found if block is not None]
    for index, block in there:
        assert block.device == "cuda:0"
        assert device.content(block.address, block.nbytes) == payload(of, index)
    return len(there)


def test_an_engine_reads_the_daemons_blocks_on_the_device(cache: Cache, device: FakeDevice) -> None:
    of = promoted(cache, 1)
    with cache.acquire(of, wait_s=0.0) as read:
        assert {ref.tier for ref in read.blocks} == {"hot"}
        assert in_place(device, read, of) == 8
        assert bytes(read.view(3)) == payload(of, 3)
    assert device.calls.count("attach") == 1
    with pytest.raises(LeaseLost):
        read.device_view(0)


def test_what_is_written_goes_to_shared_memory(cache: Cache) -> None:
    of = chain(4, seed=2)
    with cache.reserve(of) as write:
        assert {grant.tier for grant in write.granted} == {"warm"}
    call = cache._transport.call  # type: ignore[attr-defined]
    message = {"hashes": b"".join(chain(4, seed=20).hashes), "tiers": ["hot", "warm"], "wait_s": 0}
    answer = call("POST", f"/v1/{of.namespace}/reserve", message)
    assert {row[3] for row in answer["grants"]} == {"warm"}


def test_others_read_the_same_blocks_in_memory(cache: Cache, daemon: Daemon) -> None:
    of = promoted(cache, 3)
    with tierkv.connect(daemon.url) as plain, tierkv.connect(daemon.tcp_url) as far:
        for client in (plain, far):
            client.register(SPEC)
            assert read_back(client, of) == 8
            with client.acquire(of) as read:
                assert {ref.tier for ref in read.blocks} == {"warm"}
                assert read.device_view(0) is None


def test_an_engine_that_cannot_open_the_device_reads_in_memory(
    daemon: Daemon, device: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    device.fail("attach", times=9)
    with tierkv.connect(daemon.url, on_device=True) as cache:
        cache.register(SPEC)
        of = promoted(cache, 4)
        with cache.acquire(of) as read:
            assert {ref.tier for ref in read.blocks} == {"warm"}
        assert read_back(cache, of) == 8
    assert "refuses attach" in caplog.text


def test_an_engine_without_cupy_reads_in_memory(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(bus_id: str) -> FakeDevice:
        raise DeviceError("no CuPy here")

    monkeypatch.setattr("tierkv.client.planes.open_device", none)
    with tierkv.connect(daemon.url, on_device=True) as cache:
        cache.register(SPEC)
        assert read_back(cache, promoted(cache, 5)) == 8


def test_a_lease_is_handed_over_with_its_blocks_on_the_device(cache: Cache, daemon: Daemon, device: FakeDevice) -> None:
    of = promoted(cache, 6)
    assert isinstance(cache, RemoteCache)
    handle = cache.acquire(of).hand_over()
    with tierkv.connect(daemon.url, on_device=True) as other:
        assert isinstance(other, RemoteCache)
        other.register(SPEC)
        with other.take_over(of.namespace, handle) as read:
            assert in_place(device, read, of) == 8


def test_a_fail_open_cache_reads_on_the_device_too(daemon: Daemon, device: FakeDevice) -> None:
    with tierkv.connect(daemon.url, on_device=True, fail_open=True, extra_s=5.0) as cache:
        cache.register(SPEC)
        of = promoted(cache, 7)
        with cache.acquire(of) as read:
            assert (read.hit_blocks, in_place(device, read, of)) == (8, 8)
            assert bytes(read.view(2)) == payload(of, 2)
            out = memoryview(bytearray(len(payload(of, 2))))
            read.read_into(2, out)
            assert out == payload(of, 2)


@pytest.mark.parametrize("fail_open", [False, True])
async def test_an_async_cache_reads_on_the_device_too(daemon: Daemon, device: FakeDevice, fail_open: bool) -> None:
    cache = await aio.connect(daemon.url, on_device=True, fail_open=fail_open, extra_s=5.0)
    async with cache:
        await cache.register(SPEC)
        of = chain(8, seed=8 + fail_open)
        async with await cache.reserve(of) as write:
            for grant in write.granted:
                write.buffer(grant.index)[:] = payload(of, grant.index)
            assert await write.commit() == 8
        await (await cache.prefetch(of)).wait(20.0)
        async with await cache.acquire(of) as read:
            block = read.device_view(3)
            assert block is not None
            assert device.content(block.address, block.nbytes) == payload(of, 3)


def test_attach_says_where_the_device_is(cache: Cache, daemon: Daemon) -> None:
    answer = cache._transport.call("GET", "/v1/attach")  # type: ignore[attr-defined]
    found = answer["device"]
    assert (found["tier"], found["bus_id"], found["nbytes"]) == ("hot", BUS_ID, 4 << 20)
    assert len(found["handle"]) == 64
    assert [segment["tier"] for segment in answer["segments"]] == ["warm"]


def test_bodies_of_blocks_on_the_device_are_not_sent(cache: Cache, daemon: Daemon) -> None:
    of = promoted(cache, 10)
    call = cache._transport.call  # type: ignore[attr-defined]
    answer = call("POST", f"/v1/{of.namespace}/acquire", {"hashes": b"".join(of.hashes), "tiers": ["hot"]})
    assert {row[2] for row in answer["blocks"]} == {"hot"}
    with pytest.raises(InvalidRequest, match="lies on a GPU"):
        call("POST", f"/v1/{of.namespace}/blocks:get", {"lease": answer["lease"]})
    call("POST", f"/v1/leases/{answer['lease']}/release")


def test_a_restarted_daemon_is_attached_anew_and_what_was_attached_stays(device: FakeDevice) -> None:
    with running(TIERS, before=WITH_DEVICE) as daemon, tierkv.connect(daemon.url, on_device=True) as cache:
        cache.register(SPEC)
        of = promoted(cache, 11)
        read = cache.acquire(of)
        block = read.device_view(0)
        assert block is not None
        assert daemon.stop() == 0
        assert device.content(block.address, block.nbytes) == payload(of, 0)
        daemon.start()
        assert cache.prefetch(of).wait(20.0).state == "done"
        with cache.acquire(of) as again:
            assert in_place(device, again, of) == 8
        assert device.calls.count("attach") == 2


def test_a_daemon_whose_device_does_not_share_serves_memory(device: FakeDevice) -> None:
    before = f"""{WITH_DEVICE}
device = FakeDevice()
device.fail("export", times=9)
tierkv.storage.hot.open_device = lambda name: device
"""
    with running(TIERS, before=before) as daemon, tierkv.connect(daemon.url, on_device=True) as cache:
        cache.register(SPEC)
        assert read_back(cache, promoted(cache, 12)) == 8
        assert "refuses export" in daemon.log
