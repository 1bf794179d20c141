"""Readers, writers, leases, loads and eviction at once, for a while: every byte any of them sees is checked."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import tierkv
from tests.cache.support import head, make_chain, make_spec, payload, store_far
from tests.torture.support import LONG, say
from tierkv.cache import Cache, Chain
from tierkv.spec import KVSpec

READERS, WRITERS = 8, 2
SECONDS = 60.0 if LONG else 0.0
AT_LEAST = 60  # rounds of every thread, however long they take
CHAINS, BLOCKS = 40, 16  # 5 MiB: five times warm, and more than cold holds


class Crowd:
    """What the threads share."""

    def __init__(self, cache: Cache, spec: KVSpec, chains: list[Chain]) -> None:
        self.cache, self.spec, self.chains = cache, spec, chains
        self.ends = time.monotonic() + SECONDS
        self.lock = threading.Lock()
        self.verified = self.stored = 0
        self.errors: list[BaseException] = []

    def run(self, work: Callable[[random.Random], int], seed: int) -> int:
        """Repeat `work` until time is up; return the sum of what it returned."""
        rng = random.Random(seed)
        total = rounds = 0
        try:
            while not self.errors and (rounds < AT_LEAST or time.monotonic() < self.ends):
                total += work(rng)
                rounds += 1
        except BaseException as error:
            self.errors.append(error)
        return total

    def read(self, rng: random.Random) -> int:
        """Acquire, look, sometimes keep the lease for a moment and look again."""
        chain = head(rng.choice(self.chains), rng.randint(1, BLOCKS))
        with self.cache.acquire(chain, wait_s=rng.choice([0.0, 0.01, 2.0]), ttl_s=60.0) as read:
            for _ in range(rng.choice([1, 1, 2])):
                for ref in read.blocks:
                    if bytes(read.view(ref.index)) != payload(self.spec, chain, ref.index):
                        raise AssertionError(f"block {ref.index} is not what was stored")
            return len(read.blocks)

    def write(self, rng: random.Random) -> int:
        """Delete a tail now and then, and store what is missing."""
        chain = rng.choice(self.chains)
        if rng.random() < 0.3:
            self.cache.delete(head(chain, rng.randint(1, BLOCKS)))
        with self.cache.reserve(chain, wait_s=rng.choice([0.0, 0.5])) as lease:
            for grant in lease.granted:
                lease.buffer(grant.index)[:] = payload(self.spec, chain, grant.index)
                if rng.random() < 0.9:
                    lease.commit([grant.index])
            return len(lease.granted)


def test_a_crowd_never_sees_a_wrong_byte(tmp_path: Path) -> None:
    config = {
        "state_dir": str(tmp_path / "state"),
        "warm": {"capacity": "1MiB", "directory": str(tmp_path)},
        "cold": {"capacity": "6MiB", "segment": "1MiB", "codec": "raw"},
        "load_threads": 2,
    }
    spec = make_spec()
    chains = [make_chain(spec, BLOCKS, seed) for seed in range(CHAINS)]
    with tierkv.open(config) as cache:
        cache.register(spec)
        for chain in chains:
            store_far(cache, spec, chain)
        crowd = Crowd(cache, spec, chains)
        verified, stored = [0] * READERS, [0] * WRITERS

        def reader(number: int) -> None:
            verified[number] = crowd.run(crowd.read, number)

        def writer(number: int) -> None:
            stored[number] = crowd.run(crowd.write, 100 + number)

        threads = [threading.Thread(target=reader, args=(n,)) for n in range(READERS)]
        threads += [threading.Thread(target=writer, args=(n,)) for n in range(WRITERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS + 120.0)
            assert not thread.is_alive(), "a thread hangs"
        assert not crowd.errors, crowd.errors[0]
        stats = cache.stats()
        assert stats["leases"]["read"] == 0
        assert stats["counters"]["corrupt_blocks"] == {}
        assert stats["counters"]["evicted_blocks"]["warm"] > 0
        assert stats["tiers"]["cold"]["damage"] == {}
        assert sum(verified) > 0
    say(
        f"{READERS} readers verified {sum(verified)} blocks while {WRITERS} writers were granted {sum(stored)}, "
        f"{stats['counters']['evicted_blocks']} evicted"
    )
