"""Copying a block and summing the copy, in one go over memory."""

from __future__ import annotations

import numpy as np
import xxhash

__all__ = ["copy_and_sum"]

_PIECE = 256 << 10
"""What was just copied is still in the processor's second-level cache when it is summed."""


def copy_and_sum(target: memoryview, source: bytes | bytearray | memoryview) -> int:
    """Copy `source` over `target`, which has its size, and return the XXH3-64 of what `target` now holds."""
    to, of = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    if len(to) <= _PIECE:
        np.copyto(to, of)
        return xxhash.xxh3_64_intdigest(target)
    digest = xxhash.xxh3_64()
    for at in range(0, len(to), _PIECE):
        piece = to[at : at + _PIECE]
        np.copyto(piece, of[at : at + _PIECE])
        digest.update(piece.data)
    return digest.intdigest()
