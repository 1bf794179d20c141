"""From tokens and prices to money: exact decimals, each line rounded to the cent, half up, and summed."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal, localcontext
from typing import Any

from tierkv.insight.cost.prices import GPUPlan, PriceList, TokenPlan
from tierkv.insight.cost.traffic import Traffic
from tierkv.insight.cost.usage import Usage, own_usage, provider_usage

__all__ = ["Bill", "Comparison", "compare"]

_MILLION = Decimal(1_000_000)
_CENT = Decimal("0.01")
_DIGITS = 60  # more than any sum of money here has, so that only the cent rounds
_HOUR_MS = 3_600_000
_MONTH_MS = 730 * _HOUR_MS
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Bill:
    """What a plan takes for a trace.

    Attributes
    ----------
    input, cached_input, cache_write
        For prompt tokens that are plain, read and written. On hardware of one's own, all prefill is `input`.
    output
        For answers.
    storage
        For the memory of one's own cache, for as long as the trace lasts.
    flat_input
        For all prompt tokens at the price of plain input: what an estimate without a cache says.
    distinct_input
        The same for every distinct token once: what an estimate by the length of the conversations says.
    """

    plan: str
    usage: Usage
    input: Decimal
    cached_input: Decimal
    cache_write: Decimal
    output: Decimal
    storage: Decimal
    flat_input: Decimal
    distinct_input: Decimal

    @property
    def prompts(self) -> Decimal:
        """What prompts cost, storage of their cache included."""
        return self.input + self.cached_input + self.cache_write + self.storage

    @property
    def total(self) -> Decimal:
        """The sum of all lines."""
        return self.prompts + self.output

    @property
    def overestimate(self) -> float | None:
        """By what factor a flat estimate of the prompts is too high; None where they cost nothing."""
        return float(self.flat_input / self.prompts) if self.prompts else None

    @property
    def output_share(self) -> float:
        """Share of the total that answers take: what no prefix cache takes away."""
        return float(self.output / self.total) if self.total else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the bill as plain data; money as text, so that no cent is lost."""
        usage = self.usage
        money = ("input", "cached_input", "cache_write", "output", "storage", "total", "flat_input", "distinct_input")
        return {
            "plan": self.plan,
            "tokens": {"read": usage.read, "written": usage.written, "plain": usage.plain, "output": usage.output},
            **{name: str(getattr(self, name)) for name in money},
            "overestimate": self.overestimate,
            "output_share": self.output_share,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """All plans of a price list on one trace."""

    prices: PriceList
    requests: int
    prompt_tokens: int
    distinct_tokens: int
    output_tokens: int
    bills: tuple[Bill, ...]

    def as_json(self) -> dict[str, Any]:
        """Return what `tierkv cost --json` prints."""
        return {
            "as_of": self.prices.as_of.isoformat(),
            "currency": self.prices.currency,
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "distinct_tokens": self.distinct_tokens,
            "output_tokens": self.output_tokens,
            "bills": [bill.as_json() for bill in self.bills],
        }


def compare(traffic: Traffic, prices: PriceList) -> Comparison:
    """Bill a trace by every plan. Raises `ConfigError` for a cache without room for a block."""
    distinct = traffic.distinct_tokens()
    bills = tuple(
        _by_tokens(name, plan, traffic, distinct)
        if isinstance(plan, TokenPlan)
        else _by_hours(name, plan, traffic, distinct)
        for name, plan in prices.plans.items()
    )
    trace = traffic.trace
    return Comparison(prices, len(trace.requests), trace.prompt_tokens(), distinct, sum(traffic.answers), bills)


def _by_tokens(name: str, plan: TokenPlan, traffic: Traffic, distinct: int) -> Bill:
    usage = provider_usage(traffic, plan)

    def price(tokens: int, per_million: Decimal | None) -> Decimal:
        with localcontext(prec=_DIGITS):
            return _cents(tokens * (plan.input if per_million is None else per_million) / _MILLION)

    return Bill(
        plan=name,
        usage=usage,
        input=price(usage.plain, plan.input),
        cached_input=price(usage.read, plan.cached_input),
        cache_write=price(usage.written, plan.cache_write),
        output=price(usage.output, plan.output),
        storage=_cents(Decimal(0)),
        flat_input=price(usage.prompt, plan.input),
        distinct_input=price(distinct, plan.input),
    )


def _by_hours(name: str, plan: GPUPlan, traffic: Traffic, distinct: int) -> Bill:
    usage = own_usage(traffic, plan)

    def price(tokens: int, tokens_per_s: Decimal) -> Decimal:
        with localcontext(prec=_DIGITS):
            return _cents(tokens * plan.gpu_hour / (tokens_per_s * 3600))

    with localcontext(prec=_DIGITS):
        storage = _cents((plan.memory or 0) * plan.memory_gib_month * traffic.span_ms() / (_GIB * _MONTH_MS))
    return Bill(
        plan=name,
        usage=usage,
        input=price(usage.plain, plan.prefill_tokens_per_s),
        cached_input=_cents(Decimal(0)),
        cache_write=_cents(Decimal(0)),
        output=price(usage.output, plan.decode_tokens_per_s),
        storage=storage,
        flat_input=price(usage.prompt, plan.prefill_tokens_per_s),
        distinct_input=price(distinct, plan.prefill_tokens_per_s),
    )


def _cents(amount: Decimal) -> Decimal:
    return amount.quantize(_CENT, ROUND_HALF_UP)
