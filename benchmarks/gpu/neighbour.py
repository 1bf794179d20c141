"""A second process that opens a pool of device memory and copies from it.

Reads a line of JSON with the pool's handle and size, writes one with seconds: for a copy out of the pool, and for one
between memory of its own.
"""

from __future__ import annotations

import json
import sys
import time

from benchmarks.gpu.machine import interleaved
from tierkv.storage.device import Copy, Device, finished, open_device

__all__ = ["answer"]

_PATIENCE_S = 20.0


def answer(door: Device, asked: str, *, for_s: float = 2.0) -> str:
    """Attach the pool, measure, detach. Raises `DeviceError`."""
    request = json.loads(asked)
    nbytes = int(request["nbytes"])
    own, target = door.allocate(nbytes), door.allocate(nbytes)
    began = time.perf_counter()
    pool = door.attach(bytes.fromhex(request["handle"]))
    attaching = time.perf_counter() - began
    stream = door.stream()

    def copy(source: int) -> None:
        stream.copy([Copy(target, source, nbytes)])
        if not finished(stream.record(), _PATIENCE_S):
            raise TimeoutError("a copy does not end")

    def seconds(work: object) -> float:
        began = time.perf_counter()
        assert callable(work)
        work()
        return time.perf_counter() - began

    taken = interleaved({"pool": lambda: copy(pool), "own": lambda: copy(own)}, seconds, for_s)
    door.detach(pool)
    door.free(own)
    door.free(target)
    return json.dumps({**taken, "attach": attaching})


if __name__ == "__main__":
    print(answer(open_device(sys.argv[1]), sys.stdin.readline()))
