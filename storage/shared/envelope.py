"""What is stored under a block's name: a header that says which block this is, then the container of its bytes.

A backend is somebody else's: it may give back another object than the one asked for, half of one, or one that a node
with other ideas put there. The header names the block, so that a reader can tell; the container verifies itself. Fixed
size, little-endian:

    offset  bytes  field
    0       4      magic, TKVE
    4       1      version, 1
    5       3      0
    8       4      group
    12      4      depth
    16      8      mark of the last deletion of this generation its writer knew of, 0 for none
    24      8      payload length in bytes
    32      8      XXH3-64 of the payload
    40      8      container length in bytes
    48      32     block key
    80      8      tenant
    88      32     namespace
    120     32     key of the block before this one in its chain
    152     8      XXH3-64 of all bytes before
    160            the container, see docs/container.md
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tierkv.errors import CorruptBlock
from tierkv.storage.container import peek
from tierkv.storage.tier import BlockMeta, Buffer, checksum

__all__ = ["ENVELOPE_BYTES", "Envelope", "read_header", "seal", "unseal"]

MAGIC = b"TKVE"
VERSION = 1
_FIELDS = struct.Struct("<4sB3xIIQQQQ32s8s32s32s")
_SUM = struct.Struct("<Q")
_REMEDY = "it is removed; the next store repairs it"
ENVELOPE_BYTES = _FIELDS.size + _SUM.size


@dataclass(frozen=True, slots=True)
class Envelope:
    """What the header says.

    Attributes
    ----------
    key, meta
        Which block it is, and what is known of it.
    mark
        That of the last deletion its writer knew of: a later deletion is of this very object.
    container_bytes
        Size of the container that follows.
    """

    key: bytes
    meta: BlockMeta
    mark: int
    container_bytes: int


def seal(key: bytes, meta: BlockMeta, mark: int, container_bytes: int) -> bytes:
    """Return the header of a block whose container has so many bytes."""
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        meta.group,
        meta.depth,
        mark,
        meta.length,
        meta.checksum,
        container_bytes,
        key,
        meta.tenant,
        meta.namespace,
        meta.parent,
    )
    return fields + _SUM.pack(checksum(fields))


def read_header(data: Buffer, key: bytes, tenant: bytes, namespace: bytes) -> Envelope:
    """Verify a header and that it is of the block asked for; what follows it may be missing.

    Raises `CorruptBlock` with cause ``header``, ``truncated``, or ``misplaced``: whole, but another block or area.
    """
    head = bytes(data[:ENVELOPE_BYTES])
    if head[:4] != MAGIC[: len(head)]:
        raise CorruptBlock("an object in the shared tier is not a block", cause="header", remedy=_REMEDY)
    if len(head) < ENVELOPE_BYTES:
        raise CorruptBlock(f"a shared block ends after {len(head)} bytes", cause="truncated", remedy=_REMEDY)
    if checksum(head[: _FIELDS.size]) != _SUM.unpack_from(head, _FIELDS.size)[0]:
        raise CorruptBlock("a shared block's header does not match its checksum", cause="header", remedy=_REMEDY)
    _, version, group, depth, mark, length, summed, size, found, of_tenant, of_namespace, parent = _FIELDS.unpack(
        head[: _FIELDS.size]
    )
    if version != VERSION:
        raise CorruptBlock(f"a shared block of version {version}, not {VERSION}", cause="header", remedy=_REMEDY)
    if (found, of_tenant, of_namespace) != (key, tenant, namespace):
        raise CorruptBlock("another block lies under a shared block's name", cause="misplaced", remedy=_REMEDY)
    return Envelope(found, BlockMeta(length, summed, parent, namespace, tenant, depth, group), mark, size)


def unseal(data: Buffer, key: bytes, tenant: bytes, namespace: bytes) -> tuple[Envelope, memoryview]:
    """Return a verified header and the container after it, whose own header is verified and fits; its rest is not.

    The view is into `data`. Raises `CorruptBlock` as `read_header`.
    """
    view = memoryview(data).cast("B")
    envelope = read_header(view, key, tenant, namespace)
    container = view[ENVELOPE_BYTES:]
    if len(container) < envelope.container_bytes:
        raise CorruptBlock(
            f"a shared block of {envelope.container_bytes} bytes ends after {len(container)}",
            cause="truncated",
            remedy=_REMEDY,
        )
    info = peek(container)
    if (info.raw_length, info.payload_checksum, info.container_length) != (
        envelope.meta.length,
        envelope.meta.checksum,
        len(container),
    ):
        raise CorruptBlock("a shared block's header and its container differ", cause="header", remedy=_REMEDY)
    return envelope, container
