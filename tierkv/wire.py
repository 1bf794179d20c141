"""What travels between client and daemon: message encoding, block frames, structures. Specified in docs/wire.md.

Control messages are msgpack or JSON, by Content-Type and Accept. Bytes are raw in msgpack and hex digits in JSON. Block
bodies are frames: a fixed header, then `length` bytes of payload.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from tierkv.cache import BlockRef, Grant, Hit, LoadChoice, TicketProgress, Written
from tierkv.connected import NodeHit, Where
from tierkv.errors import BodyMismatch, CorruptBlock, InvalidRequest, TierKVError, error_classes
from tierkv.keys import SESSION_CHARACTERS, TENANT_NAME

__all__ = [
    "CHECKSUM_HEADER",
    "CHECKSUM_PATTERN",
    "FRAME_BYTES",
    "FRAME_TYPE",
    "GENERATION_HEADER",
    "HIT_HEADER",
    "JSON_TYPE",
    "MISS_HEADER",
    "MSGPACK_TYPE",
    "PAYLOAD_TYPE",
    "PROBLEM_TYPE",
    "SESSION_CHARACTERS",
    "TENANT_HEADER",
    "TIER_HEADER",
    "Frame",
    "check_tenant",
    "decode",
    "encode",
    "error_from_problem",
    "pack_choice",
    "pack_frame",
    "pack_grants",
    "pack_hit",
    "pack_progress",
    "pack_refs",
    "pack_where",
    "pack_written",
    "problem_from_error",
    "unpack_choice",
    "unpack_frame",
    "unpack_grants",
    "unpack_hit",
    "unpack_progress",
    "unpack_refs",
    "unpack_where",
    "unpack_written",
]

JSON_TYPE = "application/json"
MSGPACK_TYPE = "application/msgpack"
PROBLEM_TYPE = "application/problem+json"
FRAME_TYPE = "application/vnd.tierkv.blocks"
PAYLOAD_TYPE = "application/octet-stream"
TENANT_HEADER = "Tierkv-Tenant"
GENERATION_HEADER = "Tierkv-Generation"
TIER_HEADER = "Tierkv-Tier"
CHECKSUM_HEADER = "Tierkv-Checksum"
CHECKSUM_PATTERN = re.compile(r"[0-9a-f]{16}")
HIT_HEADER = "Tierkv-Hit"
MISS_HEADER = "Tierkv-Miss"

_PROBLEM_PREFIX = "urn:tierkv:problem:"
_MOST_ITEMS = 1 << 20
_MOST_CONTAINERS = 1 << 18
"""Every empty list or map costs some eighty bytes of memory for one on the wire."""
_FRAME = struct.Struct("<4sBBHIIQQ")
_MAGIC = b"TKVB"
_VERSION = 1
FRAME_BYTES = _FRAME.size


def encode(message: Any, content_type: str) -> bytes:
    """Encode a control message."""
    if content_type == MSGPACK_TYPE:
        packed: bytes = msgpack.packb(message)
        return packed
    return json.dumps(message, default=_hex, separators=(",", ":")).encode()


def decode(body: bytes, content_type: str) -> Any:
    """Decode a control message; an empty body is an empty mapping.

    Raises `InvalidRequest`, also for a message that is small on the wire and huge in memory.
    """
    if not body:
        return {}
    try:
        if content_type == MSGPACK_TYPE:
            budget = _Budget(_MOST_CONTAINERS)
            return msgpack.unpackb(body, list_hook=budget, object_hook=budget, max_array_len=_MOST_ITEMS)
        if content_type == JSON_TYPE:
            if body.count(b"[") + body.count(b"{") > _MOST_CONTAINERS:
                raise ValueError(f"it has more than {_MOST_CONTAINERS} lists and maps")
            return json.loads(body)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        reason = str(error) or "it is nested too deep"
        raise InvalidRequest(
            f"the body is not valid {content_type}: {reason[:200]}", remedy="send one message, encoded as announced"
        ) from None
    raise InvalidRequest(
        f"content type {content_type[:100]!r} is not understood", remedy=f"send {MSGPACK_TYPE} or {JSON_TYPE}"
    )


class _Budget:
    """Hook of the msgpack decoder that ends it after so many containers."""

    def __init__(self, left: int) -> None:
        self._left = left

    def __call__(self, container: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"it has more than {_MOST_CONTAINERS} lists and maps")
        return container


def check_tenant(name: str) -> str:
    """Return a tenant's name if it can be one. Raises `InvalidRequest`."""
    if not TENANT_NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name[:100]!r} is not a tenant name", remedy="use 1 to 64 letters, digits, dots, dashes or underscores"
        )
    return name


@dataclass(frozen=True, slots=True)
class Frame:
    """Header of one block in a body: which block of the lease it is, and the length and XXH3-64 of what follows."""

    index: int
    group: int
    length: int
    checksum: int


def pack_frame(frame: Frame) -> bytes:
    """Encode a frame header, `FRAME_BYTES` long."""
    return _FRAME.pack(_MAGIC, _VERSION, 0, frame.group, frame.index, 0, frame.length, frame.checksum)


def unpack_frame(header: bytes | bytearray | memoryview) -> Frame:
    """Decode a frame header. Raises `BodyMismatch` for anything that is not one."""
    if len(header) != FRAME_BYTES:
        raise BodyMismatch(f"a block frame header of {FRAME_BYTES} bytes was cut to {len(header)}")
    magic, version, flags, group, index, reserved, length, checksum = _FRAME.unpack(header)
    if magic != _MAGIC or version != _VERSION or flags or reserved:
        raise BodyMismatch("the body does not hold a block frame of version 1 where one should begin")
    return Frame(index, group, length, checksum)


def pack_hit(hit: Hit) -> dict[str, Any]:
    return {"blocks": hit.blocks, "tokens": hit.tokens, "tiers": list(hit.tiers)}


def unpack_hit(data: Mapping[str, Any]) -> Hit:
    return Hit(data["blocks"], data["tokens"], tuple(data["tiers"]))


def pack_where(where: Where) -> dict[str, Any]:
    nodes = [{name: getattr(node, name) for name in NodeHit.__slots__} for node in where.nodes]
    return {"blocks": where.blocks, "nodes": nodes}


def unpack_where(data: Mapping[str, Any]) -> Where:
    nodes = tuple(NodeHit(**{name: node[name] for name in NodeHit.__slots__}) for node in data["nodes"])
    return Where(data["blocks"], nodes)


def pack_progress(progress: TicketProgress) -> dict[str, Any]:
    return {name: getattr(progress, name) for name in TicketProgress.__slots__}


def unpack_progress(data: Mapping[str, Any]) -> TicketProgress:
    return TicketProgress(**{name: data[name] for name in TicketProgress.__slots__})


def pack_choice(choice: LoadChoice) -> dict[str, Any]:
    return {name: getattr(choice, name) for name in LoadChoice.__slots__}


def unpack_choice(data: Mapping[str, Any]) -> LoadChoice:
    return LoadChoice(**{name: data[name] for name in LoadChoice.__slots__})


def pack_refs(refs: Iterable[BlockRef]) -> list[list[Any]]:
    """Rows of index, group, tier, offset, length, checksum (16 hex digits)."""
    return [[r.index, r.group, r.tier, r.offset, r.length, f"{r.checksum:016x}"] for r in refs]


def unpack_refs(rows: Iterable[Sequence[Any]]) -> list[BlockRef]:
    return [BlockRef(i, g, tier, offset, length, int(digits, 16)) for i, g, tier, offset, length, digits in rows]


def pack_grants(grants: Iterable[Grant]) -> list[list[Any]]:
    """Rows of index, group, state, tier, offset, length."""
    return [[g.index, g.group, g.state, g.tier, g.offset, g.length] for g in grants]


def unpack_grants(rows: Iterable[Sequence[Any]]) -> list[Grant]:
    return [Grant(*row) for row in rows]


def pack_written(written: Iterable[Written]) -> list[list[Any]]:
    """Rows of index, group, length, checksum (16 hex digits)."""
    return [[w.index, w.group, w.length, f"{w.checksum:016x}"] for w in written]


def unpack_written(rows: Iterable[Any]) -> list[Written]:
    """Decode and check rows of index, group, length, checksum. Raises `InvalidRequest`."""
    written: dict[tuple[int, int], Written] = {}
    for row in rows:
        match row:
            case [int(index), int(group), int(length), str(digits)] if CHECKSUM_PATTERN.fullmatch(digits):
                block = Written(index, group, length, int(digits, 16))
            case _:
                raise InvalidRequest(
                    "written blocks must be rows of index, group, length and 16 hex digits of checksum"
                )
        if (index, group) in written:
            raise InvalidRequest(f"block {index} of group {group} is named twice", remedy="commit each block once")
        written[index, group] = block
    return list(written.values())


def problem_from_error(error: TierKVError) -> dict[str, Any]:
    """RFC 9457 problem document of an error."""
    document = {
        "type": _PROBLEM_PREFIX + error.slug,
        "title": error.slug.replace("-", " "),
        "status": error.status,
        "detail": error.message,
        "remedy": error.remedy,
    }
    if isinstance(error, CorruptBlock):
        document["cause"] = error.cause
    return document


def error_from_problem(status: int, body: bytes) -> TierKVError:
    """Turn a problem document back into the error the daemon raised."""
    try:
        problem = json.loads(body)
        slug = str(problem["type"]).removeprefix(_PROBLEM_PREFIX)
        cls = error_classes().get(slug, TierKVError)
        error = cls(str(problem.get("detail", "")), remedy=str(problem.get("remedy", "")))
        if isinstance(error, CorruptBlock):
            error.cause = str(problem.get("cause", error.cause))
        return error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return TierKVError(f"the daemon answered {status} without a problem document")


def _hex(value: object) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    raise TypeError(f"{type(value).__name__} cannot be sent as JSON")
