"""Engines that are spoken to by TLS: reached, or it is said what stands between, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.tier_suite import block, key_of, read
from tests.servers.azurite import MISSING_AZURITE, AzuriteServer
from tests.servers.certificates import MISSING_OPENSSL, Authority, Certificate
from tests.servers.process import free_port, wait_until
from tests.servers.redis import MISSING_REDIS, RedisCluster, RedisServer
from tests.servers.seaweed import MISSING_SEAWEED, SeaweedServer
from tests.storage.shared.conftest import Wait
from tests.storage.shared.support import NAMESPACE, TENANT, fresh_prefix, open_store, put
from tierkv.errors import ConfigError, TierKVError, Unavailable
from tierkv.storage.shared import Backend, BackendError, SharedStore, make_backend

HERE = ("IP:127.0.0.1", "DNS:localhost")
CREDENTIALS = {"access_key_id": "x", "secret_access_key": "x", "region": "x"}
PATIENCE_S = 20.0
"""Far more than any client takes to give up."""
Own = Callable[..., RedisServer]


def _needs(*missing: str) -> None:
    for reason in missing:
        if reason:
            pytest.skip(reason)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    _needs(MISSING_OPENSSL)
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    _needs(MISSING_OPENSSL)
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


@pytest.fixture(scope="module")
def good(authority: Authority) -> Certificate:
    return authority.sign(*HERE)


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[Own]:
    _needs(MISSING_REDIS)
    started: list[RedisServer] = []

    def start(*options: str, **more: Any) -> RedisServer:
        started.append(RedisServer(tmp_path, *options, **more))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory: pytest.TempPathFactory, good: Certificate) -> Iterator[SeaweedServer]:
    _needs(MISSING_SEAWEED)
    server = SeaweedServer(tmp_path_factory.mktemp("seaweed"), good)
    yield server
    server.stop()


def works(backend: Backend, wait: Wait[Any]) -> None:
    name, data = f"{fresh_prefix()}/a", bytes(range(256)) * 5000
    wait(backend.open())
    try:
        wait(backend.put(name, data))
        assert bytes(wait(backend.get(name))) == data
        assert wait(backend.swap(f"{name}-2", None, b"1"))
        assert wait(backend.present([name, f"{name}-3"])) == [True, False]
    finally:
        wait(backend.close())


def reason(backend: Backend, wait: Wait[Any]) -> tuple[str, str]:
    """What is said of a backend that cannot be opened, and what to do."""
    with pytest.raises(BackendError) as caught:
        wait(asyncio.wait_for(backend.open(), PATIENCE_S))
    wait(backend.close())
    assert caught.value.kind == "down"
    return caught.value.message, caught.value.remedy


def test_a_redis(own_redis: Own, good: Certificate, wait: Wait[Any]) -> None:
    server = own_redis("--requirepass", "right", certificate=good)
    password = {"password_env": "P", "environ": {"P": "right"}}
    for url in (server.url, f"rediss://localhost:{server.port}"):
        works(make_backend(url, root_certificates=good.authority, **password), wait)  # type: ignore[arg-type]


def test_a_cluster(tmp_path: Path, good: Certificate, wait: Wait[Any]) -> None:
    _needs(MISSING_REDIS)
    cluster = RedisCluster(tmp_path, certificate=good)
    try:
        works(make_backend(cluster.url, root_certificates=good.authority), wait)
    finally:
        cluster.stop()


def test_an_object_store(seaweed: SeaweedServer, good: Certificate, wait: Wait[Any]) -> None:
    works(make_backend("s3://tests/tls", options=seaweed.tls_options, root_certificates=good.authority), wait)


def test_azure(tmp_path: Path, good: Certificate, wait: Wait[Any]) -> None:
    _needs(MISSING_AZURITE)
    server = AzuriteServer(tmp_path, good)
    try:
        works(make_backend("az://tests/tls", options=server.options, root_certificates=good.authority), wait)
    finally:
        server.stop()


def test_a_redis_whose_certificate_is_not_taken(
    own_redis: Own, authority: Authority, stranger: Authority, good: Certificate, wait: Wait[Any]
) -> None:
    for names, days, said in ((HERE, -1, "has expired"), (["DNS:elsewhere.example"], 30, "is for another name")):
        server = own_redis(certificate=authority.sign(*names, days=days))
        message, remedy = reason(make_backend(server.url, root_certificates=authority.certificate), wait)
        assert (f"127.0.0.1:{server.port}" in message, said in message) == (True, True), message
        assert remedy
    server = own_redis(certificate=good)
    for trusted in (stranger.certificate, None):
        message, remedy = reason(make_backend(server.url, root_certificates=trusted), wait)
        assert ("not trusted" in message, "ca_file" in remedy) == (True, True), message


def test_a_redis_whose_certificate_is_signed_by_itself(own_redis: Own, authority: Authority, wait: Wait[Any]) -> None:
    itself = authority.sign_itself(*HERE, authority=False)
    works(make_backend(own_redis(certificate=itself).url, root_certificates=itself.certificate), wait)
    itself = authority.sign_itself(*HERE, authority=True)
    server = own_redis(certificate=itself)
    message, remedy = reason(make_backend(server.url, root_certificates=itself.certificate), wait)
    assert ("authority's (CA:TRUE)" in message, "CA:FALSE" in remedy) == (True, True), message
    options = {**CREDENTIALS, "endpoint": server.url.replace("valkeys", "https")}
    message, remedy = reason(make_backend("s3://x", options=options, root_certificates=itself.certificate), wait)
    assert ("authority's (CA:TRUE)" in message, "CA:FALSE" in remedy) == (True, True), message


@pytest.mark.parametrize("protocol", ["TLSv1.2", "TLSv1.3"])
def test_a_redis_that_wants_to_see_a_certificate(
    own_redis: Own, good: Certificate, wait: Wait[Any], protocol: str
) -> None:
    server = own_redis("--tls-auth-clients", "yes", "--tls-protocols", protocol, certificate=good)
    message, remedy = reason(make_backend(server.url, root_certificates=good.authority), wait)
    assert ("wants clients to show" in message, "tls-auth-clients" in remedy) == (True, True), message


def test_one_speaks_tls_and_the_other_does_not(own_redis: Own, good: Certificate, wait: Wait[Any]) -> None:
    secure = own_redis(certificate=good)
    message, remedy = reason(make_backend(secure.url.replace("valkeys", "valkey")), wait)
    assert ("speaks TLS" in message, "valkeys://" in remedy) == (True, True), message
    plain = own_redis()
    backend = make_backend(plain.url.replace("valkey", "valkeys"), root_certificates=good.authority)
    message, remedy = reason(backend, wait)
    assert ("does not speak TLS" in message, "leave TLS out" in remedy) == (True, True), message


@pytest.mark.parametrize("scheme", ["valkey", "valkeys"])
def test_nobody_is_there(wait: Wait[Any], scheme: str) -> None:
    _needs(MISSING_REDIS)
    message, remedy = reason(make_backend(f"{scheme}://127.0.0.1:{free_port()}"), wait)
    assert ("nothing listens" in message, "start" in remedy) == (True, True), message
    message, remedy = reason(make_backend(f"{scheme}://nowhere.invalid"), wait)
    assert ("not known" in message, "name" in remedy) == (True, True), message


@pytest.mark.parametrize("scheme", ["valkey", "valkeys"])
def test_somebody_is_there_and_says_nothing(own_redis: Own, wait: Wait[Any], scheme: str) -> None:
    server = own_redis()
    server.freeze()
    message, remedy = reason(make_backend(f"{scheme}://127.0.0.1:{server.port}"), wait)
    assert ("timed out" in message, "runs" in remedy) == (True, True), message
    server.thaw()


def test_an_object_store_whose_certificate_is_not_taken(
    seaweed: SeaweedServer, stranger: Authority, wait: Wait[Any]
) -> None:
    for trusted in (stranger.certificate, None):
        backend = make_backend("s3://tests/tls", options=seaweed.tls_options, root_certificates=trusted)
        message, remedy = reason(backend, wait)
        assert ("not trusted" in message, "ca_file" in remedy) == (True, True), message


@pytest.mark.parametrize(
    ("names", "days", "said"), [(HERE, -1, "has expired"), (["DNS:elsewhere.example"], 30, "another name")]
)
def test_an_object_store_with_a_certificate_that_is_wrong(
    own_redis: Own, authority: Authority, wait: Wait[Any], names: list[str], days: int, said: str
) -> None:
    """The handshake comes before anything that tells what kind of server it is."""
    server = own_redis(certificate=authority.sign(*names, days=days))
    options = {**CREDENTIALS, "endpoint": f"https://127.0.0.1:{server.port}"}
    message, remedy = reason(make_backend("s3://x", options=options, root_certificates=authority.certificate), wait)
    assert (said in message, bool(remedy)) == (True, True), message


def test_an_object_store_speaks_tls_and_the_client_does_not(
    seaweed: SeaweedServer, good: Certificate, wait: Wait[Any]
) -> None:
    options = {**seaweed.options, "endpoint": seaweed.tls_options["endpoint"].replace("https", "http")}
    message, remedy = reason(make_backend("s3://tests/tls", options=options), wait)
    assert ("speaks TLS" in message, "https://" in remedy) == (True, True), message
    options = {**seaweed.options, "endpoint": seaweed.options["endpoint"].replace("http", "https")}
    message, remedy = reason(make_backend("s3://tests/tls", options=options, root_certificates=good.authority), wait)
    assert ("does not speak TLS" in message, "leave TLS out" in remedy) == (True, True), message


def test_what_is_no_certificate_and_what_verifies_nobody(tmp_path: Path, good: Certificate) -> None:
    for text in (
        b"",
        b"hush",
        good.key.read_bytes(),
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    ):
        file = tmp_path / "ca.pem"
        file.write_bytes(text)
        for url in ("valkeys://one", "s3://bucket"):
            with pytest.raises(ConfigError, match=r"ca\.pem holds no certificate") as caught:
                make_backend(url, root_certificates=file)
            assert "PEM" in caught.value.remedy
    for scheme in ("valkey", "redis"):
        with pytest.raises(ConfigError, match="does not encrypt") as caught:
            make_backend(f"{scheme}://one", root_certificates=good.authority)
        assert f"{scheme}s://" in caught.value.remedy


def test_a_server_comes_back_with_a_bad_certificate_and_then_with_a_good_one(
    own_redis: Own, authority: Authority, good: Certificate
) -> None:
    server = own_redis(certificate=good)
    store: SharedStore = open_store(
        make_backend(server.url, root_certificates=authority.certificate), probe_timeout_s=1.0, transfer_timeout_s=5.0
    )
    tier = store.area(TENANT, NAMESPACE)
    try:
        put(tier, 1)
        assert read(tier, key_of(1)) == block(1, 5000)
        server.stop()
        old = own_redis(port=server.port, certificate=authority.sign(*HERE, days=-1))
        for _ in range(3):
            with pytest.raises(Unavailable):
                tier.has(key_of(1))
        old.stop()
        server.start()

        def answers() -> bool:
            try:
                return tier.has(key_of(1)) is False
            except TierKVError:
                return False

        wait_until(answers, "the tier")
    finally:
        store.close()
