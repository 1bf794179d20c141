"""Every backend keeps the contract of `Backend`, against a real engine."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, unquote

import pytest

from tests.servers.azurite import AzuriteServer
from tests.servers.redis import RedisCluster, RedisServer
from tests.servers.seaweed import SeaweedServer
from tests.storage.shared.conftest import MakeBackend, Wait
from tests.storage.shared.support import fresh_prefix
from tierkv.errors import ConfigError
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


def test_says_why_a_container_cannot_be_opened(azurite: AzuriteServer, wait: Wait[Any]) -> None:
    wrong = {**azurite.options, "account_key": "d3Jvbmc="}
    assert kind_of_failure(make_backend("az://tests/x", options=wrong), wait) == "refused"
    nobody = {**azurite.options, "endpoint": "http://127.0.0.1:9/devstoreaccount1"}
    assert kind_of_failure(make_backend("az://tests/x", options=nobody), wait) == "down"
    with pytest.raises(ConfigError, match="Account must be specified"):
        wait(make_backend("az://tests/x", options={"endpoint": azurite.options["endpoint"]}).open())


def test_a_container_that_is_not_there(azurite: AzuriteServer, wait: Wait[Any]) -> None:
    backend = make_backend("az://nowhere/x", options=azurite.options)
    with pytest.raises(BackendError, match="az://nowhere does not exist") as caught:
        wait(backend.open())
    assert caught.value.kind == "refused"
    for call in (backend.put("a", b"1"), backend.swap("a", None, b"1"), listed(backend, "x/")):
        with pytest.raises(BackendError, match="does not exist"):
            wait(call)
    wait(backend.close())


def test_a_token_counts_until_it_ends(azurite: AzuriteServer, wait: Wait[Any]) -> None:
    backend = make_backend("az://tests/x", options=azurite.pass_for(timedelta(hours=1)))
    wait(backend.open())
    wait(backend.put("a", b"1"))
    assert bytes(wait(backend.get("a"))) == b"1"
    wait(backend.close())
    ended = azurite.pass_for(timedelta(hours=-1))
    backend = make_backend("az://tests/x", options=ended)
    with pytest.raises(BackendError) as caught:
        wait(backend.open())
    wait(backend.close())
    assert caught.value.kind == "refused"
    assert parse_qs(ended["sas_token"])["sig"][0] not in unquote(f"{caught.value} {caught.value.__cause__}")


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://x", {"region": "x", "metadata_endpoint": "http://127.0.0.1:9"}),
        ("az://x", {"account_name": "x", "msi_endpoint": "http://127.0.0.1:9"}),
    ],
)
def test_says_that_there_are_no_credentials(
    url: str, options: dict[str, str], wait: Wait[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_"))]:
        monkeypatch.delenv(name)
    with pytest.raises(BackendError, match="no credentials") as caught:
        wait(make_backend(url, options=options).open())
    assert (caught.value.kind, "options" in caught.value.remedy) == ("refused", True)


def test_credentials_that_have_ended_are_refused(wait: Wait[Any]) -> None:
    """S3 says so with a 400, as of a mistake in the request; no server that can be started here does."""
    document = b"<?xml version='1.0'?><Error><Code>ExpiredToken</Code><Message>It has ended.</Message></Error>"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%s" % (len(document), document))
        await writer.drain()
        writer.close()

    async def ask() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            options = {"endpoint": endpoint, "region": "x", "access_key_id": "x", "secret_access_key": "x"}
            await make_backend("s3://x", options=options).open()

    with pytest.raises(BackendError, match="400 Bad Request: ExpiredToken") as caught:
        wait(ask())
    assert (caught.value.kind, "credentials" in caught.value.remedy) == ("refused", True)


def test_google_is_looked_for_where_the_options_say(wait: Wait[Any]) -> None:
    """Unencrypted, if they say that, as other stores are. There is no server here to be found."""
    account = {"gcs_base_url": "", "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    options = {"service_account_key": json.dumps(account), "base_url": "http://127.0.0.1:9"}
    with pytest.raises(BackendError, match="gs://x: nothing listens there") as caught:
        wait(make_backend("gs://x", options=options).open())
    assert (caught.value.kind, bool(caught.value.remedy)) == ("down", True)
