"""The shared tier keeps the contract of every tier, on every kind of engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from tests.conformance.tier_suite import TierConformance, block, key_of, meta_of
from tests.servers.azurite import AzuriteServer
from tests.servers.redis import RedisCluster, RedisServer
from tests.servers.seaweed import SeaweedServer
from tests.storage.shared.support import NAMESPACE, TENANT, open_store
from tierkv.storage.shared import Backend, SharedStore, SharedTier, make_backend
from tierkv.storage.tier import Tier, TierUsage

MIB = 1 << 20


@pytest.fixture(scope="module")
def small_redis(tmp_path_factory: pytest.TempPathFactory, redis: RedisServer) -> Iterator[RedisServer]:
    options = ("--maxmemory", str(SharedConformance.capacity_bytes), "--maxmemory-policy", "noeviction")
    server = RedisServer(tmp_path_factory.mktemp("small"), *options)
    yield server
    server.stop()


class Counted(SharedTier):
    """The area that the suite's blocks belong to. Counts its blocks, and closes its store.

    `bound` stands for the capacity of an engine that has none.
    """

    def __init__(self, store: SharedStore, bound: int, tenant: bytes = TENANT, namespace: bytes = NAMESPACE) -> None:
        self.__dict__.update(store.area(tenant, namespace).__dict__)
        self.store, self.bound = store, bound

    def usage(self) -> TierUsage:
        usage = self.survey()
        return replace(usage, capacity_bytes=usage.capacity_bytes or self.bound)

    @property
    def largest_block(self) -> int:
        return min(super().largest_block, self.bound)

    def close(self) -> None:
        self.store.close()


class SharedConformance(TierConformance):
    oversize_bytes: ClassVar[int] = 20 * MIB
    capacity_bytes: ClassVar[int] = 16 * MIB
    engine: Callable[[], Backend]

    def make_tier(self, directory: Path) -> Tier:
        return Counted(open_store(self.engine()), self.capacity_bytes)

    def test_keeps_every_field_of_the_meta(self, tier: Tier) -> None:
        """As the suite's, in the area that the block belongs to."""
        assert isinstance(tier, Counted)
        area = tier.store.area(b"tenant-1", key_of(8))
        payload = block(1, 5000)
        meta = meta_of(payload, parent=key_of(9), namespace=key_of(8), tenant=b"tenant-1", depth=7, group=3)
        area.put(key_of(1), payload, meta)
        assert area.meta(key_of(1)) == meta
        assert area.read_into(key_of(1), memoryview(bytearray(5000))) == meta
        assert list(area.records()) == [(key_of(1), meta)]


class TestOnRedis(SharedConformance):
    """On one that refuses writes when it is full."""

    @pytest.fixture(autouse=True)
    def connect(self, small_redis: RedisServer) -> None:
        small_redis.tell("FLUSHALL")
        self.engine = lambda: make_backend(small_redis.url)


class TestOnACluster(SharedConformance):
    @pytest.fixture(autouse=True)
    def connect(self, cluster: RedisCluster) -> None:
        self.engine = lambda: make_backend(cluster.url)

    test_a_full_tier_keeps_its_promises = None  # type: ignore[assignment]  # has no bound here


class TestOnSeaweed(SharedConformance):
    payload_bytes: ClassVar[int] = 24 << 10

    @pytest.fixture(autouse=True)
    def connect(self, seaweed: SeaweedServer) -> None:
        self.engine = lambda: make_backend("s3://tests/conformance", options=seaweed.options)

    test_a_full_tier_keeps_its_promises = None  # type: ignore[assignment]  # has no bound


class TestOnAzurite(SharedConformance):
    payload_bytes: ClassVar[int] = 24 << 10

    @pytest.fixture(autouse=True)
    def connect(self, azurite: AzuriteServer) -> None:
        self.engine = lambda: make_backend("az://tests/conformance", options=azurite.options)

    test_a_full_tier_keeps_its_promises = None  # type: ignore[assignment]  # has no bound
