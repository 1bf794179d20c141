"""Codecs on KV: ratio, speed and loss, beside memcpy and plain zstd in the same run.

    python benchmarks/codec.py                                  synthetic KV
    python benchmarks/codec.py --input kv.npy                   real KV, shape [layers, 2, tokens, heads, head_dim]

Every figure is the median of `--repeat` passes over all blocks, in GB/s of original bytes; blocks are coded one after
another by one thread (two for the last column of speeds), every method in every round. Lossy codecs decode what they
encode, for its checksum, and encoding includes that. Errors are root mean squares relative to those of K and V; what
they do to a model, benchmarks/kl.py tells.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from tierkv.spec import BlockLayout
from tierkv.storage.codecs import CODECS
from tierkv.storage.container import pack, unpack_into
from tierkv.storage.tier import checksum

Encode = Callable[[memoryview], bytes | memoryview]
Decode = Callable[[bytes | memoryview, memoryview], object]


class Method(NamedTuple):
    name: str
    encode: Encode
    decode: Decode


class Trial:
    """One method on all blocks; every call of `round` measures it once."""

    def __init__(
        self, method: Method, blocks: Sequence[memoryview], layout: BlockLayout, pool: ThreadPoolExecutor
    ) -> None:
        self.method, self.blocks, self.layout, self.pool = method, blocks, layout, pool
        self.stored = [method.encode(block) for block in blocks]
        self.outs = [memoryview(bytearray(len(blocks[0]))) for _ in range(2)]
        self.seconds: list[tuple[float, float, float]] = []

    def round(self) -> None:
        self.seconds.append((timed(self.encode), timed(self.decode), timed(self.decode_in_two_threads)))

    def encode(self) -> None:
        for block in self.blocks:
            self.method.encode(block)  # let go at once, as a store does: memory is used again, not faulted in

    def decode(self, share: int = 0, of: int = 1) -> None:
        for item in self.stored[share::of]:
            self.method.decode(item, self.outs[share])

    def decode_in_two_threads(self) -> None:
        list(self.pool.map(self.decode, (0, 1), (2, 2)))

    def row(self) -> list[str]:
        raw = sum(map(len, self.blocks))
        speeds = [f"{raw / median(column) / 1e9:.2f}" for column in zip(*self.seconds, strict=True)]
        return [self.method.name, f"{raw / sum(map(len, self.stored)):.3f}", *speeds, *self.errors()]

    def errors(self) -> list[str]:
        """Relative root mean square errors of K and V, "0" only if every bit is the same."""
        exact, error, size = True, np.zeros(2), np.zeros(2)
        for block, item in zip(self.blocks, self.stored, strict=True):
            self.method.decode(item, self.outs[0])
            exact = exact and self.outs[0] == block
            before, after = singles(block, self.layout), singles(self.outs[0], self.layout)
            error += np.square(after - before, dtype=np.float64).sum((0, 2, 3, 4))
            size += np.square(before, dtype=np.float64).sum((0, 2, 3, 4))
        return ["0", "0"] if exact else [f"{relative:.4f}" for relative in np.sqrt(error / size)]


def singles(block: memoryview, layout: BlockLayout) -> NDArray[np.float32]:
    if layout.dtype == "bfloat16":
        bits = np.frombuffer(block, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(layout.shape)
    return np.frombuffer(block, layout.dtype).reshape(layout.shape).astype(np.float32)


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def synthetic(dtype: str, seed: int = 0) -> NDArray[np.generic]:
    """KV-like bits: 24 layers of 4 heads, channels of different scale, neighbouring tokens alike."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((24, 2, 1024, 4, 64), dtype=np.float32)
    values[:, :, 1:] += 0.5 * values[:, :, :-1]
    values *= np.exp(rng.normal(0, 1, (24, 2, 1, 4, 64))).astype(np.float32)
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def cut(kv: NDArray[np.generic], block_tokens: int) -> NDArray[np.generic]:
    """Cut along the token axis into blocks: [blocks, layers, 2, block_tokens, heads, head_dim]."""
    layers, planes, tokens, heads, head_dim = kv.shape
    whole = kv[:, :, : tokens - tokens % block_tokens]
    split = whole.reshape(layers, planes, -1, block_tokens, heads, head_dim)
    return np.ascontiguousarray(np.moveaxis(split, 2, 0))


def methods(layout: BlockLayout) -> list[Method]:
    def copy(source: bytes | memoryview, out: memoryview) -> None:
        np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(source, np.uint8))

    def copied(block: memoryview) -> memoryview:
        fresh = np.empty(len(block), np.uint8)
        copy(block, fresh.data)
        return fresh.data

    def unzstd(frame: bytes | memoryview, out: memoryview) -> None:
        with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
            reader.readinto(out)

    def container(codec: str) -> Method:
        return Method(f"container {codec}", lambda block: pack(block, layout, codec, checksum(block)), unpack_into)

    zstd = Method("zstd -1", lambda block: zstandard.ZstdCompressor(level=1).compress(block), unzstd)
    return [Method("memcpy", copied, copy), zstd, *(container(codec.name) for codec in CODECS)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cold tier's codecs on KV.")
    parser.add_argument("--input", help=".npy of uint16 bits or float32, shape [layers, 2, tokens, heads, head_dim]")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of uint16 bits, or of synthetic KV",
    )
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()

    kv = np.load(options.input) if options.input else synthetic(options.dtype)
    blocks = cut(kv, options.block_tokens)
    dtype = "float32" if kv.dtype == np.float32 else options.dtype
    layout = BlockLayout(dtype, blocks.shape[1:], 2)
    views = [block.view(np.uint8).reshape(-1).data for block in blocks]

    table = Table(
        title=f"{options.input or 'synthetic KV'}: {len(blocks)} blocks of {layout.nbytes / 2**20:.2f} MiB {dtype}",
        caption=f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}, "
        f"zstd {'.'.join(map(str, zstandard.ZSTD_VERSION))}; GB/s of original bytes; the limit is memcpy",
    )
    for heading in ("method", "ratio", "encode GB/s", "decode GB/s", "2 threads", "K error", "V error"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    with ThreadPoolExecutor(2) as pool:
        trials = [Trial(method, views, layout, pool) for method in methods(layout)]
        for _ in range(options.repeat):
            for trial in trials:  # in turn: a slow moment of the machine hits all of them alike
                trial.round()
        for trial in trials:
            table.add_row(*trial.row())
    Console().print(table)


if __name__ == "__main__":
    main()
