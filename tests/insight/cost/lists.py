"""Price lists and traffic written out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tierkv.insight.cost.bill import Bill, compare
from tierkv.insight.cost.prices import GPUPlan, PriceList, TokenPlan
from tierkv.insight.cost.traffic import Traffic
from tierkv.replay.trace import Request, Trace

BLOCK = 100_000
CACHED: dict[str, Any] = {
    "input": 3.00,
    "output": 15.00,
    "cached_input": 0.30,
    "cache_write": 3.75,
    "ttl": "5min",
}


def traffic(
    calls: Sequence[tuple[float, Sequence[int]]], *, answer: int = 0, block: int = BLOCK, partial: int = 0
) -> Traffic:
    """Calls of (second, blocks); the last block of each has `partial` tokens, if that is not 0."""
    requests = tuple(
        Request(1000 * second, block * len(blocks) - (block - partial if partial else 0), tuple(blocks))
        for second, blocks in calls
    )
    return Traffic(Trace(requests, block), (answer,) * len(requests))


def bill(plan: TokenPlan | GPUPlan, about: Traffic) -> Bill:
    import datetime as dt

    (found,) = compare(about, PriceList(dt.date(2026, 11, 1), "USD", "", {"plan": plan})).bills
    return found


def by_tokens(about: Traffic, **changes: Any) -> Bill:
    """Bill by the token with the prices of `CACHED`."""
    return bill(TokenPlan.model_validate(CACHED | changes), about)


def money(found: Bill) -> dict[str, str]:
    """Return the lines that are not 0, as text."""
    names = ("input", "cached_input", "cache_write", "output", "storage", "total")
    return {name: text for name in names if (text := str(getattr(found, name))) != "0.00"}
