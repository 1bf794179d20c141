"""What each tenant takes of the cold tier: sums that are always right, and trimming that lasts."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
from threading import Event

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.conformance.quota_suite import ANN, BOB, put_for, recount
from tests.conformance.tier_suite import block, key_of, meta_of, read
from tests.storage.cold_store import MIB, SIZE, OpenCold, opener
from tierkv.errors import NotFound
from tierkv.storage.cold import ColdTier
from tierkv.storage.cold.families import Families
from tierkv.storage.tier import checksum

ROOT = Path(__file__).parents[2]
TENANTS = (ANN, BOB, b"tenant-c")


@pytest.fixture
def open_cold(tmp_path: Path) -> Iterator[OpenCold]:
    yield from opener(tmp_path / "cold")


def there(tier: ColdTier, numbers: range) -> list[int]:
    return [number for number in numbers if tier.has(key_of(number))]


def quota_machine(directory: Path) -> type[RuleBasedStateMachine]:
    """Tenants' blocks against a list in the order of use; everything fits the first segment."""

    class QuotaMachine(RuleBasedStateMachine):
        runs = 0

        def __init__(self) -> None:
            super().__init__()
            QuotaMachine.runs += 1
            self.home = directory / f"run-{QuotaMachine.runs}"
            self.evicted: list[bytes] = []
            self.tier = self.open()
            self.by_use: dict[int, tuple[bytes, int]] = {}
            self.stored: list[int] = []

        def open(self) -> ColdTier:
            return ColdTier(
                self.home,
                capacity_bytes=10 * MIB,
                segment_bytes=2 * MIB,
                codec="raw",
                sync="none",
                on_evict=lambda keys: self.evicted.extend(keys),
            )

        @rule(number=st.integers(0, 15), tenant=st.sampled_from(TENANTS), length=st.sampled_from([0, 1, 3000, 20_000]))
        def put(self, number: int, tenant: bytes, length: int) -> None:
            put_for(self.tier, tenant, number, length=length, namespace=bytes([number % 2]) * 32)
            if number not in self.by_use:
                self.by_use[number] = (tenant, length)
                self.stored.append(number)

        @rule(numbers=st.lists(st.integers(0, 15), max_size=4))
        def touch(self, numbers: list[int]) -> None:
            self.tier.touch([key_of(number) for number in numbers])
            for number in numbers:
                if number in self.by_use:
                    self.by_use[number] = self.by_use.pop(number)

        @rule(number=st.integers(0, 15))
        def delete(self, number: int) -> None:
            assert self.tier.delete(key_of(number)) == (number in self.by_use)
            self.forget(number)

        @rule(tenant=st.sampled_from(TENANTS), limit=st.integers(0, 60_000))
        def trim(self, tenant: bytes, limit: int) -> None:
            gone: list[int] = []
            left = self.payload_of(tenant)
            for number, (owner, length) in self.by_use.items():
                if left <= limit:
                    break
                if owner == tenant:
                    gone.append(number)
                    left -= length
            self.evicted.clear()
            assert self.tier.trim(tenant, limit) == len(gone)
            assert self.evicted == [key_of(number) for number in gone]
            for number in gone:
                self.forget(number)

        @precondition(lambda self: self.by_use)
        @rule()
        def restart(self) -> None:
            self.tier.close()
            self.tier = self.open()
            self.by_use = {number: self.by_use[number] for number in self.stored}

        @invariant()
        def sums_are_those_of_the_blocks(self) -> None:
            expected = {tenant: self.payload_of(tenant) for tenant in TENANTS if self.payload_of(tenant)}
            assert self.tier.payload_by_tenant() == recount(self.tier) == expected
            assert there(self.tier, range(16)) == sorted(self.by_use)

        def forget(self, number: int) -> None:
            if self.by_use.pop(number, None):
                self.stored.remove(number)

        def payload_of(self, tenant: bytes) -> int:
            return sum(length for owner, length in self.by_use.values() if owner == tenant)

        def teardown(self) -> None:
            self.tier.close()

    return QuotaMachine


def test_any_history_gives_the_sums_and_the_victims_of_a_model(tmp_path: Path) -> None:
    run_state_machine_as_test(
        quota_machine(tmp_path),
        settings=settings(
            max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


def test_sums_stay_right_while_segments_are_recycled_and_carried(open_cold: OpenCold) -> None:
    tier = open_cold()
    for number in range(500):
        put_for(tier, TENANTS[number % 7 % 3], number, length=SIZE)
        tier.touch([key_of(n) for n in range(12)])
        if number % 50 == 49:
            tier.trim(BOB, 10 * SIZE)
        if number % 20 == 0:
            assert tier.payload_by_tenant() == recount(tier)
    sums = tier.payload_by_tenant()
    assert sums == recount(tier)
    assert sum(sums.values()) == tier.usage().payload_bytes
    tier.close()
    assert open_cold().payload_by_tenant() == sums


def test_trim_goes_through_the_oldest_segments_first(open_cold: OpenCold) -> None:
    tier = open_cold()
    for number in range(90):
        put_for(tier, ANN, number, length=SIZE)
    first = tier.segments()[0]
    assert first.state == "sealed"
    tier.touch([key_of(0)])
    assert tier.trim(ANN, (90 - first.blocks + 1) * SIZE) == first.blocks - 1
    assert there(tier, range(90)) == [0, *range(first.blocks, 90)], "within a segment the latest used goes last"
    assert tier.trim(ANN, (90 - first.blocks) * SIZE) == 1
    assert there(tier, range(90)) == list(range(first.blocks, 90)), "whatever was used, older segments go first"


def test_trimming_full_segments_costs_nobody_else_a_block(open_cold: OpenCold) -> None:
    evicted: list[bytes] = []
    sizes = {"capacity_bytes": 34 * MIB, "segment_bytes": 8 * MIB}
    tier = open_cold(on_evict=evicted.extend, **sizes)
    numbers = range(30_000)
    payload = block(1, 900)
    metas = [meta_of(payload, tenant=tenant) for tenant in (BOB, *[ANN] * 9)]
    for first in range(0, len(numbers), 200):
        items = [(key_of(number), payload, metas[number % 10]) for number in range(first, first + 200)]
        assert tier.put_many(items) == [None] * 200
    before = there(tier, numbers)
    bobs = [number for number in before if number % 10 == 0]
    assert len(before) < len(numbers), "all segments are full"
    evicted.clear()
    assert tier.trim(ANN, 0) == len(before) - len(bobs) == len(evicted)
    assert there(tier, numbers) == bobs
    tier.close()
    again = open_cold(**sizes)
    assert there(again, numbers) == bobs
    assert again.payload_by_tenant() == {BOB: 900 * len(bobs)}
    assert all(read(again, key_of(number)) == payload for number in bobs)
    assert tier.damage == again.damage == {}


def test_trimming_beside_readers_and_writers(open_cold: OpenCold) -> None:
    tier = open_cold()
    payloads = [block(number, SIZE) for number in range(400)]
    sums = [checksum(payload) for payload in payloads]
    newest, done = [0], Event()
    written = SimpleQueue[bool]()

    def read_on(offset: int) -> int:
        out = memoryview(bytearray(SIZE))
        for seen, back in enumerate(cycle(range(60))):
            if done.is_set():
                return seen
            number = max(0, newest[0] - back - offset)
            try:
                tier.read_into(key_of(number), out)
            except NotFound:
                continue
            assert checksum(out) == sums[number]
        raise AssertionError

    def trim_on() -> int:
        return sum(tier.trim(ANN, 20 * SIZE) for _ in iter(written.get, False))

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read_on, 0), pool.submit(read_on, 30)]
        trimmers = [pool.submit(trim_on), pool.submit(trim_on)]
        try:
            for number, payload in enumerate(payloads):
                tier.put(key_of(number), payload, meta_of(payload, tenant=ANN if number % 2 else BOB))
                tier.touch([key_of(number // 2)])
                newest[0] = number
                written.put(True)
        finally:
            done.set()
            for _ in trimmers:
                written.put(False)
        assert all(reader.result() > 0 for reader in readers)
        assert sum(trimmer.result() for trimmer in trimmers) > 0
    tier.trim(ANN, 20 * SIZE)
    assert tier.payload_by_tenant() == recount(tier)
    assert 0 < tier.payload_by_tenant()[ANN] <= 20 * SIZE
    assert key_of(399) in dict(tier.records())
    assert tier.damage == {}


def test_a_family_without_blocks_is_forgotten() -> None:
    families = Families()
    commons = [number.to_bytes(4, "little") + ANN + bytes(32) for number in range(2)]
    first, second = map(families.name, commons)
    families.enter(first, 2, 300)
    families.enter(second, 1, 50)
    families.leave(first, 100)
    assert families.all() == {first: commons[0], second: commons[1]}
    families.leave(first, 200)
    assert families.all() == {second: commons[1]}
    assert families.payload_by_tenant == {ANN: 50}
    assert families.name(commons[0]) not in (first, second)


TRIMMER = """
import sys
from tests.conformance.quota_suite import ANN, BOB
from tests.conformance.tier_suite import block, key_of, meta_of
from tierkv.storage.cold import ColdTier

path, blocks, size, step = sys.argv[1], *map(int, sys.argv[2:])
names = {key_of(n): n for n in range(blocks)}
tier = ColdTier(path, capacity_bytes=10 << 20, segment_bytes=2 << 20, codec="raw", sync="none",
                on_evict=lambda keys: print("".join(f"{names[key]}\\n" for key in keys), end="", flush=True))
items = []
for n in range(blocks):
    payload = block(n, size)
    items.append((key_of(n), payload, meta_of(payload, tenant=ANN if n % 2 else BOB)))
assert not any(tier.put_many(items))
left = tier.payload_by_tenant()[ANN]
while True:
    left = max(0, left - step * size)
    tier.trim(ANN, left)
    if not left:
        print("done", flush=True)
        sys.stdin.read()
"""


@pytest.mark.parametrize(("step", "after"), [(1, 40), (7, 300), (10**6, 1), (10**6, 10**6)])
def test_what_was_trimmed_stays_away_after_a_kill(tmp_path: Path, step: int, after: int) -> None:
    blocks, size = 1500, 3000
    store = tmp_path / "cold"
    trimmer = subprocess.Popen(
        [sys.executable, "-c", TRIMMER, *map(str, (store, blocks, size, step))],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trimmer.stdin is not None
    assert trimmer.stdout is not None
    gone: set[int] = set()
    complete = False
    for count, line in enumerate(trimmer.stdout, 1):
        complete = complete or line == "done\n"
        if line.strip().isdigit() and line.endswith("\n"):
            gone.add(int(line))
        if count == after or complete:
            trimmer.send_signal(signal.SIGKILL)
    assert trimmer.wait() == -signal.SIGKILL
    trimmer.stdin.close()
    trimmer.stdout.close()
    assert len(gone) >= min(after, blocks // 2)
    with closing(ColdTier(store, capacity_bytes=10 << 20, segment_bytes=2 << 20, codec="raw", sync="none")) as tier:
        kept = set(there(tier, range(blocks)))
        assert not kept & gone
        assert kept >= set(range(0, blocks, 2)), "the other tenant loses nothing"
        if complete:
            assert kept == set(range(0, blocks, 2))
        assert tier.payload_by_tenant() == recount(tier)
        sample = random.Random(step).sample(sorted(kept), 50)
        assert all(read(tier, key_of(number)) == block(number, size) for number in sample)
        assert tier.damage == {}
