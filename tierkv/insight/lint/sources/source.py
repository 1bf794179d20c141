"""What the analysis asks of a log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tierkv.insight.lint.core.batch import Batch, Tokens
from tierkv.insight.lint.core.plan import Grain

__all__ = ["Shown", "Source"]


@dataclass(frozen=True, slots=True)
class Shown:
    """A prompt to quote from.

    Attributes
    ----------
    line
        Where the log has it.
    text
        None where only token ids are known.
    pieces
        Meaning, text and number of tokens of each segment.
    """

    line: int
    tokens: Tokens
    text: str | None = None
    pieces: tuple[tuple[int, str, int], ...] = ()


class Source(Protocol):
    """A log, to be read several times, always with the same requests in the same order."""

    @property
    def places(self) -> Sequence[str]:
        """Names of places in a prompt, for `Batch.places`; complete once the log was read."""
        ...

    @property
    def filter_bits(self) -> int:
        """How large a filter `SegmentStatistics` needs."""
        ...

    @property
    def grain(self) -> Grain:
        """How finely it cuts prompts."""
        ...

    def batches(self) -> Iterator[Batch]:
        """Yield the prompts as they are, and learn what is usual."""
        ...

    def explained_batches(self) -> Iterator[Batch]:
        """Yield them with the causes that only the source can see. After `batches` was read to its end."""
        ...

    def previous_turn(self, number: int) -> int | None:
        """Return the request whose history this one changed, where that is known."""
        ...

    def show(self, numbers: set[int]) -> dict[int, Shown]:
        """Fetch some requests by number."""
        ...
