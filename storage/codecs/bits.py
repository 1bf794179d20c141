"""Passes over float bit patterns: take words apart into planes, and put them together again.

Written for numpy's vector loops: whole-array shifts and masks with `out`, unsafe casts as truncation, never a strided
byte store. Arrays of one call have one shape; `out` arguments are filled, nothing else is changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierkv.storage.codecs.plane import scratch

__all__ = ["merge_halves", "merge_words", "split_halves", "split_words"]

Array = NDArray[Any]

_SIGN_AND_LOW_7 = np.int16(0x807F - 0x10000)


def split_halves(halves: Array, codes: Array, rest: Array) -> None:
    """Take 16-bit words apart: bits 14..7 into `codes`, the sign (to bit 7) and bits 6..0 into `rest`."""
    shifted = scratch("split", halves.nbytes).view("<u2").reshape(halves.shape)
    np.right_shift(halves, 7, out=codes, dtype=halves.dtype, casting="unsafe")
    # times 257: the sign's byte is added to the one above it, whose upper half is all that stays
    np.bitwise_and(halves, 0x807F, out=shifted)
    np.multiply(shifted, 257, out=shifted)
    np.right_shift(shifted, 8, out=rest, dtype=halves.dtype, casting="unsafe")


def merge_halves(codes: Array, rest: Array, halves: Array) -> None:
    """Inverse of `split_halves`."""
    spread = scratch("spread", halves.nbytes).view("<i2").reshape(halves.shape)
    np.multiply(codes, 128, out=halves, dtype=halves.dtype)
    # widening a signed byte repeats its sign up to bit 15, where the word wants it
    np.bitwise_and(rest.view(np.int8), _SIGN_AND_LOW_7, out=spread)
    np.bitwise_or(halves, spread.view("<u2"), out=halves)


def split_words(words: Array, high: Array, low: Array) -> None:
    """Take 32-bit words apart into their 16-bit halves."""
    shifted = scratch("split", words.nbytes).view("<u4").reshape(words.shape)
    np.right_shift(words, 16, out=shifted)
    np.copyto(high, shifted, casting="unsafe")
    np.copyto(low, words, casting="unsafe")


def merge_words(high: Array, low: Array, words: Array) -> None:
    """Inverse of `split_words`."""
    np.left_shift(high, 16, out=words, dtype=words.dtype)
    np.bitwise_or(words, low, out=words)
