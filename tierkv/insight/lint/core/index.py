"""Prefix caches to replay a log through: how many blocks of each prompt an earlier prompt has left behind."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import numpy as np

from tierkv.insight.lint.core.batch import Ints, Words
from tierkv.insight.lint.core.table import HashTable

__all__ = ["BoundedIndex", "PrefixIndex", "UnboundedIndex", "make_index"]


class PrefixIndex(Protocol):
    """A prefix cache that only counts."""

    def replay(self, hashes: Words, counts: Ints, first: int) -> tuple[Ints, Ints]:
        """Look up and then store the blocks of consecutive requests.

        Parameters
        ----------
        hashes, counts
            As `block_hashes` returns them.
        first
            Number of the first request.

        Returns
        -------
        hits, relatives
            Per request: leading blocks found, and the request that left the last of these (-1: none).
        """
        ...


def make_index(capacity_blocks: int | None) -> Callable[[], PrefixIndex]:
    """Return what makes a new cache: of so many blocks, or one that never evicts."""
    if capacity_blocks is None:
        return UnboundedIndex
    return lambda: BoundedIndex(capacity_blocks)


class UnboundedIndex:
    """A cache that keeps everything."""

    def __init__(self) -> None:
        self._table = HashTable({"owner": np.dtype(np.int32)})

    def replay(self, hashes: Words, counts: Ints, first: int) -> tuple[Ints, Ints]:
        hits = np.zeros(counts.size, np.int64)
        relatives = np.full(counts.size, -1, np.int64)
        if hashes.size == 0:
            return hits, relatives
        requests = np.repeat(np.arange(counts.size), counts) + first
        slots = self._table.find(hashes)
        here = slots >= 0
        owners = np.full(hashes.size, -1, np.int64)
        owners[here] = self._table.columns["owner"][slots[here]]
        absent = np.flatnonzero(~here)
        if absent.size:
            keys, where, back = np.unique(hashes[absent], return_index=True, return_inverse=True)
            makers = requests[absent[where]]
            earlier = makers[back] < requests[absent]
            owners[absent[earlier]] = makers[back][earlier]
            placed = self._table.insert(keys)
            self._table.columns["owner"][placed] = makers.astype(np.int32)
        some = counts > 0
        starts = (np.cumsum(counts) - counts)[some]
        depth = np.arange(hashes.size) - np.repeat(starts, counts[some])
        first_miss = np.minimum.reduceat(np.where(owners < 0, depth, np.iinfo(np.int64).max), starts)
        hits[some] = np.minimum(first_miss, counts[some])
        last = np.where(hits[some] > 0, starts + hits[some] - 1, 0)
        relatives[some] = np.where(hits[some] > 0, owners[last], -1)
        return hits, relatives


class BoundedIndex:
    """A cache of so many blocks that evicts the least recently used, tails first. About a microsecond a block."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._owners: OrderedDict[int, int] = OrderedDict()

    def replay(self, hashes: Words, counts: Ints, first: int) -> tuple[Ints, Ints]:
        hits, relatives = np.zeros(counts.size, np.int64), np.full(counts.size, -1, np.int64)
        owners, begin = self._owners, 0
        for number, count in enumerate(counts.tolist()):
            blocks = hashes[begin : begin + count].tolist()
            begin += count
            found = 0
            while found < count and blocks[found] in owners:
                relatives[number] = owners[blocks[found]]
                found += 1
            hits[number] = found
            for block in reversed(blocks):
                if block in owners:
                    owners.move_to_end(block)
                else:
                    if len(owners) >= self._capacity:
                        owners.popitem(last=False)
                    owners[block] = first + number
        return hits, relatives
