"""The warm tier: the tier contract, and what in-place access adds to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conformance.tier_suite import TierConformance, block, key_of, meta_of, read
from tierkv.errors import CorruptBlock, InvalidRequest, NotFound, StoreInUse, TierFull, Unavailable
from tierkv.storage.shm import MappedSegment
from tierkv.storage.tier import Slot
from tierkv.storage.warm import WarmTier

MIB = 1 << 20


class TestWarmTier(TierConformance):
    def make_tier(self, directory: Path) -> WarmTier:
        return WarmTier(self.capacity_bytes, segment_path=directory / "arena", superblock_bytes=256 << 10)


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[WarmTier]:
    tier = WarmTier(4 * MIB, segment_path=tmp_path / "arena", superblock_bytes=MIB)
    yield tier
    tier.close()


def test_a_client_reads_and_writes_slots_through_the_file(warm: WarmTier) -> None:
    payload = block(1, 70_000)
    with MappedSegment(warm.path, generation=warm.generation) as client:
        slot = warm.allocate(len(payload))
        client.data[slot.offset : slot.offset + len(payload)] = payload
        warm.publish(key_of(1), slot, meta_of(payload))
        assert read(warm, key_of(1)) == payload
        with warm.path.open("rb") as file:
            file.seek(warm.data_offset + slot.offset)
            assert file.read(len(payload)) == payload


def test_views_are_in_place_and_page_aligned(warm: WarmTier) -> None:
    import numpy as np

    warm.allocate(5000)
    slot = warm.allocate(5000)
    view = warm.view(slot, 5000)
    assert np.frombuffer(view, np.uint8).ctypes.data % 4096 == 0
    view[:5] = b"first"
    assert bytes(warm.view(slot, 5)) == b"first"
    with pytest.raises(InvalidRequest):
        warm.view(slot, slot.size + 1)


def test_a_slot_is_private_until_published_and_stays_after_withdrawal(warm: WarmTier) -> None:
    payload = block(1, 5000)
    slot = warm.allocate(5000)
    warm.write(slot, payload)
    assert warm.meta(key_of(1)) is None
    assert warm.key_at(slot) is None

    warm.publish(key_of(1), slot, meta_of(payload))
    assert warm.slot(key_of(1)) == slot
    assert warm.key_at(slot) == key_of(1)
    with pytest.raises(ValueError, match="already resident"):
        warm.publish(key_of(1), warm.allocate(5000), meta_of(payload))

    view = warm.view(slot, 5000)
    assert warm.withdraw(key_of(1)) == slot
    assert warm.withdraw(key_of(1)) is None
    assert warm.meta(key_of(1)) is None
    assert warm.slot(key_of(1)) is None
    assert warm.key_at(slot) is None
    assert slot not in (warm.allocate(5000), warm.allocate(5000))
    assert bytes(view) == payload


def test_a_discarded_slot_is_used_again(warm: WarmTier) -> None:
    before = warm.usage()
    slot = warm.allocate(5000)
    assert warm.usage().used_bytes > before.used_bytes
    warm.discard(slot)
    assert warm.usage() == before
    with pytest.raises(InvalidRequest):
        warm.discard(slot)


def test_evicting_the_neighbours_makes_room_for_another_size(warm: WarmTier) -> None:
    small = block(1, 60_000)
    outcomes = warm.put_many([(key_of(number), small, meta_of(small)) for number in range(100)])
    assert {type(outcome) for outcome in outcomes} == {type(None), TierFull}
    large = block(2, 500_000)
    with pytest.raises(TierFull):
        warm.put(key_of(10**6), large, meta_of(large))
    victim = warm.slot(key_of(7))
    assert victim is not None
    for slot in warm.neighbours(victim, len(large)):
        key = warm.key_at(slot)
        assert key is not None
        warm.delete(key)
    warm.put(key_of(10**6), large, meta_of(large))
    assert read(warm, key_of(10**6)) == large
    assert warm.meta(key_of(7)) is None


class InterruptedRead(WarmTier):
    """Runs `interrupt` between the copy's begin and its end, where another thread could."""

    def __init__(self, path: Path) -> None:
        super().__init__(MIB, segment_path=path)
        self.interrupt: Callable[[], None] = lambda: None

    def read(self, slot: Slot, out: memoryview) -> None:
        self.interrupt()
        super().read(slot, out)


def test_a_block_deleted_and_overwritten_during_a_read_is_a_miss_not_damage(tmp_path: Path) -> None:
    tier = InterruptedRead(tmp_path / "arena")
    old, new = block(1, 5000), block(2, 5000)
    tier.put(key_of(1), old, meta_of(old))

    def replace() -> None:
        tier.delete(key_of(1))
        tier.put(key_of(2), new, meta_of(new))

    tier.interrupt = replace
    with pytest.raises(NotFound):
        tier.read_into(key_of(1), memoryview(bytearray(5000)))
    tier.interrupt = lambda: None
    assert read(tier, key_of(2)) == new
    tier.close()


def test_a_key_stored_anew_during_a_read_survives_it(tmp_path: Path) -> None:
    tier = InterruptedRead(tmp_path / "arena")
    old, new = block(1, 5000), block(2, 5000)
    tier.put(key_of(1), old, meta_of(old))

    def replace() -> None:
        tier.delete(key_of(1))
        tier.put(key_of(1), new, meta_of(new))

    tier.interrupt = replace
    with pytest.raises(NotFound):
        tier.read_into(key_of(1), memoryview(bytearray(5000)))
    tier.interrupt = lambda: None
    assert read(tier, key_of(1)) == new
    tier.close()


class FailingWrite(WarmTier):
    def write(self, slot: Slot, payload: bytes | bytearray | memoryview) -> None:
        raise MemoryError


def test_a_put_that_fails_midway_gives_its_slot_back(tmp_path: Path) -> None:
    tier = FailingWrite(MIB, segment_path=tmp_path / "arena")
    with pytest.raises(MemoryError):
        tier.put(key_of(1), bytes(5000), meta_of(bytes(5000)))
    assert tier.usage().used_bytes == 0
    tier.close()


def test_a_damaged_block_gives_its_slot_back(warm: WarmTier) -> None:
    payload = block(1, 5000)
    warm.put(key_of(1), payload, meta_of(payload))
    slot = warm.slot(key_of(1))
    assert slot is not None
    warm.view(slot, 1)[0] ^= 1
    with pytest.raises(CorruptBlock):
        warm.read_into(key_of(1), memoryview(bytearray(5000)))
    assert warm.usage().used_bytes == 0


def test_closing_removes_the_file_and_views_stay_readable(warm: WarmTier) -> None:
    payload = block(1, 5000)
    slot = warm.allocate(5000)
    view = warm.view(slot, 5000)
    view[:] = payload
    warm.close()
    assert not warm.path.exists()
    assert bytes(view) == payload
    for use in (
        lambda: warm.allocate(10),
        lambda: warm.discard(slot),
        lambda: warm.view(slot, 10),
        lambda: warm.neighbours(slot, 10),
        lambda: warm.publish(key_of(1), slot, meta_of(payload)),
        lambda: warm.withdraw(key_of(1)),
        lambda: warm.slot(key_of(1)),
        lambda: warm.key_at(slot),
    ):
        with pytest.raises(Unavailable):
            use()


def test_an_arena_has_one_owner(warm: WarmTier) -> None:
    with pytest.raises(StoreInUse):
        WarmTier(4 * MIB, segment_path=warm.path)
