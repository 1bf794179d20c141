"""Token ids without text, cut into segments by their own content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tierkv.insight.lint.core.batch import Batch, Ints, Kind, Tokens
from tierkv.insight.lint.core.hashing import chunk_starts, number_repeats, run_hashes
from tierkv.insight.lint.core.plan import SHARED_RUN_TOKENS, Grain
from tierkv.insight.lint.readers.arrays import read_arrays
from tierkv.insight.lint.readers.entry import Format
from tierkv.insight.lint.readers.log import Log
from tierkv.insight.lint.sources.source import Shown

__all__ = ["IdSource", "opaque_batch"]

_BATCH_TOKENS = 1 << 20
_FINE, _COARSE = 8, 16
"""Mean tokens of a segment: for logs as text, and for arrays, which can be a thousand times as large."""


class IdSource:
    """A log of token ids. Holds one batch of about a million tokens at a time.

    Parameters
    ----------
    skipped
        Is told which lines were left out, on the first reading.
    """

    places: Sequence[str] = ("the prompt",)
    filter_bits = 1 << 30

    def __init__(self, log: Log, skipped: list[str]) -> None:
        self._log = log
        self._skipped: list[str] | None = skipped
        self._mean = _COARSE if log.format is Format.NUMPY else _FINE
        self.grain = Grain(window=SHARED_RUN_TOKENS // self._mean + 1, value_tokens=6 * self._mean)

    def batches(self) -> Iterator[Batch]:
        first = 0
        for tokens, lengths, _ in self._prompts():
            yield opaque_batch(first, tokens, lengths, self._mean)
            first += lengths.size

    def explained_batches(self) -> Iterator[Batch]:
        return self.batches()

    def previous_turn(self, number: int) -> int | None:
        return None

    def show(self, numbers: set[int]) -> dict[int, Shown]:
        found: dict[int, Shown] = {}
        first = 0
        for tokens, lengths, lines in self._prompts():
            wanted = [number for number in numbers if first <= number < first + lengths.size]
            ends = np.cumsum(lengths)
            for number in wanted:
                end = int(ends[number - first])
                length = int(lengths[number - first])
                found[number] = Shown(int(lines[number - first]), tokens[end - length : end].copy())
            first += lengths.size
            if len(found) == len(numbers):
                break
        return found

    def _prompts(self) -> Iterator[tuple[Tokens, Ints, Ints]]:
        """Yield tokens, lengths and lines of some prompts at a time."""
        first = 0
        if self._log.format is Format.NUMPY:
            for tokens, lengths in read_arrays(self._log.path, self._log.name, _BATCH_TOKENS):
                yield tokens, lengths, np.arange(first, first + lengths.size)
                first += lengths.size
            return
        prompts: list[Tokens] = []
        lines: list[int] = []
        held = 0
        for entry in self._log.entries(self._skipped):
            if not isinstance(entry.body, np.ndarray):
                raise TypeError(f"{self._log.format} is no format of token ids")
            prompts.append(entry.body)
            lines.append(entry.line)
            held += entry.body.size
            if held >= _BATCH_TOKENS:
                yield _joined(prompts, lines)
                prompts, lines, held = [], [], 0
        if prompts:
            yield _joined(prompts, lines)
        self._skipped = None


def opaque_batch(first: int, tokens: Tokens, lengths: Ints, mean_tokens: int) -> Batch:
    """Cut prompts of token ids, one after the other in `tokens`, into segments of so many tokens on average."""
    prompt_starts = np.cumsum(lengths) - lengths
    starts = chunk_starts(tokens, prompt_starts, mean_tokens)
    sizes = np.diff(np.append(starts, tokens.size))
    filled = np.flatnonzero(lengths > 0)
    requests = filled[np.searchsorted(prompt_starts[filled], starts, side="right") - 1]
    ids = run_hashes(tokens, starts, sizes) if starts.size else np.empty(0, np.uint64)
    everywhere = np.ones(starts.size, np.bool_)
    return Batch(
        first=first,
        count=lengths.size,
        tokens=tokens,
        starts=starts,
        lengths=sizes,
        requests=requests,
        ids=number_repeats(ids, requests),
        kinds=np.full(starts.size, Kind.OPAQUE, np.uint8),
        places=np.zeros(starts.size, np.uint16),
        own=everywhere,
        live=everywhere,
        credit=sizes,
        given=np.zeros(starts.size, np.uint8),
    )


def _joined(prompts: list[Tokens], lines: list[int]) -> tuple[Tokens, Ints, Ints]:
    lengths = np.array([prompt.size for prompt in prompts], np.int64)
    return np.concatenate(prompts), lengths, np.array(lines, np.int64)
