"""Compute or load, in use: no more is loaded than pays, and every request is told why."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tierkv
from tierkv.cache import Cache, Chain, LoadChoice
from tierkv.embedded import EmbeddedCache
from tierkv.spec import KVSpec
from tierkv.storage.tier import BlockMeta

from .control import Clock, HeldReads, nothing_is_held
from .support import BLOCK_TOKENS, assert_intact, head, make_chain, make_spec, store, store_far, wait_until

WHOLE = 128  # blocks that fill the warm tier
SETTINGS = {"warm": {"capacity": "1MiB", "policy": "lru"}, "cold": {"capacity": "64MiB", "codec": "raw"}}
BLOCK_S = 1.0
TOKENS_PER_S = BLOCK_TOKENS / BLOCK_S


class Disk:
    """Makes every read of the cold tier take `seconds` on the cache's clock, and none on the wall's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: EmbeddedCache, clock: Clock) -> None:
        self.seconds = 0.0
        self.reads = 0
        cold: Any = cache.engine.placement.cold
        read = cold.read_into

        def slow(key: bytes, out: memoryview) -> BlockMeta:
            self.reads += 1
            meta: BlockMeta = read(key, out)
            clock.advance(self.seconds)
            return meta

        monkeypatch.setattr(cold, "read_into", slow)


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[EmbeddedCache]:
    tiers = {
        "warm": {"capacity": "1MiB", "directory": str(tmp_path), "policy": "lru"},
        "cold": {"capacity": "32MiB", "codec": "raw"},
    }
    with tierkv.open({"state_dir": str(tmp_path / "state"), "load_threads": 1, **tiers}) as cache:
        assert isinstance(cache, EmbeddedCache)
        yield cache


@pytest.fixture
def clock(embedded: EmbeddedCache, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, embedded)


@pytest.fixture
def disk(embedded: EmbeddedCache, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Disk:
    return Disk(monkeypatch, embedded, clock)


def push(cache: Cache, spec: KVSpec, blocks: int, seed: int) -> None:
    cache.flush()
    store_far(cache, spec, make_chain(spec, blocks, seed))


def cold_chain(cache: Cache, spec: KVSpec, blocks: int, seed: int = 0) -> Chain:
    """A chain that only the cold tier has."""
    cache.register(spec)
    chain = make_chain(spec, blocks, seed)
    store(cache, spec, chain)
    push(cache, spec, 2 * WHOLE, 1000 + seed)
    assert set(cache.lookup(chain).tiers) == {"cold"}
    return chain


def serve(cache: Cache, chain: Chain, tokens_per_s: float | None = TOKENS_PER_S) -> tuple[LoadChoice, int]:
    """Return what was chosen and the length of the hit."""
    with cache.acquire(chain, wait_s=math.inf, prefill_tokens_per_s=tokens_per_s) as read:
        assert read.published_blocks == len(chain)
        return read.choice, read.hit_blocks


def learn(cache: EmbeddedCache, disk: Disk, seconds: float) -> KVSpec:
    """Let the cache find out how fast the disk is; return a namespace with blocks of the same size."""
    disk.seconds = seconds
    spec = make_spec()
    assert serve(cache, cold_chain(cache, spec, 8, seed=500), None)[0].reason == "unknown_prefill"
    return spec


def counted(cache: Cache) -> tuple[dict[str, int], dict[str, int]]:
    counters = cache.stats()["counters"]
    return dict(counters["decisions"]), dict(counters["missed_blocks"])


def grown(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}


def test_there_is_nothing_to_choose(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 4)
    before = counted(cache)
    with cache.acquire(chain, prefill_tokens_per_s=1.0) as read:
        assert read.choice == LoadChoice("miss", 0, 0.0, 0.0)
    store(cache, spec, chain)
    with cache.acquire(chain, prefill_tokens_per_s=1.0) as read:
        assert read.choice == LoadChoice("in_memory", 4, 0.0, 0.0)
    push(peer, spec, 2 * WHOLE, 1)
    with cache.acquire(chain, wait_s=0.0, prefill_tokens_per_s=1.0) as read:
        assert read.choice.reason == "no_wait"
        assert read.hit_blocks == 0
    assert counted(cache)[0] == before[0]


def test_the_engines_speed_decides(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain, other = make_chain(spec, 8), make_chain(spec, 8, 1)
    store(cache, spec, chain)
    store(cache, spec, other)
    push(cache, spec, 2 * WHOLE, 2)
    before = counted(cache)
    choice, hit = serve(peer, other, None)
    assert (choice.reason, choice.load_blocks, hit) == ("unknown_prefill", 8, 8)
    choice, hit = serve(peer, chain, 1e9)  # no disk is as fast
    assert (choice.reason, choice.load_blocks, hit) == ("recompute", 0, 0)
    choice, hit = serve(peer, chain, 1e-3)  # none as slow
    assert (choice.reason, choice.load_blocks, hit) == ("load", 8, 8)
    assert 0.0 < choice.load_s < choice.recompute_s
    assert choice.recompute_s == pytest.approx(8 * BLOCK_TOKENS / 1e-3)
    after = counted(cache)
    assert grown(after[0], before[0]) == {"unknown_prefill": 1, "recompute": 1, "load": 1}
    assert grown(after[1], before[1]) == {"cheaper_computed": 8}
    cache.clear(spec.namespace)


def test_an_unknown_disk_is_tried(embedded: EmbeddedCache, disk: Disk) -> None:
    disk.seconds = BLOCK_S / 10
    chain = cold_chain(embedded, make_spec(), 8)
    choice, hit = serve(embedded, chain)
    assert (choice.reason, choice.load_blocks, hit) == ("unknown_rate", 8, 8)
    assert choice.load_s == 0.0
    assert choice.recompute_s == pytest.approx(8 * BLOCK_S)


@pytest.mark.parametrize(("seconds", "reason"), [(0.5, "load"), (0.9, "load"), (1.2, "recompute"), (5.0, "recompute")])
def test_what_is_slower_than_computing_is_computed(
    embedded: EmbeddedCache, disk: Disk, seconds: float, reason: str
) -> None:
    spec = learn(embedded, disk, seconds * BLOCK_S)
    chain = cold_chain(embedded, spec, 10)
    before, disk.reads = counted(embedded), 0
    choice, hit = serve(embedded, chain)
    loaded = 10 if reason == "load" else 0
    assert (choice.reason, choice.load_blocks, hit, disk.reads) == (reason, loaded, loaded, loaded)
    assert choice.load_s == pytest.approx(loaded * seconds * BLOCK_S, rel=0.05)
    assert choice.recompute_s == pytest.approx(loaded * BLOCK_S)
    after = counted(embedded)
    assert grown(after[0], before[0]) == {reason: 1}
    assert grown(after[1], before[1]) == ({"cheaper_computed": 10} if reason == "recompute" else {})
    wait_until(lambda: nothing_is_held(embedded))


def keep(cache: EmbeddedCache, spec: KVSpec, chain: Chain, indices: range) -> None:
    """Leave only some blocks of a chain in memory: they alone were used since it was stored."""
    cache.register(spec)
    push(cache, spec, 2 * WHOLE, 600)
    store(cache, spec, chain)
    cache.engine.uses.report(
        cache.engine.tenant("default"), spec.namespace, 0, [chain.hashes[index] for index in indices]
    )
    push(cache, spec, WHOLE - len(indices), 601)
    tiers = cache.lookup(chain).tiers
    assert [index for index, tier in enumerate(tiers) if tier == "warm"] == list(indices)


@pytest.mark.parametrize(
    ("seconds", "kept", "reason", "load_blocks"),
    [
        (1.5, range(6, 10), "load", 10),  # six blocks at a loss of a half each, for four that cost nothing
        (2.5, range(6, 10), "recompute", 0),
        (1.5, range(3, 6), "partly", 6),
        (1.5, range(4), "recompute", 4),
        (0.5, range(4), "load", 10),
    ],
)
def test_blocks_in_memory_speak_for_the_gap_before_them(
    embedded: EmbeddedCache, disk: Disk, seconds: float, kept: range, reason: str, load_blocks: int
) -> None:
    spec = learn(embedded, disk, seconds * BLOCK_S)
    chain = make_chain(spec, 10)
    keep(embedded, spec, chain, kept)
    before = counted(embedded)
    with embedded.acquire(chain, wait_s=math.inf, prefill_tokens_per_s=TOKENS_PER_S) as read:
        assert (read.choice.reason, read.choice.load_blocks, read.hit_blocks) == (reason, load_blocks, load_blocks)
        assert sum(read.tokens_by_tier.values()) == load_blocks * BLOCK_TOKENS
        assert_intact(read, spec, chain)
    missed = grown(counted(embedded)[1], before[1])
    assert missed == ({"cheaper_computed": 10 - load_blocks} if load_blocks < 10 else {})


def test_a_disk_found_slow_gets_another_chance(embedded: EmbeddedCache, disk: Disk, clock: Clock) -> None:
    spec = learn(embedded, disk, 5.0 * BLOCK_S)
    chain = cold_chain(embedded, spec, 4)
    assert serve(embedded, chain)[0].reason == "recompute"
    disk.seconds = 0.1 * BLOCK_S
    clock.advance(600.0)
    choice, hit = serve(embedded, chain)
    assert (choice.reason, hit) == ("unknown_rate", 4)
    other = cold_chain(embedded, spec, 4, 1)
    assert serve(embedded, other)[0].reason == "load"


def test_what_was_prefetched_is_in_memory(embedded: EmbeddedCache, disk: Disk) -> None:
    spec = learn(embedded, disk, 5.0 * BLOCK_S)
    chain = cold_chain(embedded, spec, 6)
    assert embedded.prefetch(head(chain, 4), deadline_s=1000.0).wait(20.0).blocks_done == 4
    choice, hit = serve(embedded, chain)
    assert (choice.reason, choice.load_blocks, hit) == ("recompute", 4, 4)


def test_the_engines_speed_is_learned_from_what_it_computes(embedded: EmbeddedCache, disk: Disk, clock: Clock) -> None:
    spec = learn(embedded, disk, 3.0)
    slow, fast, other = make_chain(spec, 6, 1), make_chain(spec, 6, 2), make_spec()
    embedded.register(other)
    for chain, block_s in ((slow, 4.0), (fast, 2.0)):
        with embedded.acquire(chain, compute_s=100.0) as read:
            assert read.compute is not None
            for index in range(6):
                clock.advance(block_s)
                store(embedded, spec, head(chain, index + 1), index)
            if chain is slow:
                choice, _ = serve(embedded, cold_chain(embedded, spec, 4, 3), None)
                assert (choice.reason, choice.load_blocks) == ("load", 4)
                assert choice.recompute_s == pytest.approx(4 * 4.0, rel=0.05)
    # Of six slow samples and six fast ones the median is in between, of more fast ones it is theirs.
    with embedded.acquire(make_chain(spec, 6, 4), compute_s=100.0):
        for index in range(6):
            clock.advance(2.0)
            store(embedded, spec, head(make_chain(spec, 6, 4), index + 1), index)
    choice, hit = serve(embedded, cold_chain(embedded, spec, 4, 5), None)
    assert (choice.reason, choice.load_blocks, hit) == ("recompute", 0, 0)
    # The caller knows better, and other models learn nothing from this one.
    assert serve(embedded, cold_chain(embedded, spec, 4, 6), BLOCK_TOKENS / 4.0)[0].reason == "load"
    assert serve(embedded, cold_chain(embedded, other, 4, 7), None)[0].reason == "unknown_prefill"


def test_blocks_that_were_computed_together_teach_how_long_all_of_them_took(
    embedded: EmbeddedCache, disk: Disk, clock: Clock
) -> None:
    spec = learn(embedded, disk, 1.0)
    chain = make_chain(spec, 18, 1)
    with embedded.acquire(chain, compute_s=100.0) as read:
        assert read.compute is not None
        for index in range(18):
            clock.advance(12.0 if index % 6 == 0 else 0.01)
            store(embedded, spec, head(chain, index + 1), index)
    choice, hit = serve(embedded, cold_chain(embedded, spec, 4, 2), None)
    assert (choice.reason, hit) == ("load", 4)
    assert choice.recompute_s == pytest.approx(4 * 2.0, rel=0.05)


def test_blocks_stored_without_a_promise_teach_nothing(embedded: EmbeddedCache, disk: Disk, clock: Clock) -> None:
    spec = learn(embedded, disk, 1.0)
    chain = make_chain(spec, 6, 1)
    with embedded.acquire(chain) as read:
        assert read.compute is None
        for index in range(6):
            clock.advance(0.1)
            store(embedded, spec, head(chain, index + 1), index)
    assert serve(embedded, cold_chain(embedded, spec, 4, 2), None)[0].reason == "unknown_prefill"


@pytest.mark.parametrize("delivered", [0, 3])
def test_a_disk_that_stalls_is_given_up(
    embedded: EmbeddedCache, monkeypatch: pytest.MonkeyPatch, delivered: int
) -> None:
    spec = make_spec()
    assert serve(embedded, cold_chain(embedded, spec, 8, seed=500), None)[1] == 8
    chain = cold_chain(embedded, spec, 10)
    reads, before = HeldReads(monkeypatch, embedded), counted(embedded)
    reads.let(delivered)
    block_s = 0.3  # computing everything takes three seconds, of which a tenth may be wasted
    with embedded.acquire(chain, wait_s=60.0, prefill_tokens_per_s=BLOCK_TOKENS / block_s) as read:
        assert (read.choice.reason, read.choice.load_blocks) == ("too_slow", 10)
        assert (read.hit_blocks, read.published_blocks) == (delivered, 10)
        assert read.waited_s < 30.0
        assert_intact(read, spec, chain)
    after = counted(embedded)
    assert grown(after[0], before[0]) == {"load": 1}
    assert grown(after[1], before[1]) == {"cheaper_computed": 10 - delivered}
    reads.open()
    wait_until(lambda: nothing_is_held(embedded))
    assert len(reads.begun) == delivered + 1
