"""How far served KV may be from what is computed, and why so far.

The same prompt computed in steps of another size gives other bits, as matrix products of other shapes add in another
order. How far apart two such runs are is measured in each audit; what is served may be `MARGINS` times as far off, as
the step that stored a block can have been of any size, down to one token of an answer. What a lossy level adds to that
is a budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tierkv.insight.audit.ulps import EPSILON

__all__ = ["BUDGETS", "MARGINS", "Budget", "envelope"]


@dataclass(frozen=True, slots=True)
class Budget:
    """What a lossy codec may cost.

    Attributes
    ----------
    relative_error
        Norm of the error over that of K or V, of one block in one layer.
    kl
        Divergence of the next token's distribution, in nats, in one audit. Single tokens lose much more than the mean.
    """

    relative_error: float
    kl: float


BUDGETS: Mapping[str, Budget] = {
    "int8": Budget(0.02, 0.02),
    "eq2": Budget(0.04, 0.05),
    "eq3": Budget(0.12, 0.5),
    "eq4": Budget(0.25, 2.0),
    "eq5": Budget(0.5, 3.0),
}
"""By codec: about twice the errors of one coding, as blocks behind a restored prefix are computed from restored KV, and
of the divergence twice the largest that was measured; see docs/container.md."""

MARGINS: Mapping[str, float] = {"float32": 16.0, "float16": 8.0, "bfloat16": 6.0}
"""How much farther off than the two computations of an audit. Measured: 7.1 and 4.4 at most, docs/audit.md."""


def envelope(dtype: str, measured: float, largest: float) -> float:
    """Return what a difference may be, given the `measured` one of two computations and the `largest` magnitude.

    Two computations can agree to the bit by chance, so it is never less than one step of the largest number allows.
    """
    return MARGINS[dtype] * max(measured, EPSILON[dtype] * largest)
