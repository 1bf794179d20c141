"""A hot tier on a device: prefetch by layer groups, reads in place, and whatever a device can do to a cache.

The device is a stand-in behind the door to the CUDA runtime; the cache is the real one, put together from a
configuration that says `cuda:0`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import tierkv
from tests.storage.fake_cuda import FakeDevice
from tierkv.cache import Chain
from tierkv.embedded import EmbeddedCache
from tierkv.errors import CorruptBlock, DeviceError
from tierkv.spec import KVGroup, KVSpec
from tierkv.storage.device import DeviceBlock
from tierkv.storage.hot import DeviceHotTier
from tierkv.storage.tier import BlockMeta, checksum

from .control import HeldReads
from .support import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    assert_intact,
    make_chain,
    make_spec,
    payload,
    store,
    store_far,
    wait_until,
)

HOT, WARM = 128, 256  # blocks
SETTINGS = {
    "hot": {"capacity": "1MiB", "device": "cuda:0", "policy": "lru"},
    "warm": {"capacity": "2MiB", "policy": "lru"},
    "cold": {"capacity": "256MiB"},
}
Open = Callable[..., EmbeddedCache]


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    device = FakeDevice()
    yield device
    assert device.faults == []


@pytest.fixture
def open_cache(device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    monkeypatch.setattr("tierkv.storage.hot.open_device", lambda name: device)
    monkeypatch.setattr("tierkv.core.build.device_sums", lambda: None)  # kernels cannot read what the stand-in has
    opened: list[EmbeddedCache] = []

    def open_cache(**changes: Any) -> EmbeddedCache:
        cache = tierkv.open({"state_dir": str(tmp_path / "state"), **SETTINGS, **changes}, on_device=True)
        assert isinstance(cache, EmbeddedCache)
        opened.append(cache)
        hot = cache.engine.placement.memory[0].tier
        assert isinstance(hot, DeviceHotTier)
        hot.pool.patience_s = 60.0
        return cache

    yield open_cache
    for cache in opened:
        cache.close()


@pytest.fixture
def cache(open_cache: Open) -> EmbeddedCache:
    return open_cache()


@pytest.fixture
def spec(cache: EmbeddedCache) -> KVSpec:
    spec = make_spec()
    cache.register(spec)
    return spec


def two_groups(cache: EmbeddedCache) -> KVSpec:
    spec = make_spec(KVGroup((0,), "full", 1, 64), KVGroup((1,), "full", 1, 64))
    cache.register(spec)
    return spec


def sink(cache: EmbeddedCache, spec: KVSpec, chain: Chain) -> None:
    """Store a chain and push it out of memory."""
    store_far(cache, spec, chain)
    cache.flush()
    store_far(cache, spec, make_chain(spec, 2 * WARM, 99))
    cache.flush()
    assert set(cache.lookup(chain).tiers) == {"cold"}


def promote(cache: EmbeddedCache, chain: Chain) -> None:
    assert cache.prefetch(chain).wait(20.0).state == "done"
    assert set(cache.lookup(chain).tiers) == {"hot"}


def on_device(device: FakeDevice, cache: EmbeddedCache, spec: KVSpec, chain: Chain) -> int:
    """Compare every block of a chain with what was stored, in place; return how many lie on the device."""
    count = 0
    with cache.acquire(chain, wait_s=0.0) as read:
        for ref in read.blocks:
            found = read.device_view(ref.index, ref.group)
            assert (found is not None) == (ref.tier == "hot")
            if found is not None:
                count += 1
                content = device.content(found.address, found.nbytes)
                assert content == payload(spec, chain, ref.index, ref.group)
            assert bytes(read.view(ref.index, ref.group)) == payload(spec, chain, ref.index, ref.group)
    return count


def test_writes_go_to_memory_that_the_processor_addresses(cache: EmbeddedCache, spec: KVSpec) -> None:
    chain = make_chain(spec, 8)
    with cache.reserve(chain) as write:
        assert {grant.tier for grant in write.granted} == {"warm"}
    assert store(cache, spec, chain) == 8
    assert set(cache.lookup(chain).tiers) == {"warm"}


def test_blocks_rise_from_the_disk_to_the_device_and_are_read_there(
    device: FakeDevice, cache: EmbeddedCache, spec: KVSpec
) -> None:
    chain = make_chain(spec, 20)
    sink(cache, spec, chain)
    ticket = cache.prefetch(chain)
    done = ticket.wait(20.0)
    assert (done.state, done.blocks_done) == ("done", 20)
    with cache.acquire(chain, wait_s=0.0) as read:
        assert {ref.tier for ref in read.blocks} == {"hot"}
        assert read.tokens_by_tier == {"cold": 20 * BLOCK_TOKENS}
    assert on_device(device, cache, spec, chain) == 20
    out = memoryview(bytearray(BLOCK_BYTES))
    with cache.acquire(chain, wait_s=0.0) as read:
        read.read_into(3, out)
    assert out == payload(spec, chain, 3)


def test_the_device_copies_from_the_arena_itself(device: FakeDevice, cache: EmbeddedCache, spec: KVSpec) -> None:
    chain = make_chain(spec, 20)
    store(cache, spec, chain)
    promote(cache, chain)
    stats = cache.stats()["tiers"]
    assert stats["hot"]["pinned_bytes"] == stats["warm"]["capacity_bytes"]
    assert len(device.pinned) == 1  # the arena, and no buffer


def test_a_caller_without_a_device_reads_the_copies_in_memory(cache: EmbeddedCache, spec: KVSpec) -> None:
    chain = make_chain(spec, 20)
    store(cache, spec, chain)
    promote(cache, chain)
    plain = EmbeddedCache(cache.engine, "default")
    with plain.acquire(chain, wait_s=0.0) as read:
        assert {ref.tier for ref in read.blocks} == {"warm"}
        assert all(read.device_view(ref.index) is None for ref in read.blocks)
        assert_intact(read, spec, chain)


def test_the_layers_of_the_first_group_are_on_the_device_first(device: FakeDevice, open_cache: Open) -> None:
    cache = open_cache(load_threads=1)
    spec = two_groups(cache)
    chain = make_chain(spec, 8)
    sink(cache, spec, chain)
    arrived: list[tuple[int, str]] = []
    engine = cache.engine
    before = engine.last_event
    ticket = cache.prefetch(chain)
    first = ticket.wait(20.0, groups=1)
    assert first.blocks_done >= 8
    with cache.acquire(chain, wait_s=0.0, groups=(0,)) as read:
        assert {ref.tier for ref in read.blocks} == {"hot"}
        assert read.hit_blocks == 8
    assert ticket.wait(20.0).blocks_done == 16
    groups = dict(keys_by_group(cache, chain))
    for event in engine.events_since(before, 10_000)[0]:
        if event.kind == "promoted":
            arrived.extend((groups[key], event.details["move"]) for key in event.keys if key in groups)
    last_of_first = max(i for i, (group, move) in enumerate(arrived) if (group, move) == (0, "warm>hot"))
    first_of_second = min(i for i, (group, move) in enumerate(arrived) if (group, move) == (1, "warm>hot"))
    assert last_of_first < first_of_second
    assert len(arrived) == 32


def keys_by_group(cache: EmbeddedCache, chain: Chain) -> list[tuple[bytes, int]]:
    tenant = cache.engine.tenant("default")
    return [(tenant.block_key(chain_hash, group), group) for chain_hash in chain.hashes for group in (0, 1)]


def test_blocks_in_memory_are_copied_in_batches_of_one_group(device: FakeDevice, open_cache: Open) -> None:
    cache = open_cache(load_threads=1)
    spec = two_groups(cache)
    chain = make_chain(spec, 40)
    store(cache, spec, chain)
    records = device.calls.count("record")
    promote(cache, chain)
    assert device.calls.count("copy") == 80
    assert device.calls.count("record") - records <= 4  # each worker's first load may go alone
    assert on_device(device, cache, spec, chain) == 80


def test_what_leaves_the_device_stays_in_memory(device: FakeDevice, cache: EmbeddedCache, spec: KVSpec) -> None:
    first, second = make_chain(spec, 100, 1), make_chain(spec, 100, 2)
    store(cache, spec, first)
    store(cache, spec, second)
    promote(cache, first)
    assert cache.prefetch(second).wait(20.0).state == "done"
    tiers = cache.lookup(first).tiers
    assert (tiers.count("hot"), tiers.count("warm")) == (HOT - 100, 200 - HOT)
    on_device(device, cache, spec, first)
    on_device(device, cache, spec, second)


def test_nothing_leaves_the_device_under_a_lease(device: FakeDevice, cache: EmbeddedCache, spec: KVSpec) -> None:
    held, other = make_chain(spec, HOT, 1), make_chain(spec, 64, 2)
    store(cache, spec, held)
    store(cache, spec, other)
    promote(cache, held)
    with cache.acquire(held, wait_s=0.0) as read:
        assert {ref.tier for ref in read.blocks} == {"hot"}
        assert cache.prefetch(other).wait(20.0).state == "done"
        assert set(cache.lookup(other).tiers) == {"warm"}
        for ref in read.blocks:
            found = read.device_view(ref.index)
            assert found is not None
            assert device.content(found.address, found.nbytes) == payload(spec, held, ref.index)


@pytest.mark.parametrize("call", ["copy", "record"])
def test_a_copy_that_fails_costs_no_block(device: FakeDevice, cache: EmbeddedCache, spec: KVSpec, call: str) -> None:
    chain = make_chain(spec, 30)
    store(cache, spec, chain)
    device.fail(call, after=2)
    ticket = cache.prefetch(chain)
    assert ticket.wait(20.0).state == "done"
    assert cache.lookup(chain).blocks == 30
    device.fail(call, times=0)
    on_device(device, cache, spec, chain)
    used = cache.stats()["tiers"]["hot"]["used_bytes"]
    assert used == cache.lookup(chain).tiers.count("hot") * BLOCK_BYTES  # no slot is lost
    promote(cache, chain)
    assert on_device(device, cache, spec, chain) == 30


def test_a_device_that_fails_on_the_way_costs_no_block(device: FakeDevice, cache: EmbeddedCache, spec: KVSpec) -> None:
    safe, chain = make_chain(spec, 10, 1), make_chain(spec, 30, 2)
    store(cache, spec, safe)
    store(cache, spec, chain)
    promote(cache, safe)
    device.hold()
    ticket = cache.prefetch(chain)
    wait_until(lambda: device.unfinished)
    device.break_down()
    assert ticket.wait(20.0).state == "done"
    plain = EmbeddedCache(cache.engine, "default")
    for stored in (safe, chain):
        with plain.acquire(stored, wait_s=5.0) as read:
            assert read.hit_blocks == len(stored)
            assert_intact(read, spec, stored)
    assert "fallen off the bus" in cache.stats()["tiers"]["hot"]["lost"]
    assert cache.prefetch(chain).wait(20.0).state == "done"  # at once: nobody waits for a device that is gone
    assert store(cache, spec, make_chain(spec, 8, 3)) == 8


def test_a_block_that_only_a_lost_device_had_is_a_miss_and_can_be_stored_anew(
    device: FakeDevice, open_cache: Open
) -> None:
    cache = open_cache(cold={"capacity": 0})
    spec = make_spec()
    cache.register(spec)
    chain = make_chain(spec, 10)
    store(cache, spec, chain)
    promote(cache, chain)
    placement = cache.engine.placement
    entries = [placement.memory[0].dirty, placement.memory[1].tier]
    for chain_hash in chain.hashes:  # as an eviction that is allowed to lose blocks does
        key = cache.engine.tenant("default").block_key(chain_hash, 0)
        entry = cache.engine._state.index.awake(key)
        assert entry is not None
        placement._take_out(entry, 1)
        placement.lost_level(entry, 1, "evicted")
    assert entries[0]
    device.break_down()
    plain = EmbeddedCache(cache.engine, "default")
    with plain.acquire(chain, wait_s=5.0) as read:
        assert read.hit_blocks == 0
        assert read.missed_tokens == {"failed": 10 * BLOCK_TOKENS}
    wait_until(lambda: cache.lookup(chain).blocks == 0)
    assert store(cache, spec, chain) == 10
    with plain.acquire(chain, wait_s=0.0) as read:
        assert_intact(read, spec, chain)


def test_a_device_that_refuses_a_read_is_gone_round(device: FakeDevice, cache: EmbeddedCache, spec: KVSpec) -> None:
    """The block is on the device and on the disk: the way over the device is the shorter, if it works."""
    chain = make_chain(spec, 10)
    store(cache, spec, chain)
    promote(cache, chain)
    cache.flush()
    store_far(cache, spec, make_chain(spec, 2 * WARM, 5))  # out of warm
    cache.flush()
    plain = EmbeddedCache(cache.engine, "default")
    assert set(cache.lookup(chain).tiers) == {"hot"}
    device.fail("copy", times=3)
    with plain.acquire(chain, wait_s=20.0) as read:
        assert read.hit_blocks == 10
        assert_intact(read, spec, chain)


def test_damage_found_on_the_way_round_is_that_of_the_disk(
    device: FakeDevice, cache: EmbeddedCache, spec: KVSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = make_chain(spec, 1)
    store(cache, spec, chain)
    promote(cache, chain)
    cache.flush()
    store_far(cache, spec, make_chain(spec, 2 * WARM, 5))  # out of warm
    cache.flush()

    cold = cache.engine.placement.cold
    assert cold is not None

    def damaged(key: bytes, out: memoryview) -> BlockMeta:
        cold.delete(key)
        raise CorruptBlock("damaged", cause="checksum")

    monkeypatch.setattr(cold, "read_into", damaged)
    device.fail("copy")
    with EmbeddedCache(cache.engine, "default").acquire(chain, wait_s=20.0) as read:
        assert read.hit_blocks == 0
    assert cache.stats()["counters"]["corrupt_blocks"] == {"hot/device": 1, "cold/checksum": 1}
    assert cache.lookup(chain).blocks == 0


def test_a_copy_that_never_ends_holds_up_nobody_for_longer_than_he_waits(
    device: FakeDevice, cache: EmbeddedCache, spec: KVSpec
) -> None:
    chain, sunk = make_chain(spec, 30, 1), make_chain(spec, 30, 2)
    sink(cache, spec, sunk)
    store(cache, spec, chain)
    hot = cache.engine.placement.memory[0].tier
    assert isinstance(hot, DeviceHotTier)
    hot.pool.patience_s = 0.5
    device.hold()
    ticket = cache.prefetch(chain)
    wait_until(lambda: device.unfinished)
    with cache.acquire(chain, wait_s=0.0) as read:
        assert {ref.tier for ref in read.blocks} == {"warm"}
        assert_intact(read, spec, chain)
    with cache.acquire(sunk, wait_s=0.01) as read:
        assert_intact(read, spec, sunk)
    with cache.acquire(sunk, wait_s=20.0) as read:  # workers come back from the device that hangs
        assert read.hit_blocks == 30
        assert_intact(read, spec, sunk)
    assert ticket.wait(20.0).state == "done"
    assert "has not ended" in cache.stats()["tiers"]["hot"]["lost"]
    assert set(cache.lookup(chain).tiers) == {"warm"}
    cache.close()
    assert not {"free", "unpin"} & set(device.calls)  # a copy may still touch it


def test_a_cancelled_prefetch_does_not_go_on_to_the_device(device: FakeDevice, open_cache: Open) -> None:
    cache = open_cache(load_threads=1)
    spec = make_spec()
    cache.register(spec)
    chain = make_chain(spec, 20)
    sink(cache, spec, chain)
    device.hold()
    ticket = cache.prefetch(chain)
    wait_until(lambda: device.unfinished)
    ticket.cancel()
    device.let_go()
    wait_until(lambda: cache.stats()["loads"]["running_bytes"] == 0)
    assert cache.stats()["loads"]["queued"] == 0
    assert cache.lookup(chain).tiers.count("hot") < 20


def test_a_cancelled_prefetch_takes_back_what_waits_in_memory_for_the_device(
    device: FakeDevice, open_cache: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache(load_threads=2)
    spec = make_spec()
    cache.register(spec)
    chain, urgent = make_chain(spec, 2, 1), make_chain(spec, 1, 2)
    store(cache, spec, urgent)
    sink(cache, spec, chain)
    assert set(cache.lookup(urgent).tiers) == {"cold"}
    reads = HeldReads(monkeypatch, cache)
    device.hold()
    ticket = cache.prefetch(chain)
    wait_until(lambda: len(reads.begun) == 2)
    reads.let(1)
    wait_until(lambda: device.unfinished)  # one worker waits for the device
    asker = threading.Thread(target=lambda: cache.acquire(urgent, wait_s=20.0).release())
    asker.start()
    wait_until(lambda: cache.stats()["loads"]["queued"] == 1)
    reads.let(1)
    wait_until(lambda: len(reads.begun) == 3)  # the other one reads what is more urgent than the second block's way on
    assert cache.stats()["loads"]["queued"] == 1
    ticket.cancel()
    assert cache.stats()["loads"]["queued"] == 0
    reads.open()
    device.let_go()
    asker.join()
    wait_until(lambda: cache.stats()["loads"]["running_bytes"] == 0)
    assert sorted(cache.lookup(chain).tiers) == ["hot", "warm"]


def test_a_reader_who_finds_damage_on_the_device_has_that_copy_removed(
    device: FakeDevice, cache: EmbeddedCache, spec: KVSpec
) -> None:
    chain = make_chain(spec, 4)
    store(cache, spec, chain)
    promote(cache, chain)
    hot = cache.engine.placement.memory[0].tier
    with cache.acquire(chain, wait_s=0.0) as read:
        ref = read.blocks[2]
        key = cache.engine.tenant("default").block_key(chain.hashes[2], 0)
        slot = hot.slot(key)
        assert slot is not None
        hot.write(slot, b"damage")
        with pytest.raises(tierkv.errors.CorruptBlock):
            read.view(ref.index)
    assert cache.lookup(chain).tiers == ("hot", "hot", "warm", "hot")
    assert cache.stats()["counters"]["corrupt_blocks"] == {"hot/checksum": 1}
    assert on_device(device, cache, spec, chain) == 3


def test_a_block_that_changes_on_its_way_is_not_served_from_the_device(
    device: FakeDevice, cache: EmbeddedCache, spec: KVSpec
) -> None:
    chain = make_chain(spec, 4)
    store(cache, spec, chain)
    hot = cache.engine.placement.memory[0].tier
    assert isinstance(hot, DeviceHotTier)
    assert hot.verify_landings(lambda blocks: [checksum(device.content(b.address, b.nbytes)) for b in blocks])
    device.spoil = 2
    assert cache.prefetch(chain).wait(20.0).state == "done"
    assert sorted(cache.lookup(chain).tiers) == ["hot", "hot", "hot", "warm"]
    assert cache.stats()["counters"]["corrupt_blocks"] == {"hot/transfer": 1}
    assert on_device(device, cache, spec, chain) == 3
    promote(cache, chain)


def test_sums_that_are_wrong_or_fail_are_not_used(device: FakeDevice, cache: EmbeddedCache, spec: KVSpec) -> None:
    hot = cache.engine.placement.memory[0].tier
    assert isinstance(hot, DeviceHotTier)
    used = hot.usage().used_bytes
    assert not hot.verify_landings(lambda blocks: [7])
    calls: list[int] = []

    def sums(blocks: Sequence[DeviceBlock]) -> list[int]:
        calls.append(len(blocks))
        if len(calls) > 1:
            raise RuntimeError("no compiler")
        return [checksum(device.content(b.address, b.nbytes)) for b in blocks]

    assert hot.verify_landings(sums)
    assert hot.usage().used_bytes == used
    for seed in range(2):
        chain = make_chain(spec, 4, seed)
        store(cache, spec, chain)
        promote(cache, chain)
    assert len(calls) == 2


def test_a_pool_that_does_not_fit_stops_the_start(device: FakeDevice, open_cache: Open) -> None:
    device.fail("allocate")
    with pytest.raises(DeviceError, match="refuses allocate"):
        open_cache()
    assert device.allocated == {}


def test_a_closed_cache_leaves_nothing_on_the_device(device: FakeDevice, open_cache: Open) -> None:
    cache = open_cache()
    spec = make_spec()
    cache.register(spec)
    chain = make_chain(spec, 8)
    store(cache, spec, chain)
    promote(cache, chain)
    cache.close()
    assert device.pinned == device.allocated == {}


def test_many_at_once_are_never_served_anything_else(device: FakeDevice, open_cache: Open) -> None:
    cache = open_cache(load_threads=4)
    spec = make_spec()
    cache.register(spec)
    chains = [make_chain(spec, 24, seed) for seed in range(12)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(10):
                chain = chains[(number * 7 + turn * 5) % len(chains)]
                store(cache, spec, chain)
                cache.prefetch(chain).wait(20.0 if turn % 2 else 0.0)
                on_device(device, cache, spec, chain)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert cache.stats()["counters"]["lost_blocks"] == {}
