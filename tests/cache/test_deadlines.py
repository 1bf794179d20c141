"""Leases that end by deadline: the holder finds out, and everything it held can be used again."""

from __future__ import annotations

from pathlib import Path

import pytest

import tierkv
from tierkv.cache import Cache
from tierkv.core import engine
from tierkv.errors import LeaseLost
from tierkv.spec import KVSpec

from .support import assert_intact, head, make_chain, make_spec, payload, store, wait_until, write

SETTINGS = {"warm": {"capacity": "1MiB"}}  # 128 blocks, nothing below
WHOLE = 128


def fill(cache: Cache, spec: KVSpec, seed: int) -> int:
    """Store as much as there is room for; slots of other tests' late writers may be in quarantine."""
    stored = store(cache, spec, make_chain(spec, WHOLE, seed), wait_s=0.0)
    assert stored + cache.stats()["quarantined_slots"] == WHOLE
    return stored


def leases(cache: Cache) -> dict[str, int]:
    counts: dict[str, int] = cache.stats()["leases"]
    return counts


def test_a_reader_that_is_late_finds_out_and_holds_nothing(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 4)
    store(cache, spec, chain)
    read = cache.acquire(chain, ttl_s=0.05)
    wait_until(lambda: not leases(cache)["read"])
    with pytest.raises(LeaseLost):
        read.view(0)
    with pytest.raises(LeaseLost):
        read.read_into(0, memoryview(bytearray(1 << 16)))
    with pytest.raises(LeaseLost):
        read.renew(10.0)
    read.release()
    # No pin is left: another chain can have the whole tier.
    fill(cache, spec, seed=1)
    assert cache.lookup(chain).blocks == 0


def test_renewal_moves_the_deadline_both_ways(cache: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 2)
    store(cache, spec, chain)
    with cache.acquire(chain, ttl_s=60.0) as read:
        read.renew(120.0)
        assert_intact(read, spec, chain)
        read.renew(0.05)
        wait_until(lambda: not leases(cache)["read"])
        with pytest.raises(LeaseLost):
            read.view(0)


def test_a_late_writer_publishes_nothing(cache: Cache, peer: Cache, spec: KVSpec) -> None:
    chain = make_chain(spec, 3)
    quarantined = cache.stats()["quarantined_slots"]
    lease = cache.reserve(chain, ttl_s=0.3)
    write(lease, spec, chain)
    lease.commit([0, 2])
    wait_until(lambda: not leases(cache)["write"])
    for call in (lease.commit, lambda: lease.buffer(1), lambda: lease.renew(1.0)):
        with pytest.raises(LeaseLost):
            call()
    lease.abort()
    assert peer.lookup(chain).blocks == 1
    # Block 2 was verified but waited for block 1: neither is there, their slots rest, and both can be written again.
    assert cache.stats()["quarantined_slots"] == quarantined + 2
    assert store(peer, spec, chain) == 2
    with cache.acquire(chain) as read:
        assert read.hit_blocks == 3
        assert_intact(read, spec, chain)


def test_a_slot_is_reused_only_after_its_quarantine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "QUARANTINE_S", 0.5)
    spec = make_spec()
    with tierkv.open({"warm": {"capacity": "1MiB", "directory": str(tmp_path)}}) as cache:
        cache.register(spec)
        late, chain = make_chain(spec, WHOLE), make_chain(spec, WHOLE, seed=1)
        lease = cache.reserve(late, ttl_s=0.05)
        buffer = lease.buffer(0)
        wait_until(lambda: cache.stats()["quarantined_slots"] == WHOLE)
        with cache.reserve(head(chain, 1), wait_s=0.0) as early:
            assert [g.state for g in early.grants] == ["no_room"]
        buffer[:] = payload(spec, late, 0)  # the dead writer's last words
        assert store(cache, spec, chain) == WHOLE
        assert cache.stats()["quarantined_slots"] == 0
        with cache.acquire(chain) as read:
            assert_intact(read, spec, chain)
