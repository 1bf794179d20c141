"""Where more memory stops paying, on curves drawn by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tierkv.insight.plan.knee import Curve, cheapest, curves, knee
from tierkv.insight.plan.points import Baseline, Figure, Plan, Point
from tierkv.insight.plan.question import Setup
from tierkv.insight.plan.report import sentences, size


def point(gib: int, hit_rate: float, ttft: float, cost: float | None = None, disk: int = 0) -> Point:
    def exact(value: float) -> Figure:
        return Figure(value, 0.0)

    price = None if cost is None else exact(cost)
    times = exact(ttft), exact(ttft), exact(ttft)
    return Point(Setup("lru", gib << 30, disk << 30), exact(hit_rate), exact(hit_rate), *times, price)


def plan_of(points: Sequence[Point]) -> Plan:
    return Plan(0, Baseline(1, 1, 1, 1.0, 1.0, 1.0, 1.0, 1.0, None), tuple(points))


def test_the_knee_is_where_no_later_step_pays() -> None:
    bend = knee(Curve("lru", 0, (point(1, 0.1, 9), point(2, 0.3, 7), point(4, 0.5, 5), point(8, 0.52, 4.8))))
    assert bend.at.setup.ram_bytes == 4 << 30
    assert bend.factor == 2
    assert bend.hit_rate_gain == pytest.approx(0.02)
    assert bend.ttft_cut == pytest.approx(0.04)


def test_a_flat_part_before_a_step_is_no_knee() -> None:
    bend = knee(Curve("lru", 0, (point(1, 0.1, 9), point(2, 0.1, 9), point(4, 0.5, 5), point(8, 0.5, 5))))
    assert bend.at.setup.ram_bytes == 4 << 30


def test_a_step_over_several_doublings_has_to_pay_for_each() -> None:
    flat = knee(Curve("lru", 0, (point(1, 0.1, 10), point(16, 0.2, 8.5))))  # 4 % per doubling
    assert flat.at.setup.ram_bytes == 1 << 30
    assert flat.factor == 16
    steep = knee(Curve("lru", 0, (point(1, 0.1, 10), point(4, 0.2, 8.5))))  # 8 %
    assert steep.at.setup.ram_bytes == 4 << 30
    assert steep.more is None


def test_curves_are_by_policy_and_disk() -> None:
    points = [point(1, 0.1, 9), point(2, 0.2, 8), point(1, 0.3, 7, disk=4), point(2, 0.4, 6, disk=4)]
    found = curves(plan_of(points))
    assert [(curve.disk_bytes >> 30, curve.points) for curve in found] == [
        (0, tuple(points[:2])),
        (4, tuple(points[2:])),
    ]


def test_the_cheapest_point_needs_prices() -> None:
    points = [point(1, 0.1, 9, 5.0), point(2, 0.2, 8, 4.0), point(4, 0.3, 7, 6.0)]
    assert cheapest(points) == points[1]
    assert cheapest([point(1, 0.1, 9)]) is None


def test_sentences_say_what_twice_the_memory_brings() -> None:
    said = list(sentences(plan_of([point(1, 0.1, 9, 3.0), point(2, 0.5, 5, 2.0), point(4, 0.512, 4.9, 2.5)])))
    assert said == [
        "lru, no disk: the knee is at 2 GiB of memory (hit rate 0.500); twice this memory brings +0.012 hit rate "
        "and -2.0 % time to first token",
        "cheapest: lru with 2 GiB of memory and no disk, 2.00 an hour",
    ]
    (rising,) = sentences(plan_of([point(1, 0.1, 9), point(2, 0.5, 5)]))
    assert "ask about larger sizes" in rising


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (3 << 29, "1.5 GiB"), (1 << 60, "1024 PiB")],
)
def test_sizes_have_the_largest_unit(number: int, text: str) -> None:
    assert size(number) == text
