"""Prefetching: what is wanted first comes first, loads are shared, and what nobody wants any more is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tierkv
from tierkv.cache import Cache, Chain
from tierkv.core import prefetching
from tierkv.core.acquiring import Terms
from tierkv.core.steps import run_async
from tierkv.embedded import EmbeddedCache
from tierkv.errors import InvalidRequest, NotFound
from tierkv.spec import KVGroup, KVSpec

from .control import Clock, HeldReads, nothing_is_held
from .support import BLOCK_TOKENS, assert_intact, head, make_chain, make_spec, store, store_far, wait_until

WHOLE = 128  # blocks that fill the warm tier
SETTINGS = {"warm": {"capacity": "1MiB", "policy": "lru"}, "cold": {"capacity": "64MiB", "codec": "raw"}}
LONG_S = 20.0


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[EmbeddedCache]:
    """A cache that loads one block at a time."""
    tiers = {"warm": {"capacity": "1MiB", "directory": str(tmp_path), "policy": "lru"}, "cold": {"capacity": "32MiB"}}
    with tierkv.open({"state_dir": str(tmp_path / "state"), "load_threads": 1, **tiers}) as cache:
        assert isinstance(cache, EmbeddedCache)
        yield cache


@pytest.fixture
def reads(embedded: EmbeddedCache, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldReads]:
    reads = HeldReads(monkeypatch, embedded)
    yield reads
    reads.open()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def push_out(cache: Cache, spec: KVSpec) -> None:
    """Leave nothing of what was stored before in memory."""
    cache.flush()
    store_far(cache, spec, make_chain(spec, 2 * WHOLE, seed=1000))


def cold_chains(cache: EmbeddedCache, spec: KVSpec, *blocks: int) -> list[Chain]:
    """Chains of so many blocks that only the cold tier has."""
    cache.register(spec)
    chains = [make_chain(spec, count, seed) for seed, count in enumerate(blocks)]
    for chain in chains:
        store(cache, spec, chain)
    push_out(cache, spec)
    assert {tier for chain in chains for tier in cache.lookup(chain).tiers} == {"cold"}
    return chains


def blocked_by(cache: EmbeddedCache, reads: HeldReads, chain: Chain) -> None:
    """Let a first block keep the only loading thread busy."""
    cache.prefetch(chain)
    wait_until(lambda: len(reads.begun) == 1)


def asks(pool: ThreadPoolExecutor, cache: Cache, chain: Chain, **terms: Any) -> Future[Any]:
    return pool.submit(cache.acquire, chain, wait_s=LONG_S, **terms)


def queued(cache: EmbeddedCache) -> int:
    count: int = cache.stats()["loads"]["queued"]
    return count


def test_the_earliest_deadline_is_first(embedded: EmbeddedCache, reads: HeldReads) -> None:
    first, late, soon, now = chains = cold_chains(embedded, make_spec(), 1, 3, 3, 3)
    blocked_by(embedded, reads, first)
    tickets = [
        embedded.prefetch(chain, deadline_s=deadline_s) for chain, deadline_s in ((late, 500), (soon, 90), (now, 50))
    ]
    assert [ticket.progress().state for ticket in tickets] == ["loading"] * 3
    reads.open()
    for ticket in tickets:
        assert ticket.wait(LONG_S).blocks_done == 3
    assert reads.order(*chains) == [(0, 0, 0)] + [(n, index, 0) for n in (3, 2, 1) for index in range(3)]


def test_who_waits_is_before_who_prefetches(
    embedded: EmbeddedCache, reads: HeldReads, pool: ThreadPoolExecutor
) -> None:
    first, prefetched, wanted = chains = cold_chains(embedded, make_spec(), 1, 3, 3)
    blocked_by(embedded, reads, first)
    ticket = embedded.prefetch(prefetched, deadline_s=LONG_S)
    asked = asks(pool, embedded, wanted)
    wait_until(lambda: queued(embedded) == 6)
    reads.open()
    asked.result(LONG_S).release()
    ticket.wait(LONG_S)
    assert reads.order(*chains) == [(0, 0, 0)] + [(n, index, 0) for n in (2, 1) for index in range(3)]


def test_waiting_hastens_what_was_prefetched(
    embedded: EmbeddedCache, reads: HeldReads, pool: ThreadPoolExecutor
) -> None:
    first, early, shared = chains = cold_chains(embedded, make_spec(), 1, 3, 3)
    blocked_by(embedded, reads, first)
    embedded.prefetch(early, deadline_s=60)
    ticket = embedded.prefetch(shared, deadline_s=500)
    asked = asks(pool, embedded, head(shared, 2))
    wait_until(lambda: embedded.engine._loader._running[block_key(embedded, shared, 1), 0].wanted == 2)
    reads.open()
    with asked.result(LONG_S) as read:
        assert read.tokens_by_tier == {"cold": 2 * BLOCK_TOKENS}
    assert ticket.wait(LONG_S).blocks_done == 3
    wait_until(lambda: len(reads.begun) == 7)
    began = reads.order(*chains)
    assert began == [(0, 0, 0), (2, 0, 0), (2, 1, 0), (1, 0, 0), (1, 1, 0), (1, 2, 0), (2, 2, 0)]


def block_key(cache: EmbeddedCache, chain: Chain, index: int, group: int = 0) -> bytes:
    return cache.engine.tenant("default").block_key(chain.hashes[index], group)


def test_each_block_is_read_once_whoever_wants_it(
    embedded: EmbeddedCache, reads: HeldReads, pool: ThreadPoolExecutor
) -> None:
    spec = make_spec()
    (chain,) = cold_chains(embedded, spec, 6)
    tickets = [embedded.prefetch(head(chain, 4)), embedded.prefetch(chain)]
    asked = [asks(pool, embedded, chain) for _ in range(3)]
    wait_until(lambda: embedded.engine._loader._running[block_key(embedded, chain, 5), 0].wanted == 4)
    reads.open()
    for future in asked:
        with future.result(LONG_S) as read:
            assert read.hit_blocks == 6
            assert_intact(read, spec, chain)
    assert [ticket.wait(LONG_S).blocks_done for ticket in tickets] == [4, 6]
    assert reads.order(chain) == [(0, index, 0) for index in range(6)]
    wait_until(lambda: nothing_is_held(embedded))


def test_cancelling_stops_what_nobody_else_wants(embedded: EmbeddedCache, reads: HeldReads) -> None:
    first, chain = chains = cold_chains(embedded, make_spec(), 1, 6)
    blocked_by(embedded, reads, first)
    cancelled, kept = embedded.prefetch(chain), embedded.prefetch(head(chain, 2))
    cancelled.cancel()
    assert queued(embedded) == 2
    assert cancelled.progress().state == "cancelled"
    assert cancelled.wait(0.0).blocks_done == 4  # the others are as done as they will ever be
    reads.open()
    assert kept.wait(LONG_S).state == "done"
    assert reads.order(*chains) == [(0, 0, 0), (1, 0, 0), (1, 1, 0)]
    assert embedded.lookup(chain).tiers == ("warm",) * 2 + ("cold",) * 4
    cancelled.cancel()
    wait_until(lambda: nothing_is_held(embedded))


def test_what_has_begun_is_not_stopped(embedded: EmbeddedCache, reads: HeldReads) -> None:
    (chain,) = cold_chains(embedded, make_spec(), 3)
    ticket = embedded.prefetch(chain)
    wait_until(lambda: len(reads.begun) == 1)
    ticket.cancel()
    reads.open()
    wait_until(lambda: nothing_is_held(embedded))
    assert embedded.lookup(chain).tiers == ("warm", "cold", "cold")
    ticket = embedded.prefetch(chain)
    assert ticket.wait(LONG_S).state == "done"
    assert ticket.progress().blocks_total == 2


def test_what_is_stale_before_it_begins_is_given_up(
    embedded: EmbeddedCache, reads: HeldReads, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    first, stale, fresh = chains = cold_chains(embedded, make_spec(), 1, 4, 2)
    clock = Clock(monkeypatch, embedded)
    blocked_by(embedded, reads, first)
    ticket, other = embedded.prefetch(stale, deadline_s=30.0), embedded.prefetch(fresh, deadline_s=90.0)
    asked = asks(pool, embedded, head(stale, 1))  # a request's own wish does not grow stale
    wait_until(lambda: embedded.engine._loader._running[block_key(embedded, stale, 0), 0].wanted == 2)
    clock.advance(31.0)
    wait_until(lambda: queued(embedded) == 3)
    assert ticket.wait(0.0).blocks_done == 3
    reads.open()
    asked.result(LONG_S).release()
    assert other.wait(LONG_S).blocks_done == 2
    assert set(reads.order(*chains)) == {(0, 0, 0), (1, 0, 0), (2, 0, 0), (2, 1, 0)}
    assert embedded.lookup(stale).tiers == ("warm", "cold", "cold", "cold")
    wait_until(lambda: nothing_is_held(embedded))


def test_old_tickets_are_forgotten(embedded: EmbeddedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    (chain,) = cold_chains(embedded, make_spec(), 2)
    clock = Clock(monkeypatch, embedded)
    ticket = embedded.prefetch(chain, deadline_s=60.0)
    assert ticket.wait(LONG_S).state == "done"
    clock.advance(61.0)
    assert ticket.progress().state == "done"
    clock.advance(prefetching.TICKET_TTL_S + 1.0)

    def forgotten() -> bool:
        try:
            ticket.progress()
        except NotFound:
            return True
        return False

    wait_until(forgotten)
    with pytest.raises(NotFound):
        ticket.cancel()


def test_groups_come_in_their_order(embedded: EmbeddedCache, pool: ThreadPoolExecutor, reads: HeldReads) -> None:
    spec = make_spec(KVGroup((0,), "full", 1, 64), KVGroup((1,), "full", 1, 64))
    (chain,) = cold_chains(embedded, spec, 3)
    ticket = embedded.prefetch(chain)
    reads.let(3)
    assert pool.submit(ticket.wait, 10 * LONG_S, groups=1).result(LONG_S).blocks_done == 3
    with embedded.acquire(chain, wait_s=0.0, groups=(0,)) as layers:
        assert layers.hit_blocks == 3
        assert [(ref.index, ref.group) for ref in layers.blocks] == [(0, 0), (1, 0), (2, 0)]
        assert_intact(layers, spec, chain)
        with embedded.acquire(chain, wait_s=0.0) as both:
            assert (both.hit_blocks, both.published_blocks) == (0, 3)
        reads.open()
        assert ticket.wait(LONG_S).blocks_done == 6
        with embedded.acquire(chain, wait_s=0.0, groups=(1,)) as rest:
            assert [(ref.index, ref.group) for ref in rest.blocks] == [(0, 1), (1, 1), (2, 1)]
            assert_intact(rest, spec, chain)
    assert reads.order(chain) == [(0, index, group) for group in (0, 1) for index in range(3)]


def test_layers_are_used_as_they_come(cache: Cache, peer: Cache) -> None:
    spec = make_spec(*(KVGroup((n,), "full", 1, 64) for n in range(3)))
    for client in (cache, peer):
        client.register(spec)
    chain = make_chain(spec, 8)
    store(cache, spec, chain)
    push_out(cache, spec)
    ticket = peer.prefetch(chain)
    for group in range(3):
        assert ticket.wait(LONG_S, groups=group + 1).blocks_done >= 8 * (group + 1)
        with peer.acquire(chain, wait_s=0.0, groups=(group,)) as read:
            assert read.tokens_by_tier == {"cold": 8 * BLOCK_TOKENS}
            assert_intact(read, spec, chain)
    for groups in ((), (3,), (-1,)):
        with pytest.raises(InvalidRequest):
            peer.acquire(chain, groups=groups)
    cache.clear(spec.namespace)


def test_a_wait_for_a_prefetch_is_bounded(embedded: EmbeddedCache, reads: HeldReads) -> None:
    (chain,) = cold_chains(embedded, make_spec(), 2)
    ticket = embedded.prefetch(chain)
    assert ticket.wait(0.05).state == "loading"
    assert ticket.wait(0.0).blocks_done == 0
    reads.open()
    progress = ticket.wait(LONG_S)
    assert (progress.state, progress.blocks_done, progress.bytes_done) == ("done", 2, progress.bytes_total)


def test_a_prefetch_of_nothing_is_done(cache: Cache, spec: KVSpec) -> None:
    store(cache, spec, make_chain(spec, 3))
    for chain in (make_chain(spec, 3), make_chain(spec, 3, seed=1)):
        progress = cache.prefetch(chain).wait(0.0)
        assert (progress.state, progress.blocks_total) == ("done", 0)
    with pytest.raises(NotFound):
        cache.prefetch(make_chain(make_spec(), 1))
    cache.clear(spec.namespace)


def counted(cache: Cache) -> dict[str, float]:
    names = ("load_seconds", "hidden_seconds", "exposed_seconds", "lead_seconds", "wasted_bytes")
    counters = cache.stats()["counters"]
    return {name: counters[name] for name in names}


def change(cache: Cache, before: dict[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in counted(cache).items()}


def test_a_load_before_the_request_is_hidden_and_has_a_lead(
    embedded: EmbeddedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    (chain,) = cold_chains(embedded, make_spec(), 4)
    clock, before = Clock(monkeypatch, embedded), counted(embedded)
    embedded.prefetch(chain, deadline_s=500.0).wait(LONG_S)
    clock.advance(100.0)
    embedded.acquire(chain, wait_s=0.0).release()
    after = change(embedded, before)
    assert after["hidden_seconds"] == pytest.approx(after["load_seconds"])
    assert 0.0 < after["load_seconds"] < 100.0
    assert (after["exposed_seconds"], after["wasted_bytes"]) == (0.0, 0)
    assert 400.0 <= after["lead_seconds"] < 500.0  # four blocks, a hundred seconds each
    embedded.acquire(chain, wait_s=0.0).release()
    assert change(embedded, before) == after  # the second use owes nothing to the prefetch


def test_a_load_that_a_request_waits_for_is_exposed(
    embedded: EmbeddedCache, reads: HeldReads, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    (chain,) = cold_chains(embedded, make_spec(), 1)
    clock, before = Clock(monkeypatch, embedded), counted(embedded)
    embedded.prefetch(chain, deadline_s=500.0)
    wait_until(lambda: len(reads.begun) == 1)
    clock.advance(100.0)
    asked = pool.submit(embedded.acquire, chain, wait_s=500.0)
    wait_until(lambda: embedded.engine._loader._running[block_key(embedded, chain, 0), 0].wanted == 2)
    clock.advance(50.0)
    reads.open()
    with asked.result(LONG_S) as read:
        assert 50.0 <= read.waited_s < 70.0
    after = change(embedded, before)
    assert 100.0 <= after["hidden_seconds"] < 120.0
    assert 50.0 <= after["exposed_seconds"] < 70.0
    assert after["load_seconds"] == pytest.approx(after["hidden_seconds"] + after["exposed_seconds"])
    assert after["lead_seconds"] == 0.0


def test_what_leaves_unused_was_wasted(embedded: EmbeddedCache) -> None:
    spec = make_spec()
    used, unused = cold_chains(embedded, spec, 3, 5)
    before = counted(embedded)
    for chain in (used, unused):
        embedded.prefetch(chain).wait(LONG_S)
    embedded.acquire(used).release()
    push_out_again = make_chain(spec, 2 * WHOLE, seed=1001)
    store_far(embedded, spec, push_out_again)
    assert set(embedded.lookup(unused).tiers) == {"cold"}
    assert change(embedded, before)["wasted_bytes"] == 5 * spec.layout().nbytes


def terms(wait_s: float) -> Terms:
    return Terms(frozenset({"warm"}), wait_s, LONG_S)


def test_a_request_that_ran_out_of_time_leaves_nothing(embedded: EmbeddedCache, reads: HeldReads) -> None:
    first, chain = chains = cold_chains(embedded, make_spec(), 1, 4)
    published, used = embedded.stats()["published_blocks"], embedded.stats()["tiers"]["warm"]["used_bytes"]
    blocked_by(embedded, reads, first)
    with embedded.acquire(chain, wait_s=0.05) as read:
        assert (read.hit_blocks, read.published_blocks) == (0, 4)
        assert read.waited_s >= 0.05
    assert queued(embedded) == 0
    reads.open()
    wait_until(lambda: nothing_is_held(embedded))
    assert reads.order(*chains) == [(0, 0, 0)]
    stats = embedded.stats()
    assert (stats["published_blocks"], stats["tiers"]["warm"]["used_bytes"]) == (published, used)
    assert stats["counters"]["missed_blocks"]["late"] == 4
    # A block that sleeps in the cold tier costs no entry once nobody wants it.
    assert embedded.engine._state.index.awake(block_key(embedded, chain, 0)) is None


async def test_a_cancelled_request_leaves_nothing(embedded: EmbeddedCache, reads: HeldReads) -> None:
    first, chain = chains = cold_chains(embedded, make_spec(), 1, 4)
    blocked_by(embedded, reads, first)
    engine = embedded.engine
    step = engine.reader.acquire(engine.tenant("default"), chain.namespace, chain.hashes, terms(LONG_S))
    task = asyncio.ensure_future(run_async(step))
    await asyncio.sleep(0)  # it begins
    assert queued(embedded) == 4
    task.cancel()
    assert (await asyncio.gather(task, return_exceptions=True))[0].__class__ is asyncio.CancelledError
    assert queued(embedded) == 0
    reads.open()
    wait_until(lambda: nothing_is_held(embedded))
    assert reads.order(*chains) == [(0, 0, 0)]
    assert engine._state.index.awake(block_key(embedded, chain, 3)) is None


def test_closing_ends_every_ticket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor) -> None:
    tiers = {"warm": {"capacity": "1MiB", "directory": str(tmp_path)}, "cold": {"capacity": "32MiB"}}
    cache = tierkv.open({"state_dir": str(tmp_path / "state"), "load_threads": 1, **tiers})
    assert isinstance(cache, EmbeddedCache)
    (chain,) = cold_chains(cache, make_spec(), 4)
    reads = HeldReads(monkeypatch, cache)
    waiting = pool.submit(cache.prefetch(chain).wait, LONG_S)
    wait_until(lambda: len(reads.begun) == 1)
    closing = pool.submit(cache.close)
    reads.open()
    closing.result(LONG_S)
    assert waiting.result(LONG_S).state == "done"
