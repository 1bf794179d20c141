"""The container: what goes in comes out, and whatever is damaged is an error.

Run as a script, this file writes the golden containers anew; do so only when the format gets a new version.
"""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import BodyMismatch, ChecksumMismatch, ConfigError, CorruptBlock, InvalidRequest
from tierkv.spec import DTYPE_BYTES, BlockLayout
from tierkv.storage.codecs import CODECS
from tierkv.storage.container import DTYPE_IDS, pack, peek, unpack_into

VECTORS = Path(__file__).parents[1] / "vectors" / "container"
NAMES = sorted(path.stem for path in VECTORS.glob("*.bin"))


def xxh3(data: bytes | bytearray | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(memoryview(data))


def store(payload: bytes, layout: BlockLayout | None = None, codec: str = "bx1") -> bytes:
    return bytes(pack(payload, layout, codec, xxh3(payload)))


def load(container: bytes) -> bytes:
    out = bytearray(peek(container).raw_length)
    assert unpack_into(memoryview(container), memoryview(out)) == len(out)
    return bytes(out)


def corrupt(container: bytes, room: int) -> CorruptBlock:
    """Return the error a damaged container raises."""
    with pytest.raises(CorruptBlock) as caught:
        unpack_into(memoryview(container), memoryview(bytearray(room)))
    return caught.value


def resealed(container: bytes, offset: int, field: bytes) -> bytes:
    """Overwrite a header field and make the header's checksum fit."""
    length = struct.unpack_from("<I", container, 12)[0]
    header = bytearray(container[: length - 8])
    header[offset : offset + len(field)] = field
    return bytes(header) + struct.pack("<Q", xxh3(bytes(header))) + container[length:]


def with_sections(container: bytes, sections: list[bytes]) -> bytes:
    """Give a container other sections, all sums valid: what a faulty or hostile writer could leave."""
    ndim = container[9]
    header = bytearray(container[: 32 + 8 * ndim])
    header[10] = len(sections)
    header[12:16] = struct.pack("<I", 40 + 8 * ndim + 16 * len(sections))
    header += b"".join(struct.pack("<QQ", len(section), xxh3(section)) for section in sections)
    return bytes(header) + struct.pack("<Q", xxh3(bytes(header))) + b"".join(sections)


def decode_by_the_book(container: bytes) -> bytes:
    """Decode as docs/container.md says, one value at a time, sharing no code with the implementation."""
    magic, _, codec, dtype, _, axis, ndim, count, _, length, raw, payload_sum = struct.unpack_from(
        "<4s8BIQQ", container
    )
    assert magic == b"TKVC"
    dims = struct.unpack_from(f"<{ndim}Q", container, 32)
    table = [struct.unpack_from("<QQ", container, 32 + 8 * ndim + 16 * i) for i in range(count)]
    groups, tokens, channels = prod(dims[:axis]), dims[axis], prod(dims[axis + 1 :])
    n, c = groups * tokens * channels, groups * channels
    sizes = {0: [raw], 1: [n, c, n], 2: [n, c, n], 3: [2 * n, n, c, n], 4: [c, n], 5: [c, n]}[dtype if codec else 0]
    m = 8 * -(-n // 16)
    paired = codec == 1 and len(table) == len(sizes) + 2
    if paired:
        sizes[-1:] = [m, *(size for size, _ in table[-2:])]
    planes = []
    for (size, announced), plane_size in zip(table, sizes if raw or not codec else [], strict=True):
        section = container[length : length + size]
        assert xxh3(section) == announced
        planes.append(section if size == plane_size else zstandard.ZstdDecompressor().decompress(section))
        length += size
    assert length == len(container)
    if paired:
        *planes, pairs, positions, escapes = planes
        residuals = [byte & 15 for byte in pairs] + [byte >> 4 for byte in pairs]
        for (position,), escape in zip(struct.iter_unpack("<I", positions), escapes, strict=True):
            residuals[position] = escape
        planes.append(bytes(residuals[:n]))
    if codec == 0 or dtype == 0 or not raw:
        payload = b"".join(planes)
    else:
        *others, peaks, residuals = planes
        values = []
        for i in range(n):
            code = (peaks[i // (tokens * channels) * channels + i % channels] - residuals[i]) % 256
            if others:
                rest = others[-1][i]
                code = (rest & 0x80) << 8 | code << 7 | rest & 0x7F
            if dtype == 3:
                code = code << 16 | others[0][2 * i + 1] << 8 | others[0][2 * i]
            values.append(code.to_bytes(raw // n, "little"))
        payload = b"".join(values)
    assert xxh3(payload) == payload_sum
    return payload


def vector(name: str) -> tuple[bytes, bytes, dict[str, Any]]:
    described = json.loads((VECTORS / "containers.json").read_text())[name]
    return (VECTORS / f"{name}.bin").read_bytes(), (VECTORS / f"{name}.payload").read_bytes(), described


@st.composite
def blocks(draw: st.DrawFn) -> tuple[bytes, BlockLayout]:
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=5)))
    axis = draw(st.integers(0, len(shape) - 1))
    layout = BlockLayout(dtype, shape, axis)
    size = layout.nbytes
    bits = st.binary(min_size=size, max_size=size) | st.integers(0, 255).map(lambda byte: bytes([byte]) * size)
    return draw(bits), layout


@given(blocks(), st.sampled_from([codec.name for codec in CODECS if not codec.lossy]))
def test_any_bits_in_any_shape_come_back(block: tuple[bytes, BlockLayout], codec: str) -> None:
    payload, layout = block
    container = store(payload, layout, codec)
    info = peek(container)
    assert (info.codec, info.layout, info.raw_length) == (codec, layout, len(payload))
    assert (info.payload_checksum, info.container_length) == (xxh3(payload), len(container))
    assert load(container) == payload
    assert decode_by_the_book(container) == payload


@pytest.mark.parametrize("codec", ["raw", "bx1"])
@pytest.mark.parametrize("payload", [b"", b"x", b"text " * 1000, np.random.default_rng(1).bytes(70_000)])
def test_bytes_without_a_layout_come_back_and_cost_little(payload: bytes, codec: str) -> None:
    container = store(payload, None, codec)
    assert peek(container).layout == BlockLayout.opaque(len(payload))
    assert load(container) == payload
    assert len(container) <= len(payload) + 64


def test_every_dtype_has_an_id() -> None:
    assert set(DTYPE_IDS) == set(DTYPE_BYTES)
    assert len(set(DTYPE_IDS.values())) == len(DTYPE_IDS)


@pytest.mark.parametrize("shift", [0, 1, 3])
@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_any_alignment_and_nothing_beyond_the_block(dtype: str, shift: int) -> None:
    layout = BlockLayout(dtype, (2, 2, 9, 3, 5), 2)
    payload = np.random.default_rng(2).bytes(layout.nbytes)
    held = bytearray(b"\xaa" * (shift + layout.nbytes))
    held[shift:] = payload
    container = pack(memoryview(held)[shift:], layout, "bx1", xxh3(payload))
    moved = memoryview(bytearray(shift) + container)[shift:].toreadonly()
    out = bytearray(b"\xaa" * (shift + layout.nbytes + 7))
    assert unpack_into(moved, memoryview(out)[shift:]) == layout.nbytes
    assert out == b"\xaa" * shift + payload + b"\xaa" * 7


def test_a_packed_container_outlives_its_sources() -> None:
    layout = BlockLayout("bfloat16", (1, 2, 16, 2, 8), 2)
    payloads = [bytearray(np.random.default_rng(seed).bytes(layout.nbytes)) for seed in range(3)]
    expected = [bytes(payload) for payload in payloads]
    containers = [pack(payload, layout, codec, xxh3(payload)) for payload in payloads for codec in ("raw", "bx1")]
    for payload in payloads:
        payload[:] = bytes(len(payload))
    assert [load(bytes(container)) for container in containers] == [p for p in expected for _ in range(2)]


@pytest.mark.parametrize("name", NAMES)
def test_golden_containers_decode(name: str) -> None:
    container, payload, described = vector(name)
    info = peek(container)
    assert info.codec == described["codec"]
    assert info.layout == BlockLayout(described["dtype"], tuple(described["shape"]), described["token_axis"])
    assert f"{info.payload_checksum:016x}" == described["payload_checksum"]
    assert load(container) == payload == decode_by_the_book(container)


@pytest.mark.parametrize("name", NAMES)
def test_encoding_keeps_to_the_golden_format(name: str) -> None:
    """Headers are deterministic up to the section table; raw containers wholly; planes whatever zstd makes of them."""
    container, payload, _ = vector(name)
    info = peek(container)
    now = store(payload, info.layout, info.codec)
    table = 32 + 8 * len(info.layout.shape)
    assert now[:table] == container[:table]
    assert decode_by_the_book(now) == payload
    if info.codec == "raw":
        assert now == container


@pytest.mark.parametrize("name", NAMES)
def test_every_flipped_bit_is_found(name: str) -> None:
    container, payload, _ = vector(name)
    header = struct.unpack_from("<I", container, 12)[0]
    for at in range(len(container)):
        for bit in range(8) if at < header else (at % 8,):
            damaged = bytearray(container)
            damaged[at] ^= 1 << bit
            cause = "header" if at < header else "checksum"
            assert corrupt(bytes(damaged), len(payload)).cause == cause, (at, bit)


@pytest.mark.parametrize("name", NAMES)
def test_every_truncation_is_found(name: str) -> None:
    container, payload, _ = vector(name)
    for length in range(len(container)):
        assert corrupt(container[:length], len(payload)).cause == "truncated", length
    assert corrupt(container + b"\0", len(payload)).cause == "header"


@given(st.binary(max_size=400), st.booleans())
def test_garbage_is_found(garbage: bytes, with_magic: bool) -> None:
    data = b"TKVC\x01" + garbage if with_magic else garbage
    assert corrupt(data, 1000).cause in ("header", "truncated")


@given(st.integers(4, 31), st.binary(min_size=1, max_size=8))
def test_a_resealed_header_never_gives_other_bytes(offset: int, field: bytes) -> None:
    """Fields that contradict the sections or each other are found although every checksum fits."""
    container, payload, _ = vector("bx1-bfloat16")
    damaged = resealed(container, offset, field[: 32 - offset])
    out = bytearray(len(payload))
    try:
        unpack_into(memoryview(damaged), memoryview(out))
    except (CorruptBlock, BodyMismatch):
        return
    assert out == payload


def test_unknown_version_codec_flags_and_dtype_are_refused() -> None:
    container, payload, _ = vector("bx1-bfloat16")
    for offset, cause in ((4, "header"), (5, "codec"), (6, "header"), (7, "header"), (8, "header"), (11, "header")):
        assert corrupt(resealed(container, offset, b"\x63"), len(payload)).cause == cause, offset
        with pytest.raises(CorruptBlock):
            peek(resealed(container, offset, b"\x63"))


def test_sections_a_codec_cannot_have_written_are_refused() -> None:
    container, payload, _ = vector("bx1-bfloat16")
    n, c = len(payload) // 2, 16
    zeros = zstandard.ZstdCompressor().compress(bytes(n))
    good = [bytes(n), bytes(c), zeros]
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(n))
    bad: list[list[bytes]] = [
        [],
        good[:2],
        [*good, b""],
        [bytes(n + 1), *good[1:]],
        [*good[:2], zstandard.ZstdCompressor().compress(np.random.default_rng(5).bytes(n))],
        [*good[:2], zeros[:-2]],
        [*good[:2], zstandard.ZstdCompressor().compress(bytes(n - 1))],
        [*good[:2], zstandard.ZstdCompressor().compress(bytes(n + 1))],
        [*good[:2], unsized],
        [*good[:2], b""],
        [*good[:2], b"no frame"],
    ]
    for sections in bad:
        assert corrupt(with_sections(container, sections), len(payload)).cause == "codec"
    assert corrupt(with_sections(container, good), len(payload)).cause == "checksum"
    raw, raw_payload, _ = vector("raw-bfloat16")
    assert corrupt(with_sections(raw, [raw_payload[:-1]]), len(raw_payload)).cause == "codec"
    assert corrupt(with_sections(raw, [raw_payload, b""]), len(raw_payload)).cause == "codec"


def test_lengths_that_contradict_the_shape_are_refused() -> None:
    container, payload, _ = vector("bx1-bfloat16")
    for offset in (16, 32, 40, 48):  # raw length, dims
        stored = struct.unpack_from("<Q", container, offset)[0]
        for wrong in (0, stored - 1, stored + 1, 2 * stored, 2**64 - 1):
            damaged = resealed(container, offset, struct.pack("<Q", wrong))
            assert corrupt(damaged, len(payload)).cause == "header", (offset, wrong)


def test_an_absurd_length_asks_for_nothing() -> None:
    container, payload, _ = vector("raw-opaque")
    absurd = resealed(resealed(container, 16, struct.pack("<Q", 1 << 60)), 32, struct.pack("<Q", 1 << 60))
    assert peek(absurd).raw_length == 1 << 60
    with pytest.raises(BodyMismatch):
        unpack_into(memoryview(absurd), memoryview(bytearray(len(payload))))
    assert corrupt(resealed(container, 40, struct.pack("<Q", 1 << 63)), len(payload)).cause == "truncated"


def test_a_buffer_too_small_is_left_alone() -> None:
    container, payload, _ = vector("bx1-float32")
    out = bytearray(b"\xaa" * (len(payload) - 1))
    with pytest.raises(BodyMismatch):
        unpack_into(memoryview(container), memoryview(out))
    assert out == b"\xaa" * len(out)


def test_pack_refuses_what_it_could_not_give_back() -> None:
    layout = BlockLayout("bfloat16", (4, 2), 0)
    with pytest.raises(ChecksumMismatch):
        pack(bytes(16), layout, "bx1", xxh3(bytes(15)))
    with pytest.raises(BodyMismatch):
        pack(bytes(15), layout, "raw", xxh3(bytes(15)))
    with pytest.raises(ConfigError):
        pack(bytes(16), layout, "gzip", xxh3(bytes(16)))
    for wrong in (BlockLayout("bfloat16", (4, 2), 2), BlockLayout("bfloat16", (), 0), BlockLayout("int3", (16,), 0)):
        with pytest.raises(InvalidRequest):
            pack(bytes(16), wrong, "bx1", xxh3(bytes(16)))


def test_golden_containers_are_there() -> None:
    assert sorted(golden_payloads()) == NAMES


def golden_payloads() -> dict[str, tuple[bytes, BlockLayout | None]]:
    """Small blocks of channels with different scales and a few special values."""
    rng = np.random.default_rng(20)
    values = rng.standard_normal((2, 2, 32, 2, 2)) * np.exp2(rng.integers(-4, 4, (2, 2, 1, 2, 2)))
    singles = values.astype("<f4")
    singles.ravel()[:6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40]
    halves = singles.astype("<f2")
    bytes_ = (halves.view("<u2") >> 8).astype("u1").tobytes()
    nhd, hnd = (2, 2, 32, 2, 2), (2, 2, 2, 32, 2)
    paired = (1 + rng.random((2, 2, 64, 2, 8))).astype("<f4")
    paired.ravel()[[0, 2047, 2048, 4095]] = [0.0, -0.0, 1e-20, -1e-20]
    return {
        "raw-opaque": (bytes(range(40)), None),
        "raw-empty": (b"", None),
        "raw-bfloat16": ((singles.view("<u4") >> 16).astype("<u2").tobytes(), BlockLayout("bfloat16", nhd, 2)),
        "bx1-empty": (b"", BlockLayout("bfloat16", (2, 2, 0, 2, 2), 2)),
        "bx1-opaque": (b"one prompt, another prompt, " * 8, None),
        "bx1-bfloat16": ((singles.view("<u4") >> 16).astype("<u2").tobytes(), BlockLayout("bfloat16", nhd, 2)),
        "bx1-float16": (np.moveaxis(halves, 3, 2).tobytes(), BlockLayout("float16", hnd, 3)),
        "bx1-float32": (singles.tobytes(), BlockLayout("float32", nhd, 2)),
        "bx1-pairs": ((paired.view("<u4") >> 16).astype("<u2").tobytes(), BlockLayout("bfloat16", paired.shape, 2)),
        "bx1-float8_e4m3": (bytes_, BlockLayout("float8_e4m3", nhd, 2)),
        "bx1-float8_e5m2": (bytes_, BlockLayout("float8_e5m2", nhd, 2)),
    }


def write_vectors() -> None:
    described = {}
    for name, (payload, layout) in golden_payloads().items():
        codec = name.split("-")[0]
        container = store(payload, layout, codec)
        (VECTORS / f"{name}.bin").write_bytes(container)
        (VECTORS / f"{name}.payload").write_bytes(payload)
        shown = layout or BlockLayout.opaque(len(payload))
        described[name] = {
            "codec": codec,
            "dtype": shown.dtype,
            "shape": shown.shape,
            "token_axis": shown.token_axis,
            "payload_checksum": f"{xxh3(payload):016x}",
        }
    (VECTORS / "containers.json").write_text(json.dumps(described, indent=2) + "\n")


if __name__ == "__main__":
    write_vectors()
