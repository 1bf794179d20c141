"""`tierkv bench codec`: ratio, speed and loss of the cold tier's codecs on KV, beside memcpy and plain zstd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from tierkv.errors import InvalidRequest, StorageError
from tierkv.service.bench.measure import Work, gbps, in_two_threads, interleaved, memcpy
from tierkv.service.bench.payload import kv_like
from tierkv.service.bench.results import machine
from tierkv.spec import BlockLayout
from tierkv.storage.codecs import CODECS
from tierkv.storage.container import pack, unpack_into
from tierkv.storage.tier import Buffer, checksum

__all__ = ["BLOCK_TOKENS", "CodecRow", "bench_codec", "cut", "load_kv"]

BLOCK_TOKENS = 64
_MOST_BYTES = 32 << 20
_ZSTD_LEVELS = (1, 3, 9)
_ROUNDS = 5
_SHAPE = "[layers, 2, tokens, heads, head_dim]"

Bits = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class CodecRow:
    """One way to store the blocks. Speeds in GB/s of original bytes.

    Attributes
    ----------
    name
        A codec in its container, checksums included, or ``zstd-N``: the bytes of a block as they are, zstd level N.
    ratio
        Original over stored bytes.
    encode_gbps, decode_gbps, decode2_gbps
        One thread, one thread, two threads. Encoding by a lossy codec includes decoding, for the checksum.
    exact
        Whether every block came back bit for bit.
    rel_rms_k, rel_rms_v
        Root mean square of the error over that of the original, of K and of V. 0 when exact.
    """

    name: str
    ratio: float
    encode_gbps: float
    decode_gbps: float
    decode2_gbps: float
    exact: bool
    rel_rms_k: float
    rel_rms_v: float


@dataclass(frozen=True, slots=True)
class _Method:
    name: str
    encode: Callable[[memoryview], Buffer]
    decode: Callable[[Buffer, memoryview], object]


def bench_codec(source: Path | None, console: Console) -> dict[str, Any]:
    """Measure on real KV, or on synthetic without `source`; print a table and return the figures.

    Blocks for about half a minute. Errors as `load_kv`.
    """
    kv = load_kv(source) if source else kv_like((24, 2, 1024, 2, 64), 1)[0]
    blocks, used = cut(kv)
    console.print(machine(), highlight=False, soft_wrap=True)
    if source is None:
        console.print(
            "[bold yellow]SYNTHETIC DATA: these ratios and errors are not those of a model.[/] Give --input FILE.npy; "
            "benchmarks/dump_kv.py makes one.",
            highlight=False,
        )
    layout = BlockLayout("bfloat16", blocks.shape[1:], 2)
    console.print(
        f"{source or 'synthetic KV'}: {used} of {kv.shape[2]} tokens in {len(blocks)} blocks of {BLOCK_TOKENS}, each "
        f"{layout.nbytes / 2**20:.2f} MiB of bfloat16",
        highlight=False,
    )
    with console.status("coding"):
        memcpy_gbps, rows = _measure(blocks.view(np.uint8).reshape(len(blocks), -1), layout)
    _print(rows, memcpy_gbps, console)
    return {
        "machine": machine(),
        "input": str(source) if source else "synthetic",
        "block_bytes": layout.nbytes,
        "blocks": len(blocks),
        "memcpy_gbps": memcpy_gbps,
        "codecs": [asdict(row) for row in rows],
    }


def load_kv(path: Path) -> Bits:
    """Map a .npy file of bfloat16 bits, uint16 ``[layers, 2, tokens, heads, head_dim]``.

    Raises `StorageError` when the file cannot be read and `InvalidRequest` when it holds something else.
    """
    try:
        kv = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise StorageError(
            f"cannot read {path}: {error.strerror or error}", remedy="name a readable .npy file"
        ) from None
    except (ValueError, EOFError) as error:
        raise InvalidRequest(f"{path} is not a .npy file: {error}", remedy="write it with numpy.save") from None
    if not isinstance(kv, np.ndarray):
        raise InvalidRequest(f"{path} is an archive of several arrays", remedy="write one array with numpy.save")
    if kv.dtype != np.uint16:
        raise InvalidRequest(
            f"{path} holds {kv.dtype}, not uint16", remedy="save the bits of bfloat16 values, viewed as uint16"
        )
    if kv.ndim != 5 or kv.shape[1] != 2 or 0 in kv.shape:
        raise InvalidRequest(f"{path} has the shape {list(kv.shape)}", remedy=f"save an array {_SHAPE}")
    if kv.shape[2] < BLOCK_TOKENS:
        raise InvalidRequest(
            f"{path} has {kv.shape[2]} tokens, a block needs {BLOCK_TOKENS}",
            remedy=f"save more tokens; the shape is {_SHAPE}",
        )
    return kv


def cut(kv: Bits) -> tuple[Bits, int]:
    """Cut KV into blocks ``[blocks, layers, 2, BLOCK_TOKENS, heads, head_dim]``; return them and the tokens they hold.

    Takes whole blocks from the start, about 32 MiB at most.
    """
    layers, planes, tokens, heads, head_dim = kv.shape
    most = max(1, _MOST_BYTES // (kv.nbytes // tokens * BLOCK_TOKENS))
    used = min(tokens // BLOCK_TOKENS, most) * BLOCK_TOKENS
    split = kv[:, :, :used].reshape(layers, planes, -1, BLOCK_TOKENS, heads, head_dim)
    return np.ascontiguousarray(np.moveaxis(split, 2, 0)), used


def _methods(layout: BlockLayout) -> list[_Method]:
    def container(codec: str) -> _Method:
        return _Method(codec, lambda block: pack(block, layout, codec, checksum(block)), unpack_into)

    def zstd(level: int) -> _Method:
        return _Method(
            f"zstd-{level}", lambda block: zstandard.ZstdCompressor(level=level).compress(block), _decompress
        )

    return [*(container(codec.name) for codec in CODECS), *(zstd(level) for level in _ZSTD_LEVELS)]


def _decompress(frame: Buffer, out: memoryview) -> None:
    with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
        reader.readinto(out)


def _measure(data: NDArray[np.uint8], layout: BlockLayout) -> tuple[float, list[CodecRow]]:
    """Return the speed of memcpy, and one row per method, all measured in turn."""
    methods = _methods(layout)
    out = np.zeros_like(data)
    stored = {method.name: [method.encode(row.data) for row in data] for method in methods}
    works: dict[str, Work] = {"memcpy": memcpy(data, out)}
    with ThreadPoolExecutor(2, "bench") as pool:
        for method in methods:
            works |= _works(method, data, stored[method.name], out, pool)
        taken = interleaved(works, rounds=_ROUNDS, at_least_s=min(0.1, data.nbytes / 2e8))
    speed = {name: gbps(data.nbytes, once) for name, once in taken.items()}
    rows = []
    for method in methods:
        name, kept = method.name, stored[method.name]
        encode, decode, decode2 = (speed[f"{name} {what}"] for what in ("encode", "decode", "decode2"))
        ratio = data.nbytes / sum(map(len, kept))
        rows.append(CodecRow(name, ratio, encode, decode, decode2, *_loss(method, data, kept, layout)))
    return speed["memcpy"], rows


def _works(
    method: _Method, data: NDArray[np.uint8], stored: Sequence[Buffer], out: NDArray[np.uint8], pool: ThreadPoolExecutor
) -> dict[str, Work]:
    def encode() -> None:
        for row in data:
            method.encode(row.data)  # let go at once, as a store does: memory is used again, not faulted in

    def decode(share: int, of: int) -> None:
        for row in range(share, len(stored), of):
            method.decode(stored[row], out[row].data)

    return {
        f"{method.name} encode": encode,
        f"{method.name} decode": lambda: decode(0, 1),
        f"{method.name} decode2": in_two_threads(pool, lambda half: decode(half, 2)),
    }


def _loss(
    method: _Method, data: NDArray[np.uint8], stored: Sequence[Buffer], layout: BlockLayout
) -> tuple[bool, float, float]:
    """Return whether all blocks come back exactly, and the relative errors of K and V."""
    exact, error, size = True, np.zeros(2), np.zeros(2)
    restored = np.zeros_like(data[0])
    for block, item in zip(data, stored, strict=True):
        method.decode(item, restored.data)
        if np.array_equal(block, restored):
            after = before = _singles(block, layout)
        else:
            exact = False
            before, after = _singles(block, layout), _singles(restored, layout)
        error += np.square(after - before).sum((0, 2, 3, 4))
        size += np.square(before).sum((0, 2, 3, 4))
    k, v = np.sqrt(error / np.maximum(size, np.finfo(np.float64).tiny))
    return exact, float(k), float(v)


def _singles(block: NDArray[np.uint8], layout: BlockLayout) -> NDArray[np.float64]:
    bits = block.view(np.uint16).astype(np.uint32) << 16
    return bits.view(np.float32).reshape(layout.shape).astype(np.float64)


def _print(rows: Sequence[CodecRow], memcpy_gbps: float, console: Console) -> None:
    table = Table(title=f"GB/s of original bytes; memcpy {memcpy_gbps:.1f}", box=box.SIMPLE_HEAD, title_justify="left")
    for column in ("codec", "ratio", "encode", "decode", "decode 2", "exact", "K error", "V error"):
        table.add_column(column, justify="left" if column == "codec" else "right", no_wrap=True)
    for row in rows:
        speeds = (f"{speed:.2f}" for speed in (row.encode_gbps, row.decode_gbps, row.decode2_gbps))
        errors = ("0", "0") if row.exact else (f"{row.rel_rms_k:.4f}", f"{row.rel_rms_v:.4f}")
        table.add_row(row.name, f"{row.ratio:.3f}", *speeds, "yes" if row.exact else "no", *errors)
    console.print(table)
    console.print(
        "codecs with their container and checksums; zstd: raw bytes; decode 2: two threads; errors: relative, rms",
        style="dim",
    )
