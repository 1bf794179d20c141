"""Every backend keeps the contract of `Backend`, against a real engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.servers.redis import RedisCluster, RedisServer
from tests.servers.seaweed import SeaweedServer
from tests.storage.shared.conftest import MakeBackend, Wait
from tests.storage.shared.support import fresh_prefix
from tierkv.storage.shared import Backend, BackendError, SupportsClaims, make_backend


@pytest.fixture
def backend(engine: MakeBackend, wait: Wait[Any]) -> Iterator[Backend]:
    backend = engine()
    wait(backend.open())
    yield backend
    wait(backend.close())
    wait(backend.close())


@pytest.fixture
def prefix() -> str:
    return fresh_prefix()


async def listed(backend: Backend, prefix: str) -> list[str]:
    return sorted([name async for name in backend.names(prefix)])


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("length", [0, 1, 5 << 20])
def test_gives_back_what_was_put(backend: Backend, prefix: str, wait: Wait[Any], kind: type, length: int) -> None:
    data = os.urandom(length)
    wait(backend.put(f"{prefix}/a", kind(data)))
    assert bytes(wait(backend.get(f"{prefix}/a"))) == data
    assert wait(backend.get_head(f"{prefix}/a", 160)) == data[:160]
    assert wait(backend.get(f"{prefix}/b")) is None
    assert wait(backend.get_head(f"{prefix}/b", 160)) is None


def test_a_put_takes_the_place_of_what_was_there(backend: Backend, prefix: str, wait: Wait[Any]) -> None:
    for data in (b"first", b"second"):
        wait(backend.put(f"{prefix}/a", data))
    assert wait(backend.get_many([f"{prefix}/b", f"{prefix}/a"])) == [None, b"second"]


def test_says_what_is_there_in_order(backend: Backend, prefix: str, wait: Wait[Any]) -> None:
    names = [f"{prefix}/{number}" for number in range(3 * backend.probe_width // 2)]
    for name in names[::3][:20]:
        wait(backend.put(name, b"x"))
    present = wait(backend.present(names))
    assert present == [name in names[::3][:20] for name in names]


def test_removes_and_lists_names(backend: Backend, prefix: str, wait: Wait[Any]) -> None:
    names = [f"{prefix}/{number}" for number in range(4)]
    for name in [*names, f"{prefix}-other/0"]:
        wait(backend.put(name, b"x"))
    assert wait(listed(backend, f"{prefix}/")) == names
    assert wait(backend.delete(names[:2])) == 2
    assert wait(listed(backend, f"{prefix}/")) == names[2:]
    wait(backend.delete([names[0], names[2]]))
    assert wait(listed(backend, f"{prefix}/")) == names[3:]


def test_swaps_only_what_is_as_expected(backend: Backend, prefix: str, wait: Wait[Any]) -> None:
    name = f"{prefix}/a"
    assert not wait(backend.swap(name, b"1", b"2"))
    assert wait(backend.swap(name, None, b"1"))
    assert not wait(backend.swap(name, None, b"2"))
    assert not wait(backend.swap(name, b"2", b"3"))
    assert wait(backend.swap(name, b"1", b"absent"))
    assert wait(backend.swap(name, b"absent", b"4"))
    assert wait(backend.get(name)) == b"4"


def test_of_many_swaps_at_once_one_succeeds(backend: Backend, prefix: str, wait: Wait[Any]) -> None:
    name = f"{prefix}/a"

    async def race(expected: bytes | None, first: int) -> list[bool]:
        return await asyncio.gather(*(backend.swap(name, expected, b"%d" % (first + at)) for at in range(8)))

    assert sum(wait(race(None, 0))) == 1
    assert sum(wait(race(bytes(wait(backend.get(name))), 10))) == 1


def test_claims_are_one_owners_until_they_end(backend: Backend, prefix: str, wait: Wait[Any]) -> None:
    if not isinstance(backend, SupportsClaims):
        assert backend.kind == "objects"
        return
    name = f"{prefix}/a"
    assert wait(backend.claim(name, "ann", 60))
    assert wait(backend.claim(name, "ann", 60))
    assert not wait(backend.claim(name, "bob", 60))
    wait(backend.unclaim(name, "bob"))
    assert not wait(backend.claim(name, "bob", 60))
    wait(backend.unclaim(name, "ann"))
    assert wait(backend.claim(name, "bob", 0.001))

    async def until_free() -> None:
        while not await backend.claim(name, "ann", 60):
            await asyncio.sleep(0)

    wait(until_free())


def test_finds_out_what_kind_of_server_it_is(redis: RedisServer, cluster: RedisCluster, wait: Wait[Any]) -> None:
    for server in (redis, cluster):
        backend = make_backend(server.url)
        wait(backend.open())
        for number in range(30):
            wait(backend.put(f"{fresh_prefix()}/{number}", b"x"))
        wait(backend.close())
    assert all(int(size) > 0 for size in cluster.tell("DBSIZE"))


def test_warns_of_a_server_that_does_not_evict(own_redis: Callable[..., RedisServer], wait: Wait[Any]) -> None:
    server = own_redis("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    backend = make_backend(server.url)
    wait(backend.open())
    capacity = wait(backend.capacity())
    assert (capacity.capacity_bytes, capacity.warnings) == (64 << 20, ())
    assert 0 < capacity.used_bytes < 64 << 20
    for policy in ("noeviction", "volatile-lru"):
        server.tell("CONFIG", "SET", "maxmemory-policy", policy)
        (warning,) = wait(backend.capacity()).warnings
        assert policy in warning
        assert "allkeys-lru" in warning
    server.tell("CONFIG", "SET", "maxmemory", "0")
    capacity = wait(backend.capacity())
    assert capacity.capacity_bytes == 0
    assert "maxmemory is not set" in capacity.warnings[0]
    wait(backend.close())


def kind_of_failure(backend: Backend, wait: Wait[Any]) -> str:
    with pytest.raises(BackendError) as caught:
        wait(backend.open())
    assert caught.value.remedy
    return caught.value.kind


def test_says_why_it_cannot_be_opened(own_redis: Callable[..., RedisServer], wait: Wait[Any]) -> None:
    server = own_redis("--requirepass", "right")
    assert kind_of_failure(make_backend(server.url), wait) == "refused"
    wrong = make_backend(server.url, password_env="P", environ={"P": "wrong"})
    assert kind_of_failure(wrong, wait) == "refused"
    right = make_backend(server.url, password_env="P", environ={"P": "right"})
    wait(right.open())
    wait(right.close())
    server.kill()
    assert kind_of_failure(make_backend(server.url), wait) == "down"


def test_says_why_a_bucket_cannot_be_opened(seaweed: SeaweedServer, wait: Wait[Any]) -> None:
    wrong = {**seaweed.options, "secret_access_key": "wrong"}
    assert kind_of_failure(make_backend("s3://tests/x", options=wrong), wait) == "refused"
    nobody = {**seaweed.options, "endpoint": "http://127.0.0.1:9"}
    assert kind_of_failure(make_backend("s3://tests/x", options=nobody), wait) == "down"
