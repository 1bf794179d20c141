"""Too much at once, and clients that get nowhere: refused or cut, within bounds of memory, and over by itself."""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.daemon import (
    BLOCK_BYTES,
    PATIENCE_S,
    SPEC,
    TIERS,
    Daemon,
    PeakMemory,
    Raw,
    chain,
    eventually,
    payload,
    read_back,
    running,
    short_directory,
    store,
)
from tests.service.test_bad_requests import FRAMES, frame
from tierkv.cache import Cache, Chain
from tierkv.config import parse_config
from tierkv.errors import ConfigError, LimitExceeded, Overloaded, Unavailable

NS = f"/v1/{SPEC.namespace}"
IDLE_S = 0.4
MIB = 1 << 20
LIMITS = {
    "idle": f"{int(IDLE_S * 1000)}ms",
    "connections": 16,
    "requests": 4,
    "leases": 3,
    "body": "4MiB",
    "in_flight": "4MiB",
}


@pytest.fixture(scope="module")
def strict() -> Iterator[Daemon]:
    with running({**TIERS, "limits": LIMITS}) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log


@pytest.fixture
def raw(strict: Daemon) -> Raw:
    return Raw(strict.tcp_port)


def counted(raw: Raw, kind: str) -> dict[str, int]:
    counts: dict[str, int] = raw.request("GET", "/v1/stats")[1]["http"][kind]
    return counts


def connect(daemon: Daemon) -> socket.socket:
    return socket.create_connection(("127.0.0.1", daemon.tcp_port), PATIENCE_S)


def ended(connection: socket.socket) -> bytes:
    """What comes until the daemon ends a connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(1 << 16):
            received += chunk
    return received


class Trickle:
    """Sends a byte at a time, far more often than `limits.idle`, until the other side has had enough."""

    def __init__(self, connection: socket.socket, byte: bytes) -> None:
        self._connection, self._byte = connection, byte
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send)

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            while not self._stop.wait(IDLE_S / 20):
                self._connection.sendall(self._byte)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize(
    ("begun", "used"),
    [
        (b"", False),
        (b"POST /v1/flush HTTP/1.1\r\n", False),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", False),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", True),
    ],
)
def test_the_head_of_a_request_that_never_ends(strict: Daemon, raw: Raw, begun: bytes, used: bool) -> None:
    before = counted(raw, "cut").get("head", 0)
    with connect(strict) as connection:
        if used:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in connection.recv(1000)
        connection.sendall(begun)
        with Trickle(connection, b"a") if begun else contextlib.nullcontext():
            assert ended(connection) == b""
    assert counted(raw, "cut")["head"] == before + 1


@pytest.mark.parametrize(("host", "status"), [(b"localhost", b" 200 "), (b"refused.example", b" 400 ")])
def test_a_connection_that_is_kept_is_not_cut_for_being_idle(strict: Daemon, host: bytes, status: bytes) -> None:
    with connect(strict) as connection:
        for _ in range(2):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
            assert status in connection.recv(1000)
            with connect(strict) as silent:  # is cut meanwhile
                assert ended(silent) == b""


def put_head(lease: str, length: int) -> bytes:
    head = f"POST {NS}/blocks:put?lease={lease} HTTP/1.1\r\nHost: localhost\r\n"
    return (head + f"Content-Type: {FRAMES['Content-Type']}\r\nContent-Length: {length}\r\n\r\n").encode()


def reserve(raw: Raw, of: Chain) -> str:
    status, answer = raw.json("POST", f"{NS}/reserve", {"hashes": [item.hex() for item in of.hashes]})
    assert status == 200, answer
    return str(answer["lease"])


@pytest.fixture
def cache(strict: Daemon) -> Iterator[Cache]:
    with strict.connect(tcp=True) as cache:
        yield cache
        eventually(lambda: cache.stats()["http"]["in_flight_bytes"] == 0)


def test_a_body_that_does_not_get_on(strict: Daemon, raw: Raw, cache: Cache) -> None:
    before = counted(raw, "cut").get("body", 0)
    late = chain(2, seed=1)
    lease = reserve(raw, late)
    body = frame(0, payload(late, 0)) + frame(1, payload(late, 1))
    with connect(strict) as connection:
        connection.sendall(put_head(lease, len(body)) + body[:100])
        with Trickle(connection, b"\0"):
            assert ended(connection) == b""
    assert counted(raw, "cut")["body"] == before + 1
    assert cache.lookup(late).blocks == 0
    assert raw.request("POST", f"{NS}/blocks:put?lease={lease}", body, FRAMES)[:2] == (200, {"accepted": 2})
    assert raw.json("POST", f"/v1/leases/{lease}/abort", {})[0] in (200, 410)


def test_a_body_that_gets_on_slowly_arrives() -> None:
    """It takes longer than `limits.idle`, but it gets on."""
    with running({**TIERS, "limits": {"idle": "1s"}}) as daemon:
        raw, slow = Raw(daemon.tcp_port), chain(256, seed=2)
        with daemon.connect(tcp=True):
            lease = reserve(raw, slow)
        body = b"".join(frame(index, payload(slow, index)) for index in range(256))
        pause = threading.Event()
        with connect(daemon) as connection:
            connection.sendall(put_head(lease, len(body)))
            for start in range(0, len(body), len(body) // 8):
                pause.wait(0.25)
                connection.sendall(body[start : start + len(body) // 8])
            assert connection.recv(12) == b"HTTP/1.1 200"
        assert counted(raw, "cut") == {}


def test_who_waits_for_the_daemon_is_not_cut(strict: Daemon, raw: Raw, cache: Cache) -> None:
    """An acquire that waits for a neighbour's prefill, four times as long as `limits.idle`."""
    awaited = chain(2, seed=3)
    with cache.acquire(awaited, wait_s=0, compute_s=PATIENCE_S) as mine:
        assert mine.compute is not None
        hashes = [item.hex() for item in awaited.hashes]
        message = {"hashes": hashes, "wait_s": 4 * IDLE_S, "compute_s": 1.0}
        status, answer = raw.json("POST", f"{NS}/acquire", message)
        assert (status, answer["computed_elsewhere"]) == (200, True)
        assert answer["waited_s"] > 3 * IDLE_S
        mine.compute.release()


def test_a_reader_that_takes_nothing(strict: Daemon, raw: Raw, cache: Cache) -> None:
    many = chain(400, seed=4)
    assert store(cache, many) == 400
    before = counted(raw, "cut").get("answer", 0)
    with cache.acquire(many) as read, socket.socket(socket.AF_UNIX) as connection:  # its buffers are small
        connection.settimeout(PATIENCE_S)
        connection.connect(str(strict.socket))
        ask = json.dumps({"lease": read.id}).encode()
        head = f"POST {NS}/blocks:get HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(ask)}\r\n\r\n".encode() + ask)
        eventually(lambda: counted(raw, "cut").get("answer", 0) == before + 1)
        assert len(ended(connection)) < 400 * BLOCK_BYTES
        assert bytes(read.view(7)) == payload(many, 7)


def refused(answer: tuple[int, dict[str, Any], http.client.HTTPResponse], status: int, slug: str) -> None:
    assert (answer[0], answer[1].get("type")) == (status, f"urn:tierkv:problem:{slug}"), answer
    assert answer[1]["remedy"] or slug == "overloaded"
    assert int(answer[2].headers["Retry-After"]) >= 1


def test_one_connection_too_many(raw: Raw, strict: Daemon) -> None:
    with contextlib.ExitStack() as stack:

        def served() -> bool:
            connection = stack.enter_context(contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)))
            connection.request("GET", "/healthz")
            response = connection.getresponse()
            answer = (response.status, json.loads(response.read()), response)
            if response.status == 200:
                return True
            refused(answer, 503, "overloaded")
            return False

        port = strict.tcp_port
        kept = 0
        while served():
            kept += 1
        assert 1 <= kept <= LIMITS["connections"]  # type: ignore[operator]
        with pytest.raises(Overloaded):
            strict.connect()
    eventually(lambda: raw.request("GET", "/healthz")[0] == 200)
    assert counted(raw, "refused")["connections"] >= 2


def waiting(daemon: Daemon, number: int) -> socket.socket:
    """A request that waits until its connection is closed."""
    message = json.dumps({"hashes": [item.hex() for item in chain(2, seed=5).hashes], "wait_s": 60, "compute_s": 60})
    head = (
        f"POST {NS}/acquire HTTP/1.1\r\nHost: localhost\r\nTierkv-Tenant: crowd\r\nContent-Type: application/json\r\n"
    )
    connection = connect(daemon)
    connection.sendall(f"{head}Content-Length: {len(message)}\r\n\r\n{message}".encode())
    return connection


def test_one_request_too_many(strict: Daemon, raw: Raw, cache: Cache) -> None:
    with strict.connect("crowd", tcp=True) as crowd, contextlib.ExitStack() as stack:
        computing = stack.enter_context(crowd.acquire(chain(2, seed=5), wait_s=0, compute_s=PATIENCE_S))
        for number in range(4):
            stack.enter_context(waiting(strict, number))

        def busy() -> int:
            text = raw.request("GET", "/metrics")[1]["raw"].decode()
            return int(float(text.partition("\ntierkv_requests ")[2].partition("\n")[0]))

        eventually(lambda: busy() == 4)
        refused(raw.request("GET", "/v1/namespaces"), 503, "overloaded")
        with pytest.raises(Overloaded, match=r"limits\.requests"):
            cache.lookup(chain(2))
        for path in ("/healthz", "/readyz", "/metrics"):
            assert raw.request("GET", path)[0] == 200
        computing.release()  # makes the load less: is served
    eventually(lambda: raw.request("GET", "/v1/namespaces")[0] == 200)
    assert counted(raw, "refused")["requests"] >= 2


def test_too_many_bytes_in_flight(strict: Daemon, raw: Raw, cache: Cache) -> None:
    """Bodies count by their announced size from their first byte on, sent ones as well as received ones."""
    large, small = chain(300, seed=6), chain(2, seed=7)
    assert store(cache, large) == 300
    store(cache, small)
    with cache.acquire(large) as read, cache.acquire(small) as little:
        lease = reserve(raw, chain(2, seed=8))
        with connect(strict) as first:
            first.sendall(put_head(lease, 3 * MIB))
            eventually(lambda: raw.request("GET", "/v1/stats")[1]["http"]["in_flight_bytes"] == 3 * MIB)
            with Trickle(first, b"T" * 4096), pytest.raises(Overloaded, match=r"limits\.in_flight"):
                read.view(0)
            second = raw.request("POST", f"{NS}/blocks:put?lease={lease}", bytes(2 * MIB), FRAMES)
            refused(second, 503, "overloaded")
            assert bytes(little.view(1)) == payload(small, 1)
        eventually(lambda: raw.request("GET", "/v1/stats")[1]["http"]["in_flight_bytes"] == 0)
        assert bytes(read.view(1)) == payload(large, 1)
    raw.json("POST", f"/v1/leases/{lease}/abort", {})
    assert counted(raw, "refused")["in_flight"] >= 2
    status, problem, _ = raw.request("POST", f"{NS}/blocks:put?lease=x", bytes(5 * MIB), FRAMES)
    assert (status, problem["type"]) == (413, "urn:tierkv:problem:block-too-large")


def test_one_lease_too_many(strict: Daemon, raw: Raw, cache: Cache) -> None:
    store(cache, chain(2, seed=9))
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(cache.acquire(chain(2, seed=9)))
        asks: list[Callable[[], Any]] = [
            lambda: cache.acquire(chain(2, seed=9)),
            lambda: cache.reserve(chain(2, seed=10)),
            lambda: cache.pin(chain(2, seed=9), 1.0),
        ]
        for ask in asks:
            with pytest.raises(LimitExceeded, match=r"holds 3 leases.*limits\.leases"):
                ask()
        hashes = json.dumps({"hashes": [item.hex() for item in chain(2, seed=9).hashes]}).encode()
        refused(
            raw.request("POST", f"{NS}/acquire", hashes, {"Content-Type": "application/json"}), 429, "limit-exceeded"
        )
        with strict.connect("neighbour") as neighbour:
            assert store(neighbour, chain(2, seed=9)) == 2
    for ask in asks:
        ended_at_once = ask()
        if hasattr(ended_at_once, "__exit__"):
            ended_at_once.__exit__(None, None, None)
    cache.unpin(chain(2, seed=9))


def test_leases_that_expire_count_no_more(strict: Daemon, cache: Cache) -> None:
    store(cache, chain(2, seed=9))
    for _ in range(3):
        cache.acquire(chain(2, seed=9), ttl_s=0.1)
    eventually(lambda: cache.stats()["leases"]["read"] == 0)
    assert read_back(cache, chain(2, seed=9)) == 2


def test_200_clients_that_get_nowhere() -> None:
    """Half of them send bodies that never end, half do not read what they asked for."""
    crowd = 200
    settings = {"warm": {"capacity": "64MiB"}, "limits": {"in_flight": "32MiB", "body": "16MiB", "idle": "60s"}}
    with running({**TIERS, **settings, "cold": {"capacity": "128MiB"}}) as daemon, contextlib.ExitStack() as stack:
        raw, wanted = Raw(daemon.tcp_port), chain(512, seed=11)
        cache = stack.enter_context(daemon.connect(tcp=True))
        assert store(cache, wanted) == 512
        read = stack.enter_context(cache.acquire(wanted))
        lease = reserve(raw, chain(512, seed=12))
        assert daemon.process is not None
        memory = PeakMemory(daemon.process.pid)
        ask = json.dumps({"lease": read.id}).encode()
        get = f"POST {NS}/blocks:get HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        get += f"Content-Length: {len(ask)}\r\n\r\n"
        clients = []
        for number in range(crowd):
            connection = stack.enter_context(connect(daemon))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            if number % 2:
                connection.sendall(get.encode() + ask)
            else:
                connection.sendall(put_head(lease, 4 * MIB) + frame(0, bytes(BLOCK_BYTES))[:-1])
            clients.append(connection)
        eventually(lambda: counted(raw, "refused").get("in_flight", 0) >= crowd - 12)
        http = raw.request("GET", "/v1/stats")[1]["http"]
        assert http["connections"] > crowd
        assert http["in_flight_bytes"] <= 32 * MIB
        growth = memory.growth()
        print(f"{crowd} clients: {growth / MIB:.1f} MiB more, {http['in_flight_bytes'] / MIB:.0f} MiB in flight")
        assert growth < 100 * MIB
        for connection in clients:
            connection.close()
        eventually(lambda: raw.request("GET", "/v1/stats")[1]["http"]["in_flight_bytes"] == 0)
        assert bytes(read.view(3)) == payload(wanted, 3)


def test_200_clients_at_once_are_served_or_refused_and_all_is_well_again() -> None:
    with running({**TIERS, "limits": {"requests": 8, "connections": 64}}) as daemon:
        outcomes: list[str] = []

        def work(seed: int) -> None:
            try:
                with daemon.connect(f"tenant-{seed % 7}", tcp=seed % 2 == 0, timeout_s=PATIENCE_S) as cache:
                    store(cache, chain(4, seed=seed % 20))
                    outcomes.append("served" if read_back(cache, chain(4, seed=seed % 20)) else "missed")
            except Overloaded:
                outcomes.append("overloaded")
            except Unavailable as error:
                outcomes.append(str(error))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(outcomes) == 200
        assert set(outcomes) <= {"served", "missed", "overloaded"}, set(outcomes)
        assert "served" in outcomes
        with daemon.connect() as cache:
            store(cache, chain(8, seed=99))
            assert read_back(cache, chain(8, seed=99)) == 8
            assert cache.stats()["http"]["requests"] == 1
        assert "Traceback" not in daemon.log


def test_it_is_not_ready_while_it_starts() -> None:
    with short_directory() as directory:
        daemon = Daemon(directory, {**TIERS, "warm": {"capacity": "512MiB"}, "cold": {"capacity": "1GiB"}})
        seen: list[tuple[int, Any]] = []

        def ask() -> None:
            deadline = time.monotonic() + PATIENCE_S
            while (not seen or seen[-1][0] != 200) and time.monotonic() < deadline:
                with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
                    connection.settimeout(PATIENCE_S)
                    connection.connect(str(daemon.socket))
                    connection.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    head, _, body = ended(connection).partition(b"\r\n\r\n")
                    seen.append((int(head.split()[1]), json.loads(body)))

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            daemon.start()  # here: it ends with the thread that starts it
            asking.join()
            assert seen[-1] == (200, {"ready": True, "reasons": []})
            assert {status for status, _ in seen[:-1]} == {503}
            assert "the daemon is starting" in {answer["detail"] for _, answer in seen[:-1]}
        finally:
            daemon.destroy()
            asking.join()


def test_it_is_not_ready_while_the_disk_is_full(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(tmp_path)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        cold = {"capacity": "64MiB", "segment": "2MiB", "path": str(tmp_path / "cold")}
        with running({**TIERS, "cold": cold}) as daemon, daemon.connect() as cache:
            raw, filler = Raw(daemon.tcp_port), tmp_path / "filler"
            assert raw.request("GET", "/readyz")[:2] == (200, {"ready": True, "reasons": []})
            with filler.open("wb") as file:
                room = os.statvfs(tmp_path)
                os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)
            store(cache, chain(4))
            cache.flush()
            reasons = ["the cold tier refuses blocks: storage-full"]
            assert raw.request("GET", "/readyz")[:2] == (503, {"ready": False, "reasons": reasons})
            assert raw.request("GET", "/healthz")[0] == 200
            assert read_back(cache, chain(4)) == 4
            filler.unlink()
            cache.flush()
            assert raw.request("GET", "/readyz")[0] == 200
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"body": "2GiB"}, "body is more than in_flight"),
        ({"in_flight": "2MiB", "body": "3MiB"}, "body is more than in_flight"),
        ({"connections": 0}, "limits.connections"),
        ({"requests": 0}, "limits.requests"),
        ({"leases": 0}, "limits.leases"),
        ({"idle": 0}, "limits.idle"),
        ({"idle": "1ms"}, "limits.idle"),
    ],
)
def test_limits_that_cannot_be(limits: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"limits": limits})
    assert words in str(caught.value)


def test_more_connections_than_files() -> None:
    import resource

    from tierkv.service.daemon import _allow_files

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        _allow_files(1024)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 1024
        if hard != resource.RLIM_INFINITY:
            with pytest.raises(ConfigError, match=r"limits\.connections.*LimitNOFILE"):
                _allow_files(hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
