"""An engine that dies, hangs, is full, evicts, or does not want this client any more: bounded, told, and got over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.conformance.tier_suite import block, key_of, read
from tests.servers.process import free_port, wait_until
from tests.servers.redis import RedisServer
from tests.servers.seaweed import SeaweedServer
from tests.storage.shared.support import (
    NAMESPACE,
    PATIENT,
    TENANT,
    SlowFirst,
    fresh_prefix,
    keys,
    of_area,
    open_store,
    put,
)
from tierkv.errors import NotFound, StorageFull, TierKVError, Unavailable
from tierkv.storage.breaker import Breaker
from tierkv.storage.shared import SharedStore, SharedTier, make_backend

PROBE_S, TRANSFER_S = 0.3, 0.6
HASTE = {"probe_timeout_s": PROBE_S, "transfer_timeout_s": TRANSFER_S}
BOUND_S = 5.0
"""Far above every deadline here, far below waiting for a server that is gone."""
Own = Callable[..., RedisServer]
_NEW = 77_777


@pytest.fixture
def opened() -> Iterator[Callable[..., SharedStore]]:
    stores: list[SharedStore] = []

    def open_one(*arguments: Any, **settings: Any) -> SharedStore:
        stores.append(open_store(*arguments, **settings))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def area(store: SharedStore) -> SharedTier:
    return store.area(TENANT, NAMESPACE)


def hasty(
    opened: Callable[..., SharedStore], server: RedisServer, *numbers: int, length: int = 5000, **settings: Any
) -> tuple[SharedStore, SharedTier]:
    """Return a store that waits for nobody, and a patient one's view of the blocks, which has put them there."""
    prefix = fresh_prefix()
    patient = area(opened(server.url, prefix=prefix, **settings))
    put(patient, *numbers, length=length)
    store = opened(server.url, prefix=prefix, **{**HASTE, **settings})

    def knows() -> bool:
        try:
            return area(store).has(key_of(numbers[0]))
        except Unavailable:
            return False

    wait_until(knows, "an answer")
    return store, patient


def everything_fails(tier: SharedTier) -> None:
    """Each kind of call raises `Unavailable`, within its bound."""
    payload, out = block(1, 5000), memoryview(bytearray(5000))
    for call in (
        lambda: tier.has(key_of(1)),
        lambda: tier.holds(keys(range(1000))),
        lambda: tier.put(key_of(9), payload, of_area(tier, payload)),
        lambda: tier.read_into(key_of(1), out),
        lambda: tier.meta(key_of(1)),
        lambda: tier.claim(key_of(1), 1.0),
        lambda: tier.delete(key_of(1)),
        lambda: list(tier.records()),
    ):
        began = time.monotonic()
        with pytest.raises(Unavailable):
            call()
        assert time.monotonic() - began < BOUND_S


def comes_back(tier: SharedTier) -> None:
    """The tier is used again, without anybody doing anything about it."""

    def works() -> bool:
        try:
            put(tier, _NEW)
        except (TierKVError, AssertionError):
            return False
        return read(tier, key_of(_NEW)) == block(_NEW, 5000)

    wait_until(works, "the tier")


def test_a_killed_server(own_redis: Own, opened: Callable[..., SharedStore]) -> None:
    server = own_redis()
    store, _ = hasty(opened, server, 1)
    server.kill()
    everything_fails(area(store))
    health = store.health
    assert (health.state, health.opened) in (("open", 1), ("half-open", 1))
    assert sum(health.failures.values()) >= 3
    assert health.last_error
    server.start()
    comes_back(area(store))
    assert store.health.state == "closed"


def test_a_stopped_server(own_redis: Own, opened: Callable[..., SharedStore]) -> None:
    server = own_redis()
    store, patient = hasty(opened, server, 1)
    server.freeze()
    everything_fails(area(store))
    assert store.health.failures["timeout"] >= 3
    assert store.health.opened == 1
    server.thaw()
    comes_back(area(store))
    assert read(patient, key_of(1)) == block(1, 5000)


def test_a_stopped_server_in_the_middle_of_many_transfers(own_redis: Own, opened: Callable[..., SharedStore]) -> None:
    server = own_redis()
    store, _ = hasty(opened, server, *range(64), length=200_000, codec="raw")
    tier = area(store)
    out = [memoryview(bytearray(200_000)) for _ in range(64)]
    seen: list[int] = []

    def stop(index: int, outcome: object) -> None:
        seen.append(index)
        if len(seen) == 3:
            server.freeze()

    began = time.monotonic()
    outcomes = tier.read_many(list(zip(keys(range(64)), out, strict=True)), stop)
    assert time.monotonic() - began < 2 * BOUND_S
    server.thaw()
    assert sorted(seen) == list(range(64))
    for number, outcome in enumerate(outcomes):
        assert isinstance(outcome, Unavailable) or bytes(out[number]) == block(number, 200_000)
    assert sum(isinstance(outcome, Unavailable) for outcome in outcomes) > 0
    comes_back(tier)


def test_while_it_is_asked_by_one_call_at_a_time_others_fail_at_once(
    own_redis: Own, opened: Callable[..., SharedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A pause that is not over before it is looked at, on a busy machine.
    monkeypatch.setattr("tierkv.storage.shared.link.Breaker", partial(Breaker, first_pause_s=2.0))
    server = own_redis()
    store, _ = hasty(opened, server, 1)
    tier = area(store)
    server.freeze()
    for _ in range(3):
        with pytest.raises(Unavailable, match="did not answer in time"):
            tier.has(key_of(1))
    assert not store.available
    made = store.health.calls["present"]
    with pytest.raises(Unavailable, match="is not asked for a while"):
        tier.has(key_of(1))
    assert store.health.calls["present"] == made
    wait_until(lambda: store.available, "the end of the pause")
    with pytest.raises(Unavailable, match="did not answer in time"):
        tier.has(key_of(1))
    assert store.health.calls["present"] == made + 1
    assert not store.available
    server.thaw()
    comes_back(tier)


def test_a_server_that_is_not_there_yet(opened: Callable[..., SharedStore], own_redis: Own) -> None:
    port = free_port()
    store = opened(f"valkey://127.0.0.1:{port}", **HASTE)
    assert store.health.state == "connecting"
    assert store.describe()["failures"]["down"] >= 1
    everything_fails(area(store))
    with pytest.raises(Unavailable, match="was not reached yet"):
        store.check()
    with pytest.raises(Unavailable):
        store.poll()
    own_redis(port=port)
    comes_back(area(store))
    assert store.check().warnings


def test_a_stopped_object_store(seaweed: SeaweedServer, opened: Callable[..., SharedStore]) -> None:
    store = opened(make_backend("s3://tests/stopped", options=seaweed.options), **PATIENT)
    put(area(store), 1)
    store.close()
    store = opened(make_backend("s3://tests/stopped", options=seaweed.options), **HASTE)
    seaweed.freeze()
    try:
        everything_fails_but_claims(area(store))
    finally:
        seaweed.thaw()
    comes_back(area(store))


def everything_fails_but_claims(tier: SharedTier) -> None:
    for call in (lambda: tier.has(key_of(1)), lambda: tier.read_into(key_of(1), memoryview(bytearray(5000)))):
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(Unavailable):
                call()
            assert time.monotonic() - began < BOUND_S
    assert tier.claim(key_of(1), 1.0) is None


def test_a_full_server_refuses_writes_and_nothing_else(own_redis: Own, opened: Callable[..., SharedStore]) -> None:
    server = own_redis("--maxmemory", "6mb", "--maxmemory-policy", "noeviction")
    store = opened(server.url)
    tier = area(store)
    stored = []
    with pytest.raises(StorageFull, match="full"):  # noqa: PT012
        for number in range(200):
            payload = block(number, 100_000)
            tier.put(key_of(number), payload, of_area(tier, payload))
            stored.append(number)
    assert 10 < len(stored) < 80
    assert store.health.full
    assert (store.health.state, store.health.failures) == ("closed", {"full": 1})
    puts = store.health.calls["put"]
    payload = block(-1, 100_000)
    with pytest.raises(StorageFull):
        tier.put(key_of(10**6), payload, of_area(tier, payload))
    assert store.health.calls["put"] == puts
    assert read(tier, key_of(stored[0])) == block(stored[0], 100_000)
    put(tier, stored[0], length=100_000)  # there already
    for number in stored[:5]:
        assert tier.delete(key_of(number))
    tier.put(key_of(10**6), payload, of_area(tier, payload))
    assert not store.health.full
    assert tier.clear()


def test_a_full_server_takes_writes_again_when_it_has_room(own_redis: Own, opened: Callable[..., SharedStore]) -> None:
    server = own_redis("--maxmemory", "6mb", "--maxmemory-policy", "noeviction")
    tier = area(opened(server.url))
    payload = block(1, 100_000)
    outcomes = tier.put_many([(key, payload, of_area(tier, payload)) for key in keys(range(80))])
    assert isinstance(outcomes[-1], StorageFull)
    server.tell("CONFIG", "SET", "maxmemory", "64mb")
    comes_back(tier)


def test_an_evicting_server_loses_blocks_and_never_mixes_them_up(
    own_redis: Own, opened: Callable[..., SharedStore]
) -> None:
    server = own_redis("--maxmemory", "6mb", "--maxmemory-policy", "allkeys-lru")
    store = opened(server.url)
    tier = area(store)
    for number in range(120):
        put(tier, number, length=100_000)
    out = [memoryview(bytearray(100_000)) for _ in range(120)]
    outcomes = tier.read_many(list(zip(keys(range(120)), out, strict=True)))
    found = [number for number, outcome in enumerate(outcomes) if not isinstance(outcome, TierKVError)]
    assert 10 < len(found) < 100
    assert all(bytes(out[number]) == block(number, 100_000) for number in found)
    assert all(isinstance(outcomes[number], NotFound) for number in set(range(120)) - set(found))
    assert store.health.failures == {}


def test_a_user_that_may_no_longer(own_redis: Own, opened: Callable[..., SharedStore]) -> None:
    server = own_redis()
    server.tell("ACL", "SETUSER", "bob", "on", ">secret", "~*", "+@all")
    backend = make_backend(server.url, username="bob", password_env="P", environ={"P": "secret"})
    store = opened(backend, **HASTE)
    tier = area(store)
    put(tier, 1)
    server.tell("ACL", "SETUSER", "bob", "-get")
    for _ in range(3):
        with pytest.raises(Unavailable) as caught:
            tier.read_into(key_of(1), memoryview(bytearray(5000)))
    assert "what the user may do" in caught.value.remedy
    assert store.health.failures == {"refused": 3}
    server.tell("ACL", "SETUSER", "bob", "+get")
    comes_back(tier)
    server.tell("ACL", "SETUSER", "bob", "resetpass", ">other")
    server.tell("CLIENT", "KILL", "USER", "bob")
    everything_fails(tier)
    server.tell("ACL", "SETUSER", "bob", ">secret")
    comes_back(tier)


def test_a_user_that_is_not_known(own_redis: Own, opened: Callable[..., SharedStore]) -> None:
    server = own_redis()
    backend = make_backend(server.url, username="bob", password_env="P", environ={"P": "hush-hush"})
    store = opened(backend, **HASTE)
    assert store.health.failures["refused"] >= 1
    with pytest.raises(Unavailable) as caught:
        store.check()
    assert "WRONGPASS" in str(caught.value)
    assert "hush-hush" not in str(store.describe()) + str(caught.value)


def test_a_read_that_takes_long_is_asked_a_second_time(redis: RedisServer, opened: Callable[..., SharedStore]) -> None:
    prefix = fresh_prefix()
    put(area(opened(redis.url, prefix=prefix)), 1)
    slow = SlowFirst(make_backend(redis.url))
    store = opened(slow, prefix=prefix, hedge_s=0.01)
    assert read(area(store), key_of(1)) == block(1, 5000)
    assert (slow.reads, store.health.hedged, store.health.calls["get"]) == (2, 1, 1)


def test_a_closed_store_says_so(redis: RedisServer, opened: Callable[..., SharedStore]) -> None:
    store = opened(redis.url)
    tier = area(store)
    put(tier, 1)
    store.close()
    store.close()
    everything_fails(tier)
    assert store.health.state == "shut"
    assert store.describe()["kind"] == "valkey"
