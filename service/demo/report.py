"""What the demo found: a table for people, JSON for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from tierkv.errors import StorageError

if TYPE_CHECKING:
    from rich.console import Console

    from tierkv.engines.transformers import Generation

__all__ = ["Report", "RequestReport", "print_report", "write_json"]

Stats = Mapping[str, Any]

_PASSES = ("1st pass", "2nd pass", "restart")
_TIERS = ("hot", "warm", "cold")


@dataclass(frozen=True, slots=True)
class RequestReport:
    """One request in all phases: without a cache, first pass, second pass, and after the restart."""

    id: str
    user: str
    uncached: Generation
    cold: Generation
    warm: Generation
    restart: Generation

    @property
    def cached(self) -> tuple[Generation, Generation, Generation]:
        """The phases that went through tierkv."""
        return self.cold, self.warm, self.restart

    @property
    def identical(self) -> bool:
        return all(run.tokens == self.uncached.tokens for run in self.cached)

    def to_dict(self) -> dict[str, Any]:
        """Reuse without a suffix is that of the first pass."""
        return {
            "id": self.id,
            "user": self.user,
            "prompt_tokens": self.uncached.prompt_tokens,
            "reused_tokens": self.cold.reused_tokens,
            "reused_by_tier": dict(self.cold.tokens_by_tier),
            "reused_tokens_warm": self.warm.reused_tokens,
            "reused_by_tier_warm": dict(self.warm.tokens_by_tier),
            "reused_tokens_restart": self.restart.reused_tokens,
            "reused_by_tier_restart": dict(self.restart.tokens_by_tier),
            "ttft_uncached_s": self.uncached.ttft_s,
            "ttft_cold_s": self.cold.ttft_s,
            "ttft_warm_s": self.warm.ttft_s,
            "ttft_restart_s": self.restart.ttft_s,
            "tokens_identical": self.identical,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """Everything the demo found.

    Attributes
    ----------
    requests
        In the order they were served.
    other, other_identical
        What a second tenant got for the first request's prompt, and whether its answer was the same.
    stats
        `Cache.stats` at the end of each life of the daemon.
    """

    requests: Sequence[RequestReport]
    other: Generation
    other_identical: bool
    stats: Sequence[Stats]

    @property
    def exit_code(self) -> int:
        good = self.identical and self.other.reused_tokens == 0 and not self.cache_errors
        return 0 if good else 1

    @property
    def identical(self) -> bool:
        return self.other_identical and all(request.identical for request in self.requests)

    @property
    def positions_without_cache(self) -> int:
        """Token positions of all prompts."""
        return sum(request.uncached.prefilled_tokens for request in self.requests)

    @property
    def positions_prefilled(self) -> int:
        """Token positions computed for the same prompts in the first pass."""
        return sum(request.cold.prefilled_tokens for request in self.requests)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens reused in the first pass."""
        return 1.0 - self.positions_prefilled / self.positions_without_cache

    @property
    def speedup_warm(self) -> float:
        """Median over the requests of TTFT without a cache over TTFT in the second pass."""
        return median(request.uncached.ttft_s / request.warm.ttft_s for request in self.requests)

    @property
    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes each tier occupies at the end."""
        tiers: Mapping[str, Stats] = self.stats[-1].get("tiers", {})
        return {name: int(tier.get("stored_bytes", tier.get("used_bytes", 0))) for name, tier in tiers.items()}

    @property
    def compression_ratio(self) -> float | None:
        """Payload bytes in the cold tier over the bytes they take there; None if it does not say."""
        cold = self.stats[-1].get("tiers", {}).get("cold", {})
        payload, stored = cold.get("payload_bytes"), cold.get("stored_bytes")
        return payload / stored if payload and stored else None

    @property
    def prefetch_s(self) -> tuple[float, float]:
        """Seconds of loading that were over before the request asked (hidden), and that were not (exposed)."""
        seen = [life.get("counters", {}) for life in self.stats]
        return sum(c.get("hidden_seconds", 0.0) for c in seen), sum(c.get("exposed_seconds", 0.0) for c in seen)

    @property
    def cache_errors(self) -> dict[str, int]:
        """Cache failures that were served as misses, by kind."""
        runs = [run for request in self.requests for run in request.cached]
        return dict(Counter(error for run in [*runs, self.other] for error in run.errors))

    def to_dict(self) -> dict[str, Any]:
        """Plain data. Times in seconds, sizes in bytes."""
        return {
            "requests": [request.to_dict() for request in self.requests],
            "positions_prefilled": self.positions_prefilled,
            "positions_without_cache": self.positions_without_cache,
            "hit_rate": self.hit_rate,
            "tokens_identical": self.identical,
            "other_tenant_reused_tokens": self.other.reused_tokens,
            "speedup_warm": self.speedup_warm,
            "compression_ratio": self.compression_ratio,
            "bytes_by_tier": self.bytes_by_tier,
            "prefetch_hidden_s": self.prefetch_s[0],
            "prefetch_exposed_s": self.prefetch_s[1],
            "cache_errors": self.cache_errors,
        }


def write_json(report: Report, path: Path) -> None:
    """Write `Report.to_dict`. Raises `StorageError`."""
    try:
        path.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror}", remedy="name a file in a writable directory"
        ) from None


def print_report(report: Report, console: Console) -> None:
    """Print the tables and the totals; 80 columns are enough."""
    console.print(_times(report))
    console.print(_reuse(report))
    for line in _totals(report):
        console.print(line, highlight=False)


def _times(report: Report) -> Table:
    table = Table(title="Prompt tokens, and seconds to the first token", box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("request", "user"):
        table.add_column(name, no_wrap=True)
    for name in ("prompt", "no cache", *_PASSES):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("same", no_wrap=True)
    for request in report.requests:
        table.add_row(
            request.id,
            request.user,
            f"{request.uncached.prompt_tokens:,}",
            *(f"{run.ttft_s:.2f}" for run in (request.uncached, *request.cached)),
            "yes" if request.identical else "[bold red]NO[/]",
        )
    return table


def _reuse(report: Report) -> Table:
    seen = {tier for request in report.requests for run in request.cached for tier in run.tokens_by_tier}
    tiers = sorted(seen, key=lambda tier: (_TIERS.index(tier) if tier in _TIERS else len(_TIERS), tier))
    table = Table(
        title=f"Tokens reused from {' / '.join(tiers) or 'nowhere'}", box=box.SIMPLE_HEAD, title_justify="left"
    )
    table.add_column("request", no_wrap=True)
    for name in _PASSES:
        table.add_column(name, justify="right", no_wrap=True)
    for request in report.requests:
        cells = (" / ".join(f"{run.tokens_by_tier.get(tier, 0):,}" for tier in tiers) for run in request.cached)
        table.add_row(request.id, *cells)
    return table


def _totals(report: Report) -> Iterable[str]:
    hidden, exposed = report.prefetch_s
    ratio = f"{report.compression_ratio:.2f}x" if report.compression_ratio else "by an unknown ratio"
    yield (
        f"Prefilled in the first pass: {report.positions_prefilled:,} of {report.positions_without_cache:,} token "
        f"positions ({report.hit_rate:.1%} reused)."
    )
    yield f"The first token of the second pass came {report.speedup_warm:.1f} times sooner (median)."
    sizes = ", ".join(f"{tier} {size / 2**20:.0f} MiB" for tier, size in report.bytes_by_tier.items())
    yield f"In the tiers: {sizes or 'unknown'}; compressed on disk {ratio}."
    yield f"Loading from lower tiers took {hidden + exposed:.2f} s, of which prefetch hid {hidden:.2f} s."
    if report.cache_errors:
        yield f"Cache failures served as misses: {report.cache_errors}."
    yield (
        f"Another tenant, same prompt: {report.other.reused_tokens} tokens reused, "
        f"{'same' if report.other_identical else '[bold red]another[/]'} answer."
    )
    verdict = "All answers are identical" if report.identical else "[bold red]Answers differ[/]"
    yield f"{verdict} with and without tierkv, in every pass."
