"""Something to look at: two applications whose conversations share their beginnings, on a daemon with three tiers."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.service.daemon import Daemon
from tierkv.cache import Cache, Chain
from tierkv.errors import TierKVError
from tierkv.spec import KVGroup, KVSpec

SPEC = KVSpec("SmolLM2-135M", "1", "bfloat16", 16, (KVGroup(tuple(range(4)), "full", 3, 32),))
THREE_TIERS: Mapping[str, Any] = {
    "hot": {"capacity": "4MiB", "device": "cpu"},
    "warm": {"capacity": "8MiB", "demote_ahead": 0.5},
    "cold": {"capacity": "32MiB", "segment": "2MiB"},
    "tenants": {"chat": {"weight": 3, "warm": "7MiB"}, "code": {"weight": 1, "cold": "16MiB"}},
}
APPLICATIONS = {"chat": (6, 40), "code": (16, 12)}
"""Blocks of the system prompt, and how many conversations there are."""
TURN_BLOCKS = 3
LONGEST = 60
PREFILL_TOKENS_PER_S = 4000.0
# Values spread like those of real KV, in the upper half of a float32: what they are matters to the codec only.
_VALUES = np.random.default_rng(0).standard_normal(SPEC.layout().nbytes // 2).astype("<f4")
PAYLOAD = (_VALUES.view("<u4") >> 16).astype("<u2").tobytes()


def turn(cache: Cache, chain: Chain) -> None:
    """One request: what a prefix is cached is read, the rest is computed and stored."""
    with cache.acquire(chain, wait_s=1.0, prefill_tokens_per_s=PREFILL_TOKENS_PER_S) as read:
        have = read.hit_blocks
    with cache.reserve(chain, start=have) as write:
        for grant in write.granted:
            write.write(grant.index, PAYLOAD)
        write.commit()


def converse(daemon: Daemon, tenant: str, stop: threading.Event) -> None:
    """Go on with conversations of a tenant, some of them announced by a prefetch, until told to stop."""
    system_blocks, conversations = APPLICATIONS[tenant]
    rng = np.random.default_rng(len(tenant))
    system = rng.integers(0, 50_000, system_blocks * SPEC.block_tokens)
    said = [np.empty(0, np.int64) for _ in range(conversations)]
    with daemon.connect(tenant) as cache:
        cache.register(SPEC)
        while not stop.is_set():
            which = min(int(rng.exponential(conversations / 4)), conversations - 1)
            more = rng.integers(0, 50_000, TURN_BLOCKS * SPEC.block_tokens)
            said[which] = np.concatenate([said[which], more])
            chain = Chain.of(SPEC, np.concatenate([system, said[which]]))
            if len(chain) > LONGEST:
                said[which] = np.empty(0, np.int64)
            try:
                if which % 3 == 0:
                    cache.prefetch(chain, deadline_s=2.0).wait(0.05)
                turn(cache, chain)
            except TierKVError:  # the daemon is being restarted
                stop.wait(0.2)
            else:
                stop.wait(0.02)


@contextmanager
def working(daemon: Daemon) -> Iterator[None]:
    """Load the daemon from threads of this process."""
    stop = threading.Event()
    threads = [threading.Thread(target=converse, args=(daemon, tenant, stop)) for tenant in APPLICATIONS]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
