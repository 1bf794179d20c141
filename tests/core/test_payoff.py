"""Compute or load: the best cut, and what waiting costs against simulated loads of every temper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.core.payoff import TOLERANCE, Decision, Patience, decide, quiet_s

TIGHT = 1e-9
Costs = list[float | None]


def total_s(costs: Sequence[float | None], block_s: float, cut: int) -> float:
    return sum(cost or 0.0 for cost in costs[:cut]) + (len(costs) - cut) * block_s


costs_lists = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 10.0), st.none()), max_size=30)


@given(costs=costs_lists, block_s=st.floats(1e-3, 10.0))
def test_no_cut_is_better_and_the_numbers_are_those_of_the_cut(costs: Costs, block_s: float) -> None:
    made = decide(costs, block_s)
    assert made.hit_blocks == len(costs)
    assert made.ready_blocks <= made.load_blocks <= made.hit_blocks
    assert all(cost == 0.0 for cost in costs[: made.ready_blocks])
    least = min(total_s(costs, block_s, cut) for cut in range(len(costs) + 1))
    assert total_s(costs, block_s, made.load_blocks) == pytest.approx(least)
    assert made.load_s == pytest.approx(total_s(costs, 0.0, made.load_blocks))
    assert made.load_s + made.left_load_s == pytest.approx(total_s(costs, 0.0, len(costs)))
    assert made.recompute_s + made.left_recompute_s == pytest.approx((len(costs) - made.ready_blocks) * block_s)
    assert made.load_s <= made.recompute_s + TIGHT


@given(costs=costs_lists)
def test_without_a_prefill_rate_all_is_loaded(costs: Costs) -> None:
    made = decide(costs, None)
    assert made.load_blocks == len(costs)
    assert (made.recompute_s, made.left_recompute_s) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("costs", "block_s", "load_blocks", "reason"),
    [
        ([], 1.0, 0, "miss"),
        ([0.0, 0.0], 1.0, 2, "in_memory"),
        ([0.0, 0.0], None, 2, "in_memory"),
        ([0.0, 9.0], None, 2, "unknown_prefill"),
        ([0.0, 0.5, 0.5], 1.0, 3, "load"),
        ([0.0, 1.0, 1.0], 1.0, 3, "load"),  # a tie
        ([0.0, 1.5, 1.5], 1.0, 1, "recompute"),
        ([0.0, 0.5, 1.5], 1.0, 2, "partly"),
        ([3.5, 0.0, 0.0, 0.0], 1.0, 4, "load"),  # a gap that unlocks three blocks in memory
        ([4.5, 0.0, 0.0, 0.0], 1.0, 0, "recompute"),
        ([1.5, 0.1, 0.1, 9.0], 1.0, 3, "partly"),  # the first does not pay alone, the three do
        ([None, None], 1.0, 2, "unknown_rate"),
        ([None, 5.0], 1.0, 1, "unknown_rate"),
        ([0.5, None], 1.0, 2, "unknown_rate"),
        ([5.0, None], 1.0, 0, "recompute"),
    ],
)
def test_the_reason_is_told(costs: Costs, block_s: float | None, load_blocks: int, reason: str) -> None:
    made = decide(costs, block_s)
    assert (made.load_blocks, made.reason) == (load_blocks, reason)


def test_a_refusal_tells_what_was_compared() -> None:
    assert decide([0.0, 1.5, 1.5], 1.0) == Decision(3, 1, 1, "recompute", 0.0, 0.0, 3.0, 2.0)


@dataclass(frozen=True)
class Outcome:
    """How a simulated request went: its seconds in all, blocks it used, looks it took, and the most `due` granted."""

    total_s: float
    used: int
    looks: int
    due_s: float


def wait_for(
    arrivals: Sequence[float],
    block_s: float,
    beyond: int,
    believed: Callable[[int], float | None],
    *,
    eager: bool,
    deviation_s: float = 0.0,
) -> Outcome:
    """Let a request wait for blocks that arrive at the given times.

    It has `beyond` blocks more to compute. `believed(n)` is the estimate per block after n arrivals. An eager one asks
    at each arrival, the other only when it was told to.
    """
    blocks = len(arrivals)
    request_s = (blocks + beyond) * block_s
    patience = Patience(request_s, block_s)
    now, looks, due_s, goal = 0.0, 0, 0.0, blocks
    while True:
        there = sum(at <= now for at in arrivals)
        costs = [*[0.0] * there, *[believed(there)] * (goal - there)]
        verdict = patience.reconsider(now, costs[:goal], deviation_s)
        looks += 1
        if not verdict.stay:
            there = min(there, goal)
            return Outcome(now + request_s - there * block_s, there, looks, due_s)
        assert verdict.until_s > now
        due_s = max(due_s, patience.due_s)
        goal = verdict.load_blocks
        complete = arrivals[goal - 1]
        following = next((at for at in arrivals if at > now), inf) if eager else complete
        now = min(following, verdict.until_s)


gap_lists = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-3, 1.0), st.floats(1.0, 5.0), st.floats(5.0, 500.0)), min_size=1, max_size=60
)
beyonds = st.integers(0, 60)


@given(gaps=gap_lists, beyond=beyonds, believed=st.one_of(st.none(), st.floats(1e-3, 1e3)), eager=st.booleans())
def test_whatever_happens_waiting_wastes_a_tenth_and_one_believed_delivery(
    gaps: list[float], beyond: int, believed: float | None, eager: bool
) -> None:
    """Constant, bursting, stalling, dying: any arrivals, under any belief."""
    outcome = wait_for(list(accumulate(gaps)), 1.0, beyond, lambda _: believed, eager=eager)
    recompute_all = len(gaps) + beyond
    assert outcome.total_s <= (1 + TOLERANCE) * recompute_all + outcome.due_s + TIGHT
    assert outcome.due_s <= len(gaps)
    assert outcome.looks <= len(gaps) + 2


@given(gaps=gap_lists, beyond=beyonds, believed=st.one_of(st.none(), st.floats(1e-3, 1e3)))
def test_a_stall_after_progress_is_measured_against_the_best_moment_to_have_left(
    gaps: list[float], beyond: int, believed: float | None
) -> None:
    arrivals = list(accumulate(gaps))
    outcome = wait_for(arrivals, 1.0, beyond, lambda _: believed, eager=True)
    size = len(gaps) + beyond
    best = min([size, *(at + size - n - 1 for n, at in enumerate(arrivals[: outcome.used]))])
    assert outcome.total_s <= (1 + TOLERANCE) * best + outcome.due_s + TIGHT


@given(
    blocks=st.integers(1, 60),
    beyond=beyonds,
    delivery_s=st.floats(1e-3, 20.0),
    eager=st.booleans(),
)
def test_right_estimates_give_the_best_total(blocks: int, beyond: int, delivery_s: float, eager: bool) -> None:
    planned = decide([delivery_s] * blocks, 1.0).load_blocks
    arrivals = [delivery_s * (n + 1) for n in range(planned)]
    behind = beyond + blocks - planned
    outcome = wait_for(arrivals, 1.0, behind, lambda _: delivery_s, eager=eager) if planned else None
    total = outcome.total_s if outcome else float(behind)
    recompute_all, load_all = blocks + beyond, blocks * delivery_s + beyond
    assert total <= min(recompute_all, load_all) + 1e-6


def follow(costs: list[float], beyond: int, *, eager: bool) -> tuple[float, int]:
    """Let blocks arrive exactly as believed. Returns the request's seconds and the looks it took."""
    planned = decide(costs, 1.0).load_blocks
    arrivals = list(accumulate(costs[:planned]))
    now, looks, patience = 0.0, 0, Patience(float(len(costs) + beyond), 1.0)
    while True:
        left = [0.0 if at <= now else cost for at, cost in zip(arrivals, costs, strict=False)]
        verdict = patience.reconsider(now, left)
        looks += 1
        if not verdict.stay:
            return now + len(costs) + beyond - verdict.load_blocks, looks
        following = min((at for at in arrivals if at > now), default=inf)
        now = min(following if eager else arrivals[-1], verdict.until_s)


@given(
    costs=st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1.0), st.floats(1.0, 40.0)), min_size=1, max_size=60),
    beyond=beyonds,
    eager=st.booleans(),
)
def test_right_estimates_pay_off_through_mixed_tiers(costs: list[float], beyond: int, eager: bool) -> None:
    total, looks = follow(costs, beyond, eager=eager)
    assert total == pytest.approx(min(total_s(costs, 1.0, cut) for cut in range(len(costs) + 1)) + beyond)
    assert looks <= len(costs) + 2


@given(gap=st.integers(1, 40), cost=st.floats(1.0, 5.0), spare=st.integers(0, 20), beyond=beyonds, eager=st.booleans())
def test_a_gap_is_waited_for_to_the_end_for_the_blocks_in_memory_behind_it(
    gap: int, cost: float, spare: int, beyond: int, eager: bool
) -> None:
    """None of its blocks pays by itself, and only the last lets the request use the others."""
    behind = int(gap * cost) + 1 - gap + spare
    total, _ = follow([cost] * gap + [0.0] * behind, beyond, eager=eager)
    assert total == pytest.approx(gap * cost + beyond)


@given(
    gaps=st.lists(st.floats(0.05, 0.95), min_size=1, max_size=60),
    beyond=beyonds,
    eager=st.booleans(),
)
def test_estimates_right_within_their_deviation_never_make_a_request_leave(
    gaps: list[float], beyond: int, eager: bool
) -> None:
    outcome = wait_for(list(accumulate(gaps)), 1.0, beyond, lambda _: 0.5, eager=eager, deviation_s=0.25)
    assert outcome.used == len(gaps)


@given(
    blocks=st.integers(10, 100),
    beyond=beyonds,
    delivery_s=st.floats(1e-3, 3.0),
    eager=st.booleans(),
)
def test_a_tier_of_unknown_speed_costs_at_most_a_tenth(
    blocks: int, beyond: int, delivery_s: float, eager: bool
) -> None:
    """Nothing is known before the first arrival; then the arrivals are the estimate."""
    arrivals = [delivery_s * (n + 1) for n in range(blocks)]
    outcome = wait_for(arrivals, 1.0, beyond, lambda there: delivery_s if there else None, eager=eager)
    recompute_all, load_all = blocks + beyond, blocks * delivery_s + beyond
    assert outcome.total_s <= (1 + TOLERANCE) * min(recompute_all, load_all) + 1e-6


@given(blocks=st.integers(20, 100), beyond=beyonds, believed=st.floats(0.01, 0.5), slower=st.floats(2.0, 1000.0))
def test_a_tier_slower_than_believed_costs_a_tenth_and_one_delivery(
    blocks: int, beyond: int, believed: float, slower: float
) -> None:
    delivery_s = believed * slower
    arrivals = [delivery_s * (n + 1) for n in range(blocks)]
    outcome = wait_for(arrivals, 1.0, beyond, lambda _: believed, eager=False)
    recompute_all, load_all = blocks + beyond, blocks * delivery_s + beyond
    if load_all <= recompute_all and delivery_s <= believed + TOLERANCE * load_all:
        assert outcome.total_s == pytest.approx(load_all)
    assert outcome.total_s <= (1 + TOLERANCE) * recompute_all + believed + TIGHT


@given(blocks=st.integers(1, 100), beyond=beyonds, believed=st.floats(1.0, 100.0), faster=st.floats(1.5, 1000.0))
def test_a_tier_faster_than_believed_is_not_left_once_it_delivers(
    blocks: int, beyond: int, believed: float, faster: float
) -> None:
    """A request that waits already sees its own loads arrive before the estimates have noticed."""
    delivery_s = min(0.9, believed / faster) * TOLERANCE
    arrivals = [delivery_s * (n + 1) for n in range(blocks)]
    outcome = wait_for(arrivals, 1.0, beyond, lambda there: believed if there < 2 else delivery_s, eager=True)
    assert outcome.total_s == pytest.approx(blocks * delivery_s + beyond)


@given(done=st.integers(1, 59), beyond=beyonds, delivery_s=st.floats(1e-3, 0.5))
def test_a_tier_that_dies_is_left_soon_after_its_last_block(done: int, beyond: int, delivery_s: float) -> None:
    """Savings so far are not burned up waiting."""
    arrivals = [delivery_s * (n + 1) if n < done else 1e6 for n in range(60)]
    outcome = wait_for(arrivals, 1.0, beyond, lambda _: delivery_s, eager=True)
    left = 60 + beyond - done
    assert outcome.used == done
    assert outcome.total_s <= (1 + TOLERANCE) * (done * delivery_s + left) + delivery_s + TIGHT


def test_the_first_block_of_an_unknown_tier_is_given_a_tenth_of_the_computing_time() -> None:
    verdict = Patience(100.0, 1.0).reconsider(0.0, [None] * 50)
    assert (verdict.stay, verdict.load_blocks) == (True, 50)
    assert verdict.until_s == pytest.approx(10.0)


def test_blocks_in_memory_are_not_computing_time() -> None:
    verdict = Patience(100.0, 1.0).reconsider(0.0, [0.0] * 80 + [None] * 20)
    assert verdict.until_s == pytest.approx(2.0)


def test_a_short_request_waits_for_the_delivery_it_was_promised() -> None:
    """A tenth of its computing time is less than one delivery; loading still halves its time."""
    patience = Patience(4.0, 1.0)
    for there, now in enumerate((0.0, 0.5, 1.0, 1.5)):
        verdict = patience.reconsider(now, [0.0] * there + [0.5] * (4 - there))
        assert verdict.stay
        assert verdict.until_s > now + 0.5
    assert not patience.reconsider(2.0, [0.0] * 4).stay


def test_no_more_is_granted_to_an_uncertain_estimate_than_it_could_save() -> None:
    verdict = Patience(20.0, 1.0).reconsider(0.0, [0.5] * 10, deviation_s=1e6)
    assert verdict.until_s == pytest.approx(2.0 + 10.0)


def test_a_delivery_that_no_longer_pays_is_granted_nothing() -> None:
    patience = Patience(20.0, 1.0)
    assert patience.reconsider(0.0, [0.9] * 10).until_s == pytest.approx(2.9)
    assert patience.reconsider(0.5, [5.0] * 10).until_s == pytest.approx(2.0)


def test_a_delivery_that_does_not_pay_is_granted_nothing() -> None:
    verdict = Patience(20.0, 1.0).reconsider(0.0, [5.0] * 10)
    assert verdict.until_s == pytest.approx(2.0)


def test_what_no_longer_pays_is_not_waited_for() -> None:
    patience = Patience(20.0, 1.0)
    first = patience.reconsider(0.0, [0.1, 0.1, 0.1, 0.1])
    assert (first.stay, first.load_blocks) == (True, 4)
    later = patience.reconsider(2.05, [0.0, 0.0, 0.1, 5.0])
    assert (later.stay, later.load_blocks) == (True, 3)
    last = patience.reconsider(2.1, [0.0, 0.0, 0.0, 5.0])
    assert (last.stay, last.load_blocks) == (False, 3)


def test_a_slow_first_block_does_not_condemn_its_tier() -> None:
    patience = Patience(100.0, 1.0)
    patience.reconsider(0.0, [None] * 50)
    assert patience.reconsider(4.0, [0.0, *[4.0] * 49]).stay


@given(gaps=gap_lists)
def test_asking_more_often_never_waits_past_the_moment_given(gaps: list[float]) -> None:
    """Without arrivals the moment to leave stays where it was put."""
    patience = Patience(float(len(gaps)), 1.0)
    until = patience.reconsider(0.0, [None] * len(gaps)).until_s
    steps = [until * n / 10 for n in range(10)]
    assert all(a < b for a, b in pairwise(steps))
    assert [patience.reconsider(now, [None] * len(gaps)).until_s for now in steps] == pytest.approx([until] * 10)
    assert not patience.reconsider(until, [None] * len(gaps)).stay


@pytest.mark.parametrize(
    ("costs", "deviation_s", "quiet"),
    [
        ([None] * 4, 0.0, 2.0),
        ([0.0, 0.001, None], 0.0, 2.0),  # from two tiers, one of them unknown
        ([0.001] * 8, 0.0, 1.0),
        ([0.0, 0.5, 0.0, 0.5], 0.0, 2.0),
        ([0.5, 0.5], 1.0, 4.0),
        ([3.0], 0.0, 6.0),  # a slow link is given its time
        ([0.1] * 1000, 0.0, 3.2),  # but not that of a thousand blocks for one
    ],
)
def test_how_long_a_silence_is_borne(costs: Costs, deviation_s: float, quiet: float) -> None:
    assert quiet_s(costs, deviation_s) == pytest.approx(quiet)
