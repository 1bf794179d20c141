"""Windows: what is counted lately is all that was, by the clock, in bounded memory."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.insight.live.support import BLOCK_TOKENS, accounted, observed
from tierkv.insight.live import collector
from tierkv.insight.live.regret import Ghost
from tierkv.insight.live.windows import LONGEST_S, SLICE_S, Windows

START = 1_000_000 * SLICE_S
KIND = dict[bytes, int]


def requests(window: Any) -> KIND:
    return {tenant: totals.tally.requests for tenant, totals in window.tenants.items()}


def note(windows: Windows, tenant: bytes, at: float, tier: str = "warm") -> None:
    totals = windows.totals(tenant, at)
    totals.tally.note((tier,), {"new": 2}, BLOCK_TOKENS, 0.5)
    totals.regret.note(Ghost(tier, 0, at - 30.0, last=True), at, BLOCK_TOKENS)


@given(
    st.lists(st.tuples(st.floats(0, 2000), st.sampled_from([b"ann", b"bob"])), max_size=120),
    st.sampled_from([60.0, SLICE_S, 3600.0, 7000.5, LONGEST_S]),
)
@settings(max_examples=60, deadline=None)
def test_a_window_is_what_happened_since_it_began(steps: list[tuple[float, bytes]], seconds: float) -> None:
    windows, now, happened = Windows(START), START, []
    for step, tenant in steps:
        now += step
        note(windows, tenant, now)
        happened.append((now, tenant))
    window = windows.last(seconds, now)
    assert now - seconds - SLICE_S < window.since or window.since == START
    assert window.since <= max(now - seconds, START)
    assert requests(window) == Counter(tenant for at, tenant in happened if at >= window.since)
    for tenant, totals in window.tenants.items():
        count = requests(window)[tenant]
        assert totals.tally.to_dict() == {
            "requests": count,
            "requested_tokens": 3 * BLOCK_TOKENS * count,
            "hit_tokens": {"warm": BLOCK_TOKENS * count},
            "lost_tokens": {"new": 2 * BLOCK_TOKENS * count},
            "lost_s": {"new": float(count)},
        }
        assert totals.regret.to_dict()["warm"]["within"] == {"1min": BLOCK_TOKENS * count}
        assert totals.regret.to_dict()["warm"]["lost_tokens"] == BLOCK_TOKENS * count


def test_looking_counts_nothing() -> None:
    windows = Windows(START)
    note(windows, b"ann", START + 1)
    note(windows, b"ann", START + SLICE_S)
    assert [requests(windows.last(3600, START + SLICE_S)) for _ in range(3)] == [{b"ann": 2}] * 3


def test_after_a_day_nothing_is_kept() -> None:
    windows = Windows(START)
    for number in range(600):
        note(windows, b"ann", START + number * SLICE_S)
        assert len(windows) <= LONGEST_S / SLICE_S + 1
    now = START + 600 * SLICE_S
    assert requests(windows.last(LONGEST_S, now)) == {b"ann": 288}
    assert requests(windows.last(3600, now + 10 * LONGEST_S)) == {}


def test_with_too_many_tenants_long_windows_begin_later_and_say_so() -> None:
    windows = Windows(START, most=100)
    for number in range(20):
        for tenant in range(10):
            note(windows, bytes([tenant]), START + number * SLICE_S)
        assert len(windows) <= 100
    window = windows.last(3600 * 3, START + 20 * SLICE_S)
    assert window.since == START + 10 * SLICE_S
    assert set(requests(window).values()) == {10}


def test_a_clock_that_is_set_back_loses_nothing() -> None:
    windows = Windows(START)
    note(windows, b"ann", START + 4000)
    note(windows, b"ann", START + 100)
    assert requests(windows.last(600, START + 4000)) == {b"ann": 2}


def test_dropped_requests_are_of_their_window() -> None:
    windows = Windows(START)
    windows.dropped(START + 10, 3)
    windows.dropped(START + 4000, 2)
    assert windows.last(600, START + 4100).dropped == 2
    assert windows.last(LONGEST_S, START + 4100).dropped == 5


def test_the_window_of_a_young_cache_is_all_it_has_counted() -> None:
    choose = random.Random(3)
    with observed() as seen:
        for number in range(60):
            prompt = [*range(choose.randrange(30)), *range(1000 * number, 1000 * number + choose.randrange(20))]
            seen.ask(prompt, choose.choice(("ann", "bob")))
        for first in (0, 5000, 0):  # more than memory holds: the last one was evicted
            seen.ask(range(first, first + 400), "ann")
        everything, window = seen.report(), seen.insight.report_window(3600.0)
        for name in ("since", "dropped", "requests", "requested_tokens", "hit_tokens"):
            assert window[name] == everything[name]
        tenants = [report["tenants"].values() for report in (window, everything)]
        for tally, whole in [(window, everything), *zip(*tenants, strict=True)]:
            lost = Counter(whole["lost_tokens"])
            lost["new"] += lost.pop("diverged", 0)  # a window has no templates to leave
            assert tally["lost_tokens"] == lost
            assert tally.get("regret") == whole.get("regret")
        assert window["tenants"]["ann"]["regret"]
        assert (everything["window_s"], window["window_s"]) == (None, 3600.0)
        assert accounted(window["rest"])
        assert window["rest"]["requests"] == window["requests"] == 63
        assert (window["templates"], window["whatif"]) == ([], None)
        own = seen.insight.report_window(3600.0, seen.cache.engine.tenant("ann"))
        assert list(own["tenants"]) == ["ann"]
        assert own["requests"] == everything["tenants"]["ann"]["requests"]


def test_what_was_dropped_is_in_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    with observed() as seen:
        monkeypatch.setattr(collector, "_WAITING_BLOCKS", 0)
        seen.ask([1, 2, 3])
        monkeypatch.undo()
        seen.ask([1, 2, 3])
        assert [seen.insight.report_window(60.0)["dropped"] for _ in range(2)] == [1, 1]
