"""`tierkv bench wire`: a client and its daemon beside memcpy and a raw loopback stream."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import tierkv
from tierkv.service.bench.latencies import import_ms, measure_latencies
from tierkv.service.bench.payload import Blocks
from tierkv.service.bench.processes import daemon, ready
from tierkv.service.bench.redis import available, redis_server
from tierkv.service.bench.results import machine
from tierkv.service.bench.transfers import TransferRow, measure_transfers

__all__ = ["FULL", "QUICK", "WireScale", "bench_wire"]

KIB, MIB = 1 << 10, 1 << 20
_SIZES = (256 * KIB, 2 * MIB)
_BATCHES = (1, 32)
_ROOM = 3  # the arena holds so many passes
_CHAIN_BLOCKS = 2048
_TARGETS = {
    ("shm", 2 * MIB, 32): (0.85, 0.85),
    ("shm", 256 * KIB, 32): (0.5, 0.7),
    ("http", 2 * MIB, 32): (0.6, 0.8),
}
"""Least share of the yardstick that a put and a get should reach."""
_LIMITS = {"read_p50_us": 40.0, "acquire_p50_us": 450.0, "lookup_p50_us": 3000.0, "import_ms": 150.0}


@dataclass(frozen=True, slots=True)
class WireScale:
    """How much to measure: payload bytes of a timed pass, passes of each kind, and calls timed in a round."""

    pass_bytes: int
    rounds: int
    calls: int


FULL = WireScale(64 * MIB, 7, 1000)
QUICK = WireScale(64 * MIB, 1, 100)


def bench_wire(console: Console, scale: WireScale = FULL) -> dict[str, Any]:
    """Measure, print tables, and return the figures as docs/benchmarks.md lists them.

    Blocks for about a minute. Runs a daemon of its own, which takes 192 MiB of /dev/shm, and leaves nothing there; and
    a Redis for comparison, if one is installed. Raises `Unavailable` when one does not start.
    """
    console.print(machine(), highlight=False, soft_wrap=True)
    console.print("GB/s of payload, medians of interleaved rounds, against a daemon of its own", highlight=False)
    shm: list[TransferRow] = []
    http: list[TransferRow] = []
    others: list[TransferRow] = []
    with ExitStack() as stack:
        unix, tcp = stack.enter_context(daemon({"warm": {"capacity": _ROOM * scale.pass_bytes}}))
        port = int(stack.enter_context(ready("tierkv.service.bench.loopback")))
        stream = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        shared = stack.enter_context(tierkv.connect(unix))
        bodies = stack.enter_context(tierkv.connect(tcp))
        redis = stack.enter_context(redis_server()) if available() else None
        for size in _SIZES:
            blocks = Blocks.make(size, scale.pass_bytes // size)
            with console.status(f"blocks of {size // KIB} KiB"):
                rows = measure_transfers(
                    shared,
                    bodies,
                    stream,
                    redis,
                    blocks,
                    batches=_BATCHES,
                    rounds=scale.rounds,
                    warm_ups=_ROOM + 1,
                )
            shm += rows.shm
            http += rows.http
            others += rows.redis
        with console.status("single requests"):
            latencies = measure_latencies(
                shared, bodies, Blocks.make(_SIZES[0], 1), _CHAIN_BLOCKS, scale.rounds, scale.calls
            )
    single = {**asdict(latencies), "import_ms": import_ms(scale.rounds)}
    _print_transfers("Shared memory, of memcpy in brackets", "shm", shm, "memcpy", console)
    _print_transfers("HTTP bodies, of a raw stream in brackets", "http", http, "stream", console)
    if others:
        _print_transfers("Redis on a Unix socket, of memcpy in brackets", "redis", others, "memcpy", console)
    _print_single(single, console)
    return {
        "machine": machine(),
        "memcpy_gbps": shm[-1].yardstick_gbps,
        "loopback_gbps": http[-1].yardstick_gbps,
        "shm": [asdict(row) for row in shm],
        "http": [asdict(row) for row in http],
        "redis": [asdict(row) for row in others],
        **single,
    }


def _print_transfers(title: str, kind: str, rows: Sequence[TransferRow], yardstick: str, console: Console) -> None:
    table = _table(title, ("block", "batch", "put", "get", yardstick, "put wanted", "get wanted"))
    for row in rows:
        put, get = _TARGETS.get((kind, row.block_bytes, row.batch), (None, None))
        table.add_row(
            _size(row.block_bytes),
            str(row.batch),
            *(f"{speed:.2f} ({speed / row.yardstick_gbps:.2f})" for speed in (row.put_gbps, row.get_gbps)),
            f"{row.yardstick_gbps:.2f}",
            *("" if share is None else f"{share:.2f}" for share in (put, get)),
        )
    console.print(table)


def _print_single(figures: dict[str, float], console: Console) -> None:
    table = _table("Single calls", ("call", "median", "wanted"))
    block, chain = _size(_SIZES[0]), f"{_CHAIN_BLOCKS:,} blocks"
    for name, what in (
        ("read_p50_us", f"read {block} by the directory, no request"),
        ("read_p99_us", "the same, 99th percentile"),
        ("acquire_p50_us", f"acquire, copy, release {block}, Unix socket"),
        ("http_p50_us", f"acquire, fetch, release {block}, TCP"),
        ("lookup_p50_us", f"look up {chain}, Unix socket"),
        ("import_ms", "import tierkv.client"),
    ):
        unit = "us" if name.endswith("us") else "ms"
        limit = _LIMITS.get(name)
        table.add_row(what, f"{figures[name]:,.0f} {unit}", "" if limit is None else f"{limit:,.0f} {unit}")
    console.print(table)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "call" else "right", no_wrap=True)
    return table


def _size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"
