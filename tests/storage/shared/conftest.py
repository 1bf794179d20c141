"""Engines for the tests of the shared tier, one of each kind for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.servers.azurite import MISSING_AZURITE, AzuriteServer
from tests.servers.redis import MISSING_REDIS, RedisCluster, RedisServer
from tests.servers.seaweed import MISSING_SEAWEED, SeaweedServer
from tests.storage.shared.support import open_store
from tierkv.storage.shared import Backend, SharedStore, make_backend
from tierkv.storage.shared.loop import acquire_loop, release_loop

_T = TypeVar("_T")
Wait = Callable[[Coroutine[Any, Any, _T]], _T]
MakeBackend = Callable[[], Backend]


def _needs(missing: str) -> None:
    if missing:
        pytest.skip(missing)


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    _needs(MISSING_REDIS)
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Start servers that a test may do to as it likes."""
    _needs(MISSING_REDIS)
    started: list[RedisServer] = []

    def start(*options: str, port: int | None = None) -> RedisServer:
        started.append(RedisServer(tmp_path, *options, port=port))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    _needs(MISSING_REDIS)
    cluster = RedisCluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    _needs(MISSING_SEAWEED)
    server = SeaweedServer(tmp_path_factory.mktemp("seaweed"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzuriteServer]:
    _needs(MISSING_AZURITE)
    server = AzuriteServer(tmp_path_factory.mktemp("azurite"))
    yield server
    server.stop()


@pytest.fixture(params=["redis", "cluster", "seaweed", "azurite"])
def engine(request: pytest.FixtureRequest) -> MakeBackend:
    """Make backends of each kind in turn."""
    server = request.getfixturevalue(request.param)
    if isinstance(server, AzuriteServer):
        return lambda: make_backend("az://tests/blocks", options=server.options)
    if isinstance(server, SeaweedServer):
        return lambda: make_backend("s3://tests/blocks", options=server.options)
    return lambda: make_backend(server.url)


@pytest.fixture
def store(redis: RedisServer) -> Iterator[SharedStore]:
    store = open_store(redis.url)
    yield store
    store.close()


@pytest.fixture
def wait() -> Iterator[Wait[Any]]:
    """Run coroutines of backends where the tier runs them."""
    loop = acquire_loop()
    yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)
    release_loop()
