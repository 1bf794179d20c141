"""What hits are worth: time to the first token, from the speed of the tiers and of the engine.

A request first loads what the tiers have, one tier after the other, then prefills the rest. Nothing waits for anything
else: no queue, no overlap of loads with prefill, no fixed cost per request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles

from tierkv.replay.trace import Trace

__all__ = ["Costs", "Times", "Worth", "worth"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Speeds and sizes.

    Attributes
    ----------
    bytes_per_token
        KV of one token.
    prefill
        Tokens the engine prefills per second.
    bandwidths
        Bytes per second that a tier delivers, by its name.
    """

    bytes_per_token: int
    prefill: float
    bandwidths: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Times:
    """Time to first token over all requests, seconds."""

    mean: float
    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class Worth:
    """What the cache saves.

    Attributes
    ----------
    prefill_saved_s
        Seconds the engine does not spend on prefill.
    load_s
        Seconds spent on loads instead.
    cached, uncached
        Time to first token with the cache and without.
    """

    prefill_saved_s: float
    load_s: float
    cached: Times
    uncached: Times


def worth(trace: Trace, names: Sequence[str], tokens: Sequence[Sequence[int]], costs: Costs) -> Worth:
    """Compare the times with and without the `tokens` that the tiers called `names` delivered to each request."""
    seconds_per_token = [costs.bytes_per_token / costs.bandwidths[name] for name in names]
    loads = [
        sum(count * each for count, each in zip(delivered, seconds_per_token, strict=True)) for delivered in tokens
    ]
    saved = [sum(delivered) / costs.prefill for delivered in tokens]
    uncached = [request.tokens / costs.prefill for request in trace.requests]
    cached = [whole - less + load for whole, less, load in zip(uncached, saved, loads, strict=True)]
    return Worth(sum(saved), sum(loads), _times(cached), _times(uncached))


def _times(seconds: Sequence[float]) -> Times:
    if len(seconds) < 2:
        only = sum(seconds)
        return Times(only, only, only)
    cuts = quantiles(seconds, n=20, method="inclusive")
    return Times(fmean(seconds), cuts[9], cuts[18])
