"""One prompt without the causes that are to go: the new texts of its parts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.insight.lint.core.batch import Bools, Kind
from tierkv.insight.lint.core.plan import Plan
from tierkv.insight.lint.sources.segments import Slot
from tierkv.insight.lint.text.prompt import Part

__all__ = ["PLACEHOLDER", "rewritten_parts"]

PLACEHOLDER = "(see below)"
"""Stands where a value was that now stands behind the text all share."""
_VALUES = (Kind.CLOCK, Kind.IDENTIFIER, Kind.COUNTER)
_LAST_CLAUSE = re.compile(r"(?<![^\s.])[^\n.!?;]{1,40}$")
"""The words in front of a value on its line, from the last sentence end or word on."""


@dataclass(frozen=True, slots=True, order=True)
class _Entry:
    """Some text and where it goes: what is `moved` comes behind what is at that position, the most frequent first."""

    position: int
    moved: bool
    rarity: int
    index: int
    part: int
    text: str


def rewritten_parts(
    plan: Plan, kept: Bools, live: Bools, slots: Sequence[Slot], begin: int, parts: Sequence[Part]
) -> dict[int, str]:
    """Lay the segments of one request out anew; return the text of each part.

    Parameters
    ----------
    kept
        Segments of the batch whose cause stays.
    live
        Segments of the batch that the new prompt has.
    slots, begin
        The request's slots, and where its segments begin in the batch.
    """
    entries: list[_Entry] = []
    for number, slot in enumerate(slots):
        index = begin + number
        if plan.blocks[index] and not kept[index] and slot.segment.kind is not Kind.TOOL:
            rarity = -int(plan.frequency[index])
            entries.append(_Entry(int(plan.slots[index]), True, rarity, index, -1, _labelled(slots, number)))
            if slot.segment.kind in _VALUES:
                entries.append(_Entry(index, False, 0, index, slot.part, PLACEHOLDER))
        elif live[index]:
            position = index if kept[index] or plan.blocks[index] else int(plan.slots[index])
            # What changes places goes to the part of the segment whose place it takes.
            part = slot.part if position == index else slots[position - begin].part
            entries.append(_Entry(position, False, 0, index, part, slot.segment.text))
    return _texts(sorted(entries), parts)


def _texts(entries: Sequence[_Entry], parts: Sequence[Part]) -> dict[int, str]:
    texts: defaultdict[int, str] = defaultdict(str)
    current = next((entry.part for entry in entries if _takes_text(entry.part, parts)), -1)
    after_moved = -1
    for entry in entries:
        part = current if entry.moved else entry.part
        if part < 0:
            continue
        # Moved text stands on lines of its own.
        if (entry.moved or after_moved == part) and texts[part] and not texts[part].endswith("\n"):
            texts[part] += "\n"
        texts[part] += entry.text
        after_moved = part if entry.moved else -1
        if _takes_text(part, parts):
            current = part
    return dict(texts)


def _takes_text(part: int, parts: Sequence[Part]) -> bool:
    return part >= 0 and parts[part].kind is Kind.TEXT


def _labelled(slots: Sequence[Slot], number: int) -> str:
    """Return a segment's text; of a value with the words in front of it on its line, which say what it is."""
    segment = slots[number].segment
    if segment.kind not in _VALUES or number == 0 or slots[number - 1].part != slots[number].part:
        return segment.text
    label = _LAST_CLAUSE.search(slots[number - 1].segment.text)
    return f"{label[0].lstrip() if label else ''}{segment.text}"
