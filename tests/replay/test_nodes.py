"""Several nodes on one trace: by hand, against a slow simulator, and against one machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.replay import simulators as slow
from tierkv.errors import ConfigError
from tierkv.replay.link import Link
from tierkv.replay.nodes import NodesPlan, Served, hit_blocks, replay_nodes
from tierkv.replay.routing import AtRandom, LongestPrefix, RoundRobin, Router
from tierkv.replay.shared import SharedPlan
from tierkv.replay.single import ideal_hit_tokens
from tierkv.replay.tiers import MemoryPlan, TierPlan, replay_tiers
from tierkv.replay.trace import Request, Trace

BLOCK = slow.BLOCK
Write = Literal["all", "demotion", "hits"]


def asked(*chains: Sequence[int], last: int = BLOCK) -> Trace:
    """One request for each chain, a minute apart; `last` tokens in the last block of each."""
    requests = (
        Request(60_000 * number, BLOCK * (len(chain) - 1) + last, tuple(chain)) for number, chain in enumerate(chains)
    )
    return Trace(tuple(requests), BLOCK)


def memory(blocks: int, policy: str = "lru") -> TierPlan:
    return TierPlan((MemoryPlan("warm", blocks, policy),), 0, 0.0)


def serve(trace: Trace, nodes: int, blocks: int, shared: SharedPlan | None, link: Link | None = None) -> list[Served]:
    return list(replay_nodes(trace, NodesPlan(nodes, memory(blocks), shared, link), RoundRobin()).served)


def test_private_nodes_find_what_they_had_themselves() -> None:
    served = serve(asked([1, 2], [1, 2], [1, 2, 3], [1, 9], last=3), 2, 2, None)
    assert served == [
        Served(0, (0,), (0,), 0, 0, 0),
        Served(1, (0,), (0,), 0, 0, 0),
        Served(0, (2,), (8,), 0, 0, 0),
        Served(1, (1,), (4,), 0, 0, 0),
    ]


def test_what_one_node_computed_another_one_loads_and_has() -> None:
    served = serve(asked([1, 2], [1, 2, 3], [1, 2, 3], [1, 2, 3], last=3), 2, 2, SharedPlan())
    assert served == [
        Served(0, (0, 0), (0, 0), 2, 0, 2),
        Served(1, (0, 2), (0, 8), 3, 0, 1),
        Served(0, (2, 1), (8, 3), 1, 0, 0),  # 1 and 2 are its own, 3 the other's
        Served(1, (2, 1), (8, 3), 1, 0, 0),  # 3 had to leave for 1 and 2
    ]


def test_the_shared_tier_forgets_what_was_loaded_and_stored_least_lately() -> None:
    chains: list[Sequence[int]] = [[1], [2], [1], [1], [3], [2], [1]]
    served = serve(asked(*chains), 2, 1, SharedPlan(2))
    # Node 1 loads 1 at the fourth request, which keeps it; 3 pushes out 2; then 2 pushes out 1, although node 1 ...
    assert [one.blocks for one in served] == [(0, 0), (0, 0), (1, 0), (0, 1), (0, 0), (0, 0), (0, 0)]
    # ... has used it lately: what a node finds in its own memory is no news to the shared tier.
    found_at_home = serve(asked([1], [1], [1], [1], [2], [3], [9], [1]), 2, 1, SharedPlan(2))
    assert [one.blocks for one in found_at_home][2:4] == [(1, 0), (1, 0)]
    assert found_at_home[7].blocks == (0, 0)


def test_by_demotion_what_leaves_a_memory_is_written_once() -> None:
    served = serve(asked([1, 2], [1, 2], [3, 4], [5], [1, 2], [1, 2]), 2, 2, SharedPlan(write="demotion"))
    assert [(one.blocks, one.written) for one in served] == [
        ((0, 0), 0),
        ((0, 0), 0),
        ((0, 0), 2),
        ((0, 0), 0),  # 2 leaves node 1 as well, and is there already
        ((0, 2), 2),  # 3 and 4 leave
        ((1, 1), 1),  # 5 leaves
    ]


def test_by_hits_what_a_node_has_used_often_enough_is_written() -> None:
    plan = SharedPlan(write="hits", hits=2)
    served = serve(asked([1], [7], [1], [1], [1], [7], [1], [1]), 2, 1, plan)
    assert [(one.blocks, one.written) for one in served] == [
        ((0, 0), 0),
        ((0, 0), 0),
        ((1, 0), 0),
        ((0, 0), 0),  # takes the place of 7
        ((1, 0), 1),
        ((0, 0), 0),  # takes it back
        ((1, 0), 0),
        ((0, 1), 0),
    ]
    forgotten = serve(asked([1], [1], [2], [1], [1]), 1, 1, plan)
    assert [one.written for one in forgotten] == [0, 0, 0, 0, 0]


def test_only_what_pays_is_loaded() -> None:
    link = Link(bandwidth=10.0, latency=5.0, block_bytes=10, prefill=1.0)  # 5 + 1 s for the first block, 4 s computed
    served = serve(asked([1], [1], [2, 3], [2, 3], [2, 3, 4], [2, 3, 4]), 2, 9, SharedPlan(), link)
    assert [(one.blocks, one.unpaid_tokens, one.written) for one in served] == [
        ((0, 0), 0, 1),
        ((0, 0), 4, 0),  # computed, though it was there
        ((0, 0), 0, 2),
        ((0, 2), 0, 0),
        ((2, 0), 0, 1),
        ((2, 0), 4, 0),  # a block behind those it has is not worth the wait
    ]
    assert served[3].asked == 2


def test_a_node_has_all_its_tiers() -> None:
    local = TierPlan((MemoryPlan("warm", 2, "lru"),), 3, 0.5)
    trace = asked([1], [2], [3], [1], [4], [2])
    hits = replay_nodes(trace, NodesPlan(1, local, SharedPlan(write="demotion")), RoundRobin())
    # Half of the memory is kept clean: a block goes to disk, and so to the others, before it leaves memory.
    assert [one.written for one in hits.served] == [0, 1, 1, 0, 1, 0]
    assert [one.blocks for one in hits.served] == [(0, 0, 0)] * 3 + [(0, 1, 0), (0, 0, 0), (0, 1, 0)]
    assert hits.shared_blocks == 3
    at_once = TierPlan((MemoryPlan("warm", 2, "lru"),), 3, 1.0)
    hits = replay_nodes(asked([1], [2], [3]), NodesPlan(1, at_once, SharedPlan(1, "demotion")), RoundRobin())
    assert [one.written for one in hits.served] == [1, 1, 1]  # 1 leaves memory later, and is not written again


def test_a_router_goes_where_most_is() -> None:
    router = LongestPrefix(3, spread=9.0)
    nodes = [[{1, 2}], [{1}, {2, 3}], [{3}]]
    assert router.choose(Request(0, 12, (1, 2, 3)), nodes) == 1
    router.computed(1, 100)
    assert router.choose(Request(0, 8, (1, 2)), nodes) == 0
    router.computed(0, 101)
    assert router.choose(Request(0, 8, (1, 2)), nodes) == 1
    assert router.choose(Request(0, 8, (7, 8)), nodes) == 2


def test_a_router_passes_over_who_has_too_much_to_do_and_forgives_with_time() -> None:
    router = LongestPrefix(2, spread=1.5)
    nodes = [[{1, 2}], [set[int]()]]
    assert router.choose(Request(0, 8, (1, 2)), nodes) == 0
    router.computed(0, 800)
    assert router.choose(Request(0, 8, (1, 2)), nodes) == 1  # 800 against a mean of 400
    router.computed(1, 200)
    assert router.choose(Request(0, 8, (1, 2)), nodes) == 1  # 800 against 500
    assert router.choose(Request(120_000, 8, (1, 2)), nodes) == 1  # 200 against 125: time alone changes no proportion
    router.computed(1, 200)
    assert router.choose(Request(120_000, 8, (1, 2)), nodes) == 0  # 200 against 225
    assert router.choose(Request(120_000, 8, (7, 8)), nodes) == 0  # 200 and 250


def test_a_beginning_that_all_have_draws_nobody() -> None:
    router = LongestPrefix(2)
    nodes = [[{0, 1, 2}], [set[int]()]]
    router.computed(0, 10)
    assert router.choose(Request(0, 44, (0, *range(10, 20))), nodes) == 1  # an eleventh
    assert router.choose(Request(0, 40, (0, *range(10, 19))), nodes) == 0  # a tenth


def test_routed_nodes_by_hand() -> None:
    trace = asked([1, 2], [3], [1, 2, 4], [3, 5], [1])
    hits = replay_nodes(trace, NodesPlan(2, memory(8)), LongestPrefix(2))
    assert [(one.node, one.blocks) for one in hits.served] == [(0, (0,)), (1, (0,)), (0, (2,)), (1, (1,)), (0, (1,))]


def test_nodes_at_random_are_the_same_for_the_same_seed() -> None:
    trace = slow.generated_trace(1)

    def nodes(seed: int) -> list[int]:
        return [one.node for one in replay_nodes(trace, NodesPlan(4, memory(30)), AtRandom(seed)).served]

    assert nodes(1) == nodes(1) != nodes(2)
    assert set(nodes(1)) == {0, 1, 2, 3}


def test_no_node_no_room() -> None:
    with pytest.raises(ConfigError, match="0 nodes"):
        replay_nodes(asked([1]), NodesPlan(0, memory(1)), RoundRobin())
    with pytest.raises(ConfigError, match="warm tier has no room"):
        replay_nodes(asked([1]), NodesPlan(1, memory(0)), RoundRobin())


def slow_nodes(trace: Trace, nodes: int, local: int, plan: SharedPlan) -> list[tuple[int, int, int]]:
    """LRU everywhere, as lists, the next victim first: own hits, shared hits, blocks written."""
    own: list[list[int]] = [[] for _ in range(nodes)]
    counts: list[dict[int, int]] = [{} for _ in range(nodes)]
    shared: list[int] = []
    found = []

    def put(block: int) -> int:
        if block in shared or plan.capacity == 0:
            return 0
        shared.append(block)
        if plan.capacity is not None and len(shared) > plan.capacity:
            shared.pop(0)
        return 1

    for number, request in enumerate(trace.requests):
        mine, count = own[number % nodes], counts[number % nodes]
        hit: list[int] = []
        for block in request.blocks:
            if block not in mine and block not in shared:
                break
            hit.append(block)
        at_home = [block for block in hit if block in mine]
        loaded = [block for block in hit if block not in mine]
        new = [block for block in request.blocks[len(hit) :] if block not in mine]
        written = 0
        for block in loaded:
            shared.remove(block)
            shared.append(block)
        for block in request.blocks[::-1]:
            if block in mine:
                mine.remove(block)
            elif len(mine) == local:
                gone = mine.pop(0)
                count.pop(gone, None)
                written += put(gone) if plan.write == "demotion" else 0
            mine.append(block)
        if plan.write == "all":
            written += sum(map(put, new))
        if plan.write == "hits":
            for block in hit:
                count[block] = count.get(block, 0) + 1
                written += put(block) if count[block] == plan.hits else 0
        found.append((len(at_home), len(loaded), written))
    return found


plans = st.builds(
    SharedPlan,
    st.one_of(st.none(), st.integers(0, 12)),
    st.sampled_from(["all", "demotion", "hits"]),
    st.integers(1, 3),
)


@given(slow.traces(), st.integers(1, 4), st.integers(1, 12), plans)
def test_hits_are_those_of_the_slow_simulator(trace: Trace, nodes: int, local: int, plan: SharedPlan) -> None:
    served = serve(trace, nodes, local, plan)
    assert [(*one.blocks, one.written) for one in served] == slow_nodes(trace, nodes, local, plan)
    assert all(
        sum(one.tokens) == trace.tokens(r, sum(one.blocks)) for one, r in zip(served, trace.requests, strict=True)
    )


@pytest.mark.parametrize("write", ["all", "demotion", "hits"])
def test_a_longer_trace(write: Write) -> None:
    trace = slow.generated_trace(3)
    for capacity in (20, 100, None):
        plan = SharedPlan(capacity, write, 2)
        served = serve(trace, 3, 30, plan)
        assert [(*one.blocks, one.written) for one in served] == slow_nodes(trace, 3, 30, plan)


@given(slow.traces(), st.integers(1, 4), st.integers(1, 12))
def test_a_shared_tier_without_bounds_has_all_that_was_ever_computed(trace: Trace, nodes: int, local: int) -> None:
    served = serve(trace, nodes, local, SharedPlan())
    assert sum(sum(one.tokens) for one in served) == ideal_hit_tokens(trace)


@given(slow.traces(), st.integers(1, 4), st.integers(1, 12), plans, st.floats(0, 8), st.integers(1, 60))
def test_sharing_never_costs_a_hit(
    trace: Trace, nodes: int, local: int, plan: SharedPlan, latency: float, block_bytes: int
) -> None:
    private = serve(trace, nodes, local, None)
    shared = serve(trace, nodes, local, plan, Link(10.0, latency, block_bytes, 1.0))
    for alone, together in zip(private, shared, strict=True):
        assert together.blocks[:-1] >= alone.blocks
        assert sum(together.tokens) >= sum(alone.tokens)


@settings(max_examples=50)
@given(
    slow.traces(),
    st.integers(1, 12),
    st.integers(0, 12),
    st.sampled_from(["lru", "slru", "aslru"]),
    st.sampled_from([RoundRobin, lambda: AtRandom(3), lambda: LongestPrefix(1, 1.0)]),
)
def test_one_node_is_one_machine(trace: Trace, warm: int, more: int, policy: str, router: type[Router]) -> None:
    local = TierPlan((MemoryPlan("warm", warm, policy),), warm + more, 0.25)
    alone = replay_tiers(trace, local).tokens
    private = replay_nodes(trace, NodesPlan(1, local), router())
    assert tuple(one.tokens for one in private.served) == alone
    empty = replay_nodes(trace, NodesPlan(1, local, SharedPlan(0)), router())
    assert tuple(one.tokens for one in empty.served) == tuple((*tokens, 0) for tokens in alone)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=8), st.floats(0, 9), st.integers(1, 50))
def test_the_cut_takes_least_time(blocks: list[tuple[bool, int]], latency: float, block_bytes: int) -> None:
    link = Link(10.0, latency, block_bytes, 1.5)
    loaded = [load for load, _ in blocks]
    upto = [sum(tokens for _, tokens in blocks[: depth + 1]) for depth in range(len(blocks))]

    def seconds(cut: int) -> float:
        return link.seconds(sum(loaded[:cut])) + sum(tokens for _, tokens in blocks[cut:]) / link.prefill

    assert seconds(link.paying(loaded, upto)) == pytest.approx(min(map(seconds, range(len(blocks) + 1))))


def test_of_equal_cuts_the_longest() -> None:
    assert Link(10.0, 0.0, 40, 1.0).paying([True], [4]) == 1
    assert Link(10.0, 0.0, 41, 1.0).paying([True], [4]) == 0


@given(st.floats(0.001, 9), st.integers(1, 100))
def test_the_least_run_is_the_first_that_pays(latency: float, block_bytes: int) -> None:
    link = Link(10.0, latency, block_bytes, 1.0)
    run = link.least_run(BLOCK)
    if run is None:
        assert block_bytes / link.bandwidth >= BLOCK / link.prefill
    else:
        for blocks in range(max(1, run - 2), run + 2):
            gain = blocks * BLOCK / link.prefill - link.seconds(blocks)
            assert abs(gain) < 1e-9 or (gain > 0) == (blocks >= run)


def test_hit_blocks_is_the_replay_in_short() -> None:
    trace = slow.generated_trace(2)
    served = serve(trace, 4, 30, SharedPlan(80))
    assert hit_blocks(trace, nodes=4, local_blocks=30, shared_blocks=80) == tuple(sum(one.blocks) for one in served)
    assert sum(hit_blocks(trace, nodes=4, local_blocks=30, shared_blocks=0)) == sum(
        sum(one.blocks) for one in serve(trace, 4, 30, None)
    )
