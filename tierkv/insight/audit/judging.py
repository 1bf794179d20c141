"""The verdict on one hit, from what was served and what was computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tierkv.insight.audit.comparing import Comparison, absolute_difference, divergence
from tierkv.insight.audit.limits import BUDGETS, MARGINS, envelope
from tierkv.insight.audit.result import Basis, LogitsDifference, Plane, PlaneDifference, Reason, Verdict
from tierkv.insight.audit.ulps import EPSILON

__all__ = ["Compared", "Judgement", "Spot", "judge", "same"]

Logits = NDArray[np.float32]

_ANOTHERS = 0.5
"""Relative error of a block from which on its numbers have little to do with those that were computed."""


@dataclass(frozen=True, slots=True)
class Compared:
    """K or V of one layer: how far what was served is from what was computed, and what was computed in another way.

    `other` is None where computing once was enough.
    """

    layer: int
    plane: Plane
    served: Comparison
    other: Comparison | None


@dataclass(frozen=True, slots=True)
class Spot:
    """The first place beyond the limit; fields as in `Finding`."""

    layer: int
    plane: Plane
    token: int
    difference: float
    limit: float
    positions: int


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and all it rests on; fields as in `AuditResult`."""

    verdict: Verdict
    basis: Basis
    reason: Reason
    planes: tuple[PlaneDifference, ...]
    logits: LogitsDifference
    spot: Spot | None


def same(planes: Sequence[Compared], served: Logits, computed: Logits) -> bool:
    """Say whether every bit agrees."""
    kv = not any(part.served.differing.any() for part in planes)
    return kv and np.array_equal(served.view(np.uint32), computed.view(np.uint32))


def judge(
    planes: Sequence[Compared],
    logits: tuple[Logits, Logits, Logits | None],
    *,
    dtype: str,
    lossy: str,
    block_tokens: int,
) -> Judgement:
    """Judge a hit.

    Parameters
    ----------
    planes
        In the order of layers, K before V.
    logits
        Served, computed, and computed in another way. None, there and in `planes`: every bit has to agree.
    dtype, lossy, block_tokens
        As in `KVSpec`.
    """
    exact = logits[2] is None
    budget = BUDGETS.get(lossy) if not exact else None
    basis: Basis = "exact" if exact else "envelope" if budget is None else "budget"
    shown, spots, damaged = [], [], False
    for part in planes:
        found = part.served
        limit = 0.0
        if part.other is not None and budget is None:
            limit = envelope(dtype, part.other.max_difference, found.largest)
        elif part.other is not None and budget is not None:
            limit = budget.relative_error + MARGINS[dtype] * max(part.other.relative_error, EPSILON[dtype])
        shown.append(
            PlaneDifference(
                part.layer,
                part.plane,
                int(found.differing.sum()),
                found.max_difference,
                found.relative_error,
                limit,
                found.ulps,
            )
        )
        beyond = _beyond(found, basis, limit, block_tokens)
        if beyond.any():
            at = int(beyond.argmax())
            size = float(found.block_errors[at // block_tokens] if basis == "budget" else found.off[at])
            spots.append(Spot(part.layer, part.plane, found.first + at, size, limit, int(beyond.sum())))
            damaged |= exact or found.relative_error > _ANOTHERS + limit * (basis == "budget")
            damaged |= basis == "envelope" and found.spike
    held = _logits(logits, dtype, lossy)
    if spots:
        reason: Reason = "bits" if exact else "relative-error" if basis == "budget" else "difference"
        first = min(spots, key=lambda spot: spot.token)  # the first of equals: layers ascend, K goes before V
        return Judgement("corrupt" if damaged else "outside", basis, reason, tuple(shown), held, first)
    reason = _what_follows(held, basis)
    return Judgement("outside" if reason else "ok", basis, reason, tuple(shown), held, None)


def _beyond(found: Comparison, basis: Basis, limit: float, block_tokens: int) -> NDArray[np.bool_]:
    """Say for each token whether it is beyond the limit."""
    if basis == "exact":
        return found.differing > 0
    if basis == "envelope":
        return found.off > limit
    return np.repeat(found.block_errors > limit, block_tokens)[: found.off.size]


def _logits(logits: tuple[Logits, Logits, Logits | None], dtype: str, lossy: str) -> LogitsDifference:
    served, computed, other = logits
    off = float(absolute_difference(served, computed).max())
    limit, kl_limit = 0.0, None
    if other is not None:
        measured = float(absolute_difference(other, computed).max())
        limit = envelope(dtype, measured, float(np.abs(computed[np.isfinite(computed)]).max(initial=0.0)))
        if lossy:
            kl_limit = BUDGETS[lossy].kl + MARGINS[dtype] * divergence(other, computed)
    choice, best = int(served.argmax()), int(computed.argmax())
    return LogitsDifference(
        max_difference=off,
        limit=limit,
        kl=divergence(served, computed),
        kl_limit=kl_limit,
        same_token=choice == best,
        near_tie=choice == best or bool(computed[best] - computed[choice] <= limit),
    )


def _what_follows(held: LogitsDifference, basis: Basis) -> Reason:
    """Say what is wrong with the logits, of KV that is as it should be."""
    if basis == "budget":
        return "kl" if held.kl is not None and held.kl_limit is not None and held.kl > held.kl_limit else ""
    if not held.near_tie:
        return "token"
    return "logits" if held.max_difference > held.limit else ""
