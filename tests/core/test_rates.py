"""Measured speeds: throughput under parallel loads, fading, borrowing, and prefill rates that pauses do not spoil."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.core.rates import DeliveryRates, PrefillRates

KIB = 1 << 10
COLD = 2


def pool(threads: int, latencies: list[float], began: float = 0.0) -> list[tuple[float, float]]:
    """Start and end of each load on a pool of threads that are never idle, in the order of their ends."""
    free = [began] * threads
    spans = []
    for latency in latencies:
        start = heapq.heappop(free)
        heapq.heappush(free, start + latency)
        spans.append((start, start + latency))
    return sorted(spans, key=lambda span: span[1])


def learned(spans: list[tuple[float, float]], nbytes: int = 256 * KIB) -> DeliveryRates:
    rates = DeliveryRates()
    for started, ended in spans:
        rates.note(COLD, nbytes, started, ended)
    return rates


@given(threads=st.integers(1, 4), latency=st.floats(1e-4, 10.0))
def test_parallel_loads_are_measured_by_what_they_deliver_together(threads: int, latency: float) -> None:
    spans = pool(threads, [latency] * 60 * threads)
    estimate = learned(spans).estimate(COLD, 256 * KIB, spans[-1][1])
    assert estimate is not None
    assert estimate.seconds_per_block == pytest.approx(latency / threads, rel=0.1)


@given(
    threads=st.integers(1, 6),
    latencies=st.lists(st.floats(0.1, 1.0), min_size=20, max_size=60),
    data=st.data(),
)
def test_reports_in_any_order_never_count_time_twice(threads: int, latencies: list[float], data: st.DataObject) -> None:
    """The gaps of a busy tier add up to the busy time; a report that overtook another makes some gaps 0, none less."""
    spans = data.draw(st.permutations(pool(threads, latencies)))
    estimate = learned(list(spans)).estimate(COLD, 256 * KIB, max(ended for _, ended in spans))
    assert estimate is not None
    assert 0.0 <= estimate.seconds_per_block <= max(latencies)


def test_a_report_that_was_overtaken_does_not_set_the_tier_back() -> None:
    estimate = learned([(0.0, 10.0), (0.0, 4.0), (2.0, 12.0)]).estimate(COLD, 256 * KIB, 12.0)
    assert estimate is not None
    assert estimate.seconds_per_block == pytest.approx((10.0 + 0.0 + 2.0) / 3, rel=0.05)


def test_the_time_a_tier_had_nothing_to_do_is_not_its_own() -> None:
    estimate = learned([(10.0 * n, 10.0 * n + 1.0) for n in range(5)]).estimate(COLD, 256 * KIB, 41.0)
    assert estimate is not None
    assert estimate.seconds_per_block == pytest.approx(1.0)


def test_nothing_is_known_of_a_tier_that_has_delivered_nothing() -> None:
    rates = learned([(0.0, 1.0)])
    assert rates.estimate(1, 256 * KIB, 1.0) is None
    assert rates.estimate(COLD, 256 * KIB, 1.0) is not None


def test_tiers_do_not_share_their_last_delivery() -> None:
    rates = DeliveryRates()
    rates.note(1, 256 * KIB, 0.0, 0.9)
    rates.note(COLD, 256 * KIB, 0.0, 1.0)
    estimate = rates.estimate(COLD, 256 * KIB, 1.0)
    assert estimate is not None
    assert estimate.seconds_per_block == pytest.approx(1.0)


def test_another_size_borrows_from_the_nearest_by_bytes_and_is_less_certain() -> None:
    rates = DeliveryRates()
    for n in range(20):
        rates.note(COLD, 64 * KIB, n, n + 0.5)
        rates.note(COLD, 1024 * KIB, n + 0.5, n + 0.9)
    own, near = rates.estimate(COLD, 64 * KIB, 20.0), rates.estimate(COLD, 128 * KIB, 20.0)
    assert own is not None
    assert near is not None
    assert own.seconds_per_block == pytest.approx(0.5)
    assert near.seconds_per_block == pytest.approx(1.0)
    assert near.samples == pytest.approx(own.samples / 2)
    assert near.deviation_s > 2 * own.deviation_s


def test_sizes_within_a_class_are_told_apart_by_bytes() -> None:
    rates = learned([(float(n), n + 0.6) for n in range(20)], nbytes=300 * KIB)
    estimate = rates.estimate(COLD, 400 * KIB, 20.0)
    assert estimate is not None
    assert estimate.seconds_per_block == pytest.approx(0.8)


def test_a_single_sample_says_nothing_of_a_block_a_thousand_times_as_large() -> None:
    rates = learned([(0.0, 0.001)], nbytes=KIB)
    assert rates.estimate(COLD, 2 * KIB, 0.001) is not None
    assert rates.estimate(COLD, KIB * KIB, 0.001) is None


def test_old_knowledge_becomes_uncertain_and_then_none() -> None:
    spans = pool(1, [0.01] * 500)
    rates, now = learned(spans), spans[-1][1]
    ages = (0.0, 60.0, 120.0, 240.0)
    found = [rates.estimate(COLD, 256 * KIB, now + age) for age in ages]
    assert [estimate.age_s for estimate in found if estimate] == pytest.approx(ages)
    deviations = [estimate.deviation_s for estimate in found if estimate]
    assert deviations == sorted(set(deviations))
    assert deviations[0] < 0.01 * 0.05
    assert all(estimate and estimate.seconds_per_block == pytest.approx(0.01) for estimate in found)
    assert rates.estimate(COLD, 256 * KIB, now + 900.0) is None


@pytest.mark.parametrize(("before", "after"), [(0.001, 0.1), (0.1, 0.001)])
def test_a_tier_that_changes_its_speed_is_followed_within_some_half_lives(before: float, after: float) -> None:
    spans = pool(1, [before] * 300)
    spans += pool(1, [after] * 320, began=spans[-1][1])
    estimate = learned(spans).estimate(COLD, 256 * KIB, spans[-1][1])
    assert estimate is not None
    assert estimate.seconds_per_block == pytest.approx(after, rel=0.15)


def test_an_old_sample_hardly_weighs_against_a_new_one() -> None:
    rates = learned([(0.0, 1.0), (600.0, 600.1)])
    estimate = rates.estimate(COLD, 256 * KIB, 600.1)
    assert estimate is not None
    assert estimate.seconds_per_block == pytest.approx(0.1, rel=0.02)


def test_a_prefill_rate_is_that_of_its_own_namespace() -> None:
    rates = PrefillRates()
    rates.learn("a", 1000, 0.5)
    rates.learn("b", 1000, 2.0)
    assert rates.tokens_per_s("a") == pytest.approx(2000.0)
    assert rates.tokens_per_s("b") == pytest.approx(500.0)
    assert rates.tokens_per_s("c") is None


@given(pauses=st.sets(st.integers(0, 29), max_size=7), pause=st.floats(1.0, 1e6))
def test_pauses_do_not_spoil_the_prefill_rate(pauses: set[int], pause: float) -> None:
    rates = PrefillRates()
    for n in range(30):
        rates.learn("a", 512, 0.1 + pause if n in pauses else 0.1 + 0.0001 * (n % 3))
    rate = rates.tokens_per_s("a")
    assert rate == pytest.approx(5120.0, rel=0.01)


def test_one_pause_among_two_samples_is_told_from_the_rate() -> None:
    for seconds in ((0.1, 60.0), (60.0, 0.1)):
        rates = PrefillRates()
        for taken in seconds:
            rates.learn("a", 100, taken)
        assert rates.tokens_per_s("a") == pytest.approx(1000.0)


def test_a_new_prefill_rate_replaces_the_old() -> None:
    rates = PrefillRates()
    for seconds in [1.0] * 100 + [0.1] * 8:
        rates.learn("a", 100, seconds)
    assert rates.tokens_per_s("a") == pytest.approx(1000.0)


def test_a_commit_without_tokens_or_time_teaches_nothing() -> None:
    rates = PrefillRates()
    for tokens, seconds in ((0, 1.0), (16, 0.0), (16, -1.0)):
        rates.learn("a", tokens, seconds)
    assert rates.tokens_per_s("a") is None


def test_namespaces_that_have_not_learned_for_long_are_forgotten() -> None:
    rates = PrefillRates()
    for n in range(1024):
        rates.learn(f"n{n}", 100, 1.0)
    rates.learn("n0", 100, 1.0)
    rates.learn("new", 100, 1.0)
    assert rates.tokens_per_s("n1") is None
    assert all(rates.tokens_per_s(name) for name in ("n0", "n2", "n1023", "new"))
