"""A read lease that one process acquires and another reads under and ends."""

from __future__ import annotations

import pytest

import tierkv
from tests.service.daemon import BLOCK_BYTES, SPEC, Daemon
from tierkv.cache import Cache, Chain
from tierkv.client.remote import RemoteCache
from tierkv.embedded import EmbeddedCache
from tierkv.errors import LeaseLost, TierKVError

CHAIN = Chain.of(SPEC, range(5 * SPEC.block_tokens))


def store(cache: Cache) -> None:
    with cache.reserve(CHAIN) as lease:
        for grant in lease.granted:
            lease.write(grant.index, bytes([grant.index + 1]) * BLOCK_BYTES, grant.group)
        lease.commit()


def hit_tokens(cache: Cache) -> int:
    return sum(cache.stats()["counters"]["hit_tokens"].values())


def check(holder: RemoteCache | EmbeddedCache, reader: RemoteCache | EmbeddedCache) -> None:
    """Acquire here, read there, and see that nothing is left."""
    before = hit_tokens(holder)
    acquired = holder.acquire(CHAIN)
    assert acquired.hit_blocks == 5
    handle = acquired.hand_over()
    acquired.release()  # is over here, and means nothing
    with pytest.raises(LeaseLost):
        acquired.view(0)
    with reader.take_over(CHAIN.namespace, handle) as taken:
        assert [bytes(taken.view(index)) for index in range(5)] == [bytes([n + 1]) * BLOCK_BYTES for n in range(5)]
        assert holder.stats()["leases"]["read"] == 1
    assert holder.stats()["leases"]["read"] == 0
    assert hit_tokens(holder) - before == 5 * SPEC.block_tokens


@pytest.mark.parametrize("tcp", [False, True])
def test_another_client_reads_and_ends_it(daemon: Daemon, tcp: bool) -> None:
    holder, reader = daemon.connect(tcp=tcp), daemon.connect(tcp=tcp)
    assert isinstance(holder, RemoteCache)
    assert isinstance(reader, RemoteCache)
    store(holder)
    check(holder, reader)
    for cache in (holder, reader):
        cache.close()


def test_an_embedded_cache_hands_over_to_itself() -> None:
    cache = tierkv.open({"warm": {"capacity": "16MiB"}})
    assert isinstance(cache, EmbeddedCache)
    cache.register(SPEC)
    store(cache)
    check(cache, cache)
    cache.close()


def test_a_client_that_has_not_seen_the_restart_maps_the_new_memory(daemon: Daemon) -> None:
    reader = daemon.connect()
    assert isinstance(reader, RemoteCache)
    store(reader)  # has mapped the daemon that is stopped now
    daemon.stop()
    daemon.start()
    holder = daemon.connect()
    assert isinstance(holder, RemoteCache)
    store(holder)
    check(holder, reader)
    for cache in (holder, reader):
        cache.close()


@pytest.mark.parametrize("tcp", [False, True])
def test_a_lease_of_an_earlier_daemon_is_lost(daemon: Daemon, tcp: bool) -> None:
    holder, reader = daemon.connect(tcp=tcp), daemon.connect(tcp=tcp)
    assert isinstance(holder, RemoteCache)
    assert isinstance(reader, RemoteCache)
    store(holder)
    handle = holder.acquire(CHAIN).hand_over()
    daemon.stop()
    daemon.start()
    with pytest.raises(TierKVError), reader.take_over(CHAIN.namespace, handle) as taken:
        taken.view(0)
    for cache in (holder, reader):
        cache.close()
