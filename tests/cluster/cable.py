"""A cable between two network interfaces that can be slow and lossy, run as a process of its own.

    python cable.py NAME NAME

Makes two TAP interfaces, which may then be moved into other namespaces, says ``ready`` and carries every Ethernet frame
that enters one to the other. A line ``0.1 0.05`` on standard input makes each frame take .1 s, and loses each with a
probability of 5 %. It ends with its standard input. Needs no queueing discipline of the kernel, which many lack.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_TAP, _NO_HEADER = 0x0002, 0x1000
_LONGEST_FRAME = 1 << 16


def _tap(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_HEADER))
    return end


def _deliver(under_way: deque[tuple[float, int, bytes]]) -> None:
    while under_way and under_way[0][0] <= time.monotonic():
        _, end, frame = under_way.popleft()
        try:
            os.write(end, frame)
        except OSError:  # the interface is down, or its queue is full: a frame that is lost
            continue


def carry(names: list[str]) -> None:
    """Do it until standard input ends."""
    first, second = (_tap(name) for name in names)
    other = {first: second, second: first}
    under_way: deque[tuple[float, int, bytes]] = deque()
    delay_s, loss = 0.0, 0.0
    os.write(1, b"ready\n")
    while True:
        _deliver(under_way)
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for readable in select.select([0, first, second], [], [], wait_s)[0]:
            if readable == 0:
                words = os.read(0, 1024).split()
                if not words:
                    return
                delay_s, loss = float(words[-2]), float(words[-1])
                under_way.clear()  # one delay for all that are under way: they stay in order
                continue
            try:
                frame = os.read(readable, _LONGEST_FRAME)
            except OSError:  # the interface is down
                continue
            if random.random() >= loss:
                under_way.append((time.monotonic() + delay_s, other[readable], frame))


if __name__ == "__main__":
    carry(sys.argv[1:])
