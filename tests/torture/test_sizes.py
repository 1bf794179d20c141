"""Blocks of every size: none, the largest, a million tiny ones, and two models at once in one small cache."""

from __future__ import annotations

import gc
import random
from contextlib import closing
from pathlib import Path

import pytest

import tierkv
from tests.cache.support import assert_intact, make_chain, make_spec, store, wait_until
from tests.torture.support import LONG, block, holds, key_of, meta_of, say
from tierkv.embedded import EmbeddedCache
from tierkv.errors import BlockTooLarge
from tierkv.spec import KVGroup
from tierkv.storage.cold import ColdTier
from tierkv.storage.superblocks import SuperblockAllocator
from tierkv.storage.tier import BlockMeta, SlotTier, Tier, checksum
from tierkv.storage.warm import WarmTier

TINY = 1_000_000 if LONG else 30_000
TURNOVERS = 10 if LONG else 2
MEMORY_PER_TINY_BLOCK = 1200  # bytes, the cold tier's table and what the cache knows; a leak is far more


def cold(path: Path, **changes: int) -> ColdTier:
    settings = {"capacity_bytes": 40 << 20, "segment_bytes": 4 << 20, **changes}
    return ColdTier(path, codec="raw", sync="none", **settings)


def warm(path: Path) -> WarmTier:
    return WarmTier(16 << 20, segment_path=path / "arena", superblock_bytes=4 << 20)


@pytest.mark.parametrize("make", [cold, warm])
def test_from_nothing_to_the_largest_and_one_more(make: type[Tier], tmp_path: Path) -> None:
    with closing(make(tmp_path)) as tier:
        largest = tier.largest_block
        for number, size in enumerate((0, 1, 63, 4096, largest - 1, largest)):
            data = random.Random(number).randbytes(size)
            tier.put(key_of(number), data, meta_of(data))
            out = bytearray(size)
            assert tier.read_into(key_of(number), memoryview(out)).length == size
            assert out == data
        data = bytes((4 if isinstance(tier, ColdTier) else 0) * 4096 + largest + 1)
        with pytest.raises(BlockTooLarge) as caught:
            tier.put(key_of(99), data, meta_of(data))
        assert caught.value.remedy
        assert tier.meta(key_of(99)) is None
        again = block(100, 4096)
        tier.put(key_of(100), again, meta_of(again))
        assert tier.meta(key_of(100)) is not None


def resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 - _shared_bytes()


def _shared_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[2]) * 4096


def test_very_many_tiny_blocks(tmp_path: Path) -> None:
    """The memory of a block is the key and entry of its table, whatever its size."""
    one = b"x" * 16
    meta = BlockMeta(len(one), checksum(one))
    settings = {"capacity_bytes": max(64 << 20, TINY * 1024), "segment_bytes": 64 << 20}
    with closing(cold(tmp_path / "cold", **settings)) as tier:
        before = resident_bytes()
        for first in range(0, TINY, 5000):
            outcomes = tier.put_many([(key_of(n), one, meta) for n in range(first, first + 5000)])
            assert not any(outcomes)
        per_block = (resident_bytes() - before) / TINY
        assert tier.usage().blocks == TINY
        assert all(holds(tier, n, one) for n in range(0, TINY, 997))
    with closing(cold(tmp_path / "cold", **settings)) as tier:
        assert tier.usage().blocks == TINY
        assert tier.damage == {}
        assert all(holds(tier, n, one) for n in range(0, TINY, 997))
    say(f"{TINY} blocks of 16 bytes: {per_block:.0f} bytes of memory each in the cold tier")
    assert per_block < MEMORY_PER_TINY_BLOCK


def allocator(tier: SlotTier) -> SuperblockAllocator:
    found = tier.allocator  # type: ignore[attr-defined]
    assert isinstance(found, SuperblockAllocator)
    return found


def test_two_models_turn_both_tiers_over(tmp_path: Path) -> None:
    specs = [
        make_spec(KVGroup((0,), "full", 1, 64), block_tokens=16),  # 8 KiB
        make_spec(KVGroup((0, 1, 2), "full", 1, 72), block_tokens=64),  # 108 KiB
    ]
    warm_bytes, cold_bytes = (16 << 20, 48 << 20) if LONG else (16 << 20, 24 << 20)
    config = {
        "state_dir": str(tmp_path / "state"),
        "warm": {"capacity": warm_bytes, "directory": str(tmp_path)},
        "cold": {"capacity": cold_bytes, "segment": "4MiB", "codec": "raw"},
    }
    rng = random.Random(4)
    written, seeds, stranded = 0, 0, []
    with tierkv.open(config) as cache:
        assert isinstance(cache, EmbeddedCache)
        memory = allocator(cache.engine.placement.memory[0].tier)
        for spec in specs:
            cache.register(spec)
        while written < TURNOVERS * cold_bytes:
            # Both at once, now more of the one and now of the other.
            spec = specs[rng.random() < (0.1, 0.9)[seeds // 40 % 2]]
            chain = make_chain(spec, rng.randint(1, 24), seeds)
            stored = store(cache, spec, chain)
            assert stored == len(chain)
            written += stored * spec.layout().nbytes
            stranded.append(memory.usage().stranded_bytes / memory.capacity)
            old = make_chain(spec, 1, rng.randint(max(0, seeds - 200), seeds))
            for one in (chain, old):
                with cache.acquire(one, wait_s=30.0) as read:
                    assert_intact(read, spec, one)
            seeds += 1
        counters = cache.stats()["counters"]
        assert counters["corrupt_blocks"] == {}
        assert counters["refused_demotions"] == {}
        assert counters["evicted_blocks"]["warm"] > 0
        assert counters["evicted_blocks"]["cold"] > 0
        for spec in specs:
            cache.clear(spec.namespace)
        wait_until(lambda: memory.usage().used_bytes == 0)
        assert memory.usage().stranded_bytes == 0, "what was given back is open to every size"
    stranded.sort()
    say(
        f"two models, {written >> 20} MiB written through {warm_bytes >> 20} MiB of warm and {cold_bytes >> 20} MiB of "
        f"cold: {stranded[len(stranded) // 2]:.3f} of warm stranded in the median, {stranded[-1]:.3f} at most"
    )
    assert stranded[-1] <= 0.5
