"""Copying and summing in pieces is copying and summing."""

import os

import pytest
import xxhash

from tierkv.copying import copy_and_sum

PIECE = 256 << 10


@pytest.mark.parametrize("size", [1, 100, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 4 * PIECE - 7])
def test_the_copy_and_its_sum_are_right(size: int) -> None:
    source, around = os.urandom(size), bytearray(size + 2)
    for kind in (bytes, bytearray, memoryview):
        assert copy_and_sum(memoryview(around)[1:-1], kind(source)) == xxhash.xxh3_64_intdigest(source)
        assert around == b"\0" + source + b"\0"
