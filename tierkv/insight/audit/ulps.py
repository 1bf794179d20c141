"""How far apart two floating-point numbers are, counted in the numbers between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["EPSILON", "Bits", "as_numbers", "ulp_distance", "ulp_histogram"]

Bits = NDArray[np.unsignedinteger[Any]]

_INFINITY: Mapping[str, int] = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}
EPSILON: Mapping[str, float] = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""The distance from 1 to the next number, by dtype: the dtypes that can be compared."""


def as_numbers(bits: Bits, dtype: str) -> NDArray[np.float32]:
    """Return the float32 numbers that `bits` of a dtype stand for, all of them exactly. float32 is not copied."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(dtype).astype(np.float32, copy=False)


def ulp_distance(left: Bits, right: Bits, dtype: str) -> NDArray[np.int64]:
    """Return how many steps from one number to the next lead from `left` to `right`, element by element.

    Parameters
    ----------
    left, right
        The numbers' bits as unsigned integers of the dtype's width, of one shape.
    dtype
        A key of `EPSILON`.

    Returns
    -------
    ndarray of int64
        0 for equal numbers, which +0 and -0 are. An infinity is one step beyond the largest finite number. Two NaNs are
        0 apart whatever they carry, and a NaN is farther from any number than numbers are from each other:
        ``2**width``.
    """
    width = left.dtype.itemsize * 8
    sign = 1 << (width - 1)
    magnitudes = [(bits & bits.dtype.type(sign - 1)).astype(np.int64) for bits in (left, right)]
    steps = [np.where(bits >= sign, -size, size) for bits, size in zip((left, right), magnitudes, strict=True)]
    distance: NDArray[np.int64] = np.abs(steps[0] - steps[1])
    nan = [size > _INFINITY[dtype] for size in magnitudes]
    distance[nan[0] != nan[1]] = 1 << width
    distance[nan[0] & nan[1]] = 0
    return distance


def ulp_histogram(distances: NDArray[np.int64]) -> tuple[int, ...]:
    """Count distances by size: item 0 counts those of 0, item n those from ``2**(n-1)`` to ``2**n - 1``."""
    _, sizes = np.frexp(distances.ravel().astype(np.float64))
    return tuple(np.bincount(sizes).tolist())
