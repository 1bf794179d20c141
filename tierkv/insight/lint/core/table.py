"""A hash table of 64-bit keys in flat arrays: 50 million entries in 0.8 GB, looked up a batch at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tierkv.insight.lint.core.batch import Bools, Ints, Words

__all__ = ["HashTable"]

_FULL = 0.72


class HashTable:
    """Keys and the slots they lie in. Columns that belong to the keys are arrays of `capacity`, kept by this table.

    Open addressing with linear probing; the key 0 marks a free slot, so a key of 0 is stored as 1. Not thread-safe.

    Parameters
    ----------
    columns
        Name -> dtype of what is kept for each key.
    """

    def __init__(self, columns: dict[str, np.dtype[np.generic]], capacity: int = 1 << 12) -> None:
        self._keys: Words = np.zeros(capacity, np.uint64)
        self.columns: dict[str, NDArray[np.generic]] = {n: np.zeros(capacity, d) for n, d in columns.items()}
        self._used = 0

    def __len__(self) -> int:
        return self._used

    def find(self, keys: Words) -> Ints:
        """Return the slot of each key, -1 for one that is not here."""
        slots = np.full(keys.size, -1, np.int64)
        keys = np.maximum(keys, np.uint64(1))
        mask = np.int64(self._keys.size - 1)
        waiting = np.arange(keys.size)
        probe = self._home(keys)
        while waiting.size:
            found = self._keys[probe]
            wanted = keys[waiting]
            equal = found == wanted
            slots[waiting[equal]] = probe[equal]
            more: Bools = ~equal & (found != 0)
            waiting, probe = waiting[more], (probe[more] + 1) & mask
        return slots

    def insert(self, keys: Words) -> Ints:
        """Take in keys that are not here, each once; return their slots. Slots known from before become invalid."""
        needed = self._used + keys.size
        if needed > _FULL * self._keys.size:
            self._grow(needed)
        slots = self._place(np.maximum(keys, np.uint64(1)))
        self._used = needed
        return slots

    def _home(self, keys: Words) -> Ints:
        shift = np.uint64(64 - (self._keys.size - 1).bit_length())
        return (keys >> shift).astype(np.int64)

    def _place(self, keys: Words) -> Ints:
        slots = np.empty(keys.size, np.int64)
        mask = np.int64(self._keys.size - 1)
        waiting = np.arange(keys.size)
        probe = self._home(keys)
        while waiting.size:
            free = self._keys[probe] == 0
            # Of several keys that want one free slot, the last write wins; the others see it and go on.
            self._keys[probe[free]] = keys[waiting[free]]
            won = self._keys[probe] == keys[waiting]
            slots[waiting[won]] = probe[won]
            waiting, probe = waiting[~won], (probe[~won] + 1) & mask
        return slots

    def _grow(self, needed: int) -> None:
        capacity = self._keys.size
        while needed > _FULL * capacity:
            capacity *= 2
        old_keys, old_columns = self._keys, self.columns
        self._keys = np.zeros(capacity, np.uint64)
        self.columns = {n: np.zeros(capacity, c.dtype) for n, c in old_columns.items()}
        step = 1 << 20
        for first in range(0, old_keys.size, step):
            part = np.flatnonzero(old_keys[first : first + step]) + first
            slots = self._place(old_keys[part])
            for name, column in old_columns.items():
                self.columns[name][slots] = column[part]
