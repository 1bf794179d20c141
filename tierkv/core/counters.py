"""What the engine counts. One place, plain integers and seconds, changed only under the engine's lock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Counters"]


@dataclass(slots=True)
class Counters:
    """Totals since start. Documented in docs/metrics.md.

    Attributes
    ----------
    acquires, requested_tokens
        Acquire calls, and the tokens of the full blocks they asked for.
    hit_tokens
        Tokens served, by the tier that held them when they were first asked for.
    missed_blocks
        Blocks that were asked for and not served, by reason, see `tierkv.cache.ReadLease.missed_tokens`.
    stored_blocks, stored_bytes
        Blocks published by commits.
    promoted_blocks, demoted_blocks, promoted_bytes, demoted_bytes
        Moves, by ``from>to`` tier names.
    evicted_blocks
        Blocks that left a tier to make room, by tier.
    lost_blocks
        Published blocks that left the last tier that held them, by reason: ``evicted``, ``not_demoted_in_time``,
        ``corrupt``, ``deleted``, ``cleared``.
    corrupt_blocks
        Verification failures, by tier and cause (``tier/cause``).
    refused_demotions
        Blocks the cold tier would not take, by problem type; they stay in memory and are offered again.
    expired_leases
        Leases ended by their deadline, by kind.
    load_seconds, hidden_seconds, exposed_seconds
        Work of loads that requests used; its part that was over before the request asked; the rest.
    saved_seconds
        Seconds of prefill that hits saved, less those spent waiting for them; where the engine's speed is known.
    lead_seconds
        From the arrival of prefetched blocks to their first use, summed over the blocks.
    wasted_bytes
        Blocks that were promoted and left memory again before anybody used them.
    compute_leases
        Compute leases by what became of them: ``granted``; then ``done`` (all published), ``ended`` (given back
        before) or ``expired`` (no progress in time).
    shared_tokens
        Tokens that requests waited for and got from another request's prefill instead of computing them, too.
    decisions
        Answers of compute-or-load, by `Decision.reason`.
    """

    acquires: int = 0
    requested_tokens: int = 0
    hit_tokens: Counter[str] = field(default_factory=Counter)
    missed_blocks: Counter[str] = field(default_factory=Counter)
    stored_blocks: int = 0
    stored_bytes: int = 0
    promoted_blocks: Counter[str] = field(default_factory=Counter)
    promoted_bytes: Counter[str] = field(default_factory=Counter)
    demoted_blocks: Counter[str] = field(default_factory=Counter)
    demoted_bytes: Counter[str] = field(default_factory=Counter)
    evicted_blocks: Counter[str] = field(default_factory=Counter)
    lost_blocks: Counter[str] = field(default_factory=Counter)
    corrupt_blocks: Counter[str] = field(default_factory=Counter)
    refused_demotions: Counter[str] = field(default_factory=Counter)
    expired_leases: Counter[str] = field(default_factory=Counter)
    load_seconds: float = 0.0
    hidden_seconds: float = 0.0
    exposed_seconds: float = 0.0
    saved_seconds: float = 0.0
    lead_seconds: float = 0.0
    wasted_bytes: int = 0
    compute_leases: Counter[str] = field(default_factory=Counter)
    shared_tokens: int = 0
    decisions: Counter[str] = field(default_factory=Counter)

    def to_dict(self) -> dict[str, object]:
        """Plain data for stats."""
        plain: dict[str, object] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            plain[name] = dict(value) if isinstance(value, Counter) else value
        return plain
