"""From tokens delivered to hit rates, times and costs, with error bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np

from tierkv.errors import InvalidRequest
from tierkv.insight.plan.question import Question, Setup
from tierkv.insight.plan.simulate import Delivered, Progress, Sampler, replay_exactly
from tierkv.replay.single import ideal_hit_tokens
from tierkv.replay.trace import Trace

__all__ = ["Baseline", "Figure", "Plan", "Point", "make_plan"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and two standard errors of it; the error is None where there was but one sample, 0 if it is exact."""

    value: float
    error: float | None


@dataclass(frozen=True, slots=True)
class Point:
    """What one configuration gives.

    Attributes
    ----------
    hit_rate, ram_hit_rate
        Tokens found, in any tier and in memory, as a share of all prompt tokens.
    ttft_mean_s, ttft_p50_s, ttft_p95_s
        Time to first token: loads from memory and disk, one after the other, then prefill of the rest.
    cost_per_hour
        Of memory, disk and prefill, for each hour of the traffic; None without prices.
    """

    setup: Setup
    hit_rate: Figure
    ram_hit_rate: Figure
    ttft_mean_s: Figure
    ttft_p50_s: Figure
    ttft_p95_s: Figure
    cost_per_hour: Figure | None


@dataclass(frozen=True, slots=True)
class Baseline:
    """The traffic, and what it is without a cache and with one that never evicts.

    Attributes
    ----------
    total_bytes
        KV of all distinct blocks.
    span_s
        From the first request to the last.
    """

    requests: int
    prompt_tokens: int
    total_bytes: int
    span_s: float
    ideal_hit_rate: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    cost_per_hour: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer. `samples` is 0 if every point is exact."""

    samples: int
    baseline: Baseline
    points: tuple[Point, ...]

    def as_json(self) -> dict[str, Any]:
        """Return what `tierkv plan --json` prints."""
        points = [asdict(point) for point in self.points]
        return {
            "samples": self.samples,
            "baseline": asdict(self.baseline),
            "points": [{**point.pop("setup"), **point} for point in points],
        }


def make_plan(trace: Trace, question: Question, samples: int, progress: Progress) -> Plan:
    """Answer a question from so many samples of the trace (at most 32), or from all of it if `samples` is 0.

    `progress` is called once for each configuration and sample. Raises `InvalidRequest` for a trace without blocks.
    """
    if not trace.references():
        raise InvalidRequest("the trace has no blocks", remedy="give a trace with at least one prompt")
    baseline = _baseline(trace, question)
    lengths = np.array([request.tokens for request in trace.requests], dtype=np.float64)
    runs: list[Mapping[Setup, Delivered]]
    if samples:
        sampler = Sampler(trace)
        runs = [sampler.simulate(question, number, progress) for number in range(samples)]
    else:
        runs = [replay_exactly(trace, question, progress)]
    points = tuple(
        _point(setup, [_measure(run[setup], setup, lengths, question, baseline) for run in runs], exact=not samples)
        for setup in question.setups()
    )
    return Plan(samples, baseline, points)


def _baseline(trace: Trace, question: Question) -> Baseline:
    tokens = trace.prompt_tokens()
    seconds = np.array([request.tokens for request in trace.requests]) / question.speeds.prefill
    span_s = (trace.requests[-1].timestamp - trace.requests[0].timestamp) / 1000
    prices = question.prices
    return Baseline(
        requests=len(trace.requests),
        prompt_tokens=tokens,
        total_bytes=trace.unique_blocks() * question.block_bytes,
        span_s=span_s,
        ideal_hit_rate=ideal_hit_tokens(trace) / tokens,
        ttft_mean_s=float(seconds.mean()),
        ttft_p50_s=float(np.quantile(seconds, 0.5)),
        ttft_p95_s=float(np.quantile(seconds, 0.95)),
        cost_per_hour=None if prices is None else prices.prefill(float(seconds.sum()), span_s),
    )


def _measure(
    delivered: Delivered,
    setup: Setup,
    lengths: np.ndarray[tuple[int], np.dtype[np.float64]],
    question: Question,
    baseline: Baseline,
) -> dict[str, float]:
    speeds = question.speeds
    per_token = question.block_bytes / question.block_tokens
    # Saved and spent per token found: a sum over a sample has no bias, the shares of single requests have a little.
    of_ram, of_disk = (per_token / speeds.ram - 1 / speeds.prefill, per_token / speeds.disk - 1 / speeds.prefill)
    whole = baseline.prompt_tokens / speeds.prefill
    mean = (whole + delivered.ram_tokens * of_ram + delivered.disk_tokens * of_disk) / baseline.requests
    shares = np.array(delivered.shares)
    each = lengths * (1 / speeds.prefill + shares[:, 0] * of_ram + shares[:, 1] * of_disk)
    hits = delivered.ram_tokens + delivered.disk_tokens
    measured = {
        "hit_rate": hits / baseline.prompt_tokens,
        "ram_hit_rate": delivered.ram_tokens / baseline.prompt_tokens,
        "ttft_mean_s": mean,
        "ttft_p50_s": float(np.quantile(each, 0.5)),
        "ttft_p95_s": float(np.quantile(each, 0.95)),
    }
    if question.prices is not None:
        prefill_s = (baseline.prompt_tokens - hits) / speeds.prefill
        storage = question.prices.storage(setup.ram_bytes, setup.disk_bytes)
        measured["cost_per_hour"] = storage + question.prices.prefill(prefill_s, baseline.span_s)
    return measured


def _point(setup: Setup, measured: Sequence[Mapping[str, float]], *, exact: bool) -> Point:
    figures = {name: _figure([each[name] for each in measured], exact=exact) for name in measured[0]}
    return Point(setup, **{"cost_per_hour": None, **figures})  # type: ignore[arg-type]


def _figure(values: Iterable[float], *, exact: bool) -> Figure:
    numbers = list(values)
    if exact:
        return Figure(numbers[0], 0.0)
    return Figure(fmean(numbers), 2 * stdev(numbers) / len(numbers) ** 0.5 if len(numbers) > 1 else None)
