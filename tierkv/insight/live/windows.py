"""What was counted lately: totals of each tenant for every five minutes of the last day."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from tierkv.insight.live.regret import Regret
from tierkv.insight.live.tally import Tally

__all__ = ["LONGEST_S", "SLICE_S", "TenantTotals", "Window", "Windows"]

SLICE_S = 300.0
"""Seconds that are counted together: a window is as many of these as it takes."""
LONGEST_S = 86400.0
"""The longest window, in seconds."""


@dataclass(frozen=True, slots=True)
class TenantTotals:
    """All that was counted of one tenant."""

    tally: Tally = field(default_factory=Tally)
    regret: Regret = field(default_factory=Regret)

    def add(self, other: TenantTotals) -> None:
        """Count all that another one has counted, too."""
        self.tally.add(other.tally)
        self.regret.add(other.regret)


@dataclass(frozen=True, slots=True)
class Window:
    """What was counted in a window.

    Attributes
    ----------
    since
        When it begins, in seconds since the epoch.
    tenants
        Totals by tenant id.
    dropped
        Requests that were not looked into.
    """

    since: float
    tenants: Mapping[bytes, TenantTotals]
    dropped: int


@dataclass(slots=True)
class _Slice:
    """Whole minutes by the clock: their number, counted in slices since the epoch, and what was counted in them."""

    number: int
    tenants: dict[bytes, TenantTotals] = field(default_factory=dict)
    dropped: int = 0


class Windows:
    """Counts by the clock, in slices that are forgotten after a day. Not safe for use by several threads.

    Parameters
    ----------
    since
        When counting begins, in seconds since the epoch.
    most
        How many totals (of one tenant in one slice) are kept. With more, the oldest slices go early, and the longest
        windows begin later than asked for.
    """

    def __init__(self, since: float, most: int = 1 << 14) -> None:
        self._since = since
        self._most = most
        self._held = 0
        self._slices: deque[_Slice] = deque()  # the oldest first; those in which nothing happened are not there
        self._forgotten = int(since // SLICE_S) - 1  # the last slice of which something may be missing

    def __len__(self) -> int:
        """Return how many totals are kept."""
        return self._held

    def totals(self, tenant: bytes, at: float) -> TenantTotals:
        """Return those that something which a tenant did at a time is to be counted in."""
        now = self._slice(at)
        found = now.tenants.get(tenant)
        if found is None:
            found = now.tenants[tenant] = TenantTotals()
            self._held += 1
            while self._held > self._most and len(self._slices) > 1:
                self._forget()
        return found

    def dropped(self, at: float, count: int) -> None:
        """Count requests that were not looked into at a time."""
        if count:
            self._slice(at).dropped += count

    def last(self, seconds: float, now: float) -> Window:
        """Add up the window of so many seconds before `now`; it begins with a slice, so up to `SLICE_S` earlier."""
        first = max(int((now - seconds) // SLICE_S), self._forgotten + 1)
        tenants: dict[bytes, TenantTotals] = {}
        dropped = 0
        for part in self._slices:
            if part.number >= first:
                dropped += part.dropped
                for tenant, totals in part.tenants.items():
                    tenants.setdefault(tenant, TenantTotals()).add(totals)
        return Window(max(first * SLICE_S, self._since), tenants, dropped)

    def _slice(self, at: float) -> _Slice:
        number = int(at // SLICE_S)
        # A clock that was set back does not bring slices back.
        if not self._slices or self._slices[-1].number < number:
            self._slices.append(_Slice(number))
            while self._slices[0].number < number - LONGEST_S // SLICE_S:
                self._forget()
        return self._slices[-1]

    def _forget(self) -> None:
        oldest = self._slices.popleft()
        self._held -= len(oldest.tenants)
        self._forgotten = oldest.number
