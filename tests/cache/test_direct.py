"""Reads without a lease: from the arena's directory where it is mapped, through an acquire elsewhere, alike."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tierkv.cache import Cache, Chain
from tierkv.errors import BodyMismatch, InvalidRequest
from tierkv.spec import KVGroup, KVSpec

from .conftest import Deployment
from .support import BLOCK_BYTES, head, make_chain, make_spec, payload, store, store_far

SETTINGS = {"warm": {"capacity": "1MiB"}, "cold": {"capacity": "64MiB", "codec": "raw"}}


def read(
    cache: Cache, chain: Chain, index: int, *, group: int = 0, size: int = BLOCK_BYTES, wait_s: float = 0.0
) -> bytes | None:
    out = memoryview(bytearray(size))
    return bytes(out) if cache.read_into(chain, index, out, group=group, wait_s=wait_s) else None


def acquires(cache: Cache) -> int:
    return int(cache.stats()["counters"]["acquires"])


def test_it_reads_what_is_published_and_nothing_else(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 6)
    assert read(peer, chain, 0) is None
    with cache.reserve(chain) as lease:
        for index in range(6):
            lease.buffer(index)[:] = payload(spec, chain, index)
            assert read(peer, chain, index) is None, "written, not committed"
            lease.commit([index])
            assert read(peer, chain, index) == payload(spec, chain, index)
    assert read(peer, make_chain(spec, 6, seed=1), 0) is None


def test_a_mapped_block_takes_no_request(local: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 4)
    store(local, spec, chain)
    before = acquires(local)
    assert [read(local, chain, index) for index in range(4)] == [payload(spec, chain, index) for index in range(4)]
    assert acquires(local) == before


def test_groups_are_read_by_their_own_key(cache: Cache) -> None:
    spec = make_spec(KVGroup((0,), "full", 1, 64), KVGroup((1,), "full", 2, 32))
    cache.register(spec)
    chain = make_chain(spec, 3)
    store(cache, spec, chain)
    assert [read(cache, chain, 2, group=group) for group in (0, 1)] == [payload(spec, chain, 2, g) for g in (0, 1)]


def test_another_tenant_reads_nothing(deployment: Deployment, local: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 2)
    store(local, spec, chain)
    stranger = deployment.local("stranger")
    stranger.register(spec)
    assert read(stranger, chain, 0) is None


def test_what_left_memory_is_fetched_if_there_is_time(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 300)  # more than twice the warm tier
    store_far(cache, spec, chain)
    gone = cache.lookup(chain).tiers.index("cold")
    assert read(cache, chain, gone) is None
    assert read(cache, chain, gone, wait_s=30.0) == payload(spec, chain, gone)
    assert read(cache, chain, gone) == payload(spec, chain, gone)


def test_deleted_and_cleared_blocks_are_gone_at_once(local: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 3)
    store(local, spec, chain)
    local.delete(chain)
    assert read(local, chain, 2) is None
    assert read(local, chain, 1) == payload(spec, chain, 1)
    local.clear(spec.namespace)
    assert read(local, chain, 0) is None


def test_damage_is_a_miss_that_is_counted_and_repaired(local: Cache, cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 1)
    store(local, spec, chain)
    with local.acquire(chain) as lease:
        (ref,) = lease.blocks
        lease._plane.view(ref)[100] ^= 1  # type: ignore[attr-defined]
    counted = sum(local.stats()["counters"]["corrupt_blocks"].values())
    assert read(local, chain, 0) is None
    assert sum(local.stats()["counters"]["corrupt_blocks"].values()) == counted + 1
    store(local, spec, chain)
    assert read(cache, chain, 0) == payload(spec, chain, 0)


def test_bad_arguments(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 2)
    store(cache, spec, chain)
    with pytest.raises(BodyMismatch):
        read(cache, chain, 0, size=BLOCK_BYTES - 1)
    for index in (-1, 2):
        with pytest.raises(InvalidRequest):
            read(cache, chain, index)


def test_uses_reach_the_policy(local: Cache, spec: KVSpec) -> None:
    """A block that is only ever read directly outlives a scan that pushes out all that was not read again."""
    chain, count = make_chain(spec, 1), 256
    store(local, spec, chain)
    tokens = local.stats()["counters"]["hit_tokens"].get("warm", 0)
    for _ in range(count):  # a full batch: reported with its last read
        assert read(local, chain, 0) is not None
    assert local.stats()["counters"]["hit_tokens"]["warm"] >= tokens + count * spec.block_tokens
    for seed in range(1, 20):
        store(local, spec, make_chain(spec, 16, seed))
        local.flush()  # so that everything may leave, and the policy alone decides what does
    assert read(local, chain, 0) == payload(spec, chain, 0)
    assert read(local, make_chain(spec, 16, seed=1), 0) is None


def test_readers_never_see_another_block(local: Cache, spec: KVSpec) -> None:
    """Readers race with evictions that give their slots to other blocks."""
    chains = [make_chain(spec, 40, seed) for seed in range(6)]

    def write() -> None:
        for _ in range(3):
            for chain in chains:
                for start in range(0, 40, 8):
                    store(local, spec, head(chain, start + 8), start)
            local.clear(spec.namespace)

    def check(seed: int) -> int:
        out, found = memoryview(bytearray(BLOCK_BYTES)), 0
        for step in range(1500):
            chain, index = chains[(seed + step) % 6], (7 * step) % 40
            if local.read_into(chain, index, out):
                assert bytes(out) == payload(spec, chain, index)
                found += 1
        return found

    with ThreadPoolExecutor(4) as pool:
        writing = pool.submit(write)
        found = [pool.submit(check, seed) for seed in range(3)]
        writing.result()
        assert sum(future.result() for future in found) > 0
