"""Nodes start, run and stop whatever the servers do, say little about it, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cache.support import make_chain, make_spec, store
from tests.cluster.faults import Cluster, frozen
from tests.cluster.network import Host
from tests.cluster.node import Node
from tests.cluster.traffic import Traffic
from tests.servers.process import free_port, wait_until
from tests.servers.redis import RedisServer
from tierkv.cache import Cache, Chain

BLOCKS = 8
_STARTING_S = 20.0
_STOPPING_S = 20.0


@pytest.fixture(scope="module")
def host(cluster: Cluster) -> Host:
    return cluster.network.host("l")


def hits(cache: Cache, chain: Chain) -> dict[str, int]:
    with cache.acquire(chain, wait_s=10.0) as read:
        return dict(read.tokens_by_tier)


def test_a_node_serves_before_there_is_a_server_and_shares_when_there_is(
    cluster: Cluster, home: Path, host: Host
) -> None:
    port, spec = free_port(), make_spec()
    chain, later = make_chain(spec, BLOCKS), make_chain(spec, BLOCKS, seed=1)
    all_tokens = BLOCKS * spec.block_tokens
    patient = {"probe_timeout": 10.0}  # a block is not counted twice, or not at all, on a busy machine
    early = Node(home, "early", host, f"valkey://{cluster.network.address}:{port}", shared=patient)
    early.start(_STARTING_S)
    server: RedisServer | None = None
    try:
        with early.connect(spec) as cache:
            store(cache, spec, chain)
            assert hits(cache, chain) == {"warm": all_tokens}
            assert early.metric("tierkv_shared_up") == 0
            server = RedisServer(home, "--protected-mode", "no", host=cluster.network.address, port=port)
            wait_until(lambda: early.metric("tierkv_shared_up") == 1, "the shared tier")
            store(cache, spec, later)
            cache.flush()
            uploaded = early.metric("tierkv_shared_uploaded_blocks_total")
            assert uploaded == 2 * BLOCKS, "those from before it came are shared, too"
    finally:
        early.kill()
        if server is not None:
            server.stop()


def test_a_node_starts_while_the_servers_are_silent(cluster: Cluster, home: Path, host: Host) -> None:
    spec = make_spec()
    silent = Node(home, "silent", host, cluster.servers.url, shared=cluster.access)
    try:
        with frozen(cluster):
            silent.start(_STARTING_S)
            with silent.connect(spec) as cache:
                store(cache, spec, make_chain(spec, BLOCKS))
                assert hits(cache, make_chain(spec, BLOCKS)) == {"warm": BLOCKS * spec.block_tokens}
        wait_until(lambda: silent.metric("tierkv_shared_up") == 1, "the shared tier")
    finally:
        silent.kill()


@pytest.mark.parametrize("reached", [True, False], ids=["frozen-later", "never-reached"])
def test_a_node_stops_while_the_servers_are_silent(cluster: Cluster, home: Path, host: Host, reached: bool) -> None:
    spec = make_spec()
    node = Node(home, "stopping", host, cluster.servers.url, shared=cluster.access)
    try:
        if reached:
            node.start()
        with frozen(cluster):
            if not reached:
                node.start()
            with node.connect(spec) as cache:
                for seed in range(20):  # they wait to be uploaded
                    store(cache, spec, make_chain(spec, BLOCKS, seed=seed))
                    cache.lookup(make_chain(spec, BLOCKS, seed=seed + 100))
            assert node.stop(_STOPPING_S) == 0
        assert "Traceback" not in node.log
    finally:
        node.kill()


def test_an_outage_is_a_few_lines_in_the_log_and_no_threads(cluster: Cluster) -> None:
    def outage(traffic: Traffic) -> None:
        with frozen(cluster):
            wait_until(lambda: all(node.metric("tierkv_shared_up") == 0 for node in cluster.nodes), "the outage")
            traffic.for_seconds(4.0)
        traffic.until_shared()

    with Traffic(cluster.nodes) as traffic:
        traffic.until_shared()
        outage(traffic)  # in the first one pools grow to their size
        lines = [node.log.count("\n") for node in cluster.nodes]
        threads = [node.threads for node in cluster.nodes]
        outage(traffic)
    for node, before, threads_before in zip(cluster.nodes, lines, threads, strict=True):
        told = node.log.splitlines()[before:]
        assert 1 <= len(told) <= 5, told
        assert "Traceback" not in node.log
        assert node.threads <= threads_before + 2


def test_metrics_say_what_was_shared(cluster: Cluster) -> None:
    a, b = cluster.nodes
    spec = make_spec()
    chain = make_chain(spec, BLOCKS)
    with a.connect(spec) as cache, b.connect(spec) as other:
        cache.flush()  # what earlier tests have left to be written
        uploaded = a.metric("tierkv_shared_uploaded_blocks_total")
        shared = b.metric("tierkv_hit_tokens_total", "shared")
        store(cache, spec, chain)
        cache.flush()
        wait_until(lambda: other.lookup(chain, wait_s=10.0).blocks == BLOCKS, "the answer what is there")
        assert hits(other, chain) == {"shared": BLOCKS * spec.block_tokens}
        assert hits(other, chain) == {"warm": BLOCKS * spec.block_tokens}
        store(other, spec, chain)
        other.flush()
    assert a.metric("tierkv_shared_uploaded_blocks_total") == uploaded + BLOCKS
    assert b.metric("tierkv_hit_tokens_total", "shared") == shared + BLOCKS * spec.block_tokens
    assert a.metric("tierkv_shared_up") == b.metric("tierkv_shared_up") == 1
