"""Lossy codecs: off by half a step at most, always the same bytes, and lossless where a block is not theirs.

Run as a script, this file writes the golden containers anew; do so only when the format gets a new version.
"""

from __future__ import annotations

import json
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierkv.errors import ChecksumMismatch, CorruptBlock
from tierkv.spec import BlockLayout
from tierkv.storage.codecs import CODECS, codec_by_name
from tierkv.storage.codecs.eq import Eq3
from tierkv.storage.codecs.floats import narrow, widen
from tierkv.storage.container import pack, peek, unpack_into

VECTORS = Path(__file__).parents[1] / "vectors" / "container" / "lossy"
LOSSY = [codec.name for codec in CODECS if codec.lossy]
FINENESS = {"int8": (0, 0), "eq2": (1 / 16, 1 / 16), "eq3": (1 / 8, 1 / 4), "eq4": (1 / 4, 1 / 2), "eq5": (1 / 2, 1)}
FLOATS = ["bfloat16", "float16", "float32"]
LARGEST = {"bfloat16": 2.0**40, "float16": 2.0**15, "float32": 2.0**40}

Doubles = NDArray[np.float64]


def xxh3(data: bytes | bytearray | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(memoryview(data))


def kv_layout(dtype: str, layers: int, planes: int, tokens: int, heads: int, dims: int, order: str) -> BlockLayout:
    if order == "NHD":
        return BlockLayout(dtype, (layers, planes, tokens, heads, dims), 2)
    return BlockLayout(dtype, (layers, planes, heads, tokens, dims), 3)


def to_payload(values: Doubles, dtype: str) -> bytes:
    """Round numbers to a dtype, ties to even; independent of how the codecs do it."""
    if dtype == "bfloat16":
        mantissa, exponent = np.frexp(values)
        values = np.ldexp(np.rint(mantissa * 256), exponent - 8)
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype("<f2" if dtype == "float16" else "<f4").tobytes()


def to_numbers(payload: bytes | memoryview, layout: BlockLayout) -> Doubles:
    if layout.dtype == "bfloat16":
        singles = (np.frombuffer(payload, "<u2").astype("<u4") << 16).view("<f4")
    else:
        singles = np.frombuffer(payload, "<f2" if layout.dtype == "float16" else "<f4")
    return singles.astype(np.float64).reshape(layout.shape)


def kv_like(layout: BlockLayout, seed: int = 0) -> bytes:
    """Channels of K with a scale and an offset, tokens of V with a scale."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(layout.shape)
    k, v = values[:, :1], values[:, 1:]
    one_per_channel = [1 if axis == layout.token_axis else dim for axis, dim in enumerate(k.shape)]
    k *= np.exp(rng.normal(0, 1, one_per_channel))
    k += rng.normal(0, 3, one_per_channel)
    v *= np.exp(rng.normal(0, 1, (*v.shape[:-1], 1)))
    return to_payload(values, layout.dtype)


def store(payload: bytes, layout: BlockLayout, codec: str) -> bytes:
    return bytes(pack(payload, layout, codec, xxh3(payload)))


def load(container: bytes) -> bytes:
    out = bytearray(peek(container).raw_length)
    assert unpack_into(memoryview(container), memoryview(out)) == len(out)
    return bytes(out)


@dataclass(frozen=True, slots=True)
class ByTheBook:
    """What a container holds: the exact numbers, the step of each, and the payload they round to."""

    numbers: Doubles
    steps: Doubles
    payload: bytes


def decode_by_the_book(container: bytes) -> ByTheBook:
    """Decode as docs/container.md says, sharing no code with the implementation."""
    _, _, _, dtype, _, axis, ndim, count, _, at, _, payload_sum = struct.unpack_from("<4s8BIQQ", container)
    dims = struct.unpack_from(f"<{ndim}Q", container, 32)
    layers, kinds = dims[:2]
    tokens = dims[axis]
    heads, width = (dims[3] if axis == 2 else dims[2]), dims[4]
    channels, rows = layers * heads * width, layers * heads * tokens
    sizes = [2 * layers, channels, channels, channels]
    sizes += [2 * layers, rows] if kinds == 2 else []
    sizes += [channels * tokens] * kinds
    planes = []
    for i, size in zip(range(count), sizes, strict=True):
        length, announced = struct.unpack_from("<QQ", container, 32 + 8 * ndim + 16 * i)
        section = container[at : at + length]
        assert xxh3(section) == announced
        planes.append(section if length == size else zstandard.ZstdDecompressor().decompress(section))
        at += length
    numbers, steps = np.empty(dims), np.empty(dims)
    for index in np.ndindex(*dims):
        layer, kind = index[:2]
        token, head = (index[2], index[3]) if axis == 2 else (index[3], index[2])
        inner = np.ravel_multi_index(index[2:], dims[2:])
        code = struct.unpack_from("b", planes[(6 if kinds == 2 else 4) + kind], layer * rows // layers * width + inner)
        number = code[0]
        if kind == 0:
            place = (layer * heads + head) * width + index[4]
            number += struct.unpack("<h", bytes([planes[2][place], planes[3][place]]))[0]
            peaks, residual = planes[0], planes[1][place]
        else:
            place = layer * heads * tokens + (token * heads + head if axis == 2 else head * tokens + token)
            peaks, residual = planes[4], planes[5][place]
        bits = (struct.unpack_from("<H", peaks, 2 * layer)[0] - residual) << 20
        steps[index] = struct.unpack("<f", struct.pack("<I", bits))[0]
        numbers[index] = number * steps[index]
    payload = to_payload(numbers, {1: "bfloat16", 2: "float16", 3: "float32"}[dtype])
    assert xxh3(payload) == payload_sum
    return ByTheBook(numbers, steps, payload)


def check_error(payload: bytes, layout: BlockLayout, container: bytes) -> ByTheBook:
    """Assert that every number is within half a step of what it was, but for float32's own rounding."""
    book, before = decode_by_the_book(container), to_numbers(payload, layout)
    assert load(container) == book.payload
    assert np.all(np.abs(book.numbers - before) <= book.steps / 2 + np.abs(before) * 2.0**-22)
    return book


@st.composite
def kv_blocks(draw: st.DrawFn) -> tuple[bytes, BlockLayout]:
    """Blocks of every order and kind: like KV, or of wild scales, constant, zero, denormal, with an outlier."""
    dtype = draw(st.sampled_from(FLOATS))
    layers, planes, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 9))
    heads, dims = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    layout = kv_layout(dtype, layers, planes, tokens, heads, dims, draw(st.sampled_from(["NHD", "HND"])))
    seed = draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    numbers = to_numbers(kv_like(layout, seed), layout)
    largest = LARGEST[dtype] * 0.99
    kind = draw(st.sampled_from(["kv", "wild", "constant", "zero", "denormal", "outlier", "largest"]))
    if kind == "wild":
        numbers = np.clip(numbers * 2.0 ** rng.integers(-140, 40, layout.shape), -largest, largest)
    elif kind == "constant":
        numbers[:] = numbers.flat[0]
    elif kind == "zero":
        numbers[:] = draw(st.sampled_from([0.0, -0.0]))
    elif kind == "denormal":
        numbers *= {"bfloat16": 2.0**-130, "float16": 2.0**-20, "float32": 2.0**-135}[dtype]
    elif kind == "outlier":
        numbers.flat[rng.integers(numbers.size)] = draw(st.sampled_from([-1, 1])) * largest
    elif kind == "largest":
        numbers = np.sign(numbers) * largest
    return to_payload(numbers, dtype), layout


@given(kv_blocks(), st.sampled_from(LOSSY))
def test_errors_stay_within_half_a_step(block: tuple[bytes, BlockLayout], codec: str) -> None:
    payload, layout = block
    container = store(payload, layout, codec)
    info = peek(container)
    assert (info.codec, info.layout, info.container_length) == (codec, layout, len(container))
    check_error(payload, layout, container)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_steps_follow_the_channels_of_k_and_the_tokens_of_v(codec: str, order: str) -> None:
    """Steps are within rounding what the level says: no coarser unless a code would not fit a byte, and no finer."""
    layout = kv_layout("float32", 2, 2, 64, 2, 16, order)
    payload = kv_like(layout)
    book = check_error(payload, layout, store(payload, layout, codec))
    numbers, axis = to_numbers(payload, layout), layout.token_axis
    for kind, over, fineness in ((0, axis - 1, FINENESS[codec][0]), (1, -1, FINENESS[codec][1])):
        part = numbers[:, kind]
        center = part.mean(over, keepdims=True) if kind == 0 else 0
        spread = np.sqrt(np.square(part - center).mean(over, keepdims=True))
        least = np.abs(part - center).max(over, keepdims=True) / (126 if kind == 0 else 127)
        wanted = np.maximum(fineness * spread, least)
        assert np.all(np.abs(book.steps[:, kind] / wanted - 1) <= 1 / 8 + 1e-5)


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_each_level_trades_precision_for_size(order: str) -> None:
    layout = kv_layout("bfloat16", 6, 2, 64, 3, 64, order)
    payload = kv_like(layout)
    before = to_numbers(payload, layout)
    ratios, errors = [], []
    for codec in LOSSY:
        container = store(payload, layout, codec)
        ratios.append(len(payload) / len(container))
        errors.append(float(np.abs(to_numbers(load(container), layout) - before).mean()))
    assert ratios == sorted(ratios)
    assert errors == sorted(errors)
    assert all(ratio > least for ratio, least in zip(ratios, (2.0, 2.5, 3.2, 4.0, 5.2), strict=True))


def test_latents_are_coded_per_channel() -> None:
    layout = BlockLayout("bfloat16", (4, 1, 64, 1, 96), 2)
    payload = kv_like(layout)
    container = store(payload, layout, "eq3")
    steps = check_error(payload, layout, container).steps
    assert np.all(steps == steps[:, :, :1])
    assert len(payload) / len(container) > 2.8


@pytest.mark.parametrize("dtype", FLOATS)
def test_constant_and_empty_channels_cost_no_precision(dtype: str) -> None:
    """Channels without variance come back as they were, whatever stands beside them."""
    layout = kv_layout(dtype, 2, 2, 32, 2, 8, "NHD")
    numbers = to_numbers(kv_like(layout), layout)
    numbers[:, 0, :, 0] = 0.875
    numbers[:, :, :, 1] = 0
    payload = to_payload(numbers, dtype)
    restored = to_numbers(load(store(payload, layout, "eq4")), layout)
    assert np.all(np.abs(restored[:, 0, :, 0] - 0.875) < 2.0**-15)
    assert np.all(restored[:, :, :, 1] == 0)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("special", [np.nan, -np.nan, np.inf, -np.inf, "too large", "too small"])
@pytest.mark.parametrize("kind", [0, 1])
def test_blocks_with_numbers_that_are_none_are_kept_exactly(codec: str, dtype: str, special: Any, kind: int) -> None:
    layout = kv_layout(dtype, 3, 2, 4, 2, 3, "NHD")
    numbers = to_numbers(kv_like(layout), layout)
    bound = LARGEST[dtype] * 1.01
    numbers[2, kind, 3, 1, 2] = {"too large": bound, "too small": -bound}.get(special, special)
    with np.errstate(invalid="ignore"):
        payload = numbers.astype({"bfloat16": "<f4", "float16": "<f2", "float32": "<f4"}[dtype]).tobytes()
    if dtype == "bfloat16":
        payload = (np.frombuffer(payload, "<u4") >> 16).astype("<u2").tobytes()
    container = store(payload, layout, codec)
    assert (peek(container).codec, peek(container).payload_checksum) == ("bx1", xxh3(payload))
    assert load(container) == payload


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize(
    "layout",
    [
        BlockLayout.opaque(1000),
        BlockLayout.opaque(0),
        BlockLayout("float8_e4m3", (2, 2, 8, 2, 4), 2),
        BlockLayout("float8_e5m2", (2, 1, 8, 1, 4), 2),
        BlockLayout("uint8", (2, 2, 8, 2, 4), 2),
        BlockLayout("bfloat16", (2, 3, 8, 2, 4), 2),
        BlockLayout("bfloat16", (2, 2, 8, 2, 4), 4),
        BlockLayout("bfloat16", (64, 8), 0),
        BlockLayout("bfloat16", (2, 2, 0, 2, 4), 2),
    ],
)
def test_blocks_that_are_not_kv_are_kept_exactly(codec: str, layout: BlockLayout) -> None:
    payload = np.random.default_rng(6).bytes(layout.nbytes)
    container = store(payload, layout, codec)
    assert peek(container).codec == "bx1"
    assert load(container) == payload


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_any_alignment_gives_the_same_bytes_and_nothing_beyond(dtype: str, shift: int) -> None:
    layout = kv_layout(dtype, 2, 2, 9, 3, 5, "HND")
    payload = kv_like(layout)
    held = memoryview(bytearray(b"\xaa" * shift + payload))[shift:]
    container = pack(held, layout, "eq3", xxh3(payload))
    expected = load(store(payload, layout, "eq3"))
    moved = memoryview(bytearray(shift) + container)[shift:].toreadonly()
    for _ in range(2):
        out = bytearray(b"\xaa" * (shift + layout.nbytes + 7))
        assert unpack_into(moved, memoryview(out)[shift:]) == layout.nbytes
        assert out == b"\xaa" * shift + expected + b"\xaa" * 7


def test_the_checksum_of_a_container_is_that_of_what_it_gives_back() -> None:
    layout = kv_layout("bfloat16", 2, 2, 16, 2, 8, "NHD")
    payload = kv_like(layout)
    for codec in LOSSY:
        container = store(payload, layout, codec)
        restored = load(container)
        assert restored != payload
        assert peek(container).payload_checksum == xxh3(restored)


def test_a_payload_other_than_announced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is coded, and when somebody writes to it meanwhile: its own checksum is never seen again."""
    layout = kv_layout("bfloat16", 1, 2, 16, 2, 8, "NHD")
    payload = bytearray(kv_like(layout))
    with pytest.raises(ChecksumMismatch):
        pack(payload, layout, "eq3", xxh3(payload) ^ 1)
    encode = Eq3.encode

    def encode_while_somebody_writes(self: Eq3, data: bytearray, layout: BlockLayout) -> Any:
        data[100] ^= 1
        return encode(self, data, layout)

    monkeypatch.setattr(Eq3, "encode", encode_while_somebody_writes)
    with pytest.raises(ChecksumMismatch):
        pack(payload, layout, "eq3", xxh3(payload))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(40, 2, 64, 3, 64), (40, 2, 3, 64, 64), (2, 2, 1500, 2, 64), (40, 1, 64, 1, 160)])
def test_blocks_larger_than_one_pass_lose_no_more(dtype: str, shape: tuple[int, ...]) -> None:
    layout = BlockLayout(dtype, shape, 3 if shape[2] == 3 else 2)
    payload = kv_like(layout)
    before, after = (to_numbers(data, layout) for data in (payload, load(store(payload, layout, "eq3"))))
    axes = (layout.token_axis, 4)
    spread = before.std(layout.token_axis, keepdims=True)
    error = np.sqrt(np.square(after - before).mean(axes)) / np.sqrt(np.square(spread).mean(axes))
    assert np.all(error[:, 0] < 1 / 8 / np.sqrt(12) * 1.3)
    if shape[1] == 2:
        size = np.sqrt(np.square(before[:, 1]).mean(axis=-1))
        loss = np.sqrt(np.square(after - before)[:, 1].mean(axis=-1))
        assert np.all(loss < size / 4 / np.sqrt(12) * 1.5)


def test_threads_share_codecs() -> None:
    """Different blocks at the same moment: a shared context or buffer would mix them up."""
    threads = 4
    start = Barrier(threads)
    layouts = [kv_layout(FLOATS[i % 3], 3 + i, 2, 64, 3, 64, ("NHD", "HND")[i % 2]) for i in range(threads)]
    payloads = [kv_like(layout, i) for i, layout in enumerate(layouts)]
    expected = [load(store(payload, layout, "eq3")) for payload, layout in zip(payloads, layouts, strict=True)]

    def work(i: int) -> int:
        start.wait()
        return sum(load(store(payloads[i], layouts[i], "eq3")) == expected[i] for _ in range(10))

    with ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(work, range(threads))) == [10] * threads


def test_every_float16_is_widened_exactly_and_every_rounding_is_to_even() -> None:
    halves = np.arange(1 << 16, dtype="<u2")
    halves = halves[np.isfinite(halves.view("<f2"))]
    singles = np.empty(halves.size, "<f4")
    widen(halves, "float16", singles)
    assert np.array_equal(singles.view("<u4"), halves.view("<f2").astype("<f4").view("<u4"))
    check_narrow(singles, "float16")


def test_every_bfloat16_between_its_neighbours_is_rounded_to_even() -> None:
    halves = np.arange(0x0D80, 0x5380, dtype="<u2")  # 2**-100 .. 2**40
    singles = np.empty(halves.size, "<f4")
    widen(halves, "bfloat16", singles)
    check_narrow(singles, "bfloat16")


def check_narrow(representable: NDArray[np.float32], dtype: str) -> None:
    exact = np.unique(np.abs(representable))
    ties = (exact[1:] + exact[:-1]) / np.float32(2)
    ends = np.float32(0), np.float32(np.inf)
    numbers = np.concatenate([exact, ties, *(np.nextafter(ties, end) for end in ends)])
    numbers = np.concatenate([numbers, -numbers]).astype("<f4")
    out = np.empty(numbers.size, "<u2")
    expected = to_payload(numbers.astype(np.float64), dtype)
    narrow(numbers, dtype, out)
    assert out.tobytes() == expected


def vector(name: str) -> tuple[bytes, bytes, dict[str, Any]]:
    described = json.loads((VECTORS / "containers.json").read_text())[name]
    return (VECTORS / f"{name}.bin").read_bytes(), (VECTORS / f"{name}.payload").read_bytes(), described


NAMES = sorted(path.stem for path in VECTORS.glob("*.bin"))


@pytest.mark.parametrize("name", NAMES)
def test_golden_containers_decode(name: str) -> None:
    container, payload, described = vector(name)
    info = peek(container)
    assert info.codec == described["codec"]
    assert info.layout == BlockLayout(described["dtype"], tuple(described["shape"]), described["token_axis"])
    assert f"{info.payload_checksum:016x}" == described["payload_checksum"]
    assert load(container) == payload == decode_by_the_book(container).payload


@pytest.mark.parametrize("name", NAMES)
def test_golden_containers_decode_where_denormals_are_flushed(name: str) -> None:
    torch = pytest.importorskip("torch")

    def flushed() -> bytes:
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU cannot flush denormals")
        return load(container)

    container, payload, _ = vector(name)
    with ThreadPoolExecutor(1) as pool:  # the mode is the thread's
        assert pool.submit(flushed).result() == payload


@pytest.mark.parametrize("name", NAMES)
def test_every_flipped_byte_is_found(name: str) -> None:
    container, payload, _ = vector(name)
    header = struct.unpack_from("<I", container, 12)[0]
    for at in range(len(container)):
        damaged = bytearray(container)
        damaged[at] ^= 1 << at % 8
        assert corrupt(bytes(damaged), len(payload)).cause == ("header" if at < header else "checksum"), at


def test_sections_no_encoder_writes_are_refused() -> None:
    layout = kv_layout("bfloat16", 2, 2, 16, 2, 8, "NHD")
    codec = codec_by_name("eq3")
    good = [section.tobytes() for section in codec.encode(kv_like(layout), layout)]
    bad = [
        [],
        good[:-1],
        [*good, b""],
        [b"\xff\xff" * 2, *good[1:]],
        [b"\x00\x00" * 2, *good[1:]],
        [*good[:4], b"\x40\x01" * 2, b"\xff" * 64, *good[6:]],
        [*good[:-1], good[-1] + bytes(600)],
        [*good[:-1], b"no frame"],
    ]
    for sections in bad:
        with pytest.raises(CorruptBlock) as caught:
            codec.decode_into([memoryview(s) for s in sections], memoryview(bytearray(layout.nbytes)), layout)
        assert caught.value.cause == "codec"
    with pytest.raises(CorruptBlock):
        codec.decode_into([memoryview(s) for s in good], memoryview(bytearray(100)), BlockLayout.opaque(100))


def corrupt(container: bytes, room: int) -> CorruptBlock:
    with pytest.raises(CorruptBlock) as caught:
        unpack_into(memoryview(container), memoryview(bytearray(room)))
    return caught.value


def test_golden_containers_are_there() -> None:
    assert sorted(golden_payloads()) == NAMES


def golden_payloads() -> dict[str, tuple[bytes, BlockLayout]]:
    """Every level, dtype and order, latents, and float16 values below its smallest normal one."""
    golden = {}
    for codec in LOSSY:
        for dtype, order in (("bfloat16", "NHD"), ("float16", "HND"), ("float32", "NHD")):
            if codec == "eq3" or dtype == "bfloat16":
                layout = kv_layout(dtype, 2, 2, 32, 2, 4, order)
                golden[f"{codec}-{dtype}"] = (kv_like(layout, 21), layout)
    latents = BlockLayout("bfloat16", (2, 1, 16, 1, 12), 2)
    golden["eq3-latents"] = (kv_like(latents, 22), latents)
    small = kv_layout("float16", 1, 2, 16, 1, 8, "NHD")
    golden["eq3-denormals"] = (to_payload(to_numbers(kv_like(small, 23), small) * 2.0**-17, "float16"), small)
    return golden


def write_vectors() -> None:
    described = {}
    for name, (original, layout) in golden_payloads().items():
        codec = name.split("-")[0]
        container = store(original, layout, codec)
        payload = load(container)
        (VECTORS / f"{name}.bin").write_bytes(container)
        (VECTORS / f"{name}.payload").write_bytes(payload)
        described[name] = {
            "codec": codec,
            "dtype": layout.dtype,
            "shape": layout.shape,
            "token_axis": layout.token_axis,
            "payload_checksum": f"{xxh3(payload):016x}",
        }
    (VECTORS / "containers.json").write_text(json.dumps(described, indent=2) + "\n")


if __name__ == "__main__":
    write_vectors()
