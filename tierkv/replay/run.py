"""A replay and its yardsticks in one result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tierkv.errors import ConfigError, InvalidRequest
from tierkv.policy import EvictionPolicy, make_policy
from tierkv.replay.belady import belady_hit_tokens
from tierkv.replay.costs import Costs, Worth, worth
from tierkv.replay.sessions import session_ends
from tierkv.replay.single import ideal_hit_tokens, replay
from tierkv.replay.tiers import TierPlan, replay_tiers
from tierkv.replay.trace import Trace

__all__ = ["Outcome", "TierOutcome", "TiersOutcome", "capacity_in_blocks", "run_policy", "run_tiers"]

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class TierOutcome:
    """What one tier did.

    Attributes
    ----------
    capacity_blocks
        Blocks it holds.
    hit_tokens
        Tokens it delivered: those a faster tier did not have.
    """

    name: str
    capacity_blocks: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class TiersOutcome:
    """What only a replay of tiers tells.

    Attributes
    ----------
    disk_written_bytes
        Bytes written to the cold tier, before compression.
    """

    tiers: tuple[TierOutcome, ...]
    disk_written_bytes: int
    worth: Worth


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a replay.

    Attributes
    ----------
    capacity_blocks
        Blocks of the cache; of several tiers, of the largest: each holds what is in the tiers above it.
    hit_tokens, ideal_hit_tokens, belady_hit_tokens
        Found by the policies, by a cache that never evicts, and by one of the same capacity that knows the future.
    refs_per_s
        Blocks of the trace replayed per second.
    detail
        Of the single tiers, where there are several.
    """

    requests: int
    prompt_tokens: int
    capacity_blocks: int
    hit_tokens: int
    ideal_hit_tokens: int
    belady_hit_tokens: int
    refs_per_s: float
    detail: TiersOutcome | None = None

    def rate(self, tokens: int) -> float:
        """Return tokens as a share of all prompt tokens."""
        return tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return what `tierkv replay --json` prints."""
        figures: dict[str, Any] = {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "hit_rate": self.rate(self.hit_tokens),
            "ideal_hit_tokens": self.ideal_hit_tokens,
            "belady_hit_tokens": self.belady_hit_tokens,
            "refs_per_s": self.refs_per_s,
        }
        if self.detail is not None:
            figures["tiers"] = [{**asdict(tier), "hit_rate": self.rate(tier.hit_tokens)} for tier in self.detail.tiers]
            figures["disk_written_bytes"] = self.detail.disk_written_bytes
            figures["prefill_saved_s"] = self.detail.worth.prefill_saved_s
            figures["load_s"] = self.detail.worth.load_s
            figures["ttft_s"] = asdict(self.detail.worth.cached)
            figures["ttft_uncached_s"] = asdict(self.detail.worth.uncached)
        return figures


def capacity_in_blocks(trace: Trace, share: str, instead: str = "--capacity-blocks") -> int:
    """Return so many percent (`5%`) of the trace's distinct blocks, at least one block.

    Raises `ConfigError`, which names the option to use `instead`.
    """
    number, sign, rest = share.strip().partition("%")
    try:
        percent = float(number)
    except ValueError:
        percent = 0.0
    if sign != "%" or rest or not 0 < percent <= 100:
        raise ConfigError(
            f"{share!r} is not a share of the trace's blocks",
            remedy=f"write a percentage, such as 5%, or use {instead}",
        )
    return max(1, int(percent * trace.unique_blocks() / 100))


def run_policy(
    trace: Trace,
    name: str,
    capacity: int,
    parameters: Mapping[str, float],
    *,
    end_hints: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Replay one cache of `capacity` blocks.

    Raises `ConfigError` for an unknown policy or parameter, `InvalidRequest` for an empty trace.
    """
    policy: EvictionPolicy[int] = make_policy(name, capacity, **parameters)
    _check(trace)
    ends = session_ends(trace) if end_hints else None
    begin = time.perf_counter()
    hit_tokens = replay(trace, policy, capacity, ends=ends, progress=progress)
    return _outcome(trace, capacity, hit_tokens, time.perf_counter() - begin)


def run_tiers(
    trace: Trace, plan: TierPlan, costs: Costs, *, end_hints: bool = False, progress: Progress | None = None
) -> Outcome:
    """Replay the tiers of a plan.

    Raises `ConfigError` for an impossible plan, `InvalidRequest` for an empty trace.
    """
    _check(trace)
    ends = session_ends(trace) if end_hints else None
    begin = time.perf_counter()
    hits = replay_tiers(trace, plan, ends=ends, progress=progress)
    seconds = time.perf_counter() - begin
    by_tier = [sum(tokens) for tokens in zip(*hits.tokens, strict=True)]
    detail = TiersOutcome(
        tuple(map(TierOutcome, plan.names(), plan.capacities(), by_tier)),
        hits.cold_writes * trace.block_tokens * costs.bytes_per_token,
        worth(trace, plan.names(), hits.tokens, costs),
    )
    return _outcome(trace, max(plan.capacities()), sum(by_tier), seconds, detail)


def _check(trace: Trace) -> None:
    if not trace.references():
        raise InvalidRequest("the trace has no blocks", remedy="give a trace with at least one prompt")


def _outcome(
    trace: Trace, capacity: int, hit_tokens: int, seconds: float, detail: TiersOutcome | None = None
) -> Outcome:
    return Outcome(
        requests=len(trace.requests),
        prompt_tokens=trace.prompt_tokens(),
        capacity_blocks=capacity,
        hit_tokens=hit_tokens,
        ideal_hit_tokens=ideal_hit_tokens(trace),
        belady_hit_tokens=belady_hit_tokens(trace, capacity),
        refs_per_s=trace.references() / seconds,
        detail=detail,
    )
