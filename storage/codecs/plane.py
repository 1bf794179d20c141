"""Planes: runs of bytes of one kind, each stored as a zstd frame if that is shorter, else as it is.

Working memory and zstd contexts belong to the thread that uses them: contexts are not thread-safe, and fresh memory
costs more in page faults than the passes that fill it. A thread keeps as much as its largest block, and a few MiB.
"""

from __future__ import annotations

from threading import local

import numpy as np
import zstandard

from tierkv.storage.codecs.base import Buffer, Bytes, as_bytes

__all__ = ["expand", "expand_into", "scratch", "shrink", "shrink_opaque"]

# zstd as a Huffman coder: match search costs ratio and speed on exponent residuals, and these settings make it give up
# at once; negative levels would too, but they also switch the coding of literals off.
_HUFFMAN = zstandard.ZstdCompressionParameters(
    window_log=17,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    strategy=zstandard.STRATEGY_FAST,
    write_content_size=True,
)
_OPAQUE = zstandard.ZstdCompressionParameters.from_level(1, window_log=17, write_content_size=True)
_MAX_WINDOW_BYTES = 1 << 17
_PROBE_BYTES = 16 * 1024


class _PerThread(local):
    def __init__(self) -> None:
        self.huffman = zstandard.ZstdCompressor(compression_params=_HUFFMAN)
        self.opaque = zstandard.ZstdCompressor(compression_params=_OPAQUE)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        self.buffers: dict[str, Bytes] = {}


_mine = _PerThread()


def scratch(name: str, size: int) -> Bytes:
    """Return `size` bytes of this thread's memory called `name`, of undefined content, aligned for any dtype.

    Valid until this thread asks for the same name again.
    """
    buffer = _mine.buffers.get(name)
    if buffer is None or buffer.size < size:
        buffer = _mine.buffers[name] = np.empty(size, np.uint8)
    return buffer[:size]


def shrink(plane: Bytes) -> Bytes:
    """Huffman-code a plane; return the frame, or the plane itself where that does not make it shorter."""
    return _shorter(_mine.huffman, plane)


def shrink_opaque(plane: Bytes) -> Bytes:
    """As `shrink`, for bytes about which nothing is known: repeated strings are looked for too."""
    return _shorter(_mine.opaque, plane)


def expand(section: Buffer, size: int, name: str) -> Bytes:
    """Return the plane of `size` bytes that `section` holds: a view of it, or this thread's scratch called `name`.

    Raises `ValueError` when the section does not hold exactly `size` bytes.
    """
    if len(section) == size:
        return as_bytes(section)
    plane = scratch(name, size)
    expand_into(section, plane)
    return plane


def expand_into(section: Buffer, plane: Bytes) -> None:
    """As `expand`, into memory of the caller."""
    if len(section) == plane.size:
        np.copyto(plane, as_bytes(section))
        return
    if len(section) > plane.size:
        raise ValueError(f"a section of {len(section)} bytes for a plane of {plane.size}")
    try:
        if zstandard.frame_content_size(section) != plane.size:
            raise ValueError(f"a frame that does not hold {plane.size} bytes")
        # readinto preallocated memory: decompress() would return a fresh object and fault in its pages
        with _mine.decompressor.stream_reader(section) as reader:
            filled = reader.readinto(plane.data)
    except zstandard.ZstdError as error:
        raise ValueError(f"not a readable zstd frame: {error}") from error
    if filled != plane.size:
        raise ValueError(f"a frame that ends after {filled} of {plane.size} bytes")


def _shorter(compressor: zstandard.ZstdCompressor, plane: Bytes) -> Bytes:
    # most planes of mantissas are noise: a sample from the middle says so for a tenth of the price
    middle = plane.size // 2
    sample = plane[middle : middle + _PROBE_BYTES]
    if plane.size > 4 * _PROBE_BYTES and len(compressor.compress(sample.data)) >= sample.size:
        return plane
    frame = compressor.compress(plane.data)
    return as_bytes(frame) if len(frame) < plane.size else plane
