"""The slot allocator: nothing overlaps, nothing is lost, sizes share one arena."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierkv.errors import BlockTooLarge, ConfigError, InvalidRequest, TierFull
from tierkv.storage.superblocks import SuperblockAllocator, default_superblock_bytes, slot_bytes
from tierkv.storage.tier import Slot

MIB = 1 << 20
SUPERBLOCK = 64 << 10


def fill(allocator: SuperblockAllocator, length: int) -> list[Slot]:
    slots = []
    while True:
        try:
            slots.append(allocator.allocate(length))
        except TierFull:
            return slots


@given(st.integers(0, 1 << 26))
def test_slot_size_holds_the_length_and_keeps_alignment(length: int) -> None:
    size = slot_bytes(length)
    assert size >= max(length, 1)
    assert size % 4096 == 0 or (size < 4096 and size % 64 == 0 and 4096 % size == 0)
    assert size <= max(2 * length, 64) if length <= 2048 else size < length + 4096


def test_few_sizes_below_a_page() -> None:
    assert {slot_bytes(length) for length in range(4097)} == {64, 128, 256, 512, 1024, 2048, 4096}


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        slot_bytes(-1)


@pytest.mark.parametrize(
    ("capacity", "superblock"),
    [
        (100_000, 98_304),
        (5 * MIB, 5 * MIB),
        (24 * MIB, 4 * MIB),
        (256 * MIB, 16 * MIB),
        (1000 * MIB, 32 * MIB),
        (1 << 40, 64 * MIB),
    ],
)
def test_default_superblock_size(capacity: int, superblock: int) -> None:
    assert default_superblock_bytes(capacity) == superblock


@pytest.mark.parametrize("capacity", [8 * MIB, 24 * MIB, 100 * MIB])
def test_a_small_arena_holds_large_blocks(capacity: int) -> None:
    assert len(fill(SuperblockAllocator(capacity), 3_000_000)) * 3_000_000 >= 0.6 * capacity


def test_capacity_is_filled_to_the_last_slot() -> None:
    allocator = SuperblockAllocator(4 * SUPERBLOCK, SUPERBLOCK)
    slots = fill(allocator, 4096)
    assert sorted(slot.offset for slot in slots) == list(range(0, 4 * SUPERBLOCK, 4096))
    assert allocator.usage().used_bytes == allocator.capacity


def test_the_tail_of_a_superblock_counts_as_used() -> None:
    allocator = SuperblockAllocator(SUPERBLOCK, SUPERBLOCK)
    slot = allocator.allocate(20_000)
    assert slot.size == 20_480
    assert allocator.usage().used_bytes == 20_480 + (SUPERBLOCK - 3 * 20_480)
    assert allocator.usage().stranded_bytes == 2 * 20_480
    allocator.free(slot)
    assert (allocator.usage().used_bytes, allocator.usage().stranded_bytes) == (0, 0)


def test_what_does_not_make_a_superblock_is_not_used() -> None:
    allocator = SuperblockAllocator(2 * SUPERBLOCK + 4096, SUPERBLOCK)
    assert allocator.capacity == allocator.usage().capacity_bytes == 2 * SUPERBLOCK


def test_an_emptied_superblock_serves_another_size() -> None:
    allocator = SuperblockAllocator(2 * SUPERBLOCK, SUPERBLOCK)
    for slot in fill(allocator, 4096):
        allocator.free(slot)
    assert len(fill(allocator, 30_000)) == 4


def test_full_names_the_remedy_and_too_large_is_told_apart() -> None:
    allocator = SuperblockAllocator(SUPERBLOCK, SUPERBLOCK)
    allocator.allocate(4096)
    with pytest.raises(TierFull, match="evict"):
        allocator.allocate(8192)
    with pytest.raises(BlockTooLarge, match="superblock"):
        allocator.allocate(SUPERBLOCK + 1)


def test_neighbours_of_the_right_size_is_the_slot_alone() -> None:
    allocator = SuperblockAllocator(SUPERBLOCK, SUPERBLOCK)
    slots = fill(allocator, 8000)
    assert allocator.neighbours(slots[3], 5000) == [slots[3]]
    assert set(allocator.neighbours(slots[3], 4096)) == set(slots)
    with pytest.raises(BlockTooLarge):
        allocator.neighbours(slots[3], SUPERBLOCK + 1)


@pytest.mark.parametrize(
    "wrong", [Slot(0, 8192), Slot(4096, 4096), Slot(-4096, 4096), Slot(1 << 30, 4096), Slot(1, 4096)]
)
def test_a_foreign_slot_is_refused(wrong: Slot) -> None:
    allocator = SuperblockAllocator(SUPERBLOCK, SUPERBLOCK)
    allocator.allocate(4096)
    with pytest.raises(InvalidRequest):
        allocator.free(wrong)
    with pytest.raises(InvalidRequest):
        allocator.neighbours(wrong, 4096)


def test_a_double_free_is_refused_also_when_the_superblock_was_reused() -> None:
    allocator = SuperblockAllocator(SUPERBLOCK, SUPERBLOCK)
    slot = allocator.allocate(4096)
    allocator.free(slot)
    with pytest.raises(InvalidRequest):
        allocator.free(slot)
    allocator.allocate(8192)
    with pytest.raises(InvalidRequest):
        allocator.free(slot)


@pytest.mark.parametrize(("capacity", "superblock"), [(4096, 8192), (0, None), (MIB, 5000), (MIB, 0), (MIB, -4096)])
def test_impossible_sizes_are_a_config_error(capacity: int, superblock: int | None) -> None:
    with pytest.raises(ConfigError):
        SuperblockAllocator(capacity, superblock)


def test_threads_never_share_a_slot() -> None:
    allocator = SuperblockAllocator(16 * SUPERBLOCK, SUPERBLOCK)
    owner: dict[int, int] = {}

    def churn(me: int) -> None:
        held: list[Slot] = []
        for turn in range(2000):
            if turn % 3 == 2:
                slot = held.pop(turn % len(held))
                assert owner.pop(slot.offset) == me
                allocator.free(slot)
            elif len(held) < 20:
                slot = allocator.allocate(4096 * (1 + (me + turn) % 2))
                assert owner.setdefault(slot.offset, me) == me
                held.append(slot)
        for slot in held:
            assert owner.pop(slot.offset) == me
            allocator.free(slot)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(churn, range(4)))
    assert allocator.usage().free_superblocks == 16
    assert allocator.usage().slots == 0


class AllocatorMachine(RuleBasedStateMachine):
    """Slots in use against a plain list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SuperblockAllocator(5 * SUPERBLOCK, SUPERBLOCK)
        self.held: list[Slot] = []

    lengths = st.sampled_from([0, 64, 100, 4096, 5000, 20_000, 40_000, SUPERBLOCK])

    @rule(length=lengths)
    def allocate(self, length: int) -> None:
        size = slot_bytes(length)
        try:
            slot = self.allocator.allocate(length)
        except TierFull:
            assert self.room(size) == 0
        else:
            assert slot.size == size
            assert slot.offset % min(size, 4096) == 0
            self.held.append(slot)

    @rule(pick=st.integers(0, 1 << 20))
    def free(self, pick: int) -> None:
        if self.held:
            slot = self.held.pop(pick % len(self.held))
            self.allocator.free(slot)
            with pytest.raises(InvalidRequest):
                self.allocator.free(slot)

    @rule(pick=st.integers(0, 1 << 20), length=lengths)
    def make_room_around_a_slot(self, pick: int, length: int) -> None:
        if self.held:
            for slot in self.allocator.neighbours(self.held[pick % len(self.held)], length):
                self.held.remove(slot)
                self.allocator.free(slot)
            self.held.append(self.allocator.allocate(length))

    def room(self, size: int) -> int:
        owners = {slot.offset // SUPERBLOCK: slot.size for slot in self.held}
        free = (5 - len(owners)) * (SUPERBLOCK // size)
        mine = sum(1 for owner in owners.values() if owner == size) * (SUPERBLOCK // size)
        return free + mine - sum(1 for slot in self.held if slot.size == size)

    @invariant()
    def slots_do_not_overlap(self) -> None:
        end = 0
        for slot in sorted(self.held, key=lambda slot: slot.offset):
            assert slot.offset >= end
            end = slot.offset + slot.size
        assert end <= self.allocator.capacity

    @invariant()
    def usage_adds_up(self) -> None:
        usage = self.allocator.usage()
        owners = {slot.offset // SUPERBLOCK: slot.size for slot in self.held}
        used = sum(slot.size for slot in self.held) + sum(SUPERBLOCK % size for size in owners.values())
        assert (usage.slots, usage.used_bytes) == (len(self.held), used)
        assert usage.free_superblocks == usage.superblocks - len(owners)
        assert usage.used_bytes + usage.stranded_bytes + usage.free_superblocks * SUPERBLOCK == usage.capacity_bytes


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAllocatorMachine = AllocatorMachine.TestCase
