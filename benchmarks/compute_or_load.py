"""Where loading stops to pay: one prompt in a cold tier behind a disk of chosen speed, for an engine of chosen speed.

    python benchmarks/compute_or_load.py

A prompt of 80 blocks, of which 64 are stored, is served by an embedded cache whose cold tier delivers a given number of
bytes per second and no more. Prefill is a wait at a given number of tokens per second. Per disk speed, in seconds:

    load all    everything stored is loaded, however long it takes
    compute     nothing is loaded
    first       tierkv's choice by a cache that has never loaded from this disk
    later       tierkv's choice once it has

`ratio` is to the better of the first two. Beside it the reason tierkv gives, and the blocks it loaded.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock

import numpy as np

import tierkv
from tierkv.core.engine import Engine
from tierkv.core.placement import MemoryTier
from tierkv.embedded import EmbeddedCache
from tierkv.policy import make_policy
from tierkv.storage.cold import ColdTier
from tierkv.storage.tier import BlockMeta
from tierkv.storage.warm import WarmTier

SPEC = tierkv.KVSpec("bench", "0", "bfloat16", 64, (tierkv.KVGroup(tuple(range(8)), "full", 2, 64),))
BLOCK_BYTES = SPEC.layout().nbytes
STORED, TOTAL = 64, 80
TOKENS_PER_S = 6400.0
BLOCK_S = SPEC.block_tokens / TOKENS_PER_S
WARM_BYTES = STORED * BLOCK_BYTES  # of several prompts it holds the last
DISK_SPEEDS = (0.125, 0.25, 0.5, 0.75, 0.9, 1.1, 1.3, 2.0, 4.0, 16.0)


class ThrottledColdTier(ColdTier):
    """A cold tier on a disk that delivers `bytes_per_s` in all, to however many readers."""

    bytes_per_s = math.inf

    def __init__(self, path: Path, *, capacity_bytes: int, segment_bytes: int) -> None:
        super().__init__(path, capacity_bytes=capacity_bytes, segment_bytes=segment_bytes, codec="raw", sync="none")
        self._head = Lock()
        self._free_at = 0.0
        self._never = Event()

    def read_into(self, key: bytes, out: memoryview) -> BlockMeta:
        meta = super().read_into(key, out)
        with self._head:
            self._free_at = max(self._free_at, time.monotonic()) + meta.length / self.bytes_per_s
            until = self._free_at
        self._never.wait(max(0.0, until - time.monotonic()))
        return meta


@dataclass(frozen=True)
class Served:
    """One request: seconds until its last token was computed, blocks taken from the cache, and the reason given."""

    seconds: float
    blocks: int
    reason: str


def open_cache(home: Path) -> tuple[EmbeddedCache, ThrottledColdTier]:
    cold = ThrottledColdTier(home / "cold", capacity_bytes=256 << 20, segment_bytes=16 << 20)
    warm = WarmTier(WARM_BYTES, segment_path=home / "warm", superblock_bytes=BLOCK_BYTES)
    memory = MemoryTier(warm, lambda capacity: make_policy("lru", capacity), 0.25)
    cache = EmbeddedCache(Engine([memory], cold, os.urandom(32)), "default")
    cache.register(SPEC)
    return cache, cold


def prompt(number: int) -> tierkv.Chain:
    """Return a prompt that shares nothing with that of another number, from -8."""
    return tierkv.Chain.of(SPEC, np.arange(TOTAL * SPEC.block_tokens) + ((number + 8) << 20))


def store(cache: EmbeddedCache, chain: tierkv.Chain) -> None:
    stored = tierkv.Chain(chain.namespace, chain.hashes[:STORED])
    with cache.reserve(stored, wait_s=30.0) as lease:
        for grant in lease.granted:
            lease.write(grant.index, os.urandom(BLOCK_BYTES))
        if lease.commit() != STORED:
            raise SystemExit("not every block found room")
    cache.flush()


def serve(cache: EmbeddedCache, number: int, tokens_per_s: float | None) -> Served:
    """Take what the cache gives and wait as long as computing the rest would take."""
    chain = prompt(number)
    store(cache, chain)
    store(cache, prompt(-number))  # pushes the other out of memory
    if set(cache.lookup(chain).tiers) != {"cold"}:
        raise SystemExit("part of the prompt is in memory already")
    began = time.perf_counter()
    with cache.acquire(chain, wait_s=math.inf, prefill_tokens_per_s=tokens_per_s) as lease:
        Event().wait((TOTAL - lease.hit_blocks) * BLOCK_S)
        return Served(time.perf_counter() - began, lease.hit_blocks, lease.choice.reason)


def measure(speed: float) -> None:
    """Print one row: `speed` is that of the disk, as a multiple of what makes loading as fast as computing."""
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as home:
        cache, cold = open_cache(Path(home))
        with cache:
            cold.bytes_per_s = speed * BLOCK_BYTES / BLOCK_S
            first = serve(cache, 1, TOKENS_PER_S)
            load_all = serve(cache, 2, None)
            later = serve(cache, 3, TOKENS_PER_S)
            cold.bytes_per_s = math.inf
        began = time.perf_counter()
        Event().wait(TOTAL * BLOCK_S)
        compute = time.perf_counter() - began
    best = min(load_all.seconds, compute)
    row = f"{speed:6.3f} {speed * BLOCK_BYTES / BLOCK_S / 2**20:7.1f} {load_all.seconds:9.2f} {compute:8.2f}"
    for served in (first, later):
        row += f" | {served.seconds:5.2f} {served.seconds / best:6.2f} {served.reason:13} {served.blocks:3}"
    print(row)


def main() -> None:
    print(f"{TOTAL} blocks of {BLOCK_BYTES >> 10} KiB and {SPEC.block_tokens} tokens, {STORED} stored;", end=" ")
    print(f"prefill {TOKENS_PER_S:.0f} tokens/s; disk 1.0 delivers a block in the time of computing one")
    print(f"{'disk':>6} {'MiB/s':>7} {'load all':>9} {'compute':>8}", end="")
    print(*(f" | {name:>5} {'ratio':>6} {'reason':13} {'blk':>3}" for name in ("first", "later")), sep="")
    for speed in DISK_SPEEDS:
        measure(speed)


if __name__ == "__main__":
    main()
