"""Served against computed K or V: how far apart, and where first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierkv.insight.audit.ulps import Bits, as_numbers, ulp_distance, ulp_histogram

__all__ = ["Comparison", "absolute_difference", "divergence"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One layer's K or V, served and computed: whole blocks from token `first` on.

    Attributes
    ----------
    first
        Position of the first token: a layer with a window has none before it.
    differing, off
        Per token, how many values have other bits, and the largest absolute difference.
    typical
        Root mean square of all differences but the largest.
    largest
        The largest finite magnitude that was computed.
    block_errors
        Relative error of each block.
    ulps
        Histogram of `ulp_distance`.
    """

    first: int
    differing: NDArray[np.int64]
    off: NDArray[np.float64]
    typical: float
    largest: float
    block_errors: NDArray[np.float64]
    ulps: tuple[int, ...]

    @classmethod
    def of(cls, served: Bits, computed: Bits, dtype: str, *, first: int, block_tokens: int) -> Comparison:
        """Compare bits of ``(heads, tokens, head_dim)``, at least one token. Keeps neither."""
        exact = as_numbers(computed, dtype).astype(np.float64)
        off = absolute_difference(as_numbers(served, dtype), exact)
        starts = np.arange(0, served.shape[1], block_tokens)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            errors, sizes = (
                np.sqrt(np.add.reduceat(np.square(part).sum(axis=(0, 2)), starts)) for part in (off, exact)
            )
            relative = np.where(errors > 0, errors / sizes, 0.0)
        relative[np.isnan(relative)] = np.inf
        finite = np.abs(exact[np.isfinite(exact)])
        return cls(
            first=first,
            differing=(served != computed).sum(axis=(0, 2)),
            off=off.max(axis=(0, 2)),
            typical=_rms_but_largest(off),
            largest=float(finite.max(initial=0.0)),
            block_errors=relative,
            ulps=ulp_histogram(ulp_distance(served, computed, dtype)),
        )

    @property
    def max_difference(self) -> float:
        return float(self.off.max(initial=0.0))

    @property
    def relative_error(self) -> float:
        return float(self.block_errors.max(initial=0.0))

    @property
    def spike(self) -> bool:
        """Whether one difference stands out so far from all others of the layer that no rounding explains it.

        Rounding moves many values a little; a flipped bit moves one.
        """
        most = self.max_difference
        if np.isinf(most):
            return True
        return most > _SPIKE * self.typical


_SPIKE = 16.0


def _rms_but_largest(off: NDArray[np.float64]) -> float:
    rest = np.delete(off.ravel(), off.argmax())
    return float(np.sqrt(np.square(rest).mean())) if rest.size else 0.0


def absolute_difference(left: NDArray[Any], right: NDArray[Any]) -> NDArray[np.float64]:
    """Return ``|left - right|``: 0 for equal infinities and for two NaNs, infinite where one alone is not finite."""
    with np.errstate(invalid="ignore"):
        off: NDArray[np.float64] = np.abs(left.astype(np.float64) - right)
    odd = np.isnan(off)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    off[odd] = np.where(same[odd], 0.0, np.inf)
    return off


def divergence(served: Sequence[float] | NDArray[Any], computed: Sequence[float] | NDArray[Any]) -> float:
    """Return the KL divergence in nats of the distribution that `served` logits mean from that of `computed` ones."""
    parts = [np.asarray(logits, np.float64) for logits in (computed, served)]
    if not all(np.isfinite(logits).all() for logits in parts):
        return 0.0 if np.array_equal(parts[0], parts[1], equal_nan=True) else float("inf")
    want, have = (logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()) for logits in parts)
    return max(0.0, float((np.exp(want) * (want - have)).sum()))
