"""Compute or load: how far loading a prefix beats computing it, and how long to wait for loads that are late.

Pure arithmetic on seconds, without a clock. A request's blocks are loaded in order; the engine computes what lies
behind the last loaded block, after the loads. Up to which block to load is chosen before anything is known for sure
(`decide`), so a request that waits asks again and again whether to go on waiting (`Patience`).

What can be promised
--------------------
Let W(t) be the time the whole request takes if it leaves at time t with the p(t) blocks it can use by then:

    W(t) = t + (request_s - p(t) * block_s)

W(0) is computing everything that is not in memory now; W grows with time and falls with every arrival. `Patience`
remembers the least W of all looks so far, `best`, and by how much W was expected at that look to rise above it on the
way to the blocks that make loading pay, `due`. With blocks that each pay for themselves that is one delivery; it is
more where a gap is loaded for the sake of blocks in memory behind it, and 0 when nothing is known or loading does not
pay. The next look is at the latest

    until = the time at which W would reach (1 + TOLERANCE) * best + due if nothing more arrived

An arrival only lowers W, and the request leaves at a look, so whatever the loads do, and however wrong the estimates,

    total <= (1 + TOLERANCE) * best + due <= (1 + TOLERANCE) * W(0) + due

and `due` is never more than the awaited blocks can save. When blocks arrive as the estimates say, W never exceeds
`best` by more than `due`, so the request does not leave early and its total is the least there is. In between (loads
that stall and then turn out fast) no rule that keeps the first promise can match the best choice in hindsight; this is
the ski rental problem, with estimates as advice (Purohit, Svitkina and Kumar, Improving Online Algorithms via ML
Predictions, 2018).

Without a prefill rate
----------------------
there is nothing to compare with, and a request loads everything. It does not wait for a tier that has fallen silent,
though: after `quiet_s` without any delivery by the tier it leaves. Loads that have begun go on without it. If the tier
was only slow they arrive, its speed is known from then on, and the next request waits as long as that takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

__all__ = ["TOLERANCE", "Decision", "Patience", "Reason", "Verdict", "decide", "quiet_s"]

TOLERANCE = 0.1
"""Part of the best possible time that waiting for loads may waste."""

_QUIET_S = 2.0
"""Longest silence of a tier of unknown speed: eight blocks of 2 MiB at once come within it at 8.4 MB/s."""
_LEAST_QUIET_S = 1.0
_SEEN_AHEAD = 16
"""Blocks that may be under way at once, so that none comes for as long as they take together."""

Reason = Literal["miss", "in_memory", "unknown_prefill", "unknown_rate", "load", "partly", "recompute"]


@dataclass(frozen=True, slots=True)
class Decision:
    """How far to load a hit prefix.

    Attributes
    ----------
    hit_blocks
        Blocks on offer.
    ready_blocks
        Of these, the ones in memory before the first that is not.
    load_blocks
        How far to load; at least `ready_blocks`, which is where nothing is loaded.
    reason
        ``miss``: nothing is on offer. ``in_memory``: nothing has to be loaded. ``unknown_prefill``: all is loaded, for
        want of a prefill rate to compare with. ``unknown_rate``: among what is loaded are blocks of a tier of unknown
        speed. ``load``, ``partly``, ``recompute``: all, some or nothing of what is not in memory is loaded.
    load_s, recompute_s
        Seconds that loading up to `load_blocks` takes, and seconds of computing that it saves. Blocks of unknown speed
        count nothing in the first; without a prefill rate the second is 0.
    left_load_s, left_recompute_s
        The same of the blocks on offer behind `load_blocks`.
    """

    hit_blocks: int
    ready_blocks: int
    load_blocks: int
    reason: Reason
    load_s: float
    recompute_s: float
    left_load_s: float
    left_recompute_s: float


def decide(costs: Sequence[float | None], block_s: float | None) -> Decision:
    """Choose the cut that makes the sum of loading before it and computing behind it least; of equals the farthest.

    What the request has behind the hit is computed in any case and does not matter here. Blocks in memory behind blocks
    that are not count in favour of loading the gap. A tier of unknown speed is given the benefit of the doubt: trying
    it costs little under `Patience`, never trying it would leave it unknown.

    Parameters
    ----------
    costs
        Per block of the hit prefix the seconds its delivery adds to those before it; 0 for a block in memory, None for
        one in a tier of unknown speed. Work queued before the first load belongs to the first cost.
    block_s
        Seconds to compute one block, None when unknown.
    """
    hit, ready = len(costs), _ready(costs)
    if block_s is None:
        cut = hit
    else:
        cut, gain, best = ready, 0.0, 0.0
        for index in range(ready, hit):
            gain += block_s - (costs[index] or 0.0)
            if gain >= best:
                cut, best = index + 1, gain
    each_s = block_s or 0.0
    return Decision(
        hit_blocks=hit,
        ready_blocks=ready,
        load_blocks=cut,
        reason=_reason(costs, ready, cut, block_s),
        load_s=sum(cost or 0.0 for cost in costs[ready:cut]),
        recompute_s=(cut - ready) * each_s,
        left_load_s=sum(cost or 0.0 for cost in costs[cut:]),
        left_recompute_s=(hit - cut) * each_s,
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to go on waiting.

    Attributes
    ----------
    stay
        False: leave now with what can be used.
    until_s
        When to ask again at the latest, in seconds since the request began to wait; earlier is allowed.
    load_blocks
        How far loading still pays; what lies behind it need not be loaded any more.
    """

    stay: bool
    until_s: float
    load_blocks: int


@dataclass(slots=True)
class Patience:
    """How long one request waits for its loads. See the module's text for what it promises.

    Attributes
    ----------
    request_s
        Seconds to compute the whole request, from its first token to its last.
    block_s
        Seconds to compute one block.
    best_s, due_s
        The least total time that leaving at one of the looks so far would have come to, and the seconds that estimates
        said then it takes to improve on it.
    """

    request_s: float
    block_s: float
    best_s: float = inf
    due_s: float = 0.0

    def reconsider(self, elapsed_s: float, costs: Sequence[float | None], deviation_s: float = 0.0) -> Verdict:
        """Stay or go. Ask when the request begins to wait and then at each `Verdict.until_s` or more often.

        During the first tenth of the best time seen so far estimates do not make it leave, only wasted time does: a
        tier is not judged by its first block. Afterwards, what the estimates say no longer pays is given up.

        Parameters
        ----------
        elapsed_s
            Seconds since the request began to wait.
        costs
            As for `decide`, of the blocks that are waited for: 0 for those that have arrived, None while the tier's
            speed is unknown, else by current estimates.
        deviation_s
            Standard deviation of the next delivery; twice as much is granted.
        """
        ready, pays = _ready(costs), decide(costs, self.block_s).load_blocks
        rest_s = self.request_s - ready * self.block_s
        if elapsed_s + rest_s < self.best_s:
            self.best_s = elapsed_s + rest_s
            self.due_s = self._rise(costs[ready:pays], deviation_s)
        goal = len(costs) if elapsed_s < TOLERANCE * self.best_s else pays
        due_s = self.due_s if pays > ready else 0.0
        until_s = (1.0 + TOLERANCE) * self.best_s + due_s - rest_s
        if goal <= ready or until_s <= elapsed_s:
            return Verdict(False, elapsed_s, ready)
        return Verdict(True, until_s, goal)

    def _rise(self, awaited: Sequence[float | None], deviation_s: float) -> float:
        """Return by how much W exceeds its present value, at the most, until the awaited blocks are there."""
        level_s = peak_s = 0.0
        for cost in awaited:
            level_s += cost or 0.0
            peak_s = max(peak_s, level_s)
            level_s -= self.block_s
        return min(peak_s + 2.0 * deviation_s, len(awaited) * self.block_s) if peak_s else 0.0


def quiet_s(costs: Sequence[float | None], deviation_s: float) -> float:
    """Return for how many seconds a tier may deliver nothing until a request without a prefill rate leaves.

    Twice what its next blocks should take together, and at least one second; 2 seconds while its speed is unknown.
    Parameters as for `Patience.reconsider`.
    """
    awaited = [cost for cost in costs if cost is None or cost > 0.0][:_SEEN_AHEAD]
    expected_s = 0.0
    for cost in awaited:
        if cost is None:
            return _QUIET_S
        expected_s += cost
    return max(_LEAST_QUIET_S, 2.0 * expected_s + 2.0 * deviation_s)


def _ready(costs: Sequence[float | None]) -> int:
    for index, cost in enumerate(costs):
        if cost is None or cost > 0.0:
            return index
    return len(costs)


def _reason(costs: Sequence[float | None], ready: int, cut: int, block_s: float | None) -> Reason:
    if not costs:
        return "miss"
    if ready == len(costs):
        return "in_memory"
    if block_s is None:
        return "unknown_prefill"
    if cut == ready:
        return "recompute"
    if None in costs[ready:cut]:
        return "unknown_rate"
    return "load" if cut == len(costs) else "partly"
