"""Planes of codec bx1 without their merging: what a GPU merges must be what the container's definition says."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierkv.errors import CorruptBlock
from tierkv.spec import DTYPE_BYTES, BlockLayout
from tierkv.storage.codecs.bx1 import Bx1

BX1 = Bx1()
FLOATS = sorted(set(DTYPE_BYTES) - {"uint8"})
LARGE = (2, 2, 64, 3, 16)  # enough values for pairs


def exponents_alike(layout: BlockLayout, seed: int) -> bytes:
    """Random bits whose codes are close to each other, but for a few: so that residuals become pairs and escapes."""
    rng = np.random.default_rng(seed)
    size = DTYPE_BYTES[layout.dtype]
    words = rng.integers(0, 256**size, prod(layout.shape), dtype=np.uint64)
    if size > 1:
        codes = rng.integers(100, 110, words.size).astype(np.uint64)
        codes[:2] = 3
        shift = np.uint64(8 * size - 9)
        words = words & ~(np.uint64(0xFF) << shift) | codes << shift
    return words.astype(f"<u{size}").tobytes()


def planes_by_definition(payload: bytes, layout: BlockLayout) -> list[bytes]:
    """Split as docs/container.md says."""
    size, axis = DTYPE_BYTES[layout.dtype], layout.token_axis
    values = np.frombuffer(payload, f"<u{size}").astype(np.int64).reshape(layout.shape)

    def plane(numbers: NDArray[np.int64], dtype: str = "u1") -> bytes:
        return numbers.astype(dtype).tobytes()

    if size == 1:
        codes = values & 0x7F
        peaks = codes.max(axis, keepdims=True)
        return [plane(peaks), plane((peaks - values) % 256)]
    halves = values >> 16 if size == 4 else values
    codes = halves >> 7 & 0xFF
    peaks = codes.max(axis, keepdims=True)
    found = [plane(halves >> 8 & 0x80 | halves & 0x7F), plane(peaks), plane(peaks - codes)]
    return [plane(values & 0xFFFF, "<u2"), *found] if size == 4 else found


def decoded_planes(sections: list[memoryview], layout: BlockLayout, sizes: list[int]) -> list[bytes]:
    buffer = bytearray(b"\xa5" * BX1.planes_nbytes(layout))
    BX1.decode_planes_into(sections, memoryview(buffer), layout)
    planes = []
    start = 0
    for size in sizes:
        planes.append(bytes(buffer[start : start + size]))
        start += -(-size // 16) * 16
    assert start == len(buffer)
    return planes


def sections_of(payload: bytes, layout: BlockLayout) -> list[memoryview]:
    return [memoryview(section.tobytes()) for section in BX1.encode(payload, layout)]


shapes = st.one_of(
    st.lists(st.integers(1, 5), min_size=1, max_size=5).map(tuple),
    st.sampled_from([LARGE, (1, 1, 4097, 1, 1), (2, 2, 27, 3, 16)]),
)


@given(dtype=st.sampled_from(FLOATS), shape=shapes, axis=st.integers(0, 4), seed=st.integers(0, 9), noise=st.booleans())
def test_planes_are_what_the_container_defines_and_code_to_the_same_sections(
    dtype: str, shape: tuple[int, ...], axis: int, seed: int, noise: bool
) -> None:
    layout = BlockLayout(dtype, shape, axis % len(shape))
    payload = np.random.default_rng(seed).bytes(layout.nbytes) if noise else exponents_alike(layout, seed)
    sections = sections_of(payload, layout)
    expected = planes_by_definition(payload, layout)
    assert decoded_planes(sections, layout, [len(plane) for plane in expected]) == expected
    buffer = bytearray().join(plane + b"\xa5" * (-len(plane) % 16) for plane in expected)
    assert [section.tobytes() for section in BX1.encode_planes(buffer, layout)] == [bytes(s) for s in sections]


def test_pairs_are_among_what_these_tests_decode() -> None:
    layout = BlockLayout("bfloat16", LARGE, 2)
    assert len(sections_of(exponents_alike(layout, 0), layout)) == 5


def test_the_one_plane_of_opaque_bytes_is_the_payload() -> None:
    layout = BlockLayout.opaque(1000)
    payload = b"abcdefgh" * 125
    buffer = bytearray(BX1.planes_nbytes(layout))
    BX1.decode_planes_into(sections_of(payload, layout), memoryview(buffer), layout)
    assert buffer == payload
    assert [s.tobytes() for s in BX1.encode_planes(buffer, layout)] == [bytes(s) for s in sections_of(payload, layout)]


def test_an_empty_payload_has_no_planes() -> None:
    layout = BlockLayout("bfloat16", (0, 2, 16, 1, 8), 2)
    assert BX1.planes_nbytes(layout) == 0
    BX1.decode_planes_into([], memoryview(bytearray()), layout)
    assert BX1.encode_planes(bytearray(), layout) == []
    with pytest.raises(CorruptBlock):
        BX1.decode_planes_into([memoryview(b"x")], memoryview(bytearray()), layout)


@pytest.mark.parametrize("dtype", FLOATS)
def test_sections_nobody_can_have_written_are_corruption(dtype: str) -> None:
    layout = BlockLayout(dtype, (1, 2, 8, 1, 4), 2)
    sections = sections_of(bytes(layout.nbytes), layout)
    room = memoryview(bytearray(BX1.planes_nbytes(layout)))
    for wrong in (
        [],
        sections[:-1],
        [*sections, memoryview(b"")],
        [*sections, *[memoryview(b"")] * 3],
        [*sections[:-1], memoryview(b"not a frame")],
        [memoryview(bytes(layout.nbytes + 1)), *sections[1:]],
    ):
        with pytest.raises(CorruptBlock) as caught:
            BX1.decode_planes_into(wrong, room, layout)
        assert caught.value.cause == "codec"
