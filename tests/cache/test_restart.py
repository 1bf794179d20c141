"""What a restart finds, what closing does to leases, and what is refused at the start."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import tierkv
from tierkv.embedded import EmbeddedCache
from tierkv.errors import ConfigError, LeaseLost, SpecMismatch, Unavailable

from .support import assert_intact, head, make_chain, make_spec, store, store_far, wait_until, write


def settings(home: Path, **changes: Any) -> dict[str, Any]:
    return {
        "state_dir": str(home / "state"),
        "warm": {"capacity": "1MiB", "directory": str(home)},
        "cold": {"capacity": "32MiB"},
        **changes,
    }


def test_a_restart_finds_everything(tmp_path: Path) -> None:
    spec = make_spec()
    chain = make_chain(spec, 300)
    with tierkv.open(settings(tmp_path)) as cache:
        cache.register(spec)
        store_far(cache, spec, chain)
    with tierkv.open(settings(tmp_path)) as cache:
        assert not list(tmp_path.glob("*.hot"))
        cache.register(spec)
        hit = cache.lookup(chain)
        assert (hit.blocks, set(hit.tiers)) == (300, {"cold"})
        for start in range(0, 300, 100):
            part = head(chain, start + 100)
            with cache.acquire(part, wait_s=60.0) as read:
                assert read.hit_blocks == min(start + 100, 128)
                assert_intact(read, spec, part)
        assert cache.clear(spec.namespace) == 300
    with tierkv.open(settings(tmp_path)) as cache:
        cache.register(spec)
        assert cache.lookup(chain).blocks == 0
    assert not list(tmp_path.glob("tierkv-*"))


def test_without_a_state_directory_nothing_is_kept_and_keys_are_new(tmp_path: Path) -> None:
    spec = make_spec()
    chain = make_chain(spec, 3)
    cold = {"capacity": "32MiB", "path": str(tmp_path / "cold")}
    warm = {"capacity": "1MiB", "directory": str(tmp_path)}
    for _ in range(2):
        with tierkv.open({"warm": warm, "cold": cold}) as cache:
            cache.register(spec)
            assert cache.lookup(chain).blocks == 0
            assert store(cache, spec, chain) == 3


def test_tenants_keep_their_own_across_a_restart(tmp_path: Path) -> None:
    spec = make_spec()
    chain = make_chain(spec, 3)
    with tierkv.open(settings(tmp_path), tenant="red") as cache:
        cache.register(spec)
        store(cache, spec, chain)
    with tierkv.open(settings(tmp_path), tenant="blue") as cache:
        assert isinstance(cache, EmbeddedCache)
        cache.register(spec)
        assert cache.lookup(chain).blocks == 0
        assert cache.clear(spec.namespace) == 0
        assert cache.for_tenant("red").lookup(chain).blocks == 3


def test_closing_ends_leases_and_wakes_who_waits(tmp_path: Path) -> None:
    spec = make_spec()
    chain = make_chain(spec, 128)
    cache = tierkv.open(settings(tmp_path, cold={}))
    assert isinstance(cache, EmbeddedCache)
    cache.register(spec)
    store(cache, spec, chain)
    read = cache.acquire(chain)
    outcome: list[Exception] = []

    def reserve() -> None:
        try:
            cache.reserve(make_chain(spec, 1, 1), wait_s=600.0)
        except Exception as error:
            outcome.append(error)

    waiting = threading.Thread(target=reserve)
    waiting.start()
    wait_until(lambda: cache.engine.placement.memory[0].pressed or not waiting.is_alive())
    cache.close()
    cache.close()
    waiting.join(20.0)
    assert [type(error) for error in outcome] == [Unavailable]
    read.release()
    with pytest.raises(LeaseLost):
        read.view(0)
    with pytest.raises(Unavailable):
        cache.acquire(chain)


def test_an_uncommitted_block_is_not_there_after_a_restart(tmp_path: Path) -> None:
    spec = make_spec()
    chain = make_chain(spec, 4)
    cache = tierkv.open(settings(tmp_path))
    cache.register(spec)
    lease = cache.reserve(chain)
    write(lease, spec, chain)
    lease.commit([0, 1, 3])
    cache.close()
    with pytest.raises(Unavailable):
        lease.commit([2])
    with tierkv.open(settings(tmp_path)) as cache:
        cache.register(spec)
        assert cache.lookup(chain).blocks == 2
        assert store(cache, spec, chain) == 2


def test_a_cold_tier_smaller_than_the_warm_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="smaller than the warm tier"):
        tierkv.open(settings(tmp_path, warm={"capacity": "64MiB", "directory": str(tmp_path)}))
    assert not list(tmp_path.iterdir())


def test_flush_ends_although_the_disk_holds_less_than_memory(tmp_path: Path) -> None:
    """Incompressible blocks in a store of the size of memory: what arrives pushes out what memory still has."""
    spec = make_spec()
    tiers = {
        "warm": {"capacity": "8MiB", "directory": str(tmp_path), "demote_ahead": 0.0},
        "cold": {"capacity": "8MiB", "codec": "raw"},
    }
    with tierkv.open(settings(tmp_path, **tiers)) as cache:
        cache.register(spec)
        chain = make_chain(spec, 1000)
        assert store(cache, spec, chain) == 1000
        cache.flush()
        assert cache.lookup(chain).blocks == 1000


def test_blocks_that_never_fit_are_refused_at_registration(tmp_path: Path) -> None:
    with tierkv.open(settings(tmp_path)) as cache, pytest.raises(SpecMismatch, match="do not fit the warm tier"):
        cache.register(make_spec(block_tokens=4096))
