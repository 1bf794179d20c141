"""`tierkv doctor` of a node among others: peers, the common secret, the engine of the shared tier."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.servers.redis import MISSING_REDIS, RedisServer
from tests.service.cluster.nodes import SECRET, cluster, free_ports
from tests.service.daemon import Daemon, short_directory
from tierkv.config import parse_config
from tierkv.core.build import shared_store
from tierkv.service.cluster.signing import secret_fingerprint
from tierkv.service.doctor import Finding, examine


@pytest.fixture
def here() -> Iterator[Path]:
    with short_directory() as directory:
        path = directory / "secret"
        path.write_bytes(SECRET)
        path.chmod(0o600)
        yield directory


@pytest.fixture(scope="module")
def two() -> Iterator[list[Daemon]]:
    with cluster(2, stranger=1) as daemons:
        yield daemons


def findings(here: Path, **settings: Any) -> dict[str, Finding]:
    own = {"socket": str(here / "s"), "port": 0, "secret": str(here / "secret"), "warm": {"capacity": "1MiB"}}
    found = examine(parse_config({**own, **settings}))
    assert len({finding.check for finding in found}) == len(found)
    assert all(finding.remedy for finding in found if finding.level != "ok")
    return {finding.check: finding for finding in found}


def test_the_secrets_fingerprint_is_told_to_compare(here: Path) -> None:
    found = findings(here)["secret"]
    assert (found.level, secret_fingerprint(SECRET) in found.message) == ("ok", True)
    (here / "secret").chmod(0o644)
    assert findings(here)["secret"].level == "fail"
    (here / "secret").unlink()
    missing = findings(here)["secret"]
    assert ("no secret" in missing.message, "other nodes" in missing.remedy) == (True, True)


def test_peers_that_answer(here: Path, two: list[Daemon]) -> None:
    found = findings(here, cluster={"peers": [two[0].tcp_url]})
    assert (found["peers"].level, found["peers"].message) == ("ok", "1 of 1 answer")
    assert "cluster-port" not in found


def test_peers_that_refuse_or_are_down(here: Path, two: list[Daemon]) -> None:
    dead = f"http://127.0.0.1:{free_ports(1)[0]}"
    found = findings(here, cluster={"peers": [two[0].tcp_url, dead]})["peers"]
    assert (found.level, found.message) == ("warn", f"1 of 2 answer; down: {dead}")
    found = findings(here, cluster={"peers": [dead, two[1].tcp_url]})["peers"]
    assert (found.level, found.message) == ("fail", f"0 of 2 answer; down: {dead}; refused: {two[1].tcp_url}")
    assert "same secret" in found.remedy


def test_a_node_that_nobody_can_ask(here: Path, two: list[Daemon]) -> None:
    found = findings(here, port=None, cluster={"peers": [two[0].tcp_url]})
    assert found["cluster-port"].level == "warn"


def test_peers_cannot_be_asked_without_the_secret(here: Path) -> None:
    (here / "state").mkdir(mode=0o700)
    found = findings(here, secret=None, state_dir=str(here / "state"), cluster={"peers": ["http://127.0.0.1:1"]})
    assert found["peers"].level == "fail"
    assert list((here / "state").iterdir()) == []  # it makes no secret


def test_without_a_shared_tier_there_is_nothing_to_check(here: Path) -> None:
    found = findings(here)
    assert found["shared"].level == "ok"
    assert not {"shared-engine", "peers", "cluster-port"} & found.keys()


needs_redis = pytest.mark.skipif(bool(MISSING_REDIS), reason=MISSING_REDIS)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    started: list[RedisServer] = []

    def start(*options: str) -> RedisServer:
        started.append(RedisServer(tmp_path, *options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@needs_redis
def test_an_engine_that_evicts(here: Path, redis: Callable[..., RedisServer]) -> None:
    server = redis("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    known = {"state_dir": str(here), "shared": {"url": server.url, "probe_timeout": 10}}
    store = shared_store(parse_config(known))
    assert store is not None
    store.open()
    store.area(b"\0" * 8, b"\0" * 32).clear()
    store.close()
    (kept,) = {path for path in here.iterdir() if path.name != "secret"}
    before = kept.stat()
    found = findings(here, **known)
    assert (found["shared"].level, "answers in" in found["shared"].message) == ("ok", True)
    assert (found["shared-engine"].level, "of 64.0 MiB" in found["shared-engine"].message) == ("ok", True)
    assert found["shared-trial"].level == "ok"
    assert {path.name for path in here.iterdir()} == {"secret", kept.name}
    assert os.path.samestat(kept.stat(), before)  # it is the daemon's, and is not written anew


@needs_redis
@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--maxmemory", "64mb", "--maxmemory-policy", "noeviction"), "noeviction"),
        (("--maxmemory", "64mb", "--maxmemory-policy", "volatile-lru"), "volatile-lru"),
        (("--maxmemory", "0", "--maxmemory-policy", "allkeys-lru"), "maxmemory is not set"),
    ],
)
def test_an_engine_that_would_refuse_blocks(
    here: Path, redis: Callable[..., RedisServer], options: tuple[str, ...], word: str
) -> None:
    found = findings(here, shared={"url": redis(*options).url, "probe_timeout": 10})["shared-engine"]
    assert (found.level, word in found.message) == ("warn", True)


@needs_redis
def test_an_engine_that_is_slow_for_the_time_given(here: Path, redis: Callable[..., RedisServer]) -> None:
    server = redis("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=forward_late, args=(listener, server.port), daemon=True).start()
        url = f"valkey://127.0.0.1:{listener.getsockname()[1]}"
        found = findings(here, shared={"url": url, "probe_timeout": 1.5 * LATE_S})["shared"]
    assert found.level in ("warn", "fail")  # slow, or too slow to be asked at all
    if found.level == "warn":
        assert found.remedy == "raise shared.probe_timeout"


LATE_S = 0.2


def forward_late(listener: socket.socket, port: int) -> None:
    """Pass on what comes, at once, and each answer late."""
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        server = socket.create_connection(("127.0.0.1", port))
        Thread(target=copy, args=(client, server, 0.0), daemon=True).start()
        Thread(target=copy, args=(server, client, LATE_S), daemon=True).start()


def copy(source: socket.socket, sink: socket.socket, late_s: float) -> None:
    with contextlib.suppress(OSError), source, sink:
        while data := source.recv(1 << 16):
            time.sleep(late_s)
            sink.sendall(data)


@needs_redis
def test_an_engine_that_does_not_know_this_user(here: Path, redis: Callable[..., RedisServer]) -> None:
    server = redis("--requirepass", "right")
    (here / "password").write_text("wrong\n")
    found = findings(here, shared={"url": server.url, "password_file": str(here / "password")})
    assert found["shared"].level == "fail"
    assert "wrong" not in found["shared"].message
    assert "password" in found["shared"].remedy
    assert "shared-engine" not in found


@needs_redis
@pytest.mark.parametrize("command", ["evalsha", "set", "get", "getrange", "exists", "unlink"])
def test_an_engine_that_does_not_do_what_daemons_need(
    here: Path, redis: Callable[..., RedisServer], command: str
) -> None:
    server = redis()
    server.tell("ACL", "SETUSER", "default", f"-{command}")
    found = findings(here, shared={"url": server.url, "probe_timeout": 10})
    assert (found["shared"].level, found["shared-trial"].level) == ("ok", "fail")
    assert "commands" in found["shared-trial"].remedy


@needs_redis
def test_an_engine_that_is_full(here: Path, redis: Callable[..., RedisServer]) -> None:
    server = redis("--maxmemory", "1", "--maxmemory-policy", "noeviction")
    found = findings(here, shared={"url": server.url, "probe_timeout": 10})["shared-trial"]
    assert (found.level, "full" in found.message, "allkeys-lru" in found.remedy) == ("fail", True, True)


@needs_redis
def test_what_the_doctor_tries_out_it_takes_away(here: Path, redis: Callable[..., RedisServer]) -> None:
    server = redis()
    for _ in range(2):
        findings(here, shared={"url": server.url, "probe_timeout": 10})
    (left,) = server.tell("KEYS", "*").split()
    assert left.endswith("/generation")


def test_an_engine_that_is_not_there(here: Path, two: list[Daemon], capfd: pytest.CaptureFixture[str]) -> None:
    for address in (f"127.0.0.1:{free_ports(1)[0]}", "no-such-host.invalid:6379", f"127.0.0.1:{two[0].tcp_port}"):
        found = findings(here, shared={"url": f"valkey://{address}"})
        assert (found["shared"].level, address in found["shared"].message) == ("fail", True)
        assert "again" not in found["shared"].remedy  # the doctor does not come again
        assert not {"shared-engine", "shared-trial"} & found.keys()
    assert "not reached" not in capfd.readouterr().err  # a finding, and not a line of the log as well
