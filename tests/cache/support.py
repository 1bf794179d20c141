"""What the tests of the cache share: specs of small blocks, payloads that say whose they are, and ways to wait."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from threading import Event
from typing import Any

import numpy as np

from tierkv.cache import Cache, Chain, ReadLease, WriteLease
from tierkv.spec import KVGroup, KVSpec

BLOCK_TOKENS = 16
BLOCK_BYTES = 8192

_names = itertools.count()
_nap = Event()


def make_spec(*groups: KVGroup, **fields: Any) -> KVSpec:
    """A namespace nobody else uses. The default group's blocks have `BLOCK_BYTES`."""
    fields = {"dtype": "float32", "block_tokens": BLOCK_TOKENS, **fields}
    return KVSpec(f"model-{next(_names)}", "weights", groups=groups or (KVGroup((0,), "full", 1, 64),), **fields)


def make_chain(spec: KVSpec, blocks: int, seed: int = 0) -> Chain:
    """The chain of a prompt that differs from its first token on for every seed."""
    tokens = np.arange(blocks * spec.block_tokens) + (seed << 20)
    return Chain.of(spec, tokens)


def head(chain: Chain, blocks: int) -> Chain:
    return Chain(chain.namespace, chain.hashes[:blocks])


def payload(spec: KVSpec, chain: Chain, index: int, group: int = 0) -> bytes:
    """The bytes of one block: random, but always the same for one place in one chain."""
    seed = int.from_bytes(chain.hashes[index][:8], "little") + group
    return np.random.default_rng(seed).bytes(spec.layout(group).nbytes)


def write(lease: WriteLease, spec: KVSpec, chain: Chain, indices: Iterable[int] | None = None) -> None:
    """Fill granted blocks without committing them."""
    wanted = None if indices is None else set(indices)
    for grant in lease.granted:
        if wanted is None or grant.index in wanted:
            lease.buffer(grant.index, grant.group)[:] = payload(spec, chain, grant.index, grant.group)


def store(cache: Cache, spec: KVSpec, chain: Chain, start: int = 0, *, wait_s: float = 60.0) -> int:
    """Store what is missing of a chain; return how many blocks were accepted."""
    with cache.reserve(chain, start=start, wait_s=wait_s) as lease:
        write(lease, spec, chain)
        return lease.commit()


def store_far(cache: Cache, spec: KVSpec, chain: Chain, step: int = 16) -> None:
    """Store a chain that may be larger than memory, a few blocks at a time."""
    for start in range(0, len(chain), step):
        store(cache, spec, head(chain, start + step), start)


def assert_intact(lease: ReadLease, spec: KVSpec, chain: Chain) -> None:
    """Every block of a lease is exactly what was stored for its place in the chain."""
    for ref in lease.blocks:
        assert bytes(lease.view(ref.index, ref.group)) == payload(spec, chain, ref.index, ref.group), ref


def wait_until(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    """Poll until something in the background has happened."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        _nap.wait(0.005)
