"""A client that fails open: whatever is at the other end, calls come to nothing, in time, and never raise."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

import tierkv
from tests.client.impostors import IMPOSTORS, OTHERS, SlowLink, at_an_address
from tests.servers.process import free_port
from tests.service.daemon import (
    BLOCK_BYTES,
    PATIENCE_S,
    SPEC,
    Daemon,
    chain,
    eventually,
    payload,
    read_back,
    running,
    short_directory,
    store,
)
from tierkv.cache import Chain, TicketProgress
from tierkv.client.failopen import FailOpenCache
from tierkv.connected import Where
from tierkv.errors import InvalidRequest, LeaseLost
from tierkv.storage.shm import MappedSegment

EXTRA_S = 0.05
WAIT_S = 0.1
SLACK_S = 0.5  # this machine may be busy; a timeout that is missing takes seconds
WANTED = chain(4)


@dataclass(frozen=True)
class Call:
    make: Callable[[FailOpenCache], Any]
    nothing: Callable[[Any], bool]
    wait_s: float = 0.0


def _acquired_nothing(lease: Any) -> bool:
    with lease:
        return (
            (lease.id, lease.blocks, lease.hit_blocks, lease.hit_tokens, lease.tokens_by_tier) == ("", (), 0, 0, {})
            and lease.compute is None
            and sum(lease.missed_tokens.values()) in (0, len(WANTED) * SPEC.block_tokens)
        )


def _reserved_nothing(lease: Any) -> bool:
    with lease:
        return not lease.granted and {grant.state for grant in lease.grants} <= {"no_room"} and lease.commit() == 0


CALLS = {
    "register": Call(lambda cache: cache.register(SPEC), lambda name: name == SPEC.namespace),
    "lookup": Call(lambda cache: cache.lookup(WANTED), lambda hit: (hit.blocks, hit.tokens, hit.tiers) == (0, 0, ())),
    "where": Call(lambda cache: cache.where(WANTED, wait_s=WAIT_S), lambda found: found == Where(4, ()), WAIT_S),
    "prefetch": Call(
        lambda cache: cache.prefetch(WANTED),
        lambda ticket: ticket.progress() == ticket.wait(5) == TicketProgress("done", 0, 0, 0, 0),
    ),
    "acquire": Call(lambda cache: cache.acquire(WANTED, wait_s=WAIT_S, compute_s=1), _acquired_nothing, WAIT_S),
    "acquire now": Call(lambda cache: cache.acquire(WANTED, wait_s=0), _acquired_nothing),
    "read_into": Call(
        lambda cache: cache.read_into(WANTED, 0, memoryview(bytearray(BLOCK_BYTES)), wait_s=WAIT_S),
        lambda found: found is False,
        WAIT_S,
    ),
    "reserve": Call(lambda cache: cache.reserve(WANTED, wait_s=WAIT_S), _reserved_nothing, WAIT_S),
    "pin": Call(lambda cache: cache.pin(WANTED, 60), lambda pinned: (pinned.blocks, pinned.nbytes) == (0, 0)),
    "unpin": Call(lambda cache: cache.unpin(WANTED), lambda count: count == 0),
    "end_session": Call(lambda cache: cache.end_session(SPEC.namespace, "s"), lambda count: count == 0),
    "pause_session": Call(lambda cache: cache.pause_session(SPEC.namespace, "s", 1), lambda count: count == 0),
    "delete": Call(lambda cache: cache.delete(WANTED), lambda count: count == 0),
    "stats": Call(lambda cache: cache.stats(), lambda stats: stats == {}),
    "clear": Call(lambda cache: cache.clear(SPEC.namespace), lambda count: count == 0, 0.2),
    "flush": Call(lambda cache: cache.flush(), lambda nothing: nothing is None, 0.2),
}


def connect(url: str, *, timeout_s: float = 0.2, extra_s: float = EXTRA_S) -> FailOpenCache:
    cache = tierkv.connect(url, fail_open=True, timeout_s=timeout_s, extra_s=extra_s)
    assert isinstance(cache, FailOpenCache)
    return cache


@contextmanager
def within(bound_s: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < bound_s + SLACK_S


def every_call_comes_to_nothing(cache: FailOpenCache) -> None:
    for name, call in CALLS.items():
        with within(call.wait_s + EXTRA_S):
            result = call.make(cache)
        assert call.nothing(result) or name == "stats", (name, result)


@pytest.fixture
def own() -> Iterator[Daemon]:
    """A daemon to be killed."""
    with running() as daemon:
        yield daemon


@contextmanager
def stopped(daemon: Daemon) -> Iterator[None]:
    daemon.send(signal.SIGSTOP)
    try:
        yield
    finally:
        daemon.send(signal.SIGCONT)


@pytest.mark.parametrize("name", [*IMPOSTORS, *OTHERS])
def test_at_an_address_where_no_daemon_works(name: str) -> None:
    with at_an_address(name) as url:
        with within(EXTRA_S), connect(url) as cache:
            pass
        for _ in range(2):  # the second time with the breaker open, where it opens
            with connect(url) as cache:
                every_call_comes_to_nothing(cache)
                assert cache.health().misses >= len(CALLS) - 3


@pytest.mark.parametrize("name", ["silent", "slow head", "slow body", "slow problem", "full queue", "full TCP queue"])
@pytest.mark.parametrize("call", ["acquire", "read_into", "reserve", "lookup", "where"])
def test_the_first_call_keeps_its_bound_too(name: str, call: str) -> None:
    with at_an_address(name) as url, connect(url, timeout_s=5) as cache, within(CALLS[call].wait_s + EXTRA_S):
        assert CALLS[call].nothing(CALLS[call].make(cache))


def test_a_daemon_that_refuses_is_asked_again_and_one_that_does_not_work_is_not() -> None:
    for name, state in (
        ("disk full", "closed"),
        ("everything leased", "closed"),
        ("web page", "open"),
        ("rude", "open"),
    ):
        patient = PATIENCE_S if state == "closed" else EXTRA_S  # or a busy machine's slow answers are failures, too
        with at_an_address(name) as url, connect(url, timeout_s=patient, extra_s=patient) as cache:
            for _ in range(10):
                cache.lookup(WANTED)
            assert cache.health().state == state, name
            assert (cache.health().short_cut > 0) == (state == "open"), name


def at_work(daemon: Daemon, cache: FailOpenCache) -> None:
    """Store the wanted blocks and read them once; on a busy machine that may take a try or two."""
    cache.register(SPEC)
    with daemon.connect() as plain:
        store(plain, WANTED)
    eventually(lambda: read_back(cache, WANTED) == 4)


@pytest.mark.parametrize("tcp", [False, True])
def test_a_daemon_stopped_and_continued(daemon: Daemon, tcp: bool) -> None:
    with connect(daemon.tcp_url if tcp else daemon.url) as cache:
        at_work(daemon, cache)
        with stopped(daemon):
            every_call_comes_to_nothing_but_direct_reads(cache)
            health = cache.health()
            assert health.state != "closed"
            assert health.open_s > 0
        eventually(lambda: read_back(cache, WANTED) == 4)
        eventually(lambda: cache.lookup(WANTED).blocks == 4 and cache.health().state == "closed")


def every_call_comes_to_nothing_but_direct_reads(cache: FailOpenCache) -> None:
    for name, call in CALLS.items():
        with within(call.wait_s + EXTRA_S):
            result = call.make(cache)
        assert name == "read_into" or call.nothing(result), (name, result)


def test_mapped_blocks_are_read_while_the_daemon_is_stopped(daemon: Daemon) -> None:
    with connect(daemon.url) as cache:
        at_work(daemon, cache)
        with stopped(daemon):
            for _ in range(4):
                cache.lookup(WANTED)
            assert cache.health().state == "open"
            out = bytearray(BLOCK_BYTES)
            for index in range(4):
                with within(EXTRA_S):
                    assert cache.read_into(WANTED, index, memoryview(out))
                assert out == payload(WANTED, index)
            assert not cache.read_into(chain(1, seed=1), 0, memoryview(out))


@pytest.mark.parametrize("tcp", [False, True])
def test_a_daemon_killed_and_started_again(tcp: bool) -> None:
    with running({"warm": {"capacity": "16MiB"}, "port": free_port()}) as daemon:
        cache = connect(daemon.tcp_url if tcp else daemon.url, extra_s=1)
        cache.register(SPEC)
        assert store(cache, WANTED) == 4
        held = cache.acquire(WANTED)
        assert held.hit_blocks == 4
        daemon.kill()
        every_call_comes_to_nothing_but_direct_reads(cache)
        assert bytes(held.view(1)) == payload(WANTED, 1), "verified, and still under the lease's own deadline"
        with within(EXTRA_S):
            held.release()
        daemon.start()
        # It has registered the namespace, and mapped the new memory.
        eventually(lambda: store(cache, WANTED) == 4 or cache.lookup(WANTED).blocks == 4)
        assert read_back(cache, WANTED) == 4
        with within(EXTRA_S):
            cache.close()


def test_leases_of_a_daemon_that_died_meanwhile(own: Daemon) -> None:
    with connect(own.url, extra_s=1) as cache:
        cache.register(SPEC)
        store(cache, chain(2))
        read = cache.acquire(WANTED, compute_s=10)
        write = cache.reserve(WANTED, start=2)
        ticket = cache.prefetch(WANTED)
        assert read.compute is not None
        assert len(write.granted) == 2
        own.kill()
        calls: list[Callable[[], Any]] = [
            ticket.progress,
            lambda: ticket.wait(0),
            ticket.cancel,
            lambda: read.renew(10),
            lambda: read.compute and read.compute.renew(10),
            lambda: read.compute and read.compute.release(),
            lambda: write.write(2, payload(WANTED, 2)),
            lambda: write.renew(10),
            lambda: write.commit([2]),
            write.abort,
            read.release,
        ]
        for call in calls:
            with within(EXTRA_S):
                assert call() in (None, 0, TicketProgress("done", 0, 0, 0, 0))


def test_nobody_there_at_first() -> None:
    with short_directory() as directory, closing(connect(f"unix://{directory}/s")) as cache:
        cache.register(SPEC)
        assert store(cache, WANTED) == 0
        daemon = Daemon(directory)
        try:
            daemon.start()
            eventually(lambda: store(cache, WANTED) == 4 or cache.lookup(WANTED).blocks == 4)
            eventually(lambda: read_back(cache, WANTED) == 4)
        finally:
            daemon.destroy()


def test_a_socket_file_that_is_gone(own: Daemon) -> None:
    with connect(own.url, extra_s=1) as cache:
        cache.register(SPEC)
        store(cache, WANTED)
        own.socket.unlink()
        with within(EXTRA_S):
            assert cache.lookup(WANTED).blocks == 4, "the connection is still there"
        with connect(own.url) as late:
            every_call_comes_to_nothing(late)


def damage(daemon: Daemon, of: Chain, index: int) -> None:
    with daemon.connect() as plain, plain.acquire(of) as read:
        ref = next(ref for ref in read.blocks if ref.index == index)
        path = next(path for path in daemon.shared_files() if path.suffix == f".{ref.tier}")
        with MappedSegment(path) as segment:
            segment.data[ref.offset + 7] ^= 1


@pytest.mark.parametrize("tcp", [False, True])
def test_a_damaged_block_ends_the_hit(daemon: Daemon, tcp: bool) -> None:
    with connect(daemon.tcp_url if tcp else daemon.url, extra_s=2) as cache:
        cache.register(SPEC)
        wanted = chain(6, seed=100 + tcp)
        store(cache, wanted)
        damage(daemon, wanted, 3)
        assert not cache.read_into(wanted, 3, memoryview(bytearray(BLOCK_BYTES)))
        store(cache, wanted)
        damage(daemon, wanted, 3)
        with cache.acquire(wanted) as read:
            assert (read.hit_blocks, read.hit_tokens, read.published_blocks) == (3, 48, 6)
            assert sum(read.tokens_by_tier.values()) == 48
            assert read.missed_tokens == {"corrupt": 48}
            assert [bytes(read.view(ref.index)) for ref in read.blocks] == [payload(wanted, i) for i in range(3)]
            with pytest.raises(InvalidRequest):
                read.view(3)
        assert cache.health().state == "closed"
        eventually(lambda: cache.lookup(wanted).blocks in (3, 6))
        store(cache, wanted)
        assert read_back(cache, wanted) == 6


def test_a_link_that_slows_down_ends_the_hit(daemon: Daemon) -> None:
    extra_s = 2.0  # for a busy machine to get the first blocks; the rest would take minutes
    link = SlowLink(daemon.tcp_port, quick=3 * BLOCK_BYTES)
    wanted = chain(6, seed=2)
    with daemon.connect() as plain:
        store(plain, wanted)
    with closing(link), connect(link.url, extra_s=extra_s) as cache:
        cache.register(SPEC)
        with within(extra_s):
            read = cache.acquire(wanted, wait_s=0)
        assert 1 <= read.hit_blocks <= 3
        assert read.missed_tokens == {"late": (6 - read.hit_blocks) * SPEC.block_tokens}
        for ref in read.blocks:
            assert bytes(read.view(ref.index)) == payload(wanted, ref.index)
        with within(extra_s):
            read.release()


def test_a_lease_that_has_run_out(daemon: Daemon) -> None:
    with connect(daemon.url, extra_s=1) as cache:
        cache.register(SPEC)
        store(cache, WANTED)
        write = cache.reserve(chain(2, seed=3), ttl_s=0.02)
        read = cache.acquire(WANTED, ttl_s=0.02)  # asked for later: when it has run out, so has the other
        assert [grant.index for grant in write.granted] == [0, 1]

        def over() -> bool:
            try:
                read.view(0)
            except LeaseLost:
                return True
            return False

        eventually(over)
        with pytest.raises(LeaseLost):
            read.read_into(0, memoryview(bytearray(BLOCK_BYTES)))
        assert len(write.buffer(0)) == BLOCK_BYTES, "somewhere to write to"
        write.write(1, bytes(BLOCK_BYTES))
        assert write.commit() == 0
        read.release()
        write.abort()
        assert cache.lookup(chain(2, seed=3)).blocks == 0


@pytest.mark.parametrize("there", [True, False])
def test_a_callers_mistakes_are_its_own(daemon: Daemon, there: bool) -> None:
    with connect(daemon.url if there else "unix:///nowhere/s") as cache:
        cache.register(SPEC)
        mistakes: list[Callable[[], Any]] = [
            lambda: cache.acquire(WANTED, wait_s=-1),
            lambda: cache.acquire(WANTED, wait_s=float("nan")),
            lambda: cache.acquire(WANTED, ttl_s=0),
            lambda: cache.acquire(WANTED, compute_s=-1),
            lambda: cache.reserve(WANTED, start=3, stop=2),
            lambda: cache.reserve(WANTED, start=5),
            lambda: cache.read_into(WANTED, 4, memoryview(bytearray(BLOCK_BYTES))),
            lambda: cache.read_into(WANTED, 0, memoryview(bytearray(BLOCK_BYTES)), wait_s=-1),
            lambda: cache.pin(WANTED, 0),
            lambda: cache.prefetch(WANTED, deadline_s=-1),
            lambda: cache.where(WANTED, wait_s=-1),
            lambda: cache.acquire(chain(1, seed=9)).view(0),
            lambda: cache.reserve(chain(1, seed=9)).buffer(1),
            lambda: cache.reserve(chain(1, seed=9)).commit([1]),
        ]
        for mistake in mistakes:
            with pytest.raises(InvalidRequest):
                mistake()
    for extra_s in (0, -1, float("nan")):
        with pytest.raises(InvalidRequest):
            connect("unix:///nowhere/s", extra_s=extra_s)
    with pytest.raises(InvalidRequest):
        connect("ftp://nowhere")


def test_when_it_works_it_is_the_cache(daemon: Daemon) -> None:
    for url in (daemon.url, daemon.tcp_url):
        wanted = chain(6, seed=len(url))
        with connect(url, extra_s=2) as cache:
            assert cache.register(SPEC) == SPEC.namespace
            assert store(cache, wanted) == 6
            assert cache.lookup(wanted).blocks == 6
            with cache.acquire(wanted, max_blocks=5) as read:
                assert (read.hit_blocks, read.hit_tokens, read.published_blocks) == (5, 80, 5)
                assert sum(read.tokens_by_tier.values()) == 80
                out = bytearray(BLOCK_BYTES)
                read.read_into(4, memoryview(out))
                assert out == payload(wanted, 4)
                read.renew(10)
            assert cache.prefetch(wanted).wait(PATIENCE_S).state == "done"
            assert cache.pin(wanted, 60).blocks == cache.unpin(wanted) == 6
            assert cache.delete(wanted) == 1
            assert cache.stats()["tiers"]
            health = cache.health()
            assert (health.state, health.failures, health.misses, health.short_cut) == ("closed", 0, 0, 0)


def test_many_threads_at_once(daemon: Daemon) -> None:
    with connect(daemon.url) as cache, ThreadPoolExecutor(32) as threads:
        cache.register(SPEC)
        together = threading.Barrier(32)

        def work(_: int) -> None:
            together.wait(PATIENCE_S)
            for _ in range(3):
                with within(WAIT_S + EXTRA_S):
                    assert cache.acquire(WANTED, wait_s=WAIT_S).hit_blocks == 0

        with stopped(daemon):
            list(threads.map(work, range(32)))
            assert cache.health().failures < 40, "after the first round nobody asks but probes"
        eventually(lambda: cache.stats() != {})
