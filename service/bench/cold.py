"""The cold tier in the page cache: sustained writes beside raw writes and the codec, reads beside raw reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from tierkv.service.bench.measure import Work, gbps, in_two_threads, interleaved, memcpy, seconds
from tierkv.service.bench.payload import Blocks, fresh_key
from tierkv.storage.cold import ColdTier
from tierkv.storage.container import pack, unpack_into
from tierkv.storage.tier import BlockMeta, checksum

__all__ = ["ColdRow", "measure_cold", "reload_blocks_per_s"]

MIB = 1 << 20
_BATCH_BYTES = 16 * MIB
_SEGMENT_BYTES = 12 * MIB  # a block of 2 MiB may take a quarter
_LAST_TURNS = 5


@dataclass(frozen=True, slots=True)
class ColdRow:
    """Speeds in GB/s of payload; a trailing 2 means two threads.

    Attributes
    ----------
    block_bytes, codec, ratio
        What is stored, and how many times smaller.
    put_gbps
        `ColdTier.put_many` with two encode threads, past the cap: every put makes room by recycling.
    fresh_put_gbps
        The same into a new store, up to its cap.
    churn_turns, churn_ratio
        How often the cap was written over, and the speed of the last turns over that of the new store.
    write_gbps, read_gbps, memcpy_gbps
        The same payloads by pwrite and pread of a file of the cap's size in the page cache, and by numpy.
    get_gbps, get2_gbps
        `ColdTier.read_into`.
    encode_gbps, encode2_gbps, decode_gbps, decode2_gbps
        The codec and its container alone, memory to memory.
    """

    block_bytes: int
    codec: str
    ratio: float
    put_gbps: float
    fresh_put_gbps: float
    churn_turns: int
    churn_ratio: float
    get_gbps: float
    get2_gbps: float
    encode_gbps: float
    encode2_gbps: float
    decode_gbps: float
    decode2_gbps: float
    write_gbps: float
    read_gbps: float
    memcpy_gbps: float


def measure_cold(
    directory: Path,
    blocks: Blocks,
    codec: str,
    *,
    capacity_bytes: int,
    fresh_stores: int,
    churn_turns: int,
    rounds: int,
) -> ColdRow:
    """Fill `fresh_stores` new stores, write the last one over `churn_turns` times, then read it.

    Blocks; writes to `directory`, empty before. `blocks` are read back: they may take half of the capacity at most.
    """
    with (
        ThreadPoolExecutor(2, "bench") as pool,
        _RawFile(directory / "raw", capacity_bytes, blocks.data) as raw,
    ):
        coding = _Coding(blocks, codec, pool)
        turn_bytes = int(capacity_bytes * coding.ratio)
        fresh = []
        for number in range(fresh_stores - 1):
            with closing(_open(directory / f"fresh-{number}", capacity_bytes, codec)) as tier:
                fresh.append(_put_turn(tier, blocks, turn_bytes))
        with closing(_open(directory / "store", capacity_bytes, codec)) as tier:
            fresh.append(_put_turn(tier, blocks, turn_bytes))
            raw.write()
            puts, writes = [], []
            for _ in range(churn_turns):
                puts.append(_put_turn(tier, blocks, turn_bytes))
                writes.append(seconds(raw.write))
            kept = [fresh_key() for _ in blocks.data]
            tier.put_many(blocks.items(kept))
            taken = interleaved(
                {**coding.works(), **_reading(tier, kept, blocks, pool), "read": raw.read},
                rounds=rounds,
                at_least_s=0.02 * rounds,
            )
    speed = {name: gbps(blocks.data.nbytes, once) for name, once in taken.items()}
    new, last = median(fresh), median(puts[-_LAST_TURNS:])
    return ColdRow(
        block_bytes=blocks.data.shape[1],
        codec=codec,
        ratio=coding.ratio,
        put_gbps=median(puts),
        fresh_put_gbps=new,
        churn_turns=churn_turns,
        churn_ratio=last / new,
        get_gbps=speed["get"],
        get2_gbps=speed["get2"],
        encode_gbps=speed["encode"],
        encode2_gbps=speed["encode2"],
        decode_gbps=speed["decode"],
        decode2_gbps=speed["decode2"],
        write_gbps=gbps(blocks.data.nbytes, median(writes)),
        read_gbps=speed["read"],
        memcpy_gbps=speed["memcpy"],
    )


def reload_blocks_per_s(directory: Path, number: int, rounds: int) -> float:
    """Return how many blocks per second opening a store reads from its index. Blocks."""

    def reopen() -> ColdTier:
        return ColdTier(directory, capacity_bytes=512 * MIB, segment_bytes=64 * MIB, codec="raw", sync="none")

    payload = bytes(64)
    meta = BlockMeta(len(payload), checksum(payload))
    with closing(reopen()) as tier:
        tier.put_many([(fresh_key(), payload, meta) for _ in range(number)])
        stored = tier.usage().blocks
    return stored / interleaved({"open": lambda: reopen().close()}, rounds=rounds)["open"]


def _open(directory: Path, capacity_bytes: int, codec: str) -> ColdTier:
    return ColdTier(
        directory,
        capacity_bytes=capacity_bytes,
        segment_bytes=max(capacity_bytes // 8, _SEGMENT_BYTES),
        codec=codec,
        sync="none",
        encode_threads=2,
    )


def _put_turn(tier: ColdTier, blocks: Blocks, nbytes: int) -> float:
    """Put about `nbytes` of payload under fresh keys; return the speed in GB/s."""
    block_bytes = blocks.data.shape[1]
    batch = max(2, _BATCH_BYTES // block_bytes)
    starts = cycle(range(0, len(blocks.data) - batch + 1, batch))
    done, taken = 0, 0.0
    while done < nbytes:
        items = blocks.items([fresh_key() for _ in range(batch)], next(starts))
        outcomes: list[object] = []
        taken += seconds(lambda batch=items, into=outcomes: into.extend(tier.put_many(batch)))  # type: ignore[misc]
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        done += batch * block_bytes
    return gbps(done, taken)


class _Coding:
    """The codec alone: `blocks` into containers that are let go at once, and kept containers back."""

    def __init__(self, blocks: Blocks, codec: str, pool: ThreadPoolExecutor) -> None:
        self._blocks, self._codec, self._pool = blocks, codec, pool
        self._out = np.zeros_like(blocks.data)
        self._containers = [self._pack(row) for row in range(len(blocks.data))]
        self.ratio = blocks.data.nbytes / sum(map(len, self._containers))

    def works(self) -> dict[str, Work]:
        rows = len(self._blocks.data)
        return {
            "memcpy": memcpy(self._blocks.data, self._out),
            "encode": lambda: self._encode(range(rows)),
            "encode2": in_two_threads(self._pool, lambda half: self._encode(range(half, rows, 2))),
            "decode": lambda: self._decode(range(rows)),
            "decode2": in_two_threads(self._pool, lambda half: self._decode(range(half, rows, 2))),
        }

    def _pack(self, row: int) -> memoryview:
        meta = self._blocks.metas[row]
        return pack(self._blocks.data[row].data, self._blocks.layout, self._codec, meta.checksum)

    def _encode(self, rows: range) -> None:
        for row in rows:
            self._pack(row)

    def _decode(self, rows: range) -> None:
        for row in rows:
            unpack_into(self._containers[row], self._out[row].data)


def _reading(tier: ColdTier, keys: Sequence[bytes], blocks: Blocks, pool: ThreadPoolExecutor) -> dict[str, Work]:
    out = np.zeros_like(blocks.data)

    def read(rows: range) -> None:
        for row in rows:
            tier.read_into(keys[row], out[row].data)

    return {
        "get": lambda: read(range(len(keys))),
        "get2": in_two_threads(pool, lambda half: read(range(half, len(keys), 2))),
    }


class _RawFile:
    """Plain pwrite and pread of payloads, over and over within a file of `size` bytes."""

    def __init__(self, path: Path, size: int, data: NDArray[np.uint8]) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._data = data
        self._out = np.zeros_like(data)
        self._starts = cycle(range(0, max(size - data.nbytes, 0) + 1, data.nbytes))

    def __enter__(self) -> _RawFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def write(self) -> None:
        start = next(self._starts)
        for number, row in enumerate(self._data):
            os.pwrite(self._fd, row.data, start + number * row.nbytes)

    def read(self) -> None:
        for number, row in enumerate(self._out):
            os.preadv(self._fd, [row.data], number * row.nbytes)
