"""Of several requests with the same cold prompt one computes, and the others wait for it no longer than they said."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

import tierkv
from tierkv.cache import Cache, Chain, ComputeLease, ReadLease, Written
from tierkv.core.acquiring import Terms
from tierkv.embedded import EmbeddedCache
from tierkv.errors import LeaseLost
from tierkv.spec import KVGroup, KVSpec
from tierkv.storage.tier import checksum

from .conftest import Deployment
from .control import Clock, nothing_is_held
from .support import BLOCK_TOKENS, assert_intact, head, make_chain, make_spec, payload, store, wait_until, write

SETTINGS = {
    "warm": {"capacity": "32MiB"},
    "cold": {"capacity": "64MiB"},
    "tenants": {"one": {"scope": "team"}, "two": {"scope": "team"}, "three": {"scope": "others"}},
}
LONG_S = 20.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def computes(read: ReadLease) -> ComputeLease:
    assert read.compute is not None, read.choice
    return read.compute


def span(read: ReadLease) -> tuple[int, int]:
    return computes(read).start, computes(read).stop


def publish(cache: Cache, spec: KVSpec, chain: Chain, indices: Iterable[int]) -> None:
    """Compute blocks: write and commit one after the other."""
    for index in indices:
        with cache.reserve(head(chain, index + 1), start=index) as lease:
            write(lease, spec, chain)
            assert lease.commit() == len(spec.groups)


def asks(
    pool: ThreadPoolExecutor, cache: Cache, chain: Chain, *, wait_s: float = LONG_S, compute_s: float = LONG_S
) -> Future[ReadLease]:
    return pool.submit(cache.acquire, chain, wait_s=wait_s, compute_s=compute_s)


def still_waits(*asked: Future[Any]) -> bool:
    return not wait(asked, timeout=0.05).done


def outcomes(cache: Cache) -> dict[str, int]:
    found: dict[str, int] = cache.stats()["counters"]["compute_leases"]
    return dict(found)


def test_the_first_computes_and_others_are_told(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 6)
    publish(cache, spec, chain, range(2))
    with cache.acquire(chain, compute_s=LONG_S) as first, peer.acquire(chain, wait_s=0.0, compute_s=LONG_S) as second:
        assert span(first) == (2, 6)
        assert not first.computed_elsewhere
        assert first.waited_s == 0.0
        assert (second.compute, second.computed_elsewhere, second.hit_blocks) == (None, True, 2)
        # Whoever takes no part neither waits nor computes for others.
        with peer.acquire(chain) as third:
            assert (third.compute, third.computed_elsewhere, third.waited_s) == (None, True, 0.0)
        computes(first).release()
        with peer.acquire(chain, wait_s=0.0) as fourth:
            assert (fourth.compute, fourth.computed_elsewhere) == (None, False)


def test_nothing_is_computed_of_what_is_published(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 3)
    store(cache, spec, chain)
    before = outcomes(cache)
    with cache.acquire(chain, compute_s=LONG_S) as read:
        assert (read.hit_blocks, read.compute, read.computed_elsewhere) == (3, None, False)
    with cache.acquire(make_chain(spec, 5), compute_s=LONG_S, max_blocks=3) as read:
        assert read.compute is None
    assert outcomes(cache) == before


def test_those_who_wait_get_what_is_published(
    cache: Cache, peer: Cache, spec: KVSpec, pool: ThreadPoolExecutor
) -> None:
    chain = make_chain(spec, 5)
    before, shared = outcomes(cache), cache.stats()["counters"]["shared_tokens"]
    with cache.acquire(chain, compute_s=LONG_S) as first:
        asked = [asks(pool, peer, chain) for _ in range(3)]
        assert still_waits(*asked)
        publish(cache, spec, chain, range(4))
        assert still_waits(*asked)
        publish(cache, spec, chain, [4])
        for read in (future.result(LONG_S) for future in asked):
            assert (read.hit_blocks, read.published_blocks) == (5, 5)
            assert (read.compute, read.computed_elsewhere) == (None, False)
            assert 0.0 < read.waited_s < LONG_S
            assert_intact(read, spec, chain)
            read.release()
        with pytest.raises(LeaseLost):  # it ended with its last block
            computes(first).renew(1.0)
    after = outcomes(cache)
    assert after.get("granted", 0) == before.get("granted", 0) + 1
    assert after.get("done", 0) == before.get("done", 0) + 1
    assert cache.stats()["counters"]["shared_tokens"] == shared + 3 * 5 * BLOCK_TOKENS


def test_prompts_that_part_wait_for_their_trunk_only(
    cache: Cache, peer: Cache, spec: KVSpec, pool: ThreadPoolExecutor
) -> None:
    trunk = np.arange(4 * BLOCK_TOKENS)
    left = Chain.of(spec, np.concatenate([trunk, np.arange(6 * BLOCK_TOKENS) + 10_000]))
    right = Chain.of(spec, np.concatenate([trunk, np.arange(3 * BLOCK_TOKENS) + 20_000]))
    with cache.acquire(left, compute_s=LONG_S) as first:
        asked, short = asks(pool, peer, right), asks(pool, peer, head(right, 2))
        assert still_waits(asked, short)
        publish(cache, spec, left, range(2))
        with short.result(LONG_S) as done:
            assert (done.hit_blocks, done.compute) == (2, None)
        assert still_waits(asked)
        publish(cache, spec, left, [2, 3])
        with asked.result(LONG_S) as second:
            assert second.hit_blocks == 4
            assert span(second) == (4, 7)
            assert span(first) == (0, 10)
            publish(cache, spec, left, range(4, 10))
            publish(peer, spec, right, range(4, 7))
    assert (cache.lookup(left).blocks, cache.lookup(right).blocks) == (10, 7)


def test_a_longer_prompt_goes_on_where_the_other_ends(
    cache: Cache, peer: Cache, spec: KVSpec, pool: ThreadPoolExecutor
) -> None:
    chain = make_chain(spec, 6)
    with cache.acquire(head(chain, 3), compute_s=LONG_S):
        asked = asks(pool, peer, chain)
        publish(cache, spec, chain, range(3))
        with asked.result(LONG_S) as read:
            assert read.hit_blocks == 3
            assert span(read) == (3, 6)


def test_nobody_waits_longer_than_it_said(cache: Cache, peer: Cache, spec: KVSpec, pool: ThreadPoolExecutor) -> None:
    chain = make_chain(spec, 4)
    with cache.acquire(chain, compute_s=LONG_S) as first:
        publish(cache, spec, chain, range(2))
        with asks(pool, peer, chain, wait_s=0.1).result(LONG_S) as second:
            assert (second.hit_blocks, second.published_blocks) == (2, 2)
            assert (second.compute, second.computed_elsewhere) == (None, True)
            assert second.waited_s >= 0.1
            # It goes on alone, and that is progress for everybody.
            publish(peer, spec, chain, [2, 3])
            assert cache.lookup(chain).blocks == 4
        with pytest.raises(LeaseLost):
            computes(first).renew(1.0)


def test_what_was_published_during_the_wait_is_not_left_out(
    cache: Cache, peer: Cache, spec: KVSpec, pool: ThreadPoolExecutor
) -> None:
    chain = make_chain(spec, 4)
    with cache.acquire(chain, compute_s=LONG_S):
        asked = asks(pool, peer, chain, wait_s=1.0)
        assert still_waits(asked)
        publish(cache, spec, chain, range(3))
        with asked.result(LONG_S) as read:
            assert (read.hit_blocks, read.published_blocks, read.computed_elsewhere) == (3, 3, True)
            assert_intact(read, spec, chain)


def test_a_release_wakes_one_at_once(cache: Cache, peer: Cache, spec: KVSpec, pool: ThreadPoolExecutor) -> None:
    chain = make_chain(spec, 4)
    with cache.acquire(chain, compute_s=LONG_S) as first:
        asked = [asks(pool, peer, chain) for _ in range(3)]
        assert still_waits(*asked)
        publish(cache, spec, chain, [0])
        with computes(first):
            pass
    done, waiting = wait(asked, return_when="FIRST_COMPLETED", timeout=LONG_S)
    assert len(done) == 1
    with done.pop().result() as second:
        assert span(second) == (1, 4)
        assert second.hit_blocks == 1
        assert still_waits(*waiting)
        publish(peer, spec, chain, range(1, 4))
        for future in waiting:
            with future.result(LONG_S) as read:
                assert (read.hit_blocks, read.compute) == (4, None)


def test_who_makes_no_progress_is_replaced_by_one(
    cache: Cache, peer: Cache, spec: KVSpec, pool: ThreadPoolExecutor
) -> None:
    chain = make_chain(spec, 4)
    before = outcomes(cache)
    with cache.acquire(chain, compute_s=0.2) as first:
        publish(cache, spec, chain, [0])
        asked = [asks(pool, peer, chain) for _ in range(4)]
        done, waiting = wait(asked, return_when="FIRST_COMPLETED", timeout=LONG_S)
        assert len(done) == 1
        with done.pop().result() as second:
            assert span(second) == (1, 4)
            assert still_waits(*waiting)
            with pytest.raises(LeaseLost):
                computes(first).renew(1.0)
            computes(first).release()
            # The late one may still publish what it has; the new one does the rest.
            publish(cache, spec, chain, [1])
            publish(peer, spec, chain, [2, 3])
            for future in waiting:
                with future.result(LONG_S) as read:
                    assert (read.hit_blocks, read.compute) == (4, None)
    after = outcomes(cache)
    assert after["granted"] == before.get("granted", 0) + 2
    assert after["expired"] == before.get("expired", 0) + 1
    assert after["done"] == before.get("done", 0) + 1


@pytest.mark.parametrize("blocks", [1, 40])
def test_of_a_crowd_one_computes(
    deployment: Deployment, cache: Cache, tenant: str, spec: KVSpec, pool: ThreadPoolExecutor, blocks: int
) -> None:
    chain = make_chain(spec, blocks)
    before = outcomes(cache)
    ready = Barrier(8)

    def serve(client: Cache) -> int:
        client.register(spec)
        ready.wait(LONG_S)
        with client.acquire(chain, wait_s=LONG_S, compute_s=LONG_S) as read:
            computed = range(read.hit_blocks, blocks)
            publish(client, spec, chain, computed)
            return len(computed)

    clients = [deployment.connect(tenant) for _ in range(8)]
    assert sorted(pool.map(serve, clients)) == [0] * 7 + [blocks]
    assert outcomes(cache).get("granted", 0) == before.get("granted", 0) + 1


def test_a_block_is_there_when_all_its_groups_are(cache: Cache, peer: Cache, pool: ThreadPoolExecutor) -> None:
    spec = make_spec(KVGroup((0,), "full", 1, 64), KVGroup((1,), "mla", 1, 64))
    for client in (cache, peer):
        client.register(spec)
    chain = make_chain(spec, 2)
    with cache.acquire(chain, compute_s=LONG_S), cache.reserve(chain) as lease:
        asked = asks(pool, peer, chain)
        write(lease, spec, chain)
        lease.commit([0])
        assert still_waits(asked)
        lease.commit([1])
        with asked.result(LONG_S) as read:
            assert read.hit_blocks == 2
            assert len(read.blocks) == 4
            assert_intact(read, spec, chain)


def test_a_group_alone_does_not_end_the_wait(embedded: EmbeddedCache, pool: ThreadPoolExecutor) -> None:
    spec = make_spec(KVGroup((0,), "full", 1, 64), KVGroup((1,), "mla", 1, 64))
    embedded.register(spec)
    chain = make_chain(spec, 1)
    writer, tenant = embedded.engine.writer, embedded.engine.tenant("default")
    with embedded.acquire(chain, compute_s=LONG_S) as first, embedded.reserve(chain) as lease:
        asked = asks(pool, embedded, chain)
        write(lease, spec, chain)
        blocks = [payload(spec, chain, 0, group) for group in (0, 1)]
        written = [Written(0, group, len(block), checksum(block)) for group, block in enumerate(blocks)]
        writer.commit(tenant, lease.id, written[:1])
        assert still_waits(asked)
        computes(first).renew(LONG_S)
        writer.commit(tenant, lease.id, written[1:])
        with asked.result(LONG_S) as read:
            assert (read.hit_blocks, read.compute) == (1, None)


def test_a_windowed_prompt_is_shared_like_any_other(cache: Cache, peer: Cache, pool: ThreadPoolExecutor) -> None:
    spec = make_spec(KVGroup((0,), "full", 1, 64), KVGroup((1,), "sliding_window", 1, 64, window=2 * BLOCK_TOKENS))
    for client in (cache, peer):
        client.register(spec)
    chain = make_chain(spec, 6)
    with cache.acquire(chain, compute_s=LONG_S) as first:
        assert span(first) == (0, 6)
        asked = asks(pool, peer, chain)
        publish(cache, spec, chain, range(5))
        assert still_waits(asked)
        publish(cache, spec, chain, [5])
        with asked.result(LONG_S) as read:
            assert read.hit_blocks == 6
            assert [ref.index for ref in read.blocks if ref.group == 1] == [4, 5]
            assert_intact(read, spec, chain)


def test_strangers_do_not_wait_for_each_other(deployment: Deployment, spec: KVSpec, cache: Cache) -> None:
    chain = make_chain(spec, 4)
    one, three = deployment.connect("one"), deployment.connect("three")
    reads = [client.acquire(chain, wait_s=LONG_S, compute_s=LONG_S) for client in (cache, one, three)]
    for read in reads:
        assert span(read) == (0, 4)
        assert (read.computed_elsewhere, read.waited_s) == (False, 0.0)
        computes(read).release()


def test_members_of_a_scope_wait_for_each_other(deployment: Deployment, spec: KVSpec, pool: ThreadPoolExecutor) -> None:
    chain = make_chain(spec, 4)
    one, two = deployment.connect("one"), deployment.connect("two")
    with one.acquire(chain, compute_s=LONG_S) as first:
        assert span(first) == (0, 4)
        asked = asks(pool, two, chain)
        assert still_waits(asked)
        publish(one, spec, chain, range(4))
        with asked.result(LONG_S) as read:
            assert (read.hit_blocks, read.compute) == (4, None)
            assert_intact(read, spec, chain)


def test_a_lease_is_its_holders_alone(deployment: Deployment, spec: KVSpec, cache: Cache) -> None:
    chain = make_chain(spec, 2)
    with cache.acquire(chain, compute_s=LONG_S) as first:
        with deployment.connect("three").acquire(chain, compute_s=LONG_S) as other:
            stolen = computes(other)
            stolen.id = computes(first).id
            with pytest.raises(LeaseLost):
                stolen.renew(1.0)
            stolen.release()
        computes(first).renew(LONG_S)


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[EmbeddedCache]:
    with tierkv.open({"warm": {"capacity": "16MiB", "directory": str(tmp_path)}}) as cache:
        assert isinstance(cache, EmbeddedCache)
        yield cache


def test_a_lease_lives_from_progress_to_progress(embedded: EmbeddedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec()
    embedded.register(spec)
    chain, other = make_chain(spec, 8), make_chain(spec, 1, seed=1)
    clock = Clock(monkeypatch, embedded)

    def pass_time(seconds: float) -> None:
        embedded.reserve(other, ttl_s=1.0)  # once this has expired, so has whatever else was due
        clock.advance(seconds)
        wait_until(lambda: not embedded.stats()["leases"]["write"])

    with embedded.acquire(chain, compute_s=100.0, ttl_s=1e6) as first:
        for index in range(5):
            pass_time(90.0)
            publish(embedded, spec, chain, [index])
        computes(first).renew(1000.0)
        pass_time(900.0)
        publish(embedded, spec, chain, [5])  # a renewal holds for all progress from now on
        pass_time(900.0)
        assert embedded.stats()["counters"]["compute_leases"] == {"granted": 1}
        pass_time(110.0)
        assert embedded.stats()["counters"]["compute_leases"] == {"granted": 1, "expired": 1}
        with pytest.raises(LeaseLost):
            computes(first).renew(1.0)
        with embedded.acquire(chain, compute_s=1.0) as second:
            assert span(second) == (6, 8)


def test_who_takes_over_can_store_what_it_computes(embedded: EmbeddedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec()
    embedded.register(spec)
    chain = make_chain(spec, 6)
    clock = Clock(monkeypatch, embedded)
    embedded.acquire(chain, compute_s=5.0)
    dead = embedded.reserve(chain)
    write(dead, spec, chain)
    dead.commit([0, 1])
    clock.advance(6.0)
    wait_until(lambda: not embedded.stats()["leases"]["compute"])
    with embedded.acquire(chain, compute_s=5.0) as second:
        assert span(second) == (2, 6)
        publish(embedded, spec, chain, range(2, 6))
    assert embedded.lookup(chain).blocks == 6


def test_whatever_groups_are_computed_it_is_known(embedded: EmbeddedCache) -> None:
    spec = make_spec(KVGroup((0,), "full", 1, 64), KVGroup((1,), "full", 1, 64))
    embedded.register(spec)
    chain = make_chain(spec, 2)
    with embedded.acquire(chain, compute_s=LONG_S, groups=(1,)) as first:
        assert span(first) == (0, 2)
        with embedded.acquire(chain, wait_s=0.0, compute_s=LONG_S) as second:
            assert second.computed_elsewhere


def test_a_client_that_closes_computes_no_more(daemon: tuple[list[str], Path]) -> None:
    spec = make_spec()
    chain = make_chain(spec, 2)
    with tierkv.connect(daemon[0][0]) as leaving, tierkv.connect(daemon[0][0]) as staying:
        leaving.register(spec)
        read = leaving.acquire(chain, compute_s=LONG_S)
        leaving.close()
        assert span(read) == (0, 2)
        with staying.acquire(chain, wait_s=0.0, compute_s=LONG_S) as second:
            assert span(second) == (0, 2)


def test_who_stops_waiting_leaves_nothing(embedded: EmbeddedCache) -> None:
    spec = make_spec()
    embedded.register(spec)
    chain = make_chain(spec, 4)
    publish(embedded, spec, chain, [0])
    engine = embedded.engine
    with embedded.acquire(chain, compute_s=LONG_S) as first:
        terms = Terms(frozenset({"warm"}), LONG_S, LONG_S, compute_s=LONG_S)
        step = engine.reader.acquire(engine.tenant("default"), spec.namespace, chain.hashes, terms)
        next(step)
        step.close()
        publish(embedded, spec, chain, range(1, 4))
        assert first.hit_blocks == 1
    assert nothing_is_held(embedded)
    assert embedded.stats()["counters"]["compute_leases"] == {"granted": 1, "done": 1}


def test_closing_wakes_those_who_wait(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    spec = make_spec()
    with tierkv.open({"warm": {"capacity": "1MiB", "directory": str(tmp_path)}}) as cache:
        cache.register(spec)
        chain = make_chain(spec, 4)
        cache.acquire(chain, compute_s=LONG_S)
        asked = asks(pool, cache, chain, wait_s=math.inf)
        assert still_waits(asked)
    assert asked.exception(LONG_S) is None or isinstance(asked.exception(), tierkv.TierKVError)
