"""`tierkv bench storage`: the memory tiers and the cold tier beside memcpy, raw files and the codec alone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tierkv.errors import StorageError
from tierkv.service.bench.cold import ColdRow, measure_cold, reload_blocks_per_s
from tierkv.service.bench.evicted import EvictedRow, measure_evicted
from tierkv.service.bench.memory import MemoryRow, measure_memory
from tierkv.service.bench.payload import Blocks
from tierkv.service.bench.results import machine

__all__ = ["FULL", "QUICK", "Scale", "bench_storage"]

KIB, MIB = 1 << 10, 1 << 20
_BLOCK_BYTES = (256 * KIB, 2 * MIB)
_BATCHES = (1, 32)
_CODECS = ("raw", "bx1")


@dataclass(frozen=True, slots=True)
class Scale:
    """How much to measure.

    Attributes
    ----------
    pass_bytes
        Payload of one timed pass, at least 32 blocks of the largest size.
    rounds
        Timed passes of each kind.
    capacity_bytes
        Cap of the cold store, at least 48 MiB. A pass over the cold tier takes half of it at most.
    fresh_stores, churn_turns
        How many new stores are filled, and how often the last one is written over.
    evicted_bytes, evicted_rounds
        Data read from the disk in each of so many rounds.
    reload_blocks
        Blocks of the store whose start is timed.
    """

    pass_bytes: int
    rounds: int
    capacity_bytes: int
    fresh_stores: int
    churn_turns: int
    evicted_bytes: int
    evicted_rounds: int
    reload_blocks: int


FULL = Scale(64 * MIB, 9, 256 * MIB, 3, 20, 512 * MIB, 3, 100_000)
QUICK = Scale(64 * MIB, 3, 64 * MIB, 1, 3, 64 * MIB, 1, 20_000)


def bench_storage(directory: Path | None, console: Console, scale: Scale = FULL) -> dict[str, Any]:
    """Measure, print tables, and return the figures as docs/benchmarks.md lists them.

    Blocks for one to two minutes. Takes 600 MiB of /dev/shm and 1.2 GiB of `directory` (None: the one for temporary
    files) at a time, and leaves nothing there. Raises `StorageError` when the directory cannot be used.
    """
    try:
        place = tempfile.TemporaryDirectory(prefix="tierkv-bench-", dir=directory)
    except OSError as error:
        raise StorageError(
            f"cannot use {directory or tempfile.gettempdir()}: {error.strerror}",
            remedy="name a writable --directory, on the disk in question",
        ) from None
    with place as name:
        return _measure(Path(name), console, scale)


def _measure(place: Path, console: Console, scale: Scale) -> dict[str, Any]:
    console.print(machine(), highlight=False, soft_wrap=True)
    console.print("GB/s of payload, medians of interleaved rounds", highlight=False)
    hot, warm, cold = [], [], []
    for block_bytes in _BLOCK_BYTES:
        blocks = Blocks.make(block_bytes, scale.pass_bytes // block_bytes)
        with console.status(f"blocks of {block_bytes // KIB} KiB"):
            hot += [measure_memory("hot", blocks, batch, scale.rounds) for batch in _BATCHES]
            warm += [measure_memory("warm", blocks, batch, scale.rounds) for batch in _BATCHES]
            for codec in _CODECS:
                with tempfile.TemporaryDirectory(dir=place) as directory:
                    cold.append(_measure_cold(Path(directory), blocks, codec, scale))
    _print_memory("Hot tier in ordinary memory", hot, console)
    _print_memory("Warm tier", warm, console)
    _print_cold(sorted(cold, key=lambda row: _CODECS.index(row.codec)), console)
    with console.status("reads from the disk"):
        evicted = _measure_evicted(place, console, scale)
    _print_evicted(evicted, console)
    reload = reload_blocks_per_s(place / "reload", scale.reload_blocks, scale.evicted_rounds)
    console.print(f"A start reads {reload:,.0f} blocks per second from an index in memory.", highlight=False)
    return {
        "machine": machine(),
        "memcpy_gbps": warm[-1].memcpy_gbps,
        "hot": [asdict(row) for row in hot],
        "warm": [asdict(row) for row in warm],
        "cold": [asdict(row) for row in cold],
        "cold_evicted": [asdict(row) for row in evicted],
        "reload_blocks_per_s": reload,
    }


def _measure_cold(directory: Path, blocks: Blocks, codec: str, scale: Scale) -> ColdRow:
    return measure_cold(
        directory,
        blocks.first(scale.capacity_bytes // 2),
        codec,
        capacity_bytes=scale.capacity_bytes,
        fresh_stores=scale.fresh_stores,
        churn_turns=scale.churn_turns,
        rounds=scale.rounds,
    )


def _measure_evicted(place: Path, console: Console, scale: Scale) -> list[EvictedRow]:
    rows = []
    for block_bytes in _BLOCK_BYTES:
        with tempfile.TemporaryDirectory(dir=place) as directory:
            try:
                rows.append(measure_evicted(Path(directory), block_bytes, scale.evicted_bytes, scale.evicted_rounds))
            except StorageError as error:
                console.print(f"[bold yellow]Reads from the disk are not measured:[/] {error}", highlight=False)
                return []
    return rows


def _print_memory(title: str, rows: Sequence[MemoryRow], console: Console) -> None:
    table = _table(
        f"{title}, of memcpy in brackets",
        ("block", "batch", "put", "get", "tier put", "tier get", "memcpy", "checksum"),
    )
    for row in rows:
        speeds = (row.put_gbps, row.get_gbps, row.tier_put_gbps, row.tier_get_gbps)
        table.add_row(
            _size(row.block_bytes),
            str(row.batch),
            *(f"{speed:.1f} ({speed / row.memcpy_gbps:.2f})" for speed in speeds),
            f"{row.memcpy_gbps:.1f}",
            f"{row.checksum_percent:+.0f} %",
        )
    console.print(table)
    console.print(
        "put and get: embedded cache with leases and checksums; tier: slots alone; checksum: what it adds to a copy",
        style="dim",
    )


def _print_cold(rows: Iterable[ColdRow], console: Console) -> None:
    rows = list(rows)
    writes = _table(
        "Cold tier in the page cache: writing, two encode threads, past the cap",
        ("codec", "block", "ratio", "put", "fresh put", "churn", "encode", "encode 2", "raw write"),
    )
    reads = _table(
        "Cold tier in the page cache: reading, with one thread and with two",
        ("codec", "block", "get", "get 2", "decode", "decode 2", "raw read", "memcpy"),
    )
    for row in rows:
        name = (row.codec, _size(row.block_bytes))
        speeds = (row.encode_gbps, row.encode2_gbps, row.write_gbps)
        put = (f"{row.put_gbps:.2f}", f"{row.fresh_put_gbps:.2f}", f"{row.churn_ratio:.2f}")
        writes.add_row(*name, f"{row.ratio:.2f}", *put, *(f"{speed:.2f}" for speed in speeds))
        got = (row.get_gbps, row.get2_gbps, row.decode_gbps, row.decode2_gbps, row.read_gbps, row.memcpy_gbps)
        reads.add_row(*name, *(f"{speed:.2f}" for speed in got))
    console.print(writes)
    console.print(f"churn: speed after the cap was written over {rows[0].churn_turns} times, of fresh put", style="dim")
    console.print(reads)
    console.print("encode, decode: the codec and its container alone; raw: pwrite and pread of a file", style="dim")


def _print_evicted(rows: Sequence[EvictedRow], console: Console) -> None:
    if not rows:
        return
    table = _table(
        "Cold tier on the disk: random reads, page cache evicted, codec raw",
        ("block", "get", "get 2", "pread", "O_DIRECT", "resident", "start reads"),
    )
    for row in rows:
        table.add_row(
            _size(row.block_bytes),
            *(f"{speed:.2f}" for speed in (row.get_gbps, row.get2_gbps, row.pread_gbps)),
            "-" if row.direct_gbps is None else f"{row.direct_gbps:.2f}",
            f"{row.resident:.0%}",
            f"{row.start_reads:.0%}",
        )
    console.print(table)
    console.print(
        f"{rows[0].total_bytes // MIB} MiB a round; resident: in memory before reading; start reads: share of the "
        "store that a start brings into memory",
        style="dim",
    )


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "codec" else "right", no_wrap=True)
    return table


def _size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"
