"""The directory of an arena: which block lies where, for processes that map it and read without asking.

    bucket    8 entries; a key's bucket is its first 8 bytes modulo the number of buckets
    entry     seal u64, key 32 bytes, offset u64, length u64, checksum u64       64 bytes, little-endian; zeros: free

One process writes, any number read, and nobody waits. The seal is the XXH3-64 of the rest of its entry: a reader that
catches an entry half-written, in whatever order it sees the bytes, finds the seal broken. It then copies the payload
and verifies it against the entry's checksum, so a slot that was given to another block meanwhile is found out too. On
any doubt a reader asks the daemon. Keys name bytes exactly, so what verifies is right however old it is.

A block that finds its bucket full is not listed; readers ask for it.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from xxhash import xxh3_64_digest

__all__ = ["ENTRY_BYTES", "DirectoryReader", "DirectoryWriter", "Place", "directory_bytes"]

ENTRY_BYTES = 64
_WAYS = 8
_BUCKET_BYTES = _WAYS * ENTRY_BYTES
_BODY = struct.Struct("<32sQQQ")
_PLACE = struct.Struct("<QQQ")
_SEALS = struct.Struct("<" + "8s56x" * _WAYS)
_KEYS = struct.Struct("<" + "8x32s24x" * _WAYS)
_FREE = bytes(ENTRY_BYTES)
_NO_SEAL = bytes(8)
_BLOCK_BYTES = 32 << 10


class Place(NamedTuple):
    """Where a block lies: `offset` and `length` in bytes of the arena, and its XXH3-64."""

    offset: int
    length: int
    checksum: int


def directory_bytes(capacity: int) -> int:
    """Return the size of a directory for an arena of `capacity` bytes: twice what it holds of blocks of 32 KiB."""
    buckets = max(16, 2 * capacity // (_BLOCK_BYTES * _WAYS))
    return buckets * _BUCKET_BYTES


class DirectoryWriter:
    """Lists blocks in `memory`, which is zeroed. Not thread-safe: the tier calls it under its lock.

    Parameters
    ----------
    memory
        Writable, `directory_bytes` long.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._buckets = len(memory) // _BUCKET_BYTES

    def insert(self, key: bytes, place: Place) -> bool:
        """List a block that is not listed; say whether its bucket had a free entry."""
        start = _bucket(key, self._buckets)
        seals = _SEALS.unpack_from(self._memory, start)
        if _NO_SEAL not in seals:
            return False
        at = start + seals.index(_NO_SEAL) * ENTRY_BYTES
        body = _BODY.pack(key, *place)
        self._memory[at + 8 : at + ENTRY_BYTES] = body
        self._memory[at : at + 8] = xxh3_64_digest(body)
        return True

    def remove(self, key: bytes) -> None:
        """Take a block off the list, if it is there."""
        start = _bucket(key, self._buckets)
        keys = _KEYS.unpack_from(self._memory, start)
        if key in keys:
            at = start + keys.index(key) * ENTRY_BYTES
            # The seal first: what follows is void from then on.
            self._memory[at : at + 8] = _NO_SEAL
            self._memory[at + 8 : at + ENTRY_BYTES] = _FREE[8:]


class DirectoryReader:
    """Finds blocks in a directory that another process writes. Safe to call from any thread."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._buckets = len(memory) // _BUCKET_BYTES

    def find(self, key: bytes) -> Place | None:
        """Return where a block lies now, None when it is not listed or its entry is being written."""
        start = _bucket(key, self._buckets)
        bucket = bytes(self._memory[start : start + _BUCKET_BYTES])
        at = bucket.find(key)
        if at < 0:
            return None
        entry = bucket[at - 8 : at + ENTRY_BYTES - 8]
        if len(entry) != ENTRY_BYTES or xxh3_64_digest(entry[8:]) != entry[:8]:
            return None
        return Place._make(_PLACE.unpack_from(entry, 40))


def _bucket(key: bytes, buckets: int) -> int:
    return int.from_bytes(key[:8], "little") % buckets * _BUCKET_BYTES
