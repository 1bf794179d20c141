"""The bounded socket: what is sent arrives whole and in order, and time runs out for all of it at once."""

import math
import os
import socket
import threading
import time
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.service.daemon import PATIENCE_S
from tierkv.client.timed import TimedSocket


def everything(sock: socket.socket) -> bytes:
    found = bytearray()
    while data := sock.recv(1 << 16):
        found += data
    return bytes(found)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 7, 32, 1000, 70_000, 600_000]), max_size=200), st.booleans())
def test_what_is_sent_arrives(sizes: list[int], together: bool) -> None:
    parts = [os.urandom(size) for size in sizes]
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(everything(far)))
    reader.start()
    timed = TimedSocket(near)
    timed.bound(time.monotonic() + PATIENCE_S, math.inf)
    if together:
        with timed.together():
            for part in parts:
                timed.sendall(part)
    else:
        for part in parts:
            timed.sendall(memoryview(part))
    timed.close()
    reader.join(PATIENCE_S)
    far.close()
    assert received == [b"".join(parts)]


def test_nothing_is_sent_of_what_failed_to_be_put_together() -> None:
    near, far = socket.socketpair()
    with far:
        timed = TimedSocket(near)
        with suppress(KeyError), timed.together():
            timed.sendall(b"half")
            raise KeyError
        timed.sendall(b"whole")
        timed.close()
        assert everything(far) == b"whole"


def test_a_reader_that_takes_little_at_a_time_does_not_stretch_the_time() -> None:
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    stop, pace = threading.Event(), threading.Event()

    def sip() -> None:
        while not stop.is_set():
            far.recv(1 << 12)
            pace.wait(0.01)

    reader = threading.Thread(target=sip)
    reader.start()
    timed = TimedSocket(near)
    began = time.monotonic()
    timed.bound(began + 0.1, math.inf)
    with pytest.raises(TimeoutError):
        timed.sendall(bytes(8 << 20))
    assert time.monotonic() - began < 2, "twenty times the bound"
    stop.set()
    timed.close()
    reader.join(PATIENCE_S)
    far.close()
