"""Four real nodes at a real server find what the simulator of the same nodes says they find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path

import pytest

from tests.cache.support import assert_intact, make_spec, payload
from tests.cluster.network import Network
from tests.cluster.node import Node
from tests.replay.test_replay import TRACES, needs_traces
from tests.servers.redis import RedisServer
from tierkv.cache import Cache, Chain
from tierkv.replay.nodes import NodesPlan, replay_nodes
from tierkv.replay.routing import RoundRobin
from tierkv.replay.shared import SharedPlan
from tierkv.replay.tiers import MemoryPlan, TierPlan
from tierkv.replay.trace import Request, Trace, read_trace
from tierkv.spec import KVGroup, KVSpec

NODES = 4
REQUESTS = 300
BLOCK_TOKENS = 512
LONGEST = 64
MEMORY_BLOCKS = 512
TOLERANCE = 0.01
_SPEC = make_spec(KVGroup((0,), "full", 4, 16), block_tokens=16)  # a block of the trace is one of 8 KiB here


@pytest.fixture(scope="module")
def trace() -> Trace:
    """The first requests of a trace of conversations, no longer than `LONGEST` blocks."""
    whole = read_trace(TRACES / "mooncake_conversation_first1000.jsonl.gz", BLOCK_TOKENS)
    return Trace(tuple(_shortened(request) for request in whole.requests[:REQUESTS]), BLOCK_TOKENS)


def _shortened(request: Request) -> Request:
    blocks = request.blocks[:LONGEST]
    return Request(request.timestamp, min(request.tokens, len(blocks) * BLOCK_TOKENS), blocks, request.session)


@pytest.fixture
def nodes(home: Path) -> Iterator[list[Node]]:
    with Network() as network, ExitStack() as stack:
        options = ("--protected-mode", "no", "--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru")
        server = RedisServer(home, *options, host=network.address)
        stack.callback(server.stop)
        made = []
        for number in range(NODES):
            # On a busy machine an answer may take its time; it is not to be gone without here.
            patient = {"probe_timeout": 10.0}
            little = {"warm": {"capacity": f"{MEMORY_BLOCKS * _SPEC.layout().nbytes >> 20}MiB", "policy": "lru"}}
            host = network.host(str(number))
            made.append(Node(home, f"sim{number}", host, server.url, shared=patient, settings=little))
            stack.callback(made[-1].kill)
            made[-1].start()
        yield made


def serve(cache: Cache, spec: KVSpec, chain: Chain) -> Counter[str]:
    """Serve one request until everything about it is settled; return blocks of its hit by tier."""
    with cache.acquire(chain, wait_s=60.0) as read:
        assert_intact(read, spec, chain)
        hit = read.hit_blocks
        found = Counter({tier: tokens // spec.block_tokens for tier, tokens in read.tokens_by_tier.items()})
    with cache.reserve(chain, start=hit) as lease:
        for grant in lease.granted:
            lease.buffer(grant.index)[:] = payload(spec, chain, grant.index)
        lease.commit()
    cache.flush()
    return found


@needs_traces
def test_real_nodes_find_what_the_simulator_says(nodes: list[Node], trace: Trace) -> None:
    local = TierPlan((MemoryPlan("warm", MEMORY_BLOCKS, "lru"),), 0, 0.0)
    expected = replay_nodes(trace, NodesPlan(NODES, local, SharedPlan(None)), RoundRobin())
    tokens = 0
    found: Counter[str] = Counter()
    with ExitStack() as stack:
        caches = [stack.enter_context(node.connect(_SPEC)) for node in nodes]
        for number, request in enumerate(trace.requests):
            hashes = tuple(blake2b(block.to_bytes(8, "little"), digest_size=32).digest() for block in request.blocks)
            hit = serve(caches[number % NODES], _SPEC, Chain(_SPEC.namespace, hashes))
            found += hit
            tokens += trace.tokens(request, hit.total())
    assert tokens == pytest.approx(sum(sum(served.tokens) for served in expected.served), rel=TOLERANCE)
    warm, shared = (sum(served.blocks[tier] for served in expected.served) for tier in (0, 1))
    assert found["warm"] == pytest.approx(warm, rel=TOLERANCE)
    assert found["shared"] == pytest.approx(shared, rel=TOLERANCE)
    assert min(warm, shared) > 50, "the trace says nothing about both kinds of hits"
    uploaded = sum(node.metric("tierkv_shared_uploaded_blocks_total") for node in nodes)
    assert uploaded == len({block for request in trace.requests for block in request.blocks})
