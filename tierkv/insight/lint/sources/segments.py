"""Segments of prompts that have text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from xxhash import xxh3_64_intdigest

from tierkv.insight.lint.core.batch import Batch, Kind, Tokens
from tierkv.insight.lint.core.hashing import number_repeats
from tierkv.insight.lint.text.frames import unframed
from tierkv.insight.lint.text.pieces import cut
from tierkv.insight.lint.text.prompt import Part, Prompt
from tierkv.insight.lint.text.tokenise import Tokeniser

__all__ = ["Segment", "Segmenter", "Slot", "make_batch"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt's text with its tokens.

    Attributes
    ----------
    meaning
        Equal for spellings of the same.
    spelling
        Hash of the tokens.
    """

    text: str
    tokens: Tokens
    kind: Kind
    meaning: int
    spelling: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A segment in one prompt.

    Attributes
    ----------
    part, message
        Index of the part with content it comes from, and of its message; -1 of none.
    pinned
        It is of an earlier turn, and stays where it is.
    own, live, credit, given
        As in `Batch`.
    """

    segment: Segment
    place: int
    part: int
    message: int
    own: bool = True
    live: bool = True
    credit: int = 0
    given: int = 0
    pinned: bool = False


class Segmenter:
    """Cuts prompts into segments; parts that come again are cut once.

    Parameters
    ----------
    cached_parts
        How many parts are remembered.
    """

    def __init__(self, tokeniser: Tokeniser, cached_parts: int = 4096) -> None:
        self._tokeniser = tokeniser
        self._cut = lru_cache(cached_parts)(self._segments)
        self._cut_tokens = lru_cache(cached_parts)(self._token_segments)
        self.places: list[str] = []
        self._numbers: dict[str, int] = {}

    def slots(self, prompt: Prompt) -> list[Slot]:
        """Return the prompt's segments."""
        last = max((part.message for part in prompt.parts), default=-1)
        return [slot for index, part in enumerate(prompt.parts) for slot in self._part(index, part, last)]

    def token_slots(self, tokens: Tokens) -> list[Slot]:
        """Return the segments of token ids, as the tokenizer reads them."""
        texts = self._tokeniser.decode(tokens)
        begins = np.cumsum([0, *map(len, texts)])[:-1]
        prompt = unframed("".join(texts))
        ends = np.cumsum([len(part.text) for part in prompt.parts])
        last = max((part.message for part in prompt.parts), default=-1)
        slots: list[Slot] = []
        first = 0
        for part, end in zip(prompt.parts, ends.tolist(), strict=True):
            stop = int(np.searchsorted(begins, end, side="left")) if end < ends[-1] else tokens.size
            if stop > first:  # else the token that it begins in is the part's before
                lead = int(begins[first]) - (end - len(part.text))
                segments = self._cut_tokens(part.text, tokens[first:stop].tobytes(), lead, part.kind)
                slots.extend(self._placed(segments, 0, part, last))
            first = stop
        return slots

    def _token_segments(self, text: str, run: bytes, lead: int, kind: Kind) -> tuple[Segment, ...]:
        """Cut a part of which the first token begins `lead` characters behind its start."""
        tokens = np.frombuffer(run, np.uint32)
        begins = np.cumsum([lead, *map(len, self._tokeniser.decode(tokens))])[:-1]
        pieces = cut(text, kind)
        ends = np.cumsum([len(piece.text) for piece in pieces])
        runs = np.split(tokens, np.searchsorted(begins, ends[:-1], side="left"))
        found = (_segment(p.text, run, p.kind, p.meaning) for p, run in zip(pieces, runs, strict=True))
        return tuple(segment for segment in found if segment.tokens.size)

    def _part(self, index: int, part: Part, last: int) -> list[Slot]:
        return self._placed(self._cut(part.text, part.kind), index, part, last)

    def _placed(self, segments: Sequence[Segment], index: int, part: Part, last: int) -> list[Slot]:
        place = self.place(part.place)
        # A frame has no content to rewrite.
        number = -1 if part.kind is Kind.MARKER else index
        # The first message often is a prompt template of its own; what is between it and the last one was said.
        pinned = 1 < part.message < last
        return [Slot(s, place, number, part.message, credit=s.tokens.size, pinned=pinned) for s in segments]

    def _segments(self, text: str, kind: Kind) -> tuple[Segment, ...]:
        pieces = cut(text, kind)
        runs = self._tokeniser.encode([piece.text for piece in pieces])
        return tuple(_segment(p.text, run, p.kind, p.meaning) for p, run in zip(pieces, runs, strict=True))

    def place(self, name: str) -> int:
        """Return the number of a place."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.places)
            self.places.append(name)
        return number


def make_batch(first: int, prompts: Sequence[Sequence[Slot]]) -> Batch:
    """Put the segments of consecutive prompts into arrays."""
    slots = [slot for prompt in prompts for slot in prompt]
    segments = [slot.segment for slot in slots]
    lengths = np.array([segment.tokens.size for segment in segments], np.int64)
    requests = np.repeat(np.arange(len(prompts)), [len(prompt) for prompt in prompts])
    ids = np.array([segment.meaning for segment in segments], np.uint64)
    live = np.array([slot.live for slot in slots], np.bool_)
    for part in (live, ~live):
        ids[part] = number_repeats(ids[part], requests[part])
    return Batch(
        first=first,
        count=len(prompts),
        tokens=np.concatenate([np.empty(0, np.uint32), *(segment.tokens for segment in segments)]),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        requests=requests,
        ids=ids,
        kinds=np.array([_kind(slot) for slot in slots], np.uint8),
        places=np.array([slot.place for slot in slots], np.uint16),
        own=np.array([slot.own for slot in slots], np.bool_),
        live=live,
        credit=np.array([slot.credit for slot in slots], np.int64),
        given=np.array([slot.given for slot in slots], np.uint8),
    )


def _kind(slot: Slot) -> Kind:
    return Kind.PINNED if slot.pinned and slot.segment.kind is not Kind.MARKER else slot.segment.kind


def _segment(text: str, tokens: Tokens, kind: Kind, meaning: int) -> Segment:
    return Segment(text, tokens, kind, meaning, xxh3_64_intdigest(tokens.tobytes(), kind))
