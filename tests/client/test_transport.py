"""How the client meets servers that hang up, stall, cut short or talk nonsense. The servers are plain sockets."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest

import tierkv
from tests.service.daemon import PATIENCE_S, short_directory
from tierkv.client import transport as module
from tierkv.client.transport import Transport
from tierkv.errors import (
    BlockTooLarge,
    ChecksumMismatch,
    CorruptBlock,
    InvalidRequest,
    StorageFull,
    TierKVError,
    Unavailable,
)
from tierkv.wire import FRAME_TYPE, problem_from_error

Behaviour = Callable[["Conversation"], None]


class Conversation:
    """One accepted connection."""

    def __init__(self, sock: socket.socket, served: list[str]) -> None:
        self.sock = sock
        self.reader = sock.makefile("rb")
        self._served = served

    def request(self) -> str:
        """Read a whole request, note it, and return its first line without the version; empty at the end."""
        line = self.reader.readline().decode().rpartition(" ")[0]
        length = 0
        while (header := self.reader.readline().decode().strip()) != "":
            name, _, value = header.partition(": ")
            length = int(value) if name == "Content-Length" else length
        self.reader.read(length)
        if line:
            self._served.append(line)
        return line

    def answer(
        self, body: bytes, *, status: int = 200, kind: str = "application/msgpack", announce: int | None = None
    ) -> None:
        length = len(body) if announce is None else announce
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
        self.sock.sendall(head.encode() + body)


class Server:
    """Gives each connection the next behaviour, the last one to all that follow."""

    def __init__(self, path: Path, behaviours: list[Behaviour]) -> None:
        self.url = f"unix://{path}"
        self.served: list[str] = []
        self.connections = 0
        self._behaviours = behaviours
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._threads: list[threading.Thread] = []
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                behaviour = self._behaviours[min(self.connections, len(self._behaviours) - 1)]
                self.connections += 1
                self._open.append(sock)
                thread = threading.Thread(target=self._serve, args=(sock, behaviour), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, sock: socket.socket, behaviour: Behaviour) -> None:
        with suppress(OSError):
            behaviour(Conversation(sock, self.served))
        # shutdown: the reader's file object keeps the descriptor open.
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()

    def wait_closed(self) -> None:
        """Wait until every behaviour so far is over."""
        for thread in list(self._threads):
            thread.join(PATIENCE_S)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._open:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_S)
        self.wait_closed()


Start = Callable[..., tuple[Server, Transport]]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[Server] = []
    with short_directory() as directory:

        def start(*behaviours: Behaviour, timeout_s: float = PATIENCE_S) -> tuple[Server, Transport]:
            server = Server(directory / f"s{len(servers)}", list(behaviours))
            servers.append(server)
            return server, Transport(server.url, "default", timeout_s)

        yield start
        for server in servers:
            server.close()


def polite(talk: Conversation) -> None:
    while talk.request():
        talk.answer(msgpack.packb({"ok": True}))


def answer_once_then_hang_up(talk: Conversation) -> None:
    talk.request()
    talk.answer(msgpack.packb({"ok": True}))


def answer_once_then_hang_up_on_the_next(talk: Conversation) -> None:
    answer_once_then_hang_up(talk)
    talk.request()


def hang_up_on_the_first(talk: Conversation) -> None:
    talk.request()


def test_a_connection_is_kept(start: Start) -> None:
    server, transport = start(polite)
    for _ in range(5):
        assert transport.call("GET", "/x") == {"ok": True}
    assert server.connections == 1


@pytest.mark.parametrize("once", [False, True])
def test_a_connection_the_server_has_closed_is_not_used_again(start: Start, once: bool) -> None:
    server, transport = start(answer_once_then_hang_up, polite)
    transport.call("POST", "/one")
    server.wait_closed()
    assert transport.call("POST", "/two", once=once) == {"ok": True}
    assert server.served == ["POST /one", "POST /two"]


def test_what_may_be_done_twice_is_sent_again(start: Start) -> None:
    server, transport = start(answer_once_then_hang_up_on_the_next, polite)
    transport.call("POST", "/one")
    assert transport.call("POST", "/two") == {"ok": True}
    assert server.served == ["POST /one", "POST /two", "POST /two"]


def test_what_must_not_be_done_twice_is_not(start: Start) -> None:
    server, transport = start(answer_once_then_hang_up_on_the_next, polite)
    transport.call("POST", "/one")
    with pytest.raises(Unavailable):
        transport.call("POST", "/two", once=True)
    assert server.served == ["POST /one", "POST /two"]


def test_a_new_connection_that_breaks_is_not_tried_again(start: Start) -> None:
    server, transport = start(hang_up_on_the_first)
    with pytest.raises(Unavailable):
        transport.call("GET", "/x")
    assert server.served == ["GET /x"]


def test_old_connections_are_left_to_the_server(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_IDLE_S", 0.0)
    server, transport = start(polite)
    for _ in range(3):
        transport.call("GET", "/x")
    assert server.connections == 3


def test_an_answer_cut_short(start: Start) -> None:
    def cut(talk: Conversation) -> None:
        talk.request()
        talk.answer(msgpack.packb({"ok": True})[:2], announce=5)

    server, transport = start(cut, polite)
    with pytest.raises(Unavailable):
        transport.call("GET", "/x")
    assert transport.call("GET", "/x") == {"ok": True}
    assert server.connections == 2


def test_a_head_cut_short(start: Start) -> None:
    def cut(talk: Conversation) -> None:
        talk.request()
        talk.sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Le")

    _, transport = start(cut)
    with pytest.raises(Unavailable):
        transport.call("GET", "/x")


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nConte", None])
def test_a_server_that_stalls(start: Start, sent: bytes | None) -> None:
    release = threading.Event()

    def stall(talk: Conversation) -> None:
        talk.request()
        if sent is None:
            talk.answer(b"\x81", announce=5)
        else:
            talk.sock.sendall(sent)
        release.wait(PATIENCE_S)

    _, transport = start(stall, timeout_s=0.1)
    begun = time.monotonic()
    with pytest.raises(Unavailable, match="did not answer in time"):
        transport.call("GET", "/x")
    assert time.monotonic() - begun < 5, "fifty times the bound"
    release.set()


def test_a_server_that_does_not_read(start: Start) -> None:
    release = threading.Event()
    _, transport = start(lambda talk: release.wait(PATIENCE_S) and None, timeout_s=0.1)
    body = memoryview(bytes(8 << 20))
    with (
        pytest.raises(Unavailable, match="did not answer in time"),
        transport.request("POST", "/x", [body], FRAME_TYPE),
    ):
        pass
    release.set()


def test_a_full_queue_is_waited_for() -> None:
    with short_directory() as directory, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "s"))
        listener.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(str(directory / "s"))
            transport = Transport(f"unix://{directory}/s", "default", 0.1)
            with pytest.raises(Unavailable, match="did not answer in time"):
                transport.call("GET", "/x")
            patient = Transport(f"unix://{directory}/s", "default", PATIENCE_S)
            answers: list[Any] = []
            caller = threading.Thread(target=lambda: answers.append(patient.call("GET", "/x")))
            caller.start()
            accepted, _ = listener.accept()
            accepted.close()
            accepted, _ = listener.accept()
            talk = Conversation(accepted, [])
            answer_once_then_hang_up(talk)
            caller.join(PATIENCE_S)
            accepted.close()
        assert answers == [{"ok": True}]


def test_half_an_answer_read_is_not_followed_by_another(start: Start) -> None:
    def long(talk: Conversation) -> None:
        while talk.request():
            talk.answer(b"\x80" * 100_000)

    server, transport = start(long, polite)
    with transport.request("GET", "/x", [], "application/msgpack") as response:
        response.read(10)
    assert transport.call("GET", "/x") == {"ok": True}
    assert server.connections == 2


def test_a_refusal_before_the_whole_body_was_sent(start: Start) -> None:
    def refuse(talk: Conversation) -> None:
        talk.reader.readline()
        document = json.dumps(problem_from_error(BlockTooLarge("too much", remedy="less"))).encode()
        talk.answer(document, status=413, kind="application/problem+json")

    _, transport = start(refuse)
    body = memoryview(bytes(8 << 20))
    with pytest.raises(BlockTooLarge, match="too much"), transport.request("POST", "/x", [body], FRAME_TYPE):
        pass


@pytest.mark.parametrize(
    ("error", "status"),
    [(StorageFull("no room", remedy="r"), 507), (Unavailable("closing"), 503), (ChecksumMismatch("c", cause="x"), 422)],
)
def test_errors_arrive_as_what_they_were(start: Start, error: TierKVError, status: int) -> None:
    def problem(talk: Conversation) -> None:
        while talk.request():
            document = json.dumps(problem_from_error(error)).encode()
            talk.answer(document, status=status, kind="application/problem+json")

    server, transport = start(problem)
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            transport.call("GET", "/x")
        assert (type(caught.value), str(caught.value)) == (type(error), str(error))
        if isinstance(error, CorruptBlock):
            assert isinstance(caught.value, CorruptBlock)
            assert caught.value.cause == error.cause
    assert server.connections == 1, "an error answer does not cost the connection"


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"<html>hello</html>", "text/html", 200),
        (b"\xc1", "application/msgpack", 200),
        (b"\x93\x01\x02\x03", "application/msgpack", 200),
        (b"<html>no</html>", "text/html", 404),
        (b"{}", "application/problem+json", 500),
        (b"[[[", "application/problem+json", 500),
        (b'"text"', "application/problem+json", 500),
        (b'{"type": "urn:tierkv:problem:of-the-future"}', "application/problem+json", 418),
    ],
)
def test_something_else_than_a_daemon(start: Start, body: bytes, kind: str, status: int) -> None:
    def other(talk: Conversation) -> None:
        while talk.request():
            talk.answer(body, kind=kind, status=status)

    _, transport = start(other)
    with pytest.raises(TierKVError) as caught:
        transport.call("GET", "/x")
    assert type(caught.value) is (Unavailable if status == 200 else TierKVError)


def test_something_that_does_not_speak_http(start: Start) -> None:
    def other(talk: Conversation) -> None:
        talk.request()
        talk.sock.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")

    _, transport = start(other)
    with pytest.raises(Unavailable):
        transport.call("GET", "/x")


def test_an_answer_without_a_field(start: Start) -> None:
    server, _ = start(polite)
    with tierkv.connect(server.url) as cache, pytest.raises(Unavailable, match="no 'blocks'"):
        cache.lookup(tierkv.Chain("ab" * 32, ()))


def test_no_socket_is_left_open(start: Start) -> None:
    def cut(talk: Conversation) -> None:
        talk.request()
        talk.answer(b"\x81", announce=5)

    server, transport = start(cut)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(Unavailable):
            transport.call("GET", "/x")
    server.wait_closed()
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    dead = Transport("unix:///nowhere/s", "default", 1.0)
    for _ in range(20):
        with pytest.raises(Unavailable, match="nowhere"):
            dead.call("GET", "/x")
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_after_a_burst_few_connections_are_kept(start: Start) -> None:
    together = threading.Barrier(24)

    def slow(talk: Conversation) -> None:
        while talk.request():
            together.wait(PATIENCE_S)
            talk.answer(msgpack.packb({"ok": True}))

    server, transport = start(slow)
    before = len(os.listdir("/proc/self/fd"))
    threads = [threading.Thread(target=transport.call, args=("GET", "/x")) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert server.connections == 24
    kept = len(transport._idle)
    assert 0 < kept <= 16
    transport.close()
    server.wait_closed()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:80",
        "https://",
        "https://user@localhost",
        "http://",
        "http://localhost:port",
        "http://localhost:99999",
        "http://localhost/path",
        "http://[::1",
        "unix://relative/s",
        "unix:s",
        "ftp://localhost",
    ],
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(InvalidRequest, match="use unix:///path/to/socket or http://host:port"):
        tierkv.connect(url)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_timeouts_that_are_none(timeout_s: float) -> None:
    with pytest.raises(InvalidRequest, match="timeout"):
        tierkv.connect("unix:///s", timeout_s=timeout_s)


@pytest.mark.parametrize("tenant", ["", "a b", "a\r\nX: y", "\u00e9", "x" * 65])
def test_tenants_that_are_none(tenant: str) -> None:
    with pytest.raises(InvalidRequest, match="tenant"):
        tierkv.connect("unix:///s", tenant=tenant)


def test_paths_of_sockets_may_hold_what_urls_may_not() -> None:
    with pytest.raises(Unavailable, match=r"/no such/p#th\?"):
        tierkv.connect("unix:///no such/p#th?")
