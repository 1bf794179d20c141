"""Whatever a device can do to a cache: copies that fail, hang or are refused, and devices that are lost."""

from __future__ import annotations

import pytest

from tests.storage.fake_cuda import FakeDevice
from tierkv.embedded import EmbeddedCache
from tierkv.errors import CorruptBlock
from tierkv.spec import KVSpec
from tierkv.storage.hot import DeviceHotTier
from tierkv.storage.tier import BlockMeta

from ..support import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    assert_intact,
    make_chain,
    make_spec,
    store,
    store_far,
    wait_until,
)
from .support import WARM, Open, on_device, promote, sink


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
