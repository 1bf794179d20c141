"""A hot tier on top: new blocks start there, sink to the disk under pressure, and come back up on a prefetch."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import tierkv
from tierkv.cache import Cache
from tierkv.core.acquiring import Terms
from tierkv.core.steps import run
from tierkv.embedded import EmbeddedCache
from tierkv.spec import KVSpec

from .support import BLOCK_TOKENS, assert_intact, head, make_chain, make_spec, store, store_far, wait_until

pytest.importorskip("torch")

SETTINGS = {
    "hot": {"capacity": "1MiB", "device": "cpu", "policy": "lru"},
    "warm": {"capacity": "2MiB", "policy": "lru"},
    "cold": {"capacity": "256MiB"},
}
HOT, WARM = 128, 256


def test_blocks_sink_and_rise(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 20)
    store(cache, spec, chain)
    assert set(peer.lookup(chain).tiers) == {"hot"}
    store_far(cache, spec, make_chain(spec, 2 * (HOT + WARM), 1))
    cache.flush()
    store_far(cache, spec, make_chain(spec, 2 * (HOT + WARM), 2))
    assert set(peer.lookup(chain).tiers) == {"cold"}
    cache.flush()
    cache.prefetch(chain)
    wait_until(lambda: set(peer.lookup(chain).tiers) == {"hot"})
    with peer.acquire(chain, wait_s=0.0) as read:
        assert {ref.tier for ref in read.blocks} == {"hot"}
        assert read.tokens_by_tier == {"cold": 20 * BLOCK_TOKENS}
        assert_intact(read, spec, chain)
    with peer.acquire(chain, wait_s=0.0) as read:
        assert read.tokens_by_tier == {"hot": 20 * BLOCK_TOKENS}


def test_nothing_is_lost_on_the_way_down(cache: Cache, spec: KVSpec) -> None:
    lost = cache.stats()["counters"]["lost_blocks"]
    chains = [make_chain(spec, 48, seed) for seed in range(20)]
    for chain in chains:
        assert store(cache, spec, chain) == 48
    for chain in chains:
        with cache.acquire(chain, wait_s=math.inf) as read:
            assert read.hit_blocks == 48
            assert_intact(read, spec, chain)
    assert cache.stats()["counters"]["lost_blocks"] == lost


def test_a_prefetch_larger_than_the_hot_tier_keeps_its_head_there(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 2 * HOT)
    store_far(cache, spec, chain)
    cache.flush()
    ticket = cache.prefetch(chain)
    wait_until(lambda: ticket.progress().state == "done")
    wait_until(lambda: set(peer.lookup(head(chain, HOT)).tiers) == {"hot"})


def test_a_block_may_be_read_from_warm_while_it_sinks_there() -> None:
    """A caller that cannot address the hot tier asks for copies in warm, just when demotion makes them too."""
    spec = make_spec()
    with tierkv.open({"hot": {"capacity": "1MiB", "device": "cpu"}, "warm": {"capacity": "2MiB"}}) as cache:
        assert isinstance(cache, EmbeddedCache)
        cache.register(spec)
        engine, tenant = cache.engine, cache.engine.tenant("default")
        for seed in range(20):
            chain = make_chain(spec, 8, seed)
            store(cache, spec, chain)
            acquired = run(
                engine.reader.acquire(
                    tenant,
                    chain.namespace,
                    chain.hashes,
                    Terms(frozenset({"warm"}), 20.0, 30.0),
                )
            )
            assert acquired.hit_blocks == 8
            assert {ref.tier for ref in acquired.blocks} == {"warm"}
            engine.release(tenant, acquired.id)


def test_a_hot_tier_full_of_new_blocks_loses_none_while_warm_has_room() -> None:
    spec = make_spec()
    with tierkv.open({"hot": {"capacity": "1MiB", "device": "cpu"}, "warm": {"capacity": "4MiB"}}) as cache:
        cache.register(spec)
        chains = [make_chain(spec, HOT // 2, seed) for seed in range(5)]
        for chain in chains:
            store(cache, spec, chain, wait_s=0.0)
        for chain in chains:
            assert cache.lookup(chain).blocks == HOT // 2


def test_a_flush_gets_past_a_warm_tier_that_is_leased(tmp_path: Path) -> None:
    spec = make_spec()
    hot = {"capacity": "4MiB", "device": "cpu"}  # room beside what is leased
    with tierkv.open({"state_dir": tmp_path, **SETTINGS, "hot": hot}) as cache:
        assert isinstance(cache, EmbeddedCache)
        cache.register(spec)
        engine, tenant = cache.engine, cache.engine.tenant("default")
        old, new = make_chain(spec, WARM), make_chain(spec, 32, seed=1)
        store_far(cache, spec, old)
        cache.flush()
        terms = Terms(frozenset({"warm"}), 20.0, 30.0)
        held = run(engine.reader.acquire(tenant, old.namespace, old.hashes, terms))
        assert held.hit_blocks == WARM
        assert store(cache, spec, new) == 32
        cache.flush()
        assert cache.stats()["dirty_bytes"] == {"hot": 0, "warm": 0}
        assert cache.stats()["counters"]["demoted_blocks"]["hot>cold"] == 32
        engine.release(tenant, held.id)
        with cache.acquire(new) as read:
            assert_intact(read, spec, new)
