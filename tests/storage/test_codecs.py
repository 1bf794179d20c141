"""Codecs: exact for any bits, small for KV, safe from any thread."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierkv.errors import ConfigError, CorruptBlock
from tierkv.spec import DTYPE_BYTES, BlockLayout
from tierkv.storage.codecs import CODECS, Codec, codec_by_id, codec_by_name

NHD, HND = (6, 2, 64, 3, 64), (6, 2, 3, 64, 64)
FLOATS = sorted(set(DTYPE_BYTES) - {"uint8"})


def kv_like(dtype: str, shape: tuple[int, ...], token_axis: int, seed: int = 0) -> bytes:
    """Values as attention has them: every channel with its own scale, tokens alike but for noise."""
    rng = np.random.default_rng(seed)
    per_channel = [1 if axis == token_axis else dim for axis, dim in enumerate(shape)]
    values = (rng.standard_normal(shape) * np.exp(rng.normal(0, 1.5, per_channel))).astype("<f4")
    return as_dtype(values, dtype)


def as_dtype(values: NDArray[np.float32], dtype: str) -> bytes:
    bits = values.view("<u4")
    if dtype == "float32":
        return values.tobytes()
    if dtype == "bfloat16":
        return (bits >> 16).astype("<u2").tobytes()
    half = values.astype("<f2").view("<u2")
    if dtype == "float16":
        return half.tobytes()
    return (half >> 8).astype("u1").tobytes()  # float8_e5m2 by truncation; good enough a stand-in for e4m3's bits


def sections_of(codec: Codec, payload: bytes, layout: BlockLayout) -> list[memoryview]:
    return [memoryview(section.tobytes()) for section in codec.encode(payload, layout)]


def round_trip(codec: Codec, payload: bytes, layout: BlockLayout) -> tuple[bytes, int]:
    """Return what comes back, and the number of bytes it was stored in."""
    sections = sections_of(codec, payload, layout)
    out = bytearray(layout.nbytes)
    codec.decode_into(sections, memoryview(out), layout)
    return bytes(out), sum(len(section) for section in sections)


def test_names_and_ids_find_their_codec() -> None:
    for codec in CODECS:
        assert codec_by_name(codec.name) is codec
        assert codec_by_id(codec.id) is codec
    assert {codec.name: codec.id for codec in CODECS} == {
        "raw": 0,
        "bx1": 1,
        "int8": 2,
        "eq2": 3,
        "eq3": 4,
        "eq4": 5,
        "eq5": 6,
    }
    assert [codec.name for codec in CODECS if not codec.lossy] == ["raw", "bx1"]


def test_unknown_codecs_are_named_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"'bx9'.*raw, bx1"):
        codec_by_name("bx9")
    with pytest.raises(CorruptBlock, match="200") as caught:
        codec_by_id(200)
    assert caught.value.cause == "codec"
    assert caught.value.remedy


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("high_bits", [0, 1 << 15])
def test_every_bit_pattern_of_the_high_half_comes_back(dtype: str, high_bits: int) -> None:
    """Zeros, denormals, infinities and every NaN payload, alone in their channel and beside each other."""
    half = (np.arange(1 << 15, dtype=np.uint32) + high_bits).astype("<u2")
    words = half if DTYPE_BYTES[dtype] == 2 else half.astype("<u4") << 16 | half[::-1]
    for shape in ((1 << 15, 1), (1, 1 << 15), (1 << 8, 1 << 7)):
        layout = BlockLayout(dtype, shape, 0)
        assert round_trip(codec_by_name("bx1"), words.tobytes(), layout)[0] == words.tobytes()


@given(
    st.sampled_from(FLOATS),
    st.integers(1, 3),
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_kv_and_noise_of_any_size_come_back(
    dtype: str, groups: int, tokens: int, channels: int, seed: int, noise: bool
) -> None:
    layout = BlockLayout(dtype, (groups, tokens, channels), 1)
    payload = np.random.default_rng(seed).bytes(layout.nbytes) if noise else kv_like(dtype, layout.shape, 1, seed)
    restored, size = round_trip(codec_by_name("bx1"), payload, layout)
    assert restored == payload
    assert size <= len(payload) + groups * channels


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("shape", "axis"), [(NHD, 2), (HND, 3), ((40, 1, 64, 1, 160), 2), ((3, 300_001), 1)])
def test_blocks_larger_than_one_pass_come_back(dtype: str, shape: tuple[int, ...], axis: int) -> None:
    layout = BlockLayout(dtype, shape, axis)
    payload = kv_like(dtype, shape, axis)
    assert round_trip(codec_by_name("bx1"), payload, layout)[0] == payload


@pytest.mark.parametrize(
    ("dtype", "ratio"), [("bfloat16", 1.45), ("float16", 1.14), ("float32", 1.18), ("float8_e5m2", 1.3)]
)
@pytest.mark.parametrize(("shape", "axis"), [(NHD, 2), (HND, 3)])
def test_kv_gets_smaller(dtype: str, ratio: float, shape: tuple[int, ...], axis: int) -> None:
    layout = BlockLayout(dtype, shape, axis)
    _, size = round_trip(codec_by_name("bx1"), kv_like(dtype, shape, axis), layout)
    assert layout.nbytes / size > ratio


def test_the_scale_of_a_channel_costs_nothing() -> None:
    """Only peaks differ when channels are scaled by powers of two, so the rest takes the very same bytes."""
    rng = np.random.default_rng(3)
    alike = (1 + rng.random(NHD)).astype("<f4")
    scaled = alike * np.exp2(rng.integers(-60, 60, (6, 2, 1, 3, 64))).astype("<f4")
    layout = BlockLayout("bfloat16", NHD, 2)
    plain, apart = (
        sections_of(codec_by_name("bx1"), as_dtype(values, "bfloat16"), layout) for values in (alike, scaled)
    )
    assert plain[0] == apart[0]
    assert plain[1] != apart[1]
    assert plain[2] == apart[2]


PAIRED = BlockLayout("bfloat16", (2, 2, 65, 3, 13), 2)
COUNT = PAIRED.nbytes // 2


def paired_sections(*escapes: int) -> tuple[bytes, list[memoryview]]:
    """A payload whose values at `escapes` are zeros, far below their channel's peak, and its sections."""
    values = 1 + np.random.default_rng(6).random(PAIRED.shape, np.float32)
    values.ravel()[list(escapes)] = 0
    payload = as_dtype(values, "bfloat16")
    return payload, sections_of(codec_by_name("bx1"), payload, PAIRED)


@pytest.mark.parametrize("escapes", [(), (0,), (COUNT - 1,), (0, COUNT // 2, COUNT // 2 + 1, COUNT - 1)])
def test_residuals_are_coded_in_pairs_and_escapes_beside_them(escapes: tuple[int, ...]) -> None:
    payload, sections = paired_sections(*escapes)
    *_, positions, values = sections
    assert len(sections) == 5
    assert np.frombuffer(positions, "<u4").tolist() == list(escapes)
    assert len(values) == len(escapes)
    out = bytearray(PAIRED.nbytes)
    codec_by_name("bx1").decode_into(sections, memoryview(out), PAIRED)
    assert out == payload


def test_many_large_residuals_are_not_worth_pairs() -> None:
    payload, sections = paired_sections(*range(0, COUNT, 100))
    assert len(sections) == 3
    assert round_trip(codec_by_name("bx1"), payload, PAIRED)[0] == payload


def test_pairs_nobody_can_have_written_are_refused() -> None:
    _, (rest, peaks, pairs, positions, values) = paired_sections(5, 9)
    beyond = memoryview(np.array([5, COUNT], "<u4").tobytes())
    for bad in (
        [pairs, positions, values[:1]],
        [pairs, positions[:-1], values],
        [pairs, beyond, values],
        [pairs[:-1], positions, values],
        [pairs, positions],
    ):
        with pytest.raises(CorruptBlock) as caught:
            codec_by_name("bx1").decode_into([rest, peaks, *bad], memoryview(bytearray(PAIRED.nbytes)), PAIRED)
        assert caught.value.cause == "codec"


def test_float32_that_began_as_bfloat16_shrinks_like_it() -> None:
    values = np.frombuffer(kv_like("bfloat16", NHD, 2), "<u2").astype("<u4") << 16
    layout = BlockLayout("float32", NHD, 2)
    restored, size = round_trip(codec_by_name("bx1"), values.tobytes(), layout)
    assert restored == values.tobytes()
    assert layout.nbytes / size > 2.8


def test_opaque_bytes_shrink_when_they_can_and_never_grow() -> None:
    bx1 = codec_by_name("bx1")
    text, noise = b"the same prefix again and again; " * 4000, np.random.default_rng(4).bytes(200_000)
    for payload, at_most in ((text, len(text) // 20), (noise, len(noise)), (b"", 0), (b"x", 1)):
        restored, size = round_trip(bx1, payload, BlockLayout.opaque(len(payload)))
        assert restored == payload
        assert size <= at_most


def test_a_frame_that_wants_much_memory_is_refused() -> None:
    size = 1 << 12
    frame = struct.pack("<IBBI", 0xFD2FB528, 0x80, (26 - 10) << 3, size)  # zstd: a window of 64 MiB, then nothing
    assert zstandard.get_frame_parameters(frame).window_size == 1 << 26
    with pytest.raises(CorruptBlock, match="memory") as caught:
        codec_by_name("bx1").decode_into([memoryview(frame)], memoryview(bytearray(size)), BlockLayout.opaque(size))
    assert caught.value.cause == "codec"


def test_threads_share_codecs() -> None:
    """Different blocks of different sizes at the same moment: a shared context or buffer would mix them up."""
    bx1, threads = codec_by_name("bx1"), 4
    start = Barrier(threads)

    def work(seed: int) -> int:
        dtype = FLOATS[seed % len(FLOATS)]
        layout = BlockLayout(dtype, (4 + seed, 2, 64, 3, 64), 2)
        payload: Any = kv_like(dtype, layout.shape, 2, seed)
        start.wait()
        return sum(round_trip(bx1, payload, layout)[0] == payload for _ in range(20))

    with ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(work, range(threads))) == [20] * threads
