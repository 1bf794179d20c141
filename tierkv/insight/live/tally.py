"""What is counted of requests: how many, what they asked for, what they got, and what was lost by which cause."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Tally"]


class Tally:
    """Totals of some requests. Hit and lost tokens add up to those requested.

    Attributes
    ----------
    requests, requested_tokens
        How many, and the tokens of the full blocks that they asked for.
    hit_tokens, lost_tokens
        By tier, and by cause, see `tierkv.insight.live.causes`.
    lost_s
        Seconds of prefill by cause, of requests whose engine's speed is known.
    """

    __slots__ = ("hit_tokens", "lost_s", "lost_tokens", "requested_tokens", "requests")

    def __init__(self) -> None:
        self.requests = 0
        self.requested_tokens = 0
        self.hit_tokens: Counter[str] = Counter()
        self.lost_tokens: Counter[str] = Counter()
        self.lost_s: defaultdict[str, float] = defaultdict(float)

    def note(self, tiers: Sequence[str], lost: Mapping[str, int], block_tokens: int, block_s: float | None) -> None:
        """Count a request: the tier of each block served, and blocks lost by cause."""
        self.requests += 1
        self.requested_tokens += (len(tiers) + sum(lost.values())) * block_tokens
        for tier, blocks in Counter(tiers).items():
            self.hit_tokens[tier] += blocks * block_tokens
        for cause, blocks in lost.items():
            self.lost_tokens[cause] += blocks * block_tokens
            if block_s is not None:
                self.lost_s[cause] += blocks * block_s

    def add(self, other: Tally) -> None:
        """Count all that another one has counted, too."""
        self.requests += other.requests
        self.requested_tokens += other.requested_tokens
        self.hit_tokens.update(other.hit_tokens)
        self.lost_tokens.update(other.lost_tokens)
        for cause, seconds in other.lost_s.items():
            self.lost_s[cause] += seconds

    def move(self, cause: str, to: str, tokens: int) -> None:
        """Call so many of the tokens lost by one cause by another one's name, and as large a part of the seconds."""
        whole = self.lost_tokens[cause]
        if not 0 < tokens <= whole:
            return
        seconds = self.lost_s[cause] * tokens / whole
        self.lost_tokens[cause] -= tokens
        self.lost_tokens[to] += tokens
        if seconds:
            self.lost_s[cause] -= seconds
            self.lost_s[to] += seconds

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without causes that lost nothing."""
        return {
            "requests": self.requests,
            "requested_tokens": self.requested_tokens,
            "hit_tokens": dict(self.hit_tokens),
            "lost_tokens": {cause: count for cause, count in self.lost_tokens.items() if count},
            "lost_s": {cause: seconds for cause, seconds in self.lost_s.items() if seconds > 0},
        }
