"""Payload values to float32 and back: exact on the way in, rounded to the nearest (ties to even) on the way out.

Payloads are arrays of their bits. All that decoding does is integer arithmetic on normal numbers or exact, so a thread
that flushes denormals to zero, as some libraries have it, decodes the same bytes. Arrays of one call have one shape;
`out` arguments are filled, nothing else is changed unless said.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierkv.storage.codecs.plane import scratch

__all__ = ["WORDS", "narrow", "widen"]

Array = NDArray[Any]

WORDS: Mapping[str, str] = {"float32": "<u4", "bfloat16": "<u2", "float16": "<u2"}
"""Numpy's dtype for the bits of a value."""

_HALF_BIAS = 127 - 15  # of float32's exponents over those of float16
_SMALLEST_HALF = (_HALF_BIAS + 1) << 23  # 2**-14, the smallest normal one, as float32


def widen(values: Array, dtype: str, out: Array) -> None:
    """Convert payload `values` of `dtype` to float32 `out`; float16 beyond its range gives values from 65536 up."""
    bits = out.view("<u4")
    if dtype == "float32":
        np.copyto(bits, values)
    elif dtype == "bfloat16":
        np.copyto(bits, values)
        np.left_shift(bits, 16, out=bits)
    else:
        # widening a signed word repeats its sign up to bit 31, where float32 wants it
        np.copyto(bits.view("<i4"), values.view("<i2"))
        np.left_shift(bits, 13, out=bits)
        np.bitwise_and(bits, 0x8FFFE000, out=bits)
        np.multiply(out, np.float32(2.0**_HALF_BIAS), out=out)


def narrow(singles: Array, dtype: str, out: Array) -> None:
    """Round float32 `singles`, finite and within the range of `dtype`, to payload values; `singles` is destroyed."""
    bits = singles.view("<u4")
    if dtype == "float32":
        np.copyto(out, bits)
    elif dtype == "bfloat16":
        _round(bits, 16)
        np.copyto(out, bits, casting="unsafe")
    else:
        work, signs = _like(bits, "work"), scratch("signs", 2 * bits.size).view("<u2").reshape(bits.shape)
        np.right_shift(bits, 16, out=work)
        np.bitwise_and(work, 0x8000, out=work)
        np.copyto(signs, work, casting="unsafe")
        np.bitwise_and(bits, 0x7FFFFFFF, out=bits)
        # zero wraps to the largest number, and needs no care
        np.subtract(bits, 1, out=work)
        tiny = np.flatnonzero(np.less(work, _SMALLEST_HALF - 1))
        # added to 0.5, a value is rounded to multiples of 2**-24, as denormal float16 are
        denormals = (singles.reshape(-1)[tiny] + np.float32(0.5)).view("<u4") - np.float32(0.5).view("<u4")
        np.maximum(bits, _HALF_BIAS << 23, out=bits)
        np.subtract(bits, _HALF_BIAS << 23, out=bits)
        _round(bits, 13)
        bits.reshape(-1)[tiny] = denormals
        np.copyto(out, bits, casting="unsafe")
        np.bitwise_or(out, signs, out=out)


def _round(bits: Array, drop: int) -> None:
    """Divide by 2**drop, to the nearest integer and to the even one of two."""
    odd = _like(bits, "odd")
    np.right_shift(bits, drop, out=odd)
    np.bitwise_and(odd, 1, out=odd)
    np.add(bits, (1 << (drop - 1)) - 1, out=bits)
    np.add(bits, odd, out=bits)
    np.right_shift(bits, drop, out=bits)


def _like(bits: Array, name: str) -> Array:
    return scratch(name, bits.nbytes).view("<u4").reshape(bits.shape)
