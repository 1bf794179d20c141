"""A daemon's life with real signals: what drains, what survives, what is left, what clients see."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.process import free_port
from tests.service.daemon import (
    BLOCK_BYTES,
    SPEC,
    TIERS,
    Daemon,
    Raw,
    chain,
    eventually,
    payload,
    read_back,
    running,
    short_directory,
    store,
)
from tierkv.errors import LeaseLost, NotFound, TierKVError, Unavailable
from tierkv.storage.tier import checksum
from tierkv.wire import FRAME_TYPE, Frame, pack_frame


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running() as daemon:
        yield daemon


def nothing_left(daemon: Daemon) -> bool:
    return not daemon.shared_files() and not daemon.socket.exists()


def test_sigterm_keeps_everything_and_leaves_nothing(daemon: Daemon) -> None:
    with daemon.connect() as cache, daemon.connect("other") as other:
        assert store(cache, chain(40)) == 40
        assert store(other, chain(3)) == 3
    assert daemon.shared_files()
    assert daemon.stop() == 0
    assert nothing_left(daemon)
    assert "Traceback" not in daemon.log
    daemon.start()
    with daemon.connect() as cache, daemon.connect("other") as other:
        assert set(cache.lookup(chain(40)).tiers) == {"cold"}
        assert read_back(cache, chain(40)) == 40
        assert read_back(other, chain(3)) == 3
        assert other.lookup(chain(40)).blocks == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_either_signal_ends_it(daemon: Daemon, number: signal.Signals) -> None:
    daemon.send(number)
    assert daemon.wait() == 0
    assert nothing_left(daemon)


def test_requests_under_way_are_finished_first(daemon: Daemon) -> None:
    """A body that is still arriving when the signal comes is published, flushed and found after the restart."""
    with daemon.connect(tcp=True) as cache:
        wanted = chain(1)
        write = cache.reserve(wanted)
        data = payload(wanted, 0)
        body = pack_frame(Frame(0, 0, len(data), checksum(data))) + data
        head = f"POST /v1/{SPEC.namespace}/blocks:put?lease={write.id} HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: {FRAME_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", daemon.tcp_port), 30) as connection:
            connection.sendall(head.encode() + body[:1000])
            cache.stats()  # answered after the daemon has seen the first part
            daemon.send(signal.SIGTERM)
            eventually(lambda: "draining" in daemon.log)
            status, problem = Raw(daemon.tcp_port).json("POST", f"/v1/leases/{write.id}/renew", {"ttl_s": 1})
            assert (status, problem["type"]) == (503, "urn:tierkv:problem:unavailable")
            assert "POST /v1/leases/{id}/renew" in daemon.log
            assert write.id not in daemon.log
            connection.sendall(body[1000:])
            assert b" 200 " in connection.makefile("rb").readline()
    assert daemon.wait() == 0
    assert nothing_left(daemon)
    daemon.start()
    with daemon.connect() as cache:
        assert read_back(cache, wanted) == 1


def test_a_client_that_keeps_calling_sees_typed_errors_only(daemon: Daemon) -> None:
    daemon.stop()
    daemon.configure({**TIERS, "port": free_port()})
    daemon.start()
    stop = threading.Event()
    failures: list[BaseException] = []
    rounds = [0]

    def work(seed: int) -> None:
        with daemon.connect(tcp=seed % 2 == 0) as cache:
            while not stop.is_set():
                try:
                    store(cache, chain(4, seed=seed))
                    read_back(cache, chain(4, seed=seed))
                    rounds[0] += 1
                except (Unavailable, LeaseLost, NotFound):
                    stop.wait(0.05)  # leave the processor to the daemon that is starting
                except BaseException as error:
                    failures.append(error)
                    return

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for end in (daemon.stop, daemon.kill, daemon.stop):
        before = rounds[0]
        eventually(lambda before=before: rounds[0] > before + 8 or bool(failures))
        end()
        daemon.start()
    before = rounds[0]
    eventually(lambda: rounds[0] > before + 8 or bool(failures))
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert "Traceback" not in daemon.log


def test_sigkill_then_restart(daemon: Daemon) -> None:
    """Leftovers are reclaimed; an old client maps and registers anew; its old leases are lost and read nothing new."""
    old, new = chain(4, seed=1), chain(4, seed=2)
    with daemon.connect() as cache:
        store(cache, old)
        cache.flush()
        read = cache.acquire(old)
        write = cache.reserve(new)
        seen = bytes(read.view(0))
        daemon.kill()
        assert not nothing_left(daemon)
        with pytest.raises(Unavailable):
            cache.lookup(old)
        daemon.start()
        assert len(daemon.shared_files()) == 1
        # The memory of the dead daemon stays mapped under the old leases, apart from the new daemon's.
        write.buffer(0)[:] = payload(new, 0)
        assert bytes(read.view(0)) == seen == payload(old, 0)
        with pytest.raises(LeaseLost):
            write.commit([0])
        with pytest.raises(LeaseLost):
            read.renew(60)
        read.release()
        write.abort()
        assert cache.lookup(new).blocks == 0
        assert read_back(cache, old) == 4
        assert store(cache, new) == 4
        assert read_back(cache, new) == 4
        assert cache.stats()["counters"]["corrupt_blocks"] == {}


def test_tickets_of_a_dead_daemon_are_unknown(daemon: Daemon) -> None:
    with daemon.connect() as cache:
        store(cache, chain(1))
        ticket = cache.prefetch(chain(1))
        daemon.kill()
        daemon.start()
        with pytest.raises(NotFound):
            ticket.progress()


def test_a_lease_asked_of_one_daemon_and_given_by_the_next(daemon: Daemon) -> None:
    """The client has mapped the first daemon's memory when the second answers it: offsets must not be mixed up."""
    with daemon.connect() as cache:
        store(cache, chain(8))
        assert read_back(cache, chain(8)) == 8  # attached
        for end in (daemon.stop, daemon.kill):
            end()
            daemon.start()
            fresh = chain(8, seed=5)
            with cache.reserve(fresh) as write:  # the first call after the restart
                for grant in write.granted:
                    write.buffer(grant.index)[:] = payload(fresh, grant.index)
                assert write.commit() == len(write.granted)
            assert read_back(cache, fresh) == 8
            assert read_back(cache, chain(8)) == 8
            assert cache.stats()["leases"] == {"read": 0, "write": 0, "compute": 0, "pin": 0}
            cache.delete(fresh)


def test_daemons_without_a_state_directory_clean_up_after_killed_ones() -> None:
    settings = {"warm": {"capacity": "1MiB"}, "state_dir": None}
    with running(settings) as daemon:
        assert daemon.process is not None
        pattern = f"tierkv-{os.getuid()}-{daemon.process.pid}-*"
        assert len(list(Path("/dev/shm").glob(pattern))) == 1
        daemon.kill()
        assert len(list(Path("/dev/shm").glob(pattern))) == 1
        daemon.start()
        assert not list(Path("/dev/shm").glob(pattern))
        assert daemon.stop() == 0


def test_closing_a_client_ends_its_leases(daemon: Daemon) -> None:
    with daemon.connect() as watcher:
        store(watcher, chain(4))
        cache = daemon.connect()
        read, write = cache.acquire(chain(4)), cache.reserve(chain(8))
        assert watcher.stats()["leases"] == {"read": 1, "write": 1, "compute": 0, "pin": 0}
        view = read.view(0)
        cache.close()
        assert watcher.stats()["leases"] == {"read": 0, "write": 0, "compute": 0, "pin": 0}
        assert bytes(view) == payload(chain(4), 0)
        with pytest.raises(LeaseLost):
            read.view(0)
        with pytest.raises(LeaseLost):
            write.commit()
        with pytest.raises(Unavailable, match="closed"):
            cache.lookup(chain(4))
        cache.close()


def test_a_client_that_dies_loses_its_leases_by_deadline(daemon: Daemon) -> None:
    with daemon.connect() as cache:
        store(cache, chain(2))
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException), daemon.connect() as own:
                own.acquire(chain(2), ttl_s=0.2)
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        eventually(lambda: cache.stats()["leases"]["read"] == 0)
        assert cache.stats()["counters"]["expired_leases"] == {"read": 1}


@pytest.mark.parametrize("tcp", [False, True])
def test_a_forked_client_works_and_leaves_its_parents_alone(daemon: Daemon, tcp: bool) -> None:
    with daemon.connect(tcp=tcp) as cache:
        store(cache, chain(4))
        read = cache.acquire(chain(4))
        children = []
        for seed in range(3):
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    assert read_back(cache, chain(4)) == 4
                    store(cache, chain(4, seed=10 + seed))
                    cache.close()
                    os._exit(0)
                os._exit(1)
            children.append(child)
            assert read_back(cache, chain(4)) == 4
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
        assert [cache.lookup(chain(4, seed=10 + seed)).blocks for seed in range(3)] == [4, 4, 4]
        assert bytes(read.view(0)) == payload(chain(4), 0)
        read.renew(10)  # a child that closes does not end its parent's leases
        assert cache.stats()["leases"]["read"] == 1


@pytest.mark.parametrize("tcp", [False, True])
def test_threads_share_a_client(daemon: Daemon, tcp: bool) -> None:
    failures: list[BaseException] = []
    with daemon.connect(tcp=tcp) as cache:

        def work(seed: int) -> None:
            try:
                for turn in range(5):
                    mine = chain(3, seed=100 * seed + turn)
                    assert store(cache, mine) == 3
                    assert read_back(cache, mine) == 3
                    cache.lookup(mine)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert cache.stats()["leases"] == {"read": 0, "write": 0, "compute": 0, "pin": 0}


def test_a_frozen_daemon_holds_nobody_longer_than_the_timeout(daemon: Daemon) -> None:
    with daemon.connect(timeout_s=0.3) as cache, daemon.connect(tcp=True, timeout_s=0.3) as remote:
        store(cache, chain(2))
        read, write = remote.acquire(chain(2)), remote.reserve(chain(3))
        write.buffer(2)[:] = payload(chain(3), 2)
        daemon.send(signal.SIGSTOP)
        try:
            for call in (
                lambda: cache.lookup(chain(2)),
                lambda: cache.acquire(chain(2), wait_s=0.1),
                lambda: remote.reserve(chain(4), wait_s=0),
                lambda: read.view(0),
                lambda: write.commit(),
                lambda: daemon.connect(timeout_s=0.3),
            ):
                begun = time.monotonic()
                with pytest.raises(Unavailable, match="did not answer in time"):
                    call()
                assert time.monotonic() - begun < 3, "ten times the bound"
            begun = time.monotonic()
            read.release()
            write.abort()
            assert time.monotonic() - begun < 5
        finally:
            daemon.send(signal.SIGCONT)
        assert read_back(cache, chain(2)) == 2
        assert read_back(remote, chain(2)) == 2


def test_without_torch_the_daemon_runs_and_says_what_is_off() -> None:
    with running(without="torch") as daemon:
        assert "hot off" in daemon.announced[1]
        with daemon.connect() as cache:
            store(cache, chain(2))
            assert read_back(cache, chain(2)) == 2
            assert "hot" not in cache.stats()["tiers"]


def test_without_torch_a_hot_tier_lies_in_memory() -> None:
    with running({**TIERS, "hot": {"capacity": "4MiB", "device": "cpu"}}, without="torch") as daemon:
        assert "hot on cpu" in daemon.announced[1]
        with daemon.connect() as cache:
            store(cache, chain(2))
            with cache.acquire(chain(2)) as read:
                assert {ref.tier for ref in read.blocks} == {"hot"}


def test_without_cupy_a_hot_tier_on_a_gpu_is_an_error() -> None:
    with short_directory() as directory:
        hot = {"capacity": "4MiB", "device": "cuda:0"}
        daemon = Daemon(directory, {**TIERS, "hot": hot}, without="cupy")
        with pytest.raises(AssertionError, match=r"error: 'cuda:0' needs CuPy.*\s+remedy: pip install"):
            daemon.start()
        assert nothing_left(daemon)


def test_a_batch_over_the_limit_of_a_body(daemon: Daemon) -> None:
    daemon.stop()
    daemon.configure({**TIERS, "limits": {"body": "1MiB"}})
    daemon.start()
    with daemon.connect(tcp=True) as cache:
        wanted = chain((1 << 20) // BLOCK_BYTES + 1)
        with cache.reserve(wanted) as write:
            for grant in write.granted:
                write.buffer(grant.index)[:] = payload(wanted, grant.index)
            with pytest.raises(TierKVError, match="send fewer blocks at once") as caught:
                write.commit()
            assert type(caught.value).__name__ == "BlockTooLarge"
            half = [grant.index for grant in write.granted][: len(wanted) // 2]
            assert write.commit(half) == len(half)
        assert read_back(cache, wanted) == len(half)


def test_memory_of_a_stopped_or_replaced_daemon_is_not_read(daemon: Daemon) -> None:
    block = memoryview(bytearray(BLOCK_BYTES))
    with daemon.connect() as cache:
        cache.register(SPEC)
        store(cache, chain(2))
        assert cache.read_into(chain(2), 1, block)
        daemon.stop()
        with pytest.raises(Unavailable):
            cache.read_into(chain(2), 1, block)
        daemon.start()
        assert not cache.read_into(chain(2), 1, block), "the new daemon has it on disk only"
        assert cache.read_into(chain(2), 1, block, wait_s=30.0)
        daemon.kill()
        daemon.start()
        store(cache, chain(2))
        assert cache.read_into(chain(2), 1, block, wait_s=30.0)
