"""A socket whose operations, however many a peer makes of them, end by one deadline."""

from __future__ import annotations

import contextlib
import io
import math
import socket
import ssl
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["TimedSocket", "timeout_by"]

_MOST_PARTS = 64  # far from the system's limit, and enough for megabytes


class TimedSocket:
    """What http.client needs of a socket, bounded in all.

    A socket's own timeout bounds a single read: a peer that sends a byte now and then would never run into it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._deadline = math.inf
        self._pause_s = math.inf
        self._held: list[memoryview] | None = None

    def bound(self, deadline: float, pause_s: float) -> None:
        """Let everything from now on end by `deadline` (monotonic), and each read within `pause_s` as well."""
        self._deadline, self._pause_s = deadline, pause_s

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Send what is sent inside when that is left, all at once: few system calls, and few wake-ups over there."""
        held: list[memoryview] = []
        self._held = held
        try:
            yield
        finally:
            self._held = None
        self._send(held)

    def sendall(self, data: bytes | memoryview) -> None:
        """Send all of it. Raises `TimeoutError`."""
        if self._held is None:
            self._send([memoryview(data)])
        else:
            self._held.append(memoryview(data))

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReads(self, self._sock.makefile("rb", buffering=0)))

    def arm(self) -> None:
        """Bound the next read."""
        self._sock.settimeout(timeout_by(min(self._deadline, time.monotonic() + self._pause_s)))

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def _send(self, parts: list[memoryview]) -> None:
        encrypted = isinstance(self._sock, ssl.SSLSocket)  # which has no sendmsg
        first = 0
        while first < len(parts):
            self._sock.settimeout(timeout_by(self._deadline))
            batch = parts[first : first + _MOST_PARTS]
            sent = self._sock.send(batch[0]) if encrypted else self._sock.sendmsg(batch)
            while first < len(parts) and sent >= len(parts[first]):
                sent -= len(parts[first])
                first += 1
            if sent:
                parts[first] = parts[first][sent:]


class _TimedReads(io.RawIOBase):
    def __init__(self, sock: TimedSocket, raw: io.RawIOBase) -> None:
        self._sock = sock
        self._raw = raw

    def readable(self) -> bool:
        return True

    def readinto(self, target: WriteableBuffer) -> int | None:
        self._sock.arm()
        return self._raw.readinto(target)

    def close(self) -> None:
        self._raw.close()
        super().close()


def timeout_by(deadline: float) -> float | None:
    """Seconds until a deadline, None for never. Raises `TimeoutError` when it has passed."""
    if deadline == math.inf:
        return None
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining
