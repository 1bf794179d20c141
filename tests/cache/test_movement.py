"""Blocks on the move: pressure, demotion, promotion, and what a lease keeps in place meanwhile."""

from __future__ import annotations

import math

from tierkv.cache import Cache, Ticket
from tierkv.spec import KVGroup, KVSpec

from .support import (
    BLOCK_TOKENS,
    assert_intact,
    head,
    make_chain,
    make_spec,
    store,
    store_far,
    wait_until,
)

SETTINGS = {"warm": {"capacity": "1MiB", "policy": "lru"}, "cold": {"capacity": "64MiB", "codec": "raw"}}
WHOLE = 128  # blocks that fill the warm tier


def push_out(cache: Cache, spec: KVSpec, seed: int = 1000) -> None:
    """Fill the warm tier with something else."""
    cache.flush()
    store_far(cache, spec, make_chain(spec, 2 * WHOLE, seed))


def finished(ticket: Ticket) -> bool:
    return ticket.progress().state == "done"


def test_nothing_is_lost_under_pressure(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chains = [make_chain(spec, 32, seed) for seed in range(20)]  # five times the warm tier
    lost = dict(cache.stats()["counters"]["lost_blocks"])
    for chain in chains:
        assert store(cache, spec, chain) == 32
    for chain in chains:
        assert peer.lookup(chain).blocks == 32
        with peer.acquire(chain, wait_s=math.inf) as read:
            assert read.hit_blocks == 32
            assert sum(read.tokens_by_tier.values()) == read.hit_tokens
            assert_intact(read, spec, chain)
    assert cache.stats()["counters"]["lost_blocks"] == lost


def test_a_lease_holds_its_blocks_while_the_rest_is_evicted(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 40)
    store(cache, spec, chain)
    with cache.acquire(chain) as read:
        views = [read.view(ref.index) for ref in read.blocks]
        before = [bytes(view) for view in views]
        push_out(peer, spec)
        assert [bytes(view) for view in views] == before
        assert set(peer.lookup(chain).tiers) == {"warm"}
        assert_intact(read, spec, chain)
    push_out(peer, spec, seed=2000)
    assert set(peer.lookup(chain).tiers) == {"cold"}


def test_only_what_cannot_wait_is_left_out(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 24)
    store(cache, spec, chain)
    push_out(cache, spec)
    with peer.acquire(chain, wait_s=0.0) as read:
        assert (read.hit_blocks, read.published_blocks) == (0, 24)
    with peer.acquire(chain, wait_s=20.0) as read:
        assert (read.hit_blocks, read.published_blocks) == (24, 24)
        assert read.tokens_by_tier == {"cold": 24 * BLOCK_TOKENS}
        assert_intact(read, spec, chain)
    with peer.acquire(chain, wait_s=0.0) as read:
        assert read.tokens_by_tier == {"warm": 24 * BLOCK_TOKENS}
        assert read.waited_s == 0.0


def test_a_chain_that_is_half_in_memory_is_attributed_block_by_block(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 8)
    store(cache, spec, chain)
    push_out(cache, spec)
    with peer.acquire(head(chain, 3)):
        pass
    assert peer.lookup(chain).tiers == ("warm",) * 3 + ("cold",) * 5
    with peer.acquire(chain) as read:
        assert read.tokens_by_tier == {"warm": 3 * BLOCK_TOKENS, "cold": 5 * BLOCK_TOKENS}


def test_prefetched_blocks_count_for_the_tier_they_came_from(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 16)
    store(cache, spec, chain)
    push_out(cache, spec)
    before = cache.stats()["counters"]
    ticket = cache.prefetch(chain)
    wait_until(lambda: finished(ticket))
    progress = ticket.progress()
    assert (progress.blocks_done, progress.blocks_total) == (16, 16)
    assert progress.bytes_done == progress.bytes_total == 16 * spec.layout().nbytes
    assert set(peer.lookup(chain).tiers) == {"warm"}
    with peer.acquire(chain, wait_s=0.0) as read:
        assert read.tokens_by_tier == {"cold": 16 * BLOCK_TOKENS}
        assert_intact(read, spec, chain)
    with peer.acquire(chain, wait_s=0.0) as read:
        assert read.tokens_by_tier == {"warm": 16 * BLOCK_TOKENS}
    after = cache.stats()["counters"]
    assert after["hit_tokens"]["cold"] - before["hit_tokens"].get("cold", 0) == 16 * BLOCK_TOKENS
    assert after["exposed_seconds"] == before["exposed_seconds"]  # all of it was over before anybody asked
    assert after["hidden_seconds"] > before["hidden_seconds"]


def test_a_cancelled_prefetch_stops_and_the_next_one_works(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 60)
    store(cache, spec, chain)
    push_out(cache, spec)
    for _ in range(5):
        ticket = cache.prefetch(chain)
        ticket.cancel()
        ticket.cancel()
        assert ticket.progress().state == "cancelled"
    # Loads that were cancelled are no obstacle for somebody who wants the same blocks at the same moment.
    with peer.acquire(chain, wait_s=20.0) as read:
        assert read.hit_blocks == 60
        assert_intact(read, spec, chain)


def test_a_chain_larger_than_memory_gives_what_fits(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 2 * WHOLE)
    store_far(cache, spec, chain)
    assert cache.lookup(chain).blocks == 2 * WHOLE
    missed = cache.stats()["counters"]["missed_blocks"].get("no_room", 0)
    with peer.acquire(chain, wait_s=60.0) as read:
        assert (read.hit_blocks, read.published_blocks) == (WHOLE, 2 * WHOLE)
        assert_intact(read, spec, chain)
    assert cache.stats()["counters"]["missed_blocks"]["no_room"] == missed + WHOLE
    ticket = peer.prefetch(chain)
    wait_until(lambda: finished(ticket))
    assert cache.lookup(head(chain, WHOLE // 2)).tiers == ("warm",) * (WHOLE // 2)


def test_a_windowed_chain_larger_than_memory_gives_what_fits(cache: Cache, peer: Cache) -> None:
    spec = make_spec(KVGroup((0,), "full", 1, 64), KVGroup((1,), "sliding_window", 1, 64, window=3 * BLOCK_TOKENS))
    cache.register(spec)
    peer.register(spec)
    chain = make_chain(spec, 2 * WHOLE)
    store_far(cache, spec, chain)
    assert cache.lookup(chain).blocks == 2 * WHOLE
    with peer.acquire(chain, wait_s=60.0) as read:
        assert read.hit_blocks == WHOLE - 3
        assert [ref.index for ref in read.blocks if ref.group == 1] == [WHOLE - 6, WHOLE - 5, WHOLE - 4]
        assert_intact(read, spec, chain)


def test_two_readers_share_a_memory_that_holds_one_of_them(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    one, two = make_chain(spec, 100, 1), make_chain(spec, 100, 2)
    store_far(cache, spec, one)
    store_far(cache, spec, two)
    with cache.acquire(one, wait_s=20.0) as mine:
        assert mine.hit_blocks == 100
        with peer.acquire(two, wait_s=20.0) as theirs:
            assert theirs.hit_blocks == WHOLE - 100
            assert_intact(theirs, spec, two)
        assert_intact(mine, spec, one)
    with peer.acquire(two, wait_s=20.0) as theirs:
        assert theirs.hit_blocks == 100
        assert_intact(theirs, spec, two)


def test_a_full_memory_answers_no_room_and_recovers(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain, more = make_chain(spec, WHOLE), make_chain(spec, 4, 1)
    store(cache, spec, chain)
    with cache.acquire(chain, wait_s=20.0) as read:
        assert read.hit_blocks == WHOLE
        with peer.reserve(more, wait_s=0.0) as lease:
            assert [g.state for g in lease.grants] == ["no_room"] * 4
            assert lease.commit() == 0
        assert_intact(read, spec, chain)
    assert store(peer, spec, more) == 4


def test_deletion_reaches_every_tier(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 10)
    store(cache, spec, chain)
    cache.flush()
    assert cache.delete(chain) == 1
    push_out(cache, spec)
    assert cache.lookup(chain).blocks == 9
    assert cache.delete(head(chain, 9)) == 1
    ticket = peer.prefetch(chain)
    wait_until(lambda: finished(ticket))
    assert store(cache, spec, chain) == 2
    with peer.acquire(chain, wait_s=20.0) as read:
        assert read.hit_blocks == 10
        assert_intact(read, spec, chain)
    assert cache.clear(spec.namespace) == 10 + 2 * WHOLE
    assert cache.lookup(chain).blocks == 0
