"""Uniform quantisers: float32 values to one-byte codes, with a step per channel or per row.

    value = (code + center) * step          channels; `center` is an integer of 16 bits
    value = code * step                     rows

Steps have four significant bits, so these products need at most 20 and float32 holds them exactly: whoever decodes, in
whatever order and with whatever rounding, finds the same numbers. A step is stored as the distance of its code from
the largest of its layer, so it is at least 2**-100, and at least 2**-32 of the largest. Values are of magnitude `LIMIT`
at most.

The first axis of every array is layers. Functions fill their output arguments and may destroy `values`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierkv.storage.codecs.plane import scratch

__all__ = ["LIMIT", "quantize_channels", "quantize_rows", "restore_channels", "restore_rows", "within"]

Array = NDArray[Any]

LIMIT = 2.0**40

# A step's code is the upper bits of its float32: eight of exponent, three of mantissa.
_LOW_BITS = 20
_SMALLEST_CODE = int(np.float32(2.0**-100).view(np.uint32)) >> _LOW_BITS
_LARGEST_CODE = int(np.float32(2 * LIMIT).view(np.uint32)) >> _LOW_BITS
_LARGEST_CENTER = 0x7FFF - 1


def quantize_channels(values: Array, fineness: float, codes: Array, centers: Array, peaks: Array, steps: Array) -> None:
    """Quantise around the mean of each channel, with steps of `fineness` standard deviations.

    Parameters
    ----------
    values
        float32 ``(layers, outer, tokens, channels)``; destroyed.
    fineness
        Step in standard deviations. Where that would not let every code fit a byte, the step is as small as it can be.
    codes
        int8, shape of `values`.
    centers, steps
        int16 and uint8 ``(layers, outer, 1, channels)``.
    peaks
        uint16 ``(layers,)``.
    """
    tokens = values.shape[2]
    mean = np.add.reduce(values, axis=2, keepdims=True)
    mean /= np.float32(tokens)
    work = _like(values)
    np.subtract(values, mean, out=work)
    np.abs(work, out=work)
    reach = np.maximum.reduce(work, axis=2, keepdims=True)
    np.multiply(work, work, out=work)
    deviation = np.add.reduce(work, axis=2, keepdims=True)
    deviation /= np.float32(tokens)
    np.sqrt(deviation, out=deviation)
    # codes are differences of two rounded numbers: 126 steps and one more
    least = np.maximum(reach / np.float32(126), np.abs(mean) / np.float32(_LARGEST_CENTER))
    inverse = _choose_steps(deviation * np.float32(fineness), least, peaks, steps)
    center = np.rint(mean * inverse)
    np.copyto(centers, center, casting="unsafe")
    np.multiply(values, inverse, out=values)
    np.rint(values, out=values)
    np.subtract(values, center, out=values)
    np.copyto(codes, values, casting="unsafe")


def quantize_rows(values: Array, fineness: float, codes: Array, peaks: Array, steps: Array) -> None:
    """Quantise around zero, with steps of `fineness` times the root mean square of each row.

    As `quantize_channels`, for `values` and `codes` of shape ``(layers, rows, dims)`` and `steps` of
    ``(layers, rows, 1)``.
    """
    square = np.einsum("lrd,lrd->lr", values, values)[..., np.newaxis]
    square /= np.float32(values.shape[2])
    # along a short axis numpy finds maxima of integers twice as fast
    reach = np.maximum.reduce(_magnitudes(values), axis=2, keepdims=True).view("<f4")
    inverse = _choose_steps(np.sqrt(square) * np.float32(fineness), reach / np.float32(127), peaks, steps)
    np.multiply(values, inverse, out=values)
    np.rint(values, out=values)
    np.copyto(codes, values, casting="unsafe")


def within(values: Array, limit: float) -> bool:
    """Say whether all float32 `values` are finite and of magnitude `limit` at most."""
    return bool(_magnitudes(values).max() <= np.float32(limit).view(np.uint32))


def restore_channels(codes: Array, centers: Array, peaks: Array, steps: Array, values: Array) -> None:
    """Inverse of `quantize_channels` but for its loss. Raises `ValueError` for steps no quantiser chooses."""
    step = _steps(peaks, steps)
    np.copyto(values, codes)
    np.add(values, centers.astype("<f4"), out=values)
    np.multiply(values, step, out=values)


def restore_rows(codes: Array, peaks: Array, steps: Array, values: Array) -> None:
    """Inverse of `quantize_rows` but for its loss. Raises `ValueError` for steps no quantiser chooses."""
    step = _steps(peaks, steps)
    np.copyto(values, codes)
    np.multiply(values, step, out=values)


def _choose_steps(wanted: Array, least: Array, peaks: Array, steps: Array) -> Array:
    """Round steps to four bits, `least` upwards; store them in `peaks` and `steps` and return their inverses."""
    chosen = (wanted.view("<u4") + (1 << (_LOW_BITS - 1))) >> _LOW_BITS
    enough = (least.view("<u4") + ((1 << _LOW_BITS) - 1)) >> _LOW_BITS
    np.maximum(chosen, enough, out=chosen)
    np.maximum(chosen, _SMALLEST_CODE, out=chosen)
    per_layer = (-1, *[1] * (chosen.ndim - 1))
    top = chosen.reshape(len(chosen), -1).max(axis=1)
    np.copyto(peaks, top, casting="unsafe")
    below = np.minimum(top.reshape(per_layer) - chosen, 255)
    np.copyto(steps, below, casting="unsafe")
    return 1 / _steps(peaks, steps)


def _steps(peaks: Array, steps: Array) -> Array:
    codes = peaks.astype("<i4").reshape(-1, *[1] * (steps.ndim - 1)) - steps
    if codes.size and not _SMALLEST_CODE <= codes.min() <= codes.max() <= _LARGEST_CODE:
        raise ValueError("steps out of range")
    return (codes << _LOW_BITS).view("<f4")


def _magnitudes(values: Array) -> Array:
    """Return the bits of magnitudes, in this thread's scratch: ordered as the magnitudes are, NaN the largest."""
    magnitudes = _like(values).view("<u4")
    np.bitwise_and(values.view("<u4"), 0x7FFFFFFF, out=magnitudes)
    return magnitudes


def _like(values: Array) -> Array:
    return scratch("work", values.nbytes).view("<f4").reshape(values.shape)
