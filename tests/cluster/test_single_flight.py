"""Two nodes that want the same at the same time: one computes it, the other gets it, or goes on without."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cache.support import assert_intact, make_chain, make_spec, payload
from tests.cluster.faults import Cluster
from tests.cluster.node import Node
from tierkv.cache import Cache, Chain, ReadLease
from tierkv.spec import KVSpec

BLOCKS = 8
ROUNDS = 5
BLOCK_S = 0.1  # to compute one: were that faster than loading it, nobody would share it or wait for it
_WAIT_S = 30.0


@pytest.fixture(scope="module")
def nodes(cluster: Cluster, home: Path) -> Iterator[tuple[Node, Node]]:
    """Two nodes that wait for an answer however busy the machine is: who gets none in time computes, too."""
    patient = {**cluster.access, "probe_timeout": 10.0}
    made = [
        Node(home, name, cluster.network.host(name), cluster.servers.url, shared=patient)
        for name in ("prefill", "decode")
    ]
    try:
        for node in made:
            node.start()
        yield made[0], made[1]
    finally:
        for node in made:
            node.kill()


@dataclass(frozen=True, slots=True)
class Got:
    """What one node read, and computed itself, in blocks."""

    read: int
    computed: int


def publish(cache: Cache, spec: KVSpec, chain: Chain, start: int, *, step: int) -> int:
    """Compute and publish the blocks of a chain from `start` on, `step` at a time; return how many were accepted."""
    accepted = 0
    with cache.reserve(chain, start=start) as lease:
        granted = [grant.index for grant in lease.granted]
        for at in range(0, len(granted), step):
            for index in granted[at : at + step]:
                time.sleep(BLOCK_S)
                lease.buffer(index)[:] = payload(spec, chain, index)
            accepted += lease.commit(granted[at : at + step])
    return accepted


def serve(node: Node, spec: KVSpec, chain: Chain, together: threading.Barrier, step: int) -> Got:
    """Answer one request as an engine does."""
    with node.connect(spec) as cache:
        together.wait()
        with cache.acquire(chain, wait_s=_WAIT_S, compute_s=_WAIT_S) as read:
            assert_intact(read, spec, chain)
            start, lease = read.hit_blocks, read.compute
        if lease is None:
            return Got(start, 0)
        assert lease.stop == BLOCKS
        return Got(start, publish(cache, spec, chain, start, step=step))


@pytest.mark.parametrize("step", [1, BLOCKS], ids=["block-by-block", "all-at-once"])
def test_a_common_prompt_is_computed_once(nodes: tuple[Node, Node], step: int) -> None:
    spec = make_spec()
    together = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        for seed in range(ROUNDS):
            chain = make_chain(spec, BLOCKS, seed=seed)
            asked = [pool.submit(serve, node, spec, chain, together, step) for node in nodes]
            got = sorted((one.result() for one in asked), key=lambda one: one.computed)
            assert got == [Got(BLOCKS, 0), Got(0, BLOCKS)], seed


def decode(node: Node, spec: KVSpec, chain: Chain, wait_s: float, begun: threading.Event) -> int:
    """Wait for another node's prefill; return how much of it came."""
    with node.connect(spec) as cache:
        begun.set()
        with cache.acquire(chain, wait_s=wait_s, handoff=True) as read:
            assert_intact(read, spec, chain)
            assert read.compute is None
            return read.hit_blocks


def test_a_prefill_is_handed_over_block_by_block(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    spec = make_spec()
    chain, begun = make_chain(spec, BLOCKS), threading.Event()
    with ThreadPoolExecutor(1) as pool, a.connect(spec) as cache:
        decoding = pool.submit(decode, b, spec, chain, _WAIT_S, begun)
        begun.wait()
        assert publish(cache, spec, chain, 0, step=1) == BLOCKS
        assert decoding.result() == BLOCKS


def prefill(node: Node, spec: KVSpec, chain: Chain) -> ReadLease:
    """Begin to compute a prompt, which is announced to the other nodes."""
    read = node.connect(spec).acquire(chain, wait_s=_WAIT_S, compute_s=_WAIT_S)
    assert read.compute is not None
    return read


def test_a_killed_prefill_holds_nobody_up(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    spec = make_spec()
    chain, begun = make_chain(spec, BLOCKS), threading.Event()
    prefill(a, spec, chain)
    with ThreadPoolExecutor(1) as pool, a.connect(spec) as cache:
        publish(cache, spec, Chain(chain.namespace, chain.hashes[:3]), 0, step=1)
        cache.flush()
        decoding: Future[int] = pool.submit(decode, b, spec, chain, 5.0, begun)
        begun.wait()
        a.kill()
        assert decoding.result(_WAIT_S) == 3
    a.start()
