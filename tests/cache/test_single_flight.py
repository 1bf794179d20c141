"""Of several requests with the same cold prompt one computes, and the others wait for it no longer than they said."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import numpy as np
import pytest

import tierkv
from tests.service.daemon import running
from tierkv.cache import Cache, Chain, ComputeLease, ReadLease
from tierkv.core.acquiring import Terms
from tierkv.embedded import EmbeddedCache
from tierkv.errors import LeaseLost
from tierkv.spec import KVGroup, KVSpec

from .conftest import Deployment
from .control import Clock, nothing_is_held
from .support import BLOCK_TOKENS, assert_intact, head, make_chain, make_spec, payload, store, wait_until, write

SETTINGS = {
    "warm": {"capacity": "32MiB"},
    "cold": {"capacity": "64MiB"},
    "tenants": {"one": {"scope": "team"}, "two": {"scope": "team"}, "three": {"scope": "others"}},
}
LONG_S = 60.0


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
        written = [
            tierkv.cache.Written(0, group, len(lease.buffer(0, group)), tierkv.storage.tier.checksum(lease.buffer(0, group)))
            for group in (0, 1)
        ]
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


def test_members_of_a_scope_wait_for_each_other(
    deployment: Deployment, spec: KVSpec, pool: ThreadPoolExecutor
) -> None:
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
    with tierkv.open({"warm": {"capacity": "4MiB", "directory": str(tmp_path)}}) as cache:
        assert isinstance(cache, EmbeddedCache)
        yield cache


def test_a_lease_lives_from_progress_to_progress(embedded: EmbeddedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec()
    embedded.register(spec)
    chain = make_chain(spec, 8)
    clock = Clock(monkeypatch, embedded)
    with embedded.acquire(chain, compute_s=100.0, ttl_s=1e6) as first:
        for index in range(5):
            clock.advance(90.0)
            publish(embedded, spec, chain, [index])
            wait_until(lambda: embedded.acquire(chain, wait_s=0.0, compute_s=1.0).computed_elsewhere)
        computes(first).renew(1000.0)
        clock.advance(900.0)
        publish(embedded, spec, chain, [5])  # a renewal holds for all progress from now on
        clock.advance(900.0)
        assert embedded.stats()["counters"]["compute_leases"] == {"granted": 1}
        clock.advance(110.0)
        wait_until(lambda: embedded.stats()["counters"]["compute_leases"] == {"granted": 1, "expired": 1})
        with pytest.raises(LeaseLost):
            computes(first).renew(1.0)
        with embedded.acquire(chain, compute_s=1.0) as second:
            assert span(second) == (6, 8)


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


PROMPT_TOKENS = 2000
PROCESSES = 16
PROGRESS_S = 0.5
BOUND_S = 30.0


class Engines:
    """Processes that all get the same prompt at the same moment and take some milliseconds to compute a block.

    Attributes
    ----------
    prefilled
        Blocks each has computed so far.
    """

    def __init__(self, url: str, spec: KVSpec) -> None:
        fork = multiprocessing.get_context("fork")
        self._url, self._spec = url, spec
        self._chain = Chain.of(spec, np.arange(PROMPT_TOKENS))
        self._go = fork.Barrier(PROCESSES + 1)
        self.prefilled = fork.Array("i", PROCESSES, lock=False)
        self.processes: list[BaseProcess] = [fork.Process(target=self._serve, args=(n,)) for n in range(PROCESSES)]

    @property
    def blocks(self) -> int:
        return len(self._chain)

    def start(self) -> None:
        for process in self.processes:
            process.start()
        self._go.wait(BOUND_S)

    def exit_codes(self) -> list[int | None]:
        """Wait for all of them; None for those that hang."""
        for process in self.processes:
            process.join(BOUND_S)
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return codes

    def _serve(self, number: int) -> None:
        spec, chain, nap = self._spec, self._chain, Event()
        with tierkv.connect(self._url, timeout_s=BOUND_S) as cache:
            cache.register(spec)
            self._go.wait(BOUND_S)
            with cache.acquire(chain, wait_s=BOUND_S, compute_s=PROGRESS_S) as read:
                # Of a dead engine, first the room must be free again and then its promise, or who takes over finds
                # its blocks being written by nobody.
                start, ttl_s = read.hit_blocks, PROGRESS_S / 2
                with cache.reserve(chain, start=start, ttl_s=ttl_s) as lease:
                    granted = {grant.index for grant in lease.granted}
                    for index in range(start, len(chain)):
                        nap.wait(0.003)
                        self.prefilled[number] += 1
                        if index in granted:
                            lease.write(index, payload(spec, chain, index))
                            lease.commit([index])
                            lease.renew(ttl_s)
            with cache.acquire(chain, wait_s=0.0) as read:
                assert read.hit_blocks == len(chain)
                assert_intact(read, spec, chain)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running({"warm": {"capacity": "16MiB"}}) as daemon:
        yield daemon.url


def test_sixteen_processes_prefill_one_prompt_once(url: str) -> None:
    engines = Engines(url, make_spec(KVGroup((0,), "full", 1, 16), block_tokens=64))
    engines.start()
    assert engines.exit_codes() == [0] * PROCESSES
    assert sorted(engines.prefilled) == [0] * (PROCESSES - 1) + [engines.blocks]


def test_a_killed_process_costs_less_than_half_a_prompt(url: str) -> None:
    engines = Engines(url, make_spec(KVGroup((0,), "full", 1, 16), block_tokens=64))
    engines.start()
    wait_until(lambda: max(engines.prefilled) >= engines.blocks // 2)
    victim = int(np.argmax(engines.prefilled))
    pid = engines.processes[victim].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    codes = engines.exit_codes()
    assert codes.pop(victim) == -signal.SIGKILL
    assert codes == [0] * (PROCESSES - 1)
    assert engines.blocks <= sum(engines.prefilled) <= 1.5 * engines.blocks
    assert sum(prefilled > 0 for prefilled in engines.prefilled) == 2
