"""In which order the causes of a template are taken out of its prompts: first in the prompt first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tierkv.insight.lint.causes.data import CHANGING_VALUE, USER_DATA
from tierkv.insight.lint.causes.order import REORDERED
from tierkv.insight.lint.core.batch import Batch, Ints, Words
from tierkv.insight.lint.core.plan import Plan
from tierkv.insight.lint.survey import LossKey, Suspect, pack, packed_keys

__all__ = ["Steps"]

_LEAST_SHARE = 0.002
"""A suspect that can cost less of the log's prompt tokens than this is not looked at on its own."""
_RARE = 0.2
"""A cause of token ids that costs less than this of another one in the same place is taken for a form of that."""
_NEAR_TOKENS = 32
"""So is a changing value as near as this to changing text."""
_OPAQUE = (USER_DATA.code, CHANGING_VALUE.code, REORDERED.code)
_MOST = 6
"""Causes of one template that are told apart; what further ones cost is counted with the last of these."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Causes of templates, in order.

    Attributes
    ----------
    by_template
        Template -> its causes.
    count
        Causes of the template that has most.
    """

    by_template: Mapping[int, tuple[LossKey, ...]]
    count: int
    _keys: Words
    _numbers: Ints

    @classmethod
    def of(cls, suspects: Mapping[LossKey, Suspect], prompt_tokens: int) -> Steps:
        """Choose what is worth telling apart in a log of so many tokens."""
        alike = _alike(suspects)
        chosen: dict[int, list[LossKey]] = {}
        for key, suspect in suspects.items():
            if key not in alike and suspect.exposed >= _LEAST_SHARE * prompt_tokens:
                chosen.setdefault(key.template, []).append(key)
        ordered: dict[int, tuple[LossKey, ...]] = {}
        for template, keys in chosen.items():
            largest = sorted(keys, key=lambda key: -suspects[key].exposed)[:_MOST]
            ordered[template] = tuple(sorted(largest, key=lambda key: (suspects[key].offset, key)))
        numbered = {key: number for keys in ordered.values() for number, key in enumerate(keys)}
        numbered |= {key: numbered[other] for key, other in alike.items() if other in numbered}
        pairs = list(numbered.items())
        templates = np.array([key.template for key, _ in pairs], np.uint64)
        packed = pack(templates, np.array([(key.place << 8) | key.cause for key, _ in pairs], np.uint64))
        order = np.argsort(packed)
        numbers = np.array([number for _, number in pairs], np.int64)
        return cls(ordered, max(map(len, ordered.values()), default=0), packed[order], numbers[order])

    def of_segments(self, batch: Batch, plan: Plan) -> Ints:
        """Return at which step each segment's cause is taken out: 0 is the first; beyond all for those of no step."""
        keys = packed_keys(batch, plan)
        beyond = np.full(keys.size, self.count + 1, np.int64)
        if self._keys.size == 0:
            return beyond
        places = np.minimum(np.searchsorted(self._keys, keys), self._keys.size - 1)
        return np.where((self._keys[places] == keys) & (plan.causes > 0), self._numbers[places], beyond)


def _alike(suspects: Mapping[LossKey, Suspect]) -> dict[LossKey, LossKey]:
    """Map what is a rare form of another cause to it: of token ids alone it cannot always be told what they are."""
    found: dict[LossKey, LossKey] = {}
    for key, suspect in suspects.items():
        if key.cause in _OPAQUE:
            rivals = [LossKey(key.template, key.place, code) for code in _OPAQUE]
            largest = max((rival for rival in rivals if rival in suspects), key=lambda rival: suspects[rival].exposed)
            near = abs(suspect.offset - suspects[largest].offset) < _NEAR_TOKENS and REORDERED.code not in (
                key.cause,
                largest.cause,
            )
            if key != largest and (near or suspect.exposed < _RARE * suspects[largest].exposed):
                found[key] = largest
    return found
