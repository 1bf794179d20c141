"""Conversations: whether a turn holds what the turn before it held."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import groupby, zip_longest

from tierkv.insight.lint.causes.history import HISTORY
from tierkv.insight.lint.core.batch import Kind
from tierkv.insight.lint.sources.segments import Slot

__all__ = ["Conversations"]

_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class _Message:
    """A message as the conversation would hold it, and as the latest turn shows it.

    Attributes
    ----------
    shown
        Meanings of the segments the latest turn has for it; empty if it dropped the message.
    """

    slots: tuple[Slot, ...]
    shown: tuple[int, ...]


class Conversations:
    """Follows conversations and puts back what their turns changed or dropped.

    Turns belong together by the session the request names, else by their first user message if the later one contains
    the earlier one's last message. The latest 4,096 conversations are remembered.
    """

    def __init__(self, place: int) -> None:
        self._place = place
        self._latest: OrderedDict[str, tuple[int, list[_Message]]] = OrderedDict()
        self.previous: dict[int, int] = {}

    def restore(self, number: int, slots: list[Slot], session: str | None) -> list[Slot]:
        """Return the turn's segments with the history it would have had, had the conversation only grown.

        `number` is the request's; `previous` then tells that of the turn before it, if this one changed anything.
        """
        head = [slot for slot in slots if slot.message < 0]
        turn = [
            _message(list(group)) for _, group in groupby((s for s in slots if s.message >= 0), lambda s: s.message)
        ]
        # A template that ends with the frame of the answer to come: the next turn has the answer in it.
        opened = turn.pop().slots if turn and _is_frame(turn[-1]) else ()
        if not turn:
            return slots
        name = f"named {session}" if session is not None else f"first {hash(turn[0].shown)}"
        earlier, before = self._latest.get(name, (-1, []))
        messages = _merge(before, turn)
        if messages is not turn:
            messages = [replace(m, slots=tuple(self._placed(slot) for slot in m.slots)) for m in messages]
            self.previous[number] = earlier
        self._latest[name] = (number, [_to_restore(message) for message in messages])
        self._latest.move_to_end(name)
        if len(self._latest) > _REMEMBERED:
            self._latest.popitem(last=False)
        return [*head, *(slot for message in messages for slot in message.slots), *opened]

    def _placed(self, slot: Slot) -> Slot:
        return replace(slot, place=self._place) if slot.given == HISTORY.code else slot


def _is_frame(message: _Message) -> bool:
    return all(slot.segment.kind is Kind.MARKER for slot in message.slots)


def _to_restore(message: _Message) -> _Message:
    slots = tuple(replace(slot, own=False, credit=0, given=0) for slot in message.slots if slot.live)
    return replace(message, slots=slots)


def _message(slots: list[Slot]) -> _Message:
    return _Message(tuple(slots), tuple(slot.segment.meaning for slot in slots if slot.own))


def _merge(before: list[_Message], turn: list[_Message]) -> list[_Message]:
    """Walk both lists in step: what both have, what only the earlier turn has, what the later one has instead."""
    earlier, later = [m.shown for m in before], [m.shown for m in turn]
    if later[: len(earlier)] == earlier and all(_is_first_sent(*pair) for pair in zip(before, turn, strict=False)):
        return turn
    blocks = SequenceMatcher(None, earlier, later, autojunk=False).get_matching_blocks()
    matches = [(block.a + step, block.b + step) for block in blocks for step in range(block.size)]
    if not matches or matches[-1][0] != _last_shown(before):
        return turn
    merged: list[_Message] = []
    old = new = 0
    for old_match, new_match in matches:
        for dropped, instead in zip_longest(before[old:old_match], turn[new:new_match]):
            merged.append(_kept(dropped or _Message((), ()), instead or _Message((), ())))
        merged.append(_kept(before[old_match], turn[new_match]))
        old, new = old_match + 1, new_match + 1
    return [*merged, *turn[new:]]


def _is_first_sent(old: _Message, new: _Message) -> bool:
    return [slot.segment.meaning for slot in old.slots] == [s.segment.meaning for s in new.slots if s.live]


def _last_shown(messages: list[_Message]) -> int:
    return max((index for index, message in enumerate(messages) if message.shown), default=-1)


def _kept(old: _Message, new: _Message) -> _Message:
    """The message as first sent, beside what the turn shows in its place, whose tokens hit where that does."""
    if _is_first_sent(old, new):
        return new
    shown = [replace(slot, live=False, given=HISTORY.code) for slot in new.slots if slot.own]
    tokens = sum(slot.segment.tokens.size for slot in shown)
    whole = sum(slot.segment.tokens.size for slot in old.slots)
    part = next((slot.part for slot in shown if slot.part >= 0), -1)
    restored: list[Slot] = []
    for slot in old.slots:
        size = slot.segment.tokens.size
        credit = min(size, size * tokens // max(whole, 1))
        restored.append(replace(slot, part=part if slot.part >= 0 else -1, credit=credit, given=HISTORY.code))
    return _Message((*shown, *restored), new.shown)
