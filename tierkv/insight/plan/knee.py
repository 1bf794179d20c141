"""Where more memory stops paying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import log2

from tierkv.insight.plan.points import Plan, Point

__all__ = ["Curve", "Knee", "cheapest", "curves", "knee"]

_WORTH_IT = 0.05  # of the mean time to first token, that twice the memory has to take away


@dataclass(frozen=True, slots=True)
class Curve:
    """One policy above one disk, with more and more memory."""

    policy: str
    disk_bytes: int
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Knee:
    """The point of a curve beyond which no step takes away 5 % of the mean time to first token per doubling.

    Attributes
    ----------
    more
        The next point, None where the curve ends before it flattens.
    """

    at: Point
    more: Point | None

    @property
    def factor(self) -> float:
        """By what the next point has more memory; 1 if there is none."""
        return self.more.setup.ram_bytes / self.at.setup.ram_bytes if self.more else 1.0

    @property
    def hit_rate_gain(self) -> float:
        """What the next point brings in hit rate, of all tiers."""
        return self.more.hit_rate.value - self.at.hit_rate.value if self.more else 0.0

    @property
    def ttft_cut(self) -> float:
        """Share of the mean time to first token that the next point takes away."""
        return _cut(self.at, self.more) if self.more else 0.0


def curves(plan: Plan) -> tuple[Curve, ...]:
    """Return the points of a plan as curves over memory."""
    return tuple(
        Curve(policy, disk, tuple(points))
        for (policy, disk), points in groupby(
            plan.points, key=lambda point: (point.setup.policy, point.setup.disk_bytes)
        )
    )


def knee(curve: Curve) -> Knee:
    """Return the smallest memory of a curve beyond which more hardly helps; its largest one if it always does."""
    points = curve.points
    at = len(points) - 1
    while at and not _pays(points[at - 1], points[at]):
        at -= 1
    return Knee(points[at], points[at + 1] if at + 1 < len(points) else None)


def cheapest(points: Sequence[Point]) -> Point | None:
    """Return the point that costs least; None where costs were not asked for."""
    priced = [(point.cost_per_hour.value, point) for point in points if point.cost_per_hour is not None]
    return min(priced, key=lambda pair: pair[0])[1] if priced else None


def _pays(less: Point, more: Point) -> bool:
    doublings = log2(more.setup.ram_bytes / less.setup.ram_bytes)
    left: float = (1 - _cut(less, more)) ** (1 / doublings)
    return left <= 1 - _WORTH_IT


def _cut(less: Point, more: Point) -> float:
    before = less.ttft_mean_s.value
    return (before - more.ttft_mean_s.value) / before if before else 0.0
