"""How long reads from the cold tier take while another thread writes as fast as it can.

    python benchmarks/burst_reads.py [DIRECTORY]

Reads blocks of 256 KiB that are kept in use, in the page cache, alone and beside a writer that fills the store past its
cap again and again. Microseconds.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from threading import Event, Thread

import numpy as np

from tierkv.storage.cold import ColdTier
from tierkv.storage.tier import BlockMeta, checksum

SIZE, BATCH, KEPT = 256 << 10, 32, 64
SECONDS = 8.0


def reads(tier: ColdTier, keys: list[bytes], title: str) -> None:
    """Read for some seconds and print percentiles."""
    out, taken = memoryview(bytearray(SIZE)), []
    end = time.perf_counter() + SECONDS
    while (began := time.perf_counter()) < end:
        tier.read_into(keys[len(taken) % KEPT], out)
        taken.append(time.perf_counter() - began)
        if len(taken) % KEPT == 0:
            tier.touch(keys)
    figures = " ".join(f"{1e6 * np.percentile(taken, part):8.0f}" for part in (50, 99, 99.9, 100))
    print(f"{title:14} {len(taken):8} {figures}")


def main() -> None:
    payload = os.urandom(SIZE)
    meta = BlockMeta(SIZE, checksum(payload))
    done, written = Event(), 0

    def write() -> None:
        nonlocal written
        while not done.is_set():
            tier.put_many([(os.urandom(32), payload, meta) for _ in range(BATCH)])
            written += BATCH * SIZE

    with tempfile.TemporaryDirectory(prefix="tierkv-bench-", dir=sys.argv[1] if sys.argv[1:] else None) as home:
        tier = ColdTier(home, capacity_bytes=512 << 20, segment_bytes=16 << 20, codec="raw", sync="interval")
        keys = [os.urandom(32) for _ in range(KEPT)]
        tier.put_many([(key, payload, meta) for key in keys])
        print(f"{'microseconds':14} {'reads':>8} {'p50':>8} {'p99':>8} {'p99.9':>8} {'longest':>8}")
        reads(tier, keys, "alone")
        writer = Thread(target=write)
        writer.start()
        reads(tier, keys, "beside writes")
        done.set()
        writer.join()
        print(f"written meanwhile: {written / SECONDS / 1e9:.2f} GB/s")
        tier.close()


if __name__ == "__main__":
    main()
