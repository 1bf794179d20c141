"""The cold tier among damaged and strange files, and in places that are not its own."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from tests.conformance.tier_suite import block, key_of, meta_of, read
from tests.storage.cold_store import (
    MIB,
    SIZE,
    OpenCold,
    disk_use,
    fill_segments,
    opener,
    present,
    put,
    segment_files,
)
from tierkv.errors import (
    ConfigError,
    CorruptBlock,
    ForeignStore,
    StorageError,
    StorageFull,
    StoreInUse,
)
from tierkv.storage.cold import ColdTier


@pytest.fixture
def open_cold(tmp_path: Path) -> Iterator[OpenCold]:
    yield from opener(tmp_path / "cold")


def plant(path: Path, needle: bytes, change: Callable[[bytearray, int], None]) -> None:
    """Change a closed segment file at the place where `needle` lies."""
    data = bytearray(path.read_bytes())
    at = data.index(needle)
    change(data, at)
    with path.open("r+b") as file:
        file.write(data)


def flip(data: bytearray, at: int) -> None:
    data[at] ^= 0x10


def test_a_corrupt_block_is_reported_dropped_and_repaired(open_cold: OpenCold, tmp_path: Path) -> None:
    with closing(open_cold()) as tier:
        put(tier, *range(5))
    plant(segment_files(tmp_path / "cold")[0], block(3, SIZE)[1000:1100], flip)
    with closing(open_cold()) as tier:
        with pytest.raises(CorruptBlock) as caught:
            read(tier, key_of(3))
        assert caught.value.cause == "checksum"
        assert tier.meta(key_of(3)) is None
        assert tier.damage == {"checksum": 1}
        assert "segment-000001.lmdb" in tier.findings[0]
        assert present(tier, range(5)) == [0, 1, 2, 4]
    with closing(open_cold()) as tier:
        assert present(tier, range(5)) == [0, 1, 2, 4]
        put(tier, 3)
        assert present(tier, range(5)) == [0, 1, 2, 3, 4]


def test_another_blocks_bytes_are_corruption(open_cold: OpenCold, tmp_path: Path) -> None:
    with closing(open_cold()) as tier:
        put(tier, 1, 2)
    path = segment_files(tmp_path / "cold")[0]
    first, second = (path.read_bytes().index(block(number, SIZE)) for number in (1, 2))
    header = 512  # the container's header stands right before a raw payload
    with path.open("r+b") as file:
        file.seek(first - header)
        whole = bytearray(file.read(header + SIZE))
        start = whole.index(b"TKVC")
        file.seek(second - header + start)
        file.write(whole[start:])
    tier = open_cold()
    with pytest.raises(CorruptBlock) as caught:
        read(tier, key_of(2))
    assert caught.value.cause == "index"
    assert present(tier, [1, 2]) == [1]


def test_a_damaged_index_record_costs_one_block(open_cold: OpenCold, tmp_path: Path) -> None:
    with closing(open_cold()) as tier:
        put(tier, *range(5))
    plant(segment_files(tmp_path / "cold")[0], key_of(3), flip)
    with closing(open_cold()) as tier:
        assert present(tier, range(5)) == [0, 1, 2, 4]
        assert tier.usage().blocks == 4
        assert tier.damage == {"index": 1}
    with closing(open_cold()) as tier:
        assert tier.damage == {}


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def overwrite_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"not a database" * 1000)


def raise_lmdb_version(path: Path) -> None:
    with path.open("r+b") as file:
        for page in (0, 4096):
            file.seek(page + 20)
            file.write(struct.pack("<I", 9))


def become_foreign(path: Path) -> None:
    path.unlink()
    with (
        closing(lmdb.open(str(path), subdir=False, map_size=2 * MIB, writemap=True)) as env,
        env.begin(write=True) as txn,
    ):
        txn.put(b"somebody", b"else")
    path.with_name(path.name + "-lock").unlink()


def tear(path: Path) -> None:
    """As a power loss leaves a segment that was being written: marked, and with pages that never reached the disk."""
    path.with_suffix(".unsynced").touch()
    data = path.read_bytes()
    leaf = data.index(key_of(0)) // 4096 if key_of(0) in data else 2
    with path.open("r+b") as file:
        file.seek(leaf * 4096)
        file.write(bytes(4096))


def become_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def become_a_link(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere.lmdb"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize(
    ("harm", "cause"),
    [
        (truncate, "truncated"),
        (cut_to_nothing, "truncated"),
        (overwrite_header, "not-lmdb"),
        (raise_lmdb_version, "version"),
        (become_foreign, "foreign"),
        (become_a_directory, "foreign"),
        (become_a_link, "foreign"),
    ],
)
def test_a_bad_segment_file_costs_only_itself(
    open_cold: OpenCold, tmp_path: Path, harm: Callable[[Path], None], cause: str
) -> None:
    store = tmp_path / "cold"
    held = fill_segments(open_cold, store)
    victim = store / "segment-000001.lmdb"
    harm(victim)
    before = victim.read_bytes() if victim.is_file() else None
    with closing(open_cold()) as tier:
        assert tier.damage == {cause: 1}
        assert str(victim) in tier.findings[0]
        lost = held[victim.name]
        assert present(tier, range(90)) == list(range(lost, 90))
        for number in range(90, 400):
            put(tier, number)
            assert disk_use(store) <= 10 * MIB
        assert 399 in present(tier, range(400))
    assert victim.is_symlink() or victim.exists()
    assert before is None or victim.read_bytes() == before, "a file that is set aside is left as it is"
    with closing(open_cold()) as tier:
        assert tier.damage == {cause: 1}
        assert 399 in present(tier, range(400))


def test_a_torn_segment_is_dropped_and_its_space_comes_back(open_cold: OpenCold, tmp_path: Path) -> None:
    store = tmp_path / "cold"
    lost = fill_segments(open_cold, store)["segment-000001.lmdb"]
    tear(store / "segment-000001.lmdb")
    with closing(open_cold()) as tier:
        assert tier.damage == {"torn": 1}
        assert "segment-000001.lmdb" in tier.findings[0]
        assert present(tier, range(90)) == list(range(lost, 90))
        for number in range(90, 400):
            put(tier, number)
            assert disk_use(store) <= 10 * MIB
        assert (store / "segment-000001.lmdb").exists(), "its space is used again"
    with closing(open_cold()) as tier:
        assert tier.damage == {}


@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_tree_costs_its_segment_and_no_start(open_cold: OpenCold, tmp_path: Path, seed: int) -> None:
    held = fill_segments(open_cold, tmp_path / "cold")
    victim = tmp_path / "cold" / "segment-000001.lmdb"
    leaf = victim.read_bytes().index(key_of(0)) // 4096
    with victim.open("r+b") as file:
        file.seek(leaf * 4096 + (0, 10, 12, 16)[seed % 4])
        file.write(random.Random(seed).randbytes(600))
    tier = open_cold()
    assert set(present(tier, range(held[victim.name], 90))) == set(range(held[victim.name], 90))
    assert tier.damage


def test_a_segment_of_another_format_is_set_aside(open_cold: OpenCold, tmp_path: Path) -> None:
    with closing(open_cold()) as tier:
        put(tier, 1)
    path = segment_files(tmp_path / "cold")[0]
    while True:
        data = path.read_bytes()
        if b"tierkv\x00s\x01" not in data:
            break
        plant(path, b"tierkv\x00s\x01", lambda data, at: data.__setitem__(at + 8, 2))
    tier = open_cold()
    assert tier.damage == {"version": 1}
    assert tier.usage().blocks == 0


def test_a_copied_segment_is_not_counted_twice(open_cold: OpenCold, tmp_path: Path) -> None:
    with closing(open_cold()) as tier:
        put(tier, *range(5))
        usage = tier.usage()
    first = segment_files(tmp_path / "cold")[0]
    shutil.copy(first, first.with_name("segment-000009.lmdb"))
    tier = open_cold()
    assert tier.damage == {"duplicate": 1}
    assert (tier.usage().blocks, tier.usage().payload_bytes) == (usage.blocks, usage.payload_bytes)
    assert tier.usage().used_bytes > usage.used_bytes


def test_what_a_killed_process_left_unfinished_is_removed(open_cold: OpenCold, tmp_path: Path) -> None:
    with closing(open_cold()) as tier:
        put(tier, 1)
    store = tmp_path / "cold"
    leftovers = [store / name for name in ("segment-000002.new", "segment-000002.new-lock", "segment-000007.unsynced")]
    for path in leftovers:
        path.write_bytes(bytes(100))
    tier = open_cold()
    assert not any(path.exists() for path in leftovers)
    assert tier.damage == {}
    assert present(tier, [1]) == [1]


def test_strangers_count_against_the_cap(open_cold: OpenCold, tmp_path: Path) -> None:
    open_cold().close()
    store = tmp_path / "cold"
    (store / "notes").mkdir()
    (store / "notes" / "big.bin").write_bytes(b"x" * 5 * MIB)
    tier = open_cold()
    for number in range(200):
        put(tier, number)
        assert disk_use(store) <= 10 * MIB
    assert tier.damage == {"foreign": 1}
    assert 199 in present(tier, range(200))


def test_no_room_beside_strangers_refuses_the_put(open_cold: OpenCold, tmp_path: Path) -> None:
    open_cold().close()
    (tmp_path / "cold" / "big.bin").write_bytes(b"x" * 9 * MIB)
    payload = block(1, SIZE)
    with pytest.raises(StorageFull) as caught:
        open_cold().put(key_of(1), payload, meta_of(payload))
    assert caught.value.remedy


def test_a_directory_of_others_is_refused_and_untouched(tmp_path: Path) -> None:
    home = tmp_path / "cold"
    home.mkdir()
    (home / "thesis.tex").write_text("chapter 1")
    with pytest.raises(ForeignStore) as caught:
        ColdTier(home, capacity_bytes=10 * MIB, segment_bytes=2 * MIB)
    assert caught.value.remedy
    assert [path.name for path in home.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("marker", ["", "[]", "not json", json.dumps({"format": "tierkv cold store", "version": 99})])
def test_a_marker_nobody_knows_is_refused(open_cold: OpenCold, tmp_path: Path, marker: str) -> None:
    open_cold().close()
    (tmp_path / "cold" / "tierkv-store.json").write_text(marker)
    with pytest.raises(ForeignStore):
        open_cold()


def test_a_second_opener_is_told_who_has_it(open_cold: OpenCold) -> None:
    tier = open_cold()
    with pytest.raises(StoreInUse, match=str(os.getpid())):
        open_cold()
    put(tier, 1)
    tier.close()
    assert present(open_cold(), [1]) == [1]


def test_a_path_that_cannot_be_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file", tmp_path / "file" / "cold", Path("/proc/tierkv-cold")):
        with pytest.raises(StorageError, match=str(path)):
            ColdTier(path, capacity_bytes=10 * MIB, segment_bytes=2 * MIB)


def test_a_failed_open_releases_the_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        ColdTier(tmp_path / "cold", capacity_bytes=10 * MIB, segment_bytes=1)
    ColdTier(tmp_path / "cold", capacity_bytes=10 * MIB, segment_bytes=2 * MIB).close()
