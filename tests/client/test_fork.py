"""After a fork: a child shares nothing with its parent that either could hurt the other by."""

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

import tierkv
from tests.service.daemon import BLOCK_BYTES, PATIENCE_S, SPEC, Daemon, chain, payload, read_back, store
from tierkv.client.failopen import FailOpenCache

WANTED = chain(4)


@pytest.fixture(params=["unix", "tcp"])
def cache(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[FailOpenCache]:
    url = daemon.url if request.param == "unix" else daemon.tcp_url
    cache = tierkv.connect(url, fail_open=True, extra_s=5)
    assert isinstance(cache, FailOpenCache)
    with cache:
        cache.register(SPEC)
        store(cache, WANTED)
        yield cache


def start_child(work: Callable[[], bool]) -> int:
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE_S))  # a lock that nobody holds any more is waited for without end
        status = 1
        try:
            status = 0 if work() else 2
        finally:
            os._exit(status)
    return child


def outcome(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def whole_life(cache: FailOpenCache, rounds: int = 20) -> bool:
    """Ask for different things in turn; an answer meant for somebody else would not fit."""
    out = bytearray(BLOCK_BYTES)
    for turn in range(rounds):
        blocks = turn % 4
        if cache.lookup(tierkv.Chain(WANTED.namespace, WANTED.hashes[:blocks])).blocks != blocks:
            return False
        if not cache.read_into(WANTED, blocks, memoryview(out)) or out != payload(WANTED, blocks):
            return False
    return read_back(cache, WANTED) == 4


def test_parent_and_children_at_the_same_time(cache: FailOpenCache) -> None:
    assert whole_life(cache)
    children = [start_child(lambda: whole_life(cache)) for _ in range(4)]
    mine = whole_life(cache)
    assert [outcome(child) for child in children] == [0] * 4
    assert mine
    assert cache.health().failures == 0


def test_a_child_opens_connections_of_its_own(cache: FailOpenCache) -> None:
    def connections() -> set[int]:
        return {os.fstat(connection.sock.fileno()).st_ino for connection, _ in cache._transport._idle}

    cache.lookup(WANTED)
    parents = connections()
    assert parents
    assert outcome(start_child(lambda: whole_life(cache) and not connections() & parents)) == 0
    assert connections() == parents


def test_locks_that_another_thread_held(cache: FailOpenCache) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with cache._transport.breaker._lock, cache._cache._uses._lock:
            held.set()
            done.wait(PATIENCE_S)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(PATIENCE_S)
    child = start_child(lambda: whole_life(cache) and cache.health().state == "closed")
    done.set()
    holder.join(PATIENCE_S)
    assert outcome(child) == 0
    assert whole_life(cache)


def test_a_child_that_closes_leaves_its_parents_leases(cache: FailOpenCache) -> None:
    with cache.acquire(WANTED) as read:

        def close() -> bool:
            cache.close()
            return True

        assert outcome(start_child(close)) == 0
        read.renew(60)
        assert cache.health().misses == 0
        assert bytes(read.view(2)) == payload(WANTED, 2)
