"""The index record of one block: fixed size, self-checking, little-endian.

    check       8   XXH3-64 digest of all that follows
    key        32   block key
    sequence    4   of the segment it was written to     \
    ordinal     4   of its value in that segment          |
    length      8   payload bytes                         |
    checksum    8   XXH3-64 of the payload                |  the entry: what stays in memory per key
    depth       4                                         |
    group       4                                         |
    tenant      8                                         |
    namespace  32                                         |
    parent     32                                        /

A restart builds the table of blocks from these records alone, so they are sliced, not decoded, until somebody asks.
"""

from __future__ import annotations

import struct

from xxhash import xxh3_64_digest

from tierkv.storage.tier import BlockMeta

__all__ = [
    "ENTRY_AT",
    "KEY_AT",
    "RECORD_BYTES",
    "decode_meta",
    "encode",
    "intact",
    "length",
    "place",
    "sequence_prefix",
]

_BODY = struct.Struct("<32sIIQQII8s32s32s")
_ENTRY = struct.Struct("<IIQQII8s32s32s")
_PLACE = struct.Struct("<II")

KEY_AT = 8
ENTRY_AT = KEY_AT + 32
RECORD_BYTES = KEY_AT + _BODY.size


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


def intact(record: bytes) -> bool:
    """Say whether a record is what `encode` made."""
    return len(record) == RECORD_BYTES and xxh3_64_digest(record[KEY_AT:]) == record[:KEY_AT]


def sequence_prefix(sequence: int) -> bytes:
    """Return the bytes that every entry of the segment filled as `sequence` begins with."""
    return sequence.to_bytes(4, "little")


def place(entry: bytes) -> tuple[int, int]:
    """Return the sequence number and the ordinal of an entry."""
    sequence, ordinal = _PLACE.unpack_from(entry)
    return sequence, ordinal


def length(entry: bytes) -> int:
    """Return the payload length of an entry, in bytes."""
    return int.from_bytes(entry[8:16], "little")


def decode_meta(entry: bytes) -> BlockMeta:
    """Return what an entry says about its block."""
    _, _, nbytes, checksum, depth, group, tenant, namespace, parent = _ENTRY.unpack(entry)
    return BlockMeta(nbytes, checksum, parent, namespace, tenant, depth, group)
