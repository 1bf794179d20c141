"""What the core works on: some requests at a time, as one array of tokens cut into segments."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["Batch", "Bools", "Ints", "Kind", "Tokens", "Words", "ragged"]

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]
Tokens = NDArray[np.uint32]
Bools = NDArray[np.bool_]


class Kind(IntEnum):
    """What a segment is.

    `OPAQUE` is all that is known where only token ids or hashes are. `PINNED` is of an earlier turn of a conversation
    and stays where it is.
    """

    TEXT = 0
    MARKER = 1
    CLOCK = 2
    IDENTIFIER = 3
    COUNTER = 4
    ORDINAL = 5
    TOOL = 6
    JSON = 7
    DOCUMENT = 8
    OPAQUE = 9
    PINNED = 10


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive requests, cut into segments. All arrays but `tokens` have one entry per segment, in prompt order.

    Attributes
    ----------
    first
        Number of the first request in the log, counted from 0.
    count
        Requests.
    tokens
        Token ids of all segments, one after the other.
    starts, lengths
        Where a segment's tokens are in `tokens`.
    requests
        Which request, counted from the batch's first; never decreases.
    ids
        Hash of what a segment says. Equal for spellings that mean the same, and made different (`number_repeats`) for
        what one request says twice.
    kinds, places
        `Kind`, and an index into the source's names of places.
    own
        The segment is in the prompt. Segments that are not stand for what the prompt would hold without a cause.
    live
        The segment is in the prompt as it would be without the causes the source itself found.
    credit
        Tokens of the prompt that hit when this segment does.
    given
        A cause the source found, or 0: of a segment that is not live, and of those that stand in for it.
    """

    first: int
    count: int
    tokens: Tokens
    starts: Ints
    lengths: Ints
    requests: Ints
    ids: Words
    kinds: NDArray[np.uint8]
    places: NDArray[np.uint16]
    own: Bools
    live: Bools
    credit: Ints
    given: NDArray[np.uint8]


def ragged(starts: Ints, lengths: Ints) -> Ints:
    """Return the indices `starts[0], starts[0] + 1, ...`, `lengths[0]` of them, then those of the next run ..."""
    total = int(lengths.sum())
    ends = np.cumsum(lengths)
    indices: Ints = np.arange(total, dtype=np.int64)
    indices += np.repeat(starts - (ends - lengths), lengths)
    return indices
