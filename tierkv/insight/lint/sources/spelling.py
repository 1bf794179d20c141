"""Which spelling of a piece is the usual one, and what sets another apart from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tierkv.insight.lint.causes.cause import Cause
from tierkv.insight.lint.causes.order import KEYS
from tierkv.insight.lint.causes.spelling import TOKENISER, WHITESPACE
from tierkv.insight.lint.core.batch import Kind
from tierkv.insight.lint.sources.segments import Segment, Slot

__all__ = ["Spellings"]

_WRITTEN = {Kind.TEXT, Kind.TOOL, Kind.JSON, Kind.DOCUMENT}


class Spellings:
    """Counts of spellings."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, int] | Counter[int]] = {}
        self._written: dict[int, dict[int, Segment]] = {}

    def count(self, slots: list[Slot]) -> None:
        """Learn from a prompt."""
        for slot in slots:
            segment = slot.segment
            if segment.kind not in _WRITTEN or segment.text.isspace():
                continue
            known = self._counts.get(segment.meaning)
            if isinstance(known, Counter):
                known[segment.spelling] += 1
                self._written[segment.meaning].setdefault(segment.spelling, segment)
            elif known is None or known[0] == segment.spelling:
                self._counts[segment.meaning] = (segment.spelling, 1 if known is None else known[1] + 1)
            else:
                self._counts[segment.meaning] = Counter({known[0]: known[1], segment.spelling: 1})
                self._written[segment.meaning] = {segment.spelling: segment}

    def respell(self, slots: list[Slot]) -> list[Slot]:
        """Put the usual spelling beside every segment that is spelled otherwise."""
        result: list[Slot] = []
        for slot in slots:
            segment = slot.segment
            counts = self._counts.get(segment.meaning)
            if not isinstance(counts, Counter) or segment.kind not in _WRITTEN:
                result.append(slot)
                continue
            written = self._written[segment.meaning]
            written.setdefault(segment.spelling, segment)
            usual = written.get(counts.most_common(1)[0][0])
            if usual is None or usual.spelling == segment.spelling:
                result.append(slot)
                continue
            cause = _difference(segment, usual).code
            result.append(replace(slot, live=False, given=cause))
            result.append(replace(slot, segment=usual, own=False, given=cause))
        return result


def _difference(segment: Segment, usual: Segment) -> Cause:
    if segment.text == usual.text:
        return TOKENISER
    if "".join(segment.text.split()) == "".join(usual.text.split()):
        return WHITESPACE
    return KEYS
