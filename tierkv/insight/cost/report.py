"""A comparison of plans as a table and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tierkv.insight.cost.bill import Bill, Comparison

__all__ = ["print_comparison", "sentences"]

_LINES = ("input", "cached_input", "cache_write", "output", "storage")


def print_comparison(found: Comparison, console: Console) -> None:
    """Print the traffic, a line for each plan, and where estimates go wrong."""
    prices = found.prices
    console.print(
        f"{found.requests:,} requests, {found.prompt_tokens:,} prompt tokens of which {found.distinct_tokens:,} are "
        f"distinct, {found.output_tokens:,} output tokens",
        soft_wrap=True,
    )
    console.print(
        f"prices in {prices.currency} as of {prices.as_of.isoformat()}" + (f": {prices.note}" if prices.note else ""),
        soft_wrap=True,
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("plan")
    for heading in ("hit rate", "input", "read", "write", "output", "memory", "total"):
        table.add_column(heading, justify="right", no_wrap=True)
    for bill in found.bills:
        rate = bill.usage.read / found.prompt_tokens if found.prompt_tokens else 0.0
        table.add_row(bill.plan, f"{rate:.3f}", *(_money(getattr(bill, line)) for line in _LINES), _money(bill.total))
    console.print(table)
    for sentence in sentences(found):
        console.print(sentence, soft_wrap=True)


def sentences(found: Comparison) -> Iterator[str]:
    """Yield for each plan with a cache how wrong estimates without one are, and what stays."""
    if found.distinct_tokens:
        yield f"each distinct prompt token is sent {found.prompt_tokens / found.distinct_tokens:.1f} times"
    for bill in found.bills:
        if bill.usage.read and bill.overestimate is not None:
            yield (
                f"{bill.plan}: prompts cost {_money(bill.prompts)}; a flat estimate says {_money(bill.flat_input)}, "
                f"{_wrong(bill)}; counting each distinct token once says {_money(bill.distinct_input)}; "
                f"output stays {_money(bill.output)}, {100 * bill.output_share:.0f} % of the total"
            )


def _wrong(bill: Bill) -> str:
    factor = bill.overestimate or 1.0
    return f"{factor:.1f} times too much" if factor >= 1 else f"{1 / factor:.1f} times too little"


def _money(amount: Decimal) -> str:
    return f"{amount:,.2f}"
