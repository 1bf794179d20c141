"""A second process: attaches a pool, reads what is in it, writes something else, and tells.

python -m tests.gpu.neighbour DEVICE OFFSET NBYTES        DEVICE is fake or a name; the handle, in hex, is on stdin
"""

from __future__ import annotations

import sys
from typing import Any

from tests.storage.fake_cuda import FakeDevice
from tierkv.storage.device import open_device
from tierkv.storage.device_pool import DevicePool


def main(name: str, offset: int, nbytes: int, handle: bytes) -> str:
    door: Any = FakeDevice() if name == "fake" else open_device(name)
    pool = DevicePool.attach(door, handle, offset + nbytes)
    out = bytearray(nbytes)
    pool.copy_out([(offset, memoryview(out))])
    pool.copy_in([(offset, bytes(255 - byte for byte in out))]).wait()
    return out.hex()


if __name__ == "__main__":
    print(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.stdin.read())))
