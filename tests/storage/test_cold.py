"""The cold tier: recycling under a disk cap, restarts, and what does not fit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import cycle
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conformance.tier_suite import TierConformance, block, key_of, meta_of, read
from tests.storage.cold_store import (
    KIB,
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
    BlockTooLarge,
    ConfigError,
    InvalidRequest,
    NotFound,
    StorageFull,
)
from tierkv.spec import BlockLayout
from tierkv.storage.cold import ColdTier
from tierkv.storage.tier import BlockMeta, checksum


@pytest.fixture
def open_cold(tmp_path: Path) -> Iterator[OpenCold]:
    yield from opener(tmp_path / "cold")


class TestColdTierThatSyncs(TierConformance):
    capacity_bytes = 16 * MIB
    evicts = True

    def make_tier(self, directory: Path) -> ColdTier:
        return ColdTier(
            directory,
            capacity_bytes=self.capacity_bytes,
            segment_bytes=4 * MIB,
            sync="interval",
            sync_interval_s=0.001,
            encode_threads=2,
        )


@pytest.mark.parametrize("batch", [1, 7])
def test_churn_never_takes_more_disk_than_the_cap(open_cold: OpenCold, tmp_path: Path, batch: int) -> None:
    capacity, size = 16 * MIB, SIZE
    evicted: list[bytes] = []
    tier = open_cold(capacity_bytes=capacity, segment_bytes=3 * MIB, on_evict=evicted.extend)
    total = 20 * capacity // size
    for first in range(0, total, batch):
        put(tier, *range(first, first + batch), size=size)
        assert disk_use(tmp_path / "cold") <= capacity
        assert tier.usage().used_bytes <= capacity
    stored = first + batch
    kept = present(tier, range(stored), size)
    assert stored - 1 in kept
    assert kept == list(range(kept[0], stored)), "the oldest go first"
    assert len(kept) * size > capacity * 0.6
    assert sorted(evicted) == sorted(key_of(number) for number in range(kept[0]))
    assert tier.usage().blocks == len(kept) == sum(segment.blocks for segment in tier.segments())
    assert tier.damage == {}


def test_one_batch_may_be_larger_than_the_store(open_cold: OpenCold) -> None:
    evicted: list[bytes] = []
    tier = open_cold(on_evict=evicted.extend)
    put(tier, *range(400))
    kept = present(tier, range(400))
    assert kept == list(range(kept[0], 400))
    assert len(evicted) == 400 - len(kept)


@pytest.mark.parametrize(
    ("segment", "size"), [(2 * MIB, 900), (2 * MIB, 20_000), (2 * MIB, 400 * KIB), (16 * MIB, 20_000)]
)
def test_segments_are_refilled_not_recreated(open_cold: OpenCold, tmp_path: Path, segment: int, size: int) -> None:
    tier = open_cold(capacity_bytes=4 * segment + MIB, segment_bytes=segment)
    payload = block(1, size)
    inodes = set()
    for first in range(0, 16 * segment // size, 50):
        items = [(key_of(number), payload, meta_of(payload)) for number in range(first, first + 50)]
        assert tier.put_many(items) == [None] * 50
        inodes |= {(path.name, path.stat().st_ino) for path in segment_files(tmp_path / "cold")}
    assert len(inodes) == len(tier.segments())
    assert read(tier, key_of(first + 49)) == payload
    assert tier.segments()[-1].sequence > 8


def test_used_blocks_are_carried_forward(open_cold: OpenCold) -> None:
    tier = open_cold()
    put(tier, *range(10))
    for number in range(10, 800):
        tier.touch([key_of(3), key_of(7), key_of(10**9)])
        put(tier, number)
    assert present(tier, list(range(10))) == [3, 7]


def test_a_block_that_is_no_longer_used_is_carried_once(open_cold: OpenCold) -> None:
    tier = open_cold()
    put(tier, *range(10))
    tier.touch([key_of(3)])
    for number in range(10, 800):
        put(tier, number)
    assert present(tier, list(range(10))) == []


def test_carrying_leaves_room_for_progress_and_prefers_the_latest_used(open_cold: OpenCold) -> None:
    tier = open_cold()
    for number in range(600):
        put(tier, number)
        tier.touch([key_of(n) for n in range(number + 1)])
        tier.touch([key_of(0)])
        assert tier.meta(key_of(number)) is not None
    assert present(tier, [0]) == [0]


def test_blocks_in_use_stay_even_when_they_fill_a_segment(open_cold: OpenCold) -> None:
    tier = open_cold()
    used = list(range(30))
    put(tier, *used)
    for number in range(100, 500):
        tier.touch([key_of(n) for n in used])
        put(tier, number)
    assert present(tier, used) == used


def test_a_carried_block_is_found_once_after_a_restart(open_cold: OpenCold) -> None:
    tier = open_cold()
    put(tier, *range(10))
    for number in range(10, 300):
        tier.touch([key_of(5)])
        put(tier, number)
    before = dict(tier.records())
    usage = tier.usage()
    tier.close()
    again = open_cold()
    assert dict(again.records()) == before
    assert again.usage() == usage
    assert key_of(5) in before


def test_a_block_left_in_two_segments_by_a_crash_counts_once_and_stays_deleted(
    open_cold: OpenCold, tmp_path: Path
) -> None:
    first = tmp_path / "cold" / "segment-000001.lmdb"
    with closing(open_cold()) as tier:
        put(tier, *range(60))
    before_emptying = first.read_bytes()
    evicted: list[bytes] = []
    with closing(open_cold(on_evict=evicted.extend)) as tier:
        tier.touch([key_of(5)])
        number = 60
        while not evicted:
            put(tier, number)
            number += 1
        assert present(tier, range(10)) == [5]
        blocks = tier.usage().blocks
    # As if the process had died after block 5 was carried forward, before its old segment was emptied.
    first.write_bytes(before_emptying)
    with closing(open_cold()) as tier:
        assert tier.usage().blocks == blocks + len(evicted) == len(dict(tier.records()))
        assert tier.usage().payload_bytes == SIZE * tier.usage().blocks
        assert present(tier, range(10)) == list(range(10))
        assert tier.delete(key_of(5))
    assert present(open_cold(), range(10)) == [0, 1, 2, 3, 4, 6, 7, 8, 9]


def test_readers_see_verified_bytes_while_segments_are_recycled(open_cold: OpenCold) -> None:
    tier = open_cold()
    payloads = [block(number, SIZE) for number in range(500)]
    metas = [meta_of(payload) for payload in payloads]
    newest, done = [0], Event()
    tier.put(key_of(0), payloads[0], metas[0])

    def read_on() -> int:
        seen = 0
        out = memoryview(bytearray(SIZE))
        for back in cycle(range(120)):
            if done.is_set():
                return seen
            number = max(0, newest[0] - back)
            try:
                tier.read_into(key_of(number), out)
            except NotFound:
                continue
            assert checksum(out) == metas[number].checksum
            seen += 1
        raise AssertionError

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read_on) for _ in range(2)]
        try:
            for number in range(1, len(payloads)):
                tier.put(key_of(number), payloads[number], metas[number])
                newest[0] = number
        finally:
            done.set()
        assert all(reader.result() > 0 for reader in readers)
    assert tier.damage == {}


@pytest.mark.parametrize("sync", ["none", "interval", "commit"])
def test_a_restart_finds_every_block(open_cold: OpenCold, sync: str) -> None:
    with closing(open_cold(sync=sync)) as tier:
        parent = bytes(32)
        for number in range(70):
            payload = block(number, SIZE)
            meta = meta_of(payload, parent=parent, depth=number, namespace=key_of(-number % 2**32), tenant=b"tenant-1")
            tier.put(key_of(number), payload, meta)
            parent = key_of(number)
        records, usage = list(tier.records()), tier.usage()
    again = open_cold()
    assert list(again.records()) == records
    assert again.usage() == usage
    assert present(again, range(70)) == list(range(70))
    put(again, 1000)


def test_layouts_and_codecs_survive_a_restart(open_cold: OpenCold) -> None:
    payload = block(1, 2 * 2 * 16 * 4 * 32 * 2)
    layout = BlockLayout("bfloat16", (2, 2, 16, 4, 32), 2)
    with closing(open_cold(codec="bx1")) as tier:
        tier.put(key_of(1), payload, meta_of(payload, layout=layout))
    with closing(open_cold(codec="raw")) as tier:
        assert read(tier, key_of(1)) == payload


def test_deletes_are_remembered(open_cold: OpenCold) -> None:
    with closing(open_cold()) as tier:
        for number in range(100):
            put(tier, number)
        for number in range(0, 100, 2):
            assert tier.delete(key_of(number))
    assert present(open_cold(), range(100)) == list(range(1, 100, 2))


def test_every_block_of_full_segments_can_be_deleted(open_cold: OpenCold) -> None:
    tier = open_cold()
    for number in range(0, 6000, 50):
        put(tier, *range(number, number + 50), size=2000)
    there = present(tier, range(6000), 2000)
    for number in there:
        assert tier.delete(key_of(number))
    assert tier.usage().blocks == tier.usage().payload_bytes == 0
    tier.close()
    again = open_cold()
    assert again.usage().blocks == 0
    for number in range(10_000, 13_000, 50):
        put(again, *range(number, number + 50), size=2000)
    assert again.damage == {}


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "put", "put", "delete", "touch", "reopen", "distrust"]), st.integers(0, 30)),
        max_size=40,
    )
)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_any_history_with_restarts_matches_a_dict(tmp_path_factory: pytest.TempPathFactory, steps: list[Any]) -> None:
    home = tmp_path_factory.mktemp("store")

    def reopen() -> ColdTier:
        return ColdTier(home, capacity_bytes=10 * MIB, segment_bytes=2 * MIB, codec="raw", sync="none")

    tier, model = reopen(), set[int]()
    for action, number in steps:
        if action == "put":
            put(tier, number)
            model.add(number)
        elif action == "delete":
            assert tier.delete(key_of(number)) == (number in model)
            model.discard(number)
        elif action == "touch":
            tier.touch([key_of(number)])
        else:
            tier.close()
            if action == "distrust":
                for path in segment_files(home):
                    path.with_suffix(".unsynced").touch()
            tier = reopen()
        assert tier.usage().blocks == len(model)
    assert present(tier, range(31)) == sorted(model)
    assert tier.damage == {}
    tier.close()
    shutil.rmtree(home)


def test_a_smaller_capacity_drops_the_oldest_segments(open_cold: OpenCold, tmp_path: Path) -> None:
    fill_segments(open_cold, tmp_path / "cold")
    tier = open_cold(capacity_bytes=6 * MIB)
    assert disk_use(tmp_path / "cold") <= 6 * MIB
    kept = present(tier, range(90))
    assert kept == list(range(kept[0], 90))
    assert 20 < len(kept) < 90
    for number in range(90, 300):
        put(tier, number)
        assert disk_use(tmp_path / "cold") <= 6 * MIB


@pytest.mark.parametrize("segment", [5 * MIB // 4, 5 * MIB // 2])
def test_another_segment_size_takes_over(open_cold: OpenCold, tmp_path: Path, segment: int) -> None:
    fill_segments(open_cold, tmp_path / "cold")
    tier = open_cold(capacity_bytes=12 * MIB, segment_bytes=segment)
    assert present(tier, range(90)) == list(range(90))
    for number in range(90, 500):
        put(tier, number)
        assert disk_use(tmp_path / "cold") <= 12 * MIB
    (size,) = {info.size for info in tier.segments()}
    assert segment * 0.75 < size <= segment
    assert 499 in present(tier, range(500))


def test_a_batch_answers_for_each_block(open_cold: OpenCold) -> None:
    tier = open_cold()
    good, large = block(1, SIZE), block(2, MIB)
    outcomes = tier.put_many(
        [
            (key_of(1), good, meta_of(good)),
            (key_of(2), large, meta_of(large)),
            (b"short", good, meta_of(good)),
            (key_of(2), large, meta_of(large)),
            (key_of(1), good, meta_of(good)),
            (key_of(3), good, meta_of(good)),
        ]
    )
    kinds = [type(outcome) for outcome in outcomes]
    assert kinds == [type(None), BlockTooLarge, InvalidRequest, BlockTooLarge, type(None), type(None)]
    assert tier.usage().blocks == 2


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    for wrong in (
        {"capacity_bytes": MIB},
        {"segment_bytes": 1000},
        {"sync": "sometimes"},
        {"encode_threads": 0},
        {"codec": "zip"},
    ):
        with pytest.raises(ConfigError):
            ColdTier(tmp_path / "cold", **({"capacity_bytes": 10 * MIB, "segment_bytes": 2 * MIB} | wrong))
    ColdTier(tmp_path / "cold", capacity_bytes=10 * MIB, segment_bytes=2 * MIB).close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    target = tmp_path / "disk"
    target.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=7m", "tmpfs", str(target)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("needs the right to mount a tmpfs")
    yield target
    subprocess.run(["umount", str(target)], check=True)


def test_a_full_disk_keeps_the_store_small_and_alive(small_disk: Path) -> None:
    sizes: dict[str, Any] = {"capacity_bytes": 40 * MIB, "segment_bytes": 2 * MIB, "codec": "raw", "sync": "none"}
    with closing(ColdTier(small_disk / "cold", **sizes)) as tier:
        for number in range(300):
            put(tier, number)
        assert len(tier.segments()) == 3
        assert 299 in present(tier, range(300))
        assert tier.damage["disk-full"] > 0
    with closing(ColdTier(small_disk / "cold", **sizes)) as tier:
        assert 299 in present(tier, range(300))


def test_a_disk_without_room_for_one_segment_refuses_the_put(small_disk: Path) -> None:
    hog = small_disk / "hog"
    hog.write_bytes(bytes(6 * MIB))
    tier = ColdTier(small_disk / "cold", capacity_bytes=40 * MIB, segment_bytes=2 * MIB, codec="raw", sync="none")
    with closing(tier):
        payload = block(1, SIZE)
        with pytest.raises(StorageFull):
            tier.put(key_of(1), payload, meta_of(payload))
        assert list((small_disk / "cold").glob("segment*")) == []
        assert tier.usage().blocks == 0
        hog.unlink()
        put(tier, 1)


def test_eviction_is_reported_under_no_lock(tmp_path: Path) -> None:
    tier: ColdTier

    def on_evict(keys: list[bytes]) -> None:
        assert all(tier.meta(key) is None for key in keys)
        put(tier, 10_000)
        tier.delete(key_of(10_000))

    tier = ColdTier(
        tmp_path / "cold", capacity_bytes=10 * MIB, segment_bytes=2 * MIB, codec="raw", sync="none", on_evict=on_evict
    )
    with closing(tier):
        for number in range(300):
            put(tier, number)
        assert isinstance(tier.meta(key_of(299)), BlockMeta)


def test_importing_the_tier_needs_no_torch() -> None:
    code = "import sys, tierkv.storage.cold; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
