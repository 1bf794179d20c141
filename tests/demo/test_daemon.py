"""The demo's daemon: a real process that is there when it says so, survives a restart, and leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tierkv.cache import Chain
from tierkv.errors import Unavailable
from tierkv.service.demo.daemon import Daemon
from tierkv.spec import KVGroup, KVSpec

TIERS: dict[str, dict[str, Any]] = {"warm": {"capacity": "8MiB"}, "cold": {"capacity": "64MiB"}}
SPEC = KVSpec("model", "weights", "float16", 16, (KVGroup((0, 1), "full", 2, 16),))


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("d")  # short: a socket's path has 107 characters at most


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_blocks_outlive_a_restart_and_belong_to_their_tenant(directory: Path) -> None:
    chain = Chain.of(SPEC, list(range(64)))
    with Daemon(directory, TIERS) as daemon:
        with daemon.connect("team") as cache:
            cache.register(SPEC)
            with cache.reserve(chain) as lease:
                for grant in lease.granted:
                    lease.buffer(grant.index)[:] = bytes([grant.index]) * grant.length
                lease.commit()
        daemon.stop()
        daemon.start()
        with daemon.connect("team") as cache:
            cache.register(SPEC)
            assert cache.lookup(chain).tiers == ("cold",) * 4
            with cache.acquire(chain) as read:
                assert [set(read.view(ref.index)) for ref in read.blocks] == [{0}, {1}, {2}, {3}]
        with daemon.connect("stranger") as cache:
            cache.register(SPEC)
            assert cache.lookup(chain).blocks == 0


def test_no_process_is_left_behind_whatever_ends_the_demo(directory: Path) -> None:
    daemon = Daemon(directory, TIERS)
    pids: list[int] = []

    def interrupted() -> None:
        with daemon:
            assert daemon.pid is not None
            pids.append(daemon.pid)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert daemon.pid is None
    assert not alive(pids[0])


def test_a_daemon_that_cannot_start_says_why(directory: Path) -> None:
    with pytest.raises(Unavailable, match="capasity"):
        Daemon(directory, {"warm": {"capasity": "8MiB"}, "cold": {"capacity": "64MiB"}}).start()
