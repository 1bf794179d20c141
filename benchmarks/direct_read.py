"""One warm block of 256 KiB, read by a client of a daemon: from the arena's directory, and through a lease.

    python benchmarks/direct_read.py

Starts a daemon of its own, stores 32 blocks through its Unix socket and reads them in turn. Median and 99th percentile
in microseconds, beside copying the same bytes. Everything fits the processor's cache; the figures are latencies.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import numpy as np

import tierkv
from tierkv.cache import Cache

BLOCKS = 32
SPEC = tierkv.KVSpec("bench", "0", "bfloat16", 64, (tierkv.KVGroup(tuple(range(8)), "full", 2, 64),))


def latency(work: Callable[[], object], times: int) -> str:
    """Return median and 99th percentile of a call."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return "{:8.1f} {:8.1f}".format(*(1e6 * np.percentile(taken, part) for part in (50, 99)))


def measure(cache: Cache) -> None:
    cache.register(SPEC)
    size = SPEC.layout().nbytes
    chain = tierkv.Chain.of(SPEC, np.arange(BLOCKS * SPEC.block_tokens))
    payload, out = os.urandom(size), memoryview(bytearray(size))
    with cache.reserve(chain) as lease:
        for grant in lease.granted:
            lease.write(grant.index, payload)
        lease.commit()
    turns = cycle(range(BLOCKS))
    first = tierkv.Chain(chain.namespace, chain.hashes[:1])

    def direct() -> None:
        if not cache.read_into(chain, next(turns), out):
            raise SystemExit("a block that was just stored is not there")

    def leased() -> None:
        with cache.acquire(first) as lease:
            lease.read_into(0, out)

    source, target = np.frombuffer(payload, np.uint8), np.frombuffer(out, np.uint8)
    print(f"microseconds, {size >> 10} KiB{'':18} p50      p99")
    print("numpy copy                    ", latency(lambda: np.copyto(target, source), 5000))
    print("read_into, no request         ", latency(direct, 5000))
    print("acquire, read_into, release   ", latency(leased, 1000))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as home:
        socket, config = Path(home) / "s", Path(home) / "config.yaml"  # JSON is YAML
        config.write_text(json.dumps({"socket": str(socket), "warm": {"capacity": "64MiB"}}))
        command = [sys.executable, "-m", "tierkv.service", "serve", "--config", str(config)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as daemon:
            assert daemon.stdout is not None
            try:
                next(line for line in daemon.stdout if "ready" in line)
                with tierkv.connect(f"unix://{socket}") as cache:
                    measure(cache)
            finally:
                daemon.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
