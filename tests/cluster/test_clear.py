"""What one node clears or deletes is gone on all of them, also on those that were away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

import pytest

from tests.cache.support import make_chain, make_spec, store
from tests.cluster.faults import Cluster
from tests.cluster.node import Node
from tests.servers.process import wait_until
from tierkv.cache import Cache, Chain
from tierkv.spec import KVSpec

BLOCKS = 6
_SOON_S = 5.0  # 50 looks at what others did


class Away(Protocol):
    """A way of not being there while a context lasts."""

    def __call__(self, node: Node, /) -> AbstractContextManager[object]: ...


@contextmanager
def frozen(node: Node) -> Iterator[None]:
    node.freeze()
    yield
    node.thaw()


@contextmanager
def killed(node: Node) -> Iterator[None]:
    node.kill()
    yield
    node.start()


@contextmanager
def stopped(node: Node) -> Iterator[None]:
    assert node.stop() == 0
    yield
    node.start()


@contextmanager
def cut_off(node: Node) -> Iterator[None]:
    node.host.unplug()
    yield
    node.host.plug()


AWAY: dict[str, Away] = {
    "there": nullcontext,
    "frozen": frozen,
    "killed": killed,
    "stopped": stopped,
    "cut-off": cut_off,
}


@pytest.fixture(scope="module")
def keeper(cluster: Cluster, home: Path) -> Iterator[Node]:
    """A node whose blocks survive it, on disk."""
    settings = {"warm": {"capacity": "16MiB"}, "cold": {"capacity": "64MiB"}}
    node = Node(
        home, "keeper", cluster.network.host("k"), cluster.servers.url, shared=cluster.access, settings=settings
    )
    try:
        node.start()
        yield node
    finally:
        node.kill()


def spread(cluster: Cluster, keeper: Node, spec: KVSpec, *chains: Chain) -> None:
    """Store chains on one node, and have them in memory and on the disk of the other."""
    with cluster.nodes[0].connect(spec) as cache, keeper.connect(spec) as other:
        for chain in chains:
            store(cache, spec, chain)
        cache.flush()
        for chain in chains:  # a busy machine may not answer in the time of a question
            wait_until(lambda chain=chain: found(other, chain) == BLOCKS, "blocks from the shared tier")  # type: ignore[misc]
        other.flush()


def found(cache: Cache, chain: Chain) -> int:
    """How much of a chain there is to be read, here or elsewhere."""
    with cache.acquire(chain, wait_s=10.0) as read:
        return read.hit_blocks


@pytest.mark.parametrize("away", AWAY.values(), ids=AWAY.keys())
def test_a_clear_reaches_a_node(cluster: Cluster, keeper: Node, away: Away) -> None:
    spec, kept = make_spec(), make_spec()
    chain, other = make_chain(spec, BLOCKS), make_chain(kept, BLOCKS)
    spread(cluster, keeper, spec, chain)
    spread(cluster, keeper, kept, other)
    with away(keeper), cluster.nodes[0].connect(spec) as cache:
        assert cache.clear(spec.namespace) == BLOCKS
        assert found(cache, chain) == 0
    with keeper.connect(spec, kept) as cache:
        wait_until(lambda: found(cache, chain) == 0, "a cleared keeper", _SOON_S)
        assert found(cache, other) == BLOCKS


@pytest.mark.parametrize("away", AWAY.values(), ids=AWAY.keys())
def test_a_deletion_reaches_a_node(cluster: Cluster, keeper: Node, away: Away) -> None:
    spec = make_spec()
    chain, other = make_chain(spec, BLOCKS), make_chain(spec, BLOCKS, seed=1)
    spread(cluster, keeper, spec, chain, other)
    with away(keeper), cluster.nodes[0].connect(spec) as cache:
        assert cache.delete(chain) == 1
        assert found(cache, chain) == BLOCKS - 1
    with keeper.connect(spec) as cache:
        wait_until(lambda: found(cache, chain) == BLOCKS - 1, "a keeper without a block", _SOON_S)
        assert found(cache, other) == BLOCKS


def test_what_a_node_cleared_while_it_was_cut_off_is_gone_when_it_is_back(cluster: Cluster, keeper: Node) -> None:
    a, _ = cluster.nodes
    spec = make_spec()
    chain = make_chain(spec, BLOCKS)
    spread(cluster, keeper, spec, chain)
    with a.connect(spec) as cache, keeper.connect(spec) as other:
        with cut_off(a):
            assert cache.clear(spec.namespace) == BLOCKS
            assert found(cache, chain) == 0
            assert found(other, chain) == BLOCKS  # who could have told it
        wait_until(lambda: found(other, chain) == 0, "a cleared keeper", _SOON_S + 5.0)
        assert found(cache, chain) == 0
