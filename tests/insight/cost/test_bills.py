"""Bills worked out by hand, to the cent."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given

from tests.insight.cost.lists import BLOCK, CACHED, bill, by_tokens, money, traffic
from tests.replay import simulators as slow
from tierkv.errors import ConfigError
from tierkv.insight.cost.prices import GPUPlan, TokenPlan
from tierkv.insight.cost.traffic import Traffic
from tierkv.insight.cost.usage import provider_usage
from tierkv.replay.single import ideal_hit_tokens

# A block of 100,000 tokens costs .30 plain, .03 read, .375 written.


def test_flat_prices() -> None:
    flat = bill(
        TokenPlan.model_validate({"input": 3, "output": 15}), traffic([(0, (1, 2)), (1, (1, 2))], answer=10_000)
    )
    assert money(flat) == {"input": "1.20", "output": "0.30", "total": "1.50"}
    assert flat.overestimate == 1
    assert flat.output_share == pytest.approx(0.2)


def test_a_read_renews_an_entry_and_at_its_time_it_is_gone() -> None:
    calls = [(0, (1, 2)), (299.999, (1, 2)), (599.998, (1, 2)), (899.998, (1, 2))]
    assert money(by_tokens(traffic(calls, answer=10_000))) == {
        "cached_input": "0.12",  # 400,000 tokens: the second and the third call
        "cache_write": "1.50",  # 400,000 tokens: the first and, 300 s after the third, the fourth
        "output": "0.60",
        "total": "2.22",
    }


def test_an_hour_outlives_what_five_minutes_do_not() -> None:
    calls = [(0, (1, 2)), (3599, (1, 2)), (7199, (1, 2))]
    assert money(by_tokens(traffic(calls), ttl="1h", cache_write=6)) == {
        "cached_input": "0.06",  # the second call
        "cache_write": "2.40",  # the first and the third
        "total": "2.46",
    }
    assert money(by_tokens(traffic(calls))) == {"cache_write": "2.25", "total": "2.25"}


def test_a_surcharge_is_paid_for_new_tokens_only() -> None:
    calls = [(0, (1, 2)), (10, (1, 2, 3, 4)), (20, (1, 5))]
    assert money(by_tokens(traffic(calls))) == {
        "cached_input": "0.09",  # blocks 1 2, then block 1
        "cache_write": "1.88",  # 5 blocks: 1.875, half up
        "total": "1.97",
    }
    assert money(by_tokens(traffic(calls), cache_write=None)) == {
        "cached_input": "0.09",
        "cache_write": "1.50",
        "total": "1.59",
    }


def test_breakpoints_at_the_end_of_prompts_find_whole_prompts_only() -> None:
    calls = [(0, (1, 2)), (10, (1, 2, 3)), (20, (1, 5)), (30, (1, 2, 3, 4))]
    found = by_tokens(traffic(calls), breakpoints="prompt")
    assert (found.usage.read, found.usage.written) == (5 * BLOCK, 6 * BLOCK)
    assert money(found) == {"cached_input": "0.15", "cache_write": "2.25", "total": "2.40"}
    assert by_tokens(traffic(calls)).usage.read == 6 * BLOCK


def test_a_breakpoint_lives_as_long_as_it_is_read() -> None:
    calls = [(0, (1,)), (200, (1, 2)), (400, (1, 3)), (690, (1, 2))]
    # At 400 the entry (1) is read once more; at 690 it is still there, (1, 2) of 200 is not.
    assert by_tokens(traffic(calls), breakpoints="prompt").usage.read == 3 * BLOCK


@pytest.mark.parametrize(
    ("minimum", "expected"),
    [
        (200_000, {"cached_input": "0.06", "cache_write": "0.75", "total": "0.81"}),
        (200_001, {"input": "1.20", "total": "1.20"}),
    ],
)
def test_prompts_below_the_minimum_are_neither_written_nor_read(minimum: int, expected: dict[str, str]) -> None:
    assert money(by_tokens(traffic([(0, (1, 2)), (1, (1, 2))]), minimum_tokens=minimum)) == expected


def test_a_shared_prefix_below_the_minimum_is_not_read() -> None:
    calls = [(0, (1, 2, 3)), (1, (1, 4, 5))]
    assert by_tokens(traffic(calls), minimum_tokens=200_000).usage.read == 0
    assert by_tokens(traffic(calls), minimum_tokens=100_000).usage.read == BLOCK


def test_the_rest_behind_the_last_whole_block_is_plain_input() -> None:
    found = by_tokens(traffic([(0, (1, 2, 3)), (1, (1, 2, 3))], partial=50_000))
    assert money(found) == {
        "input": "0.30",  # twice 50,000
        "cached_input": "0.06",
        "cache_write": "0.75",
        "total": "1.11",
    }


def test_an_agent_loop_costs_a_seventh_of_a_flat_estimate() -> None:
    # A prompt of 20,000 tokens grows by 1,000 in each of 50 turns: 2,225,000 tokens are sent, 69,000 are distinct.
    turns = [(30.0 * turn, tuple(range(20 + turn))) for turn in range(50)]
    loop = by_tokens(traffic(turns, answer=200, block=1000))
    assert money(loop) == {"cached_input": "0.65", "cache_write": "0.26", "output": "0.15", "total": "1.06"}
    assert loop.flat_input == Decimal("6.68")
    assert loop.distinct_input == Decimal("0.21")
    assert loop.overestimate == pytest.approx(7.34, abs=0.01)
    assert loop.output_share == pytest.approx(0.1415, abs=0.0001)


def test_slow_turns_cost_more_than_a_flat_estimate() -> None:
    turns = [(301.0 * turn, tuple(range(20 + turn))) for turn in range(50)]
    loop = by_tokens(traffic(turns, answer=200, block=1000))
    assert money(loop) == {"cache_write": "8.34", "output": "0.15", "total": "8.49"}
    assert loop.overestimate == pytest.approx(0.8, abs=0.001)


def test_hardware_of_ones_own() -> None:
    # 3.60 an hour and 1,000 tokens a second: .10 for 100,000 prompt tokens. Half an hour of memory.
    prices = {"gpu_hour": 3.60, "prefill_tokens_per_s": 1000, "decode_tokens_per_s": 100}
    calls = traffic([(0, (1, 2)), (900, (1, 2, 3)), (1800, (4,))], answer=1000)
    assert money(bill(GPUPlan.model_validate(prices), calls)) == {"input": "0.60", "output": "0.03", "total": "0.63"}
    memory = {"memory": "2GiB", "memory_gib_month": 73, "bytes_per_token": 1, "policy": "lru"}
    cached = bill(GPUPlan.model_validate(prices | memory), calls)
    assert money(cached) == {"input": "0.40", "output": "0.03", "storage": "0.10", "total": "0.53"}
    assert cached.usage.read == 2 * BLOCK
    assert cached.overestimate == pytest.approx(1.2)


def test_memory_without_room_for_a_block_is_refused() -> None:
    prices = {"gpu_hour": 1, "prefill_tokens_per_s": 1, "decode_tokens_per_s": 1, "memory": "1MiB"}
    with pytest.raises(ConfigError, match="no room") as caught:
        bill(GPUPlan.model_validate(prices), traffic([(0, (1,))]))
    assert "bytes_per_token" in caught.value.remedy


@pytest.mark.parametrize(
    ("price", "tokens", "cents"),
    [("0.30", 1_650_000, "0.50"), (1, 5_000, "0.01"), (1, 4_999, "0.00"), (0.1, 10**17, "10000000000.00")],
)
def test_only_the_cent_rounds_half_up(price: str | float, tokens: int, cents: str) -> None:
    plan = TokenPlan.model_validate({"input": price, "output": 0})
    assert str(bill(plan, traffic([(0, (1,))], block=tokens)).input) == cents


def test_an_empty_trace_costs_nothing() -> None:
    assert money(by_tokens(traffic([]))) == {}


@given(slow.traces())
def test_an_endless_ttl_reads_what_a_cache_that_never_evicts_has(trace: slow.Trace) -> None:
    # Whole blocks only: the partial ones at the ends of prompts are not cached.
    plan = TokenPlan.model_validate(CACHED | {"ttl": "9999999d"})
    usage = provider_usage(Traffic(trace, (0,) * len(trace.requests)), plan)
    assert usage.prompt == trace.prompt_tokens()
    assert usage.read <= ideal_hit_tokens(trace)
    whole = [request for request in trace.requests if request.tokens % trace.block_tokens == 0]
    exact = slow.Trace(tuple(whole), trace.block_tokens)
    assert provider_usage(Traffic(exact, (0,) * len(whole)), plan).read == ideal_hit_tokens(exact)
