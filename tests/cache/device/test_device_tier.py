"""A hot tier on a device: prefetch by layer groups, reads in place, leases, eviction, damage."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

import tierkv
from tests.storage.fake_cuda import FakeDevice
from tierkv.cache import Chain
from tierkv.embedded import EmbeddedCache
from tierkv.errors import DeviceError
from tierkv.spec import KVSpec
from tierkv.storage.device import DeviceBlock
from tierkv.storage.hot import DeviceHotTier
from tierkv.storage.tier import checksum

from ..control import HeldReads
from ..support import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    assert_intact,
    make_chain,
    make_spec,
    payload,
    store,
    wait_until,
)
from .support import HOT, Open, on_device, promote, sink, two_groups


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
