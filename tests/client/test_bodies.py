"""Blocks that travel as HTTP bodies, in memory of a lease's own."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain as chain_of
from itertools import pairwise
from threading import Barrier

import numpy as np
import pytest

from tests.service.daemon import BLOCK_BYTES, PATIENCE_S, Daemon, chain, payload, read_back, store
from tierkv.cache import WriteLease


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads that take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_threads_that_write_one_lease_do_not_share_memory(daemon: Daemon) -> None:
    wanted = chain(512, seed=300)
    together = Barrier(8)
    with daemon.connect(tcp=True) as cache, ThreadPoolExecutor(8) as threads:
        for _ in range(5):
            with cache.reserve(wanted) as write:

                def places(lease: WriteLease, first: int) -> list[int]:
                    together.wait(PATIENCE_S)
                    views = [lease.buffer(index) for index in range(first, 512, 8)]
                    return [np.frombuffer(view, np.uint8).ctypes.data for view in views]

                found = sorted(chain_of.from_iterable(threads.map(partial(places, write), range(8))))
                assert len(write.granted) == 512
                assert all(after - before >= BLOCK_BYTES for before, after in pairwise(found))


def test_blocks_committed_one_by_one(daemon: Daemon) -> None:
    wanted = chain(5, seed=320)
    with daemon.connect(tcp=True) as cache:
        with cache.reserve(wanted) as write:
            for index in range(5):
                write.write(index, payload(wanted, index))
                assert write.commit([index]) == 1
        assert read_back(cache, wanted) == 5


def test_a_fetch_that_failed_is_made_again_for_what_is_missing(daemon: Daemon) -> None:
    wanted = chain(6, seed=340)
    with daemon.connect(tcp=True) as cache:
        store(cache, wanted)
        with cache.acquire(wanted) as read:
            plane = read._plane
            assert bytes(read.view(0)) == payload(wanted, 0)
            for index in (2, 3):
                del plane._bytes[index, 0]
            kept = plane._bytes[1, 0]
            assert [bytes(read.view(index)) for index in range(6)] == [payload(wanted, index) for index in range(6)]
            assert plane._bytes[1, 0] is kept
