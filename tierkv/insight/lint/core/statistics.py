"""How often the segments of a log come, and where in the prompt they stand on average."""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from tierkv.insight.lint.core.batch import Batch, Bools, Ints, Words
from tierkv.insight.lint.core.hashing import mix
from tierkv.insight.lint.core.table import HashTable

__all__ = ["SegmentStatistics"]


class SegmentStatistics:
    """Counts of the segments that more than one request has.

    Most segments of a log come once, and would fill the memory; a Bloom filter remembers these, so that only segments
    seen twice take an entry. One in a hundred entries may count one request too many.

    Parameters
    ----------
    filter_bits
        Power of two: bits of the filter, an eighth of that in bytes, allocated as they are used.
    """

    def __init__(self, filter_bits: int = 1 << 27) -> None:
        self._seen: NDArray[np.uint8] = np.zeros(filter_bits // 8, np.uint8)
        self._mask = np.uint64(filter_bits - 1)
        self._table = HashTable({"requests": np.dtype(np.uint32), "offsets": np.dtype(np.float64)})

    def add(self, batch: Batch, offsets: Ints) -> None:
        """Count a batch; `offsets` is where each segment starts in its prompt, in tokens."""
        ids, first, back, counts = np.unique(batch.ids, return_index=True, return_inverse=True, return_counts=True)
        sums = np.bincount(back, weights=offsets, minlength=ids.size)
        counts = counts.astype(np.uint32)
        slots = self._table.find(ids)
        known = slots >= 0
        requests, totals = self._columns()
        requests[slots[known]] += counts[known]
        totals[slots[known]] += sums[known]
        new = np.flatnonzero(~known)
        before = self._test_and_set(ids[new])
        kept = before | (counts[new] > 1)
        entering = new[kept]
        placed = self._table.insert(ids[entering])
        requests, totals = self._columns()
        requests[placed] = counts[entering] + before[kept]
        # Where the filter's occurrence stood is not known: take this one's place for it.
        totals[placed] = sums[entering] + np.where(before[kept], offsets[first[entering]], 0)

    def look_up(self, ids: Words) -> tuple[Ints, NDArray[np.float64]]:
        """Return for each segment how many requests have it (1 if no entry), and its mean offset (infinite)."""
        slots = self._table.find(ids)
        known = slots >= 0
        requests, totals = self._columns()
        frequency = np.ones(ids.size, np.int64)
        frequency[known] = requests[slots[known]]
        offsets = np.full(ids.size, np.inf)
        offsets[known] = totals[slots[known]] / frequency[known]
        return frequency, offsets

    def _columns(self) -> tuple[NDArray[np.uint32], NDArray[np.float64]]:
        columns = self._table.columns
        return cast("NDArray[np.uint32]", columns["requests"]), cast("NDArray[np.float64]", columns["offsets"])

    def _test_and_set(self, ids: Words) -> Bools:
        present = np.ones(ids.size, np.bool_)
        for word in (mix(ids), mix(ids ^ np.uint64(0xA5A5A5A5A5A5A5A5))):
            bit = word & self._mask
            byte, flag = (bit >> np.uint64(3)).astype(np.int64), np.uint8(1) << (bit & np.uint64(7)).astype(np.uint8)
            present &= (self._seen[byte] & flag) != 0
            np.bitwise_or.at(self._seen, byte, flag)
        return present
