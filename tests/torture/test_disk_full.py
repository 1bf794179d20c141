"""A disk without room: writes are refused with a cause, reads go on, and when there is room again all is well."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import tierkv
from tests.cache.support import assert_intact, make_chain, make_spec, store, wait_until
from tests.torture.support import block, disk_use, holds, put
from tierkv.errors import StorageFull
from tierkv.storage.cold import ColdTier

DISK = 8 << 20
SIZE = 60_000
SETTINGS: dict[str, Any] = {"capacity_bytes": 64 << 20, "segment_bytes": 2 << 20, "codec": "raw", "sync": "none"}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def fill(disk: Path) -> Path:
    """Take all the room there is."""
    filler = disk / "filler"
    room = os.statvfs(disk)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)
    return filler


def numbered(first: int, stop: int) -> dict[int, bytes]:
    return {n: block(n, SIZE) for n in range(first, stop)}


def test_a_store_without_a_single_segment_refuses_until_there_is_room(disk: Path) -> None:
    with closing(ColdTier(disk / "cold", **SETTINGS)) as tier:
        filler = fill(disk)
        refused = put(tier, numbered(0, 3))
        assert [type(error) for error in refused] == [StorageFull] * 3
        assert refused[0].remedy
        assert tier.usage().blocks == 0
        filler.unlink()
        assert not put(tier, numbered(0, 3))  # the same keys: none is stuck
        assert all(holds(tier, n, data) for n, data in numbered(0, 3).items())
    with closing(ColdTier(disk / "cold", **SETTINGS)) as tier:
        assert all(holds(tier, n, data) for n, data in numbered(0, 3).items())


def test_a_store_on_a_full_disk_lives_with_what_it_has_and_grows_again(disk: Path) -> None:
    with closing(ColdTier(disk / "cold", **SETTINGS)) as tier:
        assert not put(tier, numbered(0, 40))
        filler = fill(disk)
        for first in range(40, 200, 5):
            assert not put(tier, numbered(first, first + 5))
            assert all(holds(tier, n, data) for n, data in numbered(first, first + 5).items())
        assert set(tier.damage) == {"disk-full"}
        small = disk_use(disk / "cold")
        filler.unlink()
        assert not put(tier, numbered(200, 300))
        assert disk_use(disk / "cold") > small
        kept = [n for n, data in numbered(0, 300).items() if holds(tier, n, data)]
        assert kept == list(range(kept[0], 300))
    fill(disk)
    with closing(ColdTier(disk / "cold", **SETTINGS)) as tier:
        assert [n for n, data in numbered(0, 300).items() if holds(tier, n, data)] == kept
        assert not put(tier, numbered(300, 310))


def test_a_cache_above_a_full_disk_goes_on_from_memory(
    disk: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.core.demotion.RETRY_S", 0.05)  # how long a refusal is taken for an answer
    spec = make_spec()
    memory = tmp_path_factory.mktemp("warm")
    config = {
        "state_dir": str(disk / "state"),
        "warm": {"capacity": "1MiB", "directory": str(memory)},
        "cold": {"capacity": "16MiB", "segment": "2MiB", "codec": "raw"},
    }
    with tierkv.open(config) as cache:
        cache.register(spec)
        filler = fill(disk)
        chains = [make_chain(spec, 32, seed) for seed in range(12)]  # three times what memory holds
        for chain in chains:
            assert store(cache, spec, chain, wait_s=0.05) == 32
        refused = cache.stats()["counters"]["refused_demotions"]
        assert set(refused) == {"storage-full"}
        assert refused["storage-full"] > 0
        with cache.acquire(chains[-1], wait_s=0.0) as read:
            assert read.hit_blocks == 32
            assert_intact(read, spec, chains[-1])
        filler.unlink()
        cache.flush()
        for chain in chains:
            store(cache, spec, chain)
        cache.flush()
        wait_until(lambda: cache.stats()["dirty_bytes"] == {"warm": 0})
    with tierkv.open(config) as cache:
        cache.register(spec)
        for chain in chains:
            with cache.acquire(chain, wait_s=30.0) as read:
                assert read.hit_blocks == 32
                assert_intact(read, spec, chain)
