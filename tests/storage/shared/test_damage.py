"""What lies in the engine may be anything: it is told, removed, and mended by the next put; never served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conformance.tier_suite import block, key_of, read
from tests.servers.redis import RedisServer
from tests.storage.shared.conftest import MakeBackend, Wait
from tests.storage.shared.support import NAMESPACE, TENANT, fresh_prefix, keys, of_area, open_store, put
from tierkv.errors import CorruptBlock, NotFound
from tierkv.storage.shared import Backend, SharedStore, SharedTier, make_backend
from tierkv.storage.shared.envelope import ENVELOPE_BYTES

LENGTH = 5000


class Bench:
    """A tier, and the backend behind its back."""

    def __init__(self, make: Callable[[], Backend], wait: Wait[Any]) -> None:
        self.prefix = fresh_prefix()
        self.store = open_store(make(), prefix=self.prefix, codec="raw")
        self.tier: SharedTier = self.store.area(TENANT, NAMESPACE)
        self.backend = make()
        self.wait = wait
        wait(self.backend.open())

    def name(self, number: int, under: str = "") -> str:
        async def find() -> list[str]:
            return [name async for name in self.backend.names(f"{self.prefix}/{under}")]

        (name,) = [name for name in self.wait(find()) if name.endswith(key_of(number).hex())]
        return str(name)

    def stored(self, number: int) -> bytes:
        return bytes(self.wait(self.backend.get(self.name(number))))

    def plant(self, number: int, data: bytes) -> None:
        self.wait(self.backend.put(self.name(number), data))

    def close(self) -> None:
        self.store.close()
        self.wait(self.backend.close())


@pytest.fixture
def bench(engine: MakeBackend, wait: Wait[Any]) -> Iterator[Bench]:
    bench = Bench(engine, wait)
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def steady(redis: RedisServer) -> Iterator[SharedStore]:
    store = open_store(redis.url, codec="raw")
    yield store
    store.close()


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


def expect(bench: Bench, number: int, cause: str) -> None:
    """The damage is found and told, once; the object is gone and the next put is served."""
    before = bench.tier.damage.get(cause, 0)
    with pytest.raises(CorruptBlock) as caught:
        bench.tier.read_into(key_of(number), memoryview(bytearray(LENGTH)))
    assert caught.value.cause == cause
    assert bench.tier.damage[cause] == before + 1
    assert bench.store.describe()["damage"][cause] == before + 1
    assert bench.tier.held([key_of(number)]) == [False]
    with pytest.raises(NotFound):
        bench.tier.read_into(key_of(number), memoryview(bytearray(LENGTH)))
    put(bench.tier, number, length=LENGTH)
    assert read(bench.tier, key_of(number)) == block(number, LENGTH)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda data: flipped(data, 0), "header"),
        (lambda data: flipped(data, 30), "header"),
        (lambda data: flipped(data, ENVELOPE_BYTES - 1), "header"),
        (lambda data: flipped(data, ENVELOPE_BYTES + 20), "header"),
        (lambda data: flipped(data, len(data) - 1), "checksum"),
        (lambda data: data[:-1], "truncated"),
        (lambda data: data[: ENVELOPE_BYTES + 3], "truncated"),
        (lambda data: data[:50], "truncated"),
        (lambda data: data + b"\0", "header"),
        (lambda data: b"something else altogether", "header"),
    ],
)
def test_changed_bytes_are_found(bench: Bench, change: Callable[[bytes], bytes], cause: str) -> None:
    put(bench.tier, 1, length=LENGTH)
    bench.plant(1, change(bench.stored(1)))
    expect(bench, 1, cause)


def test_a_block_under_another_ones_name_is_found(bench: Bench) -> None:
    put(bench.tier, 1, 2, length=LENGTH)
    first, second = bench.stored(1), bench.stored(2)
    bench.plant(1, second)
    bench.plant(2, first)
    expect(bench, 1, "misplaced")
    expect(bench, 2, "misplaced")


@pytest.mark.parametrize(("tenant", "namespace"), [(b"tenant-2", NAMESPACE), (TENANT, key_of(7))])
def test_a_block_of_another_area_is_found(bench: Bench, tenant: bytes, namespace: bytes) -> None:
    put(bench.tier, 1, length=LENGTH)
    other = bench.store.area(tenant, namespace)
    payload = block(99, LENGTH)
    other.put(key_of(3), payload, of_area(other, payload))
    theirs = bench.stored(3)
    other.delete(key_of(3))
    put(bench.tier, 3, length=LENGTH)
    bench.plant(3, theirs)
    expect(bench, 3, "misplaced")
    assert read(bench.tier, key_of(1)) == block(1, LENGTH)


def test_a_whole_container_in_a_strange_envelope_is_found(bench: Bench) -> None:
    put(bench.tier, 1, 2, length=LENGTH)
    mixed = bench.stored(1)[:ENVELOPE_BYTES] + bench.stored(2)[ENVELOPE_BYTES:]
    bench.plant(1, mixed)
    expect(bench, 1, "header")


def test_looking_at_a_damaged_header_removes_the_block_too(bench: Bench) -> None:
    put(bench.tier, 1, 2, length=LENGTH)
    bench.plant(1, flipped(bench.stored(1), 60))
    assert bench.tier.meta(key_of(1)) is None
    assert bench.tier.damage == {"header": 1}
    assert bench.tier.held(keys([1, 2])) == [False, True]


def test_one_damaged_block_of_many_costs_only_itself(bench: Bench) -> None:
    put(bench.tier, *range(12), length=LENGTH)
    bench.plant(5, flipped(bench.stored(5), 1000))
    out = [memoryview(bytearray(LENGTH)) for _ in range(12)]
    outcomes = bench.tier.read_many(list(zip(keys(range(12)), out, strict=True)))
    assert [number for number, outcome in enumerate(outcomes) if isinstance(outcome, CorruptBlock)] == [5]
    assert all(bytes(out[number]) == block(number, LENGTH) for number in range(12) if number != 5)
    assert bench.tier.held(keys(range(12))) == [number != 5 for number in range(12)]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_flipped_bit_is_served(
    redis: RedisServer, steady: SharedStore, wait: Wait[Any], data: st.DataObject
) -> None:
    tier = steady.area(TENANT, NAMESPACE)
    put(tier, 1, length=300)
    backend = make_backend(redis.url)
    wait(backend.open())
    name = tier._name(tier._area.settled(), key_of(1))
    whole = bytes(wait(backend.get(name)))
    place = data.draw(st.integers(0, len(whole) - 1))
    wait(backend.put(name, flipped(whole, place, data.draw(st.integers(0, 7)))))
    wait(backend.close())
    with pytest.raises(CorruptBlock):
        tier.read_into(key_of(1), memoryview(bytearray(300)))
    assert not tier.has(key_of(1))
