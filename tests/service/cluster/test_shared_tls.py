"""A shared tier that is spoken to by TLS: daemons share, and the doctor says what is in the way."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.certificates import MISSING_OPENSSL, Authority
from tests.servers.redis import MISSING_REDIS, RedisServer
from tests.service.cluster.nodes import node
from tests.service.daemon import chain, eventually, read_back, short_directory, store
from tierkv.config import parse_config
from tierkv.service.doctor import examine

pytestmark = pytest.mark.skipif(bool(MISSING_REDIS or MISSING_OPENSSL), reason=MISSING_REDIS or MISSING_OPENSSL)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[RedisServer]:
    certificate = authority.sign("IP:127.0.0.1")
    server = RedisServer(tmp_path_factory.mktemp("redis"), "--maxmemory", "64mb", certificate=certificate)
    yield server
    server.stop()


def settings(server: RedisServer, authority: Authority) -> dict[str, Any]:
    # What is asked for may take long on a busy machine; this is not about that.
    return {"url": server.url, "ca_file": str(authority.certificate), "probe_timeout": 10}


def test_daemons_share_blocks(server: RedisServer, authority: Authority) -> None:
    shared, of = settings(server, authority), chain(4)
    with node("a", [], shared=shared) as first, first.start().connect() as cache:
        store(cache, of)
        cache.flush()
        assert cache.stats()["shared"]["uploaded_blocks"] == 4
    with node("b", [], shared=shared) as second, second.start().connect() as cache:
        assert read_back(cache, of) == 4


def test_a_daemon_that_does_not_take_the_certificate_says_so_and_serves(server: RedisServer, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    with node("c", [], shared=settings(server, stranger)) as daemon, daemon.start().connect() as cache:
        of = chain(4)
        store(cache, of)
        assert read_back(cache, of) == 4
        eventually(lambda: "not trusted" in cache.stats()["shared"]["last_error"])
        assert cache.stats()["shared"]["state"] == "connecting"


def test_the_doctor(server: RedisServer, authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    other = {"url": server.url.replace("valkeys", "valkey"), "probe_timeout": 10}
    for shared, level, words in (
        (settings(server, authority), "ok", "answers in"),
        (settings(server, stranger), "fail", "not trusted"),
        (other, "fail", "speaks TLS there"),
        ({**settings(server, authority), "url": other["url"]}, "fail", "does not encrypt"),
    ):
        with short_directory() as here:
            own = {"socket": str(here / "s"), "state_dir": str(here / "state"), "warm": {"capacity": "1MiB"}}
            findings = examine(parse_config({**own, "shared": shared}))
        (found,) = (finding for finding in findings if finding.check == "shared")
        assert (found.level, words in found.message) == (level, True), found
        assert level == "ok" or found.remedy
