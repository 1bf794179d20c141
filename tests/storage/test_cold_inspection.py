"""Looking at a store that nobody has open: it says what a start would find, and changes nothing."""

import os
from pathlib import Path

import pytest

from tierkv.errors import ForeignStore, NotFound, StoreInUse
from tierkv.storage.cold import ColdTier
from tierkv.storage.cold.inspection import inspect_store
from tierkv.storage.tier import BlockMeta, checksum

SIZE = 100_000
NAMESPACES = (b"n" * 32, b"m" * 32)
TENANTS = (b"tenant-1", b"tenant-2")


def fill(path: Path, blocks: int) -> None:
    """Write blocks of two namespaces and tenants in turn, over several segments."""
    tier = ColdTier(path, capacity_bytes=16 << 20, segment_bytes=1 << 20, codec="raw")
    for number in range(blocks):
        payload = os.urandom(SIZE)
        meta = BlockMeta(SIZE, checksum(payload), namespace=NAMESPACES[number % 2], tenant=TENANTS[number % 2])
        tier.put(number.to_bytes(32, "little"), payload, meta)
    tier.close()


def test_it_adds_up(tmp_path: Path) -> None:
    fill(tmp_path, 31)
    report = inspect_store(tmp_path)
    assert sum(segment.blocks for segment in report.segments) == 31
    assert len(report.segments) > 2
    assert all(segment.clean and not segment.damage for segment in report.segments)
    sequences = [segment.sequence for segment in report.segments]
    assert sequences == sorted(sequences)
    assert report.payload_by_tenant == {TENANTS[0].hex(): 16 * SIZE, TENANTS[1].hex(): 15 * SIZE}
    assert report.payload_by_namespace == {NAMESPACES[0].hex(): 16 * SIZE, NAMESPACES[1].hex(): 15 * SIZE}
    assert report.blocks_by_namespace == {NAMESPACES[0].hex(): 16, NAMESPACES[1].hex(): 15}


def test_it_changes_nothing(tmp_path: Path) -> None:
    fill(tmp_path, 12)
    tmp_path.joinpath("stranger").write_text("x")

    def state() -> dict[str, tuple[int, int]]:
        return {e.name: (e.stat().st_size, e.stat().st_mtime_ns) for e in os.scandir(tmp_path)}

    before = state()
    inspect_store(tmp_path)
    assert state() == before


def test_a_store_that_was_not_closed_is_verified_whole(tmp_path: Path) -> None:
    fill(tmp_path, 12)
    first = min(tmp_path.glob("segment-*.lmdb"))
    first.with_suffix(".unsynced").touch()
    report = inspect_store(tmp_path)
    assert [segment.clean for segment in report.segments].count(False) == 1
    assert sum(segment.blocks for segment in report.segments) == 12


@pytest.mark.parametrize("harm", ["truncate", "zero", "rename"])
def test_damage_is_named_and_the_rest_is_read(tmp_path: Path, harm: str) -> None:
    fill(tmp_path, 31)
    victim = max(tmp_path.glob("segment-*.lmdb"))
    whole = inspect_store(tmp_path)
    lost = next(segment.blocks for segment in whole.segments if segment.name == victim.name)
    with victim.open("r+b") as file:
        if harm == "truncate":
            file.truncate(8192)
        elif harm == "zero":
            file.write(bytes(8192))
        else:
            file.write(b"not LMDB" * 1024)
    report = inspect_store(tmp_path)
    (damaged,) = (segment for segment in report.segments if segment.damage)
    assert damaged.name == victim.name
    assert sum(segment.blocks for segment in report.segments) == 31 - lost


def test_it_waits_for_nobody_and_nobody_opens_what_is_looked_at(tmp_path: Path) -> None:
    tier = ColdTier(tmp_path, capacity_bytes=16 << 20, segment_bytes=1 << 20)
    with pytest.raises(StoreInUse, match=str(os.getpid())):
        inspect_store(tmp_path)
    tier.close()
    inspect_store(tmp_path)
    ColdTier(tmp_path, capacity_bytes=16 << 20, segment_bytes=1 << 20).close()


def test_what_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        inspect_store(tmp_path / "none")
    with pytest.raises(NotFound):
        inspect_store(tmp_path)
    (tmp_path / "tierkv-store.json").write_text('{"format": "other", "version": 1}')
    with pytest.raises(ForeignStore):
        inspect_store(tmp_path)
    assert os.listdir(tmp_path) == ["tierkv-store.json"]
