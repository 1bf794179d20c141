"""Sampling block references so that prefixes stay whole.

Sampling blocks by their hash alone, as SHARDS does for disks, does badly on prefixes: one hot beginning is either in
the sample or not, and the number of blocks left of a request varies. Here depth is cut into spans, narrow at the
beginning and wider further down, and in each span one block stands for all of it. Which one, a byte of the key of the
span's first block says: prompts that share the span agree, others choose independently. So every request is sampled in
proportion to its length, and an estimated prefix is wrong by a fraction of a span.

Waldspurger, Park, Garthwaite, Ahmad: "Efficient MRC construction with SHARDS", USENIX FAST 2015; Cochran: "Sampling
Techniques", chapter 5, 1977, for samples in strata.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierkv.errors import ConfigError

__all__ = ["WIDEST", "SpanSampler"]

WIDEST = 256
"""Blocks of the widest span: one byte chooses within it."""


class SpanSampler:
    """Picks a few blocks of a chain to stand for all.

    Parameters
    ----------
    narrowest, widest
        Width in blocks of the first span and of those far down; powers of two, at most `WIDEST`. Each span is twice as
        wide as the one before it, until the widest. Both 1: every block is picked.
    byte
        Which byte of a key chooses within a span. Different bytes give independent samples.

    Raises
    ------
    ConfigError
        A width is not a power of two, or the first one is greater than the last.
    """

    def __init__(self, narrowest: int, widest: int, *, byte: int = 0) -> None:
        for width in (narrowest, widest):
            if not 0 < width <= WIDEST or width & (width - 1):
                raise ConfigError(f"a span of {width} blocks", remedy=f"use a power of two, at most {WIDEST}")
        if narrowest > widest:
            raise ConfigError(f"the first span, {narrowest} blocks, is wider than the widest, {widest}")
        self.narrowest, self.widest, self.byte = narrowest, widest, byte
        self._next = 0, narrowest  # of the spans that are not in the list yet: the first block and the width
        self._spans: list[tuple[int, int]] = []

    def sample(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return depth and width of the blocks that stand for a chain, the first one first.

        Parameters
        ----------
        keys
            Keys of the chain from its first block, evenly distributed bytes such as `tierkv.keys` makes.
        """
        count, byte = len(keys), self.byte
        while self._next[0] < count:
            self._add_span()
        picked: list[tuple[int, int]] = []
        for begin, width in self._spans:
            if begin >= count:
                break
            depth = begin + (keys[begin][byte] & (width - 1))
            if depth < count:
                picked.append((depth, width))
        return picked

    def _add_span(self) -> None:
        begin, width = self._next
        self._spans.append((begin, width))
        self._next = begin + width, min(2 * width, self.widest)
