"""Things that answer at a daemon's address and are none, or are one that does not work."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import msgpack

from tests.client.test_transport import Conversation, Server
from tests.service.daemon import PATIENCE_S, short_directory
from tierkv.errors import StorageFull, TierFull, TierKVError
from tierkv.wire import problem_from_error

_pace = threading.Event()
_NONSENSE = {
    "namespace": 7,
    "blocks": [["x", None, -1, "warm"]],
    "tiers": 3,
    "nodes": [{"node": 1}, 2],
    "ticket": [],
    "lease": {"a": 1},
    "segments": [{}],
    "generation": None,
    "tenant_key": 1,
    "hit_blocks": "many",
    "waited_s": None,
    "ttl_s": "long",
    "grants": [[1, 2]],
    "accepted": None,
    "removed": "x",
    "retired": [],
    "held": {},
    "nbytes": "x",
}


def silent(talk: Conversation) -> None:
    while talk.request():
        pass


def rude(talk: Conversation) -> None:
    talk.request()


def web_page(talk: Conversation) -> None:
    while talk.request():
        talk.answer(b"<html>hello</html>", kind="text/html")


def broken_proxy(talk: Conversation) -> None:
    while talk.request():
        talk.answer(b"<html>bad gateway</html>", kind="text/html", status=502)


def other_protocol(talk: Conversation) -> None:
    talk.request()
    talk.sock.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")


def nonsense(talk: Conversation) -> None:
    while talk.request():
        talk.answer(msgpack.packb(_NONSENSE))


def drop_by_drop(start: bytes) -> Callable[[Conversation], None]:
    """Begin an answer and go on with a byte every hundredth of a second, for far longer than anybody should wait."""

    def trickle(talk: Conversation) -> None:
        talk.request()
        talk.sock.sendall(start)
        for _ in range(500):
            talk.sock.sendall(b"a")
            _pace.wait(0.01)

    return trickle


def refusing(error: TierKVError) -> Callable[[Conversation], None]:
    document = json.dumps(problem_from_error(error)).encode()

    def refuse(talk: Conversation) -> None:
        while talk.request():
            talk.answer(document, status=error.status, kind="application/problem+json")

    return refuse


IMPOSTORS: dict[str, Callable[[Conversation], None]] = {
    "silent": silent,
    "rude": rude,
    "web page": web_page,
    "broken proxy": broken_proxy,
    "other protocol": other_protocol,
    "nonsense": nonsense,
    "slow head": drop_by_drop(b"HTTP/1.1 200 OK\r\nX-A: "),
    "slow body": drop_by_drop(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/msgpack\r\nContent-Length: 100000\r\n\r\n\x81"
    ),
    "slow problem": drop_by_drop(b"HTTP/1.1 500 X\r\nContent-Type: text/html\r\nContent-Length: 100000\r\n\r\n"),
    "disk full": refusing(StorageFull("no space where a block should go")),
    "everything leased": refusing(TierFull("every slot is leased")),
}


@contextmanager
def at_an_address(name: str) -> Iterator[str]:
    """Run something; yield the URL it is found at."""
    with short_directory() as directory, ExitStack() as stack:
        path = directory / "s"
        if name in IMPOSTORS:
            server = Server(path, [IMPOSTORS[name]])
            stack.callback(server.close)
        elif name == "full queue":
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(path))
            listener.listen(0)
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(path))
        elif name == "full TCP queue":
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(listener.getsockname())
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            return
        elif name == "dead socket":
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(path))
        else:
            assert name == "nothing"
        yield f"unix://{path}"


OTHERS = ("full queue", "full TCP queue", "dead socket", "nothing")


class SlowLink:
    """Forwards connections to a TCP port; an answer's bytes beyond `quick` come one every hundredth of a second."""

    def __init__(self, port: int, quick: int) -> None:
        self._target = port
        self._quick = quick
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        for sock in list(self._open):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for sock in self._open:
            sock.close()

    def _start(self, work: Callable[..., None], *args: socket.socket) -> None:
        def run() -> None:
            with suppress(OSError):
                work(*args)

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(("127.0.0.1", self._target))
            self._open += [near, far]
            self._start(self._forth, near, far)
            self._start(self._back, far, near)

    def _forth(self, near: socket.socket, far: socket.socket) -> None:
        while data := near.recv(1 << 16):
            far.sendall(data)
        far.shutdown(socket.SHUT_RDWR)

    def _back(self, far: socket.socket, near: socket.socket) -> None:
        quick = self._quick
        while data := far.recv(1 << 16):
            near.sendall(data[:quick])
            for byte in data[quick:]:
                near.sendall(bytes([byte]))
                _pace.wait(0.01)
            quick = max(0, quick - len(data))
