"""The conformance suite of the `Tier` contract.

A tier is accepted when a subclass of `TierConformance` passes:

    class TestMyTier(TierConformance):
        def make_tier(self, directory):
            return MyTier(directory, capacity_bytes=self.capacity_bytes)
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from threading import Barrier
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.conformance.tier_machine import tier_machine
from tierkv.errors import BlockTooLarge, BodyMismatch, CorruptBlock, NotFound, StorageFull, TierFull, Unavailable
from tierkv.storage.tier import BlockMeta, Tier, checksum

__all__ = ["TierConformance", "block", "key_of", "meta_of", "read"]


def key_of(number: int) -> bytes:
    """A block key: 32 bytes without structure."""
    return blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def block(number: int, length: int) -> bytes:
    """A payload that no other number shares."""
    return random.Random(number).randbytes(length)


def meta_of(payload: bytes, **fields: object) -> BlockMeta:
    """The meta that fits a payload."""
    return BlockMeta(len(payload), checksum(payload), **fields)  # type: ignore[arg-type]


def read(tier: Tier, key: bytes) -> bytes | None:
    """Read a block whole, None when the tier does not have it."""
    meta = tier.meta(key)
    if meta is None:
        return None
    out = bytearray(meta.length)
    tier.read_into(key, memoryview(out))
    return bytes(out)


class TierConformance:
    """Inherit, define `make_tier`, adjust the class attributes.

    Attributes
    ----------
    capacity_bytes
        Size of the tiers that `make_tier` makes; at least 16 payloads.
    payload_bytes
        Size of an ordinary block.
    oversize_bytes
        Size of a block that can never fit.
    evicts
        True for a tier that makes room by itself, False for one that answers `TierFull`.
    """

    capacity_bytes: ClassVar[int] = 4 << 20
    payload_bytes: ClassVar[int] = 96 << 10
    oversize_bytes: ClassVar[int] = 8 << 20
    evicts: ClassVar[bool] = False

    def make_tier(self, directory: Path) -> Tier:
        """Make an empty tier of `capacity_bytes`; `directory` is its own to use."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = self.make_tier(tmp_path)
        yield tier
        tier.close()

    def test_a_new_tier_is_empty(self, tier: Tier) -> None:
        assert list(tier.records()) == []
        assert (tier.usage().blocks, tier.usage().payload_bytes) == (0, 0)
        assert tier.meta(key_of(1)) is None
        with pytest.raises(NotFound):
            tier.read_into(key_of(1), memoryview(bytearray(64)))

    @pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 4095, 4096, 4097, 70_001])
    def test_reads_back_what_was_put(self, tier: Tier, length: int) -> None:
        payload = block(length, length)
        tier.put(key_of(1), payload, meta_of(payload))
        assert read(tier, key_of(1)) == payload

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_takes_any_kind_of_buffer(self, tier: Tier, kind: type) -> None:
        payload = block(1, self.payload_bytes)
        tier.put(key_of(1), kind(payload), meta_of(payload))
        assert read(tier, key_of(1)) == payload

    def test_the_caller_may_reuse_its_buffer_after_put(self, tier: Tier) -> None:
        payload = block(1, self.payload_bytes)
        buffer = bytearray(payload)
        tier.put(key_of(1), buffer, meta_of(payload))
        buffer[:] = bytes(len(buffer))
        assert read(tier, key_of(1)) == payload

    def test_read_fills_the_payload_and_nothing_after_it(self, tier: Tier) -> None:
        payload = block(1, 5000)
        tier.put(key_of(1), payload, meta_of(payload))
        out = bytearray(b"\xaa" * 9000)
        assert tier.read_into(key_of(1), memoryview(out)).length == 5000
        assert out == payload + b"\xaa" * 4000

    def test_keeps_every_field_of_the_meta(self, tier: Tier) -> None:
        payload = block(1, 5000)
        meta = meta_of(payload, parent=key_of(9), namespace=key_of(8), tenant=b"tenant-1", depth=7, group=3)
        tier.put(key_of(1), payload, meta)
        assert tier.meta(key_of(1)) == meta
        assert tier.read_into(key_of(1), memoryview(bytearray(5000))) == meta
        assert list(tier.records()) == [(key_of(1), meta)]

    def test_records_list_parents_before_their_children(self, tier: Tier) -> None:
        parent = bytes(32)
        for number in range(6):
            payload = block(number, 5000)
            tier.put(key_of(number), payload, meta_of(payload, parent=parent, depth=number))
            parent = key_of(number)
        assert [key for key, _ in tier.records()] == [key_of(number) for number in range(6)]

    def test_a_second_put_leaves_the_first_block(self, tier: Tier) -> None:
        first, second = block(1, 5000), block(2, 6000)
        tier.put(key_of(1), first, meta_of(first))
        before = tier.usage()
        tier.put(key_of(1), second, meta_of(second))
        assert read(tier, key_of(1)) == first
        assert tier.usage() == before

    def test_says_which_blocks_are_there(self, tier: Tier) -> None:
        for number in (0, 1, 3):
            payload = block(number, 5000)
            tier.put(key_of(number), payload, meta_of(payload))
        assert [tier.has(key_of(number)) for number in range(5)] == [True, True, False, True, False]

    def test_holds_counts_up_to_the_first_gap(self, tier: Tier) -> None:
        for number in (0, 1, 2, 4):
            payload = block(number, 5000)
            tier.put(key_of(number), payload, meta_of(payload))
        keys = [key_of(number) for number in range(6)]
        assert [tier.holds(keys[first:]) for first in range(6)] == [3, 2, 1, 0, 1, 0]
        assert tier.holds(keys[:2]) == 2
        assert tier.holds([]) == 0
        tier.delete(keys[1])
        assert tier.holds(keys) == 1

    def test_delete_forgets_the_block_once(self, tier: Tier) -> None:
        payload = block(1, 5000)
        tier.put(key_of(1), payload, meta_of(payload))
        assert tier.delete(key_of(1)) is True
        assert tier.delete(key_of(1)) is False
        assert tier.meta(key_of(1)) is None
        with pytest.raises(NotFound):
            tier.read_into(key_of(1), memoryview(bytearray(5000)))

    def test_a_deleted_key_can_be_put_again(self, tier: Tier) -> None:
        first, second = block(1, 5000), block(2, 6000)
        tier.put(key_of(1), first, meta_of(first))
        tier.delete(key_of(1))
        tier.put(key_of(1), second, meta_of(second))
        assert read(tier, key_of(1)) == second

    def test_put_many_answers_for_each_block(self, tier: Tier) -> None:
        good, short = block(1, 5000), block(2, 4999)
        outcomes = tier.put_many(
            [
                (key_of(1), good, meta_of(good)),
                (key_of(2), short, BlockMeta(5000, checksum(short))),
                (key_of(3), good, meta_of(good)),
            ]
        )
        assert [type(outcome) for outcome in outcomes] == [type(None), BodyMismatch, type(None)]
        assert [read(tier, key_of(number)) for number in (1, 2, 3)] == [good, None, good]

    @pytest.mark.parametrize("announced", [4999, 5001, 0])
    def test_a_payload_of_another_length_is_refused(self, tier: Tier, announced: int) -> None:
        payload = block(1, 5000)
        with pytest.raises(BodyMismatch):
            tier.put(key_of(1), payload, BlockMeta(announced, checksum(payload)))
        assert tier.meta(key_of(1)) is None
        assert tier.usage().blocks == 0

    def test_a_buffer_too_small_is_refused_and_the_block_stays(self, tier: Tier) -> None:
        payload = block(1, 5000)
        tier.put(key_of(1), payload, meta_of(payload))
        with pytest.raises(BodyMismatch):
            tier.read_into(key_of(1), memoryview(bytearray(4999)))
        assert read(tier, key_of(1)) == payload

    def test_bytes_that_do_not_verify_are_never_served_and_a_store_repairs_them(self, tier: Tier) -> None:
        payload = block(1, 5000)
        wrong = BlockMeta(5000, checksum(payload) ^ 1)
        # A tier may find out when it takes the block, or when it gives it back.
        with pytest.raises(CorruptBlock):  # noqa: PT012
            tier.put(key_of(1), payload, wrong)
            tier.read_into(key_of(1), memoryview(bytearray(5000)))
        assert tier.meta(key_of(1)) is None
        assert tier.usage().blocks == 0
        tier.put(key_of(1), payload, meta_of(payload))
        assert read(tier, key_of(1)) == payload

    def test_usage_adds_up(self, tier: Tier) -> None:
        lengths = [1, 4096, 5000, self.payload_bytes]
        for number, length in enumerate(lengths):
            payload = block(number, length)
            tier.put(key_of(number), payload, meta_of(payload))
        usage = tier.usage()
        assert (usage.blocks, usage.payload_bytes) == (4, sum(lengths))
        assert 0 < usage.used_bytes <= usage.capacity_bytes <= self.capacity_bytes
        for number in range(4):
            tier.delete(key_of(number))
        assert (tier.usage().blocks, tier.usage().payload_bytes) == (0, 0)

    def test_a_block_that_can_never_fit_is_refused(self, tier: Tier) -> None:
        payload = block(1, self.oversize_bytes)
        with pytest.raises(BlockTooLarge):
            tier.put(key_of(1), payload, meta_of(payload))
        assert tier.usage().blocks == 0

    def test_a_full_tier_keeps_its_promises(self, tier: Tier) -> None:
        stored: list[int] = []
        full = False
        for number in range(3 * self.capacity_bytes // self.payload_bytes):
            payload = block(number, self.payload_bytes)
            try:
                tier.put(key_of(number), payload, meta_of(payload))
            except (TierFull, StorageFull):
                full = True
                break
            stored.append(number)
            assert tier.usage().used_bytes <= tier.usage().capacity_bytes
        found = [number for number in stored if read(tier, key_of(number)) == block(number, self.payload_bytes)]
        if self.evicts:
            assert not full
            assert found[-1] == stored[-1]
            assert all(tier.meta(key_of(number)) is None for number in set(stored) - set(found))
            assert tier.usage().blocks == len(found) < len(stored)
        else:
            assert full
            assert found == stored
            present = block(stored[0], self.payload_bytes)
            tier.put(key_of(stored[0]), present, meta_of(present))
            tier.delete(key_of(stored[0]))
            payload = block(-1, self.payload_bytes)
            tier.put(key_of(10**6), payload, meta_of(payload))
            assert read(tier, key_of(10**6)) == payload

    def test_threads_see_whole_blocks_or_none(self, tier: Tier) -> None:
        workers, keys, rounds = 4, 6, 120
        start = Barrier(workers)

        def hammer(seed: int) -> int:
            choose = random.Random(seed)
            out = memoryview(bytearray(self.payload_bytes))
            seen = 0
            start.wait()
            for turn in range(rounds):
                key = key_of(choose.randrange(keys))
                action = choose.choice(("put", "put", "read", "read", "read", "delete"))
                if action == "put":
                    payload = key + block(seed * rounds + turn, self.payload_bytes - 32)
                    tier.put(key, payload, meta_of(payload))
                elif action == "delete":
                    tier.delete(key)
                else:
                    try:
                        meta = tier.read_into(key, out)
                    except NotFound:
                        continue
                    assert bytes(out[:32]) == key
                    assert checksum(out[: meta.length]) == meta.checksum
                    seen += 1
            return seen

        with ThreadPoolExecutor(workers) as pool:
            assert sum(pool.map(hammer, range(workers))) > 0
        assert tier.usage().blocks == len(list(tier.records()))
        for key, meta in list(tier.records()):
            assert checksum(read(tier, key) or b"") == meta.checksum

    def test_a_closed_tier_says_so(self, tier: Tier) -> None:
        payload = block(1, 5000)
        tier.put(key_of(1), payload, meta_of(payload))
        tier.flush()
        tier.close()
        tier.close()
        for use in (
            lambda: tier.put(key_of(2), payload, meta_of(payload)),
            lambda: tier.read_into(key_of(1), memoryview(bytearray(5000))),
            lambda: tier.meta(key_of(1)),
            lambda: tier.has(key_of(1)),
            lambda: tier.holds([key_of(1)]),
            lambda: tier.delete(key_of(1)),
            lambda: list(tier.records()),
            lambda: tier.usage(),
            lambda: tier.flush(),
        ):
            with pytest.raises(Unavailable):
                use()

    def test_behaves_as_a_dict(self, tmp_path: Path) -> None:
        machine = tier_machine(self.make_tier, tmp_path, self.payload_bytes)
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
