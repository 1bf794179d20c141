"""Plans against replays: exact ones are replays, sampled ones come close, and say how close."""

from __future__ import annotations

import json
from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.replay import simulators as slow
from tests.traces import NAMES, TRACES, needs_traces, public
from tierkv.errors import ConfigError, InvalidRequest
from tierkv.insight.plan.points import Figure, Plan, Point, make_plan
from tierkv.insight.plan.question import Prices, Question, Speeds, default_sizes
from tierkv.replay.costs import Costs, worth
from tierkv.replay.tiers import MemoryPlan, TierPlan, replay_tiers
from tierkv.replay.trace import Request, Trace

SPEEDS = Speeds(prefill=1000, ram=64_000, disk=16_000)


def question(
    ram: tuple[int, ...],
    disk: tuple[int, ...] = (0,),
    policies: tuple[str, ...] = ("lru",),
    prices: Prices | None = None,
    block_tokens: int = 4,
) -> Question:
    """Blocks of 1 byte: sizes are then in blocks."""
    return Question(policies, ram, disk, 1, block_tokens, SPEEDS, prices=prices)


def plan(trace: Trace, about: Question, samples: int) -> Plan:
    return make_plan(trace, about, samples, lambda: None)


def figures(point: Point) -> dict[str, float]:
    names = ("hit_rate", "ram_hit_rate", "ttft_mean_s", "ttft_p50_s", "ttft_p95_s")
    return {name: getattr(point, name).value for name in names}


@pytest.mark.parametrize(("ram", "disk"), [(20, 0), (20, 60), (30, 30)])
@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_an_exact_plan_is_a_replay(policy: str, ram: int, disk: int) -> None:
    trace = slow.generated_trace(1)
    (point,) = plan(trace, question((ram,), (disk,), (policy,)), 0).points
    replayed = replay_tiers(trace, TierPlan((MemoryPlan("ram", ram, policy),), disk, 0.25))
    tokens = [(*each, 0)[:2] for each in replayed.tokens]
    costs = Costs(1, SPEEDS.prefill, {"ram": 4 * SPEEDS.ram, "disk": 4 * SPEEDS.disk})  # 4 tokens make 1 byte
    times = worth(trace, ("ram", "disk"), tokens, costs).cached
    assert figures(point) == pytest.approx(
        {
            "hit_rate": sum(map(sum, tokens)) / trace.prompt_tokens(),
            "ram_hit_rate": sum(near for near, _ in tokens) / trace.prompt_tokens(),
            "ttft_mean_s": times.mean,
            "ttft_p50_s": times.p50,
            "ttft_p95_s": times.p95,
        }
    )
    assert point.hit_rate.error == 0


@given(
    slow.traces(),
    st.integers(1, 20),
    *(st.integers(0, 20), st.sampled_from(["lru", "slru", "arc", "s3fifo"])),
)
def test_small_caches_are_sampled_in_full(trace: Trace, ram: int, more: int, policy: str) -> None:
    about = question((ram, ram + 1), (0, ram + 1 + more), (policy,))
    for sampled, exact in zip(plan(trace, about, 2).points, plan(trace, about, 0).points, strict=True):
        assert sampled.setup == exact.setup
        assert figures(sampled) == pytest.approx(figures(exact))
        assert sampled.hit_rate.error == pytest.approx(0)


def test_the_baseline_is_prefill_of_everything() -> None:
    requests = [Request(0, 4, (1,)), Request(1800_000, 8, (1, 2)), Request(3600_000, 3, (3,))]
    base = plan(Trace(tuple(requests), 4), question((8,), prices=Prices(2, 3, 1)), 0).baseline
    assert (base.requests, base.prompt_tokens, base.total_bytes, base.span_s) == (3, 15, 3, 3600)
    assert base.ideal_hit_rate == 4 / 15
    assert (base.ttft_mean_s, base.ttft_p50_s) == pytest.approx((0.005, 0.004))
    assert base.cost_per_hour == pytest.approx(2 * 0.015 / 3600)


def test_costs_are_storage_and_prefill_of_what_was_missed() -> None:
    requests = [Request(0, 4, (1,)), Request(3600_000, 8, (1, 2))]
    about = Question(("lru",), (2**30,), (2**31,), 2**20, 4, SPEEDS, prices=Prices(10, 73, 7.3))
    (point,) = plan(Trace(tuple(requests), 4), about, 0).points
    assert point.cost_per_hour is not None
    assert point.cost_per_hour.value == pytest.approx(0.1 + 0.02 + 10 * 8 / 1000 / 3600)


def test_one_sample_has_no_error_bar() -> None:
    (point,) = plan(slow.generated_trace(0), question((50,)), 1).points
    assert point.hit_rate.error is None


def test_progress_counts_every_configuration_of_every_sample() -> None:
    about = question((10, 20), (0, 30), ("lru", "slru"))
    for samples, times in ((3, 3), (0, 1)):
        done: list[None] = []
        make_plan(slow.generated_trace(0), about, samples, lambda done=done: done.append(None))  # type: ignore[misc]
        assert len(done) == times * len(about.setups()) == times * 8


def test_disks_smaller_than_memory_are_left_out() -> None:
    setups = question((10, 40), (0, 20)).setups()
    assert [(setup.ram_bytes, setup.disk_bytes) for setup in setups] == [(10, 0), (40, 0), (10, 20)]


def test_impossible_questions_name_the_remedy() -> None:
    for broken in (
        lambda: question((10,), policies=("lfu",)),
        lambda: question((10,), policies=()),
        lambda: question((10,), (5,)),
        lambda: Question(("lru",), (10,), (0,), 11, 4, SPEEDS),
    ):
        with pytest.raises(ConfigError) as caught:
            broken()
        assert caught.value.remedy
    with pytest.raises(InvalidRequest):
        plan(Trace((), 4), question((10,)), 2)


@given(st.integers(1, 2**50))
def test_default_sizes_reach_from_a_part_to_everything(total: int) -> None:
    ram, disk = default_sizes(total)
    assert ram[-1] == disk[-1] >= total
    assert ram[-1] < 2 * total
    assert all(2 * less == more for less, more in pairwise(ram))
    assert disk[0] == 0


@needs_traces
@pytest.mark.parametrize("name", NAMES)
def test_samples_of_public_traces_come_close(name: str) -> None:
    reference: dict[str, Any] = json.loads((TRACES / "golden.json").read_text())[name]
    capacities = tuple(map(int, reference["caps"]))
    about = question(capacities, block_tokens=512)
    far = []
    for point in plan(public(name), about, 4).points:
        exact = reference["caps"][str(point.setup.ram_bytes)]["lru_tail_first"] / reference["prompt_tokens"]
        assert point.hit_rate.value == pytest.approx(exact, abs=0.01)
        assert point.hit_rate.error is not None
        far.append(abs(point.hit_rate.value - exact) - point.hit_rate.error)
    assert fmean(far) < 0.001


@needs_traces
def test_two_tiers_of_a_public_trace_come_close() -> None:
    trace = public("mooncake_synthetic_full.jsonl.gz")
    about = question((1000, 4000), (0, 4000, 16_000), ("slru",), block_tokens=512)
    for sampled, exact in zip(plan(trace, about, 4).points, plan(trace, about, 0).points, strict=True):
        assert sampled.hit_rate.value == pytest.approx(exact.hit_rate.value, abs=0.01)
        assert sampled.ram_hit_rate.value == pytest.approx(exact.ram_hit_rate.value, abs=0.01)
        assert sampled.ttft_mean_s.value == pytest.approx(exact.ttft_mean_s.value, rel=0.02)


def test_a_figure_is_the_mean_and_two_standard_errors() -> None:
    trace = slow.generated_trace(3)
    about = question((640,), block_tokens=4)
    single = [figure.value for figure in _each_sample(trace, about, 6)]
    (point,) = plan(trace, about, 6).points
    spread = (sum((value - fmean(single)) ** 2 for value in single) / 5) ** 0.5
    assert point.hit_rate == Figure(pytest.approx(fmean(single)), pytest.approx(2 * spread / 6**0.5))


def _each_sample(trace: Trace, about: Question, count: int) -> list[Figure]:
    """Estimates of single samples, from sums of one sample more at a time."""
    means = [plan(trace, about, samples).points[0].hit_rate.value for samples in range(1, count + 1)]
    sums = [number * mean for number, mean in enumerate(means, start=1)]
    return [Figure(after - before, None) for before, after in zip([0.0, *sums], sums, strict=False)]
