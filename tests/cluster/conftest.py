from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.faults import Cluster, running_cluster
from tests.cluster.network import missing_network
from tests.servers.process import wait_until
from tests.servers.redis import MISSING_REDIS
from tests.service.daemon import short_directory


@pytest.fixture(scope="session", autouse=True)
def _machine() -> None:
    """Skip where there can be no such network, or no such servers."""
    pytest.importorskip("glide", reason="needs valkey-glide (pip install 'tierkv-cache[shared]')")
    missing = MISSING_REDIS or missing_network()
    if missing:
        pytest.skip(missing)


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


@pytest.fixture(scope="session")
def cluster(home: Path) -> Iterator[Cluster]:
    with running_cluster(home) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _recovered(request: pytest.FixtureRequest) -> None:
    """Wait until the cluster's nodes have found their way back to the servers from what was done before."""
    if "cluster" in request.fixturenames:
        for node in request.getfixturevalue("cluster").nodes:
            wait_until(lambda node=node: node.metric("tierkv_shared_up") == 1, f"node {node.name} at the servers")
