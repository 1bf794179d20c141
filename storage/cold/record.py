"""The index record of one block, and its entry: what stays in memory of it. Fixed sizes, little-endian.

    record               bytes   entry
    check                    8           XXH3-64 digest of all that follows
    key                     32           block key
    sequence                 4     4     of the segment it was written to
    ordinal                  4     4     of its value in that segment
    length                   8     6     payload bytes
    checksum                 8     8     XXH3-64 of the payload
    depth                    4     4
    group, tenant, namespace 44    4     what a family has in common (4, 8 and 32 bytes); the entry has its name
    parent                  32    32

A restart builds the table of blocks from these records alone, so they are sliced, not decoded, until somebody asks.
Entries are as small as that allows: one is in memory for every block on the disk.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from operator import itemgetter

from xxhash import xxh3_64_digest

from tierkv.storage.tier import BlockMeta

__all__ = [
    "FAMILY_BYTES",
    "RECORD_BYTES",
    "common",
    "decode_meta",
    "encode",
    "entries",
    "family",
    "key",
    "length",
    "namespace",
    "payload_length",
    "place",
    "sequence_prefix",
    "sift",
    "tenant",
]

_BODY = struct.Struct("<32sIIQQII8s32s32s")
_TO_ENTRY = struct.Struct("<8x32s8sQ12s44x32s")  # checksum and depth in one
_ENTRY = struct.Struct("<8sIH12s4s32s")  # the length in two parts
_META = struct.Struct("<8x6sQI4x32s")
_COMMON = struct.Struct("<I8s32s")
_PLACE = struct.Struct("<II")

RECORD_BYTES = 8 + _BODY.size
FAMILY_BYTES = 4

key = itemgetter(slice(8, 40))
"""Return the key in a record."""
common = itemgetter(slice(68, 112))
"""Return what a record's family has in common."""
family = itemgetter(slice(26, 30))
"""Return the name of an entry's family."""
tenant = itemgetter(slice(4, 12))
"""Return the tenant of a family, out of what it has in common."""


namespace = itemgetter(slice(12, 44))
"""Return the namespace of a family, out of what it has in common."""
payload_length = itemgetter(slice(48, 56))
"""Return the payload length in a record, as 8 little-endian bytes."""


def encode(key: bytes, meta: BlockMeta, sequence: int, ordinal: int) -> bytes:
    """Return the record of a block stored as value `ordinal` of the segment filled as `sequence`."""
    body = _BODY.pack(
        key,
        sequence,
        ordinal,
        meta.length,
        meta.checksum,
        meta.depth,
        meta.group,
        meta.tenant,
        meta.namespace,
        meta.parent,
    )
    return xxh3_64_digest(body) + body


def sift(found: Iterable[tuple[bytes, bytes]], sequence: int) -> tuple[list[bytes], list[int]]:
    """Return what is whole of the ordinals (big-endian) and records found in a segment, and the ordinals of the rest.

    Whole is what `encode` made, for this place.
    """
    whole: list[bytes] = []
    broken: list[int] = []
    prefix = sequence_prefix(sequence)
    for ordinal, record in found:
        if (
            len(record) == RECORD_BYTES
            and xxh3_64_digest(record[8:]) == record[:8]
            and record.startswith(prefix + ordinal[::-1], 40)
        ):
            whole.append(record)
        else:
            broken.append(int.from_bytes(ordinal, "big"))
    return whole, broken


def entries(records: Iterable[bytes], family: bytes) -> Iterator[tuple[bytes, bytes, int]]:
    """Yield keys, entries and payload lengths in bytes of records whose family has this name."""
    pack = _ENTRY.pack
    for key, place, length, between, parent in map(_TO_ENTRY.unpack, records):
        yield key, pack(place, length & 0xFFFFFFFF, length >> 32, between, family, parent), length


def sequence_prefix(sequence: int) -> bytes:
    """Return the bytes that every entry of the segment filled as `sequence` begins with."""
    return sequence.to_bytes(4, "little")


def place(entry: bytes) -> tuple[int, int]:
    """Return the sequence number and the ordinal of an entry."""
    sequence, ordinal = _PLACE.unpack_from(entry)
    return sequence, ordinal


def length(entry: bytes) -> int:
    """Return the payload length of an entry, in bytes."""
    return int.from_bytes(entry[8:14], "little")


def decode_meta(entry: bytes, common: bytes) -> BlockMeta:
    """Return what an entry, and what its family has in `common`, say about its block."""
    nbytes, checksum, depth, parent = _META.unpack(entry)
    group, tenant, namespace = _COMMON.unpack(common)
    return BlockMeta(int.from_bytes(nbytes, "little"), checksum, parent, namespace, tenant, depth, group)
