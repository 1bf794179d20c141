"""Memory of the cold tier's table of blocks, and the time of what lookups ask of it.

    python benchmarks/index_memory.py
    python benchmarks/index_memory.py --blocks 1000000 --blocks 5600000

Each row is a process of its own: resident memory before and after the table was filled through its own `publish`, with
32 random bytes a key, and after every block was used twice. A dictionary that has entries taken out and put back, as
recency and eviction do, ends up larger than one that was only filled; its size is a power of two, so the default
numbers of blocks are two round ones and two just above a step, where a block costs most.

The keys of a run are asked for in the order they were stored, as fresh objects: nothing is in the processor's caches,
as when a request comes in.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import random
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

from rich.console import Console
from rich.table import Table

from tierkv.storage.cold import record
from tierkv.storage.cold.segment import Segment
from tierkv.storage.cold.table import BlockTable
from tierkv.storage.tier import BlockMeta

ABOVE_A_STEP = (2**22 // 3 + 1000, 2**25 // 3 + 1000)
BLOCKS = (1_000_000, ABOVE_A_STEP[0], 10_000_000, ABOVE_A_STEP[1])
RUN = 2048
ROUNDS = 31
PAYLOAD = 256 << 10
BLOCKS_PER_PREFIX = 64


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: bytes of memory per block, and milliseconds per 2,048 keys (medians, but for the longest)."""

    blocks: int
    filled_bytes: float
    used_bytes: float
    total_gib: float
    run_ms: float
    touch_ms: float
    longest_touch_ms: float


def resident_bytes() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # the C library may keep what was freed
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def records(blocks: int, sequence: int) -> Iterator[bytes]:
    parent = bytes(32)
    for ordinal in range(blocks):
        key, depth = os.urandom(32), ordinal % BLOCKS_PER_PREFIX
        meta = BlockMeta(PAYLOAD, ordinal, parent if depth else bytes(32), bytes(32), bytes(8), depth)
        yield record.encode(key, meta, sequence, ordinal)
        parent = key


def measure(blocks: int) -> Row:
    table = BlockTable()
    with tempfile.TemporaryDirectory() as directory:
        segment = Segment.create(Path(directory) / "segment.lmdb", 2 << 20, synchronous=False)
        segment.begin(1)
        table.register(segment)
        before = resident_bytes()
        table.publish(segment, records(blocks, segment.sequence))
        filled = resident_bytes() - before
        longest = max(use_all(table), use_all(table))
        used = resident_bytes() - before
        keys = table.keys_by_use()
        runs, touches = [], []
        for _ in range(ROUNDS):
            first = random.randrange(len(keys) - RUN)
            run = [bytes(bytearray(key)) for key in keys[first : first + RUN]]
            start = perf_counter()
            held = table.holds(run)
            runs.append(perf_counter() - start)
            if held != RUN:
                raise AssertionError(f"the table holds {held} of {RUN}")
            touches.append(touch(table, run))
        segment.close()
    return Row(
        blocks,
        filled / blocks,
        used / blocks,
        max(filled, used) / 2**30,
        median(runs) * 1e3,
        median(touches) * 1e3,
        longest * 1e3,
    )


def use_all(table: BlockTable) -> float:
    """Touch every block, 2,048 at a time; return the longest time that took, in seconds."""
    keys = table.keys_by_use()
    return max(touch(table, keys[first : first + RUN]) for first in range(0, len(keys), RUN))


def touch(table: BlockTable, keys: list[bytes]) -> float:
    start = perf_counter()
    table.touch(keys)
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the memory of the cold tier's table of blocks.")
    parser.add_argument("--blocks", type=int, action="append", help=f"number of blocks (default: {BLOCKS})")
    options = parser.parse_args()
    out = Table(title=f"the cold tier's table: memory a block, holds and touch of {RUN:,} keys")
    for heading in ("blocks", "bytes filled", "bytes used", "GiB", "holds ms", "touch ms", "longest ms"):
        out.add_column(heading, justify="right")
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, fresh, max_tasks_per_child=1) as pool:
        for row in pool.map(measure, options.blocks or BLOCKS):
            out.add_row(
                f"{row.blocks:,}",
                f"{row.filled_bytes:.0f}",
                f"{row.used_bytes:.0f}",
                f"{row.total_gib:.2f}",
                f"{row.run_ms:.2f}",
                f"{row.touch_ms:.2f}",
                f"{row.longest_touch_ms:.0f}",
            )
    Console().print(out)


if __name__ == "__main__":
    main()
