"""The container of one stored block: a header that says how to read it, then the codec's sections.

Everything in it is covered by a checksum: the header by its own, each section by its own, and the payload that the
sections decode to. For a lossless codec that is the payload its writer announced. For a lossy one it is another, always
the same, which `pack` knows by decoding what it coded: from then on its checksum is the checksum of the block. A
flipped bit or a missing byte anywhere is an error, never other bytes. The format is little-endian and described byte by
byte in docs/container.md.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from tierkv.errors import BodyMismatch, ChecksumMismatch, CorruptBlock, InvalidRequest
from tierkv.spec import BlockLayout
from tierkv.storage.codecs import Codec, codec_by_id, codec_by_name
from tierkv.storage.codecs.base import Buffer, Bytes, Unsuitable, as_bytes
from tierkv.storage.codecs.bx1 import Bx1
from tierkv.storage.codecs.plane import scratch
from tierkv.storage.codecs.raw import Raw
from tierkv.storage.tier import checksum

__all__ = ["ContainerInfo", "pack", "pack_parts", "peek", "unpack_into", "unpack_planes_into", "verify_sections"]

MAGIC = b"TKVC"
VERSION = 1
DTYPE_IDS: Mapping[str, int] = {
    "uint8": 0,
    "bfloat16": 1,
    "float16": 2,
    "float32": 3,
    "float8_e4m3": 4,
    "float8_e5m2": 5,
}

_DTYPE_NAMES: Mapping[int, str] = {number: name for name, number in DTYPE_IDS.items()}
_FIXED = struct.Struct("<4s8BIQQ")  # magic; version codec dtype flags token_axis ndim sections 0; header raw checksum
_SECTION = struct.Struct("<QQ")  # length, checksum
_SUM = struct.Struct("<Q")
_REMEDY = "drop the block; the next store repairs it"


@dataclass(frozen=True, slots=True)
class ContainerInfo:
    """What a container's header says.

    Attributes
    ----------
    codec
        Name of the codec that wrote the sections; ``bx1`` where a lossy one declined the block.
    layout
        Shape and dtype of the payload.
    raw_length
        Payload size in bytes; always `layout.nbytes`.
    payload_checksum
        XXH3-64 of the payload that `unpack_into` gives.
    container_length
        Size of the whole container in bytes.
    """

    codec: str
    layout: BlockLayout
    raw_length: int
    payload_checksum: int
    container_length: int


@dataclass(frozen=True, slots=True)
class _Header:
    info: ContainerInfo
    codec: Codec
    length: int
    sections: tuple[tuple[int, int], ...]  # length, checksum


def pack(payload: Buffer, layout: BlockLayout | None, codec: str, payload_checksum: int) -> memoryview:
    """Code a block into one contiguous container. Blocks; safe to call from any thread.

    Parameters
    ----------
    payload
        C-contiguous bytes of the block, of any alignment.
    layout
        Their shape and dtype; None: bytes about which nothing is known.
    codec
        Name of a codec, see `tierkv.storage.codecs`.
    payload_checksum
        XXH3-64 of `payload` as announced by its writer.

    Returns
    -------
    memoryview
        Bytes the caller owns: nothing else refers to them. Where `codec` is lossy, `peek` tells the checksum that the
        stored block has from now on.

    Raises
    ------
    ChecksumMismatch
        `payload` is not what its writer announced.
    BodyMismatch
        `payload` is longer or shorter than `layout` says.
    InvalidRequest
        `layout` is not one.
    ConfigError
        `codec` is unknown.
    """
    chosen, layout, sections = _coded(payload, layout, codec, payload_checksum)
    table = [(section.size, checksum(section.data)) for section in sections]
    start = at = _header_length(len(layout.shape), len(sections))
    container = np.empty(start + sum(section.size for section in sections), np.uint8)
    for section in sections:
        np.copyto(container[at : at + section.size], section)
        at += section.size
    if chosen.lossy:
        # decoding will not show that the payload changed meanwhile, as it does for a lossless codec
        _check_payload(payload, payload_checksum)
        # from the container: decoding may use the memory that `sections` are views of
        payload_checksum = _decoded_checksum(chosen, container[start:].data, table, layout)
    container[:start] = as_bytes(_header(chosen.id, layout, payload_checksum, table))
    return container.data


def pack_parts(payload: Buffer, layout: BlockLayout | None, codec: str, payload_checksum: int) -> list[memoryview]:
    """As `pack`, but in parts that make the container when joined: who joins more to them copies bytes once. Blocks.

    The first part is all of the header at least. Parts may be views of `payload`, and of memory that the calling thread
    uses again when it packs the next block.
    """
    if codec_by_name(codec).lossy:
        return [pack(payload, layout, codec, payload_checksum)]
    chosen, layout, sections = _coded(payload, layout, codec, payload_checksum)
    # The one section of a raw block is the payload, whose checksum was verified this moment.
    is_payload = isinstance(chosen, Raw)
    table = [(section.size, payload_checksum if is_payload else checksum(section.data)) for section in sections]
    return [memoryview(_header(chosen.id, layout, payload_checksum, table)), *(section.data for section in sections)]


def unpack_into(container: Buffer, out: memoryview) -> int:
    """Fill the first `raw_length` bytes of `out` with the verified payload; return their number. Blocks.

    `out` is writable and of any alignment. Raises `BodyMismatch` when it is too small (nothing is written), and
    `CorruptBlock` (`out` then holds garbage) with cause

    - ``header``: not a container, or one whose header is damaged or of another version;
    - ``truncated``: bytes are missing at the end;
    - ``checksum``: a section or the payload is not what was written;
    - ``codec``: sections that verify and still cannot be decoded, or a codec nobody knows.

    Safe to call from any thread, also on memory that changes meanwhile: the checksum of what landed in `out` decides.
    """
    container = memoryview(container)
    header = _parse(container)
    info = header.info
    _check_length(container, info)
    if len(out) < info.raw_length:
        raise BodyMismatch(f"a block of {info.raw_length} bytes does not fit a buffer of {len(out)}")
    target = out[: info.raw_length]
    header.codec.decode_into(_verified_sections(container, header), target, info.layout)
    if checksum(target) != info.payload_checksum:
        raise CorruptBlock("a decoded block does not match its checksum", remedy=_REMEDY)
    return info.raw_length


def unpack_planes_into(container: Buffer, planes: memoryview) -> ContainerInfo | None:
    """Undo the Huffman coding of a block and leave its byte planes, as `Bx1.decode_planes_into` lays them out. Blocks.

    Sections are verified. What the planes merge to is not: that is for the payload's checksum to say. Returns None
    where there are no planes, because the block was stored by another codec or its bytes are no numbers, and where they
    do not fit. Raises `CorruptBlock` as `unpack_into`; `planes` then holds garbage.
    """
    view = memoryview(container)
    header = _parse(view)
    codec, layout = header.codec, header.info.layout
    if not isinstance(codec, Bx1) or layout.dtype == "uint8" or codec.planes_nbytes(layout) > len(planes):
        return None
    codec.decode_planes_into(_verified_sections(view, header), planes[: codec.planes_nbytes(layout)], layout)
    return header.info


def peek(container: Buffer) -> ContainerInfo:
    """Read and verify a container's header; its sections may be missing. Raises `CorruptBlock` as `unpack_into`."""
    return _parse(memoryview(container)).info


def verify_sections(container: Buffer) -> ContainerInfo:
    """Verify all of a container that can be without decoding it: its header, its length and its sections. Blocks.

    Raises `CorruptBlock` as `unpack_into`.
    """
    view = memoryview(container)
    header = _parse(view)
    _check_length(view, header.info)
    for section, (_, announced) in zip(_sections(view[header.length :], header.sections), header.sections, strict=True):
        if checksum(section) != announced:
            raise CorruptBlock("a section of a container does not match its checksum", remedy=_REMEDY)
    return header.info


def _check_length(container: memoryview, info: ContainerInfo) -> None:
    if len(container) < info.container_length:
        raise CorruptBlock(
            f"a container of {info.container_length} bytes ends after {len(container)}",
            cause="truncated",
            remedy=_REMEDY,
        )
    if len(container) > info.container_length:
        raise CorruptBlock(
            f"{len(container) - info.container_length} bytes follow a container", cause="header", remedy=_REMEDY
        )


def _check_payload(payload: Buffer, announced: int) -> None:
    if checksum(payload) != announced:
        raise ChecksumMismatch("a block about to be stored does not match its checksum", remedy=_REMEDY)


def _check_layout(layout: BlockLayout) -> None:
    good = (
        layout.dtype in DTYPE_IDS
        and len(layout.shape) < 256
        and all(dim >= 0 for dim in layout.shape)
        and 0 <= layout.token_axis < len(layout.shape)
    )
    if not good:
        raise InvalidRequest(
            f"not a block layout: {layout}",
            remedy=f"dtype is one of {', '.join(DTYPE_IDS)}, token_axis an index of shape",
        )


def _coded(
    payload: Buffer, layout: BlockLayout | None, codec: str, payload_checksum: int
) -> tuple[Codec, BlockLayout, list[Bytes]]:
    """Return the codec that took a verified block, the block's layout, and what the codec made of it."""
    chosen = codec_by_name(codec)
    data = as_bytes(payload)
    layout = layout or BlockLayout.opaque(data.size)
    _check_layout(layout)
    if layout.nbytes != data.size:
        raise BodyMismatch(f"a payload of {data.size} bytes does not fill a layout of {layout.nbytes}")
    _check_payload(payload, payload_checksum)
    chosen, sections = _encode(chosen, payload, layout)
    return chosen, layout, sections


def _encode(codec: Codec, payload: Buffer, layout: BlockLayout) -> tuple[Codec, list[Bytes]]:
    """Return the codec that took the block beside its sections."""
    try:
        return codec, codec.encode(payload, layout)
    except Unsuitable:
        lossless = codec_by_name("bx1")
        return lossless, lossless.encode(payload, layout)


def _decoded_checksum(codec: Codec, body: memoryview, table: Sequence[tuple[int, int]], layout: BlockLayout) -> int:
    decoded = scratch("decoded", layout.nbytes).data
    codec.decode_into(_sections(body, table), decoded, layout)
    return checksum(decoded)


def _header(codec: int, layout: BlockLayout, payload_checksum: int, sections: Sequence[tuple[int, int]]) -> bytes:
    ndim = len(layout.shape)
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        codec,
        DTYPE_IDS[layout.dtype],
        0,
        layout.token_axis,
        ndim,
        len(sections),
        0,
        _header_length(ndim, len(sections)),
        layout.nbytes,
        payload_checksum,
    )
    summed = fixed + struct.pack(f"<{ndim}Q", *layout.shape) + b"".join(_SECTION.pack(*section) for section in sections)
    return summed + _SUM.pack(checksum(summed))


def _header_length(ndim: int, sections: int) -> int:
    return _FIXED.size + 8 * ndim + _SECTION.size * sections + _SUM.size


def _parse(container: memoryview) -> _Header:
    fixed = bytes(container[: _FIXED.size])
    if fixed[:4] != MAGIC[: len(fixed)]:
        raise CorruptBlock("these bytes are not a container", cause="header", remedy=_REMEDY)
    if len(fixed) < _FIXED.size:
        raise CorruptBlock(f"a container ends after {len(fixed)} bytes", cause="truncated", remedy=_REMEDY)
    _, version, codec_id, dtype, flags, axis, ndim, count, reserved, length, raw_length, payload_checksum = (
        _FIXED.unpack(fixed)
    )
    if version != VERSION:
        raise CorruptBlock(f"a container of version {version}, not {VERSION}", cause="header", remedy=_REMEDY)
    if length != _header_length(ndim, count):
        raise CorruptBlock("a container's header has an impossible length", cause="header", remedy=_REMEDY)
    header = bytes(container[:length])
    if len(header) < length:
        raise CorruptBlock(f"a container ends after {len(header)} bytes", cause="truncated", remedy=_REMEDY)
    if checksum(header[: -_SUM.size]) != _SUM.unpack_from(header, length - _SUM.size)[0]:
        raise CorruptBlock("a container's header does not match its checksum", cause="header", remedy=_REMEDY)
    shape = struct.unpack_from(f"<{ndim}Q", header, _FIXED.size)
    sections = tuple(_SECTION.iter_unpack(header[_FIXED.size + 8 * ndim : -_SUM.size]))
    if flags or reserved or dtype not in _DTYPE_NAMES or axis >= ndim:
        raise CorruptBlock("a container's header has impossible fields", cause="header", remedy=_REMEDY)
    layout = BlockLayout(_DTYPE_NAMES[dtype], shape, axis)
    if layout.nbytes != raw_length:
        raise CorruptBlock(
            f"a container of {raw_length} raw bytes has a layout of {layout.nbytes}", cause="header", remedy=_REMEDY
        )
    codec = codec_by_id(codec_id)
    info = ContainerInfo(codec.name, layout, raw_length, payload_checksum, length + sum(size for size, _ in sections))
    return _Header(info, codec, length, sections)


def _verified_sections(container: memoryview, header: _Header) -> list[memoryview]:
    info, found = header.info, _sections(container[header.length :], header.sections)
    for section, (size, announced) in zip(found, header.sections, strict=True):
        # a section that is the payload itself is verified where it lands
        if (size, announced) != (info.raw_length, info.payload_checksum) and checksum(section) != announced:
            raise CorruptBlock("a section of a container does not match its checksum", remedy=_REMEDY)
    return found


def _sections(body: memoryview, table: Sequence[tuple[int, int]]) -> list[memoryview]:
    ends = list(accumulate(size for size, _ in table))
    return [body[end - size : end] for end, (size, _) in zip(ends, table, strict=True)]
