"""Pairs: a plane of small numbers, two to a byte, for the Huffman coder.

A coder's time goes by bytes, not by bits of entropy: with two residuals in each byte it has half as many to code, and
the symbols of rare lengths cost less in fractions of bits. The few numbers of 16 and more are escapes: their lower
half stays in the pair, the whole number is kept beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierkv.storage.codecs.base import Bytes, as_bytes
from tierkv.storage.codecs.plane import expand, scratch, shrink

__all__ = ["SECTIONS", "join_pairs", "padded_size", "split_pairs"]

SECTIONS = 3
"""Pairs, positions of the escapes, escapes."""

_LOWER_HALVES = np.uint64(0x0F0F0F0F0F0F0F0F)
_UPPER_HALVES = ~_LOWER_HALVES
_WORTH_IT = 4096  # numbers; below, what is saved is less than two more sections cost
_MOST_ESCAPES = 1 / 1024  # of the numbers; at 5 bytes each, more of them would cost more than pairs gain


def padded_size(size: int) -> int:
    """Return the bytes in which `join_pairs` and `split_pairs` want a plane of `size` bytes: whole words, twice."""
    return -(-size // 16) * 16


def join_pairs(plane: Bytes, size: int) -> list[Bytes] | None:
    """Code the first `size` of the ``padded_size(size)`` bytes of a plane as pairs; None when that is not worth it.

    The plane is lost. The pairs are this thread's scratch.
    """
    if size < _WORTH_IT:
        return None
    plane[size:] = 0
    words = plane.view("<u8")
    low, high = words[: words.size // 2], words[words.size // 2 :]
    both = scratch("both", low.nbytes).view("<u8")
    np.bitwise_or(low, high, out=both)
    np.bitwise_and(both, _UPPER_HALVES, out=both)
    at = np.flatnonzero(both != 0)  # sixteen at a time: hardly any is
    if at.size > size * _MOST_ESCAPES:
        return None
    at = np.concatenate((at, at + low.size))
    large = (words[at] & _UPPER_HALVES).view(np.uint8).reshape(-1, 8) != 0
    positions = (8 * at[:, None] + np.arange(8))[large].astype("<u4")
    if positions.size > size * _MOST_ESCAPES:
        return None
    escapes = plane[positions]
    plane[positions] &= 0x0F
    np.left_shift(high, np.uint64(4), out=high)
    np.bitwise_or(low, high, out=low)
    return [shrink(low.view(np.uint8)), positions.view(np.uint8), escapes]


def split_pairs(sections: Sequence[memoryview], plane: Bytes, size: int) -> None:
    """Inverse of `join_pairs`, into ``padded_size(size)`` bytes. Raises `ValueError` for what it cannot have made."""
    positions, escapes = np.frombuffer(sections[1], "<u4"), as_bytes(sections[2])
    if positions.size != escapes.size or (positions.size and int(positions.max()) >= size):
        raise ValueError(f"{escapes.size} escapes for {positions.size} positions in {size} numbers")
    pairs = expand(sections[0], plane.size // 2, "pairs").view("<u8")
    words = plane.view("<u8")
    low, high = words[: pairs.size], words[pairs.size :]
    np.right_shift(pairs, np.uint64(4), out=high)
    np.bitwise_and(high, _LOWER_HALVES, out=high)
    np.bitwise_and(pairs, _LOWER_HALVES, out=low)
    plane[positions] = escapes
