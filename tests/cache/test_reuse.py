"""What reuse is for: a long shared prefix is prefilled once, however much else passes through the cache."""

from __future__ import annotations

import numpy as np

import tierkv
from tierkv.cache import Chain
from tierkv.spec import KVGroup

from .support import make_spec

SHARED, OWN, REQUESTS = 20_000, 1_000, 1_000
BLOCK_TOKENS = 32


def test_a_shared_prefix_is_prefilled_once() -> None:
    spec = make_spec(KVGroup((0,), "full", 1, 8), block_tokens=BLOCK_TOKENS)
    prefilled = 0
    with tierkv.open({"warm": {"capacity": "8MiB"}}) as cache:  # room for six times the shared prefix, not for the rest
        cache.register(spec)
        for number in range(REQUESTS):
            own = np.arange(OWN) + SHARED * (number + 1)
            chain = Chain.of(spec, np.concatenate([np.arange(SHARED), own]))
            with cache.acquire(chain, wait_s=0.0) as read:
                prefilled += SHARED + OWN - read.hit_tokens
                with cache.reserve(chain, start=read.hit_blocks) as write:
                    write.commit()
    assert prefilled <= 1_030_000, f"{prefilled:,} of {REQUESTS * (SHARED + OWN):,} positions were prefilled"
