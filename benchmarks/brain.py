"""What the cache's own work costs, without moving bytes: lookups of long prompts, whole cycles, memory per block.

    python benchmarks/brain.py

Blocks are 4 KiB, so that what is measured is the index, the policy and the leases. Medians of interleaved rounds; a
BLAKE2b of the same tokens in the same run is the yardstick for lookups. See docs/benchmarks.md.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from hashlib import blake2b

import numpy as np

import tierkv
from tierkv.cache import Chain
from tierkv.embedded import EmbeddedCache
from tierkv.keys import chain_root
from tierkv.spec import KVGroup, KVSpec

BLOCK_TOKENS = 64
LONG = 131_072 // BLOCK_TOKENS
SHORT = 64
ROUNDS = 15


def spec(name: str) -> KVSpec:
    group = KVGroup((0,), "full", 1, 8)
    made = KVSpec(name, "weights", dtype="float32", block_tokens=BLOCK_TOKENS, groups=(group,))
    assert made.layout().nbytes == 4096
    return made


def store(cache: EmbeddedCache, chain: Chain) -> None:
    with cache.reserve(chain) as lease:
        lease.commit()


def seconds(work: Callable[[], object], times: int = 1) -> float:
    began = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - began) / times


def hash_only(tokens: np.ndarray, root: bytes) -> bytes:
    """The least a lookup from tokens can cost: the chain of BLAKE2b over the tokens' bytes."""
    raw = tokens.astype("<u4").tobytes()
    step, previous = 4 * BLOCK_TOKENS, root
    for at in range(0, len(raw), step):
        previous = blake2b(previous + raw[at : at + step], digest_size=32).digest()
    return previous


def lookups(cache: EmbeddedCache, made: KVSpec) -> None:
    tokens = np.arange(LONG * BLOCK_TOKENS)
    chain = Chain.of(made, tokens)
    for start in range(0, LONG, 256):
        store(cache, Chain(chain.namespace, chain.hashes[: start + 256]))
    strangers = [Chain(chain.namespace, (bytes([n]) * 32, *chain.hashes[1:])) for n in range(ROUNDS)]
    root = chain_root(made.fingerprint)
    keys_given, fresh, from_tokens, misses, hashing = [], [], [], [], []
    for n in range(ROUNDS):
        keys_given.append(seconds(lambda: cache.lookup(chain), 5))
        cache.engine._state.keys.__init__()  # as for a prompt never seen before
        fresh.append(seconds(lambda: cache.lookup(chain)))
        cache.engine._state.keys.__init__()
        from_tokens.append(seconds(lambda: cache.lookup(Chain.of(made, tokens))))
        misses.append(seconds(lambda n=n: cache.lookup(strangers[n])))
        hashing.append(seconds(lambda: hash_only(tokens, root)))
    assert cache.lookup(chain).blocks == LONG
    print(f"lookup of {LONG * BLOCK_TOKENS:,} tokens, {LONG:,} blocks, all in memory (ms, median of {ROUNDS})")
    for name, values in (
        ("keys known", keys_given),
        ("chain hashes known", fresh),
        ("from tokens", from_tokens),
        ("a miss at the first block", misses),
        ("BLAKE2b over the tokens alone", hashing),
    ):
        print(f"  {name:32} {statistics.median(values) * 1e3:8.3f}")


def cycles(cache: EmbeddedCache, made: KVSpec) -> None:
    chains = [Chain.of(made, np.arange(SHORT * BLOCK_TOKENS) + (seed << 32 - 12)) for seed in range(1, 1200)]
    known = chains[0]
    for chain in chains[1:600]:  # the tier is full from here on
        store(cache, chain)
    store(cache, known)
    new = iter(chains[600:])

    def reuse() -> None:
        with cache.acquire(known) as read, cache.reserve(known, start=read.hit_blocks) as write:
            write.commit()

    def extend() -> None:
        with cache.acquire(known, max_blocks=SHORT - 1) as read, cache.reserve(known, start=read.hit_blocks) as write:
            write.commit()
        cache.delete(known)

    def renew() -> None:
        chain = next(new)
        with cache.acquire(chain), cache.reserve(chain) as write:
            write.commit()
        with cache.acquire(chain):
            pass

    rows: dict[str, list[float]] = {"all 64 reused": [], "63 reused, 1 new": [], "64 new, 64 evicted, 64 read": []}
    for _ in range(ROUNDS):
        rows["all 64 reused"].append(seconds(reuse, 20))
        store(cache, known)
        cache.delete(known)
        rows["63 reused, 1 new"].append(seconds(extend, 20))
        store(cache, known)
        rows["64 new, 64 evicted, 64 read"].append(seconds(renew, 20))
        store(cache, known)
    print(f"acquire + reserve + commit + release of chains of {SHORT} blocks, one thread (cycles/s)")
    for name, values in rows.items():
        print(f"  {name:32} {1 / statistics.median(values):8.0f}")


def memory() -> None:
    made = spec("memory")
    with tierkv.open({"warm": {"capacity": "512MiB"}}) as cache:
        assert isinstance(cache, EmbeddedCache)
        cache.register(made)
        blocks = 100_000
        chains = [Chain.of(made, np.arange(SHORT * BLOCK_TOKENS) + (seed << 12)) for seed in range(blocks // SHORT)]
        gc.collect()
        before = _anonymous()
        for chain in chains:
            store(cache, chain)
        gc.collect()
        held = cache.stats()["published_blocks"]
        each = (_anonymous() - before) / held
        print(f"memory of the process per block in memory: {each:.0f} bytes ({held:,} blocks)")


def _anonymous() -> int:
    """Resident memory that is not the arena, in bytes."""
    with open(f"/proc/{os.getpid()}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def main() -> None:
    made = spec("brain")
    with tierkv.open({"warm": {"capacity": "64MiB"}}) as cache:
        assert isinstance(cache, EmbeddedCache)
        cache.register(made)
        lookups(cache, made)
        cycles(cache, made)
    memory()


if __name__ == "__main__":
    main()
