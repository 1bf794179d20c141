"""Estimates of other capacities against full replays, and what they cost in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.replay import simulators as slow
from tests.traces import NAMES, TRACES, block_key, chains, needs_traces, public
from tierkv.errors import ConfigError
from tierkv.insight.spans import SpanSampler
from tierkv.insight.whatif import FACTORS, DiskQuestion, MemoryQuestion, WhatIf, spans_for
from tierkv.policy import POLICIES, EvictionPolicy, make_policy
from tierkv.policy.slru import SLRU
from tierkv.replay.single import replay
from tierkv.replay.tiers import MemoryPlan, TierPlan, replay_tiers
from tierkv.replay.trace import Request, Trace

EVERY_BLOCK = SpanSampler(1, 1)


def policy(name: str) -> Callable[[int], EvictionPolicy[bytes]]:
    return partial(make_policy, name)


def hit_rate(trace: Trace, name: str, capacity: int) -> float:
    return replay(trace, make_policy(name, capacity), capacity) / trace.prompt_tokens()


def fed(what_if: WhatIf, trace: Trace) -> WhatIf:
    for keys in chains(trace):
        what_if.request(keys)
    return what_if


def of_full_blocks(trace: Trace) -> Trace:
    """The same requests, their last block filled up: hits in blocks are then hits in tokens over the block size."""
    requests = [
        Request(request.timestamp, trace.block_tokens * len(request.blocks), request.blocks)
        for request in trace.requests
    ]
    return Trace(tuple(requests), trace.block_tokens)


@given(slow.traces(), st.integers(1, 20), st.sampled_from(sorted(set(POLICIES) - {"aslru"})))
def test_a_sample_of_every_block_is_a_replay(trace: Trace, capacity: int, name: str) -> None:
    what_if = fed(WhatIf([MemoryQuestion("warm", capacity, policy(name))], sampler=EVERY_BLOCK), trace)
    for estimate in what_if.hit_rates():
        assert estimate.blocks == trace.references()
        replayed = replay(of_full_blocks(trace), make_policy(name, estimate.capacity), estimate.capacity)
        assert estimate.hit_blocks * trace.block_tokens == replayed


def test_tiers_and_factors_keep_their_order_and_names() -> None:
    what_if = WhatIf([MemoryQuestion("warm", 100, policy("slru"))], DiskQuestion("cold", 1000, 0.25), factors=(2, 0.5))
    estimates = what_if.hit_rates()
    assert [(e.tier, e.factor, e.capacity) for e in estimates] == [
        *(("warm", 2, 200), ("warm", 0.5, 50)),
        *(("cold", 2, 2000), ("cold", 0.5, 500)),
    ]
    assert all(estimate.hit_rate == 0 for estimate in estimates)


@given(
    slow.traces(),
    *(st.integers(1, 20), st.integers(0, 20)),
    *(st.sampled_from(["lru", "slru"]), st.sampled_from([0.0, 0.25, 1.0])),
)
def test_a_disk_below_memory_finds_what_a_replay_of_both_finds(
    trace: Trace, warm: int, more: int, name: str, clean: float
) -> None:
    trace = of_full_blocks(trace)
    what_if = WhatIf(
        [MemoryQuestion("warm", warm, policy(name))],
        DiskQuestion("cold", warm + more, clean),
        factors=(1, 3),
        sampler=EVERY_BLOCK,
    )
    for estimate in fed(what_if, trace).hit_rates()[2:]:
        replayed = replay_tiers(trace, TierPlan((MemoryPlan("warm", warm, name),), estimate.capacity, clean))
        assert estimate.hit_blocks * trace.block_tokens == sum(map(sum, replayed.tokens))


@pytest.mark.parametrize("clean", [0.0, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_that_fall_off_the_disk_while_in_memory_are_written_again(seed: int, clean: float) -> None:
    trace = of_full_blocks(slow.generated_trace(seed))
    what_if = WhatIf(
        [MemoryQuestion("warm", 30, policy("slru"))], DiskQuestion("cold", 31, clean), factors=(1,), sampler=EVERY_BLOCK
    )
    estimate = fed(what_if, trace).hit_rates()[1]
    replayed = replay_tiers(trace, TierPlan((MemoryPlan("warm", 30, "slru"),), 31, clean))
    assert estimate.hit_blocks * trace.block_tokens == sum(map(sum, replayed.tokens))


@given(slow.traces(), st.integers(4, 20))
def test_a_disk_smaller_than_memory_adds_nothing(trace: Trace, warm: int) -> None:
    questions = [MemoryQuestion("warm", warm, policy("slru"))], DiskQuestion("cold", warm, 0.5)
    memory, disk = fed(WhatIf(*questions, factors=(0.5,), sampler=EVERY_BLOCK), trace).hit_rates()
    (alone,) = fed(WhatIf(questions[0], factors=(1,), sampler=EVERY_BLOCK), trace).hit_rates()
    assert disk.hit_blocks == alone.hit_blocks >= memory.hit_blocks


@pytest.mark.parametrize(
    ("tiers", "factors"),
    [
        ([], FACTORS),
        ([MemoryQuestion("warm", 0, policy("lru"))], FACTORS),
        ([MemoryQuestion("warm", 10, policy("lru"))], ()),
        ([MemoryQuestion("warm", 10, policy("lru"))], (1.0, 0.0)),
    ],
)
def test_impossible_questions_are_refused(tiers: list[MemoryQuestion], factors: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError):
        WhatIf(tiers, factors=factors)


def test_memory_is_bounded_by_the_capacity_however_much_passes() -> None:
    what_if = WhatIf([MemoryQuestion("warm", 400, policy("slru"))])
    most = sum(map(int, (400 * factor for factor in FACTORS)))
    for number in range(5000):
        what_if.request([block_key(number)])
        assert what_if.entries() <= most
    assert what_if.entries() == most


def test_a_wider_first_span_samples_prompts_of_one_block_too() -> None:
    prompts, one_in = 30_000, 16
    question = MemoryQuestion("warm", 2**22, policy("lru"))
    what_if = WhatIf([question], factors=(1,), sampler=spans_for(2**22, narrowest=one_in))
    for number in range(prompts):
        what_if.request([block_key(number)])
    assert 0.8 < what_if.entries() * one_in / prompts < 1.2


def test_a_first_block_that_all_prompts_share_is_seen_whatever_it_is_called() -> None:
    """The choice within a first span of several blocks would be one for all prompts."""
    for first in range(8):
        what_if = WhatIf([MemoryQuestion("warm", 2**22, policy("lru"))], factors=(1,))
        for number in range(100):
            what_if.request([block_key(first), block_key(1000 + number)])
        assert what_if.hit_rates()[0].hit_rate > 0.3


def test_small_caches_are_hardly_sampled_and_large_ones_more() -> None:
    chain = [block_key(number) for number in range(2000)]
    picked = [len(spans_for(capacity).sample(chain)) for capacity in (32, 320, 3200, 32_000, 1_000_000)]
    assert picked[0] == len(chain)
    assert picked == sorted(picked, reverse=True)
    assert picked[-1] < len(chain) / 100


@needs_traces
@pytest.mark.parametrize("name", NAMES)
def test_public_traces_are_estimated_within_two_hundredths(name: str) -> None:
    reference: dict[str, Any] = json.loads((TRACES / "golden.json").read_text())[name]
    policies: dict[str, Callable[[int], EvictionPolicy[bytes]]] = {
        "lru_tail_first": policy("lru"),
        "slru_50pct_ghost2": partial(SLRU, protected=0.5, ghost=2.0),
    }
    questions = [
        MemoryQuestion(f"{rule} {capacity}", int(capacity), build)
        for capacity in reference["caps"]
        for rule, build in policies.items()
    ]
    for estimate in fed(WhatIf(questions, factors=(1,)), public(name)).hit_rates():
        rule, capacity = estimate.tier.split()
        exact = reference["caps"][capacity][rule] / reference["prompt_tokens"]
        assert estimate.hit_rate == pytest.approx(exact, abs=0.02), estimate


@needs_traces
@pytest.mark.parametrize("name", NAMES)
def test_the_default_policy_is_estimated_on_public_traces(name: str) -> None:
    trace = public(name)
    what_if = WhatIf([MemoryQuestion("warm", trace.unique_blocks() // 20, policy("aslru"))], factors=(0.5, 2))
    for estimate in fed(what_if, trace).hit_rates():
        exact = hit_rate(trace, "aslru", estimate.capacity)
        # The policy's own choices, by a sample of the sample, are an accident of hash() now and then.
        assert estimate.hit_rate == pytest.approx(exact, abs=0.03), estimate


@needs_traces
@pytest.mark.parametrize("clean", [0.25, 1.0])
def test_a_disk_is_estimated_on_a_public_trace(clean: float) -> None:
    trace = public("mooncake_synthetic_full.jsonl.gz")
    warm, cold = trace.unique_blocks() // 20, trace.unique_blocks() // 10
    what_if = WhatIf([MemoryQuestion("warm", warm, policy("slru"))], DiskQuestion("cold", cold, clean), factors=(1, 2))
    for estimate in fed(what_if, trace).hit_rates()[2:]:
        replayed = replay_tiers(trace, TierPlan((MemoryPlan("warm", warm, "slru"),), estimate.capacity, clean))
        assert estimate.hit_rate == pytest.approx(sum(map(sum, replayed.tokens)) / trace.prompt_tokens(), abs=0.02)
