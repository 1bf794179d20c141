"""Regret: blocks that a tier gave up, and that somebody wanted again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tierkv.core.observing import SeenRequest

__all__ = ["Ghost", "Ghosts", "Regret"]

_WITHIN = ((60.0, "1min"), (600.0, "10min"), (3600.0, "1h"), (86400.0, "1d"))
_LATER = "later"


@dataclass(frozen=True, slots=True)
class Ghost:
    """A block that left a tier: event and time (seconds since the epoch), and whether that was its last one."""

    tier: str
    sequence: int
    at: float
    last: bool


class Ghosts:
    """The blocks that left tiers lately, each with the tier it left last.

    Parameters
    ----------
    tiers
        Names of all tiers, the fastest first.
    most
        How many are remembered.
    """

    def __init__(self, tiers: Sequence[str], most: int = 1 << 16) -> None:
        self._rank = {name: rank for rank, name in enumerate(tiers)}
        self._most = most
        self._ghosts: OrderedDict[bytes, Ghost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ghosts)

    def left(self, keys: Sequence[bytes], ghost: Ghost) -> None:
        """Note that blocks left a tier."""
        ghosts = self._ghosts
        for key in keys:
            ghosts.pop(key, None)
            ghosts[key] = ghost
        while len(ghosts) > self._most:
            ghosts.popitem(last=False)

    def lost_from(self, seen: SeenRequest, start: int) -> int:
        """Return where the run of blocks ends that are known to have been lost, from block `start` of a request."""
        at = start
        while at < len(seen.hashes):
            ghost = self._ghosts.get(seen.key(at))
            if ghost is None or not ghost.last or ghost.sequence > seen.sequence:
                break
            at += 1
        return at

    def wanted(self, seen: SeenRequest, stop: int) -> Iterator[Ghost]:
        """Yield what a request regrets of its first `stop` blocks, a ghost for each, and forget them.

        A block that came from a slower tier than the one it left last, or that had left its last one.
        """
        if not self._ghosts:
            return
        rank, slowest = self._rank, len(self._rank)
        fastest = min(rank.values(), default=0)
        for index in range(min(stop, len(seen.hashes))):
            served = rank.get(seen.tiers[index], slowest) if index < len(seen.tiers) else slowest
            if served == fastest:
                continue
            key = seen.key(index)
            ghost = self._ghosts.get(key)
            if ghost is None or ghost.sequence > seen.sequence:
                continue
            if served > rank.get(ghost.tier, slowest) and (ghost.last or index < seen.published):
                del self._ghosts[key]
                yield ghost


class Regret:
    """Totals of regretted tokens, by the tier that gave the blocks up."""

    def __init__(self) -> None:
        self._within: dict[str, Counter[str]] = {}
        self._lost: Counter[str] = Counter()

    def note(self, ghost: Ghost, at: float, tokens: int) -> None:
        """Count a block of so many tokens that was wanted again at a time."""
        passed = at - ghost.at
        within = next((name for seconds, name in _WITHIN if passed <= seconds), _LATER)
        self._within.setdefault(ghost.tier, Counter())[within] += tokens
        if ghost.last:
            self._lost[ghost.tier] += tokens

    def add(self, other: Regret) -> None:
        """Count all that another one has counted, too."""
        for tier, within in other._within.items():
            self._within.setdefault(tier, Counter()).update(within)
        self._lost.update(other._lost)

    def tokens(self) -> dict[str, int]:
        """Return regretted tokens by tier."""
        return {tier: sum(within.values()) for tier, within in self._within.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data by tier: all tokens, those that no tier had any more, and all by how soon."""
        return {
            tier: {"tokens": sum(within.values()), "lost_tokens": self._lost[tier], "within": dict(within)}
            for tier, within in self._within.items()
        }
