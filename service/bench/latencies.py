"""How long single requests of a client take."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from statistics import median

import numpy as np

from tierkv.cache import Cache, Chain
from tierkv.errors import NotFound
from tierkv.service.bench.payload import Blocks, fresh_key
from tierkv.service.bench.transfers import spec_of
from tierkv.spec import KVGroup, KVSpec

__all__ = ["Latencies", "import_ms", "measure_latencies"]

_STORED = 32
_TINY = KVSpec("bench-chain", "0", "bfloat16", 16, (KVGroup((0,), "full", 1, 8),))  # blocks of 512 bytes
_PROGRAM = "import time; began = time.perf_counter(); import tierkv.client; print(time.perf_counter() - began)"


@dataclass(frozen=True, slots=True)
class Latencies:
    """Microseconds. One warm block, verified, unless said otherwise.

    Attributes
    ----------
    read_p50_us, read_p99_us
        `read_into` by the directory, without a request.
    acquire_p50_us
        `acquire`, `read_into`, `release` over the Unix socket.
    http_p50_us
        `acquire`, `view`, `release` over TCP.
    lookup_p50_us
        `lookup` of a chain over the Unix socket, all of it published.
    """

    read_p50_us: float
    read_p99_us: float
    acquire_p50_us: float
    http_p50_us: float
    lookup_p50_us: float


def measure_latencies(
    shared: Cache, bodies: Cache, blocks: Blocks, chain_blocks: int, rounds: int, times: int
) -> Latencies:
    """Time calls in `rounds` turns: `times` times the quick one, a tenth of that the others. Blocks."""
    size = blocks.layout.nbytes
    chain = Chain(shared.register(spec_of(blocks)), tuple(fresh_key() for _ in range(_STORED)))
    long = Chain(shared.register(_TINY), tuple(fresh_key() for _ in range(chain_blocks)))
    bodies.register(spec_of(blocks))
    _store(shared, chain, blocks.data[0].tobytes())
    _store(shared, long, bytes(_TINY.layout().nbytes))
    first = Chain(chain.namespace, chain.hashes[:1])
    out = memoryview(bytearray(size))
    turns = cycle(range(_STORED))

    def direct() -> None:
        if not shared.read_into(chain, next(turns), out):
            raise NotFound("the benchmark's own block was evicted", remedy="report it as a fault of tierkv bench")

    def leased() -> None:
        with shared.acquire(first) as lease:
            lease.read_into(0, out)

    def fetched() -> None:
        with bodies.acquire(first) as lease:
            lease.view(0)

    def looked_up() -> None:
        if shared.lookup(long).blocks != chain_blocks:
            raise NotFound("the benchmark's own chain was evicted", remedy="report it as a fault of tierkv bench")

    works: list[tuple[Callable[[], None], int]] = [(direct, times)]
    works += [(work, max(1, times // 10)) for work in (leased, fetched, looked_up)]
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        for (work, repeats), samples in zip(works, taken, strict=True):
            work()
            samples += _times(work, repeats)
    p50 = [1e6 * median(samples) for samples in taken]
    return Latencies(p50[0], 1e6 * float(np.percentile(taken[0], 99)), *p50[1:])


def import_ms(rounds: int) -> float:
    """Return how long ``import tierkv.client`` takes in a new interpreter: milliseconds, the median. Blocks."""
    command = [sys.executable, "-c", _PROGRAM]
    return 1e3 * median(
        float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(rounds)
    )


def _store(cache: Cache, chain: Chain, payload: bytes) -> None:
    with cache.reserve(chain) as write:
        for grant in write.granted:
            write.write(grant.index, payload)
        write.commit()


def _times(work: Callable[[], None], times: int) -> list[float]:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return taken
