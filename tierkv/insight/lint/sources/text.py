"""Logs with text: chat requests, conversations, plain prompts, and token ids whose tokenizer is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tierkv.insight.lint.core.batch import Batch
from tierkv.insight.lint.core.plan import Grain
from tierkv.insight.lint.readers.entry import Entry
from tierkv.insight.lint.readers.log import Log
from tierkv.insight.lint.sources.history import Conversations
from tierkv.insight.lint.sources.segments import Segmenter, Slot, make_batch
from tierkv.insight.lint.sources.source import Shown
from tierkv.insight.lint.sources.spelling import Spellings
from tierkv.insight.lint.text.prompt import Part, Prompt, render, session_of
from tierkv.insight.lint.text.tokenise import Tokeniser

__all__ = ["Explained", "TextSource"]

_BATCH_TOKENS = 1 << 18
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Explained:
    """A request with its segments, and beside them those it would have without the causes the source found."""

    entry: Entry
    prompt: Prompt
    slots: list[Slot]


class TextSource:
    """A log whose prompts have text. Keeps no prompt longer than its batch, but the latest turn of each conversation.

    Parameters
    ----------
    skipped
        Is told which lines were left out, on the first reading.
    """

    filter_bits = 1 << 27
    grain = Grain(window=2, value_tokens=0)

    def __init__(self, log: Log, tokeniser: Tokeniser, skipped: list[str]) -> None:
        self._log = log
        self._segmenter = Segmenter(tokeniser)
        self._spellings = Spellings()
        self._skipped: list[str] | None = skipped
        self._previous: dict[int, int] = {}

    @property
    def places(self) -> Sequence[str]:
        return self._segmenter.places

    def batches(self) -> Iterator[Batch]:
        for first, prompts in _grouped(self._learn(), lambda slots: slots):
            yield make_batch(first, prompts)
        self._skipped = None

    def explained_batches(self) -> Iterator[Batch]:
        for batch, _ in self.explained():
            yield batch

    def explained(self) -> Iterator[tuple[Batch, list[Explained]]]:
        """Yield `explained_batches`, each with its requests."""
        for first, requests in _grouped(self._explain(), lambda request: request.slots):
            yield make_batch(first, [request.slots for request in requests]), requests

    def previous_turn(self, number: int) -> int | None:
        return self._previous.get(number)

    def show(self, numbers: set[int]) -> dict[int, Shown]:
        found: dict[int, Shown] = {}
        for number, (entry, _, slots) in enumerate(self._read()):
            if number in numbers:
                tokens = np.concatenate([np.empty(0, np.uint32), *(slot.segment.tokens for slot in slots)])
                pieces = tuple((s.segment.meaning, s.segment.text, s.segment.tokens.size) for s in slots)
                found[number] = Shown(entry.line, tokens, "".join(text for _, text, _ in pieces), pieces)
                if len(found) == len(numbers):
                    break
        return found

    def _explain(self) -> Iterator[Explained]:
        conversations = Conversations(self._segmenter.place("earlier messages"))
        self._previous = conversations.previous
        for number, (entry, prompt, slots) in enumerate(self._read()):
            respelled = self._spellings.respell(slots)
            yield Explained(entry, prompt, conversations.restore(number, respelled, prompt.session))

    def _learn(self) -> Iterator[list[Slot]]:
        for _, _, slots in self._read(self._skipped):
            self._spellings.count(slots)
            yield slots

    def _read(self, skipped: list[str] | None = None) -> Iterator[tuple[Entry, Prompt, list[Slot]]]:
        for entry in self._log.entries(skipped):
            body = entry.body
            if isinstance(body, np.ndarray):
                session = session_of(entry.original) if isinstance(entry.original, dict) else None
                yield entry, Prompt((), session), self._segmenter.token_slots(body)
            else:
                prompt = Prompt((Part(body, "the prompt"),)) if isinstance(body, str) else render(body)
                yield entry, prompt, self._segmenter.slots(prompt)


def _grouped(requests: Iterator[T], slots_of: Callable[[T], list[Slot]]) -> Iterator[tuple[int, list[T]]]:
    """Group requests into batches; yield each with the number of its first request."""
    first = held = 0
    group: list[T] = []
    for request in requests:
        group.append(request)
        held += sum(slot.segment.tokens.size for slot in slots_of(request))
        if held >= _BATCH_TOKENS:
            yield first, group
            first, group, held = first + len(group), [], 0
    if group:
        yield first, group
