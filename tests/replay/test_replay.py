"""Replays against slow, obvious simulators, and against the integers an independent implementation counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.replay import simulators as slow
from tests.traces import NAMES, TRACES, needs_traces, public
from tierkv.errors import ConfigError, InvalidRequest
from tierkv.policy import make_policy
from tierkv.replay.belady import belady_hit_tokens
from tierkv.replay.run import capacity_in_blocks, run_policy
from tierkv.replay.sessions import session_ends
from tierkv.replay.single import ideal_hit_tokens, replay
from tierkv.replay.tiers import MemoryPlan, TierPlan, replay_tiers
from tierkv.replay.trace import Trace


def lru(trace: Trace, capacity: int) -> int:
    return replay(trace, make_policy("lru", capacity), capacity)


@given(slow.traces(), st.integers(1, 40))
def test_hits_are_those_of_the_slow_simulators(trace: Trace, capacity: int) -> None:
    assert lru(trace, capacity) == slow.slow_lru(trace, capacity)
    assert belady_hit_tokens(trace, capacity) == slow.slow_belady(trace, capacity)
    assert ideal_hit_tokens(trace) == slow.slow_ideal(trace)


def assert_tiers_agree(trace: Trace, warm: int, policy: str, cold: int, clean: float) -> None:
    hits = replay_tiers(trace, TierPlan((MemoryPlan("warm", warm, policy),), cold, clean))
    by_tier = [sum(tokens) for tokens in zip(*hits.tokens, strict=True)]
    assert (*by_tier, hits.cold_writes) == slow.slow_two_tiers(trace, warm, policy, cold, clean)


@given(slow.traces(), st.integers(1, 20), st.integers(0, 20), st.sampled_from([0.0, 0.25, 1.0]))
def test_tiers_are_those_of_the_slow_simulator(trace: Trace, warm: int, more: int, clean: float) -> None:
    assert_tiers_agree(trace, warm, "lru", warm + more, clean)


@pytest.mark.parametrize("clean", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("policy", ["slru", "arc"])
def test_blocks_that_fall_out_of_the_cold_tier_are_written_again(policy: str, clean: float) -> None:
    for seed in range(3):
        assert_tiers_agree(slow.generated_trace(seed), 30, policy, 31, clean)


@pytest.mark.parametrize("seed", range(3))
def test_a_generated_trace(seed: int) -> None:
    trace = slow.generated_trace(seed)
    ends = session_ends(trace)
    for capacity in (5, 20, 60, 2000):
        assert lru(trace, capacity) == slow.slow_lru(trace, capacity)
        assert belady_hit_tokens(trace, capacity) == slow.slow_belady(trace, capacity)
        with_ends = replay(trace, make_policy("lru", capacity), capacity, ends=ends)
        assert with_ends == slow.slow_lru(trace, capacity, ends)
    assert lru(trace, 2000) == ideal_hit_tokens(trace) == slow.slow_ideal(trace) > 0


@settings(max_examples=30)
@given(slow.traces(), st.integers(1, 20))
def test_a_tier_alone_is_a_single_cache(trace: Trace, capacity: int) -> None:
    hits = replay_tiers(trace, TierPlan((MemoryPlan("warm", capacity, "slru"),), 0, 0.25))
    assert sum(map(sum, hits.tokens)) == replay(trace, make_policy("slru", capacity), capacity)
    assert hits.cold_writes == 0


def test_a_hot_tier_delivers_before_the_warm_one() -> None:
    trace = slow.generated_trace(1)
    plan = TierPlan((MemoryPlan("hot", 20, "lru"), MemoryPlan("warm", 60, "lru")), 0, 0.25)
    hot, warm = (sum(tokens) for tokens in zip(*replay_tiers(trace, plan).tokens, strict=True))
    # Prefix-closed LRUs of which the larger holds all the smaller one holds.
    assert hot == lru(trace, 20)
    assert hot + warm == lru(trace, 60)


def test_plans_that_cannot_be() -> None:
    trace = slow.generated_trace(1)
    with pytest.raises(ConfigError, match="warm tier has no room"):
        replay_tiers(trace, TierPlan((MemoryPlan("warm", 0, "lru"),), 0, 0.25))
    with pytest.raises(ConfigError, match="cold tier is smaller"):
        replay_tiers(trace, TierPlan((MemoryPlan("warm", 9, "lru"),), 8, 0.25))
    with pytest.raises(InvalidRequest, match="no blocks"):
        run_policy(Trace(()), "lru", 4, {})


def test_capacities_are_shares_of_the_distinct_blocks() -> None:
    trace = slow.generated_trace(1)
    assert capacity_in_blocks(trace, "100%") == trace.unique_blocks()
    assert capacity_in_blocks(trace, " 2.5 %") == int(trace.unique_blocks() / 40)
    assert capacity_in_blocks(trace, "0.0001%") == 1
    for wrong in ("5", "0%", "-1%", "101%", "%", "nan%", "5%%", "five%"):
        with pytest.raises(ConfigError, match="not a share"):
            capacity_in_blocks(trace, wrong)


@needs_traces
@pytest.mark.parametrize("name", NAMES)
def test_the_reference_integers(name: str) -> None:
    reference: dict[str, Any] = json.loads((TRACES / "golden.json").read_text())[name]
    trace = public(name)
    assert len(trace.requests) == reference["requests"]
    assert trace.prompt_tokens() == reference["prompt_tokens"]
    assert trace.references() == reference["block_refs"]
    assert trace.unique_blocks() == reference["unique_blocks"]
    assert ideal_hit_tokens(trace) == reference["infinite_hit_tokens"]
    for blocks, counted in reference["caps"].items():
        capacity = int(blocks)
        assert lru(trace, capacity) == counted["lru_tail_first"]
        slru = make_policy("slru", capacity, protected=0.5, ghost=2)
        assert replay(trace, slru, capacity) == counted["slru_50pct_ghost2"]
        assert belady_hit_tokens(trace, capacity) == counted["belady"]


@needs_traces
@pytest.mark.parametrize(
    ("name", "known"),
    [("mooncake_conversation_full.jsonl.gz", 0.371), ("mooncake_synthetic_full.jsonl.gz", 0.604)],
)
def test_two_tiers_find_what_is_known(name: str, known: float) -> None:
    trace = public(name)
    unique = trace.unique_blocks()
    plan = TierPlan((MemoryPlan("warm", unique // 20, "slru"),), unique // 2, 0.0)
    found = sum(map(sum, replay_tiers(trace, plan).tokens))
    assert found / trace.prompt_tokens() == pytest.approx(known, abs=0.005)


@needs_traces
def test_ends_of_sessions_save_the_conversation_trace() -> None:
    trace = public("mooncake_conversation_full.jsonl.gz")
    capacity = capacity_in_blocks(trace, "5%")
    assert run_policy(trace, "slru", capacity, {}, end_hints=True).hit_tokens > 0.36 * trace.prompt_tokens()


@needs_traces
@pytest.mark.parametrize("name", NAMES)
def test_aslru_is_never_much_worse_than_lru(name: str) -> None:
    trace = public(name)
    for share in ("1%", "5%", "25%"):
        capacity = capacity_in_blocks(trace, share)
        found = replay(trace, make_policy("aslru", capacity), capacity)
        assert found - lru(trace, capacity) > -0.01 * trace.prompt_tokens()
