"""Readers, writers, prefetch, deletion and eviction at the same time; every byte is checked."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import tierkv
from tierkv.cache import Chain
from tierkv.embedded import EmbeddedCache
from tierkv.spec import KVSpec

from .support import assert_intact, head, make_chain, make_spec, payload, store_far, wait_until

ROUNDS = 400 if os.environ.get("TIERKV_LONG") else 60
CHAINS = 12
BLOCKS = 24  # all chains together are more than twice the warm tier


def run_all(workers: list[Callable[[], None]]) -> None:
    """Run every worker on a thread of its own; the first error fails the test."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(work,)) for work in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
        assert not thread.is_alive(), "a worker hangs"
    if errors:
        raise errors[0]


class Crowd:
    """Threads over one cache. Payloads depend on the place in the chain only: whoever stores stores the same."""

    def __init__(self, cache: EmbeddedCache, spec: KVSpec, chains: list[Chain]) -> None:
        self.cache, self.spec, self.chains = cache, spec, chains
        self.hits = 0

    def reader(self, seed: int) -> Callable[[], None]:
        def work() -> None:
            rng = random.Random(seed)
            for _ in range(ROUNDS):
                chain = head(rng.choice(self.chains), rng.randint(1, BLOCKS))
                wait_s = rng.choice([0.0, 0.002, 1.0])
                with self.cache.acquire(chain, wait_s=wait_s, ttl_s=60.0) as read:
                    assert read.hit_blocks <= read.published_blocks
                    assert sum(read.tokens_by_tier.values()) == read.hit_tokens
                    assert_intact(read, self.spec, chain)
                    self.hits += read.hit_blocks

        return work

    def writer(self, seed: int) -> Callable[[], None]:
        def work() -> None:
            rng = random.Random(seed)
            for _ in range(ROUNDS):
                chain = rng.choice(self.chains)
                with self.cache.reserve(chain, wait_s=rng.choice([0.0, 1.0])) as lease:
                    grants = list(lease.granted)
                    if rng.random() < 0.3:
                        rng.shuffle(grants)
                    for grant in grants[: rng.randint(0, len(grants))]:
                        lease.buffer(grant.index)[:] = payload(self.spec, chain, grant.index)
                        lease.commit([grant.index])

        return work

    def mover(self, seed: int) -> Callable[[], None]:
        def work() -> None:
            rng = random.Random(seed)
            for _ in range(ROUNDS):
                ticket = self.cache.prefetch(rng.choice(self.chains))
                if rng.random() < 0.5:
                    ticket.cancel()
                ticket.progress()
                if rng.random() < 0.3:
                    self.cache.delete(head(rng.choice(self.chains), rng.randint(1, BLOCKS)))
                if rng.random() < 0.05:
                    self.cache.flush()

        return work


@pytest.mark.parametrize("hot", [False, True])
def test_nothing_breaks_in_a_crowd(tmp_path: Path, hot: bool) -> None:
    config = {
        "state_dir": str(tmp_path / "state"),
        "warm": {"capacity": "1MiB", "directory": str(tmp_path)},
        "cold": {"capacity": "8MiB"},
        "load_threads": 3,
    }
    if hot:
        pytest.importorskip("torch")
        config["hot"] = {"capacity": "1MiB", "device": "cpu"}
    spec = make_spec()
    chains = [make_chain(spec, BLOCKS, seed) for seed in range(CHAINS)]
    with tierkv.open(config) as cache:
        assert isinstance(cache, EmbeddedCache)
        cache.register(spec)
        for chain in chains:
            store_far(cache, spec, chain)
        crowd = Crowd(cache, spec, chains)
        run_all([crowd.reader(n) for n in range(4)] + [crowd.writer(n) for n in (10, 11)] + [crowd.mover(20)])
        assert crowd.hits > 0
        for chain in chains:  # what was committed ahead of a block that is missing waits for it until its lease ends
            store_far(cache, spec, chain)
        state = cache.engine._state
        assert state.counters.corrupt_blocks == {}
        assert state.counters.refused_demotions == {}
        wait_until(lambda: not cache.engine._loader._running)
        cache.flush()
        with state.lock:
            assert state.leases.counts() == {"read": 0, "write": 0, "compute": 0, "pin": 0}
            assert not any(entry.pins or entry.withdrawn for entry in state.index)
            for table in (state.writing, state.waiting, state.quarantine, state.index.purging):
                assert not table
            for memory in state.placement.memory:
                slots = memory.tier.allocator.usage().slots  # type: ignore[attr-defined]
                assert slots == sum(1 for _ in memory.tier.records())
            # A block that is said to be in the cold tier is there, as it should be.
            cold = state.placement.cold
            assert cold is not None
            for entry in state.index:
                if entry.levels >> state.placement.cold_level & 1:
                    found = cold.meta(entry.key)
                    assert found is not None
                    assert found.checksum == entry.meta.checksum
    with tierkv.open(config) as cache:
        cache.register(spec)
        for chain in chains:
            with cache.acquire(chain, wait_s=30.0) as read:
                assert read.hit_blocks == read.published_blocks
                assert_intact(read, spec, chain)
