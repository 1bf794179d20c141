"""Damage planted in memory and on disk: it is found, counted, removed, and the next store repairs it."""

from __future__ import annotations

import pytest

from tierkv.cache import Cache, Chain
from tierkv.errors import CorruptBlock
from tierkv.spec import KVGroup, KVSpec

from .conftest import Deployment
from .support import BLOCK_TOKENS, assert_intact, head, make_chain, make_spec, payload, store, store_far

SETTINGS = {"warm": {"capacity": "1MiB", "policy": "lru"}, "cold": {"capacity": "64MiB", "codec": "raw"}}
WHOLE = 128


def damage_memory(local: Cache, chain: Chain, index: int) -> None:
    with local.acquire(chain) as read:
        ref = read.blocks[index]
        assert ref.index == index
        read._plane.view(ref)[100] ^= 1  # type: ignore[attr-defined]


def damage_disk(deployment: Deployment, spec: KVSpec, chain: Chain, index: int, group: int = 0) -> None:
    wanted = payload(spec, chain, index, group)
    places = 0
    for path in (deployment.home / "state" / "cold").rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(wanted)) >= 0:
            places += 1
            with path.open("r+b") as file:
                file.seek(at + 50)
                file.write(bytes([wanted[50] ^ 1]))
    assert places == 1


def counter(cache: Cache, name: str, label: str) -> int:
    return int(cache.stats()["counters"][name].get(label, 0))


def push_out(cache: Cache, spec: KVSpec) -> None:
    cache.flush()
    store_far(cache, spec, make_chain(spec, 2 * WHOLE, 1000))


def test_damage_in_memory_is_never_served(cache: Cache, local: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 4)
    store(cache, spec, chain)
    found = counter(cache, "corrupt_blocks", "warm/checksum")
    damage_memory(local, chain, 2)
    with cache.acquire(chain) as read:
        assert read.hit_blocks == 4
        with pytest.raises(CorruptBlock):
            read.view(2)
        with pytest.raises(CorruptBlock):
            read.read_into(2, memoryview(bytearray(1 << 14)))
        assert bytes(read.view(3)) == payload(spec, chain, 3)
    assert counter(cache, "corrupt_blocks", "warm/checksum") == found + 1
    # Whatever copy is left is sound: the one in the cold tier if it got there in time, else none.
    hit = cache.lookup(chain)
    assert hit.blocks == 2 or hit.tiers[2] == "cold"
    store(cache, spec, chain)
    with cache.acquire(chain) as read:
        assert read.hit_blocks == 4
        assert_intact(read, spec, chain)


def test_damage_in_memory_does_not_reach_the_disk(cache: Cache, local: Cache, spec: KVSpec) -> None:
    cache.flush()
    chain = make_chain(spec, 4)
    store(cache, spec, chain)
    damage_memory(local, chain, 1)
    cache.flush()
    push_out(cache, spec)
    with cache.acquire(chain, wait_s=20.0) as read:
        assert_intact(read, spec, chain)
        assert read.hit_blocks in (1, 4)  # 4: it was demoted before the damage


def test_a_false_report_of_damage_removes_nothing(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 2)
    store(cache, spec, chain)
    before = cache.stats()["counters"]["corrupt_blocks"]
    read = cache.acquire(chain)
    read._corrupt.extend([(0, 0), (1, 0), (7, 3)])  # type: ignore[attr-defined]
    read.release()
    assert cache.stats()["counters"]["corrupt_blocks"] == before
    assert cache.lookup(chain).blocks == 2


def test_damage_on_disk_shortens_the_hit(deployment: Deployment, cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 6)
    store(cache, spec, chain)
    push_out(cache, spec)
    assert set(cache.lookup(chain).tiers) == {"cold"}
    damage_disk(deployment, spec, chain, 4)
    before = cache.stats()["counters"]["missed_blocks"]
    with peer.acquire(chain, wait_s=20.0) as read:
        assert (read.hit_blocks, read.published_blocks) == (4, 6)
        assert_intact(read, spec, chain)
    after = cache.stats()["counters"]["missed_blocks"]
    assert after.get("corrupt", 0) - before.get("corrupt", 0) == 2
    assert after.get("absent", 0) == before.get("absent", 0)
    assert cache.lookup(chain).blocks == 4
    assert store(cache, spec, chain) == 1
    push_out(cache, spec)
    with peer.acquire(chain, wait_s=20.0) as read:
        assert read.hit_blocks == 6
        assert_intact(read, spec, chain)


def test_damage_at_the_end_of_a_windowed_chain_costs_one_block(
    deployment: Deployment, cache: Cache, peer: Cache
) -> None:
    spec = make_spec(KVGroup((0,), "full", 1, 64), KVGroup((1,), "sliding_window", 1, 64, window=2 * BLOCK_TOKENS))
    for client in (cache, peer):
        client.register(spec)
    chain = make_chain(spec, 8)
    store(cache, spec, chain)
    push_out(cache, spec)
    damage_disk(deployment, spec, chain, 7, group=1)
    with peer.acquire(chain, wait_s=20.0) as read:
        assert read.hit_blocks == 7
        assert_intact(read, spec, chain)
    assert cache.lookup(chain).blocks == 7
    assert cache.lookup(head(chain, 7)).blocks == 7
